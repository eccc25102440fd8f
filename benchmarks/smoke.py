"""The costs of the mesh as ratios, measured in one run: ``make smoke``.

Each line compares the mesh with the least that could do the same, by turns, on this machine. README.md beside this file
says what each line means.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from parts import delivery, footprint, throughput, weights
from parts.measure import ROOT, Result, Spread
from parts.mesh_run import MeshRun, mesh_run
from parts.picture import Panel, point
from parts.script import Findings, flags, run

PARTS = ("weights", "delivery", "throughput", "demo", "help", "memory")


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {', '.join(PARTS)}")
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    quick, wanted = arguments.quick, arguments.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"unknown part {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    directory = Path(tempfile.mkdtemp(prefix="mesh-smoke-"))
    seen: list[MeshRun] = []
    parts: dict[str, Callable[[], list[Result]]] = {
        "weights": lambda: weights.measure(3 if quick else 16),
        "delivery": lambda: delivery.measure(2 if quick else 6, quick),
        "throughput": lambda: throughput.measure(directory, 1 if quick else 2, quick),
        "demo": lambda: [demo(directory, quick, seen)],
        "help": lambda: [footprint.help_time(3 if quick else 10)],
        "memory": lambda: footprint.memory(1 if quick else 3, next(iter(seen), None)),
    }
    results: list[Result] = []
    try:
        for name in (name for name in PARTS if name in wanted):
            began = time.monotonic()
            results += parts[name]()
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    except BaseException:
        print(f"what was written so far is in {directory}", file=sys.stderr)
        raise
    shutil.rmtree(directory)
    return Findings(results, [picture(results)])


def picture(results: list[Result]) -> Panel:
    """What the mesh needs, in units of what the least needs that could do the same."""
    rows = [(r.name, r.ratio) for r in results if r.ratio is not None]
    lines = {"": [point(i, ratio) for i, (_, ratio) in enumerate(rows)]}
    title, level = "the mesh, next to the least that could do the same", "the same"
    return Panel(title, "times", lines=lines, ticks=[name for name, _ in rows], log_y=True, level=1, level_name=level)


def demo(directory: Path, quick: bool, seen: list[MeshRun]) -> Result:
    """The quickstart as it is, evaluations and all: how long does the trainer wait?"""
    config = ROOT / "configs/quickstart.toml"
    run = mesh_run(config, directory / "demo", 2, ["run.steps=15"] if quick else [])
    seen.append(run)
    shares = Spread.of([100 * share for share in run.waited(throughput.WARM)])
    return Result(
        "share of its time that the trainer waits, quickstart with 2 rollouts",
        "%",
        Spread.of([100 * run.waited_share(throughput.WARM)]),
        aim="under 15%",
        details={
            "with_the_first_steps": 100 * run.summary["trainer_wait_share"],
            "median_of_a_step": shares.median,
            "a_quarter_of_steps_above": shares.high,
            "accuracy_after": run.summary["accuracy_after"],
            "groups_trained": run.summary["ledger"]["trained"],
            "groups_superseded": run.summary["ledger"]["superseded"],
            "seconds": run.summary["wall_s"],
        },
        settings={"config": config.name, "steps": run.summary["steps"], "from_step": throughput.WARM, "rollouts": 2},
    )


if __name__ == "__main__":
    main()
