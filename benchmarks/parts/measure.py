"""How the benchmarks measure: contestants by turns, every value kept, medians with their spread, and where they ran."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "numpy", "xxhash", "tokenizers")


@dataclass(frozen=True)
class Spread:
    """The median of ``values``, and the quarters of them below ``low`` and above ``high``."""

    median: float
    low: float
    high: float
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(statistics.median(values), low, high, list(values))


@dataclass
class Result:
    """One line of the table: what the mesh needs, what the reference needs, and the ratio of the two.

    ``ratio`` is taken round by round, where a round measured both. ``aim`` is what the project asks for. ``details``
    are further numbers, ``settings`` what was measured with, seeds included. ``more_is_better``: of throughputs."""

    name: str
    unit: str
    mesh: Spread
    reference: Spread | None = None
    reference_name: str = ""
    ratio: Spread | None = None
    aim: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    more_is_better: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    name: str, unit: str, mesh: Sequence[float], reference: Sequence[float], reference_name: str, **rest: Any
) -> Result:
    """``mesh[i]`` and ``reference[i]`` were measured in the same round."""
    ratios = [m / r for m, r in zip(mesh, reference, strict=True)]
    return Result(name, unit, Spread.of(mesh), Spread.of(reference), reference_name, Spread.of(ratios), **rest)


def by_turns(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each contestant returns, once a round; who begins changes with the round, so that no one always follows
    the same other."""
    names = list(contestants)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(contestants[name]())
    return found


def environment() -> dict[str, Any]:
    """Where the numbers come from. ``load`` is how many cores others kept busy in the second before the benchmark:
    above 0.3 the numbers say little."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load": psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        return ""


def command(name: str) -> str:
    """The path of a command that was installed beside this Python."""
    return str(Path(sys.executable).with_name(name))
