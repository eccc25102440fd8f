"""All that trainers of one formation have alike, as digests and as bytes.

Weights and optimizer must be bit-identical on all of them after every step. Each says so with one digest a step; where
two differ, the digests of single tensors tell which. A newcomer gets everything as one string of bytes: a short JSON
(``checkpoint.State``) and the tensors as safetensors, which is also what a checkpoint is made of. No pickle.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from roles.trainer import checkpoint
from roles.trainer.policy import Policy

WEIGHT, OPTIMIZER = "weight/", "optimizer/"


def named_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, each storage once, and the optimizer's state, by name; live tensors."""
    seen = set()
    for name, tensor in sorted(policy.named_state().items()):
        if (place := checkpoint.place_of(tensor)) not in seen:
            seen.add(place)
            yield WEIGHT + name, tensor
    state = policy.optimizer.state
    for name, parameter in sorted(policy.parameters.items()):
        for key, value in sorted(state.get(parameter, {}).items()):
            yield f"{OPTIMIZER}{key}/{name}", value


def tensor_digests(policy: Policy) -> dict[str, int]:
    """A 64-bit digest of each tensor's bits, computed where it lies."""
    return {name: _digest(tensor) for name, tensor in named_tensors(policy)}


def state_digest(policy: Policy) -> str:
    """One digest of all of them, 16 characters."""
    digests = tensor_digests(policy)
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(list(digests.items())))


def _digest(tensor: torch.Tensor) -> int:
    tensor = tensor.detach().contiguous()
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return int(torch.hash_tensor(tensor.reshape(-1)).item())  # the bits, without a copy to the host


def first_difference(names: list[str], digests: dict[str, np.ndarray]) -> str:
    """``digests`` uint64 (tensors,) by trainer, in the order of ``names``: the first name where they are not all alike;
    empty when there is none."""
    for name, *values in zip(names, *digests.values(), strict=False):
        if len({int(v) for v in values}) > 1:
            return name
    return ""


def dump(policy: Policy, state: checkpoint.State) -> bytes:
    """Everything, for a newcomer; ``steps``, ``skipped`` and ``random`` of the state are filled in."""
    state = msgspec.structs.replace(state, steps=policy.steps, skipped=policy.skipped, random=checkpoint.random_state())
    head = msgspec.json.encode(state)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in named_tensors(policy)}
    return len(head).to_bytes(8, "little") + head + save_tensors(tensors)


def load(policy: Policy, data: bytes) -> checkpoint.State:
    """The inverse of ``dump``, bit for bit. Raises ValueError naming what does not fit."""
    where = "what the other trainer sent"
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        state = msgspec.json.decode(data[8:end], type=checkpoint.State)
        tensors = load_tensors(data[end:])
    except (msgspec.DecodeError, SafetensorError, ValueError) as e:
        raise ValueError(f"{where} cannot be read: {e}") from e
    weights = {n.removeprefix(WEIGHT): t for n, t in tensors.items() if n.startswith(WEIGHT)}
    optimizer = {n.removeprefix(OPTIMIZER): t for n, t in tensors.items() if n.startswith(OPTIMIZER)}
    checkpoint.put_back(policy, state, weights, optimizer, where)
    return state


def most_bytes(policy: Policy) -> int:
    """Above what ``dump`` can give for this model: weights and two moments each, with room for the rest."""
    weights = sum(t.numel() * t.element_size() for _, t in named_tensors(policy))
    return 4 * weights + (64 << 20)
