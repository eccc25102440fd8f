"""A trainer and a rollout that samples with the real vLLM on two workers learn together, as a user starts them; vLLM is
killed on the way, and in the end the rollout is."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roles.metrics import read_rows
from roles.rollout.engines import vllm

pytestmark = pytest.mark.skipif(
    not vllm.installed().startswith(vllm.SUPPORTED),
    reason=f"vLLM {vllm.SUPPORTED} is not here: make vllm",
)
CONFIG = Path(__file__).parents[2] / "configs/quickstart.toml"
SETTINGS = {
    "run.steps": 100000,
    "task.heldout_prompts": 32,
    "checkpoint.every_steps": 0,
    "rollout.engine": "vllm",
    "rollout.vllm.tensor_parallel_size": 2,
}
PATIENCE_S = 150.0  # vLLM starts in 20 s, on a machine that does nothing else


def soon(look, why, timeout_s=PATIENCE_S):
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, why
        time.sleep(0.1)
    return found


def rows(run, role):
    return [row for file in (run / "metrics").glob(f"{role}*.jsonl") for row in read_rows(file)]


def spans(run, role):
    return [row for file in (run / "spans").glob(f"{role}*.jsonl") for row in read_rows(file)]


def steps(run):
    return max((row["step"] for row in rows(run, "trainer")), default=0)


def vllm_processes(rollout):
    """By name: EngineCore, Worker_TP0, Worker_TP1."""
    found = {}
    for process in rollout.children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):  # it ends while it is looked at
            prefix, _, name = process.cmdline()[0].partition("VLLM::")
            if name and not prefix:
                found[name] = process
    return found


@pytest.mark.timeout(400)
def test_versions_reach_vllm_while_it_samples_and_it_may_be_killed(tmp_path):
    run, mesh = tmp_path / "run", Path(sys.executable).with_name("mesh")
    command = [mesh, "up", CONFIG, "--plain", "--rollouts", "1", "--run", run]
    for key, value in SETTINGS.items():
        command += ["--set", f"{key}={value}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("wb") as out:
        up = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        soon(lambda: steps(run) >= 4, "the first steps")
        rollout = next(p for p in psutil.Process(up.pid).children() if "rollout" in p.cmdline())
        first = vllm_processes(rollout)
        assert set(first) == {"EngineCore", "Worker_TP0", "Worker_TP1"}

        first["EngineCore"].kill()
        soon(lambda: first["EngineCore"] not in (now := vllm_processes(rollout)).values() and len(now) == 3, "another")
        proved = steps(run)
        soon(lambda: steps(run) >= proved + 4, "it samples again, from weights that were proved")
        _, left = psutil.wait_procs(first.values(), 10.0)
        assert not left

        second = vllm_processes(rollout)
        rollout.kill()
        _, left = psutil.wait_procs(second.values(), 10.0)
        assert not left
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(PATIENCE_S)
    said = (run / "logs").glob("rollout*.log")
    text = "".join(file.read_text() for file in said)
    assert "vLLM's engine process has ended" in text
    assert "it is started again, 1 of 2" in text
    last = rows(run, "rollout")[-1]
    assert last["engine/prompt_tokens"] > 0
    applied = [row["version"] for row in spans(run, "rollout") if row.get("span") == "apply"]
    assert len(set(applied)) >= 5, "while it samples, before and after"
    assert last["probe/difference"] < last["probe/floor"]
