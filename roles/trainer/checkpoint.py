"""Checkpoints: ``checkpoints/<number>-<term counter>/``, complete or not there at all.

One is written under a temporary name, every file synced, and renamed. It holds ``model.safetensors``, ``config.json``
and the tokenizer (transformers loads the directory as a model), ``optimizer.safetensors``, ``state.json``, and, written
last, ``manifest.json`` with the size and digest of every other file: so that ``newest`` can tell a whole one from one
that a full disk or a lost node left behind. Resuming gives the same bits: weights, optimizer, generators of random
numbers.

No pickle: what is loaded here can run no code.
"""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mesh.rundir import write_whole
from mesh.version import Lineage, Version
from roles.trainer.policy import Policy, clean_name, unwrapped

MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer.safetensors"
SCRATCH = ".saving-"
SAVED = "saved"  # beside the checkpoints' directory: the name of the last one, to notice when that directory is gone
STALE_S = 3600.0  # a temporary directory this old has no writer any more


class State(Struct, forbid_unknown_fields=True):
    """What resuming needs beside tensors. ``data`` is the data order's own state (any JSON); ``settings`` the digests
    that peers must agree on; ``axis`` what the curves are drawn over (seconds trained, tokens...); ``threshold`` the
    two numbers of ``DriftThreshold``. ``random`` is filled in by ``save``."""

    version: Version
    lineage: Lineage
    groups_trained: int = 0
    steps: int = 0
    skipped: int = 0
    data: dict[str, Any] = {}
    settings: dict[str, str] = {}
    axis: dict[str, float] = {}
    threshold: tuple[float, float] = (0.0, 0.0)
    random: dict[str, Any] = {}

    @property
    def order(self) -> tuple[int, int, int]:
        """Which of two checkpoints resume prefers: more groups trained, then the higher number, then the later term."""
        return (self.groups_trained, self.version.number, self.version.term.counter)


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, and one line for each that was passed over."""

    path: Path | None
    state: State | None
    skipped: list[str] = field(default_factory=list)


def save(root: Path | str, policy: Policy, state: State, *, keep: int = 2) -> Path:
    """Write a checkpoint under ``root`` and delete all but the ``keep`` newest (0: delete none); returns its directory.

    ``steps``, ``skipped`` and ``random`` of the state are taken from the policy and the global generators. One that is
    there already and valid is left alone: the same version is the same weights. Raises OSError in one line when it
    cannot be written; earlier checkpoints are then untouched. Call it on the thread that owns the policy."""
    root = Path(root)
    state = msgspec.structs.replace(state, steps=policy.steps, skipped=policy.skipped, random=random_state())
    target = root / f"{state.version.number}-{state.version.term.counter}"
    if target.exists() and not problem(target):
        return target

    def fill(directory: Path) -> None:
        _save_model(policy, directory)
        save_file(optimizer_tensors(policy), directory / OPTIMIZER)
        (directory / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))

    _write(target, fill)
    with contextlib.suppress(OSError):  # a help for a person, nothing that resuming needs
        write_whole(root.parent / SAVED, f"{target.name}\n")
    if keep:
        _prune(root, keep, target)
    return target


def save_model(target: Path | str, policy: Policy) -> Path:
    """The trained model alone, loadable by transformers; replaces what is there. Raises OSError as ``save`` does."""
    return _write(Path(target), lambda directory: _save_model(policy, directory))


def newest(root: Path | str) -> Found:
    """The best complete, valid checkpoint under ``root`` by ``State.order``; what was passed over is named and why."""
    root, candidates, skipped = Path(root), [], []
    for path in sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []:
        if path.name.startswith(SCRATCH):
            continue
        try:
            candidates.append((read_state(path), path))
        except ValueError as e:
            skipped.append(str(e))
    for state, path in sorted(candidates, key=lambda c: (c[0].order, c[1].name), reverse=True):
        if reason := problem(path):
            skipped.append(f"checkpoint {path} is passed over: {reason}")
            continue
        return Found(path, state, skipped)
    return Found(None, None, skipped)


def missed(root: Path | str) -> str:
    """The checkpoint that was written last, when there is none at all to resume from; empty when none ever was."""
    try:
        return (Path(root).parent / SAVED).read_text().strip()
    except FileNotFoundError:
        return ""


def read_state(path: Path) -> State:
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except (OSError, msgspec.DecodeError) as e:
        raise ValueError(f"checkpoint {path} is passed over: {STATE} cannot be read: {e}") from e


def problem(path: Path) -> str:
    """What is wrong with a checkpoint's files, by its manifest; empty when nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
            if digest(file) != entry["xxh3_64"]:
                return f"the content of {name} is not what was saved"
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not saved to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{MANIFEST} cannot be used: {e}"
    return ""


def restore_found(found: Found, policy: Policy) -> Found:
    """Restore what ``newest`` found, and return it: or a newer one, when a trainer that lives has saved that one since
    and deleted what was found. Raises ValueError as ``restore`` does."""
    while True:
        assert found.path is not None
        assert found.state is not None
        try:
            restore(found.path, policy, found.state)
            return found
        except ValueError:
            newer = newest(found.path.parent)
            if newer.path in (None, found.path) or not problem(found.path):
                raise
            found = newer


def restore(path: Path, policy: Policy, state: State) -> None:
    """Put a checkpoint back into ``policy`` and the global generators, bit for bit. Raises ValueError naming the tensor
    that does not fit: the checkpoint is of another model, or of another dtype."""
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        if file.name != OPTIMIZER:
            saved |= _tensors(file)
    put_back(policy, state, saved, _tensors(path / OPTIMIZER), f"checkpoint {path}")


def put_back(
    policy: Policy, state: State, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], where: str
) -> None:
    """``restore`` from tensors; ``where`` they are from, for errors."""
    with torch.no_grad():
        filled = set()
        live = policy.named_state()
        for name in sorted(live):
            if name in weights:
                _fill(live[name], weights[name], name, where)
                filled.add(place_of(live[name]))
        for name in sorted(live):  # a tied name is saved once, under another name, in the same storage
            if place_of(live[name]) not in filled:
                raise ValueError(f"{where} has no tensor {name}: it is of another model")
    load_optimizer(policy, optimizer, where)
    policy.steps, policy.skipped = state.steps, state.skipped
    set_random_state(state.random)


def place_of(tensor: torch.Tensor) -> tuple:
    """Where its numbers are: alike for tied tensors."""
    return (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor), tensor.shape)


def _fill(live: torch.Tensor, saved: torch.Tensor, name: str, where: str) -> None:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        raise ValueError(
            f"{where}: {name} is {saved.dtype} {tuple(saved.shape)}, the model's {live.dtype} "
            f"{tuple(live.shape)}; resume with the model.path and model.dtype it was made with"
        )
    live.copy_(saved)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{file} cannot be read: {e}") from e


# ---- optimizer and random numbers ------------------------------------------------------------------------------------


def optimizer_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter: ``exp_avg/<name>``, ``exp_avg_sq/<name>``, ``step/<name>``; empty before step one."""
    state = policy.optimizer.state
    return {
        f"{key}/{name}": value.detach().contiguous().cpu()
        for name, parameter in policy.parameters.items()
        for key, value in state.get(parameter, {}).items()
    }


def load_optimizer(policy: Policy, tensors: Mapping[str, torch.Tensor], where: Path | str = "optimizer state") -> None:
    """The inverse of ``optimizer_tensors``. Raises ValueError for a parameter the model does not have, or another
    shape."""
    policy.optimizer.state.clear()
    for name_in_file, value in sorted(tensors.items()):
        key, _, name = name_in_file.partition("/")
        parameter = policy.parameters.get(name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size([])):
            raise ValueError(f"{where}: {name_in_file} does not fit this model; it was made for another")
        device = parameter.device if value.ndim else torch.device("cpu")  # AdamW counts its steps on the host
        policy.optimizer.state[parameter][key] = value.to(device, copy=True)


def random_state() -> dict[str, Any]:
    """The global generators of torch (and CUDA) and numpy, as JSON."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    out = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": {"keys": keys.tobytes().hex(), "position": position, "has_gauss": has_gauss, "gauss": gauss},
    }
    if torch.cuda.is_available():
        out["cuda"] = [s.numpy().tobytes().hex() for s in torch.cuda.get_rng_state_all()]
    return out


def set_random_state(state: dict[str, Any]) -> None:
    if "torch" in state:
        torch.set_rng_state(_bytes(state["torch"]))
    if "numpy" in state:
        n = state["numpy"]
        keys = np.frombuffer(bytes.fromhex(n["keys"]), np.uint32)
        np.random.set_state(("MT19937", keys, n["position"], n["has_gauss"], n["gauss"]))
    if torch.cuda.is_available() and len(state.get("cuda", [])) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(s) for s in state["cuda"]])


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# ---- writing ---------------------------------------------------------------------------------------------------------


def _save_model(policy: Policy, directory: Path) -> None:
    model = unwrapped(policy.model)
    model.save_pretrained(directory, state_dict={clean_name(k): v for k, v in model.state_dict().items()})
    policy.tokenizer.save_pretrained(directory)


def _write(target: Path, fill) -> Path:
    """Make the directory ``target`` by ``fill(scratch)``: synced, with a manifest, renamed into place."""
    scratch = target.parent / f"{SCRATCH}{target.name}-{socket.gethostname()}-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        fill(scratch)
        files = sorted(p for p in scratch.iterdir() if p.is_file())
        for path in files:
            path.chmod(scratch.stat().st_mode & 0o666)  # as the umask has it; safetensors makes its files private
        entries = {p.name: {"bytes": p.stat().st_size, "xxh3_64": digest(p)} for p in files}
        (scratch / MANIFEST).write_text(json.dumps({"files": entries}, indent=1))
        for path in (*files, scratch / MANIFEST, scratch):
            _sync(path)
        old = target.parent / f"{scratch.name}-old"
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        text = f"{target} was not written ({reason}); earlier ones are untouched: free space or make the run directory "
        number = getattr(e, "errno", None)
        raise (OSError(number, f"{text}writable") if number else OSError(f"{text}writable")) from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest(path: Path) -> str:
    """xxh3-64 of a file's content, hexadecimal."""
    h = xxhash.xxh3_64()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def _prune(root: Path, keep: int, written: Path) -> None:
    """Delete all complete checkpoints but the ``keep`` newest and the one just written, and what dead writers left."""
    states = []
    for path in sorted(p for p in root.iterdir() if p.is_dir()):
        if path.name.startswith(SCRATCH):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        elif (path / MANIFEST).is_file():
            try:
                states.append((read_state(path).order, path))
            except ValueError:
                continue  # not ours to delete: newest() names it
    for _, path in sorted(states, reverse=True)[keep:]:
        if path != written:
            shutil.rmtree(path, ignore_errors=True)
