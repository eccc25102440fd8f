"""The main job: one trainer and two rollouts learn, and what a run leaves behind. One run, looked at from all sides."""

import json
import struct
from collections import Counter

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh import config as settings
from roles.report import write_report
from roles.trace import write_trace
from roles.trainer import ledger
from tests.traces import malformed, overlapping

FIELDS = {
    "steps", "wall_s", "accuracy_before", "accuracy_after", "versions_published", "versions_proved",
    "max_lag_allowed", "max_lag_trained", "tokens_per_s", "trainer_wait_share", "ledger", "ledger_tokens",
}  # fmt: skip
GROUPS = {"issued", "trained", "superseded", "failed", "lost", "in_flight"}
TOKENS = {"delivered", "trained", "masked", "superseded", "failed", "held"}


def test_the_mesh_learns(finished):
    before, after = finished.evaluations()
    assert (before["step"], after["step"]) == (0, 60)
    assert before["eval_samples"] == after["eval_samples"] == 128
    assert after["eval_low"] > before["eval_high"], "the 95% intervals before and after overlap"
    summary = finished.summary()
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (before["eval_accuracy"], after["eval_accuracy"])


def test_the_summary_says_what_was_done(finished):
    summary = finished.summary()
    assert summary.keys() >= FIELDS
    assert summary["steps"] == 60
    assert summary["max_lag_allowed"] == 2
    assert 0 <= summary["max_lag_trained"] <= 2
    assert 1 < summary["versions_proved"] <= summary["versions_published"] <= 61
    assert summary["tokens_per_s"] > 0
    assert 0 <= summary["trainer_wait_share"] <= 1
    assert summary["wall_s"] > 0


def test_the_ledger_closes_and_replays_to_the_summary(finished):
    summary = finished.summary()
    groups, tokens = summary["ledger"], summary["ledger_tokens"]
    assert groups.keys() == GROUPS
    assert tokens.keys() == TOKENS
    assert groups["trained"] == 60 * 8
    assert groups["in_flight"] == tokens["held"] == 0
    assert groups["issued"] == sum(groups[name] for name in GROUPS - {"issued"})
    assert tokens["delivered"] == sum(tokens[name] for name in TOKENS - {"delivered"})
    replayed = ledger.replay((finished.run / "ledger").glob("*.jsonl"))
    assert replayed.closes()
    assert replayed.groups == groups
    rows = finished.rows()
    assert sum(row["groups"] for row in rows) == groups["trained"]
    assert sum(row["tokens_trained"] for row in rows) == tokens["trained"]
    assert sum(row["tokens_masked"] for row in rows) == tokens["masked"]


def test_the_trace_shows_what_every_peer_did(finished):
    path, processes = write_trace(finished.run)
    assert sorted(p.role for p in processes) == ["rollout", "rollout", "trainer"]
    assert all(p.offset == 0.0 and p.error < 0.5 for p in processes), "they have one clock"
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert overlapping(spans) == malformed(events) == []
    names = Counter((e["pid"], e["name"]) for e in spans)
    trainer = {"wait for groups", "forward/backward", "optimizer step", "probe", "snapshot", "digest", "broadcast"}
    assert {name for pid, name in names if pid == 1} >= trainer
    assert names[1, "forward/backward"] == names[1, "optimizer step"] == 60
    for pid in (2, 3):
        did = {name for of, name in names if of == pid}
        rollout = {"wait for credit", "generate", "score", "receive", "apply", "first token"}
        assert did - {"wait for weights"} == rollout
    groups = finished.summary()["ledger"]
    assert names[2, "score"] + names[3, "score"] >= groups["trained"]


def test_the_report_says_what_the_summary_says(finished):
    text = write_report(finished.run).read_text()
    summary = finished.summary()
    assert f"rose from {summary['accuracy_before']:.2f} to {summary['accuracy_after']:.2f}" in text
    assert f"trained {summary['ledger']['trained']:,}" in text
    assert "3 peers; none died, " in text
    assert "Not to be seen here" not in text


def test_no_step_trained_an_older_group_than_allowed(finished):
    rows = finished.rows()
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert max(row["lag_max"] for row in rows) == finished.summary()["max_lag_trained"] <= 2


def test_the_trained_model_and_its_checkpoints_load_with_transformers(finished):
    saved = sorted((finished.run / "checkpoints").iterdir(), key=lambda p: int(p.name.split("-")[0]))
    assert [path.name.split("-")[0] for path in saved] == ["50", "60"]
    final = {}
    for path in (*saved, finished.run / "model"):
        model = AutoModelForCausalLM.from_pretrained(path)
        final[path.name] = model.state_dict()
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer("314=", return_tensors="pt")["input_ids"]
        assert len(tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=3)[0, -3:])) == 3
    last = final[saved[-1].name]
    assert all(last[name].equal(tensor) for name, tensor in final["model"].items())
    assert not all(last[name].equal(tensor) for name, tensor in final[saved[0].name].items())


def test_the_run_directory_is_complete(finished):
    run = finished.run
    assert settings.load(run / "config.toml").run.steps == 60
    png = (run / "reward.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) > (100, 100)
    peers = {path.stem.partition("@")[0] for path in (run / "metrics").glob("*.jsonl")}
    assert peers == {"trainer", "rollout-0", "rollout-1"}
    assert {p.stem.partition("@")[0] for p in (run / "logs").glob("*.log")} == peers | {"mesh-up"}
    assert list((run / "metrics" / "tensorboard").rglob("events.out.tfevents.*"))
    assert (run / "secret").stat().st_mode & 0o777 == 0o600
    assert list((run / "rendezvous").iterdir()) == []


def test_what_a_run_costs_is_split_in_its_rows(finished):
    for row in finished.rows():
        parts = [row[f"time/{name}_s"] for name in ("wait", "learn", "optimizer", "probe", "snapshot")]
        assert min(parts) >= 0
        assert sum(parts) <= row["time/step_s"]


@pytest.mark.parametrize("command", ["up", "trainer"])
def test_a_finished_run_is_not_begun_again(finished, command):
    process = finished.up() if command == "up" else finished.start("trainer")
    assert process.ends() == 1
    assert str(finished.run) in process.error
    assert "finished" in process.error
    assert "--resume" in process.error
    assert "--run" in process.error
    finished.leaves_nothing_running()
