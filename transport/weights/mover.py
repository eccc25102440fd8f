"""The mover: a thread that builds the groups of one kind of formation (weights, gradients) and runs their collectives.

The peer's loop thread must answer pings, so nothing that waits for another peer runs there; it hands work to the mover,
in order. What the mover is doing for a formation ends early as soon as that formation is disbanded or a newer one is to
be built: each formation has an ``abandon`` event that its build and its operations watch.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from mesh.identity import PeerId
from mesh.version import Ballot
from transport.formation import Formation, FormationBroken
from transport.messages import Go, Member
from transport.port import Port

Build = Callable[[Go, threading.Event], Formation]
"""Builds the group of a Go and returns it connected; raises FormationBroken, also soon after the event is set."""

Job = Callable[[Formation | None, threading.Event], None]
"""Runs on the mover with the formation it was meant for, None when that is gone, and its abandon event."""

MOST_QUEUED = 256  # far above what the schedules ever have open; a full queue is a bug, not a wait
CLOSE_S = 5.0


class Mover:
    """``formed`` and ``failed`` are posted to the loop. An error that is no FormationBroken ends the loop with it: a
    peer whose mover is gone must not live on silently."""

    def __init__(
        self,
        port: Port,
        build: Build,
        formed: Callable[[Formation], None],
        failed: Callable[[Go, str, Sequence[Member]], None],
        *,
        name: str = "mesh-weights",
    ) -> None:
        self._port = port
        self._make = build
        self._formed = formed
        self._failed = failed
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_QUEUED)
        self._lock = threading.Lock()
        self._wanted: Ballot | None = None
        self._next: tuple[Go, threading.Event] | None = None  # to be built
        self._abandon = threading.Event()
        self._current: Formation | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def form(self, go: Go) -> None:
        """Give up the present formation and build this one."""
        with self._lock:
            if self._wanted is not None and go.ballot <= self._wanted:
                return
            self._abandon.set()
            self._abandon = abandon = threading.Event()
            self._wanted = go.ballot
            waiting, self._next = self._next, (go, abandon)
        if waiting is None:  # however many are called for meanwhile, the newest is built
            self._queue.put_nowait(self._build)

    def disband(self, ballot: Ballot) -> None:
        """End what runs in this formation and close it."""
        with self._lock:
            if self._wanted != ballot:
                return
            self._abandon.set()
        self._queue.put_nowait(self._drop)

    def run(self, ballot: Ballot, job: Job) -> None:
        """Run ``job`` in the formation of this ballot, after what was handed in before."""
        with self._lock:
            abandon = self._abandon

        def work() -> None:
            here = self._current is not None and self._current.ballot == ballot
            job(self._current if here else None, abandon)

        self._queue.put_nowait(work)

    def do(self, work: Callable[[], None]) -> None:
        """Run something that belongs to no formation and would hold up the loop."""
        self._queue.put_nowait(work)

    def close(self) -> None:
        """Abandon everything and end the thread, within a few seconds."""
        self._abandon.set()
        self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while (work := self._queue.get()) is not None:
                work()
            self._drop()
        except BaseException as e:
            error = e
            self._port.post(lambda: _raise(error))
            raise

    def _build(self) -> None:
        with self._lock:
            called, self._next = self._next, None
        assert called is not None
        go, abandon = called
        self._drop()
        if abandon.is_set():
            return
        try:
            formation = self._make(go, abandon)
        except FormationBroken as e:
            text, at_fault = str(e), e.members
            if not abandon.is_set():
                self._port.post(lambda: self._failed(go, text, at_fault))
            return
        if abandon.is_set():
            formation.close()
            return
        self._current = formation
        self._port.post(lambda: self._formed(formation))

    def _drop(self) -> None:
        formation, self._current = self._current, None
        if formation is not None:
            formation.close()


def peer_name(port: Port, peer: PeerId) -> str:
    """``name@host`` for a person; the id of a peer that is gone."""
    for card in port.live():
        if card.id == peer:
            return card.name if "@" in card.name else f"{card.name}@{card.host}"
    return f"peer {peer} (gone)"


def _raise(error: BaseException) -> None:
    raise error
