"""From groups as they arrive to padded micro-batches. Masks come from lengths, never from token values.

A batch is a list of ``Sample``, one a completion, each of its own length. Those with a nonzero advantage are sorted by
length and packed into micro-batches of at most so many padded tokens; the others teach nothing and need no forward
pass. Trainers need not agree on the number of micro-batches: no collective runs inside a backward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesh.version import Lineage, Version
from roles.trainer.advantages import group_advantages
from transport.messages import Completion, Group

NOT_SAMPLES = ("abort", "error")
"""Finish reasons of completions that did not come to their end: neither answers nor failures of the policy."""


@dataclass(frozen=True)
class Sample:
    """One completion, flat.

    ``tokens`` int32 (n,) with the prompt; ``sampled`` bool (n,), True where the policy chose the token; ``recorded``
    float32 (s,) and ``token_lags`` int32 (s,) for the s sampled tokens. ``advantage`` is NaN when there is no reward.
    ``lag`` in steps, that of the oldest token. ``cut``: it ran into the token limit."""

    tokens: np.ndarray
    sampled: np.ndarray
    recorded: np.ndarray
    token_lags: np.ndarray
    reward: float
    advantage: float
    lag: int
    group: int
    finish: str
    metrics: dict[str, float]

    @property
    def sampled_tokens(self) -> int:
        return len(self.recorded)

    @property
    def cut(self) -> bool:
        return self.finish == "length"

    @property
    def counts(self) -> bool:
        """Whether its tokens are in the denominator of the loss: it has a finite reward."""
        return math.isfinite(self.advantage)

    @property
    def teaches(self) -> bool:
        """Whether it can have a gradient, so that its log-probabilities are needed."""
        return self.counts and self.advantage != 0.0 and self.sampled_tokens > 0


@dataclass(frozen=True)
class MicroBatch:
    """Completions padded on the right to one length.

    ``tokens`` int64 (b, t); ``attention`` int64 (b, t), 1 on tokens and 0 on padding; ``positions`` int64 (b, t).
    Sampled token k of the micro-batch (k < n, row by row) is ``tokens[rows[k], columns[k]]``, predicted by the logits
    one column before; ``recorded`` float32 (n,) is its log-probability when sampled. ``members`` are indices into the
    batch's samples, row by row."""

    members: list[int]
    tokens: np.ndarray
    attention: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    recorded: np.ndarray


def reward_of(completion: Completion) -> float | None:
    """Its reward, or None when it is no sample: no finite reward, or it was broken off."""
    if completion.finish in NOT_SAMPLES or completion.reward is None or not np.isfinite(completion.reward):
        return None
    return completion.reward


def malformed(group: Group, vocabulary: int) -> str:
    """Why this group cannot be trained on, in one line; empty when it can. For refusing it on arrival."""
    for i, completion in enumerate(group.completions):
        segments = completion.segments
        if not segments or segments[0].sampled or not len(segments[0].tokens):
            return f"completion {i} has no prompt: its first segment must hold given tokens"
        for j, segment in enumerate(segments):
            n = len(segment.tokens)
            if not segment.sampled:
                continue
            if len(segment.logprobs) != n:
                return f"completion {i}, segment {j} has {n} tokens and {len(segment.logprobs)} log-probabilities"
            ends = [0, *(span.stop for span in segment.spans)]
            if ends[-1] != n or any(s.start != a or s.stop < a for s, a in zip(segment.spans, ends, strict=False)):
                return f"completion {i}, segment {j}: its version spans do not cover its {n} tokens in order"
    segments = [s for c in group.completions for s in c.segments]
    if not segments:  # no completion at all: that is counted elsewhere
        return ""
    tokens = np.concatenate([s.tokens for s in segments])  # judged at once: most groups are well-formed
    logprobs = np.concatenate([s.logprobs for s in segments if s.sampled] or [np.empty(0, np.float32)])
    if tokens.min() >= 0 and tokens.max() < vocabulary and np.isfinite(logprobs).all():
        return ""
    for i, completion in enumerate(group.completions):
        for j, segment in enumerate(completion.segments):
            if len(segment.tokens) and not 0 <= segment.tokens.min() <= segment.tokens.max() < vocabulary:
                return f"completion {i}, segment {j} has token ids outside the vocabulary of {vocabulary}"
            if segment.sampled and not np.isfinite(segment.logprobs).all():
                return f"completion {i}, segment {j} has a log-probability that is not finite"
    raise AssertionError("a token or a log-probability is wrong, but none was found")


def samples_of(groups: Sequence[Group], lineage: Lineage, number: int, *, divide_by_std: bool = False) -> list[Sample]:
    """The completions of ``groups`` with their advantages and their lags behind version ``number`` on ``lineage``.

    Every version must be of this lineage, and no group ``malformed``: the buffer has seen to that."""
    samples = []
    for g, group in enumerate(groups):
        advantages = group_advantages([reward_of(c) for c in group.completions], divide_by_std=divide_by_std)
        started = _lag(lineage, group.started, number)
        for completion, advantage in zip(group.completions, advantages.tolist(), strict=True):
            chosen = [s for s in completion.segments if s.sampled]
            spans = [(s.stop - s.start, _lag(lineage, s.version, number)) for c in chosen for s in c.spans]
            samples.append(
                Sample(
                    tokens=_joined([s.tokens for s in completion.segments], np.int32),
                    sampled=_joined([np.full(len(s.tokens), s.sampled) for s in completion.segments], bool),
                    recorded=_joined([s.logprobs for s in chosen], np.float32),
                    token_lags=_joined([np.full(n, lag, np.int32) for n, lag in spans], np.int32),
                    reward=np.nan if completion.reward is None else float(completion.reward),
                    advantage=advantage,
                    lag=max((lag for n, lag in spans if n), default=started),
                    group=g,
                    finish=completion.finish,
                    metrics=completion.metrics,
                )
            )
    return samples


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """The parts in one array; the only one as it is, since most completions are a prompt and one turn."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)


def _lag(lineage: Lineage, version: Version, number: int) -> int:
    lag = lineage.lag(version, number)
    assert lag is not None, f"{version} reached the batch of step {number} from another lineage"
    return lag


def micro_batches(samples: Sequence[Sample], members: Sequence[int], padded_tokens: int) -> list[MicroBatch]:
    """Pack ``members`` (indices of samples) into micro-batches of at most ``padded_tokens`` = rows x longest row.

    Longest first, ties by index: deterministic, little padding, and what runs out of memory does so at once. A
    completion longer than the budget is a micro-batch of its own; none is empty."""
    order = sorted(members, key=lambda i: (-len(samples[i].tokens), i))
    packs: list[list[int]] = []
    for i in order:
        longest = len(samples[packs[-1][0]].tokens) if packs else 0
        if packs and longest * (len(packs[-1]) + 1) <= padded_tokens:
            packs[-1].append(i)
        else:
            packs.append([i])
    return [_pad(samples, pack) for pack in packs]


def _pad(samples: Sequence[Sample], members: list[int]) -> MicroBatch:
    lengths = np.array([len(samples[i].tokens) for i in members])
    shape = (len(members), int(lengths.max()))
    tokens, sampled = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, i in enumerate(members):
        tokens[row, : lengths[row]] = samples[i].tokens
        sampled[row, : lengths[row]] = samples[i].sampled
    rows, columns = np.nonzero(sampled)
    return MicroBatch(
        members=members,
        tokens=tokens,
        attention=(np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        positions=np.broadcast_to(np.arange(shape[1]), shape).copy(),
        rows=rows,
        columns=columns,
        recorded=np.concatenate([samples[i].recorded for i in members]),
    )
