"""A rollout that nothing of can run for a while: announced, it is waited for; else it is evicted and comes back."""

import json
import os

from processes import soon

from transport.accounts import Delivered, Ended, Issued, Trained

BUSY_S = float(os.environ.get("BUSY_S", "8"))
"""How long a rollout's interpreter is held: about three times what it takes to call a silent peer dead."""

LONG = {"run.steps": 100_000, "rollout.groups_in_flight": 4}


def holds(mesh, how: str, *others: str):
    """A mesh whose rollout ``busy`` holds its interpreter for a while, with credits in hand; when that is over, the
    trainer, the rollout, and how many entries the ledger had when it began."""
    trainer, *_, busy = (
        mesh.start(
            "trainer" if name == "trainer" else "rollout",
            name=name,
            set=LONG,
            fault="holds_the_interpreter" if name == "busy" else "",
            env={"BUSY_S": str(BUSY_S)},
        )
        for name in ("trainer", *others, "busy")
    )
    mesh.reaches(3)
    me = mesh.peer_id("busy")
    mesh.hold()
    soon(lambda: [c for c in mesh.accounts().open.values() if c.issued.to == me and c.tokens is None], "it has credits")
    before = len(mesh.entries())
    written = mesh.gate / "is busy"
    written.write_text(how)
    written.rename(mesh.gate / "busy")
    soon(lambda: not (mesh.gate / "busy").exists(), "it was busy", 90 + 4 * BUSY_S)
    return trainer, busy, before


def delivers_again(mesh, me: str, before: int) -> None:
    """The peer of this id delivers groups of credits that it got after the ``before`` first entries."""

    def look() -> bool:
        entries = mesh.entries()
        new = {e.id for e in entries[before:] if isinstance(e, Issued) and e.to == me}
        return any(isinstance(e, Delivered) and e.id in new for e in entries[before:])

    soon(look, "it delivers")


def is_still_there(mesh, busy, trainer) -> None:
    """The process went on as the peer it was, and all accounts close."""
    assert busy.code is None
    trainer.interrupt()
    assert trainer.ends(20.0) == 130, trainer.said
    assert "again as a new peer" not in busy.said
    accounts = mesh.accounts()
    assert accounts.groups["issued"] == sum(n for name, n in accounts.groups.items() if name != "issued")


def test_a_rollout_that_announced_work_is_not_evicted(mesh):
    trainer, busy, before = holds(mesh, "announced", "other")
    me = mesh.peer_id("busy")
    mesh.let_go()
    lost = [e for e in mesh.entries()[before:] if getattr(e, "outcome", "") == "lost"]
    assert not lost, "its credits stayed with it"
    delivers_again(mesh, me, before)
    assert "busy died" not in trainer.said
    assert mesh.peer_id("busy") == me
    is_still_there(mesh, busy, trainer)


def test_a_rollout_that_worked_in_silence_is_evicted_and_comes_back_by_itself(mesh):
    trainer, busy, before = holds(mesh, "silent", "other")
    me = mesh.peer_id("busy")
    trainer.says("busy died: did not answer ")
    mesh.let_go()
    delivers_again(mesh, me, before)
    assert trainer.said.count("busy joined") >= 1
    [card] = [p for p in (mesh.run / "rendezvous").glob("*.json") if json.loads(p.read_text())["name"] == "busy"]
    assert card.stem == me, "it is the peer it was"
    is_still_there(mesh, busy, trainer)


def test_a_silent_rollout_keeps_its_credits_while_nobody_else_takes_their_prompts(mesh):
    trainer, busy, _ = holds(mesh, "silent")
    me = mesh.peer_id("busy")
    trainer.says("busy died: did not answer ")
    in_hand = {id for id, credit in mesh.accounts().open.items() if credit.issued.to == me and credit.tokens is None}
    assert in_hand, "it has credits"
    mesh.let_go()
    ended = {}

    def look() -> bool:
        for e in mesh.entries():
            if isinstance(e, Trained | Ended):
                ended.update(dict.fromkeys(e.ids, "trained" if isinstance(e, Trained) else f"{e.outcome}: {e.why}"))
        return in_hand <= ended.keys()

    soon(look, "what it had has ended")
    accounts = {ended[id] for id in in_hand}
    assert "trained" in accounts
    assert accounts <= {"trained", "superseded: age"}, "newer weights may have come while it was silent"
    assert trainer.said.count("busy joined") >= 1
    assert mesh.peer_id("busy") == me
    assert not [e for e in mesh.entries() if isinstance(e, Ended) and e.outcome == "lost"]
    is_still_there(mesh, busy, trainer)
