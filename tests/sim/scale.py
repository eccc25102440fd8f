"""What membership costs in a mesh of many, and how soon a change is known everywhere.

    python -m tests.sim.scale 10 100 1000

The peers begin as a mesh that has been together for long: each has all others in its view and no news to tell. They are
left in quiet; one joins; one is killed. All times are of the simulated clock. Bytes are those of the frames that the
codec makes of every message, without what encryption, ZeroMQ and TCP put around them. Connections are those that the
endpoint would open to send what is sent: a cache of so many, of which the least recently used leaves. What a join or
a death costs is all that is sent until its news has died out, less what quiet would have cost in that time.
"""

import argparse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.membership import LAN, PRESETS, Preset
from tests.sim.node import Node
from tests.sim.world import Weather, World
from transport.codec import encode
from transport.endpoint import CONNECTIONS
from transport.messages import Envelope, News, Welcome

AGREED = dict.fromkeys(("run", "model", "task", "trainer"), "0" * 16)  # digests as long as real ones
WARM_S = 20.0  # for connections to be opened, and rounds to mix
QUIET_S = 30.0
WITHIN_S = 60.0  # for a change to be known everywhere, and for its news to die out
LOOK_S = 0.1  # between two looks at who knows


@dataclass
class Line:
    """What went out from one address, and the connections that it holds."""

    bytes: int = 0
    messages: int = 0
    opened: int = 0
    links: OrderedDict[str, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True)
class Spent:
    """By all peers together."""

    bytes: float
    messages: float
    opened: float

    def less(self, other: "Spent") -> "Spent":
        return Spent(self.bytes - other.bytes, self.messages - other.messages, self.opened - other.opened)

    def times(self, factor: float) -> "Spent":
        return Spent(factor * self.bytes, factor * self.messages, factor * self.opened)


@dataclass(frozen=True)
class Figures:
    """Of each peer: ``quiet`` a second; ``join`` and ``death`` in all, the Welcomes apart."""

    size: int
    quiet: Spent
    connections: int  # of the one that holds most, out
    join_s: float  # until the newcomer is in every view
    join: Spent
    welcome_bytes: int
    detection_s: float  # until the first view has dropped the dead
    gone_s: float  # until the last has
    death: Spent


class Scale(World):
    """A mesh of ``size`` whose messages are counted, by address."""

    scenario = "scale"

    def __init__(self, size: int, seed: int = 0, preset: Preset = LAN):
        super().__init__(seed)
        self.weather = Weather(delay_s=0.0002, jitter_s=0.0005)
        self.preset = preset
        self.lines_of: dict[str, Line] = {}
        self.welcome_bytes = 0
        for _ in range(size):
            self.start(())
        news = [News(node.membership.card, 0, "alive") for node in self.nodes]
        for node in self.nodes:
            m = node.membership
            for piece in news:
                m.roster.hear(piece, node.now)
            m.roster.fresh.clear()
            node.execute(m.tick(node.now))

    def start(self, seeds: Sequence[str]) -> Node:
        i = len(self.nodes)
        address = f"tcp://10.{i >> 16}.{(i >> 8) & 255}.{i & 255}:40000"
        self.lines_of[address] = Line()
        return Node(self, address, name=f"rollout-{i}@host", seeds=seeds, preset=self.preset, agreed=AGREED)

    def send(self, source: Node, to: str, address: str, message: Any, *, bulk: bool = False) -> None:
        super().send(source, to, address, message, bulk=bulk)
        frames = encode(Envelope(run="sim", sender=source.id, to=to, reply=source.address, body=message))
        line = self.lines_of[source.address]
        if isinstance(message, Welcome):
            self.welcome_bytes += sum(map(len, frames))
        else:
            line.bytes += sum(map(len, frames))
        line.messages += 1
        line.opened += address not in line.links
        line.links[address] = None
        line.links.move_to_end(address)
        if len(line.links) > CONNECTIONS:
            line.links.popitem(last=False)

    def log(self, who: Node | None, text: str) -> None:
        """A million of members seen by members are no use to anybody."""

    def spent(self) -> Spent:
        lines = self.lines_of.values()
        return Spent(sum(o.bytes for o in lines), sum(o.messages for o in lines), sum(o.opened for o in lines))

    def until(self, missing: Callable[[], int], what: str) -> float:
        """Run until nobody is missing; how long it took. Raises Failure."""
        start = self.now
        while left := missing():
            if self.now - start > WITHIN_S:
                raise self.failure(f"{what}: {left} of {len(self.living)} are missing after {WITHIN_S:.0f} s")
            self.run(self.now + LOOK_S)
        return self.now - start

    def telling(self) -> int:
        return sum(bool(node.membership.roster.fresh) for node in self.living)


def measure(size: int, seed: int = 0, preset: Preset = LAN) -> Figures:
    """Raises Failure when somebody who lives is taken for dead, or a change does not get everywhere."""
    world = Scale(size, seed, preset)
    world.run(WARM_S)
    before = world.spent()
    world.run(world.now + QUIET_S)
    a_second = world.spent().less(before).times(1 / QUIET_S)

    def cost(before: Spent, began: float) -> Spent:
        world.until(world.telling, "the news does not die out")
        return world.spent().less(before).less(a_second.times(world.now - began)).times(1 / size)

    before, began = world.spent(), world.now
    new = world.start([node.address for node in world.nodes])  # as from a directory
    others = [node for node in world.nodes if node is not new]
    join_s = world.until(
        lambda: sum(new.id not in n.view for n in others) + (len(new.view) < size), "a newcomer is not seen"
    )
    join = cost(before, began)

    before, began = world.spent(), world.now
    victim = others[size // 2]
    victim.kill()
    living = world.living
    detection_s = world.until(lambda: all(victim.id in n.view for n in living), "nobody notices a death")
    gone_s = detection_s + world.until(lambda: sum(victim.id in n.view for n in living), "a dead peer is still seen")
    death = cost(before, began)
    for node in living:
        wrong = [gone for _, gone in node.departures if gone.card.id != victim.id]
        if wrong:
            raise world.failure(f"{node.label} took {wrong[0].card.name} for dead: {wrong[0].reason}")
    return Figures(
        size=size,
        quiet=a_second.times(1 / size),
        connections=max(len(line.links) for line in world.lines_of.values()),
        join_s=join_s,
        join=join,
        welcome_bytes=world.welcome_bytes,
        detection_s=detection_s,
        gone_s=gone_s,
        death=death,
    )


def table(rows: Sequence[Figures]) -> str:
    heads = ("peers", "quiet: B/s", "messages/s", "opened/s", "connections", "join: s", "B", "messages", "welcome KiB",
             "death: first s", "last s", "B", "messages")  # fmt: skip
    lines = [[
        f"{f.size}", f"{f.quiet.bytes:.0f}", f"{f.quiet.messages:.2f}", f"{f.quiet.opened:.2f}", f"{f.connections}",
        f"{f.join_s:.1f}", f"{f.join.bytes:.0f}", f"{f.join.messages:.1f}", f"{f.welcome_bytes / 1024:.0f}",
        f"{f.detection_s:.1f}", f"{f.gone_s:.1f}", f"{f.death.bytes:.0f}", f"{f.death.messages:.1f}",
    ] for f in rows]  # fmt: skip
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in [heads, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scale", description="What membership costs each peer.")
    parser.add_argument("sizes", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="lan")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(table([measure(size, args.seed, PRESETS[args.preset]) for size in args.sizes]))


if __name__ == "__main__":
    main()
