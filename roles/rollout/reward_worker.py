"""The process in which a reward function runs: it may hang, crash, print or fork, and only this process suffers.

Started by ``rewards.py`` as ``python -P -m roles.rollout.reward_worker PARENT_PID``, with a socket as its standard
input. On it travel frames: four bytes of length, then JSON (which knows NaN and integers of any size, as the user's
columns may). First the settings come in and ``Ready`` goes out; then each ``Call`` is answered by a ``Result``. What
the function prints goes to standard error, whose end the parent reads.
"""

import ctypes
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from mesh.config import Task as TaskSettings

T = TypeVar("T")

MAX_FRAME = 256 << 20  # bytes; far above any group, and a bound on what a broken function can make the parent read
TRACEBACK_CHARS = 4000
PR_SET_PDEATHSIG = 1


class Ready(Struct):
    """``fault``: why the reward function cannot be had; empty when it can."""

    fault: str = ""


class Call(Struct):
    """A group's completions: ``prompts`` as texts or chats, and the columns of the data, each as long."""

    number: int
    prompts: list[Any]
    completions: list[str]
    columns: dict[str, list[Any]]


class Outcome(Struct):
    """``reward`` is finite, or None and ``reason`` one word: none, nonfinite, type, count, exception."""

    reward: float | None
    reason: str = ""


class Result(Struct):
    """``trace`` is the traceback of an exception, and ``kind`` what it is told apart by."""

    number: int
    outcomes: list[Outcome]
    kind: str = ""
    trace: str = ""


def outcomes(values: Any, count: int, name: str) -> tuple[list[Outcome], BaseException | None]:
    """What a reward function returned, as outcomes: one a completion, and the first exception among them."""
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        fault = f"{name} returned {type(values).__name__}, not a list of {count} rewards"
        return [Outcome(None, "count")] * count, TypeError(fault)
    if len(values) != count:
        fault = f"{name} returned {len(values)} rewards for {count} completions"
        return [Outcome(None, "count")] * count, ValueError(fault)
    found = [outcome(value) for value in values]
    fault = next((v for v in values if isinstance(v, BaseException)), None)
    if fault is None:
        odd = next((v for v, o in zip(values, found, strict=True) if o.reason == "type"), None)
        fault = TypeError(f"{name} returned a {type(odd).__name__} as a reward") if odd is not None else None
    return found, fault


def outcome(value: Any) -> Outcome:
    if value is None:
        return Outcome(None, "none")
    if isinstance(value, BaseException):
        return Outcome(None, "exception")
    if hasattr(value, "item") and not isinstance(value, str):  # a scalar of numpy or torch, wherever it lies
        value = value.item()
    if not isinstance(value, int | float):
        return Outcome(None, "type")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return Outcome(number) if math.isfinite(number) else Outcome(None, "nonfinite")


def answer(call: Call, function: Any) -> Result:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        values = function(prompts=call.prompts, completions=call.completions, **call.columns)
        found, fault = outcomes(values, len(call.completions), name)
    except (Exception, SystemExit) as e:  # the function is the user's: what it raises is told, and there is no reward
        found, fault = [Outcome(None, "exception")] * len(call.completions), e
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm it left behind would end the next call
    if fault is None:
        return Result(call.number, found)
    trace = "".join(traceback.format_exception(fault))
    where = traceback.extract_tb(fault.__traceback__)
    kind = f"{type(fault).__name__} at {where[-1].filename}:{where[-1].lineno}" if where else str(fault)[:200]
    return Result(call.number, found, kind, trace[-TRACEBACK_CHARS:])


def pack(message: Struct) -> bytes:
    payload = json.dumps(msgspec.to_builtins(message)).encode()
    return struct.pack("<I", len(payload)) + payload


def unpack(payload: bytes, kind: type[T]) -> T:
    """Raises ValueError (a msgspec.ValidationError too) when it is something else."""
    return msgspec.convert(json.loads(payload), kind)


def read(channel: socket.socket) -> bytes | None:
    """The next frame, or None when the parent has closed its end."""
    head = _exactly(channel, 4)
    return None if head is None else _exactly(channel, struct.unpack("<I", head)[0])


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _private_channel() -> socket.socket:
    """The socket of standard input under a number of its own, so that the function finds standard input empty and
    whatever it writes to standard output lands in standard error."""
    channel = socket.socket(fileno=os.dup(0))  # os.dup: not inherited by what the function starts
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return channel


def main() -> None:
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before we asked to die with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = _private_channel()
    first = read(channel)
    if first is None:
        return
    from roles.rollout.tasks.rewards import load_reward

    try:
        function = load_reward(unpack(first, TaskSettings))
    except ValueError as e:
        channel.sendall(pack(Ready(fault=str(e))))
        return
    channel.sendall(pack(Ready()))
    me = os.getpid()
    while (frame := read(channel)) is not None:
        result = answer(unpack(frame, Call), function)
        if os.getpid() != me:
            os._exit(0)  # a child that the function forked and let return: the answer is its parent's
        channel.sendall(pack(result))


if __name__ == "__main__":
    main()
