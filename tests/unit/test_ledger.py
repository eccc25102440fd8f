import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.version import Ballot, Lineage, Version
from roles.trainer.ledger import Ledger, close_all_dead, close_dead, replay
from transport.accounts import (
    Accounts,
    Closed,
    Committed,
    Delivered,
    Descends,
    Ended,
    Issued,
    Opened,
    Row,
    RowGroup,
    Trained,
)

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


# -- several trainers --------------------------------------------------------------------------------------------------


def committed(number: int, term: Ballot = T1, **rows: list[RowGroup]) -> Committed:
    return Committed(Version(term, number), {peer: Row(groups) for peer, groups in rows.items()})


def delivered(id: int, tokens: int = 10) -> list:
    return [issued(id), Delivered(id=id, tokens=tokens)]


def test_a_trainer_that_died_after_its_step_was_reduced_is_closed_by_what_the_others_say(tmp_path):
    dead = write(tmp_path / "t.jsonl", Descends(lineage=LINE1), *delivered(1), *delivered(2), *delivered(3), issued(4))
    write(tmp_path / "u.jsonl", committed(3, t=[RowGroup(1, 0, 1, 10, 4, 1), RowGroup(2, 0, 2, 10)]), peer="u")
    assert close_dead(dead) == 4
    assert dead.read_text().splitlines()[-2:] == [
        '{"is":"Trained","ids":[1,2],"version":[[1,"a"],3],"masked":[4,0],"failed":[1,0]}',
        '{"is":"Ended","outcome":"lost","ids":[3,4],"why":"its trainer died"}',
    ]
    result = replay(tmp_path.glob("*.jsonl"), LINE1)
    assert result.groups == {"issued": 4, "trained": 2, "superseded": 0, "failed": 0, "lost": 2, "in_flight": 0}
    assert (result.tokens["trained"], result.tokens["masked"], result.tokens["failed"]) == (15, 4, 1)
    assert result.closes()
    assert close_dead(dead) == 0


def test_the_record_of_a_trainer_that_lives_is_not_closed_by_others(tmp_path):
    path = tmp_path / "t.jsonl"
    ledger = Ledger(path, peer="t", run="run")
    ledger.append(issued(1))
    assert close_dead(path) == 0
    assert replay([path]).groups["in_flight"] == 1
    ledger.close()
    assert close_dead(path) == 1


def test_the_first_id_that_no_trainer_used_is_found_while_others_live(tmp_path):
    write(tmp_path / "a.jsonl", *delivered(6), peer="a")
    live = Ledger(tmp_path / "b.jsonl", peer="b", run="run", first_id=7)
    live.append(issued(9))
    assert close_all_dead(tmp_path) == 10
    live.append(Ended(outcome="failed", ids=[9], why="x"))
    live.close()
    assert replay(tmp_path.glob("*.jsonl")).groups["lost"] == 1


def test_a_killed_trainer_lets_go_of_its_record(tmp_path):
    path = tmp_path / "t.jsonl"
    code = (
        "import sys, time; from roles.trainer.ledger import Ledger; from transport.accounts import Issued\n"
        "ledger = Ledger(sys.argv[1], peer='t', run='run')\n"
        "ledger.append(Issued(id=1, to='r', epoch=0, prompt=1, attempt=0)); print('on', flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"on\n"
        assert close_dead(path) == 0
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        owner.stdout.close()
    assert close_dead(path) == 1


def test_what_was_trained_into_weights_that_the_mesh_has_left_is_superseded(tmp_path):
    a, b = two_trainers(tmp_path, first=7)
    final = LINE1.open(T2, 7)
    result = replay([a, b], final)
    assert (result.groups["trained"], result.groups["superseded"]) == (1, 1)
    assert (result.tokens["trained"], result.tokens["superseded"]) == (1, 1)
    assert result.closes()
    assert result.accounts.reasons == {"superseded: lineage": 1}
    assert replay([a, b]).groups["trained"] == 2


@pytest.mark.parametrize("outcome", ["superseded", "lost", "in_flight"])
def test_a_group_that_the_others_applied_is_trained_whatever_its_trainer_wrote(tmp_path, outcome):
    end = [] if outcome == "in_flight" else [Ended(outcome=outcome, ids=[1], why="lineage")]
    left = write(tmp_path / "t.jsonl", Descends(lineage=LINE1), *delivered(1), *end)
    rows = committed(3, t=[RowGroup(1, 0, 1, 10, 2)])
    others = [write(tmp_path / f"{p}.jsonl", Descends(lineage=LINE1), rows, peer=p) for p in ("u", "v")]
    result = replay([left, *others], LINE1)
    assert result.groups == {"issued": 1, "trained": 1, "superseded": 0, "failed": 0, "lost": 0, "in_flight": 0}
    assert (result.tokens["trained"], result.tokens["masked"], result.tokens["held"]) == (8, 2, 0)
    assert result.closes()
    assert result.accounts.reasons.get(f"{outcome}: lineage", 0) == 0


def test_a_step_that_only_the_lost_half_applied_leaves_no_trace_in_the_accounts(tmp_path):
    """Its trainer came back to the others, which did not have that step."""
    end = Ended(outcome="superseded", ids=[1], why="lineage")
    line = LINE1.open(T2, 3)
    t = write(tmp_path / "t.jsonl", Descends(lineage=LINE1), *delivered(1), end)
    u = write(tmp_path / "u.jsonl", Descends(lineage=LINE1), committed(3, t=[RowGroup(1, 0, 1, 10)]), peer="u")
    w = write(tmp_path / "w.jsonl", Descends(lineage=line), *delivered(1), trained(1, number=3, term=T2), peer="w")
    result = replay([t, u, w], line)
    assert (result.groups["trained"], result.groups["superseded"]) == (1, 1)


@pytest.mark.parametrize(
    ("group", "what"),
    [
        (RowGroup(9, 0, 9, 10), "credit 9 of t trained, but it was never issued"),
        (RowGroup(2, 0, 2, 10), "credit 2 of t trained, but it was never delivered"),
        (RowGroup(1, 0, 5, 10), "credit 1 of t was issued for another prompt"),
        (RowGroup(1, 1, 1, 10), "credit 1 of t was issued for another prompt"),
    ],
)
def test_a_row_that_contradicts_the_record_of_its_trainer_is_named(tmp_path, group, what):
    t = write(tmp_path / "t.jsonl", *delivered(1), issued(2))
    u = write(tmp_path / "u.jsonl", committed(0, t=[group], gone=[RowGroup(1, 0, 1, 10)]), peer="u")
    with pytest.raises(ValueError, match=rf"u\.jsonl:2: {what}"):
        replay([t, u])


def test_a_prompt_trained_by_two_trainers_in_one_epoch_is_a_contradiction_by_the_rows_alone(tmp_path):
    t = write(tmp_path / "t.jsonl", *delivered(1))
    u = write(
        tmp_path / "u.jsonl", *delivered(1), committed(0, t=[RowGroup(1, 0, 1, 10)]), trained(1, number=4), peer="u"
    )
    with pytest.raises(ValueError, match=r"prompt 1 trained twice in epoch 0 on one lineage"):
        replay([t, u])


def test_a_credit_in_two_steps_of_one_lineage_is_a_contradiction(tmp_path):
    t = write(tmp_path / "t.jsonl", *delivered(1))
    rows = {"t": [RowGroup(1, 0, 1, 10)]}
    u = write(tmp_path / "u.jsonl", committed(0, **rows), committed(1, **rows), peer="u")
    with pytest.raises(ValueError, match="prompt 1 trained twice"):
        replay([t, u])


def test_a_prompt_that_was_given_up_by_one_and_trained_by_another_is_not_listed(tmp_path):
    gave_up = [issued(1), Ended(outcome="failed", ids=[1], why="x"), Closed(epoch=0, prompt=1, why="x")]
    t = write(tmp_path / "t.jsonl", *gave_up, Closed(epoch=0, prompt=2, why="x"))
    u = write(tmp_path / "u.jsonl", *delivered(1), trained(1), Closed(epoch=0, prompt=2, why="x"), peer="u")
    assert [(c.epoch, c.prompt) for c in replay([t, u]).closed] == [(0, 2)]


def test_what_a_stopped_trainer_has_open_counts_as_lost_and_its_record_stays_its_own(tmp_path):
    stopped = Ledger(tmp_path / "b.jsonl", peer="b", run="run")
    stopped.append(issued(0))
    stopped.append(issued(1, evaluation=True))
    write(tmp_path / "a.jsonl", issued(0, prompt=7), Ended(outcome="lost", ids=[0], why="gone"), peer="a")
    before = stopped.path.read_bytes()
    paths = list(tmp_path.glob("*.jsonl"))
    assert [close_dead(p) for p in paths] == [0, 0]
    assert replay(paths).groups["in_flight"] == replay(paths, LINE1, ["a", "b"]).groups["in_flight"] == 1
    counted = replay(paths, LINE1, ["a"])
    assert (counted.groups["in_flight"], counted.groups["lost"]) == (0, 2)
    assert counted.accounts.evaluation["in_flight"] == 0
    assert counted.closes()
    assert stopped.path.read_bytes() == before
