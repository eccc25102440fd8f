"""Flat host buffers that hold one version each: filling, reading and checking them, and who may use which when.

Copying into a buffer is the trainer's whole stall and copying out of it the rollout's, so both are one pass: a cast
happens in the copy, and nothing is staged in between. Digests read the buffer in place.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from transport.weights.manifest import DTYPES, Manifest, storage_key


def new_flat(nbytes: int) -> Tensor:
    """Zeroed uint8 tensor of shape (nbytes,) in host memory, pinned where CUDA is there. Zeroing touches every page now
    and not in the first snapshot, where it would be the stall of the trainer."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


@torch.no_grad()
def copy_in(manifest: Manifest, state: Mapping[str, Tensor], flat: Tensor) -> None:
    """Copy ``state`` into ``flat``, cast to the manifest's dtypes, in one pass. On return all bytes are there.

    For tensors on a GPU run it under a side stream; only that stream is waited for. The padding between entries is
    zeroed, so that equal weights give equal bucket digests. Raises ValueError naming a tensor that is missing from
    ``state`` or has another shape than the manifest says (the model changed since the manifest was made).
    """
    views = manifest.views(flat)
    end = 0
    on_gpu = False
    for entry in manifest.entries:
        name = entry.names[0]
        if name not in state:
            raise ValueError(f"tensor {name} is in the manifest but not in the weights to publish")
        tensor = state[name]
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}; the manifest says {entry.shape}")
        views[name].copy_(tensor, non_blocking=True)
        flat[end : entry.offset].zero_()
        end = entry.offset + entry.nbytes
        on_gpu |= tensor.is_cuda
    flat[end:].zero_()
    if on_gpu:
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def load_into(manifest: Manifest, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``flat`` into the receiver's ``tensors``, cast to their dtypes, in one pass; tied tensors once.

    Call ``manifest.fits`` first: what it refuses would be half loaded here. Tensors on a GPU are complete on return.
    """
    views = manifest.views(flat)
    on_gpu = False
    for entry in manifest.entries:
        done = set()
        for name in entry.names:
            if name in tensors and (key := storage_key(name, tensors[name])) not in done:
                done.add(key)
                tensors[name].copy_(views[name], non_blocking=True)
                on_gpu |= tensors[name].is_cuda
    if on_gpu:
        torch.cuda.current_stream().synchronize()


def bucket_digests(flat: Tensor, bucket_bytes: int) -> np.ndarray:
    """xxh3-64 of each bucket of ``flat``: uint64 of shape (buckets,)."""
    count = -(-flat.numel() // bucket_bytes)
    return np.array([bucket_digest(flat, i, bucket_bytes) for i in range(count)], dtype=np.uint64)


def bucket_digest(flat: Tensor, index: int, bucket_bytes: int) -> int:
    """xxh3-64 of bucket ``index``, the last of which may be shorter. Read in place, without the GIL."""
    return digest_of(flat[index * bucket_bytes : (index + 1) * bucket_bytes])


def chunk_of(flat: Tensor, index: int, size: int) -> np.ndarray:
    """Chunk ``index`` of ``size`` bytes, the last of which may be shorter: uint8 of one dimension. A copy, since it is
    sent later, when ``flat`` may hold something else."""
    return flat[index * size : (index + 1) * size].numpy().copy()


def tensor_digests(manifest: Manifest, flat: Tensor) -> np.ndarray:
    """xxh3-64 of each entry's bytes: uint64 of shape (entries,)."""
    return np.array([digest_of(flat[e.offset : e.offset + e.nbytes]) for e in manifest.entries], dtype=np.uint64)


def digest_of(tensor: Tensor) -> int:
    """xxh3-64 of a tensor's elements in row-major order. Contiguous host tensors are read in place."""
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def non_finite(manifest: Manifest, flat: Tensor) -> list[str]:
    """Names of the parameters that hold NaN or infinity (buffers may: masks do). One read; keep it off the stalls."""
    views = manifest.views(flat)
    names = []
    for entry in manifest.entries:
        if not entry.buffer and DTYPES[entry.dtype].is_floating_point and not is_finite(views[entry.names[0]]):
            names.append(entry.names[0])
    return names


def is_finite(tensor: Tensor) -> bool:
    """Whether a floating tensor holds neither NaN nor infinity."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no minimum in torch
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # both are NaN if any element is; reads once, allocates nothing
    return bool(torch.isfinite(low) & torch.isfinite(high))


@dataclass(eq=False)
class Slot:
    """One lease of one buffer. The handle is new with each lease, so a late release cannot free another's."""

    index: int
    flat: Tensor
    owner: str
    waits: list[Callable[[], bool]] = field(default_factory=list)


class Leases:
    """``count`` flat buffers of ``nbytes`` and who holds them. Thread-safe; nothing here ever waits.

    A buffer is free, leased, or *quarantined*: given back while an abandoned operation may still write into it, and
    free again only when that has ended.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._flats = [new_flat(nbytes) for _ in range(count)]
        self._leased: list[Slot | None] = [None] * count
        self._quarantined: list[list[Callable[[], bool]]] = [[] for _ in range(count)]
        self._lock = threading.Lock()

    def acquire(self, owner: str) -> Slot | None:
        """A free buffer, recorded as ``owner``'s; None when there is none."""
        with self._lock:
            for i, flat in enumerate(self._flats):
                if self._leased[i] is None and self._settled(i):
                    slot = Slot(i, flat, owner)
                    self._leased[i] = slot
                    return slot
        return None

    def release(self, slot: Slot) -> None:
        """Give the lease back. The buffer is free at once, or when each operation named by ``quarantine`` has ended."""
        with self._lock:
            assert self._leased[slot.index] is slot, f"buffer {slot.index} is not leased to {slot.owner} (any more)"
            self._leased[slot.index] = None
            self._quarantined[slot.index] = slot.waits

    def quarantine(self, slot: Slot, ended: Callable[[], bool]) -> None:
        """An operation on ``slot`` was abandoned: after its release keep the buffer out of use until ``ended()``.

        ``ended`` must not block, nor call back into these leases."""
        with self._lock:
            assert self._leased[slot.index] is slot, f"buffer {slot.index} is not leased to {slot.owner} (any more)"
            slot.waits.append(ended)

    def held(self) -> list[tuple[int, str]]:
        """Who holds what: (index, owner) of each leased buffer; the owner of a quarantined one is ``quarantine``."""
        with self._lock:
            out = []
            for i, slot in enumerate(self._leased):
                if slot is not None:
                    out.append((i, slot.owner))
                elif not self._settled(i):
                    out.append((i, "quarantine"))
            return out

    def _settled(self, index: int) -> bool:
        self._quarantined[index] = [ended for ended in self._quarantined[index] if not ended()]
        return not self._quarantined[index]
