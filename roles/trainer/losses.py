"""The loss: policy gradient over tokens, with a mask on failures that newer weights already avoid. No ratio anywhere.

    L = - 1/N  sum_i sum_t  m_i,t  A_i  log pi(y_i,t | y_i,<t)

* pi is softmax(logits / temperature), the distribution the rollout sampled from, under the trainer's current weights.
* N counts every sampled token of the batch, over all trainers: also those of masked completions and of groups whose
  rewards do not differ. (A completion without a reward is no sample and is not counted.) So masking removes gradient
  and does not turn up the rest.
* m_i,t is 0 on given tokens (prompt, tool results), 1 on sampled ones, and 0 for the whole completion where the rule
  below drops it.
* A_i is the group-relative advantage (``advantages.py``).

The gradient is taken as if samples were fresh: nothing multiplies it. What makes that safe with old samples is the
mask. With ``drift_i = mean_t (recorded log-probability - current log-probability)``, over the completion's sampled
tokens, a *failure* (A_i < 0) is masked

* ``drift``: when drift_i > threshold: newer weights have already left it; pushing it down again and again destroys;
* ``age``:   when it is at all old (lag > 0);
* ``off``:   never.

The mask is decided from the very forward pass that is differentiated: with one optimizer step a batch, that pass runs
the current policy. Its threshold must lie above the noise between engine and trainer (``DriftThreshold``). The same
masking rule under the name off-policy sequence masking: DeepSeek-V3.2 (arXiv 2512.02556).
"""

import numpy as np
import torch

FLOOR = 0.02
"""Nat per token: the least drift that counts as having left a failure."""


def token_logprobs(
    logits: torch.Tensor, where: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits[where] / temperature) at ``tokens``, and the entropy of that distribution, in nat.

    ``logits`` (m, vocabulary) of any float dtype, ``where`` (n,) int64 rows of it without repeats, ``tokens`` (n,)
    int64; both results (n,) in float32 (float64 for float64 logits). Only the first is differentiable. No pass keeps a
    second (m, vocabulary) tensor beside the gradient: work goes by chunks of rows, and backward recomputes from the
    logits."""
    return _TokenLogprobs.apply(logits, where, tokens, temperature)


class _TokenLogprobs(torch.autograd.Function):
    CHUNK_BYTES = 1 << 24

    @staticmethod
    def forward(ctx, logits, where, tokens, temperature):
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(tokens), dtype=wide, device=logits.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.chunk = max(1, _TokenLogprobs.CHUNK_BYTES // (4 * logits.shape[1]))
        for a in range(0, len(tokens), ctx.chunk):
            part = slice(a, a + ctx.chunk)
            scaled = logits[where[part]].to(wide) / temperature
            normaliser[part] = torch.logsumexp(scaled, dim=1)
            log_p = scaled.sub_(normaliser[part, None])
            logprobs[part] = log_p.gather(1, tokens[part, None]).squeeze(1)
            # clamped for 0 log 0 = 0: an entry that is ruled out by -inf adds nothing
            entropy[part] = -(log_p.exp() * log_p.clamp_(min=-1e9)).sum(1)
        ctx.save_for_backward(logits, where, tokens, normaliser)
        ctx.temperature, ctx.wide = temperature, wide
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        """d log p_y / d logit_k = (1[k = y] - p_k) / temperature."""
        logits, where, tokens, normaliser = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        grad = grad / ctx.temperature
        for a in range(0, len(tokens), ctx.chunk):
            part = slice(a, a + ctx.chunk)
            p = (logits[where[part]].to(ctx.wide) / ctx.temperature).sub_(normaliser[part, None]).exp_()
            p.mul_(-grad[part, None])
            p.scatter_add_(1, tokens[part, None], grad[part, None])
            grad_logits[where[part]] = p.to(logits.dtype)
        return grad_logits, None, None, None


def mean_drift(recorded: torch.Tensor, current: torch.Tensor, owner: torch.Tensor, completions: int) -> torch.Tensor:
    """drift_i = mean over the sampled tokens of completion i of (recorded - current log-probability), in nat; (b,).

    ``recorded`` and ``current`` (n,), ``owner`` (n,) int64: the completion in [0, completions) of each token. 0 for a
    completion without tokens."""
    wide = torch.float64
    total = torch.zeros(completions, dtype=wide, device=current.device)
    total.index_add_(0, owner, recorded.to(wide) - current.detach().to(wide))
    return total / torch.bincount(owner, minlength=completions).clamp(min=1)


def failures_already_avoided(
    advantages: torch.Tensor, drift: torch.Tensor, lags: torch.Tensor, rule: str, threshold: float
) -> torch.Tensor:
    """Which completions get no gradient because newer weights avoid them already; bool of shape (b,).

    ``advantages``, ``drift`` and ``lags`` (b,); ``rule`` is ``trainer.mask_negatives``."""
    failure = advantages < 0
    if rule == "drift":
        return failure & (drift > threshold)
    if rule == "age":
        return failure & (lags > 0)
    assert rule == "off", rule
    return torch.zeros_like(failure)


def summed_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """N x L of the formula above: ``- sum w log pi`` with w = m A for each sampled token; both (n,). Division by N,
    which counts the tokens of all trainers, follows once they have been summed up (``Policy.step``)."""
    return -(weights.to(logprobs.dtype) * logprobs).sum()


class DriftThreshold:
    """The threshold of the mask: a fixed one, or ``max(0.02, 3 x mean |log-ratio| at lag 0)`` in nat per token.

    At lag 0 rollout and trainer hold the same weights, so a difference is the noise between engine and trainer, and a
    mask must not act on noise. The mean runs over the tokens of samples at lag 0 that this trainer has seen, the last
    ``memory`` of them counting most; until there is one the threshold is 0.02."""

    def __init__(self, fixed: float = 0.0, memory: float = 1e6) -> None:
        self.fixed = fixed
        self.memory = memory
        self.total = 0.0  # sum of |log-ratio|, nat
        self.tokens = 0.0

    def observe(self, log_ratios: np.ndarray) -> None:
        """``log_ratios`` (n,): recorded minus current log-probability of tokens sampled at lag 0; non-finite ones are
        left out."""
        finite = np.abs(log_ratios[np.isfinite(log_ratios)])
        if not finite.size:
            return
        if self.tokens + finite.size > self.memory:
            keep = max(0.0, self.memory - finite.size) / max(self.tokens, 1.0)
            self.total, self.tokens = self.total * keep, self.tokens * keep
        self.total += float(finite.sum(dtype=np.float64))
        self.tokens += float(finite.size)

    @property
    def value(self) -> float:
        if self.fixed > 0:
            return self.fixed
        return max(FLOOR, 3.0 * self.total / self.tokens) if self.tokens else FLOOR
