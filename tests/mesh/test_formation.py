"""Formations between real processes over gloo, connected through the mesh's store; members are killed and stopped."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
import zmq

from mesh.version import Ballot
from transport.formation import Formation, FormationBroken, _call_roll, _Card, _connected
from transport.messages import Go, Member, StoreAnswer, StoreGet, StoreSet
from transport.nccl_env import NCCL_ENVIRONMENT, set_nccl_environment
from transport.store import MeshStore
from transport.store_host import MAX_VALUE, StoreHost
from transport.weights.buffers import Leases

OP_S = 1.0  # deadline of an operation
LONG_S = 30.0  # for what must happen, however slow the machine is
NUMEL = 1 << 20
MEMBERS = [Member(f"{i:04x}{i:012x}") for i in range(4)]

_REQUEST = msgspec.msgpack.Decoder(StoreSet | StoreGet)
_ANSWER = msgspec.msgpack.Decoder(StoreAnswer)


# The store of the tests: a StoreHost behind a ROUTER, asked by DEALERs that send every request twice -------------


def keep_store(context: zmq.Context, stop: threading.Event, host: StoreHost, port: list[int]) -> None:
    with context.socket(zmq.ROUTER) as socket:
        port.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        while not stop.is_set():
            if socket.poll(20):
                identity, payload = socket.recv_multipart()
                message = _REQUEST.decode(payload)
                host.open(message.kind, message.ballot)
                socket.send_multipart([identity, msgspec.msgpack.encode(host.receive(identity.hex(), message))])


def requester(port: int):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"tcp://127.0.0.1:{port}")

    def request(message: StoreSet | StoreGet, timeout_s: float) -> StoreAnswer:
        payload = msgspec.msgpack.encode(message)
        socket.send(payload)
        socket.send(payload)
        deadline = time.monotonic() + timeout_s
        while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            answer = _ANSWER.decode(socket.recv())
            if answer.number == message.number:
                return answer
        raise TimeoutError("the store does not answer")

    return request


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    context, stop, port = zmq.Context(), threading.Event(), []
    thread = threading.Thread(target=keep_store, args=(context, stop, StoreHost(), port))
    thread.start()
    deadline = time.monotonic() + LONG_S
    while not port:
        assert time.monotonic() < deadline, "the store has no port"
        time.sleep(0.001)
    yield port[0]
    stop.set()
    thread.join(LONG_S)
    context.term()


# Members as processes that do what they are told ---------------------------------------------------------------


def member_process(pipe, port: int) -> None:
    """Commands in, answers out; ("broken", text) when a formation broke."""
    torch.set_num_threads(1)
    request = requester(port)
    formation: Formation | None = None
    while True:
        command, *args = pipe.recv()
        try:
            if command == "ready?":
                pipe.send(("ready",))
            elif command == "build":
                go, me, timeout_s = args
                formation = Formation.build(
                    go, me, MeshStore(go.kind, go.ballot, request, timeout_s), host="127.0.0.1", timeout_s=timeout_s
                )
                pipe.send(("built", formation.rank, formation.size))
            elif command == "broadcast":
                (src,) = args
                tensor = torch.full((NUMEL,), formation.rank, dtype=torch.uint8)
                formation.broadcast(tensor, src, LONG_S)
                pipe.send(("has", tensor.unique().tolist()))
            elif command == "all_reduce":
                tensor = torch.arange(NUMEL, dtype=torch.float32) * (formation.rank + 1)
                formation.all_reduce(tensor, LONG_S)
                formation.barrier(LONG_S)
                pipe.send(("sum", tensor[-1].item()))
            elif command == "broadcast until broken":
                tensor, count = torch.zeros(4 * NUMEL, dtype=torch.uint8), 0
                while True:
                    formation.broadcast(tensor, 0, OP_S)
                    count += 1
                    if count == 3:
                        pipe.send(("going",))
            elif command == "again":
                formation.barrier(OP_S)
            elif command == "close":
                formation.close()
                pipe.send(("closed",))
        except FormationBroken as e:
            pipe.send(("broken", str(e)))


class Process:
    """A member's process; started anew after it was killed."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transport.formation"])

    def __init__(self, port: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = self.context.Process(target=member_process, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *command) -> None:
        self.pipe.send(command)

    def answer(self):
        assert self.pipe.poll(LONG_S), "no answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LONG_S)


@pytest.fixture(scope="module")
def pool(store_port: int) -> Iterator[list[Process]]:
    processes = [Process(store_port) for _ in MEMBERS]
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture
def processes(pool: list[Process], store_port: int) -> list[Process]:
    for i, process in enumerate(pool):
        if not process.process.is_alive():
            pool[i] = Process(store_port)
    for process in pool:  # a new one takes its time to start
        process.tell("ready?")
    assert [process.answer() for process in pool] == [("ready",)] * len(pool)
    return pool


_counter = iter(range(1, 1000))


def new_go(members: list[Member]) -> Go:
    return Go("weights", Ballot(next(_counter), members[0].peer), members)


def build(processes: list[Process], go: Go) -> None:
    for process, member in zip(processes, go.members, strict=True):
        process.tell("build", go, member, LONG_S)
    size = len(go.members)
    assert [process.answer() for process in processes] == [("built", rank, size) for rank in range(size)]


def test_a_broadcast_reaches_every_member_and_a_sum_is_the_same_on_all(processes):
    build(processes, new_go(MEMBERS))
    for src in (0, 2):
        for process in processes:
            process.tell("broadcast", src)
        assert [process.answer() for process in processes] == [("has", [src])] * 4
    for process in processes:
        process.tell("all_reduce")
    assert [process.answer() for process in processes] == [("sum", 10.0 * (NUMEL - 1))] * 4
    for process in processes:
        process.tell("close")
    assert [process.answer() for process in processes] == [("closed",)] * 4


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_member_lost_in_the_middle_breaks_the_formation_by_name_and_the_others_form_again(processes, sign):
    go = new_go(MEMBERS)
    build(processes, go)
    for process in processes:
        process.tell("broadcast until broken")
    assert [process.answer() for process in processes] == [("going",)] * 4
    os.kill(processes[1].process.pid, sign)
    rest = [processes[0], processes[2], processes[3]]
    for process in rest:
        kind, text = process.answer()
        assert kind == "broken"
        assert text.startswith(f"weights formation {go.ballot}: broadcast of")
    rest[0].tell("again")
    assert "no barrier: weights formation" in rest[0].answer()[1]
    for process in rest:
        process.tell("close")
        assert process.answer() == ("closed",)
    build(rest, new_go([MEMBERS[0], MEMBERS[2], MEMBERS[3]]))
    for process in rest:
        process.tell("broadcast", 1)
    assert [process.answer() for process in rest] == [("has", [1])] * 3
    processes[1].kill()


def test_a_member_that_never_comes_is_named(processes):
    go = new_go(MEMBERS)
    for process, member in zip(processes[:3], MEMBERS[:3], strict=True):
        process.tell("build", go, member, 1.5)
    for process in processes[:3]:
        kind, text = process.answer()
        assert kind == "broken"
        assert f"formation {go.ballot}: not there after 1.5 s: peer {MEMBERS[3].peer[:4]}" in text
        assert text.count("peer ") == 1


# In one process -------------------------------------------------------------------------------------------------


def test_a_member_that_leaves_before_it_is_connected_holds_nobody_up():
    """gloo by itself waits five times its time-out for it, during which nothing else could be built."""
    never, abandon, said = threading.Event(), threading.Event(), []

    def connect() -> None:
        never.wait(60.0)

    with pytest.raises(TimeoutError, match="a member was there and has not connected"):
        _connected(connect, time.monotonic() + 0.1, None)

    def until_abandoned() -> None:
        with pytest.raises(TimeoutError, match="abandoned"):
            _connected(connect, time.monotonic() + 60.0, abandon)
        said.append("abandoned")

    waits = threading.Thread(target=until_abandoned)
    waits.start()
    abandon.set()
    waits.join(10.0)
    never.set()
    assert said == ["abandoned"]


def test_what_connecting_returns_or_raises_is_passed_on():
    assert _connected(lambda: "group", time.monotonic() + 10.0, None) == "group"
    with pytest.raises(RuntimeError, match="refused"):
        _connected(raises, time.monotonic() + 10.0, None)


def raises() -> None:
    raise RuntimeError("refused")


def local_stores(host: StoreHost, go: Go, timeout_s: float = 10.0) -> list[MeshStore]:
    lock = threading.Lock()

    def request(sender):
        def ask(message, _timeout_s):
            with lock:
                return host.receive(sender, message)

        return ask

    return [MeshStore(go.kind, go.ballot, request(m.peer), timeout_s) for m in go.members]


def build_here(go: Go, stores: list) -> list[Formation]:
    formations: list = [None] * len(go.members)

    def one(i: int) -> None:
        formations[i] = Formation.build(go, go.members[i], stores[i], host="127.0.0.1", timeout_s=10)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(go.members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return formations


def test_keys_of_an_earlier_ballot_never_satisfy_a_later_one():
    host = StoreHost()
    first = Go("weights", Ballot(1, MEMBERS[0].peer), MEMBERS[:2])
    host.open(first.kind, first.ballot)
    for formation in build_here(first, local_stores(host, first)):
        formation.close()
    second = Go("weights", Ballot(2, MEMBERS[0].peer), MEMBERS[:2])
    host.open(second.kind, second.ballot)
    with pytest.raises(FormationBroken, match=f"peer {MEMBERS[1].peer[:4]}$") as caught:
        Formation.build(second, MEMBERS[0], local_stores(host, second)[0], host="127.0.0.1", timeout_s=0.1)
    assert caught.value.members == (MEMBERS[1],)


def test_one_plain_store_shared_by_two_ballots_keeps_them_apart():
    shared = torch.distributed.HashStore()
    for formation in build_here(Go("weights", Ballot(1, "a"), MEMBERS[:2]), [shared] * 2):
        formation.close()
    with pytest.raises(FormationBroken, match="not there"):
        Formation.build(Go("weights", Ballot(2, "a"), MEMBERS[:2]), MEMBERS[0], shared, host="127.0.0.1", timeout_s=0.1)


def test_an_abandoned_broadcast_keeps_its_buffer_in_quarantine_until_it_has_ended():
    host = StoreHost()
    go = Go("weights", Ballot(1, MEMBERS[0].peer), MEMBERS[:2])
    host.open(go.kind, go.ballot)
    sender, receiver = build_here(go, local_stores(host, go))
    leases = Leases(1, NUMEL)
    slot = leases.acquire("receiver")
    abandon = threading.Event()
    abandon.set()
    with pytest.raises(FormationBroken, match=r"formation 1\.0000: broadcast .* from peer .* abandoned after"):
        receiver.broadcast(slot.flat, 0, LONG_S, abandon)
    assert not receiver.ended()
    leases.quarantine(slot, receiver.ended)
    leases.release(slot)
    assert leases.acquire("next") is None
    receiver.close()
    assert leases.acquire("next") is None
    sender.close()  # the connection closes, and with it the operation ends
    deadline = time.monotonic() + LONG_S
    while leases.acquire("next") is None:
        assert time.monotonic() < deadline, "the abandoned operation never ended"
        time.sleep(0.01)


def test_a_closed_formation_refuses_and_a_lone_member_needs_nobody():
    go = Go("gradients", Ballot(7, MEMBERS[0].peer), MEMBERS[:1])
    host = StoreHost()
    host.open(go.kind, go.ballot)
    (alone,) = build_here(go, local_stores(host, go))
    tensor = torch.ones(4)
    alone.broadcast(tensor, 0, OP_S)
    alone.all_reduce(tensor, OP_S)
    assert tensor.tolist() == [1.0] * 4
    alone.close()
    alone.close()
    with pytest.raises(FormationBroken, match="is closed"):
        alone.barrier(OP_S)


def test_two_members_on_one_gpu_are_refused_with_what_to_do():
    go = Go("weights", Ballot(1, "a"), MEMBERS[:2])
    cards = [_Card(f"10.0.0.{i}", "nccl", "2.13.0", "2.29", gpu="GPU-8f5a") for i in range(2)]
    shared = torch.distributed.HashStore()
    shared.set("here/1", msgspec.json.encode(cards[1]).decode())
    with pytest.raises(FormationBroken, match=r"10\.0\.0\.1 has the same GPU GPU-8f5a .*gpus-per-task=1") as refused:
        _call_roll(shared, go, 0, cards[0], time.monotonic() + LONG_S, LONG_S, None)
    assert refused.value.members == (MEMBERS[1],)


def test_members_that_run_different_things_are_refused_with_both_sides():
    go = Go("weights", Ballot(1, "a"), MEMBERS[:2])
    shared = torch.distributed.HashStore()
    shared.set(f"weights/1.a/here/{1}", msgspec.json.encode(["10.0.0.9", "gloo", "2.0.1", "", {}]).decode())
    with pytest.raises(FormationBroken, match=rf"torch differs: {torch.__version__.split('+')[0]}.* here .*2\.0\.1 at"):
        Formation.build(go, MEMBERS[0], shared, host="127.0.0.1", timeout_s=5)


def test_a_store_that_is_gone_or_silent_breaks_the_build():
    go = Go("weights", Ballot(5, MEMBERS[0].peer), MEMBERS[:2])
    gone = local_stores(StoreHost(), go)[0]
    with pytest.raises(FormationBroken, match=r"formation 5\.0000: rank 0 could not connect .* is not kept here"):
        Formation.build(go, MEMBERS[0], gone, host="127.0.0.1", timeout_s=1)

    asked = []

    def silent(message: StoreSet | StoreGet, timeout_s: float) -> StoreAnswer:
        asked.append(message)
        raise TimeoutError("the convener does not answer")

    store = MeshStore(go.kind, go.ballot, silent, 1)
    with pytest.raises(FormationBroken, match="the convener does not answer"):
        Formation.build(go, MEMBERS[0], store, host="127.0.0.1", timeout_s=1)
    with pytest.raises(TimeoutError, match="the convener does not answer"):
        store.check(["here"])
    assert len(asked) == 1, "who did not answer once is not waited for again"


def test_a_wrong_address_and_a_foreign_member_are_refused():
    go = Go("weights", Ballot(1, "a"), MEMBERS[:1])
    with pytest.raises(FormationBroken, match="Cannot resolve no-such-host"):
        Formation.build(go, MEMBERS[0], torch.distributed.HashStore(), host="no-such-host.invalid", timeout_s=1)
    with pytest.raises(ValueError, match="is no member of weights formation"):
        Formation.build(go, MEMBERS[1], torch.distributed.HashStore(), host="127.0.0.1", timeout_s=1)
    with pytest.raises(ValueError, match="backend 'mpi' is not known"):
        Formation.build(go, MEMBERS[0], torch.distributed.HashStore(), host="::1", backend="mpi", timeout_s=1)


def test_rubbish_that_a_member_says_of_itself_breaks_the_build_and_names_it():
    go = Go("weights", Ballot(1, "a"), MEMBERS[:2])
    for rubbish in (b"\xff\xfe", b"[1, 2", b"{}"):
        store = torch.distributed.HashStore()
        store.set("weights/1.a/here/1", rubbish)
        with pytest.raises(FormationBroken, match="what peer 0001 says of itself cannot be read") as broken:
            Formation.build(go, MEMBERS[0], store, host="127.0.0.1", timeout_s=LONG_S)
        assert broken.value.members == (MEMBERS[1],)


# The store alone ------------------------------------------------------------------------------------------------

BALLOT = Ballot(3, "c")


def opened() -> StoreHost:
    host = StoreHost()
    host.open("weights", BALLOT)
    return host


def test_a_repeated_add_counts_once_and_a_late_set_does_not_come_back():
    host = opened()
    add = StoreSet("weights", BALLOT, 1, "n", b"", 5)
    assert host.receive("p", add) == host.receive("p", add)
    assert host.receive("q", add).count == 10
    old, new = StoreSet("weights", BALLOT, 2, "k", b"old"), StoreSet("weights", BALLOT, 3, "k", b"new")
    for message in (old, new, old):
        host.receive("p", message)
    assert host.receive("p", StoreGet("weights", BALLOT, 4, ["k", "n", "x"])).values == [b"new", b"10", None]


def test_the_store_refuses_an_unknown_ballot_too_much_and_nonsense():
    host = opened()
    with pytest.raises(ValueError, match=r"formation 4\.c is not kept here"):
        host.receive("p", StoreGet("weights", Ballot(4, "c"), 1, ["k"]))
    with pytest.raises(ValueError, match="is not kept here"):
        host.receive("p", StoreGet("gradients", BALLOT, 1, ["k"]))
    with pytest.raises(ValueError, match="bytes from p"):
        host.receive("p", StoreSet("weights", BALLOT, 1, "k", bytes(MAX_VALUE + 1)))
    host.receive("p", StoreSet("weights", BALLOT, 1, "k", b"text"))
    with pytest.raises(ValueError, match="holds no integer"):
        host.receive("p", StoreSet("weights", BALLOT, 2, "k", b"", 1))
    host.close("weights", BALLOT)
    with pytest.raises(ValueError, match="is not kept here"):
        host.receive("p", StoreGet("weights", BALLOT, 2, ["k"]))


def test_a_key_asked_for_again_and_again_makes_no_endless_answer():
    host = opened()
    host.receive("p", StoreSet("weights", BALLOT, 1, "k", bytes(MAX_VALUE)))
    with pytest.raises(ValueError, match="asks for 1048576 bytes of store values at once"):
        host.receive("p", StoreGet("weights", BALLOT, 2, ["k"] * 16))


def test_the_store_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("transport.store_host.MAX_BYTES", 100)
    host = opened()
    for number in range(10):
        host.receive("p", StoreSet("weights", BALLOT, number, "same", bytes(90)))
    with pytest.raises(ValueError, match="is full"):
        host.receive("p", StoreSet("weights", BALLOT, 99, "other", bytes(10)))


def test_a_wait_names_what_never_came_and_ends_when_abandoned():
    go = Go("weights", BALLOT, MEMBERS[:1])
    (store,) = local_stores(opened(), go, timeout_s=0.05)
    store.set("there", b"1")
    assert store.check(["there"])
    assert not store.check(["there", "not"])
    assert store.add("n", 2) == 2
    with pytest.raises(TimeoutError, match=r"weights formation 3\.c: not set after 0.1 s: not$"):
        store.multi_get(["there", "not"])
    abandon = threading.Event()
    abandon.set()
    host = opened()
    with pytest.raises(TimeoutError, match="abandoned"):
        MeshStore("weights", BALLOT, lambda m, t: host.receive("p", m), LONG_S, abandon).get("not")


def test_nccl_environment_replaces_what_would_end_survivors(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    (line,) = set_nccl_environment()
    assert line.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=1 replaced by 2")
    assert all(os.environ[name] == value for name, value in NCCL_ENVIRONMENT.items())
