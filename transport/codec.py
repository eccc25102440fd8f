"""Envelope <-> frames: one msgpack header, then raw frames for large arrays. All of it is bounded.

An array stands in the header as ``[dtype code, bytes]`` while it is small, and as ``[dtype code, length in bytes]``
when its bytes follow as raw frames: whole frames of 1 MiB and a shorter last one, in the order in which the header
names the arrays. Sending copies nothing that is contiguous; receiving is a read-only view of the frame, joined only
when an array took several.

Whatever is wrong with received frames raises `Malformed`, and nothing else ever does. The same checks run on sending,
so that a mistake shows where it was made and not as silence at the receiver.
"""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi
import numpy as np

from transport.messages import Body, Envelope, Probe, Segment

FRAME_BYTES = 1 << 20  # of one raw frame, and of the header
INLINE_BYTES = 4 << 10  # an array up to this size rides in the header ...
INLINE_TOTAL_BYTES = 512 << 10  # ... until so many did: a header must stay under FRAME_BYTES
MESSAGE_BYTES = 256 << 20  # all frames together
MESSAGE_FRAMES = 16_384
ID_CHARS, REPLY_CHARS = 64, 256

Frame = bytes | memoryview

_DTYPES = dict(enumerate(np.dtype(f"<{kind}") for kind in ("i4", "i8", "u1", "u8", "f4", "f8")))
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Malformed(ValueError):
    """Received frames are not a message; the text says why."""


def encode(envelope: Envelope) -> list[Frame]:
    """The frames of ``envelope``: at least one, each of at most 1 MiB. Raw frames share memory with its arrays.

    Raises ValueError when an array has another dtype, shape or length than its field says, or a bound is exceeded."""
    raw: list[Frame] = []
    inline = 0

    def pack(value: Any) -> tuple[int, bytes | int]:
        nonlocal inline
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a message cannot carry a {type(value).__name__}: use plain Python numbers or arrays")
        code = _CODES.get(value.dtype)
        if code is None:
            raise TypeError(f"a message cannot carry an array of {value.dtype}")
        size = value.nbytes
        if size <= INLINE_BYTES and inline + size <= INLINE_TOTAL_BYTES:
            inline += size
            return code, value.tobytes()
        data = np.ascontiguousarray(value).data.cast("B")
        raw.extend(data[i : i + FRAME_BYTES] for i in range(0, len(data), FRAME_BYTES))
        return code, len(data)

    _check_envelope(envelope)
    header = msgspec.msgpack.encode(envelope, enc_hook=pack)
    kind = type(envelope.body).__name__
    if len(header) > FRAME_BYTES:
        raise ValueError(f"{kind} has a header of {len(header)} bytes; at most {FRAME_BYTES} fit in a message")
    if 1 + len(raw) > MESSAGE_FRAMES:
        raise ValueError(f"{kind} has {1 + len(raw)} frames; at most {MESSAGE_FRAMES} fit in a message")
    total = len(header) + sum(map(len, raw))
    if total > MESSAGE_BYTES:
        raise ValueError(f"{kind} has {total} bytes; at most {MESSAGE_BYTES} fit in a message")
    return [header, *raw]


def decode(frames: Sequence[Frame]) -> Envelope:
    """The envelope in ``frames``, whose arrays are read-only views of them. Raises Malformed."""
    if not 1 <= len(frames) <= MESSAGE_FRAMES:
        raise Malformed(f"{len(frames)} frames; a message has 1 to {MESSAGE_FRAMES}")
    if max(map(len, frames)) > FRAME_BYTES:
        raise Malformed(f"a frame of {max(map(len, frames))} bytes; at most {FRAME_BYTES}")
    if sum(map(len, frames)) > MESSAGE_BYTES:
        raise Malformed(f"{sum(map(len, frames))} bytes; a message has at most {MESSAGE_BYTES}")
    used = 1

    def unpack(_: type, value: Any) -> np.ndarray:
        nonlocal used
        code, data = value if type(value) is list and len(value) == 2 else (None, None)
        dtype = _DTYPES.get(code) if type(code) is int else None
        if dtype is None:
            raise Malformed("an array of a dtype that is not allowed")
        if type(data) is bytes and len(data) <= INLINE_BYTES and not len(data) % dtype.itemsize:
            return np.frombuffer(data, dtype)  # read-only, as bytes are
        if type(data) is int:
            count = -(-data // FRAME_BYTES)
            if not 0 < count <= len(frames) - used:
                raise Malformed(f"an array of {data} bytes, and {len(frames) - used} frames left to hold it")
            parts = frames[used : used + count]
            used += count
            if any(len(p) != FRAME_BYTES for p in parts[:-1]) or sum(map(len, parts)) != data:
                raise Malformed(f"an array of {data} bytes in frames of other sizes")
            data = parts[0] if count == 1 else np.concatenate([np.frombuffer(p, np.uint8) for p in parts]).data
        elif type(data) is not bytes or len(data) > INLINE_BYTES:
            raise Malformed("an array that is neither short bytes nor a length")
        if len(data) % dtype.itemsize:
            raise Malformed(f"{len(data)} bytes do not make an array of {dtype.name}")
        array = np.frombuffer(data, dtype)
        array.flags.writeable = False
        return array

    try:
        envelope = msgspec.msgpack.decode(frames[0], type=Envelope, dec_hook=unpack)
        _check_envelope(envelope)
    except (ValueError, TypeError, RecursionError, OverflowError) as e:  # what msgspec raises on bytes it cannot read
        raise Malformed(str(e)) from None
    if used != len(frames):
        raise Malformed(f"{len(frames) - used} frames more than the header names")
    return envelope


# ----------------------------------------------------------------------------------------------------------------------
# What the types do not say
# ----------------------------------------------------------------------------------------------------------------------


def _array_fields() -> dict[type, list[tuple[str, np.dtype | None]]]:
    """For each message type, the fields that are arrays (with their dtype) or lead to arrays (None)."""
    found: dict[type, list[tuple[str, np.dtype | None]]] = {}

    def dtype_of(node: mi.Type, extra: dict) -> tuple[bool, np.dtype | None]:
        if isinstance(node, mi.Metadata):
            return dtype_of(node.type, node.extra or {})
        if isinstance(node, mi.CustomType) and node.cls is np.ndarray:
            return True, np.dtype(extra["dtype"]).newbyteorder("<")
        if isinstance(node, mi.StructType):
            return bool(visit(node)), None
        inner = [*getattr(node, "types", ()), getattr(node, "item_type", None), getattr(node, "value_type", None)]
        holds = [dtype_of(t, extra)[0] for t in inner if isinstance(t, mi.Type)]  # a list: every branch is visited
        return any(holds), None

    def visit(node: mi.StructType) -> list[tuple[str, np.dtype | None]]:
        fields = [(f.name, *dtype_of(f.type, {})) for f in node.fields]
        found[node.cls] = [(name, dtype) for name, holds, dtype in fields if holds]
        return found[node.cls]

    for body in get_args(Body):
        info = mi.type_info(body)
        assert isinstance(info, mi.StructType)
        visit(info)
    return found


_ARRAYS = _array_fields()


def _check_envelope(envelope: Envelope) -> None:
    if max(map(len, (envelope.run, envelope.sender, envelope.to))) > ID_CHARS or len(envelope.reply) > REPLY_CHARS:
        raise ValueError("an id or address that is too long")
    _check(envelope.body)


def _check(value: Any) -> None:
    fields = _ARRAYS.get(type(value))
    if fields is None:
        if isinstance(value, (list, tuple)):
            for item in value:
                _check(item)
        return
    for name, dtype in fields:
        field = getattr(value, name)
        if dtype is None:
            _check(field)
        elif not isinstance(field, np.ndarray) or field.dtype != dtype or field.ndim != 1:
            found = f"{field.dtype}, {field.ndim}-D" if isinstance(field, np.ndarray) else type(field).__name__
            raise ValueError(f"{type(value).__name__}.{name} must be a 1-D array of {dtype}, is {found}")
    if isinstance(value, Segment):
        _check_segment(value)
    elif isinstance(value, Probe) and len(value.logprobs) != max(len(value.tokens) - 1, 0):
        raise ValueError(f"Probe of {len(value.tokens)} tokens has {len(value.logprobs)} log-probabilities")


def _check_segment(segment: Segment) -> None:
    n = len(segment.tokens)
    if not segment.sampled:
        if len(segment.logprobs) or segment.spans:
            raise ValueError("a given Segment carries log-probabilities or versions")
        return
    if len(segment.logprobs) != n:
        raise ValueError(f"Segment of {n} sampled tokens has {len(segment.logprobs)} log-probabilities")
    end = 0
    for span in segment.spans:
        if span.start != end or span.stop <= end:
            break
        end = span.stop
    if end != n:
        raise ValueError(f"the version spans of a Segment do not tile its {n} tokens")
