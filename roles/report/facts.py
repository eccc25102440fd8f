"""What a run directory says of its run, for ``mesh report``: of one that has ended, goes on, or died half-way.

A file that is missing, torn or contradicts itself takes away what it would have said, and ``missing`` says so.
"""

import json
import math
import re
import time
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mesh.config import Config
from mesh.rundir import RunDir
from roles.timeline import Process, objects, read, seconds
from roles.trainer import ledger

PARTS = {  # of a step, in the order in which they are drawn, with what a reader calls them
    "learn_s": "forward/backward",
    "sync_s": "waiting for trainers",
    "optimizer_s": "optimizer step",
    "digest_s": "digest",
    "probe_s": "probe",
    "snapshot_s": "snapshot",
    "wait_s": "waiting for groups",
}
REST = "rest"
GONE = re.compile(r"(?P<peer>.+) (?P<how>joined|left|died)")
FIGURES = re.compile(r"time|step|reward|term|wall_s|time/\w+|lag_\d+|eval_\w+")
WAITING = ("wait", "sync", "wait for credit", "wait for weights")
CELLS = 160  # of a peer's life, each with how busy it was
MOST_EVENTS = 300
SAME_S = 60.0  # within which the same words of several peers are of one event
FIRST_LINES = 20  # of errors, of one log
LOGGED = re.compile(r"(?P<when>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ (?P<level>ERROR|CRITICAL) (?P<text>.*)")


Row = dict[str, Any]
Stretch = tuple[float, float, list[float]]
"""From when to when, and how busy in each part of it; no parts where nobody knows."""


@dataclass
class Life:
    """A peer: when its processes were there, in seconds since the first was, and what became of it."""

    peer: str
    role: str
    host: str = ""
    spans: list[Stretch] = field(default_factory=list)
    happened: list[tuple[float, str]] = field(default_factory=list)


@dataclass
class Happened:
    """``kind`` is joined, died, left, warning, error...; ``step`` is None where nobody knows it."""

    at: float
    step: int | None
    kind: str
    text: str


@dataclass
class Facts:
    run: Path
    name: str = ""
    state: str = ""
    steps: int = 0  # the run is to make
    made: int = 0
    written: float = 0.0  # the last row or span, seconds since the epoch
    began: float = 0.0
    rewards: list[tuple[float, float]] = field(default_factory=list)
    tests: list[dict[str, float]] = field(default_factory=list)
    lags: dict[int, float] = field(default_factory=dict)
    max_lag: int | None = None
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    trainers: set[str] = field(default_factory=set)  # that made a step
    lives: list[Life] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    terms: list[tuple[float, int, int]] = field(default_factory=list)  # time, step, term
    groups: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    evaluation: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    untrained: dict[str, int] = field(default_factory=dict)  # prompts, by why they were given up
    closes: bool | None = None
    settings: str = ""
    changed: list[tuple[str, str, str]] = field(default_factory=list)  # key, value, default
    software: dict[str, dict[str, str]] = field(default_factory=dict)  # by peer
    summary: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # by section


def gather(run: Path) -> Facts:
    """Raises ValueError when there is no such directory."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a run directory")
    facts = Facts(run.resolve())
    rows = {
        path.stem: [row for raw in objects(path) if (row := _needed(raw))]
        for path in sorted((run / "metrics").glob("*.jsonl"))
    }
    _settings(facts)
    _summary(facts)
    _figures(facts, rows)
    processes = read(run, WAITING)
    _lives(facts, rows, processes)
    _events(facts, rows)
    _ledger(facts)
    _state(facts)
    return facts


def _needed(row: dict[str, Any]) -> Row:
    """What is used of a row, of the types that it should have; empty where it has no time. Rows have many figures, and
    a long run has many rows."""
    if not seconds(row.get("time")):
        return {}
    numbers = {name: value for name, value in row.items() if FIGURES.fullmatch(name) and _finite(value)}
    return numbers | {name: str(row[name]) for name in ("event", "text") if name in row}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


def _settings(facts: Facts) -> None:
    path = RunDir(facts.run).config
    try:
        facts.settings = path.read_text(errors="replace")
        tree = tomllib.loads(facts.settings)
    except (OSError, ValueError) as e:
        facts.missing["settings"] = f"{path} cannot be read: {e}"
        facts.name = facts.run.name
        return
    default = msgspec.to_builtins(msgspec.convert({"model": {"path": ""}}, Config, strict=False))
    flat, usual = _flat(tree), _flat(default)
    facts.changed = [(k, _toml(v), _toml(usual.get(k))) for k, v in flat.items() if usual.get(k) != v]
    facts.name = str(flat.get("run.name", facts.run.name))
    facts.steps = _int(flat.get("run.steps"))
    facts.max_lag = _int(flat.get("trainer.max_lag"))


def _flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return out


def _toml(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _int(value: Any) -> int:
    return int(value) if _finite(value) else 0


def _summary(facts: Facts) -> None:
    path = RunDir(facts.run).summary
    try:
        summary = json.loads(path.read_text())
        facts.summary = summary if isinstance(summary, dict) else {}
    except FileNotFoundError:
        facts.missing["summary"] = "the run has written no summary.json: it has not come to its end"
    except (OSError, ValueError) as e:
        facts.missing["summary"] = f"{path} cannot be read: {e}"


def _figures(facts: Facts, rows: dict[str, list[Row]]) -> None:
    """Of the steps: what all trainers say of one is averaged."""
    rewards: dict[int, list[float]] = defaultdict(list)
    times: dict[int, list[dict[str, float]]] = defaultdict(list)
    lags: dict[int, float] = defaultdict(float)
    seen = 0
    terms: dict[int, tuple[float, int]] = {}
    tests: dict[int, dict[str, float]] = {}
    for peer, of in rows.items():
        for row in of:
            step = int(row.get("step", 0))
            if "eval_accuracy" in row:
                tests[step] = row
            if "time/step_s" not in row:
                continue
            facts.made = max(facts.made, step)
            if "reward" in row:
                rewards[step].append(row["reward"])
            parts = {PARTS[k]: row.get(f"time/{k}") or 0.0 for k in PARTS}
            parts[REST] = max(0.0, row["time/step_s"] - sum(parts.values()))
            times[step].append(parts)
            facts.trainers.add(peer)
            shares = {int(k[4:]): row[k] for k in row if re.fullmatch(r"lag_\d+", k) and row[k]}
            for lag, part in shares.items():
                lags[lag] += part
            seen += bool(shares)
            if "term" in row:
                terms[int(row["term"])] = min(terms.get(int(row["term"]), (row["time"], step)), (row["time"], step))
    facts.rewards = [(step, sum(of) / len(of)) for step, of in sorted(rewards.items())]
    facts.tests = [tests[step] for step in sorted(tests)]
    facts.lags = {lag: total / seen for lag, total in sorted(lags.items())}
    facts.times = {step: _mean(of) for step, of in sorted(times.items())}
    facts.terms = [(at, step, term) for term, (at, step) in sorted(terms.items())]
    nothing = f"no trainer has written a step to {facts.run / 'metrics'} yet"
    if not facts.rewards and not facts.tests:
        facts.missing["learning"] = nothing if not times else "no step has a reward"
    if not facts.lags:
        facts.missing["lag"] = nothing if not times else "no step has a sample with a reward"
    if not times:
        facts.missing["time"] = nothing


def _mean(of: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(parts[name] for parts in of) / len(of) for name in of[0]}


def _lives(facts: Facts, rows: dict[str, list[Row]], processes: list[Process]) -> None:
    """By the spans of each process; by its rows of figures where it has none."""
    found: dict[str, Life] = {}
    stretches: list[tuple[Life, float, float, list[float]]] = []
    for p in processes:
        life = found.setdefault(p.peer, Life(p.peer, p.role, p.host))
        stretches += [(life, *stretch) for stretch in stretches_of(p)]
        facts.software[p.peer] = p.software
    for peer, of in rows.items():
        times = [row["time"] for row in of]
        if peer in found or not times:
            continue
        role = "trainer" if any("time/step_s" in row for row in of) else "rollout"
        life = found.setdefault(peer, Life(peer, role))
        wall = next((row["wall_s"] for row in of if "wall_s" in row), 0.0) if role == "rollout" else 0.0
        stretches.append((life, min(times) - wall, max(times), []))
    everything = [t for _, first, last, _ in stretches for t in (first, last)]
    facts.began, facts.written = min(everything, default=0.0), max(everything, default=0.0)
    for life, first, last, parts in stretches:
        life.spans.append((first - facts.began, last - facts.began, parts))
    facts.lives = sorted(found.values(), key=lambda life: (life.role != "trainer", life.peer))
    if not found:
        facts.missing["peers"] = f"no peer has written to {facts.run / 'spans'} or {facts.run / 'metrics'}"
    if not processes:
        facts.missing["software"] = f"no peer has written to {facts.run / 'spans'} which versions it runs"


def stretches_of(process: Process) -> list[Stretch]:
    """The life of a process: of what is before the first span that is kept nobody knows how busy it was, after it for
    each part the share in which it did not wait for others."""
    first, last = process.life
    known = process.since + process.offset
    if not first <= known < last:
        return [(first, last, [])]
    wait = [0.0] * CELLS
    size = (last - known) / CELLS
    for row in process.spans:
        begun = max(0.0, row["at"] + process.offset - known)
        ended = begun + row["s"]
        for n in range(int(begun / size), min(CELLS, int(ended / size) + 1)):
            wait[n] += max(0.0, min(ended, (n + 1) * size) - max(begun, n * size))
    cells = [max(0.0, 1.0 - w / size) for w in wait]
    return [(first, known, []), (known, last, cells)] if known > first else [(first, last, cells)]


def _events(facts: Facts, rows: dict[str, list[Row]]) -> None:
    """What several peers saw happened once, when the first saw it."""
    events = [_event(row) for of in rows.values() for row in of if "event" in row]
    events += [event for path in sorted((facts.run / "logs").glob("*.log")) for event in _errors(path)]
    first: dict[tuple[str, str], float] = {}
    for event in sorted(events, key=lambda h: h.at):
        if event.at - first.get((event.kind, event.text), -math.inf) > SAME_S:
            first[event.kind, event.text] = event.at
            facts.happened.append(event)
    lives = {life.peer: life for life in facts.lives}
    for h in facts.happened:
        gone = GONE.fullmatch(h.text)
        if h.kind in ("joined", "left", "died") and gone and gone["peer"] in lives:
            lives[gone["peer"]].happened.append((h.at - facts.began, h.kind))
    del facts.happened[:-MOST_EVENTS]
    if not facts.happened:
        facts.missing["happened"] = "nobody came late, left or died, and nobody warned of anything"


def _event(row: Row) -> Happened:
    return Happened(row["time"], int(row["step"]) if "step" in row else None, row["event"], row.get("text", ""))


def _errors(path: Path) -> list[Happened]:
    """The last errors a peer has logged; times of a log are those of its host's zone, taken for this one's."""
    out = []
    try:
        with open(path, errors="replace") as file:
            for line in file:
                if found := LOGGED.match(line):
                    at = time.mktime(time.strptime(found["when"], "%Y-%m-%d %H:%M:%S"))
                    out.append(Happened(at, None, "error", f"{path.stem}: {found['text']}"))
    except OSError:
        return []
    return out[-FIRST_LINES:]


def _ledger(facts: Facts) -> None:
    paths = sorted(RunDir(facts.run).ledgers.glob("*.jsonl"))
    if not paths:
        facts.missing["ledger"] = f"no trainer has written to {RunDir(facts.run).ledgers}"
        return
    try:
        replayed = ledger.replay(paths)
    except (ValueError, OSError) as e:  # of a run that goes on, one record may be read before what another refers to
        facts.missing["ledger"] = f"it cannot be replayed: {e}"
        return
    facts.groups, facts.tokens = dict(replayed.groups), dict(replayed.tokens)
    facts.evaluation = dict(replayed.accounts.evaluation)
    facts.reasons = {why: n for why, n in replayed.accounts.reasons.items() if n}
    facts.untrained = dict(Counter(c.why for c in replayed.closed))
    facts.closes = replayed.closes()
    if isinstance(facts.summary.get("ledger"), dict) and not _running(facts):
        # settled by the lineage of the final weights
        facts.groups = {k: _int(v) for k, v in facts.summary["ledger"].items()}
        tokens = facts.summary.get("ledger_tokens")
        facts.tokens = {k: _int(v) for k, v in tokens.items()} if isinstance(tokens, dict) else facts.tokens
        facts.closes = bool(facts.summary.get("ledger_closed"))


def _running(facts: Facts) -> bool:
    """Whether a trainer holds the run now."""
    try:
        return (facts.run / "trainer.lock").exists() and RunDir(facts.run).others()
    except OSError:
        return False


def _state(facts: Facts) -> None:
    if _running(facts):
        facts.state = "goes on"
    elif facts.summary:
        facts.state = "finished"
    else:
        facts.state = "ended before its last step"
