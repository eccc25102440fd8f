"""Groups on their way from a rollout to a trainer: encoded, encrypted, received, checked, decoded.

Against them: the same bytes through pyzmq alone, DEALER to ROUTER, without encryption and without looking at what
arrives. The receiver is a process of its own and its clock counts, from the first message to the last.
"""

import logging
import multiprocessing as mp
import secrets
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from mesh import secret
from mesh.version import Ballot, Version
from parts.measure import Result, by_turns, compare
from transport import codec
from transport.endpoint import SEND_QUEUE, Endpoint
from transport.messages import Ack, Completion, Delivery, Envelope, Group, Segment, Span

RUN, SENDER, RECEIVER = "benchmark", "5e4de45e4de45e4d", "4ece14e44ece14e4"
WINDOW = SEND_QUEUE["bulk"]  # messages under way
LEAVE = 4  # messages that the receiver gives leave for at once
LIMIT_S = 60.0
CASES = {"quickstart's, 8 x 6 tokens": (6, 6, 6000), "8 x 512 tokens": (64, 512, 2000)}


def measure(rounds: int, quick: bool) -> list[Result]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    key = secrets.token_hex(32)
    child = context.Process(target=receive, args=(theirs, key), daemon=True)
    child.start()
    try:
        sender = Sender(ours, key)
        results = [_case(sender, name, *sizes, rounds, quick) for name, sizes in CASES.items()]
        ours.send(None)
        sender.close()
        child.join(10.0)
    finally:
        child.kill()
    return results


def _case(sender: "Sender", name: str, prompt: int, new: int, count: int, rounds: int, quick: bool) -> Result:
    count = count // 20 if quick else count
    envelope = Envelope(RUN, SENDER, RECEIVER, sender.endpoint.address, delivery(8, prompt, new))
    frames = [bytes(frame) for frame in codec.encode(envelope)]
    found = by_turns(
        {"mesh": lambda: sender.mesh(envelope.body, count), "raw": lambda: sender.raw(frames, count)}, rounds
    )
    return compare(
        f"delivery of a group, {name}",
        "us",
        [1e6 * s for s in found["mesh"]],
        [1e6 * s for s in found["raw"]],
        "raw pyzmq, same bytes, not encrypted",
        details={
            "bytes": sum(map(len, frames)),
            "encode_us": 1e6 * _each(lambda: codec.encode(envelope)),
            "decode_us": 1e6 * _each(lambda: codec.decode(frames)),
        },
        settings={"completions": 8, "prompt_tokens": prompt, "new_tokens": new, "messages": count},
    )


def delivery(size: int, prompt: int, new: int) -> Delivery:
    """A group as a rollout makes it."""
    rng = np.random.default_rng(0)
    given = rng.integers(0, 60, prompt).astype(np.int32)
    version = Version(Ballot(3, SENDER), 7)
    completions = [
        Completion(
            segments=[
                Segment(tokens=given, sampled=False, logprobs=np.empty(0, np.float32)),
                Segment(
                    tokens=rng.integers(0, 60, new).astype(np.int32),
                    sampled=True,
                    logprobs=-rng.random(new).astype(np.float32),
                    spans=[Span(version=version, start=0, stop=new)],
                ),
            ],
            reward=float(i % 2),
            finish="stop",
        )
        for i in range(size)
    ]
    return Delivery(credit=7, group=Group(completions, version, time.time(), time.time()))


class Sender:
    """Both contestants' sending ends."""

    def __init__(self, pipe: Connection, key: str) -> None:
        logging.getLogger("mesh.endpoint").setLevel(logging.ERROR)
        self.pipe = pipe
        self.endpoint = Endpoint(RUN, SENDER, secret.keys(key), "127.0.0.1")
        pipe.send(self.endpoint.address)
        self.bulk, plain = _answer(pipe)
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(plain)

    def mesh(self, body: Delivery, count: int) -> float:
        """Seconds a message. A full queue drops, so no more are under way than it holds; the receiver gives leave for
        more, as credits do between peers. libzmq may notice a moment late that the queue has room again."""
        self._order("mesh", count)
        sent = leaves = 0
        deadline = time.monotonic() + LIMIT_S
        while sent < count or leaves < count // LEAVE:
            allowed = min(count, WINDOW + LEAVE * leaves)
            while sent < allowed and self.endpoint.send(self.bulk, RECEIVER, body, bulk=True):
                sent += 1
            leaves += len(self.endpoint.receive(1.0 if sent == allowed else 1e-3))
            assert time.monotonic() < deadline, f"{sent} of {count} messages left within {LIMIT_S:.0f} s"
        return _answer(self.pipe)

    def _order(self, kind: str, count: int) -> None:
        self.pipe.send((kind, count))
        _answer(self.pipe)  # it counts from here on

    def raw(self, frames: list[bytes], count: int) -> float:
        self._order("raw", count)
        for _ in range(count):
            self.dealer.send_multipart(frames, copy=False)
        return _answer(self.pipe)

    def close(self) -> None:
        self.endpoint.close()
        self.context.destroy(linger=0)


def receive(pipe: Connection, key: str) -> None:
    """The receiver's process: does what the pipe says, and answers with the seconds a message took."""
    endpoint = Endpoint(RUN, RECEIVER, secret.keys(key), "127.0.0.1")
    back = pipe.recv()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    pipe.send((endpoint.bulk_address, router.getsockopt_string(zmq.LAST_ENDPOINT)))
    while (order := _next(pipe, endpoint)) is not None:
        kind, count = order
        pipe.send("counting")
        began, first, got = 0.0, 0, 0
        while got < count:
            if kind == "raw":
                router.recv_multipart(copy=False)
                came = 1
            else:
                came = len(endpoint.receive(1.0))
                for _ in range((got + came) // LEAVE - got // LEAVE):
                    endpoint.send(back, SENDER, Ack(seq=0, news=[]))
            got += came
            if came and not first:
                began, first = time.perf_counter(), came  # what came first starts the clock
        pipe.send((time.perf_counter() - began) / (count - first))
    endpoint.close()
    context.destroy(linger=0)


def _next(pipe: Connection, endpoint: Endpoint) -> tuple[str, int] | None:
    """The next order; meanwhile the endpoint admits connections."""
    while not pipe.poll():
        endpoint.receive(0.01)
    return pipe.recv()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), f"the receiver did not answer within {LIMIT_S:.0f} s"
    return pipe.recv()


def _each(what: Any, count: int = 200) -> float:
    what()
    began = time.perf_counter()
    for _ in range(count):
        what()
    return (time.perf_counter() - began) / count
