"""The rival of the mesh: the same learning in one process, one thing after the other.

The project's own decode, policy, mask and loss on one model that samples and learns by turns. No second process, no
socket, no copy of the weights, no proof, no ledger, no figures: whatever the mesh adds must earn its keep against this.

    python benchmarks/parts/plain_loop.py configs/quickstart.toml --threads 1 --set run.steps=60
"""

import argparse
import bisect
import json
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mesh import config as settings
from mesh.version import Ballot, Lineage, Version
from roles.rollout.engines.base import Pending, Request, Sampled
from roles.rollout.engines.decode import Batch
from roles.rollout.tasks import load_reward, load_task
from roles.rollout.tasks.base import Prompt, encode
from roles.trainer.batch import Sample, samples_of
from roles.trainer.dataset import permutation
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import load_policy
from transport.messages import Completion, Group, Segment

TERM = Ballot(1, "plain")
VERSION, LINEAGE = Version(TERM, 0), Lineage().open(TERM, 0)


class PlainLoop:
    """Synchronous training: every sample comes from the weights that learn from it."""

    def __init__(self, config: settings.Config) -> None:
        self.config = config
        self.policy = load_policy(config)
        self.task = load_task(config.task)
        self.reward = load_reward(config.task)
        self.threshold = DriftThreshold(config.trainer.negative_max_drift)
        self.random = random.Random(config.run.seed)
        # as a mesh deals them
        self.order = permutation(len(self.task.train), config.run.seed, 0)[::-1].tolist()
        self.delay: Callable[[Prompt, int], float] | None = None  # seconds that completion i of a prompt waits first
        self.idle_s = 0.0  # nothing to sample yet: all waited
        self.rewards: list[float] = []  # the mean of each step
        with torch.inference_mode():
            self.batch = Batch(self.policy.model, [self.policy.tokenizer.eos_token_id])

    def step(self) -> tuple[float, float]:
        """One optimizer step on one batch of fresh samples; the seconds it sampled and the seconds it learned."""
        began = time.perf_counter()
        samples = self.samples(self.groups(VERSION), VERSION)
        self.rewards.append(float(np.mean([s.reward for s in samples])))
        sampled = time.perf_counter()
        scores = self.policy.accumulate(samples, self.threshold)
        assert scores is not None  # nobody gives up here
        self.policy.step(scores.tokens)
        return sampled - began, time.perf_counter() - sampled

    def samples(self, groups: Sequence[Group], version: Version) -> list[Sample]:
        """What these groups teach at ``version``."""
        return samples_of(groups, LINEAGE, version.number, divide_by_std=self.config.trainer.divide_by_std)

    def groups(self, version: Version) -> list[Group]:
        """A batch of groups from the policy as it is, which is ``version``."""
        t = self.config.trainer
        prompts = [self.task.train[self.order.pop()] for _ in range(t.groups_per_step)]
        sampled = self.sample(prompts, t.group_size, version)
        return [self.score(prompt, *group, version) for prompt, group in zip(prompts, sampled, strict=True)]

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Prompt], size: int, version: Version = VERSION
    ) -> list[tuple[np.ndarray, list[Sampled]]]:
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
        due = [0.0] * len(waiting)
        if self.delay is not None:
            delays = [self.delay(prompt, i) for prompt in prompts for i in range(size)]
            waiting = [p for _, p in sorted(zip(delays, waiting, strict=True), key=lambda pair: pair[0])]
            due = [time.perf_counter() + seconds for seconds in sorted(delays)]
        done: list[Sampled | None] = [None] * len(waiting)
        while waiting or len(self.batch):
            room = rollout.max_batch - len(self.batch)
            ready = min(room, bisect.bisect_right(due, time.perf_counter()))
            if ready:
                self.batch.admit(waiting[:ready], version)
                waiting, due = waiting[ready:], due[ready:]
            elif not len(self.batch):
                pause = max(0.0, due[0] - time.perf_counter())
                self.idle_s += pause
                time.sleep(pause)
                continue
            for pending, sampled in self.batch.step():
                assert isinstance(sampled, Sampled), sampled
                done[order[id(pending)]] = sampled
        return [(ids, done[g * size : (g + 1) * size]) for g, ids in enumerate(tokens)]  # type: ignore[misc]

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """The share of right answers, one sampled for each prompt."""
        groups = [self.score(p, *group, VERSION) for p, group in zip(prompts, self.sample(prompts, 1), strict=True)]
        return float(np.mean([c.reward == 1.0 for group in groups for c in group.completions]))

    def score(self, prompt: Prompt, tokens: np.ndarray, sampled: list[Sampled], version: Version) -> Group:
        texts = self.policy.tokenizer.batch_decode([s.tokens for s in sampled], skip_special_tokens=True)
        columns = {name: [value] * len(texts) for name, value in prompt.columns.items()}
        rewards = self.reward(prompts=[prompt.content] * len(texts), completions=texts, **columns)
        given = Segment(tokens=tokens, sampled=False, logprobs=np.empty(0, np.float32))
        completions = [
            Completion(segments=[given, s.segment()], reward=reward, finish=s.finish)
            for s, reward in zip(sampled, rewards, strict=True)
        ]
        return Group(completions, started=version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--evaluate", action="store_true", help="accuracy on the held-out prompts, after the last step")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loop = PlainLoop(settings.load(arguments.config, arguments.set))
    if loop.config.task.rollout:
        from parts.waiting import delay  # the only rollout of its own that a plain loop knows

        loop.delay = delay
    times, idle = [], [0.0]
    for _ in range(loop.config.run.steps):
        times.append(loop.step())
        idle.append(loop.idle_s)
    report = {
        "sample_s": [a for a, _ in times],
        "idle_s": np.diff(idle).tolist(),  # of the seconds it sampled
        "learn_s": [b for _, b in times],
        "reward": loop.rewards,
    }
    if arguments.evaluate:
        loop.delay = None
        report["accuracy_after"] = loop.accuracy(loop.task.heldout)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
