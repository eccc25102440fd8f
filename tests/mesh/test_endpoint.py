"""Real sockets on this machine's loopback. A second endpoint stands for another process: nothing is shared but TCP."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from mesh import secret
from mesh.version import Ballot, Version
from transport import codec
from transport import endpoint as endpoint_module
from transport.endpoint import Endpoint
from transport.messages import Completion, Delivery, Envelope, Group, Look, NotMe, Segment, Span

KEYS = secret.keys("the secret of the run" * 2)
OTHER_KEYS = secret.keys("the secret of another run" * 2)
RUN = "run"
A, B, C = "a" * 16, "b" * 16, "c" * 16

Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(me: str, *, run: str = RUN, keys: secret.Keys = KEYS, host: str = "127.0.0.1", port: int = 0):
            made = Endpoint(run, me, keys, host, port)
            stack.callback(made.close)
            return made

        yield make


def until(done: Callable[[], bool], *endpoints: Endpoint, within_s: float = 10.0) -> list[Envelope]:
    """Run the endpoints until ``done()``; what they received meanwhile."""
    received: list[Envelope] = []
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, [e.counters for e in endpoints]
        for e in endpoints:
            received += e.receive(0.01)
    return received


def exchange(sender: Endpoint, receiver: Endpoint, seq: int = 1) -> list[Envelope]:
    """Prove that a message passes from one to the other now."""
    before = receiver.counters["received"]
    assert sender.send(receiver.address, receiver.me, Look(seq))
    return until(lambda: receiver.counters["received"] > before, receiver, sender)


def delivery(n: int) -> Delivery:
    version = Version(Ballot(1, A), 2)
    segment = Segment(
        np.arange(n, dtype=np.int32), True, np.linspace(-9, 0, n, dtype=np.float32), [Span(version, 0, n)]
    )
    return Delivery(1, Group([Completion([segment], 1.0, "stop")], version))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def raw(endpoint: Endpoint, keys: secret.Keys | None = KEYS, server_key: bytes | None = None) -> zmq.Socket:
    """A bare DEALER, with the key pair ``keys`` or none at all."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if keys:
        dealer.curve_serverkey = server_key or keys.public
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.private
    dealer.connect(endpoint.address)
    return dealer


def test_control_messages_arrive_with_sender_and_reply_address(make: Make) -> None:
    a, b = make(A), make(B)
    [envelope] = exchange(a, b, 7)
    assert envelope == Envelope(RUN, A, B, a.address, Look(7))
    [answer] = exchange(b, a, 8)
    assert answer.body == Look(8)


def test_a_bulk_message_of_five_mebibytes_arrives_whole(make: Make) -> None:
    a, b = make(A), make(B)
    sent = delivery(5 << 18)
    assert sent.group
    assert a.send(b.bulk_address, B, sent, bulk=True)
    [envelope] = until(lambda: b.counters["received"] == 1, b, a)
    [got], [was] = (d.group.completions[0].segments for d in (envelope.body, sent))
    assert np.array_equal(got.tokens, was.tokens)
    assert np.array_equal(got.logprobs, was.logprobs)


def test_a_message_for_somebody_else_is_dropped_and_answered_not_me(make: Make) -> None:
    a, b = make(A), make(B)
    assert a.send(b.address, C, Look(1))
    [answer] = until(lambda: a.counters["received"] == 1, a, b)
    assert (answer.sender, answer.body) == (B, NotMe(meant=C))
    assert b.counters["not_me"] == 1
    assert b.counters["received"] == 0


def test_two_wrong_ids_do_not_answer_each_other_for_ever(make: Make) -> None:
    a, b = make(A), make(B)
    assert a.send(b.address, C, NotMe(meant=A))
    until(lambda: b.counters["not_me"] == 1, b, a)
    exchange(b, a)  # overtakes nothing: an answer would have come before it
    assert a.counters["received"] == 1


def test_a_first_contact_to_nobody_in_particular_arrives(make: Make) -> None:
    a, b = make(A), make(B)
    assert a.send(b.address, "", Look(1))
    [envelope] = until(lambda: b.counters["received"] == 1, b, a)
    assert envelope.to == ""


def test_a_message_of_another_run_is_dropped(make: Make) -> None:
    a, b = make(A, run="other"), make(B)
    assert a.send(b.address, B, Look(1))
    until(lambda: b.counters["other_run"] == 1, b, a)
    assert b.counters["received"] == 0


def test_what_was_sent_before_anybody_listened_arrives_once_somebody_does(make: Make) -> None:
    a, b = make(A), make(B)
    port = port_of(b.address)
    b.close()
    assert a.send(f"tcp://127.0.0.1:{port}", C, Look(1))
    c = make(C, port=port)
    assert [e.body for e in until(lambda: c.counters["received"] == 1, c, a)] == [Look(1)]


def test_a_new_process_at_an_old_port_answers_that_it_is_not_the_old_one(make: Make) -> None:
    a, b = make(A), make(B)
    exchange(a, b)
    port = port_of(b.address)
    b.close()
    a.send(f"tcp://127.0.0.1:{port}", B, Look(2))
    c = make(C, port=port)

    def answered() -> bool:
        a.send(c.address, B, Look(3))
        return a.counters["received"] > 0

    answers = until(answered, c, a)
    assert {(e.sender, e.body) for e in answers} == {(C, NotMe(meant=B))}
    assert c.counters["received"] == 0


@pytest.mark.parametrize("key", ["another secret", "none", "the public key alone"])
def test_a_stranger_reaches_nothing_and_changes_nothing(make: Make, key: str) -> None:
    a, b = make(A), make(B)
    frames = codec.encode(Envelope(RUN, A, B, a.address, Look(1)))
    match key:
        case "another secret":
            stranger = raw(b, OTHER_KEYS)
        case "none":
            stranger = raw(b, None)
        case _:  # libzmq lets it in without a ZAP handler; this one counts it, and that is all
            stranger = raw(b, OTHER_KEYS, server_key=KEYS.public)
    monitor = stranger.get_monitor_socket()
    for _ in range(5):
        stranger.send_multipart(frames, zmq.NOBLOCK)
    events: list[int] = []

    def refused() -> bool:
        while monitor.poll(0):
            events.append(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
        return zmq.EVENT_DISCONNECTED in events

    assert until(refused, b) == []
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    assert not [name for name in b.counters if name != "refused_key"]
    assert b.counters["refused_key"] == (1 if key == "the public key alone" else 0)
    exchange(a, b)
    stranger.context.destroy(linger=0)


def test_rubbish_and_silence_on_a_connection_disturb_nobody(make: Make) -> None:
    a, b = make(A), make(B)
    randomness = random.Random(1)
    with contextlib.ExitStack() as stack:
        for address in (b.address, b.bulk_address):
            for i in range(20):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(address)), timeout=5))
                if i % 2:
                    with contextlib.suppress(OSError):  # refused already
                        stranger.sendall(randomness.randbytes(5_000))
        exchange(a, b)
    exchange(a, b)
    assert set(b.counters) == {"received"}


def test_a_peer_that_never_reads_blocks_no_sender(make: Make) -> None:
    a, deaf, b = make(A), make(C), make(B)
    body = delivery(1 << 18)
    until(lambda: not a.send(deaf.bulk_address, C, body, bulk=True), within_s=30)
    assert a.counters["dropped_full"] == 1
    exchange(a, b)


def test_a_queue_to_nobody_fills_drops_and_counts(make: Make) -> None:
    a, b = make(A), make(B)
    nobody = b.address
    b.close()
    sent = [a.send(nobody, B, Look(i)) for i in range(endpoint_module.SEND_QUEUE["control"] + 10)]
    assert sent.count(True) == a.counters["sent"] == endpoint_module.SEND_QUEUE["control"]
    assert sent.count(False) == a.counters["dropped_full"] == 10


def test_forgetting_an_address_drops_what_waits_for_it(make: Make) -> None:
    a, b = make(A), make(B)
    nobody, port = b.address, port_of(b.address)
    b.close()
    assert a.send(nobody, B, Look(1))
    a.forget(nobody)
    c = make(B, port=port)
    assert [e.body for e in exchange(a, c, 2)] == [Look(2)]


def test_a_connection_that_libzmq_gave_up_is_made_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer that is not ZMTP, libzmq never connects again: a peer that binds the port later would be lost."""
    monkeypatch.setattr(endpoint_module, "STUCK_S", 0.0)
    a = make(A)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        a.send(f"tcp://127.0.0.1:{port}", B, Look(0))
        other.settimeout(5)
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n" * 9)
            connection.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
    b = make(B, port=port)

    def arrived() -> bool:
        a.send(b.address, B, Look(1))
        return b.counters["received"] > 0

    until(arrived, b, a)
    assert a.counters["reconnected"] >= 1


def test_connections_are_a_bounded_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "CONNECTIONS", 2)
    a, b = make(A), make(B)
    for port in range(1, 6):
        assert a.send(f"tcp://127.0.0.1:{port}", C, Look(1))
    assert a.counters["evicted"] == 3
    exchange(a, b)


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://*:1", "ipc:///tmp/x", "tcp://127.0.0.1:99999", "rubbish"])
def test_an_address_that_is_none_drops_the_message(make: Make, address: str) -> None:
    a = make(A)
    assert not a.send(address, B, Look(1))
    assert a.counters["dropped_address"] == 1


def test_waking_ends_a_wait_from_any_thread(make: Make) -> None:
    a = make(A)
    waker = threading.Timer(0.05, lambda: [a.wake() for _ in range(100_000)])
    waker.start()
    start = time.monotonic()
    assert a.receive(30) == []
    waker.join()
    a.receive(30)
    assert time.monotonic() - start < 25  # the waits would have been 60 s
    a.close()
    a.wake()


def test_closing_with_unsent_messages_to_nobody_does_not_wait(make: Make) -> None:
    a, b = make(A), make(B)
    nobody, bulk = b.address, b.bulk_address
    b.close()
    a.send(nobody, B, Look(1))
    a.send(bulk, B, delivery(1 << 18), bulk=True)
    closer = threading.Thread(target=a.close, daemon=True)
    closer.start()
    closer.join(5)
    assert not closer.is_alive()
    a.close()


def test_only_the_chosen_address_listens(make: Make) -> None:
    before = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    a = make(A)
    after = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {(host, port) for host, port in after - before} == {
        ("127.0.0.1", port_of(a.address)),
        ("127.0.0.1", port_of(a.bulk_address)),
    }


def test_peers_meet_over_ipv6(make: Make) -> None:
    if not any(a.address == "::1" for addresses in psutil.net_if_addrs().values() for a in addresses):
        pytest.skip("no IPv6 loopback here")
    a, b = make(A, host="::1"), make(B, host="[::1]")
    assert a.address.startswith("tcp://[::1]:")
    exchange(a, b)
    c = make(C)
    exchange(a, c)
    assert "nobody listens" in a.diagnose("tcp://[::1]:1")


def test_a_port_in_use_is_named(make: Make) -> None:
    port = port_of(make(A).address)
    with pytest.raises(ValueError, match=rf"mesh.port = {port} on 127.0.0.1 is in use .* choose another or 0"):
        make(B, port=port)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        *((every, "every interface") for every in ("*", "0.0.0.0", "", "::")),
        ("203.0.113.7", "not an address of this machine"),
        ("no-such-host.invalid", "cannot be resolved"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(make: Make, host: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(A, host=host)


def test_who_made_it_may_send_before_the_receiving_thread_starts_and_close_after(make: Make) -> None:
    a, b = make(A), make(B)
    assert a.send(b.address, B, Look(1))
    received: list[Envelope] = []
    thread = threading.Thread(target=lambda: received.extend(until(lambda: b.counters["received"] == 1, b, a)))
    thread.start()
    thread.join(20)
    assert [e.body for e in received] == [Look(1)]
    a.close()


def test_a_second_thread_is_refused(make: Make) -> None:
    a = make(A)
    a.receive(0)
    raised: list[BaseException] = []

    def use() -> None:
        try:
            a.receive(0)
        except AssertionError as e:
            raised.append(e)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert raised


# ----------------------------------------------------------------------------------------------------------------------
# Why nobody answered
# ----------------------------------------------------------------------------------------------------------------------


def test_diagnosis_nobody_listens(make: Make) -> None:
    assert make(A).diagnose("tcp://127.0.0.1:1") == "nobody listens at tcp://127.0.0.1:1"


def test_diagnosis_the_name_is_unknown(make: Make) -> None:
    assert "host no-such-host.invalid cannot be resolved" in make(A).diagnose("tcp://no-such-host.invalid:1")
    assert "not an address" in make(A).diagnose("tcp:/x")


def test_diagnosis_another_secret(make: Make) -> None:
    a, other = make(A), make(B, keys=OTHER_KEYS)
    assert "refuses this run's secret" in a.diagnose(other.address)
    assert other.receive(0) == []
    assert not other.counters


def test_diagnosis_another_program(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def talk() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 9)
                connection.settimeout(5)
                with contextlib.suppress(OSError):
                    connection.recv(1 << 16)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        assert "another program" in make(A).diagnose(f"tcp://127.0.0.1:{other.getsockname()[1]}", timeout_s=5)
        thread.join(5)


def test_diagnosis_silence(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert "nobody speaks" in make(A).diagnose(address, timeout_s=0.3)


def test_diagnosis_a_peer_of_this_run(make: Make) -> None:
    a = make(A)
    assert "a peer of this run listens" in a.diagnose(a.address)


# ----------------------------------------------------------------------------------------------------------------------
# A member that sends nonsense
# ----------------------------------------------------------------------------------------------------------------------


def test_two_thousand_damaged_messages_leave_the_endpoint_alive(make: Make) -> None:
    a, b = make(A), make(B)
    member = raw(b)
    randomness = random.Random(7)
    seeds = [
        codec.encode(Envelope(RUN, A, B, a.address, delivery(2_000))),
        codec.encode(Envelope(RUN, A, B, a.address, Look(1))),
        [msgspec.msgpack.encode([RUN, A, B, a.address, ["Unknown", 1]])],
    ]
    for i in range(2_000):
        frames = [bytearray(f) for f in randomness.choice(seeds)]
        damaged = frames[randomness.randrange(len(frames))]
        for _ in range(randomness.randrange(4)):
            damaged[randomness.randrange(len(damaged))] = randomness.randrange(256)
        if i % 5 == 0:
            frames.append(bytearray(randomness.randbytes(randomness.randrange(50))))
        if i % 7 == 0:
            del damaged[randomness.randrange(len(damaged)) :]
        until(lambda: bool(member.poll(0, zmq.POLLOUT)), b)
        member.send_multipart(frames, zmq.NOBLOCK)
    until(lambda: sum(b.counters[k] for k in ("malformed", "received", "not_me", "other_run")) >= 2_000, b, a)
    assert b.counters["malformed"] > 500
    exchange(a, b)
    member.context.destroy(linger=0)
