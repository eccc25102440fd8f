"""Settings: a TOML file plus ``--set key.path=value``, as typed Structs. Strict, and readable without torch.

A setting exists because a user would change it; its default carries its reason on the same line.
"""

import difflib
import hashlib
import math
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field


class Run(Struct, forbid_unknown_fields=True):
    name: str = ""  # of the run directory runs/<name>; empty: the settings file's name
    steps: int = 100  # optimizer steps
    seed: int = 0  # of the order of prompts and of sampling


class Model(Struct, forbid_unknown_fields=True):
    path: str = ""  # a directory, a hub id, or starter:sort (made on first use)
    trust_remote_code: bool = False  # code from a model directory runs on load
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the trainer's master weights


class Task(Struct, forbid_unknown_fields=True):
    data: str = "sort"  # sort | reasoning-gym:NAME | FILE.jsonl
    reward: str = ""  # empty: the data's own verifier; exact | math | package.module:function
    rollout: str = ""  # empty: single turn; package.module:function, an async rollout(prompt, sample)
    train_prompts: int = 100_000  # generated tasks: how many; files: at most so many
    heldout_prompts: int = 512  # disjoint from training; accuracy is measured on these
    seed: int = 0  # of the prompts
    system_prompt: str = ""  # put before chat messages
    options: dict[str, Any] = {}  # passed to the data's maker (reasoning-gym settings, sort's length)


class Rollout(Struct, forbid_unknown_fields=True):
    engine: Literal["auto", "transformers", "vllm"] = "auto"  # auto: vllm where it is installed
    temperature: float = 1.0  # 1 samples the policy itself
    top_p: float = 1.0  # below 1 samples are cut to the likeliest tokens, which biases the gradient; vllm
    accept_bias: bool = False  # without it top_p below 1 is refused
    max_new_tokens: int = 256  # per completion
    groups_in_flight: int = 16  # groups one rollout works on at a time
    max_batch: int = 256  # sequences in one forward of the engine
    on_update: Literal["keep", "recompute", "wait", "abort"] = "keep"  # what vllm does with running completions
    vllm: dict[str, Any] = {}  # arguments of vLLM's engine, as its own documentation names them
    reward_timeout_s: float = 10.0  # a verifier that takes longer is killed
    reward_workers: int = 1  # processes that run the verifier
    engine_restarts: int = 2  # within an hour; a rollout whose engine ends once more leaves
    threads: int = 0  # CPU threads of the engine; 0: cores over peers on this machine
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: that of the wire


class Trainer(Struct, forbid_unknown_fields=True):
    group_size: int = 8  # completions of one prompt, compared with each other
    groups_per_step: int = 32  # prompts in one batch, over all trainers
    learning_rate: float = 1e-6
    warmup_steps: int = 5  # the learning rate rises linearly over them, then stays
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0  # a longer gradient is scaled down to it; 0: never
    micro_batch_tokens: int = 8192  # padded tokens in one forward
    divide_by_std: bool = False  # advantage over the group's standard deviation; some runs collapse with it
    correction: Literal["none"] = "none"  # gradient as if samples were fresh
    mask_negatives: Literal["drift", "age", "off"] = "drift"  # which failures newer weights already avoid
    negative_max_drift: float = 0.0  # nat per token; 0: calibrated, max(0.02, 3 x the mean at lag 0)
    mask_truncated: bool = False  # completions cut by max_new_tokens get no gradient
    max_lag: int = 2  # oldest version a sample may start from, in steps; 0 is synchronous training
    wait_target: float = 0.05  # share of a step the trainer may wait before the window of credits grows
    retries: int = 2  # a prompt superseded more often is closed for the epoch as too slow
    credit_deadline_s: float = 600.0  # a credit older than this is revoked and accounted failed
    step_wait_s: float = 10.0  # once one trainer is ready, for the others; then the step is made without their groups
    admit_interval_s: float = 10.0  # between two trainers that join a run: each holds all steps for a moment
    split_wait_s: float = 20.0  # trainers that lost more than half of themselves at once wait so long for the others
    threads: int = 0  # CPU threads; 0: cores over peers on this machine


class Evaluation(Struct, forbid_unknown_fields=True):
    every_steps: int = 25  # 0: only before and after
    temperature: float = 1.0  # 0: greedy


class Checkpoint(Struct, forbid_unknown_fields=True):
    every_steps: int = 50  # 0: only at the end
    keep: int = 2  # the newest; 0: all


class Weights(Struct, forbid_unknown_fields=True):
    wire_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: the master weights'
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: NCCL on GPUs, gloo otherwise; alike for all peers
    transport: Literal["groups", "endpoint"] = "groups"  # endpoint: encrypted, without process groups, slower
    pull_mib_s: float = 256.0  # most that one peer sends to others that catch up
    bucket_mib: int = 16  # one collective operation, one digest
    op_timeout_s: float = 2.0  # of one bucket; a dead member costs at most this
    ready_wait_s: float = 3.0  # for a receiver to take part, then it sits out
    form_timeout_s: float = 10.0  # to build a group
    reform_interval_s: float = 1.0  # the formation is renewed at most this often
    prove_deadline_s: float = 120.0  # nobody proves a version that credits need: stop with a table
    probe_tokens: int = 32  # of the sequence whose log-probabilities are compared
    probe_floor: float = 0.0  # mean absolute nat; 0: 1e-3 where engine and wire are float32, 0.1 otherwise


class Mesh(Struct, forbid_unknown_fields=True):
    rendezvous: str = ""  # tcp://host:port,... or file:///dir; empty: the run directory
    preset: Literal["local", "lan", "wan"] = "lan"  # how fast a dead peer is noticed
    address: str = ""  # to bind and advertise; empty: the one the rendezvous is reached by
    port: int = 0  # of the control socket; 0: any
    join_timeout_s: float = 24.0  # since a peer started, for somebody of a tcp:// rendezvous to answer it
    trainers: int = 1  # of the processes that srun or torchrun starts with --role auto; the others are rollouts
    min_trainers: int = 1  # fewer than this for grace_s: save and leave with exit code 75; a start waits for them too
    min_rollouts: int = 1  # the same for rollouts
    grace_s: float = 300.0  # to wait for replacements: as long as a scheduler takes to start a process again


class Metrics(Struct, forbid_unknown_fields=True):
    tensorboard: bool = True  # files of the trainers, beside metrics/*.jsonl
    prometheus_port: int = 0  # each peer serves its figures there, or at the next free one; 0: none
    prometheus_host: str = "127.0.0.1"  # an address of this machine to serve them at
    wandb: str = ""  # a project of Weights & Biases; empty: none


class Config(Struct, forbid_unknown_fields=True):
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=Task)
    rollout: Rollout = field(default_factory=Rollout)
    trainer: Trainer = field(default_factory=Trainer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    weights: Weights = field(default_factory=Weights)
    mesh: Mesh = field(default_factory=Mesh)
    metrics: Metrics = field(default_factory=Metrics)


AGREED = ("model", "task", "trainer", "evaluation")
"""Sections that all peers of a run must have alike; their digests are compared at first contact."""


def load(path: Path | str, overrides: list[str] | None = None) -> Config:
    """The settings of a TOML file with ``key.path=value`` overrides.

    Raises ValueError, in one line, naming the file, the key and the nearest valid one."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"settings file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"settings file {path} cannot be read: {e}") from None
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"settings file {path} is not valid TOML: {e}") from None
    for text in overrides or []:
        _override(tree, text)
    config = convert(tree, str(path))
    if not config.run.name:
        config.run.name = path.stem
    return config


def convert(tree: dict, where: str = "settings") -> Config:
    """A tree of settings as Config, checked. Raises ValueError naming key and section."""
    _known(tree, Config, where, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        raise ValueError(f"{where}: {str(e).replace('`$.', '`')}") from None
    _check(config, where)
    return config


def _override(tree: dict, text: str) -> None:
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ValueError(f"--set {text}: write it as section.key=value")
    *parents, last = key.strip().split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--set {text}: {part} is a value, not a section")
    try:
        tree[last] = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        tree[last] = value.strip()  # a bare word is a string


def _known(tree: dict, struct: type[Struct], where: str, section: str) -> None:
    fields = {f.name: f.type for f in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            raise ValueError(f"{where}: unknown {_spell(key, section)}{_nearest(key, fields, section)}")
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, Struct):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: [{key}] is a section, not a value")
            _known(value, inner, where, key)


def _spell(key: str, section: str) -> str:
    return f"key {section}.{key}" if section else f"section [{key}]"


def _nearest(key: str, fields: dict, section: str) -> str:
    elsewhere = [f.name for f in msgspec.structs.fields(Config) if key in f.type.__struct_fields__]
    if elsewhere:  # the right key in the wrong place
        return f"; did you mean {elsewhere[0]}.{key}?"
    if close := difflib.get_close_matches(key, fields, n=1, cutoff=0.6):
        return f"; did you mean {section + '.' if section else ''}{close[0]}?"
    return f"; known here: {', '.join(fields)}"


LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("at least 1", lambda v: v >= 1, """run.steps task.train_prompts rollout.max_new_tokens rollout.groups_in_flight
        rollout.max_batch rollout.reward_workers trainer.groups_per_step trainer.micro_batch_tokens
        weights.bucket_mib mesh.trainers mesh.min_trainers mesh.min_rollouts"""),
    ("at least 2", lambda v: v >= 2, "trainer.group_size weights.probe_tokens"),
    ("at least 0", lambda v: v >= 0, """run.seed task.seed task.heldout_prompts rollout.threads
        rollout.engine_restarts trainer.threads
        trainer.warmup_steps trainer.weight_decay trainer.max_grad_norm trainer.negative_max_drift trainer.retries
        evaluation.every_steps evaluation.temperature checkpoint.every_steps checkpoint.keep weights.probe_floor"""),
    ("above 0 and at most 1", lambda v: 0 < v <= 1, "rollout.top_p"),
    ("between 0 and 64", lambda v: 0 <= v <= 64, "trainer.max_lag"),
    ("between 0 and 65535", lambda v: 0 <= v <= 65535, "mesh.port metrics.prometheus_port"),
    ("at least 0 and less than 1", lambda v: 0 <= v < 1, "trainer.adam_beta1 trainer.adam_beta2"),
    ("more than 0 and less than 1", lambda v: 0 < v < 1, "trainer.wait_target"),
    ("positive", lambda v: v > 0, "rollout.temperature trainer.learning_rate weights.pull_mib_s"),
)  # fmt: skip
"""What a number must be, and which settings it holds for. All are finite, and what ends in ``_s`` is positive."""


def _check(c: Config, where: str) -> None:
    def need(ok: bool, key: str, value: Any, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{where}: {key} = {value!r} must be {allowed}")

    if not c.model.path:
        raise ValueError(f"{where}: model.path is missing: a model directory, a hub id, or starter:sort")
    name = c.run.name
    need(not name.startswith(".") and not set(name) & set("/\\\0"), "run.name", name,
         "the name of a directory: without / and \\, not starting with a dot")  # fmt: skip
    for section in msgspec.structs.fields(Config):
        for setting, value in msgspec.structs.asdict(getattr(c, section.name)).items():
            if isinstance(value, float):
                need(math.isfinite(value), f"{section.name}.{setting}", value, "a finite number")
                need(value > 0 or not setting.endswith("_s"), f"{section.name}.{setting}", value, "positive")
    if c.rollout.top_p < 1 and not c.rollout.accept_bias:
        raise ValueError(
            f"{where}: rollout.top_p = {c.rollout.top_p} samples from another distribution than is trained; "
            "leave it at 1, or set rollout.accept_bias = true"
        )
    for allowed, holds, keys in LIMITS:
        for key in keys.split():
            value = operator.attrgetter(key)(c)
            need(holds(value), key, value, allowed)


def dumps(config: Config) -> str:
    """The effective settings as TOML."""
    import tomli_w

    return tomli_w.dumps(msgspec.to_builtins(config))


def annotated(path: Path, overrides: list[str] | None = None) -> str:
    """The effective settings as TOML; a comment behind each that was set says where."""
    import tomli_w

    config = msgspec.to_builtins(load(path, overrides))
    in_file = {f"{s}.{key}" for s, values in tomllib.loads(Path(path).read_text()).items() for key in values}
    given = {text.partition("=")[0].strip() for text in overrides or []}
    lines = []
    for section, values in config.items():
        lines.append(f"[{section}]")
        nested = {key: value for key, value in values.items() if isinstance(value, dict)}
        for key, value in values.items():
            name = f"{section}.{key}"
            if key not in nested:
                where = "--set" if name in given else str(path) if name in in_file else ""
                lines.append(tomli_w.dumps({key: value}).rstrip() + (f"  # {where}" if where else ""))
        lines += [tomli_w.dumps({section: {key: value}}).rstrip() for key, value in nested.items() if value]
        lines.append("")
    return "\n".join(lines)


def agreed_digests(config: Config, *, model: str = "", data: str = "") -> dict[str, str]:
    """A short digest for each section that all peers must have alike, and for how completions are sampled. ``model``
    and ``data`` are digests of the files that model.path and task.data name: at two hosts a path may name others."""
    parts = {name: msgspec.to_builtins(getattr(config, name)) for name in AGREED}
    parts["trainer"] = {k: v for k, v in parts["trainer"].items() if k != "threads"}
    parts["rollout"] = {k: getattr(config.rollout, k) for k in ("temperature", "max_new_tokens")}
    files = {"model.path": model, "task.data": data}
    return {name: _digest(part) for name, part in parts.items()} | {k: v[:16] for k, v in files.items() if v}


def _digest(part: dict) -> str:
    return hashlib.blake2b(msgspec.json.encode(part, order="sorted"), digest_size=8).hexdigest()
