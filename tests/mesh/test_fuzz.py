"""A member with a bug kills nobody. ``make fuzz FRAMES=...`` sends more, SEED another sequence."""

import contextlib
import logging
import os
import time
from pathlib import Path

import psutil
import pytest
from fuzzing import Confused
from processes import Mesh, soon

from mesh import config as settings
from mesh import logs, secret
from mesh.peer import Peer
from mesh.rendezvous import Directory
from transport.messages import Look, Status

FRAMES = int(os.environ.get("FRAMES", 100_000))
SEED = int(os.environ.get("SEED", 1))
MEMORY_MIB = 96  # what a peer may grow by meanwhile; one million frames take no more


@pytest.fixture
def log(tmp_path):
    """The file that these peers log to, as a peer of its own process does."""
    before = {room: (log := logging.getLogger(room), log.handlers[:], log.propagate) for room in logs.ROOMS}
    logs.setup("all", tmp_path / "log", stderr=False)
    yield tmp_path / "log"
    for logger, handlers, propagate in before.values():
        logger.handlers[:], logger.propagate = handlers, propagate


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:
        key = secret.load(tmp_path)

        def made(role: str, name: str) -> Peer:
            peer = Peer(
                config=settings.convert({"model": {"path": "none"}, "mesh": {"preset": "local"}}),
                role=role,
                name=name,
                host="here",
                run=secret.run_id(key, "fuzz"),
                keys=secret.keys(key),
                rendezvous=Directory(tmp_path / "rendezvous"),
                address="127.0.0.1",
            )
            peer.look = lambda: Status(1, "here", None, {}, {})
            peer.start()
            stack.callback(peer.leave, "done")
            return peer

        yield made


def answers(asker: Peer, asked: Peer) -> None:
    """Wait until ``asked`` is a member in the eyes of ``asker`` and answers it."""
    heard = []
    asker.on(Status, lambda sender, status: heard.append(sender))

    def look() -> bool:
        asker.post(lambda: asker.send(asked.id, Look(1)))
        asked.check()
        return asked.id in heard and any(card.id == asked.id for card in asker.live())

    soon(look, f"{asked.name} answers")


@pytest.mark.timeout(0)
def test_a_peer_lives_through_whatever_a_member_sends(make, tmp_path: Path, log):
    target, watcher, confused = make("trainer", "target"), make("observer", "watcher"), make("rollout", "confused")
    answers(watcher, target)
    answers(confused, target)
    began = time.monotonic()
    sender = Confused(confused, secret.keys(secret.load(tmp_path)), target.card, SEED)
    memory = psutil.Process().memory_info
    try:
        sender.send(min(5_000, FRAMES // 4))  # what is needed once is allocated
        before = memory().rss
        sender.send(FRAMES - sender.sent)
        counts = target.counters
        known = ("received", "malformed", "other_run", "not_me", "own_hello")
        soon(lambda: sum(counts[reason] for reason in known) >= FRAMES, f"all have arrived: {counts}")
        answers(watcher, target)
        grown = (memory().rss - before) >> 20
    finally:
        sender.close()
    assert counts["malformed"] > FRAMES / 5
    assert counts["other_run"] > FRAMES / 100
    assert counts["not_me"] > FRAMES / 100
    assert counts["received"] > FRAMES / 5
    assert grown < MEMORY_MIB, f"{grown} MiB"
    lines = log.read_text().splitlines()
    assert len(lines) <= logs.LINES_AT_ONCE + (time.monotonic() - began) * logs.LINES_PER_S + 1
    assert any(" malformed: " in line for line in lines)


def confused_member(mesh: Mesh, stack: contextlib.ExitStack, role: str, target: str) -> Confused:
    """Somebody who agrees with ``target`` on all that is compared when peers meet."""
    keys = secret.keys(secret.load(mesh.run))
    with mesh.observer() as observer:
        card = soon(lambda: next((c for c in observer.live() if c.name == target), None), f"{target} is there")
    peer = Peer(
        config=settings.load(mesh.config),
        role=role,
        name=f"confused-{role}",
        host=card.host,
        run=observer.run,
        keys=keys,
        rendezvous=Directory(mesh.run / "rendezvous"),
        address="127.0.0.1",
        agreed=card.agreed,
    )
    peer.start()
    stack.callback(peer.leave, "confused enough")
    soon(lambda: any(c.name == target for c in peer.live()), f"{target} has let it in")
    sender = Confused(peer, keys, card, SEED)
    stack.callback(sender.close)
    return sender


@pytest.mark.timeout(0)
def test_a_trainer_and_a_rollout_live_through_it_and_finish_the_run(mesh):
    """The confused are a rollout to the trainer and a trainer to the rollout, so that all handlers are reached; they
    come while the run is held up and leave before it goes on."""
    mesh.hold()
    processes = [mesh.start(role) for role in ("trainer", "rollout")]
    for process in processes:
        process.joins(mesh)
    with mesh.watched() as seen:
        soon(lambda: {"trainer", "rollout"} <= seen.keys() and seen["rollout"].version, "a version is proved")
    with contextlib.ExitStack() as stack:
        senders = [
            confused_member(mesh, stack, role, target)
            for role, target in (("rollout", "trainer"), ("trainer", "rollout"))
        ]
        memory = [process.memory() for process in processes]
        for _ in range(0, FRAMES // 2, 2_000):
            for sender in senders:
                sender.send(1_000)
            assert [process.code for process in processes] == [None, None], "\n".join(p.said for p in processes)
        with mesh.watched() as seen:
            soon(lambda: {"trainer", "rollout"} <= seen.keys(), "both answer")
        grown = [(process.memory() - before) >> 20 for process, before in zip(processes, memory, strict=True)]
        assert max(grown) < MEMORY_MIB, f"{grown} MiB"
    mesh.let_go()
    assert [process.ends() for process in processes] == [0, 0], "\n".join(p.said for p in processes)
    assert mesh.summary()["steps"] == 16
    assert mesh.summary()["ledger_closed"]
