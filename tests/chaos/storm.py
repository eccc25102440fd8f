"""A plan done to a run of real processes.

All peers are started with the same two addresses: those of the first trainer and of the first rollout. Both are struck
like any other, so that later peers must get in through whichever lives. The storm ends before the run does: what was
struck comes back, and the run goes to its end by itself.
"""

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.checks import Check
from tests.chaos.peers import Peer, Peers, free_ports
from tests.chaos.plan import Blow
from tests.chaos.records import Run
from tests.chaos.watcher import Seen

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/quickstart.toml"
LOOK_S = 0.05
PATIENCE_S = 90.0  # for what takes ten seconds on an idle machine
STILL_S = 240.0  # without a step: all trainers may have to start again, on a machine that others use too
LEAVE_S = 10.0
END_S = 60.0  # from the last step until every process has gone: the last evaluation, a checkpoint, the curve
CALM = 0.7  # share of the steps after which nothing is struck any more
MOST_COMPLAINTS = 6  # after which the rest of a storm shows nothing new
FILES_MORE = 24  # descriptors that a process may have more than any of its role had at the start: who publishes changes


@dataclass(frozen=True)
class Size:
    trainers: int = 2
    rollouts: int = 3
    steps: int = 240
    settings: tuple[str, ...] = ()
    forked: bool = False


@dataclass
class Done:
    """A blow that fell, and how long it was until the next optimizer step."""

    blow: Blow
    at: float
    victims: list[str]


@dataclass
class Storm:
    """``run`` does everything; then ``done`` has the blows that fell, and ``checks`` what was seen on the way."""

    directory: Path
    size: Size
    say: Callable[[str], None] = print
    done: list[Done] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.size
        self.began = time.time()
        self.records = Run(self.directory / "run")
        self.ports = free_ports(2)
        self.rendezvous = "tcp://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)
        settings = [f"run.steps={size.steps}", "checkpoint.every_steps=10", "trainer.threads=1", "rollout.threads=1"]
        self.peers = Peers(self.records.path, CONFIG, [*settings, *size.settings], size.trainers, forked=size.forked)
        self._seen = self.directory / "watcher.json"
        self._dead: set[str] = set()  # ids of lives that were ended
        self._back: list[tuple[float, Peer]] = []  # when to start it again, or to continue it
        self._step, self._stepped = 0, time.time()
        self._files: dict[str, int] = {}

    def run(self, blows: Iterable[Blow]) -> None:
        try:
            self._start()
            self._until(self._all_work, PATIENCE_S, "all peers work")
            self._files = self._open_files()
            for blow in blows:
                if not self._wait(blow.after_s) or self.step() >= CALM * self.size.steps:
                    break
                self._strike(blow)
            self._end()
        finally:
            for peer in self.peers.peers.values():
                if peer.life.alive and not peer.life.killed:
                    self.peers.kill(peer)
            self.left = self.peers.close()

    def _start(self) -> None:
        for i in range(self.size.trainers):
            self._add("trainer", i, self.ports[0] if i == 0 else 0)
        for i in range(self.size.rollouts):
            self._add("rollout", i, self.ports[1] if i == 0 else 0)
        self.peers.watch(self.rendezvous, self._seen)

    def _add(self, role: str, i: int, port: int) -> None:
        self.peers.add(role, f"{role}-{i}", ["--rendezvous", self.rendezvous, "--set", f"mesh.port={port}"])

    # -- blows ---------------------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        deadline = time.time() + STILL_S
        while not (victims := self._victims(blow)):
            if not self._wait(LOOK_S) or self.step() >= CALM * self.size.steps:
                return
            if time.time() > deadline:
                self._complain(f"{blow}: nobody to strike for {STILL_S:.0f} s without ending the last of a role")
                return
        names = [peer.name for peer in victims]
        self.event(f"{blow}: {', '.join(names)}")
        for peer in victims:
            self._dead |= {row["id"] for row in self.seen().named(peer.name)}
            {"kill": self.peers.kill, "stop": self.peers.stop, "leave": self.peers.leave}[blow.act](peer)
            self._back.append((time.time() + blow.lasts_s, peer))
        self.done.append(Done(blow, time.time(), names))

    def _victims(self, blow: Blow) -> list[Peer]:
        """Whom it falls on; nobody while that would leave no trainer or no rollout at work."""
        up = [peer for peer in self.peers.peers.values() if peer.life.alive and not self._down(peer)]
        if blow.target == "trainers":
            trainers = [peer for peer in up if peer.role == "trainer"]
            return trainers if any(map(self.works, trainers)) else []
        fits = {
            "rollout": lambda peer: peer.role == "rollout",
            "trainer": lambda peer: peer.role == "trainer",
            "publisher": lambda peer: peer.name == self.publisher(),
            "seed": lambda peer: peer is next(iter(self.peers.peers.values())),
        }[blow.target]
        candidates = [peer for peer in up if fits(peer)]
        spared = [peer for peer in candidates if self._replaceable(peer, up)]
        return [spared[int(blow.pick * len(spared))]] if spared else []

    def _replaceable(self, peer: Peer, up: list[Peer]) -> bool:
        if self.size.trainers == 1 and peer.role == "trainer":
            return self.works(peer)
        return any(other.role == peer.role and other is not peer and self.works(other) for other in up)

    def _down(self, peer: Peer) -> bool:
        return any(other is peer for _, other in self._back)

    def publisher(self) -> str:
        """The name of the trainer that published last."""
        rows = {peer.name: self._last_row(peer.name) for peer in self.peers.peers.values() if peer.role == "trainer"}
        published = {name: row["time"] for name, row in rows.items() if row.get("publishes")}
        return max(published, key=lambda name: published[name], default="")

    def works(self, peer: Peer) -> bool:
        """A trainer that has made a step since it was started, a rollout that runs a version."""
        if not peer.life.alive or self._down(peer):
            return False
        if peer.role == "trainer":
            row = self._last_row(peer.name)
            return row.get("time", 0.0) > peer.life.began
        return any("term" in row for row in self.seen().named(peer.name) if row["id"] not in self._dead)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> bool:
        """Look after the peers for so long; False as soon as the run is over."""
        until = time.time() + seconds
        while not self.over():
            self._tend()
            if time.time() >= until:
                return True
            time.sleep(LOOK_S)
        return False

    def _until(self, true: Callable[[], bool], patience_s: float, what: str) -> bool:
        deadline = time.time() + patience_s
        while not true():
            if time.time() > deadline:
                self._complain(f"not within {patience_s:.0f} s: {what}")
                raise Stuck(f"not within {patience_s:.0f} s: {what}")
            if not self._wait(LOOK_S):
                return False
        return True

    def _tend(self) -> None:
        """Bring back whose time has come, and notice who ended without having been struck."""
        now = time.time()
        for due, peer in list(self._back):
            if now >= due and (peer.life.stopped or not peer.life.alive):
                self._back.remove((due, peer))
                self._bring_back(peer)
            elif now >= due + LEAVE_S:
                self._complain(f"{peer.name} has not left {LEAVE_S:.0f} s after {peer.life.killed}")
                self.peers.kill(peer)
        for peer in self.peers.peers.values():
            ended = not peer.life.alive and not self._down(peer) and not self.over()
            if ended and not (peer.life.process.returncode == 0 and self.step() >= self.size.steps):
                self._complain(f"{peer.name} ended by itself with {peer.life.process.returncode}: {peer.life.why()}")
                if len(self.complaints) >= MOST_COMPLAINTS:
                    raise Stuck(f"{MOST_COMPLAINTS} complaints")
                self.peers.start(peer)
        if (step := self.step()) != self._step:
            self._step, self._stepped = step, now
        if now - self._stepped > STILL_S:
            self._complain(f"no step after {step} for {STILL_S:.0f} s")
            raise Stuck(f"no step after {step} for {STILL_S:.0f} s")

    def _bring_back(self, peer: Peer) -> None:
        if peer.life.stopped:
            self.event(f"SIGCONT to {peer.name}")
            self.peers.go_on(peer)
            return
        if peer.life.killed == "SIGTERM" and peer.life.process.returncode not in (0, 130):
            self._complain(f"{peer.name} left with exit code {peer.life.process.returncode}: {peer.life.why()}")
        self.event(f"{peer.name} started again")
        self.peers.start(peer)

    def _all_work(self) -> bool:
        return not self._back and all(self.works(peer) for peer in self.peers.peers.values())

    def _end(self) -> None:
        self.event("the storm is over")
        if self._until(self._all_work, STILL_S, "all peers work again"):
            self.event("all peers work again")
            self._compare_files()
        self._until(self.over, 4 * PATIENCE_S, "the run ends")
        self.event("the run is over")
        deadline = time.time() + END_S
        while any(peer.life.alive for peer in self.peers.peers.values()) and time.time() < deadline:
            for peer in self.peers.peers.values():
                if peer.life.stopped:
                    self.peers.go_on(peer)
                elif peer.life.alive and not peer.life.killed and not self._was_in_time(peer):
                    self.peers.leave(peer)  # it was still starting, and has nobody to join
            time.sleep(LOOK_S)
        for peer in self.peers.peers.values():
            code = peer.life.process.poll()
            if code is None or (code != 0 and not peer.life.killed):
                self._complain(f"{peer.name} did not end with 0 but {code}: {peer.life.why()}")

    def _was_in_time(self, peer: Peer) -> bool:
        rows = self.seen().named(peer.name)
        return any(row["id"] not in self._dead for row in rows) or peer.life.began < self._stepped - PATIENCE_S

    # -- what is seen --------------------------------------------------------------------------------------------------

    def seen(self) -> Seen:
        return Seen.read(self._seen)

    def over(self) -> bool:
        return self.records.summary() is not None

    def step(self) -> int:
        names = [peer.name for peer in self.peers.peers.values() if peer.role == "trainer"]
        return max(int(self._last_row(name).get("step", 0)) for name in names)

    def _last_row(self, name: str) -> dict[str, Any]:
        """The last step in a trainer's metrics, from the end of the file."""
        try:
            with open(self.records.path / "metrics" / f"{name}.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return {}
        for line in reversed(lines[:-1]):
            if b'"time/step_s"' in line and line.startswith(b"{"):
                return json.loads(line)
        return {}

    def _open_files(self) -> dict[str, int]:
        """Descriptors by peer, and of the watcher, which lives through it all."""
        found = {"watcher": self.seen().files}
        for peer in self.peers.peers.values():
            try:
                found[peer.name] = psutil.Process(peer.life.process.pid).num_fds()
            except psutil.NoSuchProcess:
                continue
        return found

    def _compare_files(self) -> None:
        now = self._open_files()
        self.event("descriptors " + ", ".join(f"{name} {self._files.get(name)} -> {n}" for name, n in now.items()))
        for name, n in now.items():
            role = name.partition("-")[0]
            most = max((files for other, files in self._files.items() if other.partition("-")[0] == role), default=n)
            if n > most + FILES_MORE:
                self._complain(f"{name} has {n} descriptors open; no {role} had over {most} when all began to work")

    def event(self, text: str) -> None:
        self.say(f"{time.time() - self.began:7.1f} s  step {self.step():>3}  {text}")

    def _complain(self, text: str) -> None:
        self.event(f"COMPLAINT {text}")
        self.complaints.append(text)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def kills(self) -> int:
        return sum(len(done.victims) for done in self.done if done.blow.act == "kill")

    def check(self) -> Check:
        struck = f"{len(self.done)} blows, {self.kills()} kills in {time.time() - self.began:.0f} s"
        return Check("the run goes on", self.complaints, struck)

    def recovery(self) -> list[str]:
        """Seconds to the next optimizer step, by kind of blow."""
        steps = [row["time"] for row in self.records.steps()]
        waits: dict[str, list[float]] = defaultdict(list)
        for done in self.done:
            if after := [at for at in steps if at > done.at]:
                waits[f"{done.blow.act} {done.blow.target}"].append(min(after) - done.at)
        return [
            f"{kind:<16} {len(s):>3} times, next step after {statistics.median(s):.1f} s (at most {max(s):.1f})"
            for kind, s in sorted(waits.items())
        ]


class Stuck(Exception):
    """The run does not go on: the rest of the plan is of no use."""
