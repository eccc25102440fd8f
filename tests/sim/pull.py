"""Pulls on a simulated network: many receivers that lack a version, the publisher and receivers that hold it, and any
trouble. Always: what is taken is whole and right, so many chunks are under way at most, and no holder sends faster than
it may. Every receiver gets the version as long as the publisher holds it, and otherwise ends with a reason.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Ballot, Lineage, Version
from tests.sim.world import World
from transport.messages import Announce, Probe, PullAsk, PullDecline, PullTell
from transport.weights import pull as pulls
from transport.weights.pull import CHUNK_BYTES, IN_FLIGHT, Check, Pull, Pulled, PullHost, Serve, Write
from transport.weights.reception import PULL_AGAIN_S

V = Version(Ballot(1, "t"), 5)
PROBE = Probe(np.empty(0, np.int32), np.empty(0, np.float32))
TICK_S = 0.05
WITHIN_S = 600.0
PAYLOAD = np.zeros(CHUNK_BYTES, np.uint8)  # shared: what a chunk holds is told beside it


@dataclass
class Puller:
    pull: Pull
    held: dict[int, bool] = field(default_factory=dict)  # chunks written: whether they are right
    verified: dict[int, None] = field(default_factory=dict)  # buckets
    ended: Pulled | None = None


@dataclass
class Holder:
    host: PullHost
    rate: float
    corrupt: float = 0.0
    holds: bool = True
    alive: bool = True
    sent: list[float] = field(default_factory=list)  # when each chunk was


class Swarm(World):
    scenario = "pull"

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.rng
        self.chunks = rng.randint(1, 60)
        self.per_bucket = rng.randint(1, 6)
        self.buckets = -(-self.chunks // self.per_bucket)
        self.loss, self.delay_s = rng.choice((0.0, 0.05, 0.2)), rng.choice((0.001, 0.05, 0.4))
        self.holders = {"t": self.holder()} | {f"h{i}": self.holder() for i in range(rng.randint(0, 4))}
        for holder in list(self.holders.values())[1:]:  # the publisher is honest
            holder.corrupt = rng.choice((0.0, 0.0, 0.3, 1.0))
        self.pullers: dict[PeerId, Puller] = {}
        self.right = True  # whether the chunk that arrives is what it should be
        for i in range(rng.randint(1, 6)):
            self.at(rng.uniform(0.0, 3.0), partial(self.begin, f"p{i}"))
        for _ in range(rng.randint(0, 4)):
            self.at(rng.uniform(0.0, 10.0), partial(self.trouble, rng.choice(list(self.holders))))

    def holder(self) -> Holder:
        rate = self.rng.choice((5, 50, 500)) * CHUNK_BYTES
        return Holder(PullHost(rate), rate)

    @property
    def published(self) -> bool:
        return self.holders["t"].alive and self.holders["t"].holds

    def missing(self) -> list[PeerId]:
        return [n for n, p in self.pullers.items() if p.ended is None or (p.ended.reason and self.published)]

    # What happens -----------------------------------------------------------------------------------------------------

    def begin(self, name: PeerId) -> None:
        others = [h for h in self.holders if h != "t"]
        announce = Announce(
            None, V, Lineage(), "m", self.per_bucket * CHUNK_BYTES, 1, np.zeros(self.buckets, np.uint64),
            np.zeros(1, np.uint64), PROBE, pulls.choose_holders("t", others, self.rng.randrange(8)),
        )  # fmt: skip
        self.pullers[name] = Puller(Pull(announce, self.chunks * CHUNK_BYTES, self.now))
        self.tick(name)

    def trouble(self, name: PeerId) -> None:
        holder = self.holders[name]
        if self.rng.random() < 0.5:
            holder.alive = False
            self.log(None, f"{name} dies")
            self.after(self.rng.uniform(0.5, 6.0), self.noticed)
        else:
            holder.holds = False
            self.log(None, f"{name} needs its buffer")

    def noticed(self) -> None:
        living = [*self.pullers, *(name for name, h in self.holders.items() if h.alive)]
        for name, puller in self.pullers.items():
            self.do(name, puller.pull.live(living, self.now) if puller.ended is None else [])

    def tick(self, name: PeerId) -> None:
        puller = self.pullers[name]
        if puller.ended is None:
            self.do(name, puller.pull.tick(self.now))
            self.after(TICK_S, partial(self.tick, name))

    def do(self, name: PeerId, effects: list[Any]) -> None:
        puller = self.pullers[name]
        for effect in effects:
            match effect:
                case Send(to, PullAsk() as ask):
                    self.message(partial(self.asked, to, name, ask))
                case Write(chunk):
                    bucket = chunk // self.per_bucket
                    assert bucket not in puller.verified, f"{name} writes into bucket {bucket}, which is verified"
                    puller.held[chunk] = self.right
                case Check(bucket):
                    mine = range(bucket * self.per_bucket, min((bucket + 1) * self.per_bucket, self.chunks))
                    ok = all(puller.held[chunk] for chunk in mine)
                    if ok:
                        puller.verified[bucket] = None
                    self.do(name, puller.pull.checked(bucket, ok, self.now))
                case Pulled(_, reason):
                    assert puller.ended is None, f"{name} ends twice"
                    puller.ended = effect
                    self.log(None, f"{name} {reason or 'has all of it'}")
                    assert reason or len(puller.verified) == self.buckets, f"{name} takes a version that is not whole"
                    if reason and self.published:  # it is told again from whom to pull
                        self.after(PULL_AGAIN_S, partial(self.begin, name))
        assert len(puller.pull._asked) <= IN_FLIGHT, f"{name} asks for {len(puller.pull._asked)} chunks at a time"

    def asked(self, to: PeerId, name: PeerId, ask: PullAsk) -> None:
        holder = self.holders[to]
        if holder.alive:
            self.serve(to, holder.host.asked(name, ask, CHUNK_BYTES, self.chunks if holder.holds else 0, self.now))

    def serve(self, name: PeerId, effects: list[Any]) -> None:
        holder = self.holders[name]
        for effect in effects:
            match effect:
                case Send(to, PullDecline() as decline):
                    self.message(partial(self.declined, to, name, decline))
                case Serve(peer, _, chunk):
                    if not holder.holds:
                        self.serve(name, holder.host.gone(V))
                        continue
                    holder.sent.append(self.now)
                    self.check_rate(name, holder)
                    tell = PullTell(V, chunk, PAYLOAD)
                    self.message(partial(self.told, peer, name, tell, self.rng.random() >= holder.corrupt))

    def told(self, to: PeerId, name: PeerId, tell: PullTell, right: bool) -> None:
        self.right = right
        if self.pullers[to].ended is None:
            self.do(to, self.pullers[to].pull.told(name, tell, self.now))

    def declined(self, to: PeerId, name: PeerId, decline: PullDecline) -> None:
        if self.pullers[to].ended is None:
            self.do(to, self.pullers[to].pull.declined(name, decline, self.now))

    def message(self, arrives: Any) -> None:
        for _ in range(2 if self.rng.random() < 0.05 else 1):
            if self.rng.random() >= self.loss:
                self.after(self.rng.expovariate(1 / self.delay_s), arrives)

    def check_rate(self, name: PeerId, holder: Holder) -> None:
        """In no span of time more than the rate allows for it, the burst, and one round of chunks on credit."""
        most = holder.rate * pulls.BURST_S / CHUNK_BYTES + pulls.MOST_LEASES
        for back in (10, 100):
            span = holder.sent[-back:]
            allowed = (span[-1] - span[0]) * holder.rate / CHUNK_BYTES + most
            assert len(span) <= allowed + 1, f"{name} sends {len(span)} chunks in {span[-1] - span[0]:.2f} s"

    def ticking(self) -> None:
        for name, holder in self.holders.items():
            if holder.alive:
                self.serve(name, holder.host.tick(self.now))
        self.after(TICK_S, self.ticking)


def scenario(seed: int) -> Swarm:
    """Raises Failure."""
    world = Swarm(seed)
    world.ticking()
    world.run(11.0)  # when the last trouble is over
    while missing := world.missing():
        if world.now > WITHIN_S:
            raise world.failure(f"{', '.join(missing)} still pull after {WITHIN_S:.0f} s")
        world.run(world.now + 1.0)
    return world
