import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.version import Ballot, Lineage, Version
from roles.trainer.ledger import Ledger, close_dead, replay
from transport.accounts import Accounts, Closed, Delivered, Descends, Ended, Issued, Opened, Trained

T1, T2 = Ballot(1, "a"), Ballot(2, "b")
LINE1 = Lineage(((T1, 0),))
LOST = Ended(outcome="lost", ids=[1], why="its rollout died")


def issued(id: int, prompt: int | None = None, **more) -> Issued:
    return Issued(id=id, to="r", epoch=0, prompt=id if prompt is None else prompt, attempt=0, **more)


def trained(*ids: int, number: int = 0, term: Ballot = T1) -> Trained:
    return Trained(ids=list(ids), version=Version(term, number), masked=[0] * len(ids))


def write(path, *records, peer: str = "t", run: str = "run"):
    ledger = Ledger(path, peer=peer, run=run)
    for record in records:
        ledger.append(record)
    ledger.close()
    return path


def test_a_record_replays_into_its_accounts(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        Descends(lineage=LINE1),
        *(issued(i) for i in range(6)),
        Delivered(id=0, tokens=10),
        Delivered(id=1, tokens=20),
        Delivered(id=2, tokens=5),
        Delivered(id=5, tokens=7),
        Trained(ids=[0, 1], version=Version(T1, 0), masked=[4, 0], failed=[0, 6]),
        Ended(outcome="superseded", ids=[2], why="age"),
        Ended(outcome="failed", ids=[3], why="the verifier raised"),
        Closed(epoch=0, prompt=3, why="failed: the verifier raised"),
    )
    result = replay([path])
    assert result.groups == {"issued": 6, "trained": 2, "superseded": 1, "failed": 1, "lost": 0, "in_flight": 2}
    assert result.tokens == {
        "delivered": 42,
        "trained": 20,
        "masked": 4,
        "superseded": 5,
        "failed": 6,
        "lost": 0,
        "held": 7,
    }
    assert result.closes()
    assert [c.prompt for c in result.closed] == [3]
    assert result.next_id == 6
    assert "6 issued = 2 trained + 1 superseded + 1 failed + 0 lost + 2 in flight" in str(result)


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([issued(1), LOST, LOST], "had ended already"),
        ([trained(4)], "credit 4 trained, but it was never issued"),
        ([issued(1), trained(1)], "has not arrived"),
        ([issued(1), Delivered(id=1, tokens=1), Delivered(id=1, tokens=1)], "delivered twice"),
        ([issued(2), issued(1)], "issued twice, or out of order"),
        ([issued(1, evaluation=True), Delivered(id=1, tokens=1), trained(1)], "is for evaluation"),
        ([issued(1), Ended(outcome="evaluated", ids=[1], why="")], "of training"),
    ],
)
def test_a_contradiction_is_named_by_file_and_line(tmp_path, records, what):
    path = write(tmp_path / "t.jsonl", *records)
    with pytest.raises(ValueError, match=what) as e:
        replay([path])
    assert str(e.value).startswith(f"{path}:{len(records) + 1}: ")


def test_a_line_that_is_no_record_is_named_but_a_torn_last_one_is_passed_over(tmp_path):
    path = write(tmp_path / "t.jsonl", issued(1))
    with path.open("ab") as f:
        f.write(b'{"is":"Issued","id":2,"to"')
    assert replay([path]).groups["issued"] == 1
    with path.open("ab") as f:
        f.write(b"\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:3: not a ledger record"):
        replay([path])


def two_trainers(tmp_path, first: int):
    """Prompt 5 trained on version 7 of term 1, and again in term 2, which opened at version ``first``."""
    came = [issued(1, 5), Delivered(id=1, tokens=1)]
    lineage = LINE1.open(T2, first)
    a = write(tmp_path / "a.jsonl", Descends(lineage=LINE1), *came, trained(1, number=7))
    b = write(tmp_path / "b.jsonl", Descends(lineage=lineage), *came, trained(1, number=9, term=T2), peer="u")
    return [a, b]


def test_a_prompt_trained_again_after_a_resume_from_an_older_checkpoint_is_right(tmp_path):
    assert replay(two_trainers(tmp_path, first=7)).groups["trained"] == 2


def test_a_prompt_trained_twice_on_one_lineage_is_a_contradiction(tmp_path):
    with pytest.raises(
        ValueError, match=r"b\.jsonl:5: prompt 5 trained twice in epoch 0 on one lineage, first in .*a\.js"
    ):
        replay(two_trainers(tmp_path, first=8))


def test_records_of_different_runs_do_not_mix(tmp_path):
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", run="other")
    with pytest.raises(ValueError, match="of run other, the others are of run run"):
        replay([a, b])


def test_the_open_credits_of_a_dead_trainer_are_closed_once_even_by_two_survivors(tmp_path):
    records = [issued(1), issued(2), Delivered(id=2, tokens=9), issued(3), Ended(outcome="failed", ids=[3], why="x")]
    path = write(tmp_path / "t.jsonl", *records)
    with path.open("ab") as f:
        f.write(b'{"is":"Del')  # killed in the middle of a line
    closed: list[int] = []
    survivors = [threading.Thread(target=lambda: closed.append(close_dead(path))) for _ in range(2)]
    for t in survivors:
        t.start()
    for t in survivors:
        t.join()
    assert sorted(closed) == [0, 2]
    result = replay([path])
    assert result.groups == {"issued": 3, "trained": 0, "superseded": 0, "failed": 1, "lost": 2, "in_flight": 0}
    assert result.tokens["lost"] == 9
    assert result.closes()


def test_a_killed_writer_leaves_a_record_that_replays(tmp_path):
    path = tmp_path / "t.jsonl"
    code = (
        "import sys; from roles.trainer.ledger import Ledger; from transport.accounts import Issued\n"
        "ledger = Ledger(sys.argv[1], peer='t', run='run'); n = 0\n"
        "while True:\n"
        "    ledger.append(Issued(id=n, to='r', epoch=0, prompt=n, attempt=0)); n += 1\n"
        "    if n == 100: print('on', flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"on\n"
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
    issued_ = close_dead(path)
    result = replay([path])
    assert issued_ >= 100
    assert result.groups["lost"] == result.groups["issued"] == issued_


def test_reasons_that_never_repeat_do_not_grow_the_accounts():
    accounts = Accounts()
    for id in range(200):
        accounts.apply(issued(id))
        accounts.apply(Ended(outcome="failed", ids=[id], why=f"the verifier raised at {id}"))
    assert len(accounts.reasons) == 65
    assert accounts.reasons["failed: other reasons"] == 136
    assert sum(accounts.reasons.values()) == 200


def test_a_ledger_is_not_written_over(tmp_path):
    write(tmp_path / "t.jsonl")
    with pytest.raises(FileExistsError):
        Ledger(tmp_path / "t.jsonl", peer="t", run="run")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["issue", "deliver", "train", "superseded", "failed", "lost"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_accounts_close_after_any_history_and_refuse_without_change_what_contradicts_it(history):
    accounts = Accounts()
    accounts.apply(Opened(peer="t", run="r"))
    for act, id in history:
        record = {
            "issue": issued(id),
            "deliver": Delivered(id=id, tokens=id),
            "train": trained(id),
        }.get(act) or Ended(outcome=act, ids=[id], why="x")
        before = str(accounts)
        try:
            accounts.apply(record)
        except ValueError:
            assert str(accounts) == before
        assert accounts.closes()
        assert accounts.groups["in_flight"] == len(accounts.open)
