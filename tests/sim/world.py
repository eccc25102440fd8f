"""A simulated network, its clock and its misfortunes; one integer seed decides all that happens.

Everything is an event in one queue, ordered by time and then by birth, so a seed replays exactly. Nothing iterates over
a set, nothing reads a real clock. After every event the invariants are checked: functions of the world that raise
AssertionError, and find in ``world.touched`` the node that acted, if one did.

The network is as unkind as a real one, and a bit more: a message may be lost, delayed, doubled, overtaken; the first
ones on a new connection may vanish; it is delivered to whatever process is bound to the address when it arrives, which
may not be the one it was meant for; links part in one direction or both.
"""

import heapq
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.identity import PeerId
from transport.messages import Envelope

if TYPE_CHECKING:
    from tests.sim.node import Node

LOG_LINES = 4000


@dataclass(frozen=True)
class Weather:
    """What the network does to each message: probabilities, and seconds."""

    delay_s: float = 0.001  # least
    jitter_s: float = 0.002  # mean of what comes on top, exponential: so messages overtake each other
    loss: float = 0.0
    duplicate: float = 0.0
    straggler: float = 0.0  # comes up to ``straggler_s`` late
    straggler_s: float = 6.0
    connect_loss: float = 0.0  # a message within ``connect_s`` of the first one of a link vanishes
    connect_s: float = 0.2
    late_tick: float = 0.0  # a tick comes up to ``late_s`` late
    late_s: float = 0.3
    bulk_s: float = 0.0  # mean of what comes on top for bulk messages, which have a pipe of their own


CALM = Weather()


class Failure(AssertionError):
    """A promise was broken under this seed; the text says which, and ends with the last events."""


class World:
    scenario = "membership"

    def __init__(self, seed: int):
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.weather = CALM
        self.nodes: list[Node] = []  # every process there ever was, in order of birth
        self.bound: dict[str, Node] = {}
        self.touched: Node | None = None
        self.invariants: list[Callable[[World], None]] = []
        self.events = 0
        self.sent = 0
        self.lines: list[str] = []
        self.incarnations: dict[PeerId, int] = {}  # the highest that each peer ever sent about itself
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._cut: dict[tuple[str, str], int] = {}
        self._connected: dict[tuple[str, str], float] = {}

    # Time -------------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, do))

    def at(self, time: float, do: Callable[[], None]) -> None:
        self.after(max(0.0, time - self.now), do)

    def run(self, until: float) -> None:
        """Let events happen until this time. Raises Failure when an invariant breaks."""
        try:
            while self._queue and self._queue[0][0] <= until:
                self.now, _, do = heapq.heappop(self._queue)
                self.events += 1
                self.touched = None
                do()
                for invariant in self.invariants:
                    invariant(self)
            self.now = max(self.now, until)
        except AssertionError as e:
            raise self.failure(str(e)) from e
        except Exception as e:  # of a machine: whatever it is given, it must not raise
            where = traceback.extract_tb(e.__traceback__)[-1]
            raise self.failure(f"{type(e).__name__} in {where.name}: {e}") from e

    def failure(self, what: str) -> Failure:
        tail = "\n".join(self.lines[-60:])
        replay = f"python -m tests.sim --scenario {self.scenario} {self.seed}"
        return Failure(f"seed {self.seed}, at {self.now:.3f} s: {what}\n{tail}\n({replay})")

    def log(self, who: "Node | None", text: str) -> None:
        self.lines.append(f"{self.now:9.3f}  {who.label if who else '-':<14} {text}")
        if len(self.lines) > 2 * LOG_LINES:
            del self.lines[:LOG_LINES]

    @property
    def living(self) -> list["Node"]:
        """The processes that run or are stopped, in order of birth."""
        return [node for node in self.nodes if node.running]

    # Network ----------------------------------------------------------------------------------------------------------

    def cut(self, sources: Sequence[str], targets: Sequence[str], *, both: bool = True) -> Callable[[], None]:
        """Part the links between two sets of addresses; returns what heals them again."""
        pairs = [(s, t) for s in sources for t in targets]
        pairs += [(t, s) for s, t in pairs] if both else []
        for pair in pairs:
            self._cut[pair] = self._cut.get(pair, 0) + 1

        def heal() -> None:
            for pair in pairs:
                if self._cut.get(pair, 0):
                    self._cut[pair] -= 1

        return heal

    def heal(self) -> None:
        self._cut.clear()

    def parted(self, source: str, target: str) -> bool:
        """Whether nothing gets from one address to the other."""
        return bool(self._cut.get((source, target)))

    def send(self, source: "Node", to: str, address: str, message: Any, *, bulk: bool = False) -> None:
        """Put a message on the wire; what comes of it is up to the weather."""
        self.sent += 1
        self.incarnations[source.id] = source.membership.incarnation + source.left
        weather, chance = self.weather, self.rng.random
        link = (source.id, address)
        up_at = self._connected.setdefault(link, self.now + weather.connect_s * chance())
        envelope = Envelope(run="sim", sender=source.id, to=to, reply=source.address, body=message)
        if chance() < weather.loss or (self.now < up_at and chance() < weather.connect_loss):
            return
        for _ in range(1 + (chance() < weather.duplicate)):
            delay = weather.delay_s + self.rng.expovariate(1.0) * weather.jitter_s
            if bulk and weather.bulk_s:
                delay += self.rng.expovariate(1.0) * weather.bulk_s
            if chance() < weather.straggler:
                delay += weather.straggler_s * chance()
            self.after(delay, lambda: self._deliver(source.address, address, envelope))

    def _deliver(self, source: str, address: str, envelope: Envelope) -> None:
        node = self.bound.get(address)
        if node and not self.parted(source, address):
            node.deliver(envelope)
