"""Read-back: whether an engine's live tensors follow the bytes that were sent. Pure functions on digests.

A live tensor that lies in the engine as it was sent must hold exactly the bytes sent. One that does not (fused,
prepacked, of another dtype) must have changed when the bytes sent for it changed, and must not have when they did not.
Which bytes belong to a live tensor of a name unknown to the wire is judged by its place in the tree of modules:
``layers.0.attn.qkv.weight`` belongs to what was sent for ``layers.0.attn.qkv.*``, else for ``layers.0.attn.*.*``.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from transport.weights.buffers import digest_of, is_finite
from transport.weights.manifest import DTYPES, Manifest, storage_key

EMPTY = xxhash.xxh3_64_intdigest(b"")
"""The digest of a tensor without elements: it never changes, and holds nothing stale."""


@dataclass(frozen=True)
class Sent:
    """What the wire carried under one name: digest of its bytes, and their dtype."""

    digest: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Live:
    """One live tensor as seen. ``expected`` is the digest it has if it lies there as it was sent; None when its name,
    shape or dtype already says that it does not."""

    digest: int
    dtype: torch.dtype
    expected: int | None = None

    @property
    def exact(self) -> bool:
        return self.digest == self.expected


def sent(manifest: Manifest, tensor_digests: np.ndarray) -> dict[str, Sent]:
    """What was sent under each name; ``tensor_digests`` (uint64) has one an entry."""
    pairs = zip(manifest.entries, tensor_digests, strict=True)
    return {name: Sent(int(digest), DTYPES[entry.dtype]) for entry, digest in pairs for name in entry.names}


def look(
    tensors: Iterable[tuple[str, Tensor]], manifest: Manifest, wire: Mapping[str, Sent], flat: Tensor | None
) -> tuple[dict[str, Live], list[str]]:
    """Digest the live tensors; also returns the names of those that hold NaN or infinity.

    ``flat`` lets a live tensor of another dtype than the wire's be expected exactly: as the cast of what was sent."""
    entries = {name: entry for entry in manifest.entries for name in entry.names}
    views = {} if flat is None else manifest.views(flat)
    live: dict[str, Live] = {}
    broken = []
    seen: dict[Any, int] = {}  # tied tensors are read once
    for name, tensor in tensors:
        expected = None
        entry = entries.get(name)
        if entry is not None and entry.shape == tuple(tensor.shape):
            if wire[name].dtype == tensor.dtype:
                expected = wire[name].digest
            elif name in views:
                expected = digest_of(views[name].to(tensor.dtype))
        key = storage_key(name, tensor)
        if key not in seen:
            seen[key] = digest_of(tensor)
        live[name] = Live(seen[key], tensor.dtype, expected)
        is_buffer = entry is not None and entry.buffer  # a mask may hold -inf by design
        if tensor.is_floating_point() and not is_buffer and not is_finite(tensor):
            broken.append(name)
    return live, broken


def drill_fault(dummy: Mapping[str, Live], live: Mapping[str, Live]) -> str:
    """Names the live tensors that still hold dummy weights after the first version, unless those happen to be right."""
    stale = [
        name
        for name, now in live.items()
        if name in dummy and now.digest == dummy[name].digest != EMPTY and not now.exact
    ]
    return f"the engine still holds its dummy weights in {some(stale)}" if stale else ""


def read_back_fault(
    wire_then: Mapping[str, Sent],
    wire_now: Mapping[str, Sent],
    live_then: Mapping[str, Live],
    live_now: Mapping[str, Live],
) -> str:
    """Names the live tensors that do not follow the bytes sent between two versions, or an empty string."""
    if live_then.keys() != live_now.keys():
        return f"the engine's tensors are others than before: {some(sorted(live_then.keys() ^ live_now.keys()))}"
    changed = {name for name, now in wire_now.items() if wire_then.get(name) != now}
    moved = {name for name, now in live_now.items() if live_then[name].digest != now.digest}
    stale: list[str] = []
    wrong: list[str] = []
    astray: list[str] = []
    for name, now in live_now.items():
        if live_then[name].exact and now.expected is not None:  # it lies there as sent, and a layout does not change
            if not now.exact:
                (wrong if name in moved else stale).append(name)
        elif name in wire_now:
            if name in changed and name not in moved and not _may_round(now, wire_now[name]):
                stale.append(name)
            if name in moved and name not in changed:
                astray.append(name)
    for names, must, may in _by_place([n for n in live_now if n not in wire_now], wire_now, live_now):
        came = [name for name in names if name in moved]
        due = [name for name in must if name in changed]
        rounds = any(_may_round(live_now[a], wire_now[b]) for a in names for b in due[:1])
        if due and not came and not rounds:
            stale += names
        if came and not any(name in changed for name in may):
            astray += came
    faults = (
        ("the engine still holds the last version's bytes in", stale),
        ("the engine holds other bytes than were sent in", wrong),
        ("the engine changed what this version does not", astray),
    )
    return "; ".join(f"{what} {some(names)}" for what, names in faults if names)


def live_digest(live: Mapping[str, Live]) -> str:
    """One digest (hex) over all live tensors, in the engine's order."""
    h = xxhash.xxh3_128()
    for name, tensor in live.items():
        h.update(f"{name}\0{tensor.digest:016x}\n".encode())
    return h.hexdigest()


def some(names: Collection[str]) -> str:
    """The first names, and how many more."""
    first = ", ".join(list(names)[:4])
    return f"{first} and {len(names) - 4} more" if len(names) > 4 else first


def _may_round(live: Live, wire: Sent) -> bool:
    """Whether a change of the bytes sent can vanish in the live tensor's dtype."""
    return torch.promote_types(live.dtype, wire.dtype) != live.dtype


def _by_place(
    others: list[str], wire: Mapping[str, Sent], live: Mapping[str, Live]
) -> list[tuple[list[str], list[str], list[str]]]:
    """Live tensors of names unknown to the wire, in groups of one place: (live names, what must move one of them, what
    may). Names with a live tensor of their own only *may* move a neighbour in the same layer."""
    modules: dict[str, list[str]] = {}
    layers: dict[str, list[str]] = {}
    for name in wire:
        modules.setdefault(_up(name), []).append(name)
        layers.setdefault(_up(_up(name)), []).append(name)
    groups: dict[str, list[str]] = {}
    for name in others:
        module, layer = _up(name), _up(_up(name))
        groups.setdefault(module if module in modules else layer if layer and layer in layers else "", []).append(name)
    out = []
    for place, names in groups.items():
        if place in modules and place:
            out.append((names, modules[place], modules[place]))
        elif place:
            out.append((names, [n for n in layers[place] if n not in live], layers[place]))
    if "" in groups:  # belongs to no place: judged against all that has no other live tensor
        placed = {name for _, _, may in out for name in may}
        out.append((groups[""], [n for n in wire if n not in live and n not in placed], list(wire)))
    return out


def _up(name: str) -> str:
    return name.rpartition(".")[0]
