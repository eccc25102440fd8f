"""A simulated process: pure machines, and a driver that does for them what ``mesh.peer`` does for the real ones.

Membership is always there. Further machines are plugged in as ``Part``s, made anew at every start of the process:

    class Convene(Part):
        takes = (Invite, Accept, Decline, Go)
        def __init__(self, node): self.machine = Convening(node.id, "gradients")
        def receive(self, sender, message, now): return self.machine.receive(sender, message, now)
        def tick(self, now): return self.machine.tick(now)

    Node(world, address, parts=[Convene])

Effects are executed one after the other, and the process may be killed between any two of them (``doom``). What is to
outlive a process, as a synced file does, belongs in ``node.disk``, which ``restart`` hands on. Work that takes time is
a ``thread`` of the process: a generator that yields seconds to wait, and effects.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mesh.effects import Note, Send
from mesh.identity import PeerCard, PeerId, Role
from mesh.membership import (
    LOCAL,
    Asleep,
    Changed,
    Contacted,
    Departed,
    Joined,
    Membership,
    Preset,
    Refusal,
    Suspected,
)
from transport.messages import (
    Ack,
    Compare,
    Envelope,
    Hello,
    Nack,
    NotMe,
    Ping,
    PingReq,
    Refused,
    Sync,
    Welcome,
)

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 0.1
MEMBERSHIP = (Hello, Welcome, Refused, Ping, Ack, PingReq, Nack, Sync, Compare, NotMe)


class Part:
    """One more machine of a node. Every method returns effects; one that is not ``Send`` or ``Note`` is offered to all
    parts through ``effect``. ``now`` is the node's own clock."""

    takes: tuple[type, ...] = ()

    def __init__(self, node: "Node"):
        self.node = node

    def start(self, now: float) -> Iterable[Any]:
        return ()

    def receive(self, sender: PeerId, message: Any, now: float) -> Iterable[Any]:
        return ()

    def tick(self, now: float) -> Iterable[Any]:
        return ()

    def members(self, now: float) -> Iterable[Any]:
        """Somebody joined, left, died or changed its card: see ``node.membership.alive``."""
        return ()

    def effect(self, effect: Any, now: float) -> Iterable[Any]:
        return ()


class Node:
    """A process bound to ``address``. It starts when it is made."""

    def __init__(
        self,
        world: "World",
        address: str,
        *,
        name: str = "",
        role: Role = "rollout",
        seeds: Sequence[str] = (),
        preset: Preset = LOCAL,
        parts: Sequence[Callable[["Node"], Part]] = (),
        machine: type[Membership] = Membership,
        disk: dict[str, Any] | None = None,
        agreed: dict[str, str] | None = None,
    ):
        self.world, self.address, self.role, self.seeds, self.preset = world, address, role, tuple(seeds), preset
        self.name = name or f"{role}-{address.rsplit(':', 1)[-1]}"
        self.disk: dict[str, Any] = {} if disk is None else disk
        self.agreed = agreed or {}
        self.running, self.stopped, self.left = True, False, False
        self.view: dict[PeerId, None] = {}  # by Joined and Departed alone
        self.suspected: dict[PeerId, float] = {}  # when a member was last accused, by this node's clock
        self.departures: list[tuple[float, Departed]] = []
        self.refusals: list[str] = []
        self.fuse: int | None = None  # effects until the process dies
        self.parts: list[Part] = []
        self._factories, self._machine = tuple(parts), machine
        self._inbox: list[Envelope] = []
        self._overdue: list[Callable[[], None]] = []  # what became due while it was stopped
        self._clock_offset = world.rng.uniform(0.0, 1000.0)  # clocks of different processes have nothing in common
        self._life = 0
        world.nodes.append(self)
        if address in world.bound:
            raise ValueError(f"{address} is in use by {world.bound[address].label}")
        world.bound[address] = self
        self._begin()

    @property
    def label(self) -> str:
        return f"{self.name}/{self.id[:4]}"

    @property
    def now(self) -> float:
        return self.world.now + self._clock_offset

    # Life -------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new id and new machines: at the start, and after a long sleep."""
        rng = self.world.rng
        self.id: PeerId = f"{rng.getrandbits(64):016x}"
        card = PeerCard(
            id=self.id, name=self.name, role=self.role, host="sim", address=self.address, bulk_address=self.address,
            agreed=self.agreed,
        )  # fmt: skip
        self.membership = self._machine(card, self.preset, rng, self.now)
        self.view, self.suspected, self.departures = {}, {}, []
        self._life += 1
        self.world.log(self, f"starts at {self.address}")
        self.execute(self.membership.contact(self.seeds, self.now))
        self.parts = [factory(self) for factory in self._factories]
        for part in self.parts:
            self.execute(part.start(self.now))
        self._schedule_tick(self._life)

    def _schedule_tick(self, life: int) -> None:
        weather, rng = self.world.weather, self.world.rng
        late = weather.late_s * rng.random() if rng.random() < weather.late_tick else 0.0
        self.world.after(TICK_S + late, lambda: self._tick(life))

    def _tick(self, life: int) -> None:
        if not self.running or life != self._life:
            return
        if not self.stopped:
            self.tick()
        self._schedule_tick(self._life if life == self._life else -1)

    def tick(self) -> None:
        life = self._life
        self.execute(self.membership.tick(self.now))
        for part in self.parts:
            if self.running and life == self._life:
                self.execute(part.tick(self.now))

    def kill(self) -> None:
        """SIGKILL: no goodbye; the address is free at once."""
        if self.running:
            self.world.log(self, "is killed")
            self._end()

    def doom(self, effects: int) -> None:
        """Kill it after so many further effects, between two of them."""
        self.fuse = effects

    def leave(self, reason: str) -> None:
        if self.running:
            self.world.log(self, f"leaves: {reason}")
            self.left = True
            self.execute(self.membership.leave(reason, self.now))
            self._end()

    def _end(self) -> None:
        if self.running:
            self.running = False
            del self.world.bound[self.address]

    def stop(self) -> None:
        """SIGSTOP: messages pile up, the clock goes on."""
        if self.running and not self.stopped:
            self.world.log(self, "is stopped")
            self.stopped = True

    def wake(self) -> None:
        if not self.running or not self.stopped:
            return
        self.world.log(self, "wakes")
        self.stopped = False
        inbox, self._inbox = self._inbox, []
        overdue, self._overdue = self._overdue, []
        threads_first = bool(overdue) and self.world.rng.random() < 0.5  # before its loop notices that it slept
        for due in overdue if threads_first else []:
            due()
        for envelope in inbox:
            self.deliver(envelope)
        for due in [] if threads_first else overdue:
            due()

    def restart(self, **changes: Any) -> "Node":
        """A new process at the same address, with what the old one had synced to disk."""
        self.kill()
        settings: dict[str, Any] = {
            "name": self.name, "role": self.role, "seeds": self.seeds, "preset": self.preset,
            "parts": self._factories, "machine": self._machine, "disk": self.disk, "agreed": self.agreed,
        }  # fmt: skip
        return Node(self.world, self.address, **{**settings, **changes})

    # Work -------------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, do: Callable[[], Iterable[Any]]) -> None:
        """Execute the effects that ``do`` returns, unless this life is over then. A stopped process does so when it
        wakes."""
        life = self._life

        def due() -> None:
            if self.running and life == self._life:
                if self.stopped:
                    self._overdue.append(due)
                else:
                    self.world.touched = self
                    self.execute(do())

        self.world.after(delay_s, due)

    def thread(self, steps: Iterator[float | Iterable[Any]]) -> None:
        """Run ``steps`` beside the loop: a float that it yields is a wait in seconds, anything else are effects to
        execute. It ends with the process."""
        life = self._life

        def resume() -> Iterable[Any]:
            for step in steps:
                if isinstance(step, float):
                    self.after(step, resume)
                    break
                self.execute(step)
                if not self.running or life != self._life:
                    break
            return ()

        self.after(0.0, resume)

    # Driver -----------------------------------------------------------------------------------------------------------

    def deliver(self, envelope: Envelope) -> None:
        if not self.running:
            return
        if self.stopped:
            self._inbox.append(envelope)
            del self._inbox[:-2000]  # a pipe's high-water mark
            return
        sender, message = envelope.sender, envelope.body
        if envelope.to and envelope.to != self.id:
            if not isinstance(message, NotMe):
                self.world.send(self, sender, envelope.reply, NotMe(envelope.to))
        elif isinstance(message, MEMBERSHIP):
            self.execute(self.membership.receive(sender, message, self.now, envelope.reply))
        else:
            for part in self.parts:
                if isinstance(message, part.takes):
                    self.execute(part.receive(sender, message, self.now))

    def execute(self, effects: Iterable[Any]) -> None:
        life = self._life
        self.world.touched = self
        for effect in effects:
            if self.fuse is not None:
                self.fuse -= 1
                if self.fuse < 0:
                    self.kill()
            if not self.running or life != self._life:
                return
            self._execute(effect)

    def _execute(self, effect: Any) -> None:
        match effect:
            case Send(to, message, address, bulk):
                card = self.membership.card_of(to)
                if address or card:
                    self.world.send(self, to, address or card.address, message, bulk=bulk)
                return
            case Note(text, level):
                self.world.log(self, f"{level}: {text}")
                return
            case Joined(card):
                assert card.id not in self.view, f"{self.label}: {card.name} joined twice"
                self.view[card.id] = None
                self.world.log(self, f"+ {card.name}/{card.id[:4]}")
            case Departed(card, dead, reason):
                assert card.id in self.view, f"{self.label}: {card.name} departed without having joined"
                del self.view[card.id]
                self.departures.append((self.now, effect))
                self.world.log(self, f"- {card.name}/{card.id[:4]} {'died' if dead else 'left'}: {reason}")
            case Suspected(card, by):
                self.suspected[card.id] = self.now
                self.world.log(self, f"? {card.name}/{card.id[:4]} accused by {by}")
                return
            case Refusal(address, reason):
                self.refusals.append(reason)
                self.world.log(self, f"refused by {address}: {reason}")
            case Asleep(gap_s):
                self.world.log(self, f"slept {gap_s:.1f} s, takes a new id")
                self._begin()
                return
            case Changed() | Contacted():
                pass
        for part in self.parts:
            self.execute(part.effect(effect, self.now))
            if isinstance(effect, Joined | Departed | Changed):
                self.execute(part.members(self.now))
