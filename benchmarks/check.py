"""What got slower since the baseline was committed: ``make bench-check``.

    python benchmarks/check.py NAME ...            each script's quick run, its ratios against results/quick/NAME.json
    python benchmarks/check.py --keep NAME ...     these runs become the baseline

A ratio sets the mesh against the least that could do the same, in one run, so that it means something on another
machine too. It got worse when it is outside of the middle half of the baseline's rounds by more than ``MARGIN``: quick
runs have few rounds, and a machine that does something else besides has unquiet ones. A ratio that the baseline does
not have, or the fresh run no longer (a tool that is not installed here), is said. The exit code is 1 when something got
slower or a script failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parts.measure import ROOT

BASELINE = ROOT / "benchmarks/results/quick"
MARGIN = 1.5
LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="scripts of this directory, without .py")
    parser.add_argument("--keep", action="store_true", help="write the baseline instead of comparing with it")
    arguments = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as name:
        out = BASELINE if arguments.keep else Path(name)
        for script in arguments.names:
            command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--quick", "--out", str(out)]
            code = subprocess.run(command, timeout=LIMIT_S, stdout=subprocess.DEVNULL).returncode
            worse = [f"failed with exit code {code}"] if code else []
            said: list[str] = []
            if not code and not arguments.keep:
                before, now = _ratios(BASELINE / f"{script}.json"), _ratios(out / f"{script}.json")
                worse, said = slower(before, now), one_sided(before, now)
            wrong = wrong or bool(worse)
            verdict = [] if worse else ["kept" if arguments.keep else "nothing got slower"]
            print("\n".join(f"{script}: {line}" for line in (*worse, *said, *verdict)), flush=True)
    return int(wrong)


def slower(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each ratio that got worse."""
    said = []
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name]["ratio"], now[name]["ratio"]["median"]
        more = before[name]["more_is_better"]
        if new < old["low"] / MARGIN if more else new > old["high"] * MARGIN:
            said.append(f"{name}: {new:.3g} times the reference, was {old['low']:.3g} to {old['high']:.3g}")
    return said


def one_sided(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each ratio that has nothing to be compared with."""
    gone = [f"{name}: in the baseline, not measured here" for name in before.keys() - now.keys()]
    return sorted(gone + [f"{name}: not in the baseline; --keep takes it in" for name in now.keys() - before.keys()])


def _ratios(path: Path) -> dict[str, Any]:
    """By name and reference: one contestant may have several."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text())["results"]
    return {f"{r['name']}, against {r['reference_name']}": r for r in results if r["ratio"] is not None}


if __name__ == "__main__":
    sys.exit(main())
