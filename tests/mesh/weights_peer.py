"""A receiver of weights in a process of its own: ``python weights_peer.py NAME DIRECTORY``. Its engine proves at once
whatever it is offered. Writes a line of JSON for each version, ``{"version": number, "pulls": n, ...figures}``."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from mesh import secret
from mesh.config import Config, Mesh, Weights
from mesh.exits import Slept
from mesh.identity import Role
from mesh.peer import Peer
from mesh.rendezvous import Directory
from roles.formations import group_builder
from roles.metrics import process_figures
from transport.weights.proof import Proof
from transport.weights.receiver import Receiver

CONFIG = Config(
    weights=Weights(bucket_mib=1, op_timeout_s=1.0, ready_wait_s=1.0, form_timeout_s=5.0, reform_interval_s=0.2),
    mesh=Mesh(preset="local"),
)  # fmt: skip


def make_peer(name: str, role: Role, directory: Path) -> Peer:
    key = secret.load(directory)
    return Peer(
        config=CONFIG,
        role=role,
        name=name,
        host="here",
        run=secret.run_id(key, ""),
        keys=secret.keys(key),
        rendezvous=Directory(directory / "rendezvous"),
        address="127.0.0.1",
    )


def main(name: str, directory: Path) -> None:
    torch.set_num_threads(1)
    peer = make_peer(name, "rollout", directory)
    receiver = Receiver(peer, CONFIG.weights, group_builder(peer))
    parent = os.getppid()
    peer.start()
    try:
        while os.getppid() == parent:
            peer.check()
            arrived = receiver.offered()
            if arrived is None:
                time.sleep(0.001)
                continue
            receiver.took(arrived, Proof(arrived.version, True, "", 0.0, 0.0, 1.0, "", 0.0))
            row = {"version": arrived.version.number, "pulls": receiver.stats().pulls, **process_figures()}
            print(json.dumps(row), flush=True)
    except Slept:
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
