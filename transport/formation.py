"""Process groups over the members alive now, named by a ballot, in which every operation has a deadline.

A group is built directly (``ProcessGroupGloo``, ``ProcessGroupNCCL``), never the global default group, over a store
that only mesh peers can reach. Building has three stages, so that an error can say what is wrong: every member writes a
card into the store (who never came is named), the cards are compared (what cannot work together is named, both sides),
and the ranks connect.

What torch's groups do when a member dies, and what follows from it here:

* gloo tells the dead member's neighbours at once and the others only at the operation's deadline; a stopped member is
  noticed by nobody before it. So operations are short, and the caller may end one early through ``abandon`` as soon as
  membership reports a death.
* ``abort`` of gloo does not end a pending operation: it goes on, up to its own deadline, and may touch its buffer.
  ``ended()`` tells when it no longer does (``buffers.Leases.quarantine``).
* dropping a gloo group waits for its pending operation. ``close`` therefore leaves that to a thread of its own.

A formation whose operation failed is broken for good: build a new one under a new ballot. The methods block; call them
from the one thread that owns the formation, never from the endpoint's. ``close`` may come from any thread.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from mesh.version import Ballot
from transport.messages import Go, Kind, Member
from transport.nccl_env import NCCL_ENVIRONMENT

SLICE_S = 0.02  # how soon an abandoned operation is noticed
GRACE_S = 0.25  # for torch to report an operation's time-out itself: then the buffer is known to be free
CLOSE_S = 0.5  # most that close() waits
POLL_FIRST_S, POLL_MOST_S = 0.002, 0.05


class FormationBroken(RuntimeError):
    """A group could not be built, or an operation in it failed. Says ballot, what, and after how long; ``members`` are
    those known to be at fault (who never came, or runs something else), empty when torch does not tell."""

    def __init__(self, text: str, members: Sequence[Member] = ()) -> None:
        super().__init__(text)
        self.members = tuple(members)


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """What a member writes into the store first: what must be alike for a group to work."""

    host: str
    backend: str
    torch: str
    nccl: str = ""
    environment: dict[str, str] = {}
    gpu: str = ""  # its UUID


class Formation:
    """A built group. ``rank`` is this member's index in ``members``, ``size`` their number."""

    def __init__(
        self, kind: Kind, ballot: Ballot, members: Sequence[Member], rank: int, group: Any, store: Store, backend: str
    ) -> None:
        self.kind: Kind = kind
        self.ballot = ballot
        self.members = tuple(members)
        self.rank = rank
        self.size = len(self.members)
        self.broken: FormationBroken | None = None
        self._group = group
        self._store: Store | None = store  # torch calls into it as long as the group lives
        self._backend = backend
        self._work: Any = None
        self._closing = threading.Event()

    @classmethod
    def build(
        cls,
        go: Go,
        me: Member,
        store: Store,
        *,
        host: str,
        backend: str = "gloo",
        timeout_s: float,
        abandon: threading.Event | None = None,
    ) -> "Formation":
        """Build the group of ``go`` and return it connected; ``me`` must be one of its members.

        ``host`` is this member's own address or host name, to which its data sockets bind and by which the others reach
        it: the address chosen for the mesh, not what the machine's name happens to resolve to. ``store`` is a
        ``MeshStore`` (any torch Store will do: keys are prefixed by kind and ballot). With backend ``nccl`` the current
        CUDA device takes part. Raises FormationBroken within about ``timeout_s`` (plus the store's own
        time-out when the convener, who keeps it, is gone), naming who never came.
        """
        if me not in go.members:
            raise ValueError(f"{_who(me)} is no member of {go.kind} formation {go.ballot}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {backend!r} is not known; use gloo or nccl")
        deadline = time.monotonic() + timeout_s
        name = f"{go.kind} formation {go.ballot}"
        rank = go.members.index(me)
        prefix = f"{go.kind}/{go.ballot.counter}.{go.ballot.convener}"

        def gloo() -> Any:  # it holds ``store``, which torch calls into as long as this runs, abandoned or not
            return _gloo(PrefixStore(prefix, store), rank, len(go.members), host, left)

        try:
            _call_roll(PrefixStore(prefix, store), go, rank, _own_card(host, backend), deadline, timeout_s, abandon)
            left = max(0.1, deadline - time.monotonic())
            if backend == "gloo":
                group = _connected(gloo, deadline, abandon)
            else:
                group = _nccl(PrefixStore(prefix, store), rank, len(go.members), left)
        except FormationBroken:
            raise
        except (TimeoutError, RuntimeError) as e:
            raise FormationBroken(
                f"{name}: rank {rank} could not connect within {timeout_s:.1f} s: {_first_line(e)}"
            ) from e
        formation = cls(go.kind, go.ballot, go.members, rank, group, store, backend)
        if backend == "nccl":
            formation.barrier(max(0.1, deadline - time.monotonic()))  # NCCL connects at its first collective
        return formation

    def broadcast(
        self, tensor: Tensor, src_rank: int, timeout_s: float, abandon: threading.Event | None = None
    ) -> None:
        """Make ``tensor`` (contiguous, same shape and dtype everywhere) on all ranks what it is on ``src_rank``.

        Raises FormationBroken within ``timeout_s`` (plus a quarter second), or about 20 ms after ``abandon`` is set;
        the contents of ``tensor`` are then undefined on receivers, and it must not be reused before ``ended()``.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = src_rank, timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        self._run(
            f"broadcast of {tensor.nbytes} bytes from {_who(self.members[src_rank])} (rank {src_rank})",
            lambda group: group.broadcast([staged], options), timeout_s, abandon,
        )  # fmt: skip
        if staged is not tensor and self.rank != src_rank:
            tensor.copy_(staged)

    def all_reduce(self, tensor: Tensor, timeout_s: float, abandon: threading.Event | None = None) -> None:
        """Replace ``tensor`` on all ranks by the sum over ranks. When it completes, the result is bit-identical on all
        of them. Hand in a copy: after FormationBroken (as for ``broadcast``) the contents are undefined."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.SUM), timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        self._run(
            f"all-reduce of {tensor.nbytes} bytes", lambda group: group.allreduce([staged], options), timeout_s, abandon
        )
        if staged is not tensor:
            tensor.copy_(staged)

    def barrier(self, timeout_s: float, abandon: threading.Event | None = None) -> None:
        """Return when every rank has called it; raises FormationBroken as ``broadcast`` does."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        if self._backend == "nccl":
            options.device_ids = [torch.cuda.current_device()]
        self._run("barrier", lambda group: group.barrier(options), timeout_s, abandon)

    def ended(self) -> bool:
        """Whether the last operation no longer touches its buffer. Any thread; never blocks."""
        work = self._work
        if work is not None and work.is_completed():
            self._work = work = None  # it also keeps the group's sockets open
        return work is None

    def close(self) -> None:
        """Drop the group without asking the others: nobody waits for a dead rank. Returns within half a second; when an
        operation is still pending, its thread and sockets go when it ends. A running operation raises. Idempotent."""
        self._closing.set()
        ballot = f"{self.kind} formation {self.ballot}"
        if self.broken is None:
            self.broken = FormationBroken(f"{ballot} is closed")
        group, self._group = self._group, None
        store, self._store = self._store, None
        if group is None:
            return
        bag = [group, store]
        del group, store
        thread = threading.Thread(target=_drop, args=(bag, self.ended), name=f"close {ballot}", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _run(self, what: str, start: Callable[[Any], Any], timeout_s: float, abandon: threading.Event | None) -> None:
        name = f"{self.kind} formation {self.ballot}"
        group = self._group
        if self.broken is not None:
            raise FormationBroken(f"{name}: no {what}: {self.broken}", self.broken.members)
        if self.size == 1:
            return
        began = time.monotonic()

        def broke(why: str) -> FormationBroken:
            text = f"{name}: {what} {why} after {time.monotonic() - began:.2f} s"
            self.broken = FormationBroken(text)  # another object: a raised one keeps frames, and so sockets, alive
            return FormationBroken(text)

        try:
            self._work = work = start(group)
        except RuntimeError as e:
            raise broke(f"failed: {_first_line(e)}") from e
        while not work.is_completed():
            if self._closing.is_set() or (abandon is not None and abandon.is_set()):
                raise broke("abandoned")
            if time.monotonic() - began > timeout_s + GRACE_S:
                raise broke("timed out")
            if self._backend == "gloo":
                with contextlib.suppress(RuntimeError):  # raised at the end of the slice; what happened is asked below
                    work.wait(timedelta(seconds=SLICE_S))
            else:
                time.sleep(0.0005)  # waiting on NCCL work with a time-out would abort the communicator
        try:
            work.wait()
        except RuntimeError as e:
            raise broke(f"failed: {_first_line(e)}") from e
        finally:
            self._work = None

    def _staged(self, tensor: Tensor) -> Tensor:
        """NCCL reads GPU memory only: a host tensor travels through a copy on the device."""
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.kind} formation {self.ballot}: tensor of shape {tuple(tensor.shape)} is not contiguous"
            )
        return tensor.cuda() if self._backend == "nccl" and not tensor.is_cuda else tensor


def _connected(connect: Callable[[], Any], deadline: float, abandon: threading.Event | None) -> Any:
    """What ``connect`` returns or raises. gloo waits five times its time-out for a member that has left since the roll
    call, and knows no ``abandon``: at either it goes on by itself, on a thread that ends with it."""
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put(connect())
        except Exception as e:  # raised below, where somebody still waits for it
            outcomes.put(e)

    threading.Thread(target=run, name="connect", daemon=True).start()
    while True:
        try:
            outcome = outcomes.get(timeout=SLICE_S)
        except queue.Empty:
            if abandon is not None and abandon.is_set():
                raise TimeoutError("abandoned") from None
            if time.monotonic() > deadline + GRACE_S:
                raise TimeoutError("a member was there and has not connected") from None
            continue
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """The same over NCCL. Written against its documented interface; not run by the tests, which have no GPU."""
    if not dist.is_nccl_available():
        raise ValueError("backend nccl needs a torch built with CUDA; use gloo")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _own_card(host: str, backend: str) -> _Card:
    if backend == "gloo":
        return _Card(host, backend, torch.__version__.split("+")[0])
    names = [*NCCL_ENVIRONMENT, "NCCL_CUMEM_ENABLE", "NCCL_PROTO", "NCCL_ALGO", "NCCL_NET"]
    environment = {name: os.environ[name] for name in names if name in os.environ}
    versions = torch.__version__.split("+")[0], ".".join(map(str, torch.cuda.nccl.version()))
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return _Card(host, backend, *versions, environment, gpu)


def _call_roll(
    store: Store, go: Go, rank: int, card: _Card, deadline: float, timeout_s: float, abandon: threading.Event | None
) -> None:
    """Write my card and wait for everybody's. Raises FormationBroken naming who never came, or whose card differs."""
    name = f"{go.kind} formation {go.ballot}"
    keys = [f"here/{i}" for i in range(len(go.members))]
    store.set(keys[rank], msgspec.json.encode(card).decode())
    pause = POLL_FIRST_S
    while not store.check(keys):
        given_up = abandon is not None and abandon.is_set()
        if given_up or time.monotonic() > deadline:
            missing = [m for m, key in zip(go.members, keys, strict=True) if not store.check([key])]
            why = "abandoned" if given_up else f"not there after {timeout_s:.1f} s"
            raise FormationBroken(f"{name}: {why}: {', '.join(map(_who, missing))}", missing)
        time.sleep(pause)
        pause = min(2 * pause, POLL_MOST_S)
    for member, payload in zip(go.members, store.multi_get(keys), strict=True):
        try:
            other = msgspec.json.decode(payload, type=_Card)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise FormationBroken(f"{name}: what {_who(member)} says of itself cannot be read: {e}", [member]) from None
        if card.gpu and card.gpu == other.gpu and member != go.members[rank]:
            raise FormationBroken(
                f"{name}: {_who(member)} on {other.host} has the same GPU {card.gpu} as this one, and NCCL refuses "
                "two ranks on one: give each its own (CUDA_VISIBLE_DEVICES, --gpus-per-task=1), or set weights.backend "
                'to "gloo"',
                [member],
            )
        for what in ("backend", "torch", "nccl", "environment"):
            if (mine := getattr(card, what)) != (theirs := getattr(other, what)):
                raise FormationBroken(
                    f"{name}: {what} differs: {mine} here on {card.host}, {theirs} at {_who(member)} on {other.host}; "
                    "make them alike", [member],
                )  # fmt: skip


def _drop(bag: list[Any], ended: Callable[[], bool]) -> None:
    """Free a group where blocking hurts nobody: its destructor waits for a pending operation, which has a deadline."""
    bag[0].abort()
    while not ended():
        time.sleep(0.05)
    bag.pop(0)  # the group before the store it calls into
    bag.clear()


def _who(member: Member) -> str:
    """The first digits of an id, as ballots show their convener: lines stay readable."""
    return f"peer {member.peer[:4]}" + (f" worker {member.worker}" if member.worker else "")


def _first_line(e: BaseException) -> str:
    """What torch says, without the source file it says it from and its advice."""
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    return re.sub(r"\[/\S+\] ?", "", text).split(" This is typically")[0]
