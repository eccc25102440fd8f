"""The run directory: where a run keeps its settings, secret, first addresses, records, weights and pictures."""

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from mesh import config as settings

TERM_LOCK_S = 2.0  # a healthy holder has it for the time of one small write
LOOK_S = 0.2  # whoever looks whether a run is claimed holds the claim for microseconds


@dataclass(frozen=True)
class RunDir:
    path: Path

    @classmethod
    def make(cls, path: Path | str) -> "RunDir":
        """The directory and its parts, made where they are missing. Raises ValueError when it cannot be written."""
        run = cls(Path(path).resolve())
        try:
            for part in (run.path, run.logs, run.metrics, run.checkpoints, run.ledgers, run.rendezvous):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(
                f"run directory {run.path} cannot be made ({e.strerror}: {e.filename}); choose another with --run"
            ) from None
        if not os.access(run.path, os.W_OK | os.X_OK):
            raise ValueError(f"run directory {run.path} is not writable by this user; choose another with --run")
        return run

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def tensorboard(self) -> Path:
        return self.metrics / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ledgers(self) -> Path:
        return self.path / "ledger"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def reward_png(self) -> Path:
        return self.path / "reward.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def term(self) -> Path:
        return self.path / "term"

    def claim(self, name: str, *, alone: bool = False) -> int:
        """Hold the run for the trainer ``name`` until this process ends: together with other trainers, or ``alone``.
        Returns the descriptor that holds the claim; the system drops it with the process, however that ends.

        Raises ValueError naming a trainer that has it, when it is wanted alone."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _claimed(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        except OSError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ValueError(
                f"{self.path} is the directory of a run that goes on: {holder} trains there; add peers to it with "
                "mesh-node --run, or choose another --run"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{name}, process {os.getpid()}\n".encode(), 0)
        return descriptor

    def others(self) -> bool:
        """Whether a process besides this one holds a claim."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(descriptor)

    @property
    def _lock(self) -> Path:
        return self.path / "trainer.lock"

    def write_config(self, config: settings.Config) -> None:
        write_whole(self.config, settings.dumps(config))

    def highest_term(self) -> int:
        """The highest term counter that a trainer of this run has opened, 0 when none was."""
        try:
            return int(self.term.read_text())
        except FileNotFoundError:
            return 0

    def opened_term(self, counter: int) -> None:
        """Keep a term's counter, synced, before its first version is published: it must never be used again. Several
        trainers do so at once."""
        descriptor = os.open(self.path / "term.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, TERM_LOCK_S)
            if counter > self.highest_term():
                write_whole(self.term, f"{counter}\n")
        finally:
            os.close(descriptor)


def _claimed(descriptor: int, how: int) -> None:
    """Lock, or raise OSError. Whoever only looks (``others``) holds the lock for a moment, so it is tried again."""
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _lock(descriptor: int, wait_s: float) -> None:
    """Wait for a file's lock, but not for ever: whoever holds it may be stopped. Without it the higher counter is
    written all the same, and checkpoints and cards keep it too."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)


def fresh(runs: Path, name: str) -> Path:
    """A new directory: the first of runs/NAME, runs/NAME-2, runs/NAME-3, ... that did not exist. Raises ValueError
    when it cannot be made."""
    n = 1
    while True:
        path = runs / (name if n == 1 else f"{name}-{n}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            n += 1
        except OSError as e:
            raise ValueError(f"run directory {path} cannot be made ({e.strerror}); choose one with --run") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, finds the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
