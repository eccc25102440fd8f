"""The scripts of ``slurm/`` on a real SLURM of four nodes on this machine, submitted as a user does."""

import sys
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster, Job, missing, soon

from roles.trainer.ledger import replay

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        bool(missing()), reason=f"no SLURM here ({', '.join(missing())}): apt-get install slurm-wlm munge"
    ),
    pytest.mark.timeout(400),
]
SHORT = ("--set", "task.heldout_prompts=32")
LONG = ("--set", "trainer.groups_per_step=128")  # four times as many: time for others to come


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:  # pytest's own may be cleared away by another run
        Path(directory).chmod(0o755)
        cluster = Cluster(Path(directory), 4, str(Path(sys.executable).parent))
        (cluster.work / "configs").symlink_to(ROOT / "configs")
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def submit(cluster, script, steps, *arguments):
    return cluster.submit(ROOT / "slurm" / script, "--set", f"run.steps={steps}", *SHORT, *arguments)


def names(job, role):
    """The peers of a role that have written a log, by name."""
    return sorted(path.stem for path in job.run.glob(f"logs/{role}-*.log"))


def log(job, name):
    return (job.run / "logs" / f"{name}.log").read_text()


def test_rollouts_are_added_and_a_node_fails_while_one_step_goes_on(cluster):
    job = submit(cluster, "one-step.sbatch", 70, *LONG)
    job.reaches(2)
    first = [f"rollout-{rank}-{job.number}.0@n{rank + 1}" for rank in (1, 2)]
    trainer = f"trainer-0-{job.number}.0@n1"
    assert (names(job, "trainer"), names(job, "rollout")) == ([trainer], first)

    more = submit(cluster, "add-rollouts.sbatch", 70, *LONG, "--run", str(job.run))
    added = f"rollout-0-{more.number}.0@n4"
    soon(lambda: f"{added} joined" in log(job, trainer), lambda: f"{added} joins: {more.account()}")
    cluster.fail("n3")
    job.reaches(job.step() + 3)
    assert job.state == "RUNNING"
    cluster.command("scancel", "--signal=USR1", more.number)
    more.is_in("FAILED")  # as a user sees a job that was ended before its run
    assert more.shown()["ExitCode"] == "75:0"
    assert "stopped by SIGUSR1" in more.said
    summary = job.finishes()
    assert summary["steps"] == 70
    assert summary["ledger_closed"]


def test_a_preempted_job_of_two_steps_saves_and_is_requeued_and_resumes(cluster):
    job = submit(cluster, "two-steps.sbatch", 100_000)
    job.reaches(4)
    urgent = cluster.command("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--wrap=true").strip()
    soon(lambda: job.shown()["Restarts"] == "1", lambda: f"requeued: {job.account()}")
    reached = job.step()
    assert list(job.run.glob(f"checkpoints/{reached}-*")), "saved once, at the step it had come to"
    assert len(list(job.run.glob("checkpoints/*-*"))) == 1
    soon(lambda: Job(cluster, urgent).state == "COMPLETED", lambda: f"the urgent job ran: {job.account()}")
    cluster.command("scontrol", "update", f"JobId={job.number}", "StartTime=now+5")  # not after two minutes
    job.reaches(reached + 4)
    assert f"resumed from {job.run}/checkpoints/{reached}-" in job.said
    cluster.command("scancel", job.number)
    job.is_in("CANCELLED")
    soon(lambda: replay(job.run.glob("ledger/*.jsonl")).closes(), job.account)


def test_a_heterogeneous_job_is_one_mesh(cluster):
    job = submit(cluster, "hetjob.sbatch", 6)
    summary = job.finishes()
    assert (summary["steps"], summary["ledger_closed"]) == (6, True)
    [trainer], rollouts = names(job, "trainer"), names(job, "rollout")
    assert [name.partition("@")[0] for name in (trainer, *rollouts)] == [
        f"{role}-{rank}-{job.number}.0" for rank, role in enumerate(("trainer", "rollout", "rollout"))
    ]
