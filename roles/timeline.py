"""What all peers of a run did and when, on one clock: reads ``spans/*.jsonl`` (``transport/spans.py``).

Hosts need not agree about the time. A credit tells how far they differ: a trainer ordered it at ``a`` and had its
group at ``b``, by its own clock; the rollout began to sample it at ``g`` and had it scored at ``e``, by its own.
Nothing comes before its cause, so what is to be added to the rollout's clock lies in ``[a - g, b - e]``, and for all
their credits in the intersection. Intervals add up along a chain of peers, so a trainer that shares a rollout with
another is placed too; and so is a process that shares none, by another of its host. A clock that may be right is left
alone: peers of one host are not moved against each other by the noise of a message.

The clocks are taken to differ by one number a process for as long as it ran. Where they were set meanwhile, or drifted,
an interval is empty: then its middle is taken, and half its overlap is the error.
"""

import heapq
import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transport.spans import DIRECTORY, OLDER

Interval = tuple[float, float]


@dataclass(eq=False)
class Process:
    """One process and its spans, oldest first, each with ``at`` and ``s`` in seconds of its own clock; so is the rest:
    ``began`` when it started, ``since`` and ``until`` when the first span that is kept begins and the last one ends."""

    peer: str
    id: str
    role: str
    host: str
    began: float
    software: dict[str, str] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    ordered: dict[int, tuple[str, float, float]] = field(default_factory=dict)  # credit: to whom, when, its arrival
    made: list[tuple[str, int, float, float]] = field(default_factory=list)  # trainer and credit, from when to when
    since: float = math.inf
    until: float = -math.inf
    offset: float = 0.0  # to be added to its times
    error: float | None = 0.0  # at most so wrong; None: nothing is known of its clock

    @property
    def life(self) -> Interval:
        """From its start, or what it did first, to what it did last, on the clock of all."""
        return min(self.began, self.since) + self.offset, max(self.began, self.until) + self.offset

    def add(self, row: dict[str, Any], names: Collection[str] | None) -> None:
        credit, began, ended = row.get("credit"), row["at"], row["at"] + row["s"]
        if isinstance(row.get("to"), str) and isinstance(credit, int):
            self.ordered[credit] = sys.intern(row["to"]), began, ended
            return
        if not isinstance(row.get("span"), str):
            return
        self.since, self.until = min(self.since, began), max(self.until, ended)
        if isinstance(row.get("trainer"), str) and isinstance(credit, int):
            self.made.append((sys.intern(row["trainer"]), credit, began, ended))
        if names is None or row["span"] in names:
            self.spans.append(row)


def read(run: Path, names: Collection[str] | None = None) -> list[Process]:
    """The processes of a run, trainers first, with their clocks brought together and the spans of these ``names``, or
    all. Lines that are no rows are passed over: a killed process leaves half of one."""
    found: dict[str, Process] = {}
    files = sorted((run / DIRECTORY).glob("*.jsonl"))
    for path in sorted(files, key=lambda p: (p.stem.removesuffix(OLDER), not p.stem.endswith(OLDER))):
        process = None
        for row in _rows(path):
            if "peer" in row:
                process = found.setdefault(str(row.get("id")), _process(row))
            elif process is not None:
                process.add(row, names)
    processes = sorted(found.values(), key=lambda p: (p.role != "trainer", p.peer, p.began))
    for process in processes:
        process.spans.sort(key=lambda row: (row["at"], -row["s"]))
    set_clocks(processes)
    return processes


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for row in objects(path):
        if "peer" in row or (seconds(row.get("at")) and seconds(row.get("s"))):
            yield row


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines are passed over."""
    with open(path, errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def seconds(value: Any) -> bool:
    """Whether it may be a time, or a duration."""
    return isinstance(value, int | float) and 0 <= value < 1e11


def _process(row: dict[str, Any]) -> Process:
    began = row["time"] if seconds(row.get("time")) else 0.0
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
    reference = max(processes, key=lambda p: len(p.ordered))
    edges = _between(processes)
    known = _reached(reference, (0.0, 0.0), edges)
    for process in processes:  # such as those of a run before it was resumed
        twin = next((p for p in known if p.host == process.host), None)
        if process not in known and twin is not None:
            known = _reached(process, known[twin], edges) | known
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
    trainers = {p.id: p for p in processes if p.ordered}
    bounds: dict[tuple[Process, Process], Interval] = {}
    for rollout in processes:
        for of, credit, begun, done in rollout.made:
            trainer = trainers.get(of)
            to, ordered, arrived = trainer.ordered.get(credit, ("", 0.0, 0.0)) if trainer else ("", 0.0, 0.0)
            if trainer is None or to != rollout.id:
                continue
            low, high = bounds.get((trainer, rollout), (-math.inf, math.inf))
            bounds[trainer, rollout] = max(low, ordered - begun), min(high, arrived - done)
    edges: dict[Process, dict[Process, Interval]] = defaultdict(dict)
    for (trainer, rollout), (low, high) in bounds.items():
        edges[trainer][rollout] = low, high
        edges[rollout][trainer] = -high, -low
    return edges


def _reached(start: Process, at: Interval, edges: dict[Process, dict[Process, Interval]]) -> dict[Process, Interval]:
    """To each process along the chain that leaves the least doubt."""
    known: dict[Process, Interval] = {}
    waiting: list[tuple[float, int, Process, Interval]] = [(0.0, 0, start, at)]
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
