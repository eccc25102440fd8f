"""The mesh under the real torchrun: one agent, two agents, and one that starts its workers again."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster import soon

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SECRET = "c0ffee" * 8


@pytest.fixture
def agents(tmp_path):
    """Starts agents, and ends them with all their workers."""
    started = []

    def start(*arguments, steps, run="run", env=None, every=0):
        out = tmp_path / f"agent-{len(started)}.out"
        settings = (f"run.steps={steps}", "task.heldout_prompts=16", f"checkpoint.every_steps={every}")
        command = [TORCHRUN, *arguments, "--config", str(ROOT / "configs" / "quickstart.toml")]
        command += ["--run", str(tmp_path / run), *(part for s in settings for part in ("--set", s))]
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MESH_"))}
        with open(out, "wb") as file:
            agent = subprocess.Popen(
                command, cwd=ROOT, env=own | (env or {}), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        agent.out, agent.run = out, tmp_path / run
        started.append(agent)
        return agent

    yield start
    for agent in started:
        if agent.poll() is None:
            for process in (*psutil.Process(agent.pid).children(recursive=True), agent):
                process.kill()
            agent.wait(10)


def ends(agent):
    soon(lambda: agent.poll() is not None, lambda: f"torchrun ends; it said:\n{agent.out.read_text()}")
    return agent.returncode


def steps(agent):
    return max((int(n) for n in re.findall(r" I step (\d+)/", agent.out.read_text())), default=0)


def workers(agent):
    """The workers by local rank."""
    found = {}
    for process in psutil.Process(agent.pid).children():
        found[process.environ().get("LOCAL_RANK")] = process
    return found


def summary(agent):
    return json.loads((agent.run / "summary.json").read_text())


def test_one_agent_starts_a_trainer_and_rollouts(agents):
    agent = agents("--standalone", "--nproc-per-node", "3", "-m", "--", "mesh.node", steps=4)
    assert ends(agent) == 0, agent.out.read_text()
    assert (summary(agent)["steps"], summary(agent)["ledger_closed"]) == (4, True)
    assert {path.name.partition("@")[0] for path in (agent.run / "logs").glob("*.log")} == {
        "trainer-0",
        "rollout-1",
        "rollout-2",
    }


def test_two_agents_that_share_no_directory_meet_through_the_store_of_the_first(agents):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    first, second = [
        agents(
            *where, "--node-rank", str(rank), "--nproc-per-node", "1", "-m", "--", "mesh.node",
            steps=4, run=f"run-{rank}", env={"MESH_SECRET": SECRET},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert (ends(first), ends(second)) == (0, 0), first.out.read_text() + second.out.read_text()
    assert summary(first)["ledger_closed"]
    assert "rollout-1@" in second.out.read_text()


def test_with_an_agent_for_each_peer_one_death_is_one_death(agents):
    def start(role):
        return agents("--standalone", "--nproc-per-node", "1", "-m", "--", "mesh.node", "--role", role, steps=25)

    trainer, rollout, victim = start("trainer"), start("rollout"), start("rollout")
    soon(lambda: steps(trainer) >= 2, lambda: f"step 2; it said:\n{trainer.out.read_text()}")
    workers(victim)["0"].send_signal(signal.SIGKILL)
    assert ends(victim) != 0
    assert (ends(trainer), ends(rollout)) == (0, 0), trainer.out.read_text()
    assert (summary(trainer)["steps"], summary(trainer)["ledger_closed"]) == (25, True)


def test_workers_that_are_started_again_resume(agents):
    agent = agents(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "--", "mesh.node", steps=30, every=2
    )
    soon(lambda: steps(agent) >= 4, lambda: f"step 4; it said:\n{agent.out.read_text()}")
    workers(agent)["1"].send_signal(signal.SIGKILL)  # torchrun ends the trainer too
    assert ends(agent) == 0, agent.out.read_text()
    assert "resumed from" in agent.out.read_text()
    assert (summary(agent)["steps"], summary(agent)["ledger_closed"]) == (30, True)
