"""What a user needs to see to judge the learning: the figures of one step, of an evaluation, and when to warn.

Figures are a flat ``dict[str, float]``; a name is left out where there is nothing to measure. Log-ratios are recorded
minus current log-probability: of the rollout's policy over the trainer's, in nat. They are measured on samples with a
nonzero advantage, before masking; no gradient is multiplied by any of them. A step without such a sample has none, and
no exact entropy; ``entropy_sampled`` is in every step.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from roles.trainer.advantages import group_advantages
from roles.trainer.batch import Sample, reward_of
from roles.trainer.policy import Scores
from transport.messages import Group

TAIL = 1.0  # nat: a token whose probability changed by more than a factor e
RIGHT = 1.0  # a reward of at least this is a right answer, unless the verifier reports "correct" itself


def step_figures(
    samples: Sequence[Sample], scores: Scores, *, max_lag: int, superseded: Sequence[Group] = ()
) -> dict[str, float]:
    """All figures of one step of one trainer. ``superseded``: the groups dropped since the last step."""
    return {
        **reward_figures(samples, max_lag),
        **group_figures(samples),
        **length_figures(samples, superseded),
        **sampled_entropy(samples),
        **policy_figures(samples, scores),
        **teaching_figures(samples, scores, superseded),
        **token_account(samples, scores),
    }


def batch_sums(samples: Sequence[Sample], scores: Scores) -> dict[str, float]:
    """What a trainer tells the others of its batch, for them to make the step's figures of; see ``summed_figures``."""
    rewarded = [s.reward for s in samples if s.counts]
    return {
        "loss": scores.loss_sum,
        "samples": float(len(samples)),
        "unrewarded": float(len(samples) - len(rewarded)),
        "reward": float(sum(rewarded)),
        "lag_highest": float(max(s.lag for s in samples)),
    }


def summed_figures(brought: Sequence[Mapping[str, float]], tokens: int) -> dict[str, float]:
    """The figures of a step of several trainers, from each one's ``batch_sums`` and the tokens of all."""
    sums: collections.Counter[str] = collections.Counter()
    for one in brought:
        sums.update(one)
    figures = {
        "loss": sums["loss"] / max(1, tokens),
        "samples": sums["samples"],
        "unrewarded": sums["unrewarded"],
        "lag_highest": max((one.get("lag_highest", 0.0) for one in brought), default=0.0),
    }
    if rewarded := sums["samples"] - sums["unrewarded"]:
        figures["reward"] = sums["reward"] / rewarded
    return figures


def token_account(samples: Sequence[Sample], scores: Scores) -> dict[str, float]:
    """Sampled tokens of the batch by what became of them; the three parts add up to what was delivered."""
    tokens = np.array([s.sampled_tokens for s in samples], np.int64)
    counted = np.array([s.counts for s in samples], bool)
    masked = scores.masked
    return {
        "tokens_trained": float(tokens[counted & ~masked].sum()),
        "tokens_masked": float(tokens[counted & masked].sum()),
        "tokens_failed": float(tokens[~counted].sum()),
    }


def is_right(sample: Sample) -> bool:
    return sample.metrics.get("correct", sample.reward) >= RIGHT


def reward_figures(samples: Sequence[Sample], max_lag: int) -> dict[str, float]:
    """reward, reward_std, train_accuracy; lag_mean, and for each lag the share of samples and their mean reward."""
    kept = [s for s in samples if s.counts]
    out = {"unrewarded": float(len(samples) - len(kept)), "samples": float(len(samples))}
    if not kept:
        return out
    rewards, lags = np.array([s.reward for s in kept]), np.array([s.lag for s in kept])
    out |= {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "train_accuracy": float(np.mean([is_right(s) for s in kept])),
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
    }
    for lag in range(max_lag + 1):
        out[f"lag_{lag}"] = float(np.mean(lags == lag))
        if (lags == lag).any():
            out[f"reward_lag_{lag}"] = float(rewards[lags == lag].mean())
    token_lags = np.concatenate([s.token_lags for s in kept])
    return out | ({"token_lag_mean": float(token_lags.mean())} if token_lags.size else {})


def group_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """groups; zero_variance_share (rewards all alike: no gradient); distinct_correct: how many different right answers
    a group has, over the groups that have any."""
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    if not groups:
        return {"groups": 0.0}
    flat = [all(s.advantage == 0.0 or not s.counts for s in members) for members in groups.values()]
    distinct = [len({s.tokens[s.sampled].tobytes() for s in m if s.counts and is_right(s)}) for m in groups.values()]
    out = {"groups": float(len(groups)), "zero_variance_share": float(np.mean(flat))}
    right = [d for d in distinct if d]
    return out | ({"distinct_correct": float(np.mean(right))} if right else {})


def length_figures(samples: Sequence[Sample], superseded: Sequence[Group]) -> dict[str, float]:
    """Mean sampled tokens of a completion: kept in the batch, and generated (with what was superseded). The first below
    the second: dropping by age favours short answers. truncated_share: cut by the token limit; empty: no token."""
    kept = np.array([s.sampled_tokens for s in samples], np.float64)
    late = [sum(len(x.tokens) for x in c.segments if x.sampled) for g in superseded for c in g.completions]
    out = {"superseded_groups": float(len(superseded)), "superseded_tokens": float(sum(late))}
    if kept.size:
        out |= {
            "length_kept": float(kept.mean()),
            "length_generated": float(np.concatenate([kept, late]).mean()),
            "length_longest": float(kept.max()),
            "truncated_share": float(np.mean([s.cut for s in samples])),
            "empty_completions": float(np.sum(kept == 0)),
        }
    return out


def sampled_entropy(samples: Sequence[Sample]) -> dict[str, float]:
    """``entropy_sampled``: the mean of - log pi over all sampled tokens, as recorded when they were sampled. It is an
    unbiased estimate of the entropy of the policies that sampled them, and needs no forward pass."""
    recorded = np.concatenate([np.empty(0, np.float32), *(s.recorded for s in samples)])
    return {"entropy_sampled": float(-recorded.mean(dtype=np.float64))} if recorded.size else {}


def policy_figures(samples: Sequence[Sample], scores: Scores) -> dict[str, float]:
    """Entropy and log-ratio, over the samples that were scored.

    ``entropy`` is the exact mean over tokens. Effective sample size, as a share of the sample: (sum w)^2 / (n sum w^2)
    with w = pi / recorded; over tokens, and over completions with w the product over their tokens. 1 is on-policy; it
    is what importance weights would leave of the batch.
    ``not_finite``: completions whose log-probabilities are not, left out here."""
    forwarded = [i for i, c in enumerate(scores.current) if c is not None]
    scored = [i for i in forwarded if np.isfinite(scores.current[i]).all()]
    if len(scored) < len(forwarded):
        return {"not_finite": float(len(forwarded) - len(scored))} | _policy_figures(samples, scores, scored)
    return _policy_figures(samples, scores, scored)


def _policy_figures(samples: Sequence[Sample], scores: Scores, scored: list[int]) -> dict[str, float]:
    if not scored:
        return {}
    ratios = [samples[i].recorded.astype(np.float64) - scores.current[i] for i in scored]
    tokens = np.concatenate(ratios)
    size = np.abs(tokens)
    out = {
        "entropy": float(np.concatenate([scores.entropy[i] for i in scored]).mean(dtype=np.float64)),
        "log_ratio_mean": float(tokens.mean()),
        "log_ratio_abs": float(size.mean()),
        "log_ratio_p99": float(np.quantile(size, 0.99)),
        "log_ratio_largest": float(size.max()),
        "log_ratio_tail_share": float(np.mean(size > TAIL)),
        "ess_token": effective_share(-tokens),
        "ess_sequence": effective_share(np.array([-r.sum() for r in ratios])),
        "drift_threshold": scores.threshold,
        "micro_batches": float(scores.micro_batches),
        "padding_share": 1.0 - sum(len(samples[i].tokens) for i in scored) / scores.padded_tokens,
    }
    fresh = [r for i, r in zip(scored, ratios, strict=True) if samples[i].lag == 0]
    if fresh:
        out["log_ratio_abs_lag_0"] = float(np.abs(np.concatenate(fresh)).mean())
    return out


def effective_share(log_weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log_weights), in [1/n, 1] (Kong 1992), without overflow."""
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (w.size * np.square(w).sum()))


def teaching_figures(samples: Sequence[Sample], scores: Scores, superseded: Sequence[Group]) -> dict[str, float]:
    """What became of successes and failures, each as a share of all that arrived (batch and superseded):
    ``success_trained``, ``failure_masked``... And negative_mass: |A| summed over the tokens of trained failures, over
    the same of trained successes. Near 1 when nothing is masked and lengths are alike; near 0 only successes teach."""
    advantages = np.array([s.advantage for s in samples])
    mass = np.abs(advantages) * np.array([s.sampled_tokens for s in samples])
    masked = scores.masked
    late = [group_advantages([reward_of(c) for c in g.completions]) for g in superseded]
    late_advantages = np.concatenate([np.empty(0), *late])
    out = {"masked_avoided": float(scores.avoided.sum()), "masked_truncated": float(scores.cut.sum())}
    with np.errstate(invalid="ignore"):
        sides = {
            "success": (advantages > 0, late_advantages > 0),
            "failure": (advantages < 0, late_advantages < 0),
        }
    for name, (here, gone) in sides.items():
        if total := here.sum() + gone.sum():
            out[f"{name}_trained"] = float((here & ~masked).sum() / total)
            out[f"{name}_masked"] = float((here & masked).sum() / total)
            out[f"{name}_superseded"] = float(gone.sum() / total)
    positive = mass[sides["success"][0] & ~masked].sum()
    if positive > 0:
        out["negative_mass"] = float(mass[sides["failure"][0] & ~masked].sum() / positive)
    return out


def evaluation_figures(right: int, samples: int) -> dict[str, float]:
    """Accuracy with its 95% Wilson score interval (Wilson 1927), and the number of samples behind it. Without a sample
    there is no accuracy."""
    if samples == 0:
        return {"eval_samples": 0.0}
    z, p = 1.959964, right / samples
    centre = (p + z**2 / (2 * samples)) / (1 + z**2 / samples)
    half = z / (1 + z**2 / samples) * np.sqrt(p * (1 - p) / samples + z**2 / (4 * samples**2))
    return {
        "eval_accuracy": p,
        "eval_low": float(max(0.0, min(p, centre - half))),
        "eval_high": float(min(1.0, max(p, centre + half))),
        "eval_samples": float(samples),
    }


class Watch:
    """Warnings over the history of figures, each said once until it has passed. Pure.

    A figure is judged by its mean over the last ``window`` steps, so that one odd batch warns of nothing."""

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self.recent: list[dict[str, float]] = []
        self.first_entropy: float | None = None
        self.lowest_ess = 1.0
        self.active: set[str] = set()

    def see(self, figures: dict[str, float]) -> list[str]:
        """Warnings that this step's figures call for, one line each, naming the setting to change."""
        self.recent = [*self.recent[1 - self.window :], figures] if self.window > 1 else [figures]
        if len(self.recent) < self.window:
            return []
        if self.first_entropy is None:
            self.first_entropy = self._mean("entropy_sampled")
        lines = {
            "entropy": self._entropy(),
            "ess": self._ess(),
            "negative": self._negative(),
            "skipped": self._skipped(),
        }
        new = [text for name, text in lines.items() if text and name not in self.active]
        self.active = {name for name, text in lines.items() if text}
        return new

    def _mean(self, name: str) -> float | None:
        values = [f[name] for f in self.recent if name in f]
        return float(np.mean(values)) if values else None

    def _entropy(self) -> str:
        now, first = self._mean("entropy_sampled"), self.first_entropy
        reward = self._mean("train_accuracy")
        if now is None or not first or now > 0.1 * first or (reward is not None and reward > 0.9):
            return ""  # near full accuracy a low entropy is what learning means
        return (
            f"entropy fell to {now:.3f} nat per token, {now / first:.0%} of the first steps': the policy has stopped "
            "exploring; lower trainer.learning_rate or raise rollout.temperature"
        )

    def _ess(self) -> str:
        """Judged at a new minimum of the mean only, so a level that stays is said once."""
        now = self._mean("ess_token")
        if now is None or now >= self.lowest_ess:
            return ""
        self.lowest_ess = now
        if now > 0.5:
            return ""
        return (
            f"the effective sample size sank to {now:.0%}: samples come from a policy far from the trained one; lower "
            "trainer.max_lag or trainer.learning_rate"
        )

    def _negative(self) -> str:
        now = self._mean("negative_mass")
        if now is None or now >= 0.15:
            return ""
        return (
            f"failures carry {now:.0%} of the gradient mass of successes: little is left to learn from mistakes; lower "
            'trainer.max_lag, or raise trainer.negative_max_drift (mask_negatives = "drift")'
        )

    def _skipped(self) -> str:
        if self.recent[-1].get("skipped_steps", 0.0) <= self.recent[0].get("skipped_steps", 0.0):
            return ""
        return (
            "steps were skipped because their gradient was not finite; lower trainer.learning_rate, or set "
            'model.dtype = "float32"'
        )


class Unrewarded:
    """Completions without a reward: when to warn of them, and when the run is pointless. Pure.

    ``reward``: the setting's value, for the texts. A step without any completion is passed over."""

    SHARE = 0.25  # of the completions of the last ``window`` steps: above it the user is told
    HOPELESS = 5  # steps in a row without a single reward

    def __init__(self, reward: str, window: int = 10) -> None:
        self.reward = reward
        self.recent: collections.deque[tuple[float, float, collections.Counter[str]]] = collections.deque(maxlen=window)
        self.warned = False

    def see(self, samples: float, missing: float, failures: Mapping[str, int]) -> str:
        """One step had ``samples`` completions, ``missing`` of them without a reward, for the reasons in ``failures``.
        A warning of one line, said once until it has passed, or nothing."""
        if samples:
            self.recent.append((samples, missing, collections.Counter(failures)))
        total, without = sum(n for n, _, _ in self.recent), sum(n for _, n, _ in self.recent)
        warned, self.warned = self.warned, without > self.SHARE * total
        if warned or not self.warned:
            return ""
        steps = len(self.recent)
        return (
            f"{without:.0f} of the {total:.0f} completions of the last {steps} step{'s' if steps > 1 else ''} have no "
            f"reward: {self._what_to_check(steps)}"
        )

    def hopeless(self) -> str:
        """Why to give up, in one line, once the last ``HOPELESS`` steps had no reward at all; else nothing."""
        last = list(self.recent)[-self.HOPELESS :]
        if len(last) < self.HOPELESS or any(missing < samples for samples, missing, _ in last):
            return ""
        return f"no completion of the last {self.HOPELESS} steps has a reward: {self._what_to_check(self.HOPELESS)}"

    def _what_to_check(self, steps: int) -> str:
        reasons = sum((kinds for _, _, kinds in list(self.recent)[-steps:]), collections.Counter())
        return unrewarded_reasons(reasons, self.reward)


def unrewarded_reasons(failures: Mapping[str, int], reward: str) -> str:
    """``exception 240, timeout 3: check task.reward = "...", ...``: the most frequent first, and what to do."""
    kinds = ", ".join(f"{kind} {n}" for kind, n in collections.Counter(failures).most_common(5)) or "broken off"
    return f'{kinds}: check task.reward = "{reward}", the logs of the rollouts say more'
