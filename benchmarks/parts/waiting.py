"""A task whose completions wait: for a tool, or an environment, before the policy answers.

The wait is drawn from a lognormal distribution with a median of ``MEDIAN_S`` and ``SIGMA`` = 1: one in a hundred is ten
times the median, and the longest of a batch of 256 about sixteen times. It depends on the prompt and the place in its
group alone, so that all who sample these prompts wait alike.
"""

import asyncio
import math
import random
import statistics

from roles.rollout.tasks.base import Prompt, Sampler, Transcript

NAME = "parts.waiting:rollout"  # for task.rollout
MEDIAN_S, SIGMA = 0.05, 1.0


def delay(prompt: Prompt, index: int) -> float:
    return MEDIAN_S * math.exp(SIGMA * random.Random(f"wait {prompt.index} {index}").gauss(0.0, 1.0))


async def rollout(prompt: Prompt, sample: Sampler) -> Transcript:
    await asyncio.sleep(delay(prompt, sample.index))
    talk = Transcript(prompt, sample)
    await talk.sample()
    return talk


def longest(completions: int, batches: int = 400) -> float:
    """The mean over batches of the longest wait among so many completions, in seconds."""
    rng = random.Random(0)
    return statistics.fmean(
        max(MEDIAN_S * math.exp(SIGMA * rng.gauss(0.0, 1.0)) for _ in range(completions)) for _ in range(batches)
    )


def mean() -> float:
    return MEDIAN_S * math.exp(SIGMA**2 / 2)
