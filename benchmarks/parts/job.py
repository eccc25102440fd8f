"""A run whose peers die and are replaced while its steps are watched: what recovery is measured on."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mesh import config as settings
from mesh import launch
from mesh.local import Child
from mesh.node import Node
from mesh.rundir import RunDir
from transport.messages import Look, Status

PATIENCE_S = 120.0
LOOK_S = 0.02


class Step(NamedTuple):
    at: float  # seconds since the epoch, when it was made
    number: int
    by: str
    trainers: int  # in the formation that made it
    publishes: bool  # ``by`` is the trainer that publishes its weights


class Job:
    """``trainers`` and ``rollouts`` peers. Those that replace others have new names."""

    def __init__(self, directory: Path, config: Path, trainers: int, rollouts: int, overrides: list[str]):
        self.run = RunDir.make(directory)
        self.config = settings.load(config, overrides)
        threads = launch.threads_for(0, trainers + rollouts)
        self.config.trainer.threads = self.config.rollout.threads = threads
        self.run.write_config(self.config)
        self.children: list[Child] = []
        self._numbers = {"trainer": 0, "rollout": 0}
        self._read: dict[Path, int] = {}
        self._steps: list[Step] = []
        self._proved: set[str] = set()  # names of the rollouts that run a version
        node = Node("observer", self.config, self.run, "watcher", launch.detect(), logging.getLogger("mesh"))
        self._peer = node.peer()
        self._peer.on(Status, self._told)
        self._peer.every(0.1, self._look)
        self._peer.start()
        self._size = {"trainer": trainers, "rollout": rollouts}
        self.start_all("--trainers", str(trainers))

    def start_all(self, *arguments: str) -> None:
        """``arguments`` are for trainers."""
        for role, n in self._size.items():
            for _ in range(n):
                self.start(role, *(arguments if role == "trainer" else ()))

    def start(self, role: str, *arguments: str) -> Child:
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        self.children.append(Child(role, name, self.run, list(arguments)))
        return self.children[-1]

    def kill(self, *children: Child) -> float:
        """All at once; returns when."""
        at = time.time()
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait(10.0)
            self.children.remove(child)
        return at

    def close(self) -> None:
        self.kill(*self.children)
        self._peer.leave("measured")

    # -- what is seen --------------------------------------------------------------------------------------------------

    def of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.role == role]

    def steps(self) -> list[Step]:
        """In the order in which they were made; one that several trainers made is there for each."""
        for path in sorted(self.run.metrics.glob("*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for row in map(json.loads, whole.splitlines()):
                if "time/step_s" in row:
                    trainers, publishes = int(row["trainers"]), bool(row["publishes"])
                    self._steps.append(Step(row["time"], row["step"], path.stem, trainers, publishes))
        self._steps.sort()
        return self._steps

    def made(self, since: float, until: float = float("inf")) -> list[float]:
        """When the steps in between were made; each counts once, when it was made first."""
        first: dict[int, float] = {}
        for step in self.steps():
            first.setdefault(step.number, step.at)
        return sorted(at for at in first.values() if since < at <= until)

    def publisher(self) -> Child:
        """The trainer that published the last step."""
        names = [step.by for step in self.steps() if step.publishes]
        return next(child for child in self.of("trainer") if child.name == names[-1])

    def whole(self) -> bool:
        """Whether everybody that should be there works."""
        trainers = {child.name for child in self.of("trainer")}
        last = {step.by: step for step in self.steps() if step.by in trainers}
        together = len(last) == len(trainers) and all(step.trainers == len(trainers) for step in last.values())
        return together and all(child.name in self._proved for child in self.of("rollout"))

    def soon(self, true: Callable[[], bool], what: str) -> float:
        """Wait until it is so; returns when. Raises RuntimeError when a peer fails meanwhile, or nothing comes."""
        deadline = time.time() + PATIENCE_S
        while not true():
            for child in self.children:
                if child.code is not None:
                    raise RuntimeError(f"{child.name} ended with {child.code}: {child.first_error()}")
            if time.time() > deadline:
                raise RuntimeError(f"not within {PATIENCE_S:.0f} s: {what}")
            time.sleep(LOOK_S)
        return time.time()

    def goes_on(self, seconds: float) -> tuple[float, float]:
        """Let it run for so long; returns the beginning and the end."""
        began = time.time()
        return began, self.soon(lambda: time.time() >= began + seconds, "time goes by")

    def _look(self) -> None:
        for card in self._peer.live("rollout"):
            self._peer.send(card.id, Look(seq=0))

    def _told(self, sender: str, status: Status) -> None:
        card = self._peer.membership.card_of(sender)
        if card is not None and status.version is not None:
            self._proved.add(card.name)
