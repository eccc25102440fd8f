"""Both ends of a pull, by hand-driven messages."""

import numpy as np
import pytest

from mesh.effects import Send
from mesh.version import Ballot, Lineage, Version
from transport.messages import Announce, Probe, PullAsk, PullDecline, PullTell
from transport.weights import pull as module
from transport.weights.pull import (
    ASK_AGAIN_S,
    IN_FLIGHT,
    LEASE_S,
    MOST_FAULTS,
    MOST_LEASES,
    SILENT_S,
    STALLED_S,
    Check,
    Pull,
    Pulled,
    PullHost,
    Serve,
    Write,
    choose_holders,
)

V = Version(Ballot(3, "t"), 7)
PROBE = Probe(np.empty(0, np.int32), np.empty(0, np.float32))
CHUNK = 4
BUCKET = 8
NBYTES = 44  # six buckets of two chunks, the last one with a single chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


def pulling(*holders, nbytes=NBYTES):
    digests = np.arange(-(-nbytes // BUCKET), dtype=np.uint64)
    return Pull(Announce(None, V, Lineage(), "m", BUCKET, 1, digests, digests, PROBE, list(holders)), nbytes, 0.0)


def tell(chunk, length=CHUNK):
    return PullTell(V, chunk, np.full(length, chunk, np.uint8))


def asks(effects):
    return [(e.to, e.message.chunks) for e in effects if isinstance(e, Send)]


def test_chunks_are_asked_for_in_order_and_never_more_than_so_many_at_a_time():
    p = pulling("a", "b")
    assert asks(p.tick(0.0)) == [("a", list(range(IN_FLIGHT)))]
    assert asks(p.tick(0.1)) == []
    effects = p.told("a", tell(0), 0.2)
    assert effects == [Write(0, None), Send("a", PullAsk(V, [IN_FLIGHT]))]


def test_a_version_is_whole_when_every_bucket_was_verified_and_the_lease_is_given_back():
    p = pulling("a")
    p.tick(0.0)
    buckets = []
    for chunk in range(11):
        buckets += [e.bucket for e in p.told("a", tell(chunk), 0.1) if isinstance(e, Check)]
    assert buckets == [0, 1, 2, 3, 4, 5]
    for bucket in buckets[:-1]:
        assert p.checked(bucket, True, 0.2) == []
    assert p.checked(5, True, 0.2) == [Send("a", PullAsk(V, [])), Pulled(V)]
    assert p.bytes == NBYTES


def test_what_was_not_asked_for_or_comes_from_another_is_not_written():
    p = pulling("a", "b")
    p.tick(0.0)
    assert p.told("b", tell(0), 0.1) == []
    assert p.told("a", tell(10), 0.1) == []
    assert p.told("a", PullTell(Version(V.term, 8), 0, np.zeros(4, np.uint8)), 0.1) == []
    p.told("a", tell(0), 0.1)
    assert p.told("a", tell(0), 0.1) == []


def test_a_chunk_of_another_length_ends_the_holder():
    p = pulling("a", "b")
    p.tick(0.0)
    assert asks(p.told("a", tell(0, 3), 0.1)) == [("b", list(range(IN_FLIGHT)))]


def test_a_corrupt_bucket_comes_again_from_the_next_holder_and_what_was_verified_stays():
    p = pulling("a", "b")
    p.tick(0.0)
    for chunk in range(5):
        p.told("a", tell(chunk), 0.1)
    assert p.checked(0, True, 0.1) == []
    assert asks(p.checked(1, False, 0.1)) == [("b", list(range(2, 10)))]
    assert p.told("a", tell(5), 0.2) == []


def test_a_chunk_that_does_not_come_is_asked_for_again():
    p = pulling("a")
    p.tick(0.0)
    for chunk in (0, 2, 3, 4, 5, 6, 7):
        p.told("a", tell(chunk), 0.2)
    assert asks(p.tick(ASK_AGAIN_S)) == [("a", [1])]


def test_the_next_holder_goes_on_when_one_dies_is_silent_or_declines():
    p = pulling("a", "b", "c", "d")
    p.tick(0.0)
    assert asks(p.live(["b", "c", "d"], 0.1)) == [("b", list(range(IN_FLIGHT)))]
    assert asks(p.declined("b", PullDecline(V, "does not hold it"), 0.2)) == [("c", list(range(IN_FLIGHT)))]
    assert asks(p.tick(0.2 + SILENT_S)) == [("d", list(range(IN_FLIGHT)))]


def test_a_holder_that_declines_is_asked_again_after_a_moment_and_then_no_more():
    p, now, tried = pulling("a"), 0.0, 0
    effects = p.tick(now)
    while not any(isinstance(e, Pulled) for e in effects):
        if asks(effects):
            tried += 1
            effects = p.declined("a", PullDecline(V, "serves 4 others"), now)
            assert asks(effects) == []
        else:
            now += 0.1
            effects = p.tick(now)
    assert tried == MOST_FAULTS
    assert effects == [Pulled(V, "no peer to pull from: a serves 4 others")]


def test_a_pull_without_progress_is_given_up_and_says_why():
    p = pulling("a", "b", "c", "d", "e", "f", "g", "h")
    now, effects = 0.0, p.tick(0.0)
    while not (ended := [e for e in effects if isinstance(e, Pulled)]):
        now += 0.5
        effects = p.tick(now)
    assert now == STALLED_S
    assert ended[0].reason.startswith("no progress for 20 s: a silent for 3 s, b silent for 3 s")


def test_without_a_holder_there_is_no_pull():
    assert pulling().tick(0.0) == [Pulled(V, "no peer to pull from")]


def test_holders_named_later_are_asked_too():
    p = pulling("a")
    p.tick(0.0)
    p.holders(["a", "b"])
    assert asks(p.declined("a", PullDecline(V, "gone"), 0.1)) == [("b", list(range(IN_FLIGHT)))]


def served(effects):
    return [(e.peer, e.chunk) for e in effects if isinstance(e, Serve)]


def test_a_host_serves_as_much_a_second_as_it_may_and_everybody_in_turn():
    h = PullHost(bytes_per_s=400.0)
    first = served(h.asked("a", PullAsk(V, list(range(20))), CHUNK, 100, 0.0))
    assert first == [("a", chunk) for chunk in range(10)]
    assert served(h.asked("b", PullAsk(V, [50, 51, 52]), CHUNK, 100, 0.0)) == []
    assert served(h.tick(0.04)) == [("a", 10), ("b", 50), ("a", 11), ("b", 51)]
    sent = sum(len(served(h.tick(0.04 + k / 100))) for k in range(1, 100))
    assert sent == 20 + 3 - 14
    h.asked("a", PullAsk(V, list(range(60))), CHUNK, 1000, 10.0)
    assert sum(len(served(h.tick(10.0 + k / 100))) for k in range(1, 11)) <= 11


def test_a_lease_ends_by_itself_and_when_it_is_given_back():
    h = PullHost(1e9)
    h.asked("a", PullAsk(V, [0]), CHUNK, 10, 0.0)
    assert h.leased(V)
    h.tick(LEASE_S)
    assert not h.leased(V)
    h.asked("a", PullAsk(V, [0]), CHUNK, 10, 10.0)
    h.asked("a", PullAsk(V, []), CHUNK, 10, 10.1)
    assert not h.leased(V)
    h.asked("a", PullAsk(V, [0]), CHUNK, 10, 20.0)
    h.live(["b"])
    assert not h.leased(V)


def test_a_host_declines_what_it_does_not_hold_and_more_peers_than_it_serves():
    h = PullHost(1e9)
    assert h.asked("a", PullAsk(V, [0]), 0, 0, 0.0) == [Send("a", PullDecline(V, "does not hold it (any more)"))]
    for k in range(MOST_LEASES):
        assert served(h.asked(f"p{k}", PullAsk(V, [0]), CHUNK, 10, 0.0)) == [(f"p{k}", 0)]
    assert h.asked("z", PullAsk(V, [0]), CHUNK, 10, 0.0) == [Send("z", PullDecline(V, "serves 4 others"))]
    assert [e.to for e in h.gone(V)] == [f"p{k}" for k in range(MOST_LEASES)]
    assert not h.leased(V)
    assert h.declined == 2 + MOST_LEASES


def test_a_chunk_beyond_the_version_is_not_served():
    assert served(PullHost(1e9).asked("a", PullAsk(V, [9, 10, 2**40]), CHUNK, 10, 0.0)) == [("a", 9)]


def test_rollouts_are_named_in_turn_and_the_publisher_last():
    assert choose_holders("t", ["a", "b", "c"], 0) == ["a", "b", "c", "t"]
    assert choose_holders("t", ["a", "b", "c"], 4) == ["b", "c", "a", "t"]
    assert choose_holders(None, [], 5) == []
    assert len(choose_holders("t", [str(k) for k in range(50)], 48)) == module.MOST_HOLDERS
