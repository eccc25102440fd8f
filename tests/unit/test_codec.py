import resource
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.version import Ballot, Version
from transport import codec
from transport.messages import (
    Body,
    Completion,
    Delivery,
    Envelope,
    Group,
    Look,
    Probe,
    Segment,
    Span,
)

VERSION = Version(Ballot(3, "0" * 16), 7)
BODIES = get_args(Body)


def values(node: mi.Type, extra: dict | None = None) -> st.SearchStrategy:
    """Whatever the wire type ``node`` admits."""
    match node:
        case mi.Metadata():
            return values(node.type, node.extra)
        case mi.CustomType():
            assert extra, "an array field without a dtype"
            dtype = np.dtype(extra["dtype"])
            size = st.integers(0, 3) | st.sampled_from([codec.INLINE_BYTES // dtype.itemsize + 1, 300_000])
            return size.map(lambda n: (np.arange(n) * 7).astype(dtype))
        case mi.StructType():
            made = st.fixed_dictionaries({f.name: values(f.type) for f in node.fields}).map(lambda kw: node.cls(**kw))
            return made.map(consistent)
        case mi.UnionType():
            return st.one_of([values(t) for t in node.types])
        case mi.ListType() | mi.VarTupleType():
            made = st.lists(values(node.item_type), max_size=3)
            return made.map(tuple) if isinstance(node, mi.VarTupleType) else made
        case mi.TupleType():
            return st.tuples(*map(values, node.item_types))
        case mi.DictType():
            return st.dictionaries(values(node.key_type), values(node.value_type), max_size=3)
        case mi.IntType():
            low = -(2**63) if node.ge is None else node.ge
            high = node.le if node.le is not None else (2**63 if node.lt is None else node.lt) - 1
            return st.integers(low, high)
        case mi.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=20)
        case mi.BytesType():
            return st.binary(max_size=50)
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType():
            return st.sampled_from(node.values)
    raise AssertionError(f"the wire has a type this test does not know: {node}")


def consistent(message: Any) -> Any:
    """Fit what depends on each other: log-probabilities and spans to tokens."""
    if isinstance(message, Probe):
        n = max(len(message.tokens) - 1, 0)
        return msgspec.structs.replace(message, logprobs=np.linspace(-9, 0, n, dtype=np.float32))
    if isinstance(message, Segment):
        n = len(message.tokens) if message.sampled else 0
        spans = [Span(VERSION, 0, n // 2), Span(VERSION, n // 2, n)] if n > 1 else [Span(VERSION, 0, n)][:n]
        return msgspec.structs.replace(message, logprobs=np.linspace(-9, 0, n, dtype=np.float32), spans=spans)
    return message


def envelopes(body: type) -> st.SearchStrategy[Envelope]:
    return values(mi.type_info(body)).map(lambda b: Envelope("run", "a" * 16, "b" * 16, "tcp://127.0.0.1:1", b))


def plain(envelope: Envelope) -> Any:
    return msgspec.to_builtins(envelope, enc_hook=lambda array: [array.dtype.name, array.tolist()])


def joined(envelope: Envelope) -> list[bytes]:
    return [bytes(frame) for frame in codec.encode(envelope)]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_every_message_comes_back_as_it_was_sent(body: type) -> None:
    @settings(max_examples=15, deadline=None)
    @given(envelopes(body))
    def holds(envelope: Envelope) -> None:
        frames = codec.encode(envelope)
        assert max(map(len, frames)) <= codec.FRAME_BYTES
        assert plain(codec.decode(frames)) == plain(envelope)

    holds()


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_a_damaged_message_is_malformed_or_valid_and_nothing_else(body: type) -> None:
    damage = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)

    @settings(max_examples=60, deadline=None)
    @given(envelopes(body), damage, st.integers(0, 5))
    def holds(envelope: Envelope, damage: list[tuple[int, int]], how: int) -> None:
        frames = joined(envelope)
        header = bytearray(frames[0])
        for where, byte in damage:
            header[where % len(header)] = byte
        where = damage[0][0]
        match how:
            case 0:
                frames.append(b"more")
            case 1:
                frames.pop()
            case 2:
                frames = [frame[: where % (len(frame) + 1)] for frame in frames]
            case 3:
                frames[0] = bytes(header[: where % len(header)]) + bytes(header[where % len(header) + 1 :])
            case _:
                frames[0] = bytes(header)
        try:
            decoded = codec.decode(frames)
        except codec.Malformed:
            return
        codec.encode(decoded)  # what was let in is valid by the sender's own rules

    holds()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_malformed(frames: list[bytes]) -> None:
    with pytest.raises(codec.Malformed):
        codec.decode(frames)


@pytest.mark.parametrize(
    "header",
    [
        b"\x91" * 500_000,  # nested deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # a list said to have four thousand million entries
        b"\x95\xa1r\xa1a\xa1b\xa1c\x93\xa6Answer\x01\xdd\xff\xff\xff\xff",
        b"\x95\xa1r\xa1a\xa1b\xa1c\x98\xa6Answer\x01\x90\x90\x90\x90\x92\x92\x01\xa1a\x02\x91\xdd\xff\xff\xff\xff",
        b"\x95\xa1r\xa1a\xa1b\xa1c\x92\xa4Look\xc6\xff\xff\xff\xff",
        b"\xc1",
        b"\x81\x91\x01\x01",
    ],
)
def test_a_header_that_claims_much_allocates_little(header: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(codec.Malformed):
        codec.decode([header])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def envelope_of(body: Any) -> Envelope:
    return Envelope("run", "a", "b", "tcp://127.0.0.1:1", body)


def delivery(*lengths: int) -> Delivery:
    def segment(n: int) -> Segment:
        spans = [Span(VERSION, 0, n)] if n else []
        return Segment(np.arange(n, dtype=np.int32), True, np.full(n, -1.5, np.float32), spans)

    return Delivery(1, Group([Completion([segment(n)], 1.0, "stop") for n in lengths], VERSION))


def test_large_arrays_are_sent_without_copies_and_received_read_only() -> None:
    body = delivery(5_000, 600_000)
    frames = codec.encode(envelope_of(body))
    assert [len(f) for f in frames[1:]] == 2 * [20_000] + 2 * [1 << 20, 1 << 20, 2_400_000 - (2 << 20)]
    source = body.group.completions[0].segments[0].tokens
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), source)
    received = codec.decode(frames).body.group.completions[0].segments[0].tokens
    assert np.shares_memory(received, source)
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1


def test_many_small_arrays_do_not_outgrow_the_header() -> None:
    envelope = envelope_of(delivery(*[1_000] * 400))
    frames = codec.encode(envelope)
    assert len(frames[0]) <= codec.FRAME_BYTES
    assert plain(codec.decode(frames)) == plain(envelope)


def test_an_array_that_is_not_contiguous_arrives_in_order() -> None:
    tokens = np.arange(6_000, dtype=np.int32)[::2]
    body = Delivery(1, Group([Completion([Segment(tokens, False, np.zeros(0, np.float32))], None, "error")], VERSION))
    received = codec.decode(codec.encode(envelope_of(body))).body.group.completions[0].segments[0].tokens
    assert received.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("segment", "says"),
    [
        (Segment(np.zeros(2, np.int64), True, np.zeros(2, np.float32)), "Segment.tokens must be .* int32, is int64"),
        (Segment(np.zeros((2, 1), np.int32), False, np.zeros(0, np.float32)), "2-D"),
        (Segment([1, 2], True, np.zeros(2, np.float32)), "is list"),  # type: ignore[arg-type]
        (Segment(np.zeros(2, np.int32), True, np.zeros(1, np.float32)), "2 sampled tokens has 1 log-prob"),
        (Segment(np.zeros(2, np.int32), True, np.zeros(2, np.float32)), "do not tile its 2 tokens"),
        (Segment(np.zeros(2, np.int32), True, np.zeros(2, np.float32), [Span(VERSION, 1, 2)]), "do not tile"),
        (Segment(np.zeros(2, np.int32), False, np.zeros(2, np.float32)), "given Segment carries"),
    ],
)
def test_a_mistake_in_an_array_shows_at_the_sender(segment: Segment, says: str) -> None:
    body = Delivery(1, Group([Completion([segment], 0.0, "stop")], VERSION))
    with pytest.raises(ValueError, match=says):
        codec.encode(envelope_of(body))


def test_the_same_mistake_is_refused_on_arrival() -> None:
    good = envelope_of(delivery(3))
    header = codec.encode(good)[0]
    as_int64 = bytes(header).replace(b"\x92\x00\xc4\x0c", b"\x92\x01\xc4\x0c", 1)  # dtype code of 12 bytes
    assert as_int64 != header
    with pytest.raises(codec.Malformed, match="do not make an array of int64"):
        codec.decode([as_int64])
    as_uint8 = bytes(header).replace(b"\x92\x00\xc4\x0c", b"\x92\x02\xc4\x0c", 1)
    with pytest.raises(codec.Malformed, match="must be a 1-D array of int32, is uint8"):
        codec.decode([as_uint8])
    unknown = bytes(header).replace(b"\x92\x00\xc4\x0c", b"\x92\x09\xc4\x0c", 1)
    with pytest.raises(codec.Malformed, match="not allowed"):
        codec.decode([unknown])


def test_bounds_are_checked_before_anything_is_read() -> None:
    look = bytes(codec.encode(envelope_of(Look(1)))[0])
    with pytest.raises(codec.Malformed, match="frames"):
        codec.decode([])
    with pytest.raises(codec.Malformed, match="frames"):
        codec.decode([look] * (codec.MESSAGE_FRAMES + 1))
    with pytest.raises(codec.Malformed, match="a frame of"):
        codec.decode([look, bytes(codec.FRAME_BYTES + 1)])
    with pytest.raises(codec.Malformed, match="at most"):
        codec.decode([look] + [bytes(codec.FRAME_BYTES)] * 256)
    with pytest.raises(codec.Malformed, match="too long"):
        codec.decode([msgspec.msgpack.encode(Envelope("r" * 65, "a", "b", "", Look(1)))])
    with pytest.raises(ValueError, match="header"):
        codec.encode(envelope_of(Delivery(1, None, "x" * (1 << 20))))


def test_a_numpy_number_in_a_message_is_named() -> None:
    with pytest.raises(TypeError, match="int64"):
        codec.encode(envelope_of(Look(np.int64(3))))  # type: ignore[arg-type]
