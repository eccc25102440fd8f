"""What others multiply a stale token's gradient by: the rivals of the project's mask.

The product's gradient is ``A grad log pi`` for each sampled token, over the tokens of the batch. Every correction here
multiplies it by a coefficient of the ratio ``r`` of the current policy to the one that sampled, so that all of them run
in the product's own loss, batch and step, and differ in this alone:

| name | coefficient of a token | from |
| --- | --- | --- |
| ``ppo`` | r; 0 where the clip holds: r > 1.2 of a success, r < 0.8 of a failure | arXiv 1707.06347 |
| ``tis`` | min(r, 2); CISPO and AIPO have the same form | arXiv 2506.13585, 2505.24034 |
| ``topr`` | success 1, failure min(1, ratio of the whole completion) | arXiv 2503.14286 |
| ``gspo`` | s = exp(mean of log r over the completion), clipped as ppo, by 3e-4 and 4e-4 | arXiv 2507.18071 |
| ``gspo-wide`` | the same, clipped by 0.2 | |
| ``decoupled`` | r; 0 where r > 5 | arXiv 2505.24298 |

Decoupled PPO clips against a proximal policy. With one optimizer step a batch, as here, that is the current policy,
its ratio is 1, and of the method the weight of the behaviour policy remains. GSPO averages over completions, here over
tokens like all others; with completions of one length that is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roles.trainer.batch import MicroBatch
from roles.trainer.policy import Policy

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``log_ratio`` (n,) of each token, current minus recorded; ``owner`` (n,): its completion; ``success`` (n,): whether
the advantage is positive. Returns the coefficients (n,)."""


def ppo(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    return clipped(log_ratio, success, 0.2, 0.2)


def tis(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    return log_ratio.exp().clamp(max=2.0)


def topr(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    return torch.where(success, 1.0, summed(log_ratio, owner)[owner].exp().clamp(max=1.0))


def gspo(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    return clipped(mean(log_ratio, owner)[owner], success, 3e-4, 4e-4)


def gspo_wide(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    return clipped(mean(log_ratio, owner)[owner], success, 0.2, 0.2)


def decoupled(log_ratio: Tensor, owner: Tensor, success: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    return torch.where(ratio > 5.0, 0.0, ratio)


CORRECTIONS: dict[str, Correction] = {
    "ppo": ppo,
    "tis": tis,
    "topr": topr,
    "gspo": gspo,
    "gspo-wide": gspo_wide,
    "decoupled": decoupled,
}


def clipped(log_ratio: Tensor, success: Tensor, below: float, above: float) -> Tensor:
    """The gradient of min(r A, clip(r, 1 - below, 1 + above) A) over that of A log pi."""
    ratio = log_ratio.exp()
    held = torch.where(success, ratio > 1.0 + above, ratio < 1.0 - below)
    return ratio.masked_fill(held, 0.0)


def summed(values: Tensor, owner: Tensor) -> Tensor:
    total = torch.zeros(int(owner.max()) + 1, dtype=values.dtype, device=values.device)
    return total.index_add(0, owner, values)


def mean(values: Tensor, owner: Tensor) -> Tensor:
    return summed(values, owner) / torch.bincount(owner).clamp(min=1)


@dataclass
class Corrected(Policy):
    """The product's policy whose gradients a correction multiplies, on their way from the loss to the model."""

    correction: Correction | None = None

    def _score(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        current, entropy = super()._score(batch, temperature)
        if current.requires_grad and self.correction is not None:
            log_ratio = current.detach() - torch.from_numpy(batch.recorded).to(current.device)
            owner, correction = torch.from_numpy(batch.rows).to(current.device), self.correction
            # what comes is d loss / d log pi = - A
            current.register_hook(lambda grad: grad * correction(log_ratio, owner, grad < 0))
        return current, entropy
