"""A real publisher and real receivers in processes of their own, over gloo and the encrypted endpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import soon
from weights_peer import CONFIG, make_peer

from mesh.version import Ballot, Lineage, Version
from roles.formations import group_builder
from roles.metrics import process_figures
from transport.messages import Probe
from transport.weights.manifest import Manifest
from transport.weights.publisher import Publisher

PROBE = Probe(np.arange(4, dtype=np.int32), np.zeros(3, np.float32))
TERM = Ballot(1, "t")
PUBLICATIONS = int(os.environ.get("SOAK_PUBLICATIONS", "300"))


class Weights:
    """The trainer's end in this process, and the receivers it was asked for."""

    def __init__(self, directory: Path, values: int):
        self.directory = directory
        (directory / "rendezvous").mkdir()
        self.state = {"w": torch.zeros(values)}
        self.peer = make_peer("trainer", "trainer", directory)
        self.publisher = Publisher(self.peer, Manifest.from_state(self.state), CONFIG.weights, group_builder(self.peer))
        self.peer.start()
        self.children: dict[str, subprocess.Popen] = {}
        self.number = -1
        self.publisher.open_term(Lineage().open(TERM, 0))

    def start(self, name: str) -> subprocess.Popen:
        script = Path(__file__).with_name("weights_peer.py")
        with open(self.directory / f"{name}.jsonl", "w") as out:
            child = subprocess.Popen([sys.executable, str(script), name, str(self.directory)], stdout=out)
        self.children[name] = child
        return child

    def publish(self) -> bool:
        self.number += 1
        self.state["w"].fill_(self.number)
        return self.publisher.publish(Version(TERM, self.number), self.state, PROBE)

    def rows(self, name: str) -> list[dict]:
        lines = (self.directory / f"{name}.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def arrives(self, *names: str) -> None:
        """Wait until these receivers have reported the newest version as proved."""
        version = Version(TERM, self.number)
        ids = lambda: {c.id for c in self.peer.live("rollout") if c.name in names}  # noqa: E731
        soon(
            lambda: len(ids()) == len(names) and ids() <= set(self.publisher.proved_by(version)),
            f"{names} prove {version}: {self.publisher.table()}",
        )

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
        self.publisher.close()
        self.peer.leave("finished")


@pytest.fixture
def weights(tmp_path):
    made: list[Weights] = []

    def make(values: int) -> Weights:
        made.append(Weights(tmp_path, values))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_receiver_that_is_stopped_holds_up_no_snapshot_and_no_other_receiver(weights):
    w = weights(1 << 22)
    child = w.start("asleep")
    w.start("awake")
    soon(lambda: len(w.peer.live("rollout")) == 2, "both have joined")
    assert w.publish()
    w.arrives("asleep", "awake")
    assert w.publish()  # it is stopped while this is on its way
    os.kill(child.pid, signal.SIGSTOP)
    for _ in range(6):
        assert w.publish()
        w.arrives("awake")
    assert w.publisher.stats().skipped == 0
    os.kill(child.pid, signal.SIGCONT)
    w.arrives("asleep", "awake")
    pulls = [row["pulls"] for row in w.rows("asleep")]
    assert pulls[-1] == 1, "most have the version: it is not broadcast again for one that slept"


def test_many_publications_leave_memory_descriptors_and_threads_as_they_were(weights):
    """CI form; ``make soak`` publishes 2,000 times."""
    w = weights(1 << 16)
    w.start("rollout")
    soon(lambda: len(w.peer.live("rollout")) == 1, "the rollout has joined")
    here = []
    for _ in range(PUBLICATIONS):
        assert w.publish()
        w.arrives("rollout")
        here.append(process_figures())
    there = w.rows("rollout")
    assert [row["version"] for row in there] == list(range(PUBLICATIONS))
    assert w.publisher.stats().broadcasts == PUBLICATIONS
    for rows in (here, there):
        early, late = rows[PUBLICATIONS // 3], rows[-1]
        assert late["open_files"] <= early["open_files"] + 2, "descriptors"
        assert late["threads"] <= early["threads"] + 1, "threads"
        assert late["rss_mib"] - early["rss_mib"] < 4, "memory"
