import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from made_groups import LINEAGE, NOW, TERM, completion, group, policy, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.version import Ballot, Version
from roles.trainer import checkpoint
from roles.trainer.batch import samples_of
from roles.trainer.checkpoint import State, newest, restore, restore_found, save, save_model
from roles.trainer.losses import DriftThreshold


def train(p, steps, first=0):
    for i in range(first, first + steps):
        rng = np.random.default_rng(i)
        made = group(completion(rng, 1.0), completion(rng, 0.0, sampled=(3,)))
        p.step(p.accumulate(samples_of([made], LINEAGE, NOW), DriftThreshold(9)).tokens)


def state(number, *, counter=1, trained=None, **more):
    version = Version(Ballot(counter, TERM.convener), number)
    return State(version, LINEAGE, groups_trained=number * 8 if trained is None else trained, **more)


def bits(p):
    tensors = {**p.named_state(), **checkpoint.optimizer_tensors(p)}
    return {name: t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path, dtype, tied):
    config = settings(weight_decay=0.1, warmup_steps=6)
    whole = policy(dtype, tied=tied, config=config)
    train(whole, 3)
    save(tmp_path, whole, state(3))
    at_3, draw = bits(whole), (torch.rand(4), np.random.rand(4))
    train(whole, 3, first=3)

    resumed = policy(dtype, tied=tied, seed=9, config=config)
    found = newest(tmp_path)
    torch.manual_seed(99)
    np.random.seed(99)
    restore(found.path, resumed, found.state)
    assert bits(resumed) == at_3
    assert torch.equal(torch.rand(4), draw[0])
    assert np.array_equal(np.random.rand(4), draw[1])
    train(resumed, 3, first=resumed.steps)
    assert bits(resumed) == bits(whole)


def test_everything_in_the_state_comes_back(tmp_path):
    p = policy()
    p.skipped = 2
    before = state(4, data={"epoch": 1, "open": [3, 5]}, settings={"model": "ab"}, axis={"seconds": 1.5})
    before.threshold = (0.25, 100.0)
    path = save(tmp_path, p, before)
    after = newest(tmp_path).state
    assert path.name == "4-1"
    assert (after.version, after.lineage, after.data) == (before.version, before.lineage, before.data)
    assert (after.settings, after.axis, after.threshold) == (before.settings, before.axis, before.threshold)
    assert (after.steps, after.skipped) == (0, 2)


def test_a_checkpoint_loads_as_a_transformers_model_with_its_tokenizer(tmp_path):
    p = policy()
    train(p, 1)
    for path in (save(tmp_path / "checkpoints", p, state(1)), save_model(tmp_path / "model", p)):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert all(torch.equal(model.state_dict()[n], t) for n, t in p.named_state().items())
        assert AutoTokenizer.from_pretrained(path)("12=")["input_ids"] == p.tokenizer("12=")["input_ids"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        paths = save(tmp_path / "checkpoints", policy(), state(1)), save_model(tmp_path / "model", policy())
    finally:
        os.umask(before)
    modes = {f"{path.name}/{f.name}": oct(f.stat().st_mode & 0o777) for path in paths for f in path.iterdir()}
    assert modes == dict.fromkeys(modes, oct(mode))
    assert {"1-1/model.safetensors", "1-1/optimizer.safetensors", "model/model.safetensors"} <= set(modes)


def test_the_final_model_replaces_an_older_one(tmp_path):
    p = policy()
    save_model(tmp_path / "model", p)
    train(p, 1)
    save_model(tmp_path / "model", p)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, p.model.lm_head.weight)
    assert os.listdir(tmp_path) == ["model"]


def test_only_the_newest_are_kept(tmp_path):
    p = policy()
    for number in (2, 10, 9, 11):
        save(tmp_path, p, state(number), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["10-1", "11-1"]


def test_the_one_just_written_is_never_pruned(tmp_path):
    p = policy()
    save(tmp_path, p, state(10, trained=500), keep=1)
    save(tmp_path, p, state(8, counter=5, trained=400), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["10-1", "8-5"]


def test_resume_prefers_more_groups_trained_then_the_number_then_the_term(tmp_path):
    p = policy()
    for number, counter, trained in ((7, 3, 50), (9, 1, 40), (7, 2, 50), (6, 9, 50)):
        save(tmp_path, p, state(number, counter=counter, trained=trained), keep=0)
    assert newest(tmp_path).path.name == "7-3"


def damage_cut(path):
    with open(path / "optimizer.safetensors", "r+b") as f:
        f.truncate(100)


def damage_flip(path):
    with open(path / "model.safetensors", "r+b") as f:
        f.seek(-1, os.SEEK_END)
        byte = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))


def damage_manifest(path):
    (path / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_cut, "optimizer.safetensors has 100 bytes"),
        (damage_flip, "content of model.safetensors"),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda p: (p / "manifest.json").unlink(), "not saved to its end"),
        (damage_manifest, "manifest.json cannot be used"),
        (lambda p: (p / "state.json").write_text("{"), "state.json cannot be read"),
        (lambda p: (p / "state.json").unlink(), "state.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name_for_the_one_before(tmp_path, damage, reason):
    p = policy()
    save(tmp_path, p, state(1))
    train(p, 1)
    damage(save(tmp_path, p, state(2)))
    found = newest(tmp_path)
    assert found.path.name == "1-1"
    assert len(found.skipped) == 1
    assert reason in found.skipped[0]
    assert "2-1" in found.skipped[0]


def test_no_checkpoint_is_no_error(tmp_path):
    assert newest(tmp_path / "none").path is None
    (tmp_path / ".saving-3-1-host-9").mkdir()
    assert newest(tmp_path) == checkpoint.Found(None, None, [])


def test_a_damaged_checkpoint_of_the_same_version_is_written_again_and_a_sound_one_is_left(tmp_path):
    p = policy()
    path = save(tmp_path, p, state(1))
    inode = path.stat().st_ino
    assert save(tmp_path, p, state(1)).stat().st_ino == inode
    damage_flip(path)
    save(tmp_path, p, state(1))
    assert checkpoint.problem(path) == ""
    assert os.listdir(tmp_path) == ["1-1"]


@pytest.mark.parametrize("file", ["model", "optimizer.safetensors", "manifest.json"])
def test_a_full_disk_leaves_the_earlier_ones_and_no_rubbish(tmp_path, monkeypatch, file):
    p = policy()
    save(tmp_path, p, state(1))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_args, **_kwargs):
        raise full

    if file == "model":
        monkeypatch.setattr(p.model, "save_pretrained", refuse)
    elif file == "manifest.json":
        monkeypatch.setattr(checkpoint, "_sync", refuse)
    else:
        monkeypatch.setattr(checkpoint, "save_file", refuse)
    with pytest.raises(OSError, match=r"2-1 was not written \(No space left.*earlier ones are untouched") as caught:
        save(tmp_path, p, state(2))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["1-1"]
    assert newest(tmp_path).path.name == "1-1"


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="was not written"):
        save(tmp_path / "file" / "checkpoints", policy(), state(1))


def test_what_a_dead_writer_left_is_cleared_in_time(tmp_path):
    old, young = tmp_path / ".saving-1-1-host-9", tmp_path / ".saving-2-1-host-9"
    old.mkdir()
    young.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    save(tmp_path, policy(), state(3))
    assert sorted(os.listdir(tmp_path)) == [".saving-2-1-host-9", "3-1"]


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(tmp_path):
    path = save(tmp_path, policy(tied=True), state(1))
    with pytest.raises(ValueError, match=r"has no tensor lm_head\.weight"):
        restore(path, policy(tied=False), newest(tmp_path).state)
    with pytest.raises(ValueError, match=r"is torch\.float32 .*model\.dtype"):
        restore(path, policy(torch.bfloat16), newest(tmp_path).state)


def test_buffers_are_saved_and_restored(tmp_path):
    p, q = policy(), policy(seed=3)
    p.model.register_buffer("bias", torch.tensor([1.5, 2.5]))
    q.model.register_buffer("bias", torch.zeros(2))
    restore(save(tmp_path, p, state(1)), q, newest(tmp_path).state)
    assert torch.equal(q.model.bias, p.model.bias)


WRITER = """
import sys, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from made_groups import policy
from test_checkpoint import save, state, train
p = policy()
print("ready", flush=True)
for number in range(1, 10_000):
    train(p, 1)
    save(sys.argv[1], p, state(number), keep=3)
"""


def test_a_writer_killed_by_the_system_leaves_a_checkpoint_that_resumes(tmp_path):
    run = tmp_path / "run"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run), os.path.dirname(__file__)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while newest(run).path is None:
            assert time.monotonic() < deadline
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
    found = newest(run)
    assert found.skipped == []
    p = policy(seed=5)
    restore(found.path, p, found.state)
    assert p.steps == found.state.version.number


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it, and nothing is cleaned up (rmtree is switched off with it)."""


@pytest.mark.parametrize("at", range(12))
def test_a_save_that_ends_at_any_of_its_calls_leaves_a_whole_checkpoint(tmp_path, monkeypatch, at):
    p = policy()
    save(tmp_path, p, state(1))
    calls = 0

    def counted(call):
        def wrapped(*args, **kwargs):
            nonlocal calls
            if calls == at:
                monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
                calls += 1
                raise Killed
            calls += 1
            return call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(checkpoint, "_sync", counted(checkpoint._sync))
    monkeypatch.setattr(checkpoint, "save_file", counted(checkpoint.save_file))
    monkeypatch.setattr(checkpoint.Path, "rename", counted(checkpoint.Path.rename))
    with contextlib.suppress(Killed):
        save(tmp_path, p, state(2))
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found.path.name in ("1-1", "2-1")
    assert found.skipped == []
    assert checkpoint.problem(save(tmp_path, p, state(2))) == ""
    assert newest(tmp_path).path.name == "2-1"


def test_the_files_are_json_and_safetensors_only(tmp_path):
    path = save(tmp_path, policy(), state(1))
    assert {f.suffix for f in path.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == {
        f.name for f in path.iterdir() if f.name != "manifest.json"
    }


def test_a_checkpoint_that_a_living_trainer_deletes_is_followed_by_its_newer_one(tmp_path):
    p = policy()
    train(p, 1)
    save(tmp_path, p, state(1))
    found = newest(tmp_path)
    train(p, 1, first=1)
    save(tmp_path, p, state(2), keep=1)
    late = policy(seed=9)
    assert restore_found(found, late).state.version.number == 2
    assert bits(late) == bits(p)

    shutil.rmtree(newest(tmp_path).path)
    with pytest.raises(ValueError, match=found.path.name):
        restore_found(found, late)


def test_checkpoints_that_are_gone_are_missed(tmp_path):
    root = tmp_path / "checkpoints"
    assert checkpoint.missed(root) == ""
    save(root, policy(), state(3))
    shutil.rmtree(root)
    assert newest(root).state is None
    assert checkpoint.missed(root) == "3-1"
