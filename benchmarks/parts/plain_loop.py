"""The rival of the mesh: the same learning in one process, one thing after the other.

The project's own decode, policy, mask and loss on one model that samples and learns by turns. No second process, no
socket, no copy of the weights, no proof, no ledger, no figures: whatever the mesh adds must earn its keep against this.

    python benchmarks/parts/plain_loop.py configs/quickstart.toml --threads 1 --set run.steps=60
"""

import argparse
import json
import random
import sys
import time

import numpy as np
import torch

from mesh import config as settings
from mesh.version import Ballot, Version
from roles.rollout.engines.base import Pending, Request, Sampled
from roles.rollout.engines.decode import Batch
from roles.rollout.tasks import load_reward, load_task
from roles.rollout.tasks.base import Prompt, encode
from roles.trainer.advantages import group_advantages
from roles.trainer.batch import Sample
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import load_policy

VERSION = Version(Ballot(1, "plain"), 0)


class PlainLoop:
    """Synchronous training: every sample comes from the weights that learn from it."""

    def __init__(self, config: settings.Config) -> None:
        self.config = config
        self.policy = load_policy(config)
        self.task = load_task(config.task)
        self.reward = load_reward(config.task)
        self.threshold = DriftThreshold(config.trainer.negative_max_drift)
        self.random = random.Random(config.run.seed)
        self.order = self.random.sample(range(len(self.task.train)), len(self.task.train))
        with torch.inference_mode():
            self.batch = Batch(self.policy.model, [self.policy.tokenizer.eos_token_id])

    def step(self) -> tuple[float, float]:
        """One optimizer step on one batch of fresh samples; the seconds it sampled and the seconds it learned."""
        began = time.perf_counter()
        t = self.config.trainer
        prompts = [self.task.train[self.order.pop()] for _ in range(t.groups_per_step)]
        groups = self.sample(prompts, t.group_size)
        samples = [s for g, prompt in enumerate(prompts) for s in self.score(g, prompt, *groups[g])]
        sampled = time.perf_counter()
        scores = self.policy.accumulate(samples, self.threshold)
        self.policy.step(scores.tokens)
        return sampled - began, time.perf_counter() - sampled

    @torch.inference_mode()
    def sample(self, prompts: list[Prompt], size: int) -> list[tuple[np.ndarray, list[Sampled]]]:
        """For each prompt its tokens and ``size`` completions, decoded in batches of at most ``rollout.max_batch``."""
        rollout = self.config.rollout
        tokens = [encode(p.content, self.policy.tokenizer) for p in prompts]
        waiting = [
            Pending(
                Request(
                    prompt=ids,
                    max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    seed=self.random.getrandbits(64),
                ),
                future=None,  # type: ignore[arg-type]
                loop=None,  # type: ignore[arg-type]
            )
            for ids in tokens
            for _ in range(size)
        ]
        order = {id(p): i for i, p in enumerate(waiting)}
        done: list[Sampled | None] = [None] * len(waiting)
        while waiting or len(self.batch):
            room = rollout.max_batch - len(self.batch)
            if waiting and room:
                self.batch.admit(waiting[:room], VERSION)
                waiting = waiting[room:]
            for pending, sampled in self.batch.step():
                assert isinstance(sampled, Sampled), sampled
                done[order[id(pending)]] = sampled
        return [(ids, done[g * size : (g + 1) * size]) for g, ids in enumerate(tokens)]  # type: ignore[misc]

    def score(self, group: int, prompt: Prompt, tokens: np.ndarray, sampled: list[Sampled]) -> list[Sample]:
        texts = self.policy.tokenizer.batch_decode([s.tokens for s in sampled], skip_special_tokens=True)
        columns = {name: [value] * len(texts) for name, value in prompt.columns.items()}
        rewards = self.reward(prompts=[prompt.content] * len(texts), completions=texts, **columns)
        advantages = group_advantages(rewards, divide_by_std=self.config.trainer.divide_by_std)
        return [
            Sample(
                tokens=np.concatenate([tokens, s.tokens]),
                sampled=np.arange(len(tokens) + len(s.tokens)) >= len(tokens),
                recorded=s.logprobs,
                token_lags=np.zeros(len(s.tokens), np.int32),
                reward=float(reward),  # type: ignore[arg-type]
                advantage=float(advantage),
                lag=0,
                group=group,
                finish=s.finish,
                metrics={},
            )
            for s, reward, advantage in zip(sampled, rewards, advantages, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loop = PlainLoop(settings.load(arguments.config, arguments.set))
    times = []
    for _ in range(loop.config.run.steps):
        times.append(loop.step())
    json.dump({"sample_s": [a for a, _ in times], "learn_s": [b for _, b in times]}, sys.stdout)


if __name__ == "__main__":
    main()
