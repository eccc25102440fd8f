"""One process of the mesh: its endpoint, its view of who is alive, its part in formations.

One thread, the *loop*, owns the sockets and every pure machine: it receives, hands each message to the machine or
handler it is for, ticks the machines and executes their effects in order. Work (sampling, training, collectives) runs
on other threads and reaches the loop through ``post`` and ``call``: the peer answers pings while torch computes.
"""

import collections
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from mesh import convening as conv
from mesh import membership as swim
from mesh.config import Config
from mesh.effects import Note, Send
from mesh.exits import Slept
from mesh.identity import PeerCard, PeerId, Role, new_peer_id
from mesh.quorum import Quorum, Shortage
from mesh.rendezvous import Rendezvous, Seeds
from mesh.roster import MAX_BUSY_S
from mesh.secret import VARIABLE, Keys
from transport.endpoint import REFUSES, Endpoint
from transport.messages import (
    Accept,
    Ack,
    Compare,
    Decline,
    Go,
    Hello,
    Invite,
    Kind,
    Look,
    Member,
    Message,
    Nack,
    NotMe,
    Ping,
    PingReq,
    Refused,
    Status,
    StoreAnswer,
    StoreGet,
    StoreSet,
    Sync,
    Welcome,
)
from transport.store_host import StoreHost

T = TypeVar("T")

WARNING = "! "  # before an event that a person should look into
COUNT_S = 0.25  # between two looks at whether enough peers are here
BUSY_AGAIN_S = 60.0  # between two announcements of work that lasts longer than one may announce

TICK_S = 0.05
"""How often the machines look at the clock; a small part of the shortest timeout among the presets."""

BUSY_GAP_S, BUSY_SHARE = 0.5, 0.1
"""A gap in which the process used this share of a core was work that kept the loop waiting, not sleep."""

MEMBERSHIP = (Hello, Welcome, Refused, Ping, Ack, PingReq, Nack, Sync, Compare, NotMe)
CARDS_ANSWER_S = 1.5
"""How long a starting peer waits for the owners of cards in a directory; the living answer within milliseconds."""

CONVENING = (Invite, Accept, Decline, Go)
KINDS: tuple[Kind, ...] = ("weights", "gradients")


def clock() -> float:
    """Seconds of a clock that goes on while the machine is suspended: a peer that slept must notice."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Peer:
    """Implements ``transport.port.Port``. ``start`` joins the mesh, ``leave`` says goodbye and closes everything."""

    def __init__(
        self,
        *,
        config: Config,
        role: Role,
        name: str,
        host: str,
        run: str,
        keys: Keys,
        rendezvous: Rendezvous,
        address: str,
        agreed: dict[str, str] | None = None,
    ):
        self.id: PeerId = new_peer_id()
        self.config = config
        self.role: Role = role
        self.name = name
        self.log = logging.getLogger("mesh")
        self.events: collections.deque[tuple[float, str]] = collections.deque(maxlen=200)
        self.look: Callable[[], Status] | None = None
        self.refused = ""
        self.longest_gap_s = 0.0
        self.slept_s = 0.0
        self.short: Shortage | None = None  # of trainers or rollouts, as mesh.min_trainers and mesh.min_rollouts say
        self._quorum: Quorum | None = None
        self._busy: dict[object, float] = {}  # until when, by what keeps this peer busy
        self._rendezvous = rendezvous
        self._endpoint = Endpoint(run=run, me=self.id, keys=keys, host=address, port=config.mesh.port)
        self.run = run
        self.ip = address
        card = PeerCard(
            id=self.id,
            name=name,
            role=role,
            host=host,
            address=self._endpoint.address,
            bulk_address=self._endpoint.bulk_address,
            agreed=agreed or {},
        )
        self.membership = self._new_membership(card)
        self.convening = {kind: conv.Convening(self.id, kind) for kind in KINDS}
        self.stores = StoreHost()
        self._live: tuple[PeerCard, ...] = (card,)
        self._handlers: dict[type, list[Callable[[PeerId, Any], None]]] = {}
        self._go_handlers: dict[str, list[Callable[[Go], None]]] = {kind: [] for kind in KINDS}
        self._member_handlers: list[Callable[[], None]] = []
        self._departed_handlers: list[Callable[[PeerCard, bool, str], None]] = []
        self._timers: list[list[Any]] = []
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._woken = False
        self._store_calls: dict[tuple[Kind, Any, int], Future[StoreAnswer]] = {}
        self._stop = threading.Event()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="mesh-loop", daemon=True)

    # ------------------------------------------------------------------------------------------------------------------
    # Life
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def card(self) -> PeerCard:
        return self.membership.card

    @property
    def counters(self) -> collections.Counter[str]:
        return self._endpoint.counters

    def start(self) -> None:
        """Publish the card, contact the rendezvous, start the loop. Raises ValueError when the rendezvous cannot be
        used (no permission, a name that does not resolve)."""
        self.membership = self._new_membership(self.card)  # its time begins now, however long loading took
        self.every(BUSY_AGAIN_S, lambda: self._announce_busy() if self._busy else None)
        self._rendezvous.publish(self.card, self.run)
        addresses = [a for a in self._rendezvous.addresses() if a != self.address]
        self._run_effects(self.membership.contact(addresses, clock()))
        self.every(1.0 if self._alone() else 5.0, self._seek)
        self.every(60.0, self._rendezvous.renew)
        self._thread.start()

    def _new_membership(self, card: PeerCard) -> swim.Membership:
        return swim.Membership(card, swim.PRESETS[self.config.mesh.preset], random.Random(self.id), clock())

    def _alone(self) -> bool:
        return len(self._live) == 1

    def _seek(self) -> None:
        """A lone peer looks at the rendezvous again: whoever starts at the same moment must find each other."""
        known = {card.address for card in self._live}
        found = [a for a in self._rendezvous.addresses() if a not in known]
        if found:
            self._run_effects(self.membership.contact(found, clock()))

    def join(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until somebody of the mesh has answered. Addresses that a user named must answer; where none are, or
        only cards that may be old, a lone first peer goes on after a moment. ``check`` is called all the while.

        Raises ValueError naming the address, what was seen there, and what to change."""
        self._find(timeout_s, check)
        if self.role != "observer":
            self.call(self._begin_to_count)

    def _begin_to_count(self) -> None:
        mesh = self.config.mesh
        least: dict[Role, int] = {"trainer": mesh.min_trainers, "rollout": mesh.min_rollouts}
        self._quorum = Quorum(least, mesh.grace_s, clock())
        self._count()
        self.every(COUNT_S, self._count)

    def _find(self, timeout_s: float, check: Callable[[], None]) -> None:
        seeds = [a for a in self._rendezvous.addresses() if a != self.address]
        if not seeds:
            self._look_at_strangers()
            return
        needed = isinstance(self._rendezvous, Seeds)
        deadline = clock() + (timeout_s if needed else min(timeout_s, CARDS_ANSWER_S))
        while clock() < deadline:
            if self.refused:
                raise ValueError(self.refused)
            if not self._alone():
                return
            self.check()
            check()
            time.sleep(0.02)
        if not needed:
            self._look_at_strangers()
            return
        seen = "; ".join(self.call(partial(self._endpoint.diagnose, a), 20.0) for a in seeds[:3])
        raise ValueError(
            f"no peer of this run answered {self.name} on {self.card.host} within {timeout_s:.0f} s: {seen}; check "
            f"mesh.rendezvous, and that others reach this peer at {self.address} (mesh.address)"
        )

    def _look_at_strangers(self) -> None:
        """A peer that is alone in a directory where others keep cards with another secret would wait for ever.

        Raises ValueError naming one that lives."""
        for name, address in getattr(self._rendezvous, "strangers", [])[:3]:
            if REFUSES in self.call(partial(self._endpoint.diagnose, address), 20.0):
                raise ValueError(
                    f"{name} keeps its card in the same directory with another secret, so {self.name} on "
                    f"{self.card.host} cannot join it: give all peers of a run the same {VARIABLE}, or another --run"
                )

    def leave(self, reason: str, linger_s: float = 0.3) -> None:
        """Say goodbye, take the card back, stop the loop and close the sockets. Safe to call twice."""
        if self._thread.is_alive() and not self._stop.is_set():
            self.post(lambda: self._run_effects(self.membership.leave(reason, clock())))
            self._stop.wait(linger_s)  # goodbyes leave the pipes; lost ones are replaced by detection
        self._stop.set()
        self._endpoint.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._rendezvous.withdraw()
        self._endpoint.close()

    def check(self) -> None:
        """Raises when the loop has ended or this peer slept: what it remembers no longer holds."""
        if self.refused and self._alone():
            raise ValueError(self.refused)
        if self.slept_s:
            raise Slept(f"this process did not run for {self.slept_s:.0f} s and the others may hold it dead")
        self._check_loop()

    def _check_loop(self) -> None:
        if self._dead is not None:
            raise RuntimeError(f"the loop of {self.name} ended: {self._dead!r}") from self._dead

    # ------------------------------------------------------------------------------------------------------------------
    # What the parts of a peer ask of it (transport.port.Port)
    # ------------------------------------------------------------------------------------------------------------------

    def on(self, kind: type[Message], handler: Callable[[PeerId, Any], None]) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def on_go(self, kind: Kind, handler: Callable[[Go], None]) -> None:
        self._go_handlers[kind].append(handler)

    def on_members(self, handler: Callable[[], None]) -> None:
        self._member_handlers.append(handler)

    def on_departed(self, handler: Callable[[PeerCard, bool, str], None]) -> None:
        """Call ``handler(card, dead, reason)`` on the loop when a peer died or left."""
        self._departed_handlers.append(handler)

    def every(self, period_s: float, fn: Callable[[], None]) -> None:
        self._timers.append([clock() + period_s, period_s, fn])

    def post(self, fn: Callable[[], None]) -> None:
        self._posted.append(fn)
        if not self._woken:  # one wake is enough for all that is posted before the loop looks
            self._woken = True
            self._endpoint.wake()

    def call(self, fn: Callable[[], T], timeout_s: float = 10.0) -> T:
        if threading.current_thread() is self._thread:
            return fn()
        self._check_loop()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn())
            except BaseException as e:
                future.set_exception(e)

        self.post(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._check_loop()
            raise TimeoutError(f"the loop of {self.name} did not answer within {timeout_s:.0f} s") from None

    def send(self, to: PeerId, message: Message, *, bulk: bool = False) -> bool:
        card = self.membership.card_of(to)
        if card is None:
            return False
        return self._endpoint.send(card.bulk_address if bulk else card.address, to, message, bulk=bulk)

    def live(self, role: Role | None = None) -> list[PeerCard]:
        return [card for card in self._live if role is None or card.role == role]

    def convene(self, kind: Kind, members: Sequence[Member]) -> None:
        self._run_effects(self.convening[kind].convene(members, clock()))

    def note(self, text: str, level: str = "info") -> None:
        self.events.append((time.time(), text if level == "info" else WARNING + text))
        self.log.log(getattr(logging, level.upper()), text)

    def update_card(self, **changes: Any) -> None:
        """*any thread*: change this peer's card (version, offers, busy_for_s, ...) and let the news spread."""
        self.post(lambda: self._run_effects(self.membership.update(clock(), **changes)))

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """*any thread but the loop*: what is done inside may keep this peer from answering for ``seconds``, by holding
        the interpreter: the others wait so long before they call it dead, and no longer than 300 s after the loop last
        ran. They are told before it begins, and again when it has ended."""
        if not self._thread.is_alive():  # nobody knows this peer yet
            yield
            return
        what = object()

        def begin() -> None:
            self._busy[what] = clock() + seconds
            self._announce_busy()

        def end() -> None:
            del self._busy[what]
            self._announce_busy()

        self.call(begin)
        try:
            yield
        finally:
            self.post(end)

    def _announce_busy(self) -> None:
        left_s = max(self._busy.values(), default=0.0) - clock()
        self._run_effects(self.membership.update(clock(), busy_for_s=min(max(0.0, left_s), MAX_BUSY_S)))

    def request_store(self, message: StoreSet | StoreGet, timeout_s: float) -> StoreAnswer:
        """The answer of the store that the ballot's convener keeps; the request is repeated until it comes. Called on
        a thread that builds a group, never on the loop. Raises TimeoutError naming the convener."""
        convener = message.ballot.convener
        if convener == self.id:
            return self.call(lambda: self.stores.receive(self.id, message), timeout_s)
        future: Future[StoreAnswer] = Future()
        key = (message.kind, message.ballot, message.number)
        self._store_calls[key] = future
        deadline = clock() + timeout_s

        def ask() -> None:
            self.send(convener, message)

        try:
            while (left := deadline - clock()) > 0:
                self.post(ask)
                try:
                    return future.result(min(0.25, left))
                except TimeoutError:
                    continue
            raise TimeoutError(f"the store of formation {message.ballot} at {convener} did not answer in {timeout_s} s")
        finally:
            self._store_calls.pop(key, None)

    # ------------------------------------------------------------------------------------------------------------------
    # The loop
    # ------------------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            last, worked = clock(), time.process_time()
            next_tick = last
            while not self._stop.is_set():
                wait = max(0.0, min([next_tick, *(t[0] for t in self._timers)]) - clock())
                received = self._endpoint.receive(wait)
                now = clock()
                self.longest_gap_s = max(self.longest_gap_s, now - last - wait)
                if now - last > BUSY_GAP_S and time.process_time() - worked > BUSY_SHARE * (now - last):
                    self.membership.was_busy(now)
                last, worked = now, time.process_time()
                for envelope in received:
                    self._dispatch(envelope.sender, envelope.body, envelope.reply, now)
                self._woken = False  # before looking: what is posted from here on wakes again
                while self._posted:
                    self._posted.popleft()()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._run_effects(self.membership.tick(now))
                    for machine in self.convening.values():
                        self._run_effects(machine.tick(now))
                for timer in self._timers:
                    if now >= timer[0]:
                        timer[0] = now + timer[1]
                        timer[2]()
        except BaseException as e:  # whoever waits on the loop must learn that it is gone
            self._dead = e
            self.log.exception("the loop ended")
            self._stop.set()

    def _dispatch(self, sender: PeerId, body: Any, reply: str, now: float) -> None:
        if isinstance(body, MEMBERSHIP):
            self._run_effects(self.membership.receive(sender, body, now, reply))
        elif isinstance(body, CONVENING):
            self._run_effects(self.convening[body.kind].receive(sender, body, now))
        elif isinstance(body, StoreSet | StoreGet):
            try:
                self.send(sender, self.stores.receive(sender, body))
            except ValueError as e:  # of a formation that is gone: its asker has a deadline of its own
                self.log.debug("store: %s", e)
        elif isinstance(body, StoreAnswer):
            future = self._store_calls.get((body.kind, body.ballot, body.number))
            if future is not None and not future.done():
                future.set_result(body)
        elif isinstance(body, Look):
            if self.look is not None:
                self.send(sender, self.look())
        else:
            for handler in self._handlers.get(type(body), ()):
                handler(sender, body)

    def _run_effects(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Note():
                    self.note(effect.text, effect.level)
                case swim.Joined(card):
                    self.refused = ""
                    self._changed()
                    if card.role != "observer":
                        self.note(f"{card.name} joined")
                case swim.Changed():
                    self._changed()
                case swim.Suspected(card, by):
                    self.log.info("%s is suspected to be dead by %s", card.name, by)
                case swim.Departed(card, dead, reason):
                    self._departed(card, dead, reason)
                case swim.Refusal(address, reason) if self._alone():
                    self.refused = f"refused by the peer at {address}: {reason}"
                case swim.Asleep(gap_s):
                    self.slept_s = gap_s
                case conv.Form(go):
                    if go.ballot.convener == self.id:
                        self.stores.open(go.kind, go.ballot)
                    for handler in self._go_handlers[go.kind]:
                        handler(go)

    def _send(self, effect: Send) -> None:
        try:
            if effect.address:
                self._endpoint.send(effect.address, effect.to, effect.message, bulk=effect.bulk)
            else:
                self.send(effect.to, effect.message, bulk=effect.bulk)
        except ValueError as e:
            if not isinstance(effect.message, MEMBERSHIP):
                raise
            self.log.warning("news is not passed on: %s", e)  # of others, and larger than any card has reason to be

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        self._endpoint.forget(card.address)
        self._endpoint.forget(card.bulk_address)
        self._changed()
        if card.role != "observer":
            self.note(
                f"{card.name} {'died' if dead else 'left'}{': ' + reason if reason else ''}",
                "warning" if dead else "info",
            )
        if self._quorum is not None:
            self._quorum.departed(card, dead, reason, clock())
        for handler in self._departed_handlers:
            handler(card, dead, reason)

    def _count(self) -> None:
        """Whether enough peers are here. Who is not, is said now and then; what follows is the role's to decide."""
        assert self._quorum is not None
        self.short = short = self._quorum.check(self._live, clock())
        if short is not None and short.due and not short.over:
            self.note(short.text, "warning")

    def _changed(self) -> None:
        self._live = tuple(sorted(self.membership.alive, key=lambda card: card.id))
        for machine in self.convening.values():
            machine.live([card.id for card in self._live])
        for handler in self._member_handlers:
            handler()
