"""Who does not hold the run's secret learns nothing, changes nothing and slows nobody down: a mesh that is training."""

import contextlib
import json
import random
import select
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import psutil
import pytest
import zmq
from processes import Mesh, Process, soon, statuses

from mesh import secret
from mesh.identity import PeerCard
from mesh.peer import Peer
from mesh.version import Ballot, Lineage, Version
from transport import codec
from transport.messages import Answer, Ask, Envelope, Hello, Look, NotMe, Ping, Status, Sync

pytestmark = pytest.mark.timeout(600)  # the first test pays for the start of the mesh

STEPS = 4  # that training goes on by while strangers are there
CROWD = 300  # connections to each port
MEMORY_MIB = 48  # of a peer, while strangers come and go: that of its own work included
FILES = 8  # connections to members that have just left
OTHER_KEYS = secret.keys("the secret of another run" * 2)
NOBODY = "0" * 16
SETTINGS = {"run.steps": 100_000}  # more than there is time for


@dataclass
class Training:
    """A trainer and a rollout at work, for as long as the tests of this file take, and one who watches them."""

    mesh: Mesh
    trainer: Process
    rollout: Process
    watcher: Peer
    seen: dict[str, Status]

    @property
    def peers(self) -> list[Process]:
        return [self.trainer, self.rollout]

    @property
    def keys(self) -> secret.Keys:
        return secret.keys(secret.load(self.mesh.run))

    def ports(self) -> list[int]:
        """Those of the endpoints, control and bulk."""
        cards = self.watcher.live("trainer") + self.watcher.live("rollout")
        return [int(a.rpartition(":")[2]) for card in cards for a in (card.address, card.bulk_address)]

    def torch_ports(self) -> list[int]:
        ours = self.ports()
        return [port for peer in self.peers for _, port in peer.listens() if port not in ours]

    def goes_on(self) -> None:
        self.mesh.reaches(self.mesh.step() + STEPS)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, strangers are there: training goes on beside them, and afterwards everything is as it was."""
        members, joined = self.members(), self.joined()
        before = [(peer.memory(), psutil.Process(peer.pid).num_fds(), len(peer.said)) for peer in self.peers]
        began = time.monotonic()
        yield
        self.goes_on()
        assert self.members() == members
        assert self.joined() == joined
        seconds = time.monotonic() - began
        for peer, (memory, descriptors, said) in zip(self.peers, before, strict=True):
            assert (peer.memory() - memory) >> 20 < MEMORY_MIB, peer.name
            soon(partial(few_more, peer, descriptors), f"{peer.name} has at most {descriptors + FILES} files open")
            lines = [line for line in peer.said[said:].splitlines() if " I step " not in line]
            assert len(lines) < 20 + seconds, lines

    def members(self) -> set[str]:
        """All who are in the mesh; that both peers answer is waited for."""
        self.seen.clear()
        soon(lambda: {"trainer", "rollout"} <= self.seen.keys(), "both answer")
        return {card.name for card in self.watcher.live()} | set(self.seen)

    def joined(self) -> int:
        return sum(line.count(" joined") for peer in self.peers for line in peer.said.splitlines())


@pytest.fixture(scope="module")
def training(tmp_path_factory, model):
    mesh = Mesh(tmp_path_factory.mktemp("strangers"), model)
    trainer, rollout = (mesh.start(role, set=SETTINGS) for role in ("trainer", "rollout"))
    mesh.reaches(2)
    with mesh.observer() as watcher:
        seen = statuses(watcher)
        soon(lambda: {"trainer", "rollout"} <= seen.keys(), "both answer")
        yield Training(mesh, trainer, rollout, watcher, seen)
    for process in (trainer, rollout):
        process.interrupt()
    assert [process.ends() for process in (trainer, rollout)] == [130, 130]
    mesh.close()


def few_more(peer: Process, descriptors: int) -> bool:
    return psutil.Process(peer.pid).num_fds() <= descriptors + FILES


def stranger(port: int, keys: secret.Keys | None, server_key: bytes | None = None) -> zmq.Socket:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    if keys is not None:
        dealer.curve_serverkey = server_key or keys.public
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.private
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return dealer


def messages(training: Training) -> list[list[bytes]]:
    """What would change something, if it came from a member: all that a stranger could know is right."""
    run = secret.run_id(secret.load(training.mesh.run), "")
    card = PeerCard(NOBODY, "stranger", "rollout", "there", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    version = Version(Ballot(1, NOBODY), 0)
    bodies = [
        Hello(card, 0),
        Ping(1, []),
        Sync([]),
        Look(1),
        Ask(1, 0, 9, [], []),
        Answer(1, [], [], [], [], version, Lineage(), finished=True),
        *(NotMe(training.mesh.peer_id(peer.name)) for peer in training.peers),
    ]
    receivers = ["", *(training.mesh.peer_id(peer.name) for peer in training.peers)]
    return [
        [bytes(f) for f in codec.encode(Envelope(run, NOBODY, to, "tcp://127.0.0.1:1", body))]
        for body in bodies
        for to in receivers
    ]


@pytest.mark.parametrize("key", ["none", "another secret", "the public key alone"])
def test_a_stranger_who_speaks_as_members_do_is_not_heard(training, key):
    keys = {"none": None}.get(key, OTHER_KEYS)
    server_key = training.keys.public if key == "the public key alone" else None
    said = messages(training)
    with training.undisturbed():
        strangers = [stranger(port, keys, server_key) for port in training.ports() for _ in range(10)]
        for dealer in strangers:
            for frames in said:
                with contextlib.suppress(zmq.Again):  # its own queue is full: nobody takes anything
                    dealer.send_multipart(frames, zmq.NOBLOCK)
        training.goes_on()
        assert not any(dealer.poll(0) for dealer in strangers), "somebody answered"
        for dealer in strangers:
            dealer.close(0)
    if key == "the public key alone":
        assert "refused_key: a connection" in "".join(peer.said for peer in training.peers)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def greeting(mechanism: bytes) -> bytes:
    return GREETING + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


RUBBISH = {
    "nothing": b"",
    "half a greeting": GREETING[:7],
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(189),
    "the greeting of another mechanism": greeting(b"NULL") + b"\x04\x19\x05READY" + bytes(50),
    "a password": greeting(b"PLAIN") + b"\x04\x0c\x05HELLO\x01a\x01b",
    "an old protocol": b"\xff" + bytes(8) + b"\x7f\x01\x05\0\0\0",
    "a command of four exabytes": greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 62) + b"\x05HELLO",
    "a message before the handshake": greeting(b"CURVE") + b"\x00\x05hello" * 100,
    "a short hello": greeting(b"CURVE") + b"\x04\x06\x05HELLO",
    "a hello of zeros": greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    "an initiate out of order": greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 257) + b"\x08INITIATE" + bytes(248),
}


@pytest.mark.parametrize("what", [*RUBBISH, "noise"])
def test_rubbish_on_a_connection_disturbs_nobody(training, what):
    noise = random.Random(what)
    with training.undisturbed(), contextlib.ExitStack() as stack:
        for port in training.ports():
            for _ in range(20):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                with contextlib.suppress(OSError):  # refused already
                    connection.sendall(RUBBISH.get(what) or noise.randbytes(20_000))
        training.goes_on()


def test_rubbish_on_the_data_sockets_of_torch_ends_nobody(training):
    """They are neither encrypted nor authenticated (``docs/security.md``). What comes through them is checked."""
    noise = random.Random(1)
    with contextlib.ExitStack() as stack:
        ports = training.torch_ports()
        assert ports
        for port in ports:
            for i in range(20):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                with contextlib.suppress(OSError):
                    connection.sendall(noise.randbytes(1 << i))
        training.goes_on()
        training.goes_on()
    training.goes_on()


def test_hundreds_of_connections_that_never_read_disturb_nobody(training):
    """They are closed when they have not proved themselves in time; the crowd comes again then."""
    ports = training.ports()
    with training.undisturbed(), Crowd(ports) as crowd:
        training.goes_on()
        soon(lambda: crowd.turned_away >= CROWD * len(ports), "the first of them have been turned away")
        training.goes_on()


@dataclass
class Crowd:
    """``CROWD`` connections to each port, which say hello as a peer would, never read, and come again when closed."""

    ports: list[int]
    turned_away: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Crowd":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        here: dict[socket.socket, int] = {}
        try:
            for port in self.ports:
                for _ in range(CROWD):
                    here[self._come(port)] = port
            while not self._over.wait(0.2):
                for connection in [c for c in here if self._closed(c)]:
                    self.turned_away += 1
                    port = here.pop(connection)
                    connection.close()
                    here[self._come(port)] = port
        finally:
            for connection in here:
                connection.close()

    def _come(self, port: int) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            connection.sendall(greeting(b"CURVE"))
        return connection

    @staticmethod
    def _closed(connection: socket.socket) -> bool:
        """Whether the other end has closed it; what that has sent stays unread."""
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))


def test_recorded_bytes_of_a_member_do_nothing_when_they_are_sent_again(training):
    """A rollout joins by way of a wire that records everything, leaves, and a stranger plays the record back."""
    mesh = training.mesh
    port = int(card_of(mesh, "trainer")["address"].rpartition(":")[2])
    with Wire(port) as wire:
        elsewhere = mesh.directory / "recorded"
        elsewhere.mkdir()
        shutil.copy(mesh.run / "secret", elsewhere)
        url = f"tcp://127.0.0.1:{wire.port}"
        guest = mesh.start("rollout", "--rendezvous", url, name="guest", run=elsewhere, set=SETTINGS)
        training.trainer.says("guest joined")
        training.rollout.says("guest joined")
        guest.interrupt()
        assert guest.ends() == 130
        training.trainer.says("guest left")
        soon(lambda: "guest" not in training.members(), "all know that it has left")
    assert wire.records
    assert len(max(wire.records, key=len)) > 500, "the handshake and a Hello at least"
    mesh.processes.remove(guest)
    with training.undisturbed(), contextlib.ExitStack() as stack:
        for _ in range(20):
            for record in wire.records:
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                with contextlib.suppress(OSError):  # refused already
                    connection.sendall(record)
        training.goes_on()


class Wire:
    """A port that passes everything on to another one, and records what comes in, connection by connection."""

    def __init__(self, towards: int):
        self.records: list[bytearray] = []
        self._towards = towards
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = [self._server]

    def __enter__(self) -> "Wire":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                inner, _ = self._server.accept()
                outer = socket.create_connection(("127.0.0.1", self._towards))
                self._open += [inner, outer]
                self.records.append(bytearray())
                for source, sink, record in ((inner, outer, self.records[-1]), (outer, inner, bytearray())):
                    threading.Thread(target=self._pass_on, args=(source, sink, record), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := source.recv(1 << 16):
                record += data
                sink.sendall(data)


def card_of(mesh: Mesh, name: str) -> dict:
    for path in (mesh.run / "rendezvous").glob("*.json"):
        if (card := json.loads(path.read_text()))["name"] == name:
            return card
    raise AssertionError(f"{name} has no card")
