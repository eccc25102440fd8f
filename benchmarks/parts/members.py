"""Members of a mesh and of Serf, as processes on this machine that do nothing but belong, and how they take a death.

Both are watched by what the members themselves say on their output, at the moment it is read; by processor time and
memory of their processes; and by the bytes that went over the loopback meanwhile, headers included.

Run as a script this forks the members of a mesh: ``python members.py DIRECTORY COUNT``.
"""

import base64
import contextlib
import ctypes
import logging
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

LIMIT_S = 90.0
SETTLE_S = 10.0
PR_SET_PDEATHSIG = 1
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # the least processor time that can be told from none
HERE = Path(__file__).resolve()


class Quiet(NamedTuple):
    """Of each member: a second of doing nothing, and its share of memory (PSS: what several share counts in parts)."""

    processor_ms: float
    loopback_bytes: float
    memory_mib: float


class Members(ABC):
    """``count`` members that all see each other once this is made."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pids: dict[str, int] = {}
        self.sees: dict[str, set[str]] = {}
        self.gone: dict[str, dict[str, float]] = {}  # of a victim: who noticed, and when
        self._selector = selectors.DefaultSelector()
        self._said: dict[int, bytes] = {}
        self.children: list[subprocess.Popen] = []

    @abstractmethod
    def hear(self, who: str, line: str, at: float) -> None: ...

    def watch(self, file: IO[bytes], who: str) -> None:
        os.set_blocking(file.fileno(), False)
        self._selector.register(file, selectors.EVENT_READ, who)

    def look(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, 1 << 16)
            at = time.monotonic()
            if not data:
                self._selector.unregister(key.fileobj)
            *lines, self._said[key.fd] = (self._said.get(key.fd, b"") + data).split(b"\n")
            for line in lines:
                self.hear(key.data, line.decode(errors="replace"), at)

    def until(self, true: Any, what: str) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not true():
            self.look(0.2)
            if time.monotonic() - began > LIMIT_S:
                seen = sorted(len(others) for others in self.sees.values())
                raise TimeoutError(f"{type(self).__name__} of {self.count}, not within {LIMIT_S:.0f} s: {what}; {seen}")
        return time.monotonic() - began

    def whole(self) -> bool:
        return len(self.sees) == self.count and all(len(others) >= self.count - 1 for others in self.sees.values())

    def quiet(self, seconds: float) -> Quiet:
        self.rest(min(SETTLE_S, seconds))
        before, bytes_before = self._processor(), _loopback()
        self.rest(seconds)
        processor, nbytes = max(TICK_S, self._processor() - before), _loopback() - bytes_before
        n = len(self.pids)
        memory = sum(psutil.Process(pid).memory_full_info().pss for pid in self.pids.values())
        return Quiet(1e3 * processor / seconds / n, nbytes / seconds / n, memory / n / 2**20)

    def kill(self, victim: str) -> tuple[float, float]:
        """Seconds until the first and until the last of the others has noticed."""
        began = time.monotonic()
        os.kill(self.pids.pop(victim), signal.SIGKILL)
        others = set(self.pids)
        self.until(lambda: others <= set(self.gone.get(victim, {})), f"the death of {victim} is seen")
        seen = [at - began for who, at in self.gone[victim].items() if who in others]
        return min(seen), max(seen)

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.look(left)

    def close(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait(10.0)

    def _processor(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids.values()]
        return sum(t.user + t.system for t in times)


def _loopback() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


class Mesh(Members):
    def __init__(self, directory: Path, count: int) -> None:
        super().__init__(count)
        env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        process = subprocess.Popen(
            [sys.executable, str(HERE), str(directory), str(count)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=env | {"OMP_NUM_THREADS": "1"},
        )
        self.children.append(process)
        assert process.stdout is not None
        self.watch(process.stdout, "")
        self.join_s = self.until(self.whole, "all see each other")

    def hear(self, _: str, line: str, at: float) -> None:
        who, what, value = line.split()
        if what == "is":
            self.pids[who] = int(value)
        elif what == "sees":
            self.sees.setdefault(who, set()).add(value)
        else:
            self.gone.setdefault(value, {})[who] = at


class Serf(Members):
    """Agents with the LAN profile, encrypted, a port each."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        path = shutil.which("serf")
        assert path, "serf is not installed"
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        ports = _free_ports(2 * count)
        for i in range(count):
            name = f"member-{i}"
            command = [
                path, "agent", f"-node={name}", f"-bind=127.0.0.1:{ports[i]}",
                f"-rpc-addr=127.0.0.1:{ports[count + i]}",
                "-profile=lan", f"-encrypt={key}", "-log-level=info",
                *([f"-retry-join=127.0.0.1:{ports[0]}", "-retry-interval=1s"] if i else []),
            ]  # fmt: skip
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_die_too
            )
            self.children.append(process)
            self.pids[name] = process.pid
            self.sees[name] = set()
            assert process.stdout is not None
            self.watch(process.stdout, name)
        self.join_s = self.until(self.whole, "all see each other")

    def hear(self, who: str, line: str, at: float) -> None:
        if found := re.search(r"serf: EventMember(Join|Failed): (\S+)", line):
            kind, other = found.groups()
            if kind == "Failed":
                self.gone.setdefault(other, {})[who] = at
            elif other != who:
                self.sees[who].add(other)


def serf_version() -> str:
    path = shutil.which("serf")
    if not path:
        return ""
    said = subprocess.run([path, "version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return f"Serf {said.removeprefix('Serf v')}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in taken]


def _die_too() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------------------
# The process that forks the members of a mesh
# ----------------------------------------------------------------------------------------------------------------------


def fork_all(directory: Path, count: int) -> None:
    import mesh.peer  # noqa: F401
    from mesh.rundir import RunDir

    RunDir.make(directory)
    for i in range(count):
        if os.fork() == 0:
            _die_too()
            try:
                be(directory, f"member-{i}")
            finally:
                os._exit(1)
    while True:
        with contextlib.suppress(ChildProcessError):
            os.wait()
            continue
        return


def be(directory: Path, name: str) -> None:
    from mesh import config as settings
    from mesh import launch
    from mesh.node import Node
    from mesh.rundir import RunDir

    (log := logging.getLogger("mesh")).setLevel(logging.CRITICAL)
    config = settings.convert({"model": {"path": "none"}, "mesh": {"preset": "lan"}, "run": {"name": "members"}})
    node = Node("rollout", config, RunDir.make(directory), name, launch.detect({}), log)
    peer = node.peer()
    seen: set[str] = set()

    def say(what: str, value: str) -> None:
        os.write(1, f"{name} {what} {value}\n".encode())  # short: whole, whoever else writes

    def members() -> None:
        for card in peer.live("rollout"):
            if card.name not in seen:
                seen.add(card.name)
                say("sees", card.name)

    peer.on_members(members)
    peer.on_departed(lambda card, dead, reason: say("lost", card.name))
    say("is", str(os.getpid()))
    node.join(peer)
    while True:
        peer.check()
        time.sleep(1.0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))
    fork_all(Path(sys.argv[1]), int(sys.argv[2]))
