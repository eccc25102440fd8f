"""How many groups a second get from rollouts to trainers, next to the same bytes by other ways.

The mesh's way is all of it: a group is checked and encoded, encrypted by CURVE, received, decoded and checked again,
and no more are under way than the receiver gave leave for. Against it the same bytes, that nobody looks into:

    pyzmq                DEALER to ROUTER
    pyzmq, encrypted     the same with CURVE
    Redis streams        XADD in batches as large as the mesh's leave; XREADGROUP and XACK, so that what a trainer had
                         not acknowledged when it died is there for the next, as rollouts keep groups until their
                         verdict. Neither writes to a disk. Only where ``redis-server`` is installed.

Each rollout and each trainer is a process; all of them and Redis share the cores. Rates are of all trainers together,
from the first message that one received to the last.
"""

import argparse
import logging
import multiprocessing as mp
import resource
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import zmq
from parts.delivery import LEAVE, LIMIT_S, RUN, WINDOW, delivery
from parts.measure import Result, Spread, by_turns, compare
from parts.picture import Panel, point
from parts.script import Findings, flags, run

from mesh import secret
from transport import codec
from transport.endpoint import Endpoint
from transport.messages import Ack, Envelope

SIZES = {"8 x 6 tokens": (6, 6, 16000), "8 x 512 tokens": (64, 512, 4800)}  # prompt, new, groups in all
SHAPES = [(1, 1), (4, 1), (16, 1), (16, 4)]  # rollouts, trainers
READ_AT_ONCE = 16  # entries, as an endpoint takes messages


def name(kind: str, index: int) -> str:
    """A peer's id: sixteen hexadecimal digits."""
    return f"{'ab'[kind == 'trainer']}{index:015x}"


# ----------------------------------------------------------------------------------------------------------------------
# A rollout's process
# ----------------------------------------------------------------------------------------------------------------------


def rollout(pipe: Connection, key: str, index: int) -> None:
    """Does what the pipe says, and answers when all has left."""
    logging.getLogger("mesh.endpoint").setLevel(logging.ERROR)
    keys = secret.keys(key)
    endpoint = Endpoint(RUN, name("rollout", index), keys, "127.0.0.1")
    context = zmq.Context()
    pipe.send(endpoint.address)
    dealers: dict[tuple[str, str], zmq.Socket] = {}
    while (order := _next(pipe, endpoint)) is not None:
        how, to, body, count = order
        pipe.send("begins")
        if how == "mesh":
            _send(endpoint, to, body, count)
        elif how == "redis":
            _add(to, _frames(endpoint, body), count)
        else:
            for address in {address for _, address in to} - {a for h, a in dealers if h == how}:
                dealers[how, address] = _dealer(context, address, keys if how == "curve" else None)
            targets = cycle(to)
            for _ in range(count):
                dealers[how, next(targets)[1]].send_multipart(_frames(endpoint, body), copy=False)
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    endpoint.close()
    context.destroy(linger=0)


def _frames(endpoint: Endpoint, body: Any, cache: dict[int, list[bytes]] = {}) -> list[bytes]:  # noqa: B006
    """Encoded once: who sends bytes does not encode them."""
    key = len(body.group.completions[0].segments[1].tokens)
    if key not in cache:
        envelope = Envelope(RUN, endpoint.me, name("trainer", 0), endpoint.address, body)
        cache[key] = [bytes(frame) for frame in codec.encode(envelope)]
    return cache[key]


def _send(endpoint: Endpoint, to: list[tuple[str, str]], body: Any, count: int) -> None:
    """By turns to all trainers, to each no more than it gave leave for."""
    left = {peer: count // len(to) for peer, _ in to}
    may = {peer: min(WINDOW, left[peer]) for peer in left}
    owed = dict(left)  # leaves are counted too, so that none is taken for one of the next order
    deadline = time.monotonic() + LIMIT_S
    while any(left.values()) or any(owed.values()):
        for peer, address in to:
            if left[peer] and may[peer] and endpoint.send(address, peer, body, bulk=True):
                left[peer] -= 1
                may[peer] -= 1
        free = any(left[peer] and may[peer] for peer in left)
        for envelope in endpoint.receive(0.0 if free else 0.1):
            may[envelope.sender] += LEAVE
            owed[envelope.sender] -= LEAVE
        assert time.monotonic() < deadline, f"groups did not leave within {LIMIT_S:.0f} s: {left}"


def _dealer(context: zmq.Context, address: str, keys: Any | None) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    if keys is not None:
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.public, keys.private
    dealer.connect(address)
    return dealer


def _add(to: list[tuple[str, str]], frames: list[bytes], count: int) -> None:
    redis = Redis(int(to[0][1]))
    entry = [part for i, frame in enumerate(frames) for part in (str(i).encode(), frame)]
    targets = cycle(to)
    for _ in range(count // LEAVE):
        stream = next(targets)[0].encode()
        redis.call(*[[b"XADD", stream, b"*", *entry]] * LEAVE)
    redis.close()


# ----------------------------------------------------------------------------------------------------------------------
# A trainer's process
# ----------------------------------------------------------------------------------------------------------------------


def trainer(pipe: Connection, key: str, index: int) -> None:
    """Does what the pipe says, and answers when the first and the last message came."""
    logging.getLogger("mesh.endpoint").setLevel(logging.ERROR)
    keys = secret.keys(key)
    me = name("trainer", index)
    endpoint = Endpoint(RUN, me, keys, "127.0.0.1")
    context = zmq.Context()
    routers = {how: context.socket(zmq.ROUTER) for how in ("plain", "curve")}
    routers["curve"].curve_server = True
    routers["curve"].curve_publickey, routers["curve"].curve_secretkey = keys.public, keys.private
    for router in routers.values():
        router.bind("tcp://127.0.0.1:*")
    addresses = {how: router.getsockopt_string(zmq.LAST_ENDPOINT) for how, router in routers.items()}
    pipe.send({"mesh": endpoint.bulk_address, **addresses})
    while (order := _next(pipe, endpoint)) is not None:
        how, count, port = order
        came = _groups(endpoint) if how == "mesh" else _entries(port, me) if how == "redis" else _raw(routers[how])
        pipe.send("counting")
        first, got = 0.0, 0
        with closing(came):
            while got < count:
                got += next(came)
                first = first or time.perf_counter()
        last = time.perf_counter()  # one clock for all processes
        pipe.send((first, last, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    endpoint.close()
    context.destroy(linger=0)


def _groups(endpoint: Endpoint) -> Iterator[int]:
    of: dict[str, int] = {}
    while True:
        envelopes = endpoint.receive(1.0)
        for envelope in envelopes:
            of[envelope.sender] = of.get(envelope.sender, 0) + 1
            if not of[envelope.sender] % LEAVE:
                endpoint.send(envelope.reply, envelope.sender, Ack(seq=0, news=[]))
        yield len(envelopes)


def _raw(router: zmq.Socket) -> Iterator[int]:
    while True:
        router.recv_multipart(copy=False)
        yield 1


def _entries(port: int, stream: str) -> Iterator[int]:
    redis, key = Redis(port), stream.encode()
    redis.call([b"XGROUP", b"CREATE", key, b"trainers", b"0", b"MKSTREAM"])
    read = [b"XREADGROUP", b"GROUP", b"trainers", key, b"COUNT", str(READ_AT_ONCE).encode(), b"BLOCK", b"1000",
            b"STREAMS", key, b">"]  # fmt: skip
    try:
        yield 0
        while True:
            (answer,) = redis.call(read)
            ids = [entry[0] for entry in answer[0][1]] if answer else []
            if ids:
                redis.call([b"XACK", key, b"trainers", *ids], [b"XDEL", key, *ids])
            yield len(ids)
    finally:
        redis.call([b"DEL", key])
        redis.close()


def _next(pipe: Connection, endpoint: Endpoint) -> Any:
    """The next order; meanwhile the endpoint admits connections."""
    while not pipe.poll():
        endpoint.receive(0.02)
    return pipe.recv()


# ----------------------------------------------------------------------------------------------------------------------
# Redis
# ----------------------------------------------------------------------------------------------------------------------


class Redis:
    """As much of its protocol as is needed here; a client library would cost more than the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._file = self._socket.makefile("rb", buffering=1 << 20)

    def call(self, *commands: list[bytes]) -> list[Any]:
        """Sent together; the answers in order. Raises RuntimeError for an error."""
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for part in command:
                parts += [b"$%d\r\n" % len(part), part, b"\r\n"]
        self._socket.sendall(b"".join(parts))
        return [self._answer() for _ in commands]

    def _answer(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-" or not line:
            raise RuntimeError(f"Redis: {rest.decode()}")
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._answer() for _ in range(int(rest))]
        return rest

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def redis_server() -> Iterator[int]:
    """Its port, 0 where it is not installed. It keeps everything in memory, as the mesh does."""
    if not (path := shutil.which("redis-server")):
        yield 0
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                Redis(port).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)
        yield port
    finally:
        server.kill()
        server.wait(10.0)


def peak_mib(port: int) -> float:
    with closing(Redis(port)) as redis:
        (info,) = redis.call([b"INFO", b"memory"])
    (line,) = (line for line in info.splitlines() if line.startswith(b"used_memory_peak:"))
    return int(line.partition(b":")[2]) / 2**20


# ----------------------------------------------------------------------------------------------------------------------
# The measurement
# ----------------------------------------------------------------------------------------------------------------------


class Processes:
    """As many rollouts and trainers as any shape needs; each contest takes the first of them."""

    def __init__(self, rollouts: int, trainers: int, port: int) -> None:
        context, key = mp.get_context("spawn"), secrets.token_hex(32)
        self.port = port
        self.children: list[Any] = []
        self.memory_mib = {"rollout": 0.0, "trainer": 0.0}

        def start(target: Callable[..., None], index: int) -> Connection:
            ours, theirs = context.Pipe()
            self.children.append(context.Process(target=target, args=(theirs, key, index), daemon=True))
            self.children[-1].start()
            return ours

        self.rollouts = [start(rollout, i) for i in range(rollouts)]
        self.trainers = [start(trainer, i) for i in range(trainers)]
        for pipe in self.rollouts:
            _answer(pipe)
        self.addresses = [_answer(pipe) for pipe in self.trainers]

    def rate(self, how: str, rollouts: int, trainers: int, body: Any, count: int) -> float:
        """Groups a second."""
        each = count // rollouts // trainers // LEAVE * LEAVE
        addresses = [str(self.port) if how == "redis" else a[how] for a in self.addresses[:trainers]]
        to = [(name("trainer", i), address) for i, address in enumerate(addresses)]
        for pipe in self.trainers[:trainers]:
            pipe.send((how, each * rollouts, self.port))
            _answer(pipe)
        for pipe in self.rollouts[:rollouts]:
            pipe.send((how, to, body, each * trainers))
        for pipe in self.rollouts[:rollouts]:
            _answer(pipe)  # begins
        for pipe in self.rollouts[:rollouts]:
            self._used("rollout", _answer(pipe))
        seen = [_answer(pipe) for pipe in self.trainers[:trainers]]
        for _, _, used in seen:
            self._used("trainer", used)
        return each * rollouts * trainers / (max(last for _, last, _ in seen) - min(first for first, _, _ in seen))

    def _used(self, kind: str, mib: float) -> None:
        self.memory_mib[kind] = max(self.memory_mib[kind], mib)

    def close(self) -> None:
        for pipe in self.rollouts + self.trainers:
            pipe.send(None)
        for child in self.children:
            child.join(5.0)
            child.kill()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), f"a process did not answer within {LIMIT_S:.0f} s"
    return pipe.recv()


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    quick = arguments.quick
    shapes, rounds, scale = ([(2, 1)], 3, 20) if quick else (SHAPES, arguments.rounds, 1)
    results, panels = [], []
    with redis_server() as port:
        ways = {"plain": "pyzmq", "curve": "pyzmq, encrypted"} | ({"redis": "Redis streams"} if port else {})
        processes = Processes(max(r for r, _ in shapes), max(t for _, t in shapes), port)
        try:
            for size, (prompt, new, count) in SIZES.items():
                body = delivery(8, prompt, new)
                nbytes = sum(map(len, codec.encode(Envelope(RUN, "0" * 16, "0" * 16, "", body))))
                ticks = [f"{r}:{t}" for r, t in shapes]
                panel = Panel(f"groups of {size}", "groups a second", "rollouts : trainers", ticks=ticks, log_y=True)
                for i, shape in enumerate(shapes):
                    work = (*shape, body, count // scale)
                    contestants = {how: partial(processes.rate, how, *work) for how in ("mesh", *ways)}
                    by_turns(contestants, 1)  # connections are made
                    found = by_turns(contestants, rounds)
                    for how, label in ({"mesh": "mesh"} | ways).items():
                        panel.lines.setdefault(label, []).append(point(i, Spread.of(found[how])))
                    results += rows(size, shape, nbytes, found, ways, count // scale)
                panels.append(panel)
            memory = processes.memory_mib | ({"redis": peak_mib(port)} if port else {})
            for result in results:
                result.details["most_memory_mib"] = memory
        finally:
            processes.close()
    return Findings(results, panels)


def rows(
    size: str, shape: tuple[int, int], nbytes: int, found: dict[str, list[float]], ways: dict[str, str], count: int
) -> list[Result]:
    what = f"groups of {size}, {shape[0]} rollouts, {shape[1]} trainers"
    mb_s = Spread.of(found["mesh"]).median * nbytes / 1e6
    settings = {"bytes": nbytes, "groups": count, "leave": LEAVE, "window": WINDOW}
    return [
        compare(what, "/s", found["mesh"], found[how], label, details={"mesh_mb_s": mb_s}, settings=settings,
                more_is_better=True)
        for how, label in ways.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
