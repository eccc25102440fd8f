"""TRL's GRPOTrainer on a task of the project: the same model, prompts in the same order, rewards and settings.

Run by the Python of TRL's own environment, with the project on the path; prints what ``plain_loop.py`` prints.

    python benchmarks/parts/trl_loop.py configs/quickstart.toml --threads 2 --micro-batch 256 --set run.steps=20
    python benchmarks/parts/trl_loop.py configs/quickstart.toml --asynchronous      does its asynchronous trainer run?
"""

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mesh import config as settings
from roles.models import load_model, load_tokenizer
from roles.rollout.tasks import load_reward, load_task
from roles.starter import resolve
from roles.trainer.dataset import permutation


class Clock(transformers.TrainerCallback):
    """When training began, and each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.times:
            self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


class Loop:
    def __init__(self, config: settings.Config) -> None:
        self.config = config
        path = resolve(config.model.path, config.run.seed)
        self.model, self.tokenizer = load_model(path, config.model), load_tokenizer(path, config.model)
        self.task, self.reward = load_task(config.task), load_reward(config.task)
        self.rewards: list[float] = []

    def dataset(self) -> Dataset:
        t = self.config.trainer
        order = permutation(len(self.task.train), self.config.run.seed, 0)[: self.config.run.steps * t.groups_per_step]
        prompts = [self.task.train[int(i)] for i in order]
        return Dataset.from_list([{"prompt": p.content, **p.columns} for p in prompts])

    def judge(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rewards = self.reward(prompts=prompts, completions=completions, **columns)
        self.rewards += rewards
        return rewards

    def arguments(self, directory: str, micro_batch: int) -> GRPOConfig:
        """The project's settings in TRL's words. With one optimizer step a batch its clip never holds."""
        t, r = self.config.trainer, self.config.rollout
        batch = t.group_size * t.groups_per_step
        return GRPOConfig(
            output_dir=directory,
            max_steps=self.config.run.steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            num_generations=t.group_size,
            max_completion_length=r.max_new_tokens,
            temperature=r.temperature,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="bnpo",  # the sum over tokens, divided by their number in the batch
            scale_rewards="none",
            learning_rate=t.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=t.warmup_steps,
            weight_decay=t.weight_decay,
            adam_beta1=t.adam_beta1,
            adam_beta2=t.adam_beta2,
            max_grad_norm=t.max_grad_norm,
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            seed=self.config.run.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )

    def train(self, micro_batch: int) -> dict[str, list[float]]:
        clock, dataset = Clock(), self.dataset()
        with tempfile.TemporaryDirectory() as directory:
            trainer = GRPOTrainer(self.model, self.judge, self.arguments(directory, micro_batch), dataset,
                                  processing_class=self.tokenizer, callbacks=[clock])  # fmt: skip
            trainer.train()
        t = self.config.trainer
        batch = t.group_size * t.groups_per_step
        assert len(self.rewards) == batch * self.config.run.steps, len(self.rewards)
        means = [sum(self.rewards[i : i + batch]) / batch for i in range(0, len(self.rewards), batch)]
        steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        return {"step_s": steps, "reward": means}

    @torch.inference_mode()
    def accuracy(self) -> float:
        """The share of right answers, one sampled for each held-out prompt."""
        prompts, r = list(self.task.heldout), self.config.rollout
        given = self.tokenizer([p.content for p in prompts], return_tensors="pt", padding=True, padding_side="left")
        ids = self.model.eval().generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=r.max_new_tokens,
            do_sample=True,
            temperature=r.temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        texts = self.tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
        rewards = self.reward(prompts=[p.content for p in prompts], completions=texts, **columns)
        return sum(reward == 1.0 for reward in rewards) / len(rewards)

    def asynchronous(self) -> str:
        """How far TRL's asynchronous trainer comes here: the first line of what it says, or nothing."""
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        self.config.run.steps = 1
        with tempfile.TemporaryDirectory() as directory:
            try:
                arguments = AsyncGRPOConfig(output_dir=directory, max_steps=1, use_cpu=True, bf16=False,
                                            report_to="none")  # fmt: skip
                trainer = AsyncGRPOTrainer(self.model.config._name_or_path, self.judge, arguments, self.dataset(),
                                           processing_class=self.tokenizer)  # fmt: skip
                trainer.train()
            except Exception as e:  # whatever keeps it from running is the answer
                return f"{type(e).__name__}: {e}".splitlines()[0]
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--evaluate", action="store_true", help="accuracy on the held-out prompts, after the last step")
    parser.add_argument("--asynchronous", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    loop = Loop(settings.load(arguments.config, arguments.set))
    if arguments.asynchronous:
        report: dict[str, Any] = {"asynchronous": loop.asynchronous()}
    else:
        report = loop.train(arguments.micro_batch)
        if arguments.evaluate:
            report["accuracy_after"] = loop.accuracy()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
