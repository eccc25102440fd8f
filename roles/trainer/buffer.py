"""Delivered groups that wait to be trained, oldest first.

The buffer holds no policy of its own: what may come in is bounded by the credits (``transport/delivery.py``), what may
go into a batch is decided by ``superseded`` there. It lives on the loop, beside the delivery: fed by its ``Held`` and
``Dropped`` effects, emptied by ``take``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.version import Lineage, Version
from transport.delivery import superseded, versions_of
from transport.messages import Credit, CreditId, Group


@dataclass(frozen=True)
class Trajectory:
    """A group with the credit it was made for and the rollout that made it."""

    rollout: PeerId
    credit: Credit
    group: Group
    versions: tuple[Version, ...]


class Buffer:
    """At most ``limit`` groups, by credit id; ``limit`` is the bound (max_lag + 1) * groups_per_step."""

    def __init__(self, *, limit: int, max_lag: int) -> None:
        self._limit = limit
        self._max_lag = max_lag
        self._held: dict[CreditId, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._held.values())

    def put(self, rollout: PeerId, credit: Credit, group: Group) -> None:
        self.put_back(Trajectory(rollout, credit, group, versions_of(group)))

    def put_back(self, trajectory: Trajectory) -> None:
        id = trajectory.credit.id
        assert id not in self._held, f"group {id} held twice"
        assert len(self._held) < self._limit, f"more than {self._limit} groups held: credits were issued over the bound"
        self._held[id] = trajectory

    def drop(self, credit_id: CreditId) -> None:
        """Its credit has ended. One that ``take`` has already put aside as superseded is gone, and that is fine."""
        self._held.pop(credit_id, None)

    def ready(self, version: Version, lineage: Lineage) -> int:
        """How many groups could be trained at ``version``."""
        return sum(self._why(t, version, lineage) is None for t in self._held.values())

    def take(self, n: int, version: Version, lineage: Lineage) -> tuple[list[Trajectory], list[tuple[CreditId, str]]]:
        """Up to ``n`` admissible groups, by the version they started from, then credit id; and those that newer weights
        have replaced, with the reason ("age" or "lineage"). Both leave the buffer."""
        stale = [(id, why) for id, t in self._held.items() if (why := self._why(t, version, lineage))]
        for id, _ in stale:
            del self._held[id]
        oldest = sorted(self._held.values(), key=lambda t: (t.group.started.number, t.credit.id))[:n]
        for t in oldest:
            del self._held[t.credit.id]
        return oldest, stale

    def lags(self, version: Version, lineage: Lineage) -> dict[int, int]:
        """How many held groups have each lag, those of another lineage left out."""
        counts: dict[int, int] = {}
        for t in self._held.values():
            lag = lineage.lag(t.group.started, version.number)
            if lag is not None:
                counts[lag] = counts.get(lag, 0) + 1
        return dict(sorted(counts.items()))

    def _why(self, t: Trajectory, version: Version, lineage: Lineage) -> str | None:
        return superseded(t.versions, version.number, lineage, self._max_lag)
