"""Completions a second of a mesh on this machine, against the plain loop of the same model, task and steps.

The mesh: one trainer and two rollouts, started by ``mesh up``, with its figures, ledger and proofs; only evaluations
and checkpoints are left out, which the plain loop does not have either. Its processes have the threads that ``mesh up``
gives them, the cores over the peers; the loop has one, and in another contest two. Counted is the time from the end of
step ``WARM`` to the end of the last.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mesh import config as settings
from parts.measure import ROOT, Result, by_turns, compare
from parts.mesh_run import MeshRun, mesh_run

CONFIG = ROOT / "configs/quickstart.toml"
ROLLOUTS = 2
WARM = 5
WITHOUT = ["task.heldout_prompts=0", "evaluation.every_steps=0", "checkpoint.every_steps=0"]


def measure(directory: Path, rounds: int, quick: bool) -> list[Result]:
    steps, threads = (15, (1,)) if quick else (100, (1, 2))
    config = settings.load(CONFIG)
    completions = (steps - WARM) * config.trainer.groups_per_step * config.trainer.group_size
    runs: list[MeshRun] = []

    def mesh() -> float:
        overrides = [f"run.steps={steps}", *WITHOUT]
        runs.append(mesh_run(CONFIG, directory / f"mesh-{len(runs)}", ROLLOUTS, overrides))
        return completions / runs[-1].seconds(WARM)

    loops = {f"plain loop on {n} thread{'s' * (n > 1)}": n for n in threads}
    contestants: dict[str, Callable[[], float]] = {"mesh": mesh}
    contestants |= {name: lambda n=n: completions / sum(plain(steps, n)[WARM:]) for name, n in loops.items()}
    found = by_turns(contestants, rounds)
    return [
        compare(
            f"completions, mesh of 1 trainer and {ROLLOUTS} rollouts",
            "1/s",
            found["mesh"],
            found[name],
            name,
            details={"processor_s_a_step": _processor(runs, steps), "waited": [r.waited_share(WARM) for r in runs]},
            settings={"config": CONFIG.name, "steps": steps, "from_step": WARM, "without": WITHOUT},
            more_is_better=True,
        )
        for name in loops
    ]


def plain(steps: int, threads: int) -> list[float]:
    """Seconds of each step of the plain loop, in a process of its own."""
    script = Path(__file__).with_name("plain_loop.py")
    command = [sys.executable, str(script), str(CONFIG), "--threads", str(threads), "--set", f"run.steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    times = json.loads(done.stdout)
    return [a + b for a, b in zip(times["sample_s"], times["learn_s"], strict=True)]


def _processor(runs: list[MeshRun], steps: int) -> dict[str, float]:
    """Processor seconds a step by kind of process, from the first step seen to the process's end."""
    kinds: dict[str, float] = {}
    for run in runs:
        for used in run.used.values():
            kind = used.name.rstrip("0123456789").rstrip(" -")
            kinds[kind] = kinds.get(kind, 0.0) + used.working_s / steps / len(runs)
    return kinds
