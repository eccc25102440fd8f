"""A real ``mesh up`` on this machine, and what it cost: wall time, processor time and memory by process."""

import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from parts.measure import ROOT, command

LOOK_S = 0.25
LIMIT_S = 600.0


@dataclass
class Used:
    """What one process of a run used, as seen from outside: processor seconds in all and before the first step, and
    its resident memory since then."""

    name: str
    cpu_s: float = 0.0
    before_s: float | None = None
    rss_mib: list[float] = field(default_factory=list)

    @property
    def working_s(self) -> float:
        return 0.0 if self.before_s is None else self.cpu_s - self.before_s

    @property
    def resident_mib(self) -> float:
        return statistics.median(self.rss_mib) if self.rss_mib else 0.0


@dataclass
class MeshRun:
    summary: dict
    rows: list[dict]  # the trainer's figures, one row a step
    used: dict[int, Used]  # by process id
    rollouts: list[list[dict]] = field(default_factory=list)  # each rollout's figures

    def seconds(self, first: int) -> float:
        """From the end of step ``first`` to the end of the last."""
        at = {row["step"]: row["time"] for row in self.rows}
        return at[max(at)] - at[first]

    def waited(self, first: int) -> list[float]:
        """For each step after ``first`` the share of it that the trainer waited for groups."""
        return [row["time/wait_s"] / row["time/step_s"] for row in self.rows if row["step"] > first]

    def waited_share(self, first: int) -> float:
        """The share of all steps after ``first`` together."""
        rows = [row for row in self.rows if row["step"] > first]
        return sum(row["time/wait_s"] for row in rows) / sum(row["time/step_s"] for row in rows)


def mesh_run(config: Path, run: Path, rollouts: int, overrides: list[str], limit_s: float = LIMIT_S) -> MeshRun:
    """Run a mesh to its end. Raises RuntimeError with its last lines when it failed."""
    options = [part for override in overrides for part in ("--set", override)]
    arguments = ["up", str(config), "--plain", "--rollouts", str(rollouts), "--run", str(run), *options]
    out = run.with_suffix(".out")
    with open(out, "wb") as file:
        process = subprocess.Popen(
            [command("mesh"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment_of_tasks(),
        )
    used: dict[int, Used] = {}
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the mesh did not end within {limit_s:.0f} s; its output is in {out}")
            _look(process.pid, used, _begun(run))
            time.sleep(LOOK_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30.0)
    if process.returncode != 0:
        last = " | ".join(out.read_text(errors="replace").splitlines()[-3:])
        raise RuntimeError(f"the mesh ended with exit code {process.returncode}: {last}")
    rows = [json.loads(line) for line in _metrics(run).read_text().splitlines()]
    rollout_rows = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run / "metrics").glob("rollout*.jsonl"))
    ]
    summary = json.loads((run / "summary.json").read_text())
    return MeshRun(summary, [r for r in rows if "time/step_s" in r], used, rollout_rows)


def environment_of_tasks() -> dict[str, str]:
    """In which the tasks and rewards of ``parts`` can be imported by name."""
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _metrics(run: Path) -> Path:
    (found,) = (run / "metrics").glob("trainer*.jsonl")
    return found


def _begun(run: Path) -> bool:
    """Whether a step was made."""
    return any('"time/step_s"' in path.read_text() for path in (run / "metrics").glob("trainer*.jsonl"))


def _look(parent: int, used: dict[int, Used], begun: bool) -> None:
    try:
        processes = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            with process.oneshot():
                times, rss, line = process.cpu_times(), process.memory_info().rss, process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
            continue
        if not line:
            continue
        entry = used.setdefault(process.pid, Used(""))
        entry.name = _name(line)  # again: a new process has its parent's until it has begun
        entry.cpu_s = times.user + times.system
        if begun:
            entry.before_s = entry.cpu_s if entry.before_s is None else entry.before_s
            entry.rss_mib.append(rss / 2**20)


def _name(line: list[str]) -> str:
    """trainer, rollout-0, ..., of what its command line says."""
    if "--name" in line:
        return line[line.index("--name") + 1].split("@")[0]
    return "reward worker" if any("reward_worker" in part for part in line) else "view"
