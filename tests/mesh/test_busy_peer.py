"""A peer whose loop cannot run because other work holds the interpreter is busy, not asleep."""

import subprocess
import sys
import time
from pathlib import Path

from mesh import config as settings
from mesh import secret
from mesh.peer import Peer
from mesh.rendezvous import Directory

BUSY = """
import sys, time
from pathlib import Path
from tests.mesh.test_busy_peer import make_peer

peer = make_peer(Path(sys.argv[1]), "busy")
peer.start()
deadline = time.monotonic() + 20
while len(peer.live()) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
print("joined", flush=True)
sum(range(400_000_000))  # seconds in one call into C: nothing else of this process runs until it returns
print("worked", flush=True)
sys.stdin.readline()
print("slept" if peer.slept_s else "awake", flush=True)
peer.leave("done")
"""


def make_peer(run: Path, name: str) -> Peer:
    key = secret.load(run)
    config = settings.convert({"model": {"path": "none"}, "mesh": {"preset": "local"}})
    return Peer(
        config=config,
        role="observer",
        name=name,
        host="here",
        run=secret.run_id(key, "busy"),
        keys=secret.keys(key),
        rendezvous=Directory(run / "rendezvous"),
        address="127.0.0.1",
    )


def wait_for(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_peer_that_works_too_hard_to_answer_comes_back_as_itself(tmp_path):
    peer = make_peer(tmp_path, "watcher")
    peer.start()
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert busy.stdout.readline() == "joined\n"
        (other,) = [card.id for card in peer.live() if card.id != peer.id]
        assert wait_for(lambda: all(card.id != other for card in peer.live()), 10), "nobody noticed its silence"
        assert busy.stdout.readline() == "worked\n"
        assert wait_for(lambda: any(card.id == other for card in peer.live()), 10), "it did not come back"
        busy.stdin.write("\n")
        busy.stdin.flush()
        assert busy.stdout.readline() == "awake\n"
    finally:
        busy.kill()
        busy.wait(10)
        peer.leave("done")
