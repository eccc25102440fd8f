"""``mesh trace``: what all peers did, as one file for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is Chrome's trace events: a process a peer, a thread a lane of it, a complete event (``X``) a span, times in
microseconds. Spans of one thread must lie one behind the other or inside one another; what a peer does many of at once
(sampling groups) is dealt to as many rows as it takes. Arrows lead from the broadcast of a version to where each
rollout took it over.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mesh.rundir import write_whole
from roles.timeline import Process, objects, read, seconds

NAMES = {
    "wait": "wait for groups",
    "sync": "wait for trainers",
    "learn": "forward/backward",
    "optimizer": "optimizer step",
}
LANES = ("main", "engine", "weights", "gradients")
MANY = "credits"
FIRST_ROW = 10
TOUCHING_S = 0.001  # waits that were interrupted only to look
ROUNDING_US = 2  # seconds since the epoch are good to a fraction of a microsecond
Event = dict[str, Any]


def write_trace(run: Path, out: Path | None = None) -> tuple[Path, list[Process]]:
    """Write the trace of the run directory ``run`` and return where, with the peers in it. Raises ValueError, in one
    line."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a run directory")
    processes = read(run)
    if not processes:
        raise ValueError(f"{run / 'spans'} holds no spans: peers write them there from the moment they join")
    rows = (row for path in sorted((run / "metrics").glob("*.jsonl")) for row in objects(path))
    happened = [row for row in rows if "event" in row and seconds(row.get("time"))]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "clocks": {p.peer: _clock(p) for p in processes}},
        "traceEvents": events(processes, happened),
    }
    out = out or run / "trace.json"
    write_whole(out, json.dumps(trace))
    return out, processes


def _clock(process: Process) -> dict[str, float | None]:
    return {"added_s": round(process.offset, 6), "error_s": process.error and round(process.error, 6)}


def events(processes: list[Process], happened: Iterable[dict[str, Any]] = ()) -> list[Event]:
    """All events, times from the first span on. ``happened``: rows of metrics with an event."""
    zero = min((row["at"] + p.offset for p in processes for row in p.spans), default=0.0)
    found: list[Event] = []
    for pid, process in enumerate(processes, 1):
        found += _of_process(pid, process, zero)
    found += _arrows(found)
    at = {what: when for when, what in sorted(((r["time"], str(r.get("text"))) for r in happened), reverse=True)}
    for text, when in at.items():  # several trainers saw it: the first
        if when >= zero:
            found.append({"name": text, "cat": "mesh", "ph": "i", "s": "g", "ts": _us(when - zero), "pid": 1, "tid": 1})
    return found


def _of_process(pid: int, process: Process, zero: float) -> Iterator[Event]:
    title = process.peer if process.peer.startswith(process.role) else f"{process.peer} ({process.role})"
    yield _named(pid, 0, "process_name", name=title)
    yield _named(pid, 0, "process_sort_index", sort_index=pid)
    lanes = {row.get("lane", "main") for row in process.spans} - {MANY}
    tids = {lane: 1 + (LANES.index(lane) if lane in LANES else len(LANES)) for lane in sorted(lanes)}
    for lane, tid in tids.items():
        yield _named(pid, tid, "thread_name", name=lane)
    rows, ends = [], []  # of what runs side by side
    for row in _joined(process.spans):
        if row.get("lane", "main") != MANY:
            rows.append((tids[row.get("lane", "main")], row))
    for together in _by_credit(process.spans):
        began, ended = together[0]["at"], together[-1]["at"] + together[-1]["s"]
        free = next((n for n, until in enumerate(ends) if until <= began), len(ends))
        ends[free : free + 1] = [ended]
        rows += [(FIRST_ROW + free, row) for row in together]
    for n in range(len(ends)):
        yield _named(pid, FIRST_ROW + n, "thread_name", name=f"groups {n + 1}")
    until: dict[int, int] = {}
    for tid, row in rows:
        begun = _us(row["at"] + process.offset - zero)
        ended = _us(row["at"] + row["s"] + process.offset - zero)
        if 0 < until.get(tid, 0) - begun <= ROUNDING_US:
            begun = until[tid]
        until[tid] = ended = max(begun, ended)
        args = {k: v for k, v in row.items() if k not in ("span", "lane", "at", "s") and v not in ("", "None")}
        yield {
            "name": NAMES.get(row["span"], row["span"]) if process.role == "trainer" else row["span"],
            "cat": str(row.get("lane", "main")),
            "ph": "X",
            "ts": begun,
            "dur": ended - begun,
            "pid": pid,
            "tid": tid,
            "args": args,
        }


def _joined(spans: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Spans of one lane, where one wait follows another of the same, as one."""
    last: dict[str, dict[str, Any]] = {}
    for row in spans:
        lane = row.get("lane", "main")
        before = last.get(lane)
        if (
            before is not None
            and row["span"] in ("wait", "sync")
            and (before["span"], before.get("version")) == (row["span"], row.get("version"))
            and 0 <= row["at"] - (before["at"] + before["s"]) < TOUCHING_S
        ):
            before["s"] = row["at"] + row["s"] - before["at"]
            continue
        if before is not None:
            yield before
        last[lane] = dict(row)
    yield from last.values()


def _by_credit(spans: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What was done for each credit, in order of its begin."""
    found: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in spans:
        if row.get("lane") == MANY:
            found.setdefault((row.get("trainer"), row.get("credit")), []).append(row)
    return sorted(found.values(), key=lambda rows: rows[0]["at"])


def _arrows(found: list[Event]) -> Iterator[Event]:
    """From the last broadcast of a version to each takeover of it that began later."""
    sent: dict[str, list[Event]] = {}
    for event in found:
        if event["name"] == "broadcast" and "error" not in event["args"]:
            sent.setdefault(event["args"].get("version", ""), []).append(event)
    number = 0
    for event in found:
        if event["ph"] == "X" and event["name"] == "apply":
            version = event["args"].get("version", "")
            before = [s for s in sent.get(version, []) if s["ts"] <= event["ts"]]
            if before:
                number += 1
                start = max(before, key=lambda s: s["ts"])
                common = {"name": version, "cat": "version", "id": number}
                yield common | {"ph": "s", "ts": start["ts"], "pid": start["pid"], "tid": start["tid"]}
                yield common | {"ph": "f", "bp": "e", "ts": event["ts"], "pid": event["pid"], "tid": event["tid"]}


def _named(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
