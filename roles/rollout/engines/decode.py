"""Decoding many sequences at once: a left-padded batch over a key-value cache, vectorised over its rows.

A row enters by prefilling all of its tokens but the last; every step then feeds the last token of each row and draws
the next. So newcomers and those already running share one forward, and after a change of weights the same prefill, over
all rows, makes every later token exactly what the new weights alone would have given. Rows leave by tensor operations;
work per row in Python happens only when one enters or leaves.

Invariant: the real tokens of a row are the rightmost ``length`` of the cache's ``width`` columns.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from mesh.version import Version
from roles.rollout.engines.base import Pending, Sampled
from transport.messages import Span

DRAWS = 64  # uniforms drawn ahead for a row
PREFILL_TOKENS = 16_384  # padded tokens in one prefill forward: bounds its memory
DRAW_ELEMENTS = 1 << 24  # rows x vocabulary sampled at once: bounds the float64 copy to 128 MiB


class Row:
    """A running sequence: what is not a tensor of the batch."""

    __slots__ = ("marks", "pending", "philox", "prompt")

    def __init__(self, pending: Pending, version: Version) -> None:
        self.pending = pending
        self.prompt = pending.request.prompt
        self.philox = np.random.Generator(np.random.Philox(key=pending.request.seed))
        self.marks: list[tuple[int, Version]] = [(0, version)]  # from this token on, this version

    def mark(self, count: int, version: Version) -> None:
        if self.marks[-1][0] == count:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((count, version))

    def spans(self, count: int) -> list[Span]:
        stops = [start for start, _ in self.marks[1:]] + [count]
        return [
            Span(version=v, start=start, stop=stop)
            for (start, v), stop in zip(self.marks, stops, strict=True)
            if stop > start
        ]


class Batch:
    """The running sequences of one model. Not thread-safe; call under ``torch.inference_mode()``."""

    PER_ROW = ("last", "length", "count", "limit", "temperature", "uniforms", "tokens", "logprobs")

    def __init__(self, model: nn.Module, eos: list[int]) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.eos = torch.tensor(eos, dtype=torch.int64, device=self.device)
        accepts = inspect.signature(model.forward).parameters
        if "position_ids" not in accepts:
            raise ValueError(
                f"{type(model).__name__} takes no position_ids, which left padding needs: use another engine"
            )
        self._cache_name = "cache" if "cache" in accepts else "past_key_values"  # renamed during transformers 5
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
        self.rows: list[Row] = []
        self._empty()

    def _empty(self) -> None:
        self.cache, self.width = self._new_cache(), 0
        self.last, self.length, self.count, self.limit = (self._ints([]) for _ in range(4))
        self.temperature = torch.empty(0, 1, device=self.device)
        self.uniforms = torch.empty(0, DRAWS, dtype=torch.float64, device=self.device)
        self.tokens = torch.empty(0, DRAWS, dtype=torch.int32, device=self.device)
        self.logprobs = torch.empty(0, DRAWS, device=self.device)

    def __len__(self) -> int:
        return len(self.rows)

    # -- rows come -----------------------------------------------------------------------------------------------------

    def admit(self, pending: list[Pending], version: Version) -> None:
        rows = [Row(p, version) for p in pending]
        cache, width = self._prefill([row.prompt[:-1] for row in rows])
        n, columns = len(rows), self.tokens.shape[1]
        fresh = {
            "last": self._ints([int(row.prompt[-1]) for row in rows]),
            "length": self._ints([len(row.prompt) - 1 for row in rows]),
            "count": self._ints([0] * n),
            "limit": self._ints([p.request.max_new_tokens for p in pending]),
            "temperature": torch.tensor([[p.request.temperature] for p in pending], device=self.device),
            "uniforms": torch.from_numpy(np.stack([row.philox.random(DRAWS) for row in rows])).to(self.device),
            "tokens": torch.zeros(n, columns, dtype=torch.int32, device=self.device),
            "logprobs": torch.zeros(n, columns, device=self.device),
        }
        joined = not self.rows or (_plain(self.cache) and _plain(cache))
        if joined:
            parts = [(self.cache, self.width, len(self.rows)), (cache, width, n)]
            self.cache, self.width = self._join([part for part in parts if part[2]])
        for name, value in fresh.items():
            setattr(self, name, torch.cat([getattr(self, name), value]) if self.rows else value)
        self.rows += rows
        if not joined:  # caches with a window or a state cannot be padded from the left
            self._rebuild()

    def reweigh(self, version: Version) -> None:
        """The weights have changed to ``version``: forget what the old ones cached and compute it again."""
        if not self.rows:
            return
        for row, count in zip(self.rows, self.count.tolist(), strict=True):
            row.mark(count, version)
        self._rebuild()

    def _rebuild(self) -> None:
        tokens = self.tokens.cpu().numpy()
        sequences = [
            np.concatenate([row.prompt, tokens[i, :count]])[:-1]
            for i, (row, count) in enumerate(zip(self.rows, self.count.tolist(), strict=True))
        ]
        self.cache = self._new_cache()  # frees the old one before the new one is filled
        self.cache, self.width = self._prefill(sequences)

    def _prefill(self, sequences: list[np.ndarray]) -> tuple[DynamicCache, int]:
        """A cache over these sequences, row by row. Equal ones (a group's prompt) are computed once."""
        places: dict[bytes, int] = {}
        where = [places.setdefault(s.tobytes(), len(places)) for s in sequences]
        distinct = [np.frombuffer(key, dtype=np.int32) for key in places]
        order = sorted(range(len(distinct)), key=lambda i: len(distinct[i]))
        parts, taken = [], 0
        while taken < len(order):
            stop = taken + 1
            while stop < len(order) and len(distinct[order[stop]]) * (stop + 1 - taken) <= PREFILL_TOKENS:
                stop += 1
            if not _plain(self.cache):
                stop = len(order)
            parts.append(self._forward_part([distinct[i] for i in order[taken:stop]]))
            taken = stop
        cache, width = self._join(parts)
        position = {place: i for i, place in enumerate(order)}
        if width:
            cache.batch_select_indices(self._ints([position[place] for place in where]))
        return cache, width

    def _forward_part(self, sequences: list[np.ndarray]) -> tuple[DynamicCache, int, int]:
        width = len(sequences[-1])  # sorted by length
        cache = self._new_cache()
        if width:
            ids = np.zeros((len(sequences), width), dtype=np.int64)
            for i, s in enumerate(sequences):
                ids[i, width - len(s) :] = s
            lengths = self._ints([len(s) for s in sequences])
            mask = _real(lengths, width)
            positions = (torch.arange(width, device=self.device) - (width - lengths[:, None])).clamp_(min=0)
            self._call(torch.from_numpy(ids).to(self.device), mask, positions, cache)
        return cache, width, len(sequences)

    def _join(self, parts: list[tuple[DynamicCache, int, int]]) -> tuple[DynamicCache, int]:
        """Caches of (cache, width, rows), one below the other, padded from the left to the widest."""
        width = max(w for _, w, _ in parts)
        if len(parts) == 1 or width == 0:
            return parts[0][0], width
        like = next(cache for cache, w, _ in parts if w)
        for i, layer in enumerate(like.layers):
            keys, values = layer.keys, layer.values
            for name, t in (("keys", keys), ("values", values)):
                pieces = []
                for cache, w, n in parts:
                    piece = getattr(cache.layers[i], name) if w else t.new_zeros((n, t.shape[1], 0, t.shape[3]))
                    pieces.append(nn.functional.pad(piece, (0, 0, width - w, 0)))
                setattr(layer, name, torch.cat(pieces))
        return like, width

    # -- a token each --------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Pending, Sampled | Exception]]:
        """One token for every row; returns the rows that have ended, in order."""
        logits = self._call(
            self.last[:, None], _real(self.length + 1, self.width + 1), self.length[:, None], self.cache
        ).logits[:, -1]
        self.width += 1
        self.length += 1
        draws = self.uniforms.gather(1, (self.count % DRAWS)[:, None])
        self.last, logprobs = draw(logits, self.temperature, draws)
        at = self.count[:, None]
        self.tokens.scatter_(1, at, self.last[:, None].to(torch.int32))
        self.logprobs.scatter_(1, at, logprobs[:, None])
        self.count += 1
        bad = ~torch.isfinite(logprobs)
        stop = torch.isin(self.last, self.eos)
        done = bad | stop | (self.count >= self.limit)
        ended = self._leave(done, stop, bad) if bool(done.any()) else []
        self._refill()
        return ended

    def _refill(self) -> None:
        """Draw ahead where the uniforms are used up, and make room for as many tokens."""
        if not self.rows:
            return
        for i in (self.count % DRAWS == 0).nonzero()[:, 0].tolist():
            self.uniforms[i] = torch.from_numpy(self.rows[i].philox.random(DRAWS))
        if int(self.count.max()) == self.tokens.shape[1]:
            room = self.tokens.shape[1]
            self.tokens = nn.functional.pad(self.tokens, (0, room))
            self.logprobs = nn.functional.pad(self.logprobs, (0, room))

    # -- rows go -------------------------------------------------------------------------------------------------------

    def remove(self, leaving: list[bool]) -> list[tuple[Pending, Sampled]]:
        """Take rows out before their end, as aborted."""
        done = torch.tensor(leaving, device=self.device)
        none = torch.zeros_like(done)
        return self._leave(done, none, none, aborted=True)

    def _leave(self, done: Tensor, stop: Tensor, bad: Tensor, aborted: bool = False) -> list[tuple[Pending, Any]]:
        out = done.nonzero()[:, 0]
        counts, stops, bads = self.count[out].tolist(), stop[out].tolist(), bad[out].tolist()
        tokens, logprobs = self.tokens[out].cpu().numpy(), self.logprobs[out].cpu().numpy()
        ended: list[tuple[Pending, Any]] = []
        for j, i in enumerate(out.tolist()):
            row, n = self.rows[i], counts[j]
            if bads[j]:
                text = f"the model's logits are not finite under {row.marks[-1][1]} at token {n} of a completion"
                ended.append((row.pending, FloatingPointError(text)))
                continue
            finish = "abort" if aborted else "stop" if stops[j] else "length"
            sampled = Sampled(
                tokens=tokens[j, :n].copy(), logprobs=logprobs[j, :n].copy(), spans=row.spans(n), finish=finish
            )
            ended.append((row.pending, sampled))
        self._select((~done).nonzero()[:, 0])
        return ended

    def _select(self, keep: Tensor) -> None:
        self.rows = [self.rows[i] for i in keep.tolist()]
        if not self.rows:
            self._empty()
            return
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name)[keep])
        if self.width:
            self.cache.batch_select_indices(keep)
        spare = self.width - int(self.length.max())
        if spare and _plain(self.cache):  # columns in which only those who left had tokens
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, spare:], layer.values[:, :, spare:]
            self.width -= spare

    # -- the model -----------------------------------------------------------------------------------------------------

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Any:
        return self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{self._cache_name: cache},
            **self._keep,
        )  # fmt: skip

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def draw(logits_bv: Tensor, temperature_b1: Tensor, uniforms_b1: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (int64, (B,)) by inverse CDF over the whole vocabulary and their log-probabilities (float32, (B,)) under
    softmax(logits / temperature). Temperature 0: the likeliest token, whose log-probability is 0. Rows with logits
    that are not numbers get a log-probability that is not one."""
    tokens, logprobs = [], []
    rows = max(1, DRAW_ELEMENTS // logits_bv.shape[1])
    for logits, temperature, uniforms in zip(
        logits_bv.split(rows), temperature_b1.split(rows), uniforms_b1.split(rows), strict=True
    ):
        greedy = temperature == 0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)
        logp = scaled - scaled.logsumexp(1, keepdim=True)
        cdf = logp.exp().to(torch.float64).cumsum(1)
        total = cdf[:, -1:]
        # strictly below the total: a draw never falls on a token of probability 0 at the end of the vocabulary
        target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[1] - 1)
        token = torch.where(greedy, logp.argmax(1, keepdim=True), token)
        logprob = logp.gather(1, token)
        tokens.append(token[:, 0])
        logprobs.append(torch.where(greedy, logprob * 0, logprob)[:, 0])
    return torch.cat(tokens), torch.cat(logprobs)


def _real(lengths: Tensor, width: int) -> Tensor:
    """(B, width) bool: the rightmost ``lengths`` columns of each row."""
    return torch.arange(width, device=lengths.device) >= width - lengths[:, None]


def _plain(cache: DynamicCache) -> bool:
    """Whether every layer keeps all its keys, so that rows can be padded and cut on the left."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)
