"""The quickstart's task: sort the digits of a number, ``52814=`` -> ``12458``, exact match.

``task.options.length``: how many digits, 5 by default (100,000 prompts). Prompts are distinct.
"""

import random

from mesh.config import Task as TaskSettings
from roles.rollout.tasks.base import Prompt, Prompts, Reward, Task, check_options, digest, plain, single_turn


def make(settings: TaskSettings) -> Task:
    check_options(settings, ["length"])
    length = settings.options.get("length", 5)
    if not isinstance(length, int) or not 1 <= length <= 18:
        raise ValueError(f"task.options.length = {length!r} must be a whole number of digits, 1 to 18")
    total = 10**length
    if settings.heldout_prompts >= total:
        raise ValueError(
            f"task.heldout_prompts = {settings.heldout_prompts} leaves nothing to train on: there are {total} numbers "
            f"of task.options.length = {length} digits"
        )
    heldout = random.Random(f"{settings.seed} held out").sample(range(total), settings.heldout_prompts)
    apart = set(heldout)
    wanted = min(total, settings.train_prompts + len(heldout))
    train = [n for n in random.Random(f"{settings.seed} train").sample(range(total), wanted) if n not in apart]
    train = train[: settings.train_prompts]

    def prompts(numbers: list[int]) -> Prompts:
        return Prompts(len(numbers), lambda i: _prompt(i, f"{numbers[i]:0{length}d}"))

    return Task(
        name="sort",
        settings=settings,
        train=prompts(train),
        heldout=prompts(heldout),
        digest=digest("sort", str(length), repr(heldout), repr(train)),
        rollout=single_turn,
    )


def _prompt(index: int, digits: str) -> Prompt:
    return Prompt(index, f"{digits}=", {"answer": "".join(sorted(digits))})


def reward(settings: TaskSettings) -> Reward:
    def sorted_exactly(prompts, completions, answer, **_):
        return [float(plain(c).strip() == a) for c, a in zip(completions, answer, strict=True)]

    return sorted_exactly
