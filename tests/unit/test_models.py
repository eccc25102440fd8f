"""The digest by which peers compare the models that they were started with."""

import json
from pathlib import Path

import pytest

from mesh import config
from mesh.config import agreed_digests
from roles.models import files_digest
from roles.starter import Recipe, ensure

TINY = Recipe(steps=1, batch=2, length=3, hidden=32, feed_forward=64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ensure(TINY, 0, tmp_path)


def digest(path: Path) -> str:
    return files_digest(config.convert({"model": {"path": str(path)}}))


def edited(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_a_library_says_of_itself_makes_no_other_model(model: Path) -> None:
    before = digest(model)
    edited(model / "config.json", transformers_version="0.0.1")
    assert digest(model) == before
    assert len(before) == 16


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"rope_theta": 5.0}),
        ("generation_config.json", {"eos_token_id": 7}),
        ("tokenizer.json", {"version": "2.0"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
    ],
)
def test_another_configuration_or_tokenizer_is_another_model(model: Path, file: str, changes: dict) -> None:
    before = digest(model)
    edited(model / file, **changes)
    assert digest(model) != before


def test_a_chat_template_in_a_file_of_its_own_belongs_to_the_model(model: Path) -> None:
    before = digest(model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert digest(model) != before


def test_files_are_compared_beside_the_settings() -> None:
    settings = config.convert({"model": {"path": "somewhere"}})
    assert agreed_digests(settings, model="a" * 16, data="b" * 32) == agreed_digests(settings) | {
        "model.path": "a" * 16,
        "task.data": "b" * 16,
    }
