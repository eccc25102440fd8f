import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from mesh import config

MINIMAL = '[model]\npath = "starter:sort"\n'


def written(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(text)
    return path


def test_a_file_needs_only_a_model_and_gives_the_run_its_name(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path))
    assert loaded.run.name == "first"
    assert loaded.trainer == config.Trainer()


def test_overrides_take_the_type_of_their_key(tmp_path: Path) -> None:
    sets = ["trainer.max_lag=0", "trainer.learning_rate=3e-6", "task.data=spell", "trainer.mask_truncated=true"]
    loaded = config.load(written(tmp_path), [*sets, "task.options.length=7", 'run.name="x=y"'])
    assert (loaded.trainer.max_lag, loaded.trainer.learning_rate) == (0, 3e-6)
    assert (loaded.task.data, loaded.trainer.mask_truncated) == ("spell", True)
    assert (loaded.task.options, loaded.run.name) == ({"length": 7}, "x=y")


def test_the_settings_printed_are_the_settings_read(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path), ["task.options.length=7", "run.steps=3"])
    assert config.load(written(tmp_path, config.dumps(loaded))) == loaded
    assert tomllib.loads(config.dumps(loaded)) == msgspec.to_builtins(loaded)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[trainer]\nmax_lags = 2", "unknown key trainer.max_lags; did you mean trainer.max_lag"),
        ("[trainr]\nmax_lag = 2", r"unknown section \[trainr\]; did you mean trainer"),
        ("[rollout]\nmax_lag = 2", "unknown key rollout.max_lag; did you mean trainer.max_lag"),
        ("max_lag = 2", r"unknown section \[max_lag\]; did you mean trainer.max_lag"),
        ("[trainer]\nzzz = 2", "unknown key trainer.zzz; known here: group_size, "),
        ('[trainer]\nlearning_rate = "1e-6"', "Expected `float`, got `str` - at `trainer.learning_rate`"),
        ("[trainer]\nmax_lag = 2.5", "Expected `int`, got `float` - at `trainer.max_lag`"),
        ('[mesh]\npreset = "fast"', "Invalid enum value 'fast' - at `mesh.preset`"),
        ("trainer = 3", r"\[trainer\] is a section, not a value"),
        ("[trainer]\ngroup_size = 1", "trainer.group_size = 1 must be at least 2"),
        ("[trainer]\nmax_lag = -1", "trainer.max_lag = -1 must be between"),
        ("[rollout]\ntemperature = 0", "rollout.temperature = 0.0 must be positive"),
        (
            "[rollout]\ntop_p = 0.9",
            "rollout.top_p = 0.9 samples from another distribution .* rollout.accept_bias = true",
        ),
        ("[run]\nsteps = 0", "run.steps = 0 must be at least 1"),
        ("[run", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, f"{text}\n\n{MINIMAL}" if text[0] != "[" else f"{MINIMAL}\n{text}\n")
    with pytest.raises(ValueError, match=says) as error:
        config.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


SECONDS = [
    f"{section.name}.{setting.name}"
    for section in msgspec.structs.fields(config.Config)
    for setting in msgspec.structs.fields(section.type)
    if setting.name.endswith("_s")
]


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        *((f"{key}={value}", "at least 1") for key in (
            "run.steps", "task.train_prompts", "rollout.max_new_tokens", "rollout.groups_in_flight",
            "rollout.max_batch", "rollout.reward_workers", "trainer.groups_per_step", "trainer.micro_batch_tokens",
            "weights.bucket_mib", "mesh.min_trainers", "mesh.min_rollouts",
        ) for value in (0, -1)),
        *((f"{key}=1", "at least 2") for key in ("trainer.group_size", "weights.probe_tokens")),
        *((f"{key}=-1", "at least 0") for key in (
            "run.seed", "task.seed", "task.heldout_prompts", "rollout.threads", "trainer.threads",
            "trainer.warmup_steps", "trainer.weight_decay", "trainer.max_grad_norm", "trainer.negative_max_drift",
            "trainer.retries", "evaluation.every_steps", "evaluation.temperature", "checkpoint.every_steps",
            "checkpoint.keep", "weights.probe_floor",
        )),
        *((f"trainer.max_lag={value}", "between 0 and 64") for value in (-1, 65)),
        *((f"mesh.port={value}", "between 0 and 65535") for value in (-1, 65536)),
        *((f"trainer.{beta}={value}", "at least 0 and less than 1")
          for beta in ("adam_beta1", "adam_beta2") for value in (-0.1, 1.0)),
        *((f"trainer.wait_target={value}", "more than 0 and less than 1") for value in (0, 1)),
        *((f"{key}={value}", "positive") for key in ("rollout.temperature", "trainer.learning_rate", *SECONDS)
          for value in (0, -1)),
        *((f"{key}={value}", "a finite number")
          for key in ("rollout.temperature", "trainer.learning_rate", "trainer.max_grad_norm", *SECONDS)
          for value in ("inf", "nan")),
        *((f'run.name="{name}"', "the name of a directory") for name in (".hidden", "..", "../up", "a/b", "/abs")),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_named_with_what_is_allowed(tmp_path: Path, override: str, allowed: str) -> None:
    key, value = override.split("=")
    with pytest.raises(ValueError, match=re.escape(f"{key} = ")) as error:
        config.load(written(tmp_path), [override])
    said = str(error.value)
    assert f" must be {allowed}" in said
    assert value.strip('"') in said
    assert "\n" not in said


def test_the_bounds_themselves_are_allowed(tmp_path: Path) -> None:
    allowed = (
        "trainer.max_lag=64", "trainer.max_lag=0", "mesh.port=65535", "trainer.adam_beta1=0", "trainer.max_grad_norm=0",
        "evaluation.temperature=0", "checkpoint.keep=0", "trainer.retries=0", "weights.probe_tokens=2",
        'run.name="first try.v2"',
    )  # fmt: skip
    for override in allowed:
        config.load(written(tmp_path), [override])


def test_a_file_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path is missing"):
        config.load(written(tmp_path, ""))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.max_lag", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("trainer.max_lags=1", "did you mean trainer.max_lag"),
        ("model.path.x=1", "path is a value, not a section"),
        ("trainer.max_lag=two", "Expected `int`, got `str`"),
    ],
)
def test_a_mistaken_override_is_named(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config.load(written(tmp_path), [override])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml does not exist"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        config.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ValueError, match="cannot be read"):
        config.load(tmp_path / "latin.toml")


def test_peers_agree_on_what_matters_and_differ_in_what_does_not(tmp_path: Path) -> None:
    def digests(*overrides: str) -> dict[str, str]:
        return config.agreed_digests(config.load(written(tmp_path), list(overrides)))

    same = digests()
    for free in ("trainer.threads=7", "rollout.threads=7", "rollout.groups_in_flight=1", "mesh.port=1", "run.steps=9"):
        assert digests(free) == same, free
    for shared, section in {
        "trainer.max_lag=0": "trainer",
        "rollout.temperature=0.5": "rollout",
        "model.path=other": "model",
        "task.seed=1": "task",
        "evaluation.temperature=0.5": "evaluation",
    }.items():
        changed = digests(shared)
        assert {name for name in same if changed[name] != same[name]} == {section}, shared


def test_every_setting_is_explained_by_its_name_or_a_comment() -> None:
    """Sections and keys are the documentation: none may be dropped from the printed settings."""
    printed = tomllib.loads(config.dumps(config.Config(model=config.Model(path="x"))))
    for section in msgspec.structs.fields(config.Config):
        assert set(printed[section.name]) == {f.name for f in msgspec.structs.fields(section.type)}
