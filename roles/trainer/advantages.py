"""Group-relative advantages: how much better a completion is than the others of its prompt."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6
"""Added to the standard deviation, and the spread below which rewards of a group count as equal."""


def group_advantages(rewards: Sequence[float | None], *, divide_by_std: bool = False) -> np.ndarray:
    """A_i = r_i - mean_j r_j, over the completions j of the group that have a finite reward; float64 of shape (G,).

    With ``divide_by_std``: A_i = (r_i - mean) / (std + 1e-6), std over the same completions with denominator n (the
    form of GRPO, arXiv 2402.03300; without it arXiv 2503.20783). NaN where a completion has no finite reward: it is no
    sample, takes no part in the mean, and must get no gradient. All zeros where the rewards do not differ. A completion
    with a negative advantage is called a failure, one with a positive advantage a success.

    Raises ValueError for a reward that is not a number, naming its index."""
    r = np.array([_number(x, i) for i, x in enumerate(rewards)], dtype=np.float64)
    finite = np.isfinite(r)
    advantages = np.full(r.shape, np.nan)
    if not finite.any():
        return advantages
    kept = r[finite]
    if np.ptp(kept) <= EPSILON:
        advantages[finite] = 0.0  # exactly: a mean of equal numbers can miss them by rounding
        return advantages
    centred = kept - kept.mean()
    advantages[finite] = centred / (kept.std() + EPSILON) if divide_by_std else centred
    return advantages


def _number(value: object, index: int) -> float:
    if value is None:
        return np.nan
    if isinstance(value, int | float | np.number | np.bool_):
        return float(value)
    raise ValueError(f"reward {index} of a group is {value!r} ({type(value).__name__}); it must be a number or None")
