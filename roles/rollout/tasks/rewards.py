"""Reward functions for any data with an ``answer`` column, and how the one in the settings is found."""

import logging
from typing import Any

from mesh.config import Task as TaskSettings
from roles.rollout.tasks import reasoning_gym, sort
from roles.rollout.tasks.base import Reward, import_function, nearest, plain


def load_reward(settings: TaskSettings) -> Reward:
    """The reward function of ``task.reward`` (empty: the data's own). It takes completions as texts.

    Raises ValueError naming the setting. Called in the reward's process: it may import what the user wrote."""
    name = settings.reward
    if ":" in name:
        return _for_chats(import_function(name, "task.reward"))
    if name == "exact" or (not name and settings.data.endswith(".jsonl")):
        return exact
    if name == "math":
        return math
    if name:
        raise ValueError(
            f'task.reward = "{name}" is unknown{nearest(name, ["exact", "math"])} or give package.module:function'
        )
    return (reasoning_gym if settings.data.startswith(reasoning_gym.PREFIX) else sort).reward(settings)


def exact(prompts, completions, answer, **_) -> list[float]:
    """1 where the completion is the answer, but for space around them."""
    return [float(plain(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def math(prompts, completions, answer, **_) -> list[float | Exception]:
    """1 where the last mathematical expression of the completion equals the answer (package math-verify)."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs that we do without
    return [_same_value(plain(c), str(a)) for c, a in zip(completions, answer, strict=True)]


def _same_value(completion: str, answer: str) -> float | Exception:
    from math_verify import parse, verify

    gold = answer if any(sign in answer for sign in "$\\") else f"${answer}$"
    try:
        # no time-outs of its own, which need SIGALRM: this process is killed when it takes too long
        wanted = parse(gold, parsing_timeout=None)
        if not wanted:
            return ValueError(f"math-verify finds no expression in the answer {answer[:80]!r}")
        return float(verify(wanted, parse(completion, parsing_timeout=None), timeout_seconds=None))
    except Exception as e:  # of this completion alone: the others of the group keep their rewards
        return e


def _for_chats(function: Reward) -> Reward:
    """A user's function gets completions in the form of its prompts, as TRL's reward functions do: chats for chats."""

    def reward(prompts, completions, **columns: Any) -> list[float | None]:
        shaped = [
            c if isinstance(p, str) else [{"role": "assistant", "content": c}]
            for p, c in zip(prompts, completions, strict=True)
        ]
        return function(prompts=prompts, completions=shaped, **columns)

    reward.__name__ = getattr(function, "__name__", type(function).__name__)
    return reward
