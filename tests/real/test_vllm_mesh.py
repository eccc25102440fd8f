"""A trainer and a rollout that samples with the real vLLM learn together, as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roles.metrics import read_rows
from roles.rollout.engines import vllm

pytestmark = pytest.mark.skipif(
    not vllm.installed().startswith(vllm.SUPPORTED),
    reason=f"vLLM {vllm.SUPPORTED} is not here: make vllm",
)
CONFIG = Path(__file__).parents[2] / "configs/quickstart.toml"
SETTINGS = ["run.steps=15", "rollout.engine=vllm", "task.heldout_prompts=64", "checkpoint.every_steps=0"]


@pytest.mark.timeout(300)
def test_versions_reach_vllm_while_it_samples_and_every_sample_is_accounted_for(tmp_path):
    mesh = Path(sys.executable).with_name("mesh")
    command = [mesh, "up", CONFIG, "--plain", "--rollouts", "1", "--run", tmp_path / "run"]
    for setting in SETTINGS:
        command += ["--set", setting]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 15
    assert summary["ledger_closed"]
    assert summary["ledger"]["trained"] == 15 * 32
    assert summary["versions_proved"] > 5
    [metrics] = (tmp_path / "run/metrics").glob("rollout*.jsonl")
    last = list(read_rows(metrics))[-1]
    assert last["engine/prompt_tokens"] > 0
    assert last["engine/takeovers"] > 5
    assert last["probe/difference"] < last["probe/floor"]
