"""What all peers of a run did and when, on one clock: reads ``spans/*.jsonl`` (``transport/spans.py``).

Hosts need not agree about the time. A credit tells how far they differ: a trainer ordered it at ``a`` and had its
group at ``b``, by its own clock; the rollout began to sample it at ``g`` and had it scored at ``e``, by its own.
Nothing comes before its cause, so what is to be added to the rollout's clock lies in ``[a - g, b - e]``, and for all
their credits in the intersection. Intervals add up along a chain of peers, so a trainer that shares a rollout with
another is placed too. A clock that may be right is left alone: peers of one host are not moved against each other by
the noise of a message.

The clocks are taken to differ by one number a process for as long as it ran. Where they were set meanwhile, or drifted,
an interval is empty: then its middle is taken, and half its overlap is the error.
"""

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transport.spans import DIRECTORY, OLDER

Interval = tuple[float, float]


@dataclass(eq=False)
class Process:
    """One process and its spans, oldest first, each with ``at`` and ``s`` in seconds."""

    peer: str
    id: str
    role: str
    host: str
    began: float
    software: dict[str, str] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    credits: list[dict[str, Any]] = field(default_factory=list)
    offset: float = 0.0  # to be added to its times
    error: float | None = 0.0  # at most so wrong; None: nothing is known of its clock

    @property
    def first(self) -> float:
        return min([self.began, *(row["at"] for row in self.spans[:1])]) + self.offset

    @property
    def last(self) -> float:
        return max([self.began, *(row["at"] + row["s"] for row in self.spans)]) + self.offset


def read(run: Path) -> list[Process]:
    """The processes of a run, trainers first, with their clocks brought together. Lines that are no rows are passed
    over: a killed process leaves half of one."""
    found: dict[str, Process] = {}
    files = sorted((run / DIRECTORY).glob("*.jsonl"))
    for path in sorted(files, key=lambda p: (p.stem.removesuffix(OLDER), not p.stem.endswith(OLDER))):
        process = None
        for row in _rows(path):
            if "peer" in row:
                process = found.setdefault(str(row.get("id")), _process(row))
            elif process is not None and "credit" in row and "to" in row:
                process.credits.append(row)
            elif process is not None and isinstance(row.get("span"), str):
                process.spans.append(row)
    processes = sorted(found.values(), key=lambda p: (p.role != "trainer", p.peer, p.began))
    for process in processes:
        process.spans.sort(key=lambda row: (row["at"], -row["s"]))
    set_clocks(processes)
    return processes


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and ("peer" in row or (_seconds(row.get("at")) and _seconds(row.get("s")))):
                yield row


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _process(row: dict[str, Any]) -> Process:
    began = row["time"] if _seconds(row.get("time")) else 0.0
    software = row["software"] if isinstance(row.get("software"), dict) else {}
    return Process(
        str(row["peer"]),
        str(row.get("id")),
        str(row.get("role")),
        str(row.get("host")),
        float(began),
        {str(name): str(version) for name, version in software.items()},
    )


def set_clocks(processes: list[Process]) -> None:
    """Offset and error of each process, against the one that shares the most credits with others."""
    if not processes:
        return
    reference = max(processes, key=lambda p: len(p.credits))
    known = _reached(reference, _between(processes))
    for process in processes:
        interval = known.get(process)
        if interval is None:
            process.offset, process.error = 0.0, None
        else:
            process.offset, process.error = _settled(*interval)


def _settled(low: float, high: float) -> tuple[float, float]:
    if low <= 0.0 <= high:
        return 0.0, max(abs(low), high)
    return (low + high) / 2, abs(high - low) / 2


def _between(processes: list[Process]) -> dict[Process, dict[Process, Interval]]:
    """For each pair that shares credits: within what bounds lies what is added to the second's clock to get the
    first's."""
    ordered = {(p.id, row["credit"]): (p, row) for p in processes for row in p.credits}
    bounds: dict[tuple[Process, Process], Interval] = {}
    for rollout in processes:
        for row in rollout.spans:
            trainer, order = ordered.get((row.get("trainer"), row.get("credit")), (None, {}))
            if trainer is None or order["to"] != rollout.id:
                continue
            low, high = bounds.get((trainer, rollout), (-math.inf, math.inf))
            begun, done = row["at"], row["at"] + row["s"]
            bounds[trainer, rollout] = max(low, order["at"] - begun), min(high, order["at"] + order["s"] - done)
    edges: dict[Process, dict[Process, Interval]] = defaultdict(dict)
    for (trainer, rollout), (low, high) in bounds.items():
        edges[trainer][rollout] = low, high
        edges[rollout][trainer] = -high, -low
    return edges


def _reached(start: Process, edges: dict[Process, dict[Process, Interval]]) -> dict[Process, Interval]:
    """To each process along the chain that leaves the least doubt."""
    known: dict[Process, Interval] = {}
    waiting: list[tuple[float, int, Process, Interval]] = [(0.0, 0, start, (0.0, 0.0))]
    count = 0
    while waiting:
        doubt, _, process, (low, high) = heapq.heappop(waiting)
        if process in known:
            continue
        known[process] = low, high
        for other, (more_low, more_high) in edges.get(process, {}).items():
            count += 1
            further = (low + more_low, high + more_high)
            heapq.heappush(waiting, (doubt + abs(more_high - more_low), count, other, further))
    return known
