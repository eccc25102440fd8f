"""The shadow buffers of a receiver: what lies in each, and which one may be written next. Pure.

A buffer is free; *reserved* for a broadcast that is announced or running; *pulling*; *offered* to the engine; *taken*
by it; *kept*, whole and proved, for others that pull it and for the same weights under another term; or *busy*: an
abandoned operation may still write into it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mesh.version import Version
from transport.messages import Announce

SHADOWS = 2  # one may be offered or in the engine's hands while the other receives

Use = Literal["free", "reserved", "pulling", "offered", "taken", "kept", "busy"]
WHOLE: tuple[Use, ...] = ("offered", "taken", "kept")


@dataclass
class Shadow:
    use: Use = "free"
    announce: Announce | None = field(default=None, compare=False)  # of what lies, or is to lie, here

    @property
    def version(self) -> Version | None:
        return self.announce.version if self.announce is not None else None

    def __str__(self) -> str:
        return "free" if self.use == "free" else f"{self.version or 'an abandoned transfer'} {self.use}"


class Shadows:
    """``pinned`` is the version that an evaluation waits for: it is not given up while it is offered or pulled."""

    def __init__(self) -> None:
        self.all = [Shadow() for _ in range(SHADOWS)]
        self.pinned: Version | None = None

    def __getitem__(self, slot: int) -> Shadow:
        return self.all[slot]

    def put(self, slot: int, use: Use, announce: Announce | None = None) -> None:
        self.all[slot] = Shadow(use, announce)

    def find(self, version: Version, *uses: Use) -> int | None:
        return next((i for i, s in enumerate(self.all) if s.use in uses and s.version == version), None)

    def offered(self) -> list[tuple[Version, int]]:
        return [(s.version, i) for i, s in enumerate(self.all) if s.use == "offered" and s.version is not None]

    def highest(self) -> Version | None:
        """Of what the engine has still to prove."""
        return max(
            (s.version for s in self.all if s.use in ("offered", "taken") and s.version is not None), default=None
        )

    def given_back(self) -> tuple[int, Announce] | None:
        """Nobody holds a buffer any more: what was taken is kept. Returns the newest that is whole."""
        whole = [(s.version, i, s.announce) for i, s in enumerate(self.all) if s.use in WHOLE]
        for _, i, a in whole:
            if self.all[i].use == "taken":
                self.put(i, "kept", a)
        return max(((i, a) for v, i, a in whole if a is not None), key=lambda found: found[1].version, default=None)

    def alike(self, a: Announce) -> int | None:
        """The buffer that holds the very weights of ``a``, perhaps under another name: a new term publishes what it
        holds, and that is often what was published last."""
        if not len(a.tensor_digests):
            return None
        for i, s in enumerate(self.all):
            b = s.announce
            if b is None or s.use not in ("offered", "kept") or self._held_back(s):
                continue
            if b.manifest == a.manifest and np.array_equal(b.tensor_digests, a.tensor_digests):
                return i
        return None

    def place_to_receive(self, leased: Callable[[Version], bool]) -> int | None:
        """The buffer for a broadcast, which nothing may hold up for long: of those that can be given up the least
        valuable. One that is busy is free within an operation's time-out: nothing that somebody waits for gives way."""
        if (slot := self.place_to_pull(leased)) is not None:
            return slot
        if any(s.use == "busy" for s in self.all):
            return None
        for use in ("pulling", "offered", "kept"):
            for i, s in enumerate(self.all):
                if s.use == use and not self._held_back(s):
                    return i
        return None

    def place_to_pull(self, leased: Callable[[Version], bool]) -> int | None:
        """A buffer that nobody needs: free, or kept, the oldest first, and not leased by who pulls it."""
        for i, s in enumerate(self.all):
            if s.use == "free":
                return i
        kept = [(s.version, i) for i, s in enumerate(self.all) if s.use == "kept" and s.version is not None]
        return next((i for version, i in sorted(kept) if not leased(version)), None)

    def _held_back(self, s: Shadow) -> bool:
        return s.use in ("offered", "pulling") and s.version is not None and s.version == self.pinned

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))
