"""A process that is in the mesh as an observer and writes what it sees to a file, again and again:

python -m tests.chaos.watcher CONFIG RUN RENDEZVOUS FILE

It lives as long as the run, through every death around it: what a death leaks in a survivor shows in its figures.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mesh import config as settings
from mesh import launch, logs
from mesh.node import Node
from mesh.rundir import RunDir
from transport.messages import Look, Status

EVERY_S = 0.2
FRESH_S = 2.0  # a status older than this is not what the peer does now


def main(config_path: str, run: str, rendezvous: str, file: str) -> None:
    config = settings.load(config_path)
    config.mesh.rendezvous = rendezvous
    directory, out = RunDir.make(run), Path(file)
    log = logs.setup("watcher", directory.logs / f"{out.stem}.log", stderr=False)
    node = Node("observer", config, directory, out.stem, launch.detect(), log)
    node.stop.install()
    peer, process = node.peer(), psutil.Process()
    status: dict[str, tuple[float, Status]] = {}

    def told(sender: str, answer: Status) -> None:
        status[sender] = (time.time(), answer)

    def look() -> None:
        cards = [card for card in peer.live() if card.role != "observer"]
        now = time.time()
        for id in [id for id, (at, _) in status.items() if now - at > FRESH_S]:
            del status[id]
        rows = []
        for card in cards:
            peer.send(card.id, Look(seq=0))
            row: dict[str, Any] = {"id": card.id, "name": card.name, "role": card.role}
            if card.id in status:
                answer = status[card.id][1]
                row |= {"state": answer.state, "figures": answer.figures}
                if version := answer.version:
                    row |= {"term": [version.term.counter, version.term.convener], "number": version.number}
            rows.append(row)
        seen = {"time": now, "files": process.num_fds(), "threads": process.num_threads(), "peers": rows}
        temporary = out.with_suffix(".new")
        temporary.write_text(json.dumps(seen))
        os.replace(temporary, out)

    peer.on(Status, told)
    peer.every(EVERY_S, look)
    peer.start()
    node.stop.event.wait()
    peer.leave("seen enough")


@dataclass(frozen=True)
class Seen:
    """What a watcher saw last; nothing before its first look."""

    time: float
    files: int
    threads: int
    peers: list[dict[str, Any]]

    @classmethod
    def read(cls, file: Path) -> "Seen":
        try:
            return cls(**json.loads(file.read_text()))
        except FileNotFoundError:
            return cls(0.0, 0, 0, [])

    def named(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.peers if row["name"] == name]


if __name__ == "__main__":
    main(*sys.argv[1:])
