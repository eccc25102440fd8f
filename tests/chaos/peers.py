"""The processes of a run: started as a user starts them by hand, found again whatever became of them."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.zygote import Forked, zygote

MARK = "MESH_CHAOS_MARK"  # an environment variable by which everything that a run started is found
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass
class Life:
    """One process of a peer, from its start to its end."""

    process: subprocess.Popen | Forked
    out: Path
    began: float = field(default_factory=time.time)
    stopped: bool = False
    killed: str = ""  # what was done to it, so that its exit code is no surprise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def why(self) -> str:
        lines = self.out.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error:" in line or " ERROR " in line]
        return (errors or lines[-1:] or ["it said nothing"])[0]


@dataclass
class Peer:
    name: str
    role: str
    arguments: list[str]
    prefix: list[str] = field(default_factory=list)  # a command that runs the peer's: in another network namespace
    lives: list[Life] = field(default_factory=list)

    @property
    def life(self) -> Life:
        return self.lives[-1]


class Peers:
    """Starts peers of the run directory ``run`` with the settings file ``config``; ``close`` leaves nothing behind.
    ``forked``: by the zygote, which takes no time."""

    def __init__(self, run: Path, config: Path, settings: list[str], trainers: int, *, forked: bool = False):
        self.run, self.config, self.trainers, self.forked = run, config, trainers, forked
        self.mark = secrets.token_hex(8)
        self.peers: dict[str, Peer] = {}
        self.watchers: list[subprocess.Popen | Forked] = []
        self._settings = [part for setting in settings for part in ("--set", setting)]
        self._outs = run.parent / "out"
        self._outs.mkdir(parents=True, exist_ok=True)

    def add(self, role: str, name: str, arguments: list[str], prefix: list[str] | None = None) -> Peer:
        self.peers[name] = Peer(name, role, arguments, prefix or [])
        self.start(self.peers[name])
        return self.peers[name]

    def start(self, peer: Peer) -> None:
        """Again, once its last process has ended: then a trainer resumes."""
        assert not peer.lives or not peer.life.alive, f"{peer.name} is alive"
        command = [*peer.prefix, sys.executable, "-m", "mesh.node", "--role", peer.role, "--config", str(self.config)]
        command += ["--run", str(self.run), "--name", peer.name, *peer.arguments, *self._settings]
        if peer.role == "trainer":
            command += ["--resume"] if peer.lives else ["--trainers", str(self.trainers)]
        out = self._outs / f"{peer.name}-{len(peer.lives)}.out"
        peer.lives.append(Life(self._spawn(command, out), out))

    def watch(self, rendezvous: str, seen: Path, prefix: list[str] | None = None) -> None:
        """A watcher, which writes what it sees to ``seen``."""
        command = [*(prefix or []), sys.executable, "-m", "tests.chaos.watcher", str(self.config), str(self.run)]
        self.watchers.append(self._spawn([*command, rendezvous, str(seen)], seen.with_suffix(".out")))

    def _spawn(self, command: list[str], out: Path) -> subprocess.Popen | Forked:
        env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        env |= {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        if self.forked:
            assert command[0] == sys.executable, "what another command starts cannot be forked"
            return zygote().fork(command[1:], out, env)
        with open(out, "wb") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True,
                cwd=Path(__file__).parents[2], preexec_fn=_die_with_parent,
            )  # fmt: skip

    # -- what is done to them ------------------------------------------------------------------------------------------

    def kill(self, peer: Peer) -> None:
        peer.life.killed = "SIGKILL"
        peer.life.process.kill()
        peer.life.process.wait(10.0)

    def leave(self, peer: Peer) -> None:
        peer.life.killed = "SIGTERM"
        peer.life.process.terminate()

    def stop(self, peer: Peer) -> None:
        peer.life.stopped = True
        peer.life.process.send_signal(signal.SIGSTOP)

    def go_on(self, peer: Peer) -> None:
        """After a stop. The process sees that it slept, and becomes a new peer with a new id."""
        peer.life.process.send_signal(signal.SIGCONT)
        peer.life.stopped, peer.life.began = False, time.time()

    # -- what is left of them ------------------------------------------------------------------------------------------

    def running(self) -> list[psutil.Process]:
        """All processes that this run started, and what those started in turn."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def close(self, *, grace_s: float = 10.0) -> list[str]:
        """End the watchers and whatever is left; returns what had to be killed although it should have gone."""
        for watcher in self.watchers:
            watcher.terminate()
            watcher.wait(grace_s)
        deadline = time.monotonic() + grace_s
        while (left := self.running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        said = []
        for process in left:
            try:
                said.append(f"process {process.pid}: {' '.join(process.cmdline())}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for peer in self.peers.values():
            peer.life.process.wait(grace_s)
        return said


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free just now."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens there any more."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True
