"""A mesh of real processes for tests: started as a user does, watched by what they write, ended whatever happens."""

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from mesh import config as settings
from mesh import launch
from mesh.node import Node
from mesh.peer import Peer
from mesh.rundir import RunDir
from roles.metrics import read_rows
from tests.zygote import Forked, zygote
from transport.accounts import Accounts, AnyEntry
from transport.messages import Look, Status

T = TypeVar("T")

HERE = Path(__file__).parent
PATIENCE_S = 90.0  # for what takes a second on an idle machine: a busy one must not fail a test
MARK = "TEST_OF_THE_MESH"  # an environment variable by which everything that a mesh started is found

RECIPE = """
[run]
steps = 16

[model]
path = "{model}"

[task]
data = "sort"
reward = "gate:exact"
heldout_prompts = 0
options = {{ length = 3 }}

[rollout]
engine = "transformers"
max_new_tokens = 4
groups_in_flight = 8
reward_timeout_s = 600.0
threads = 1

[trainer]
group_size = 4
groups_per_step = 8
learning_rate = 1e-3
warmup_steps = 2
threads = 1

[evaluation]
every_steps = 0

[checkpoint]
every_steps = 0

[mesh]
preset = "local"
"""

_entries = msgspec.json.Decoder(AnyEntry)


def soon(what: Callable[[], T], why: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true value of ``what``, asked again and again. ``why`` says what did not come about."""
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    while not (value := what()):
        now = time.monotonic()
        assert now < deadline, f"not within {timeout_s:.0f} s: {why}"
        time.sleep(max(0.01, 3 * (now - began)))  # looking leaves the cores to those who are looked at
        began = time.monotonic()
    return value


class Process:
    """One started command. What it says on stderr and stdout is in ``said``. ``forked``: by the zygote."""

    def __init__(self, name: str, command: list[str], out: Path, env: dict[str, str], *, forked: bool):
        self.name, self._out = name, out
        self._process: subprocess.Popen | Forked
        if forked:
            self._process = zygote().fork(command[1:], out, env)
            return
        with open(out, "wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def ends(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended after {timeout_s:.0f} s; it said:\n{self.said}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def listens(self) -> list[tuple[str, int]]:
        """The addresses and ports on which it takes connections, those of its children not counted."""
        found = psutil.Process(self.pid).net_connections("inet")
        return sorted((c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN)

    def memory(self) -> int:
        """Bytes of it that are in memory, those of its children not counted."""
        return psutil.Process(self.pid).memory_info().rss

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def interrupt(self) -> None:
        self.send(signal.SIGINT)

    def joins(self, mesh: "Mesh") -> None:
        """Wait until others can find it."""
        mesh.peer_id(self.name)

    def says(self, text: str) -> None:
        def look() -> bool:
            if text in self.said:
                return True
            assert self.code is None, f"{self.name} ended with {self.code}, and never said {text!r}:\n{self.said}"
            return False

        soon(look, f"{self.name} says {text!r}")

    @property
    def error(self) -> str:
        """The one line in which it says why it failed; nothing else of an error may be on the screen."""
        said = self.said
        assert "Traceback" not in said, said
        [line] = [line for line in said.splitlines() if "error:" in line]
        return line


class Mesh:
    """The processes of one run in ``directory``/run, with ``model`` as the model to start from.

    ``gate`` is the reward function's (``gate.py``): closed, it holds up the run wherever completions are scored."""

    def __init__(self, directory: Path, model: str, recipe: str = RECIPE):
        self.directory, self.run = directory, directory / "run"
        self.config = directory / "recipe.toml"
        self.config.write_text(recipe.format(model=model))
        self.mark = secrets.token_hex(8)
        self.forked = True  # peers by hand; else they are new interpreters, which takes seconds
        self.processes: list[Process] = []
        self.gate = directory / "gate"
        self.gate.mkdir()

    # -- starting and ending -------------------------------------------------------------------------------------------

    def start(
        self,
        role: str,
        *arguments: str,
        name: str = "",
        set: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        fault: str = "",
        run: Path | None = None,
    ) -> Process:
        """One peer, by hand. ``fault``: a function of ``faults.py`` that spoils it before it starts."""
        what = ["-m", "mesh.node"] if not fault else [str(HERE / "faults.py"), fault]
        name = name or role
        if role == "trainer" and "--trainers" not in arguments:
            arguments = (*arguments, "--trainers", "1")  # it need not look for others
        command = [sys.executable, *what, "--role", role, "--config", str(self.config), "--name", name]
        return self.spawn(name, [*command, "--run", str(run or self.run), *arguments, *_sets(set)], env)

    def up(self, *arguments: str, set: dict[str, Any] | None = None) -> Process:
        """``mesh up``: all peers of a run on this machine."""
        command = [str(Path(sys.executable).with_name("mesh")), "up", str(self.config), "--plain"]
        return self.spawn("mesh-up", [*command, "--run", str(self.run), *arguments, *_sets(set)])

    def spawn(self, name: str, command: list[str], env: dict[str, str] | None = None) -> Process:
        own = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        own |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
            "GATE": str(self.gate),
            MARK: self.mark,
        }
        out = self.directory / f"{len(self.processes)}-{name.replace('/', '_')}.out"
        forked = self.forked and command[0] == sys.executable
        process = Process(name, command, out, own | (env or {}), forked=forked)
        self.processes.append(process)
        return process

    def running(self) -> list[str]:
        """The command lines of what this mesh started and what that started in turn."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def leaves_nothing_running(self) -> None:
        soon(lambda: not self.running(), f"what was started has ended, but {self.running()}", 10.0)

    def close(self) -> None:
        for process in self.processes:
            if process.code is None:
                process.kill()
        self.leaves_nothing_running()

    # -- the gate ------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        (self.gate / "closed").touch()

    def hold_after(self, calls: int) -> None:
        """Let the gate close itself when so many groups more have come to it, counted over all rollouts."""
        (self.gate / "after").write_text("." * calls)

    def let_go(self) -> None:
        (self.gate / "closed").unlink()

    def is_held(self, step: int) -> None:
        """Wait until the gate has closed itself, and the run has reached this step before."""
        self.reaches(step)
        soon((self.gate / "closed").exists, "the gate is closed")

    # -- what the run has written --------------------------------------------------------------------------------------

    def rows(self, name: str = "trainer") -> list[dict[str, Any]]:
        """The steps in a peer's metrics; rows of an evaluation and events are left out."""
        return [row for row in self._rows(name) if "event" not in row and "eval_version" not in row]

    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self._rows("trainer") if "eval_version" in row]

    def events(self) -> list[tuple[str, str]]:
        """What the trainer wrote down beside its figures, as (kind, text)."""
        return [(row["event"], row["text"]) for row in self._rows("trainer") if "event" in row]

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        for path in (self.run / "metrics").glob("*.jsonl"):
            if path.stem.partition("@")[0] == name:
                yield from read_rows(path)

    def step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def reaches(self, step: int) -> None:
        def look() -> bool:
            for process in self.processes:
                code = process.code
                assert code in (None, 0, 130, -signal.SIGKILL), f"{process.name}: {code}\n{process.said}"
            return self.step() >= step

        soon(look, f"the run reaches step {step}")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def accounts(self) -> Accounts:
        """Of a run with one trainer so far."""
        accounts = Accounts()
        for entry in self.entries():
            accounts.apply(entry)
        return accounts

    def entries(self) -> list[AnyEntry]:
        """The ledger, trainer by trainer."""
        return list(self._entries())

    def _entries(self) -> Iterator[AnyEntry]:
        for path in sorted((self.run / "ledger").glob("*.jsonl"), key=lambda p: p.stat().st_mtime):
            for line in path.read_bytes().split(b"\n")[:-1]:
                yield _entries.decode(line)

    @contextmanager
    def observer(self) -> Iterator[Peer]:
        """A peer in this process that sees the mesh and does no work."""
        config, log = settings.load(self.config), logging.getLogger("mesh")
        peer = Node("observer", config, RunDir.make(self.run), "watcher", launch.detect(), log).peer()
        peer.start()
        try:
            yield peer
        finally:
            peer.leave("seen enough")

    @contextmanager
    def watched(self) -> Iterator[dict[str, Status]]:
        """The last status of each peer, by name, as an observer of the mesh sees it."""
        with self.observer() as peer:
            yield statuses(peer)

    def peer_id(self, name: str) -> str:
        """The id of a peer that has its card in the run directory: it is there, or was killed."""

        def look() -> str:
            for path in (self.run / "rendezvous").glob("*.json"):
                card = json.loads(path.read_text())
                if card["name"] == name:
                    return card["id"]
            return ""

        return soon(look, f"{name} has a card")


def statuses(observer: Peer) -> dict[str, Status]:
    """The last status of each peer, by name, as this observer sees it from now on."""
    seen: dict[str, Status] = {}

    def look() -> None:
        for card in observer.live():
            observer.send(card.id, Look(seq=1))

    def told(sender: str, status: Status) -> None:
        seen[observer.membership.card_of(sender).name] = status

    observer.on(Status, told)
    observer.every(0.05, look)
    return seen


def _sets(values: dict[str, Any] | None) -> list[str]:
    return [part for key, value in (values or {}).items() for part in ("--set", f"{key}={value}")]
