"""What a version of the weights consists of: names, dtypes, shapes, and where each tensor lies in one flat buffer.

Trainer and receivers derive everything about a buffer from this one description, so they cannot disagree about layout.
The layout is canonical: entries follow each other in the order of the list, each at the next multiple of 64 bytes. So a
manifest from the wire is checked by computing where each entry must lie, and no gap or overlap can be expressed.

Tensors that share storage (tied embedding and head) are one entry with several names: sent once, written to each.
Persistent buffers are sent like parameters; a receiver tensor that no entry would write is refused by name.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from transport.messages import TensorEntry

ALIGN = 64
"""Bytes; every dtype's size divides it, and a cache line is never shared by two tensors."""

MAX_ENTRIES = 1 << 20
MAX_NAME = 1024
MAX_DIMS = 16
MAX_BYTES = 1 << 46

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""What may travel. Everything else (complex, quantised, float8 with its scales) is refused by name."""

_DECODER = msgspec.msgpack.Decoder(list[TensorEntry])


class Manifest:
    """The entries of one flat buffer of ``nbytes`` bytes. ``digest`` (hex) names this description on the wire."""

    def __init__(self, entries: Iterable[TensorEntry]) -> None:
        self.entries = tuple(entries)
        self.nbytes = _check_layout(self.entries)
        self._encoded = msgspec.msgpack.encode(self.entries)
        self.digest = hashlib.blake2b(self._encoded, digest_size=16).hexdigest()

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], buffers: Collection[str] = (), wire_dtype: torch.dtype | None = None
    ) -> "Manifest":
        """Describe ``state`` (name to tensor, in its order); names in ``buffers`` are marked as such.

        Floating tensors get ``wire_dtype`` where given; integers and booleans travel as they are. Raises ValueError
        naming a tensor that cannot travel: sparse, quantised, nested, sharded, on the meta device, or of another dtype.
        """
        names: dict[Any, list[str]] = {}
        for name, tensor in state.items():
            _check_plain(name, tensor)
            names.setdefault(storage_key(name, tensor), []).append(name)
        entries, offset = [], 0
        for tied in names.values():
            tensor = state[tied[0]]
            dtype = wire_dtype if wire_dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            entries.append(
                TensorEntry(
                    names=tuple(tied),
                    dtype=dtype_name(tied[0], dtype),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    nbytes=nbytes,
                    buffer=all(name in buffers for name in tied),
                )
            )
            offset += _aligned(nbytes)
        return cls(entries)

    @classmethod
    def from_module(cls, module: nn.Module, wire_dtype: torch.dtype | None = None) -> "Manifest":
        """Describe a module: its parameters and persistent buffers, under the names of its ``state_dict``."""
        state = module.state_dict(keep_vars=True)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return cls.from_state(state, buffers=[name for name in state if name not in parameters], wire_dtype=wire_dtype)

    def encode(self) -> bytes:
        """msgpack of the list of entries; ``digest`` is over these bytes."""
        return self._encoded

    @classmethod
    def decode(cls, payload: bytes) -> "Manifest":
        """The manifest a peer sent. Raises ValueError naming the tensor and what is wrong with it."""
        try:
            return cls(_DECODER.decode(payload))
        except msgspec.DecodeError as e:
            raise ValueError(f"manifest of {len(payload)} bytes cannot be decoded: {e}") from None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every name as a view into ``flat`` (uint8 of shape (nbytes,)); tied names share one view."""
        check_flat(self, flat)
        out: dict[str, Tensor] = {}
        for entry in self.entries:
            dtype = DTYPES[entry.dtype]
            view = flat[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
            out.update((name, view) for name in entry.names)
        return out

    def fits(self, tensors: Mapping[str, Tensor], who: str) -> None:
        """Check that this version can be loaded into ``tensors``, those of the receiver ``who``.

        Raises ValueError naming every fault: an entry ``who`` has no tensor for, a tensor that no entry would write, a
        shape or class of dtype (floating, integer, boolean) that differs, two entries for what ``who`` holds as one.

        An entry is accepted when ``who`` has at least one of its names: a receiver may list tied tensors once. A tensor
        whose storage is that of a written one counts as written.
        """
        faults: list[str] = []
        written: dict[Any, str] = {}
        for entry in self.entries:
            known = [name for name in entry.names if name in tensors]
            if not known:
                faults.append(f"{' = '.join(entry.names)}: sent by the trainer, unknown at {who}")
            for name in known:
                faults += _mismatch(entry, name, tensors[name], who)
                first = written.setdefault(storage_key(name, tensors[name]), entry.names[0])
                if first != entry.names[0]:
                    faults.append(f"{first} and {name}: one tied tensor at {who}, sent by the trainer as two")
        for name, tensor in tensors.items():
            if storage_key(name, tensor) not in written:
                faults.append(f"{name}: at {who}, never written by the trainer's version")
        if faults:
            more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(f"weights do not fit {who}: {'; '.join(faults[:8])}{more}")

    def buckets(self, bucket_bytes: int) -> int:
        """How many buckets of ``bucket_bytes`` the flat buffer has; the last may be shorter."""
        return -(-self.nbytes // bucket_bytes)


def storage_key(name: str, tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory read the same way. An empty tensor has no memory: only itself."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def check_flat(manifest: Manifest, flat: Tensor) -> None:
    """Raise ValueError unless ``flat`` is a contiguous uint8 tensor of shape (manifest.nbytes,)."""
    if flat.dtype != torch.uint8 or tuple(flat.shape) != (manifest.nbytes,) or not flat.is_contiguous():
        raise ValueError(
            f"flat buffer is {flat.dtype} of shape {tuple(flat.shape)}; this manifest needs contiguous uint8 "
            f"of shape ({manifest.nbytes},)"
        )


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The dtype as the wire spells it. Raises ValueError naming the tensor when it may not travel."""
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise ValueError(f"tensor {name} is {text}, which cannot be sent; known are {', '.join(DTYPES)}")
    return text


def _check_plain(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"state {name} is a {type(tensor).__name__}, not a tensor, and cannot be sent")
    kind = (
        "sharded" if hasattr(tensor, "full_tensor")
        else "nested" if tensor.is_nested
        else "quantised" if tensor.is_quantized
        else f"sparse ({tensor.layout})" if tensor.layout != torch.strided
        else "without data (meta device)" if tensor.device.type == "meta"
        else ""
    )  # fmt: skip
    if kind:
        raise ValueError(f"tensor {name} is {kind} and cannot be sent; make it a plain dense tensor first")
    dtype_name(name, tensor.dtype)


def _check_layout(entries: tuple[TensorEntry, ...]) -> int:
    """Bytes of the flat buffer. Raises ValueError at the first entry that is not what the canonical layout says."""
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise ValueError(f"manifest has {len(entries)} tensors; it must have 1 to {MAX_ENTRIES}")
    seen: set[str] = set()
    offset = 0
    for i, entry in enumerate(entries):
        if not entry.names or any(not 0 < len(name) <= MAX_NAME for name in entry.names):
            raise ValueError(f"manifest entry {i} needs names of 1 to {MAX_NAME} characters")
        name = entry.names[0]
        for each in entry.names:
            if each in seen:
                raise ValueError(f"tensor {each} is in the manifest twice")
            seen.add(each)
        if entry.dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {entry.dtype[:32]!r}; known are {', '.join(DTYPES)}")
        if len(entry.shape) > MAX_DIMS or any(not 0 <= n <= MAX_BYTES for n in entry.shape):
            raise ValueError(f"tensor {name} has an impossible shape {entry.shape[: MAX_DIMS + 1]}")
        nbytes = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.nbytes != nbytes:
            raise ValueError(
                f"tensor {name}, {entry.dtype} of shape {entry.shape}, has {nbytes} bytes; the manifest says "
                f"{entry.nbytes}"
            )
        if entry.offset != offset:
            raise ValueError(f"tensor {name} must lie at byte {offset}; the manifest says {entry.offset}")
        offset += _aligned(nbytes)
        if offset > MAX_BYTES:
            raise ValueError(f"tensor {name} ends beyond {MAX_BYTES} bytes, the most one version may have")
    return offset


def _mismatch(entry: TensorEntry, name: str, tensor: Tensor, who: str) -> list[str]:
    if tuple(tensor.shape) != entry.shape:
        return [f"{name}: shape {entry.shape} from the trainer, {tuple(tensor.shape)} at {who}"]
    if _dtype_class(DTYPES[entry.dtype]) != _dtype_class(tensor.dtype):
        return [f"{name}: {entry.dtype} from the trainer, {str(tensor.dtype).removeprefix('torch.')} at {who}"]
    return []


def _dtype_class(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "boolean"
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
