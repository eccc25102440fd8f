"""How long the command takes to answer, and what a peer costs in memory besides torch. Resident memory, as the system
counts it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from parts.measure import ROOT, Result, by_turns, command, compare
from parts.mesh_run import MeshRun

CONFIG = ROOT / "configs/quickstart.toml"
RESIDENT = """
import os
def resident():
    with open("/proc/self/statm") as f:
        print(int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
"""
PEER = """
import logging, sys
from pathlib import Path
from mesh import config, launch
from mesh.node import Node
from mesh.rundir import RunDir
run, config = RunDir.make(sys.argv[1]), config.load(sys.argv[2])
node = Node("observer", config, run, "observer", launch.detect({}), logging.getLogger("mesh"))
peer = node.peer()
node.join(peer)
peer.call(lambda: None)
assert "torch" not in sys.modules
resident()
peer.leave("measured")
"""
MODEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from mesh import config
from roles.starter import resolve
torch.set_num_threads(1)
config = config.load(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(resolve(config.model.path, config.run.seed), dtype=torch.float32)
resident()
"""


def help_time(rounds: int) -> Result:
    found = by_turns(
        {"mesh": lambda: _seconds([command("mesh"), "--help"]), "bare": lambda: _seconds([sys.executable, "-c", ""])},
        rounds,
    )
    return compare(
        "mesh --help",
        "ms",
        [1e3 * s for s in found["mesh"]],
        [1e3 * s for s in found["bare"]],
        "a Python that does nothing",
        aim="under 300 ms",
    )


def memory(rounds: int, demo: MeshRun | None) -> list[Result]:
    """``demo``: a run whose rollouts were looked at while they worked."""
    contestants: dict[str, Callable[[], float]] = {"peer": lambda: _mib(PEER), "bare": lambda: _mib("")}
    found = by_turns(contestants, rounds)
    results = [_besides("memory of an idle peer", found["peer"], found["bare"], "a Python that does nothing")]
    if demo is not None:
        rollouts = [used.resident_mib for used in demo.used.values() if used.name.startswith("rollout")]
        model = [_mib(MODEL) for _ in rollouts]
        results.append(_besides("memory of a working rollout", rollouts, model, "torch, transformers and the model"))
    return results


def _besides(name: str, mesh: list[float], reference: list[float], reference_name: str) -> Result:
    result = compare(name, "MiB", mesh, reference, reference_name)
    result.details["difference_mib"] = result.mesh.median - result.reference.median  # type: ignore[union-attr]
    return result


def _seconds(line: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(line, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - began


def _mib(program: str) -> float:
    """What the program says it has resident."""
    with tempfile.TemporaryDirectory(prefix="mesh-smoke-") as directory:
        line = [sys.executable, "-c", RESIDENT + (program or "resident()\n"), directory, str(CONFIG)]
        done = subprocess.run(line, check=True, capture_output=True, text=True, timeout=120, env=_environment())
    return float(done.stdout.split()[-1])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ROOT))}
