"""Rewards that benchmarks train the quickstart's model with: other tasks for the same prompts (``52814=``)."""

from collections import Counter

from roles.rollout.tasks.base import plain


def graded(prompts, completions, answer, **_) -> list[float]:
    """Sorted digits, with a part for each of them that stands in its place: 1 only for the whole."""
    return [share(plain(c).strip(), a) for c, a in zip(completions, answer, strict=True)]


def share(said: str, answer: str) -> float:
    return sum(x == y for x, y in zip(said, answer, strict=False)) / max(len(said), len(answer))


def smallest_first(prompts, completions, answer, **_) -> list[float]:
    """Any order of the digits that begins with the smallest: 24 right answers where the five digits differ."""
    said = [plain(c).strip() for c in completions]
    return [float(Counter(s) == Counter(a) and s[:1] == a[:1]) for s, a in zip(said, answer, strict=True)]


def half(prompts, completions, answer, **_) -> list[float]:
    """Of what is sampled about every second, whatever the model: each step has a gradient."""
    return [float(sum(plain(c).encode()) % 2) for c in completions]
