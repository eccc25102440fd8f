"""Where figures go: one line of JSON a row in ``metrics/<peer>.jsonl``, and TensorBoard beside it.

Rows are ``{"time": seconds since the epoch, "step": n, ...figures}`` or ``{"time", "step", "event": kind, "text"}``. A
file is appended to, so the axis goes on after a resume. Not thread-safe: one thread owns a writer.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil


class MetricsWriter:
    """Writes one peer's rows under ``directory``/metrics, and passes them to its ``outlets`` (``outlets.py``). A disk
    that fails must not stop training: the first error is passed to ``on_error`` as one line, and later rows are counted
    in ``lost`` while it lasts."""

    def __init__(
        self,
        directory: Path | str,
        peer: str,
        *,
        tensorboard: bool = True,
        outlets: Sequence[Any] = (),
        on_error: Callable[[str], None] = print,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(directory) / "metrics" / f"{peer.replace('/', '_')}.jsonl"
        self.lost = 0
        self._outlets = outlets
        self._on_error, self._clock, self._file, self._board = on_error, clock, None, None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", buffering=1)  # noqa: SIM115 - closed in close()
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.path.parent / "tensorboard" / self.path.stem), flush_secs=10)
        except OSError as e:
            self._failed(e)

    def row(self, step: int, figures: dict[str, float]) -> None:
        """One row of figures; what is not finite is written as null, since JSON has no NaN."""
        now = self._clock()
        clean = {k: float(v) if math.isfinite(v) else None for k, v in figures.items()}
        self._write({"time": now, "step": step, **clean})
        for outlet in self._outlets:
            outlet.row(step, figures)
        if self._board:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # one event for the row: an event for each figure costs twenty times as much
            values = [Summary.Value(tag=k, simple_value=v) for k, v in figures.items() if math.isfinite(v)]
            self._board.file_writer.add_summary(Summary(value=values), step, walltime=now)

    def event(self, step: int, kind: str, text: str) -> None:
        """Something that happened, for the reader of the curve: ``joined``, ``killed``, ``left``, ``warning``..."""
        self._write({"time": self._clock(), "step": step, "event": kind, "text": text})

    def _write(self, row: dict) -> None:
        if self._file is None:
            self.lost += 1
            return
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        if self.lost == 0:
            self._on_error(f"figures are not written to {self.path}: {error}; training goes on without them")
        self.lost += 1

    def close(self) -> None:
        for outlet in self._outlets:
            outlet.close()
        self._outlets = ()
        if self._board:
            self._board.close()
        if self._file:
            self._file.close()
        self._board = self._file = None


def read_rows(path: Path | str) -> Iterator[dict]:
    """The rows of a metrics file. A last line that a killed process left half-written is passed over."""
    with open(path) as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def process_figures(process: psutil.Process | None = None) -> dict[str, float]:
    """Resident memory, open descriptors and threads of this process: what grows when something leaks."""
    process = process or psutil.Process()
    with process.oneshot():
        return {
            "rss_mib": process.memory_info().rss / 2**20,
            "open_files": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }
