"""Scoring completions in worker processes that can be killed.

A reward function is the user's code: it may loop in C, fork, use signals, print a gigabyte or crash. So each worker is
an interpreter of its own (``reward_worker.py``) with its own process group and without the mesh's secrets; a call that
takes longer than ``rollout.reward_timeout_s`` costs the worker its life and the completions their reward, and the next
call gets a new worker. Every way a reward can be missing has a name and a count; such a completion teaches nothing.
"""

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mesh.config import Rollout as RolloutSettings
from mesh.config import Task as TaskSettings
from roles.rollout.reward_worker import MAX_FRAME, Call, Ready, Result, pack, unpack
from roles.rollout.tasks.base import Prompt

log = logging.getLogger(__name__)

START_S = 120.0  # to import the reward function and what it needs
END_S = 5.0  # for the kernel to end a killed worker
PRINTED_BYTES = 4096  # of what a function printed last: kept for the log
KINDS_LOGGED = 32  # kinds of exceptions shown with their traceback
SECRETS = "MESH_"  # environment variables that begin so are the mesh's own


@dataclass(frozen=True)
class Scored:
    """``reward`` is finite, or None and ``reason`` says why: none, nonfinite, type, count, exception, timeout, died."""

    reward: float | None
    reason: str = ""


class WorkerLost(RuntimeError):
    """The worker ended, or said something that is not an answer."""


class RewardPool:
    """``rollout.reward_workers`` workers. All methods on one asyncio loop.

    ``counts`` has the scored completions by reason, ``ok`` for those with a reward, and ``restarts``. ``failure`` is
    set when a worker could not be started again: nothing will be scored any more."""

    def __init__(self, task: TaskSettings, rollout: RolloutSettings) -> None:
        self.task, self.timeout_s = task, rollout.reward_timeout_s
        self.counts: Counter[str] = Counter()
        self._workers = [Worker(task) for _ in range(max(1, rollout.reward_workers))]
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        self._calls: set[asyncio.Task] = set()
        self._logged: set[str] = set()
        self.failure: ValueError | None = None

    async def start(self) -> None:
        """Start all workers. Raises ValueError, in one line, when the reward function cannot be imported."""
        started = await asyncio.gather(*(w.start() for w in self._workers), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Scored]:
        """The rewards of a prompt's completions, in order; they are scored in one call, as a group.

        Cancelled, it leaves the worker to finish within its deadline: a new process costs more than an answer that
        nobody wants. Raises ValueError when a worker ended and cannot be started again."""
        worker = await self._free.get()
        call = asyncio.create_task(self._score(worker, prompt, list(completions)))
        self._calls.add(call)  # the loop itself holds tasks weakly
        call.add_done_callback(self._called)
        return await asyncio.shield(call)

    async def _score(self, worker: "Worker", prompt: Prompt, completions: list[str]) -> list[Scored]:
        n = len(completions)
        columns = {name: [value] * n for name, value in prompt.columns.items()}
        try:
            if not worker.alive:
                await self._restart(worker)
            scored = await self._call(worker, [prompt.content] * n, completions, columns)
        finally:
            if worker.calling:  # broken off in the middle: its answer is nobody's
                worker.kill()
            self._free.put_nowait(worker)
        self.counts.update(s.reason or "ok" for s in scored)
        return scored

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.ended() for worker in self._workers))

    def _called(self, call: asyncio.Task) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # whoever waited has it; asyncio complains where nobody does

    async def _call(self, worker: "Worker", prompts: list, completions: list[str], columns: dict) -> list[Scored]:
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await worker.call(prompts, completions, columns)
        except TimeoutError:
            return self._lost(worker, "timeout", len(completions), f"took over {self.timeout_s:g} s and was stopped")
        except WorkerLost as e:
            return self._lost(worker, "died", len(completions), f"ended its process: {e}")
        if len(result.outcomes) != len(completions):
            return self._lost(worker, "died", len(completions), "disturbed its own channel")
        if result.trace:
            self._log(result.kind, f"the reward function failed:\n{result.trace}")
        return [Scored(o.reward, o.reason) for o in result.outcomes]

    def _lost(self, worker: "Worker", reason: str, count: int, what: str) -> list[Scored]:
        printed = worker.printed()
        self._log(reason, f"the reward function {what}{f'; it printed last: {printed}' if printed else ''}")
        worker.kill()
        return [Scored(None, reason)] * count

    async def _restart(self, worker: "Worker") -> None:
        await worker.ended()
        self.counts["restarts"] += 1
        try:
            await worker.start()
        except ValueError as e:
            self.failure = e
            raise

    def _log(self, kind: str, text: str) -> None:
        """A kind of failure is shown once; how often it happened is in the counts."""
        if kind not in self._logged and len(self._logged) < KINDS_LOGGED:
            self._logged.add(kind)
            log.warning("%s", text)


class Worker:
    """One process, its channel, and the end of what it printed."""

    def __init__(self, task: TaskSettings) -> None:
        self._task = task
        self._process: subprocess.Popen | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tail: _Tail | None = None
        self._number = 0
        self.calling = self._killed = False

    @property
    def alive(self) -> bool:
        return not self._killed and self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        out, err = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "roles.rollout.reward_worker", str(os.getpid())],
                stdin=theirs,
                stdout=err,
                stderr=err,
                env=_environment(),
                start_new_session=True,
            )
        self._killed = False
        os.close(err)
        self._tail = _Tail()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self._tail, os.fdopen(out, "rb", 0))
        ours.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_S):
                ready = await self._exchange(self._task, Ready)
        except (TimeoutError, WorkerLost) as e:
            printed = self.printed()
            self.kill()
            why = f"was not ready after {START_S:.0f} s" if isinstance(e, TimeoutError) else "ended at its start"
            raise ValueError(
                f'task.reward = "{self._task.reward}": the process of the reward function {why}'
                f"{f'; it printed last: {printed}' if printed else ''}"
            ) from e
        except asyncio.CancelledError:
            self.kill()
            raise
        if ready.fault:
            self.kill()
            raise ValueError(ready.fault)

    async def call(self, prompts: list, completions: list[str], columns: dict[str, list]) -> Result:
        self._number += 1
        self.calling = True
        call = Call(number=self._number, prompts=prompts, completions=completions, columns=columns)
        result = await self._exchange(call, Result)
        if result.number != self._number:
            raise WorkerLost("it answered another call")
        self.calling = False
        return result

    async def _exchange(self, message: Struct, kind: type) -> Any:
        assert self._reader is not None
        assert self._writer is not None
        try:
            self._writer.write(pack(message))
            await self._writer.drain()
            (size,) = struct.unpack("<I", await self._reader.readexactly(4))
            if size > MAX_FRAME:
                raise WorkerLost(f"it sent a frame of {size} bytes")
            return unpack(await self._reader.readexactly(size), kind)
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            raise WorkerLost(await self._end_of_process()) from e
        except (ValueError, msgspec.ValidationError) as e:
            raise WorkerLost(f"it sent something else: {e}") from e

    async def _end_of_process(self) -> str:
        assert self._process is not None
        try:  # its channel closes a moment before it can be waited for
            return f"exit status {await asyncio.to_thread(self._process.wait, 1.0)}"
        except subprocess.TimeoutExpired:
            return "it closed its channel"

    def kill(self) -> None:
        """End the worker and what it forked. Any number of times."""
        self.calling = False
        if self._process is not None and not self._killed:
            self._killed = True
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("reward worker %d had ended", self._process.pid)
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None
        if self._tail is not None:
            self._tail.close()

    async def ended(self) -> None:
        """Wait for a killed worker's end, so that no zombie is left."""
        self.kill()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, END_S)
            except subprocess.TimeoutExpired:
                log.warning("reward worker %d does not end after SIGKILL and is abandoned", self._process.pid)

    def printed(self) -> str:
        return self._tail.text() if self._tail is not None else ""


class _Tail(asyncio.Protocol):
    """Reads whatever comes and keeps the end of it."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data = (self._data + data[-PRINTED_BYTES:])[-PRINTED_BYTES:]

    def text(self) -> str:
        return self._data.decode(errors="replace").strip()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _environment() -> dict[str, str]:
    """The parent's, without the mesh's secrets, and able to import what the parent can."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(SECRETS)}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), root]))
    env["PYTHONUNBUFFERED"] = "1"
    return env
