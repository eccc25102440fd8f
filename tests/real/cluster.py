"""A real SLURM cluster on this machine: its controller, its authentication, and a daemon for each of several nodes."""

import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

PATIENCE_S = 120.0  # for what takes ten seconds on an idle machine: a busy one must not fail a test
MARK = "TEST_OF_THE_CLUSTER"  # an environment variable by which everything that a cluster started is found
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONFIG = """
ClusterName=mesh
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
SchedulerParameters=bf_interval=1,sched_min_interval=200000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""


def missing() -> list[str]:
    """The programs of SLURM that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def soon(what: Callable[[], T], why: Callable[[], str], timeout_s: float = PATIENCE_S) -> T:
    """The first true value of ``what``, asked again and again. ``why`` says what did not come about."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {why()}"
        time.sleep(0.1)
    return value


class Job:
    """A submitted script. What it says is in ``said``; its run directory is the one that follows from the job."""

    def __init__(self, cluster: "Cluster", number: str):
        self.cluster, self.number = cluster, number
        self.run = cluster.work / "runs" / f"quickstart-{number}"

    def shown(self) -> dict[str, str]:
        """What ``scontrol show job`` tells, of the first component."""
        text = self.cluster.command("scontrol", "--oneliner", "show", "job", self.number).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.shown()["JobState"]

    @property
    def said(self) -> str:
        file = self.cluster.work / f"mesh-{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else "(nothing yet)"

    def step(self) -> int:
        """The highest optimizer step that a trainer has written down."""
        rows = [json.loads(line) for file in self.run.glob("metrics/trainer*.jsonl") for line in _lines(file)]
        return max((int(row.get("step", 0)) for row in rows), default=0)

    def reaches(self, step: int) -> None:
        def look() -> bool:
            assert self.state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), self.account()
            return self.step() >= step

        soon(look, lambda: f"step {step}: {self.account()}")

    def is_in(self, *states: str) -> None:
        soon(lambda: self.state in states, lambda: f"in state {' or '.join(states)}: {self.account()}")

    def finishes(self) -> dict:
        """Wait for the job to complete as it should, and return the summary of its run."""

        def look() -> bool:
            assert self.state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "COMPLETED"), self.account()
            return self.state == "COMPLETED"

        soon(look, lambda: f"completed: {self.account()}")
        assert self.shown()["ExitCode"] == "0:0"
        return json.loads((self.run / "summary.json").read_text())

    def account(self) -> str:
        shown = self.shown()
        facts = {key: shown.get(key) for key in ("JobState", "Reason", "ExitCode", "Restarts", "NodeList")}
        return f"job {self.number} {facts}, step {self.step()}; it said:\n{self.said}"


class Cluster:
    """Nodes n1, n2, ... of one CPU each. Jobs are submitted from ``work``; the settings' files are seen from there."""

    def __init__(self, directory: Path, nodes: int, path: str):
        self.directory, self.work = directory, directory / "work"
        for part in (self.work, directory / "state"):
            part.mkdir(mode=0o755)
        self.mark = secrets.token_hex(8)
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(nodes + 1)
        config = CONFIG.format(host=host, user=getpass.getuser(), controller=ports[0], directory=directory)
        for name, port in zip(self.nodes, ports[1:], strict=True):
            config += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN\n"
        config += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE GraceTime=60 PriorityTier=1\n"
        config += "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF\n"
        (directory / "slurm.conf").write_text(config)
        launchers = ("SLURM_", "SRUN_", "SBATCH_", "MESH_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        self.env |= {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": f"{path}:{_path()}", MARK: self.mark}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        d = self.directory
        (d / "munge.key").write_bytes(secrets.token_bytes(128))
        (d / "munge.key").chmod(0o400)
        files = ("socket", "pid-file", "log-file", "seed-file", "key-file")
        named = [f"--{file}={d}/munge.{file.partition('-')[0]}" for file in files]
        self._daemon("munged", "munged", "--foreground", "--force", *named)
        soon((d / "munge.socket").exists, lambda: f"munged listens; it said {self._log('munged')}")
        self._daemon("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self._daemon(name, "slurmd", "-D", "-N", name)
        soon(self._ready, lambda: f"all nodes are idle: {self._log('slurmctld')}")

    def _ready(self) -> bool:
        assert self.daemons["slurmctld"].poll() is None, self._log("slurmctld")
        done = self._run("sinfo", "--noheader", "--Node", "--format=%N %t")
        return done.returncode == 0 and sorted(set(done.stdout.splitlines())) == [f"{name} idle" for name in self.nodes]

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.out", "wb") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.out").read_text(errors="replace")[-2000:]

    def _run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self.env, cwd=self.work, capture_output=True, text=True, timeout=60)

    def command(self, *command: str) -> str:
        done = self._run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *arguments: str) -> Job:
        """``arguments`` go to the script, as on a user's command line."""
        return Job(self, self.command("sbatch", "--parsable", str(script), *arguments).strip())

    def fail(self, node: str) -> None:
        """The node is gone with all that ran on it, at once; the controller hears of it as from an administrator."""
        daemon = self.daemons.pop(node)
        theirs = [p for p in self._processes() if p.environ().get("SLURMD_NODENAME") == node]
        steps = {parent for process in theirs for parent in process.parents() if parent.name() == "slurmstepd"}
        assert steps, f"nothing runs on {node}"
        daemon.kill()
        for process in (*steps, *theirs):
            process.kill()
        daemon.wait(10)
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def _processes(self) -> list[psutil.Process]:
        """Everything that this cluster has started and that lives."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def close(self) -> None:
        """Nothing is left running. Jobs end first: a step whose controller is gone waits for it for ever."""
        try:
            if "slurmctld" in self.daemons:
                self._run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
                self._run("scancel", "--user", getpass.getuser())
                soon(lambda: not self._run("squeue", "--noheader").stdout, lambda: "no job is left")
        finally:
            self._end()

    def _end(self) -> None:
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for process in self._processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for daemon in self.daemons.values():
            daemon.wait(10)
        soon(lambda: not self._processes(), lambda: f"what was started has ended: {self._processes()}", 10.0)


def _lines(file: Path) -> list[bytes]:
    """Whole ones: the last may still be being written."""
    return file.read_bytes().split(b"\n")[:-1]


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """SLURM must be told its ports beforehand."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports
