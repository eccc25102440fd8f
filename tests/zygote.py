"""Peers by fork from one process that has imported what they need.

Importing torch and transformers takes a peer seconds of CPU, and a test of a mesh waits for little else. So the tests
import them once, here, and have this process fork for each command. What comes of it is a process as any other: with a
session, output, environment and arguments of its own (also in /proc), a pid that takes signals, and an exit code. It
runs what ``python -m MODULE ...`` or ``python SCRIPT ...`` would run, as ``__main__``.

What differs from a new interpreter: the seed of ``hash`` is the same in all, and nothing is imported a first time.
What ``mesh up`` starts, and all that is started through another command, are new interpreters.

``Zygote`` is the tests' end; run as a script, this file is the other one. Requests and answers are lines of JSON.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

IMPORTS = (
    "mesh.cli",
    "mesh.peer",
    "roles.plot",
    "roles.trainer.trainer",
    "roles.rollout.rollout",
    "roles.rollout.engines.transformers",
    "roles.rollout.tasks.sort",
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
ROOM = 4096  # bytes for a peer's arguments, and more of environment than the zygote has
START_S = 90.0
PR_SET_PDEATHSIG = 1


# ----------------------------------------------------------------------------------------------------------------------
# The tests' end
# ----------------------------------------------------------------------------------------------------------------------


class Forked:
    """A process that the zygote has forked; as much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, zygote: "Zygote", pid: int):
        self._zygote, self.pid = zygote, pid

    def poll(self) -> int | None:
        return self._zygote.code(self.pid, 0.0)

    def wait(self, timeout: float) -> int:
        if (code := self._zygote.code(self.pid, timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that forks. It ends with this one, and with it whatever it has forked."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        room = "." * ROOM
        env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), room],
                stdin=subprocess.DEVNULL,
                env=env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ROOM": room},
                cwd=Path(__file__).parents[1],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._said = b""
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}

    def fork(self, command: list[str], out: Path, env: dict[str, str]) -> Forked:
        """``command`` is what a Python interpreter is given. Its output is in the file ``out``."""
        out.touch()
        out.touch()
        self._channel.sendall(json.dumps({"command": command, "out": str(out), "env": env}).encode() + b"\n")
        deadline = time.monotonic() + START_S
        while not self._pids:
            assert self._hear(deadline - time.monotonic()), f"the zygote does not answer, code {self._process.poll()}"
        return Forked(self, self._pids.pop())

    def code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of this process as Popen has it, once it has ended."""
        deadline = time.monotonic() + timeout_s
        while self._hear(0.0 if pid in self._codes else deadline - time.monotonic()):
            pass
        return self._codes.get(pid)

    def _hear(self, timeout_s: float) -> bool:
        """Take in what it says; whether it said anything."""
        if not select.select([self._channel], [], [], max(0.0, timeout_s))[0]:
            return False
        said = self._channel.recv(1 << 16)
        assert said, f"the zygote has ended, code {self._process.wait(5)}"
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"ended": pid, "code": code}:
                    self._codes[pid] = code
                case {"started": pid}:
                    self._pids.append(pid)
        return True


@cache
def zygote() -> Zygote:
    """One for the whole test process, made when it is first asked for."""
    return Zygote()


# ----------------------------------------------------------------------------------------------------------------------
# The zygote's end
# ----------------------------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Fork for each request and tell of each that ends, until the other end is closed."""
    children: dict[int, int] = {}  # the descriptor that tells its end -> pid
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    said = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != channel.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel.sendall(json.dumps({"ended": pid, "code": code}).encode() + b"\n")
                continue
            if not (more := channel.recv(1 << 16)):
                return
            *lines, said = (said + more).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if (pid := os.fork()) == 0:
                    become(**request)
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
                channel.sendall(json.dumps({"started": pid}).encode() + b"\n")


def become(command: list[str], out: str, env: dict[str, str]) -> None:
    """In the forked process: be ``python *command``, and end."""
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = env.get("PYTHONPATH", "").split(":")
        show([sys.executable, *command], env)
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.modules.pop(command[1], None)
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def show(command: list[str], env: dict[str, str]) -> None:
    """Have /proc show these arguments and this environment: in the memory where the kernel looks for them, which holds
    those this process was started with. By its environment a test finds what of a mesh is still running."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, _, environment, end = (int(number) for number in numbers[45:49])
    said = b"\0".join(os.fsencode(part) for part in command)[: ROOM - 1] + b"\0"
    ctypes.memmove(arguments, said.ljust(environment - arguments - 1) + b"\0", environment - arguments)
    said = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    assert len(said) <= end - environment, f"more than {ROOM} bytes of environment"
    ctypes.memmove(environment, said.ljust(end - environment, b"\0"), end - environment)


if __name__ == "__main__":
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"only a process with one thread can be forked; this one has {len(threads)}"
    gc.freeze()  # the collector of a forked process leaves these pages alone, and shared
    serve(socket.socket(fileno=int(sys.argv[1])))
