"""What the doctor concludes from what peers say, and what it finds on a machine."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mesh import doctor
from mesh.config import convert
from mesh.doctor import Finding, Seen
from mesh.identity import PeerCard
from mesh.version import Ballot, Version
from transport.messages import Status

TERM = Ballot(1, "aa")


def peer(name, role="rollout", *, state="sampling", version=9, term=TERM, silent_s=0.1, weights="", **figures):
    card = PeerCard(id=name, name=name, role=role, host="h", address="tcp://h:1", bulk_address="tcp://h:2")
    at = Version(term, version) if version is not None else None
    figures = {name.replace("__", "/"): value for name, value in figures.items()}
    status = Status(seq=0, state=state, version=at, figures=figures, texts={"weights": weights})
    return Seen(card, [status], silent_s)


def trainer(name="t", **more):
    return peer(name, "trainer", **{"state": "training", "time__step_s": 1.0, "time__learn_s": 0.9} | more)


def complaints(*peers):
    return [f for f in doctor.mesh(peers, max_lag=2) if f.level in ("warning", "wrong")]


def test_a_mesh_in_which_all_is_well():
    told = "9@1.aa=11223344"
    assert (
        complaints(trainer(weights=told), peer("r0", weights=told, probe_difference=1e-7), peer("r1", version=8)) == []
    )
    seen = {f.what: f.seen for f in doctor.mesh([trainer(weights=told), peer("r0", weights=told)], max_lag=2)}
    assert seen["weights"] == "equal digests at 2 peers, of 1 versions"
    assert seen["a step's time"] == "learn 90%"


@pytest.mark.parametrize(
    ("peers", "level", "what", "seen"),
    [
        ([trainer()], "wrong", "peers", "1 trainers, 0 rollouts"),
        ([trainer(), peer("r", silent_s=7.0)], "wrong", "r", "has not answered for 7 s"),
        ([trainer(), peer("r", state="unproven: too far", version=None)], "wrong", "r", "unproven: too far"),
        ([trainer(), peer("r", version=None)], "warning", "r", "has no version yet"),
        ([trainer(), peer("r", version=4)], "warning", "r", "5 behind"),
        ([trainer(), trainer("u", term=Ballot(2, "bb")), peer("r")], "wrong", "trainers", "different terms"),
        ([trainer(weights="9@1.aa=11"), peer("r", weights="9@1.aa=12")], "wrong", "weights of 9@1.aa", "12 at r"),
        ([trainer(time__wait_s=0.85), peer("r")], "warning", "bottleneck", "85%"),
        ([trainer(time__snapshot_s=0.04, time__probe_s=0.03), peer("r")], "warning", "weights", "7%"),
        ([trainer(time__sync_s=0.2), peer("r")], "warning", "collectives", "20%"),
        (
            [trainer(), *(peer(n, tokens_per_s=v) for n, v in (("a", 100.0), ("b", 90.0), ("c", 30.0)))],
            "warning", "c", "samples 30 tokens/s",
        ),
        ([trainer(host_memory_used=0.95), peer("r")], "warning", "h", "95%"),
    ],
)  # fmt: skip
def test_each_fault_is_found_alone_and_says_what_to_change(peers, level, what, seen):
    [found] = complaints(*peers)
    assert (found.level, found.what) == (level, what)
    assert seen in found.seen
    assert found.change


def test_a_death_is_told_once_whoever_saw_it():
    import msgspec

    def saw(p, at, text):
        return Seen(p.card, [msgspec.structs.replace(p.last, events=[(at, text), (at + 1, "s joined")])], 0.1)

    seen = [
        saw(trainer(), 1000.0, "! r died: did not answer t, s"),
        saw(peer("s"), 1000.2, "! r died: did not answer s, t"),
    ]
    [found] = complaints(*seen)
    assert (found.level, found.what) == ("warning", "death")
    assert found.seen.startswith("r died: did not answer t, s at ")


def test_the_exit_code_is_that_of_the_worst(capsys):
    assert doctor.tell([Finding("ok", "a", "b"), Finding("warning", "c", "d", "e")]) == 0
    assert doctor.tell([Finding("wrong", "a", "b", "do this")]) == 1
    assert "wrong   a: b; do this" in capsys.readouterr().out


def test_a_machine_is_looked_at_without_loading_torch(tmp_path):
    code = "import sys; from mesh.doctor import machine; from pathlib import Path\n"
    code += f"found = machine(Path({str(tmp_path)!r}), None)\n"
    code += "assert 'torch' not in sys.modules\nprint(*(f.what for f in found), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {"torch", "vLLM", "/dev/shm", "open files", "network", "run directory", "clock"} <= set(
        done.stdout.split("\n")
    )


def test_what_is_wrong_with_a_machine(tmp_path, monkeypatch):
    config = convert({"model": {"path": str(tmp_path)}})
    found = {f.what: f for f in doctor.machine(tmp_path, config)}
    assert found["model"].level == "wrong"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert doctor._files().level == "warning"
    assert doctor._disk(Path("/proc/nowhere")).level == "wrong"
    with doctor.socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        taken = doctor._port(s.getsockname()[1])
    assert (taken.level, taken.seen) == ("wrong", "Address already in use")
