"""The plan is its seed's, and what the checks look for they find: records that were spoiled on purpose."""

import itertools
import json
import mmap
import os
import secrets

import pytest

from tests.chaos import checks
from tests.chaos.parted import more_groups_won
from tests.chaos.plan import ALL_TRAINERS, DECK, blows
from tests.chaos.records import Run, final

A, B = [1, "aa"], [2, "bb"]
ONE = [[A, 0], [B, 1]]  # of step 0 in term 1, and all that follows in term 2


def issued(id, prompt, **more):
    return {"is": "Issued", "id": id, "to": "r", "epoch": 0, "prompt": prompt, "attempt": 0, **more}


def trained(term, number, *ids):
    return {"is": "Trained", "ids": list(ids), "version": [term, number], "masked": [0] * len(ids)}


def committed(term, number, **rows):
    groups = {peer: [[[id, 0, prompt, 9, 0, 0] for id, prompt in row.items()], []] for peer, row in rows.items()}
    return {"is": "Committed", "version": [term, number], "rows": groups}


def descends(*terms):
    return {"is": "Descends", "lineage": [list(terms)]}


def book(peer, *entries):
    return [{"is": "Opened", "peer": peer, "run": "x", "first_id": 0}, *entries]


def delivered(id):
    return {"is": "Delivered", "id": id, "tokens": 9}


WHOLE = {
    "a": book("a", descends(ONE[0]), issued(0, 10), delivered(0), committed(A, 0, a={0: 10}), trained(A, 0, 0),
              descends(*ONE), issued(1, 11), {"is": "Ended", "outcome": "lost", "ids": [1], "why": "died"}),
    "b": book("b", committed(A, 0, a={0: 10}), descends(*ONE), issued(0, 12), delivered(0),
              committed(B, 1, b={0: 12}), trained(B, 1, 0)),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def write(run, books, closed=True):
    (run.path / "ledger").mkdir(exist_ok=True)
    for name, entries in books.items():
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (run.path / "ledger" / f"{name}.jsonl").write_text(lines + '{"is":"Issu')  # torn, as a kill leaves it
    issued = sum(entry["is"] == "Issued" for entries in books.values() for entry in entries)
    summary = {"steps": 2, "ledger": {"issued": issued}, "ledger_closed": closed}
    (run.path / "summary.json").write_text(json.dumps(summary))


def complaints(run):
    return [text for check in checks.ledgers(run) for text in check.complaints]


def test_a_plan_is_its_seeds_and_deals_every_blow():
    def plan(seed, **more):
        return list(itertools.islice(blows(seed, **more), len(DECK)))

    assert plan(3, all_trainers=False) == plan(3, all_trainers=False) != plan(4, all_trainers=False)
    assert sorted((b.act, b.target) for b in plan(3, all_trainers=False)) == sorted(DECK)
    more = list(itertools.islice(blows(3, all_trainers=True), 2 * (len(DECK) + 1)))
    assert [(b.act, b.target) for b in more].count(ALL_TRAINERS) == 2


def test_whole_records_have_no_complaints(run):
    write(run, WHOLE)
    assert complaints(run) == []


@pytest.mark.parametrize(
    ("name", "entries", "complaint"),
    [
        ("b", [issued(0, 13)], "issued twice"),
        ("b", [delivered(0)], "had ended as trained"),
        ("b", [issued(5, 13)], "has not ended"),
        ("b", [issued(5, 13), trained(B, 2, 5)], "never delivered"),
        ("b", [{"is": "Ended", "outcome": "lost", "ids": [7], "why": ""}], "never issued"),
        ("a", [issued(5, 12), delivered(5), trained(B, 1, 5)], "prompt (0, 12) trained twice"),
        ("a", [committed(B, 1, b={0: 99})], "differ about what b trained"),
        ("a", [committed(B, 1, b={0: 12}, c={3: 10})], "prompt (0, 10) trained twice"),
    ],
)
def test_spoiled_records_are_found(run, name, entries, complaint):
    write(run, WHOLE | {name: WHOLE[name] + entries})
    assert complaint in "\n".join(complaints(run))


def test_a_step_that_nobody_made_is_found(run):
    write(run, {"a": WHOLE["a"]})
    assert complaints(run) == ["step 1 of the final lineage was made by nobody"]


def test_a_summary_that_does_not_close_is_found(run):
    write(run, WHOLE, closed=False)
    assert len(complaints(run)) == 1


def test_what_was_trained_on_weights_that_were_given_up_does_not_count_twice(run):
    fork = [descends(*ONE[:1], [[3, "aa"], 1]), issued(5, 12), delivered(5), trained([3, "aa"], 1, 5)]
    write(run, WHOLE | {"a": WHOLE["a"] + fork, "b": [*WHOLE["b"], descends(*ONE, [[4, "bb"], 2])]})
    assert final(run.books()) == [((1, "aa"), 0), ((2, "bb"), 1), ((4, "bb"), 2)]
    assert complaints(run) == []


@pytest.mark.parametrize(("fork_groups", "wins"), [(1, True), (3, False)])
def test_of_two_lineages_the_one_with_more_groups_must_win(run, fork_groups, wins):
    term = [3, "aa"]
    row = {id: 20 + id for id in range(fork_groups)}
    fork = [descends(ONE[0], [term, 1]), committed(term, 1, a=row)]
    on_b = [committed(B, 2, b={1: 13}), descends(*ONE, [[4, "bb"], 3])]
    write(run, WHOLE | {"a": WHOLE["a"] + fork, "b": WHOLE["b"] + on_b})
    logs = run.path / "logs"
    logs.mkdir()
    assert more_groups_won(run.books(), logs).complaints[-1] == "nobody has said that it was left behind"
    (logs / "a.log").write_text("left behind at step 2\n")
    assert (more_groups_won(run.books(), logs).complaints == []) == wins


def metrics(run, name, *rows):
    (run.path / "metrics").mkdir(exist_ok=True)
    lines = [json.dumps({"time": i, "time/step_s": 1.0, **row}) + "\n" for i, row in enumerate(rows)]
    (run.path / "metrics" / f"{name}.jsonl").write_text("".join(lines))


def test_lag_rewards_and_weights_are_compared(run):
    rows = [{"step": s, "term": 1.0, "state_digest": 7.0 + s, "lag_highest": 1.0, "reward": s / 9} for s in (1, 2)]
    metrics(run, "trainer-0", *rows)
    metrics(run, "trainer-1", *rows)
    assert checks.lag(run, 1).complaints == checks.same_weights(run, at_least=2).complaints == []
    assert checks.lag(run, 0).complaints
    assert checks.same_weights(run, at_least=3).complaints
    metrics(run, "trainer-1", rows[0], rows[1] | {"state_digest": 1.0})
    assert checks.same_weights(run, at_least=2).complaints == ["step 2 of term 1: 2 digests"]
    assert checks.reward_rises(run).complaints, "the same ten steps are its first and its last"


@pytest.mark.skipif(not checks.SHARED_MEMORY.is_dir(), reason="no shared memory in files here")
def test_shared_memory_is_left_behind_when_no_process_has_it():
    before = checks.shared_memory()
    path = checks.SHARED_MEMORY / f"chaos-{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE):
            os.close(descriptor)
            assert path.name not in checks.unowned(checks.shared_memory() - before)
        assert path.name in checks.unowned(checks.shared_memory() - before)
    finally:
        path.unlink()
