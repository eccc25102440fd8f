"""Timelines of several peers on one clock, and the trace made of them."""

import json
import random

import pytest

from roles.timeline import read
from roles.trace import write_trace
from tests.traces import malformed, overlapping

PEERS = {"trainer-a": "trainer", "trainer-b": "trainer", "rollout-c": "rollout", "rollout-d": "rollout"}
CLOCKS = {"trainer-a": 0.0, "trainer-b": 7.0, "rollout-c": -3.0, "rollout-d": 0.0}  # how far each is ahead
BEGAN = 1_800_000_000.0


def make(run, *, orders, clocks=CLOCKS, on_the_way_s=0.002, seed=1):
    """A run of which the true times are known: ``orders`` of (trainer, rollout), a second apart."""
    rng = random.Random(seed)
    rows = {p: [{"peer": p, "id": p, "role": role, "host": p, "time": BEGAN + clocks[p]}] for p, role in PEERS.items()}

    def add(peer, row, began, ended):
        rows[peer].append(row | {"at": BEGAN + began + clocks[peer], "s": ended - began})

    for n, (trainer, rollout) in enumerate(orders):
        begun = n + rng.uniform(0.2, 1.0) * on_the_way_s
        done = begun + 0.5
        of = {"lane": "credits", "credit": n, "trainer": trainer, "version": "v0@1"}
        add(rollout, {"span": "generate", **of}, begun, done - 0.1)
        add(rollout, {"span": "score", **of}, done - 0.1, done)
        add(trainer, {"credit": n, "to": rollout}, n, done + rng.uniform(0.2, 1.0) * on_the_way_s)
    (run / "spans").mkdir(parents=True)
    for peer, lines in rows.items():
        (run / "spans" / f"{peer}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_clocks_of_all_hosts_are_found_within_the_error_that_is_stated(tmp_path):
    orders = [("trainer-a", "rollout-c"), ("trainer-a", "rollout-d"), ("trainer-b", "rollout-c")] * 20
    make(tmp_path, orders=orders)
    found = {p.peer: p for p in read(tmp_path)}
    for peer, ahead in CLOCKS.items():
        assert found[peer].error < 0.004
        assert abs(found[peer].offset + ahead) <= found[peer].error
    assert found["trainer-b"].error > found["rollout-c"].error > 0, "trainer-b is known by rollout-c only"
    assert found["rollout-d"].offset == 0.0, "a clock that may be right is left alone"
    trace = json.loads(write_trace(tmp_path)[0].read_text())
    scored = [e["ts"] for e in trace["traceEvents"] if e["name"] == "score"]
    assert sorted(scored) == pytest.approx([400_000 + n * 1_000_000 for n in range(60)], abs=6_000)


def test_of_a_peer_that_shares_no_credit_the_clock_is_unknown(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-c")])
    found = {p.peer: p.error for p in read(tmp_path)}
    assert found["trainer-a"] == 0.0
    assert found["rollout-c"] is not None
    assert found["trainer-b"] is found["rollout-d"] is None


def test_a_process_that_shares_no_credit_has_the_clock_of_its_host(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-c")])
    path = tmp_path / "spans" / "rollout-c.jsonl"
    again = {"peer": "rollout-c", "id": "another process", "role": "rollout", "host": "rollout-c", "time": BEGAN + 97}
    path.write_text(path.read_text() + json.dumps(again) + "\n")
    first, second = [p for p in read(tmp_path) if p.peer == "rollout-c"]
    assert second.offset == first.offset == pytest.approx(3.0, abs=0.01)
    assert second.life[0] == pytest.approx(BEGAN + 100, abs=0.01)


def test_a_clock_that_was_set_on_the_way_is_said_to_be_uncertain(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-c")] * 10)
    path = tmp_path / "spans" / "rollout-c.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    late = [row | {"at": row["at"] + 2.0} if row.get("credit", 0) >= 5 else row for row in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in late))
    rollout = next(p for p in read(tmp_path) if p.peer == "rollout-c")
    assert rollout.offset == pytest.approx(2.0, abs=0.01)
    assert rollout.error == pytest.approx(1.0, abs=0.01)


def test_groups_that_are_made_at_once_lie_in_rows_of_their_own(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-d")] * 8)
    path = tmp_path / "spans" / "rollout-d.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for row in lines[1:]:
        row["at"] -= 0.88 * row["credit"]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    events = json.loads(write_trace(tmp_path)[0].read_text())["traceEvents"]
    made = [e for e in events if e["name"] in ("generate", "score")]
    assert len(made) == 16
    assert len({e["tid"] for e in made}) == 5, "half a second each, begun 0.12 s apart"
    assert overlapping(events) == malformed(events) == []


def test_what_is_no_row_is_passed_over(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-c")])
    with open(tmp_path / "spans" / "rollout-c.jsonl", "a") as file:
        file.write('[]\n{"span": 3, "at": 1.0, "s": 1.0}\n{"span": "x", "at": 1.0, "s": -1.0}\n{"span": "genera')
    assert [row["span"] for p in read(tmp_path) for row in p.spans] == ["generate", "score"]


def test_arrows_lead_from_the_broadcast_of_a_version_to_where_it_is_taken_over(tmp_path):
    make(tmp_path, orders=[("trainer-a", "rollout-d")])
    for peer, name, at in (("trainer-a", "broadcast", 1.0), ("rollout-d", "apply", 1.5)):
        row = {"span": name, "lane": "weights", "version": "v1@1", "at": BEGAN + at, "s": 0.1}
        with open(tmp_path / "spans" / f"{peer}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    events = json.loads(write_trace(tmp_path)[0].read_text())["traceEvents"]
    start, end = [next(e for e in events if e["ph"] == ph) for ph in "sf"]
    assert end["ts"] - start["ts"] == pytest.approx(500_000, abs=2)
    assert malformed(events) == []
    assert (start["id"], start["name"], end["bp"]) == (end["id"], "v1@1", "e")


def test_without_spans_it_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="holds no spans"):
        write_trace(tmp_path)
    with pytest.raises(ValueError, match="is not a run directory"):
        write_trace(tmp_path / "nothing")
