"""Flat buffers that the processes of one machine share: made by a peer, mapped by the workers of its engine.

A buffer is an anonymous file, found under the maker's open descriptors: it has no name that could be left behind when
the maker is killed, and no other user can open it.
"""

import logging
import mmap
import os

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_opened: dict[str, Tensor] = {}
_paths: dict[int, str] = {}


def new_flat(nbytes: int) -> Tensor:
    """Zeroed uint8 tensor of shape (nbytes,), every page touched. It lives as long as this process."""
    fd = os.memfd_create("weights")
    os.ftruncate(fd, max(nbytes, 1))
    flat = _mapped(fd, nbytes)
    flat.zero_()
    _paths[flat.data_ptr()] = f"/proc/{os.getpid()}/fd/{fd}"
    return flat


def path_of(flat: Tensor) -> str:
    """What another process opens ``flat`` by."""
    return _paths[flat.data_ptr()]


def opened(path: str, nbytes: int, *, pin: bool = False) -> Tensor:
    """The buffer of another process, mapped once. ``pin``: so that a GPU reads it without a copy in between."""
    if path not in _opened:
        fd = os.open(path, os.O_RDWR)
        try:
            _opened[path] = _mapped(fd, nbytes)
        finally:
            os.close(fd)
        if pin:
            _pin(_opened[path])
    return _opened[path]


def _pin(flat: Tensor) -> None:
    """Page-lock memory that others map too; where that is not allowed, copies to the GPU are slower."""
    error = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
    if error:
        log.warning("%d bytes of shared memory cannot be pinned (CUDA error %d): updates take longer", len(flat), error)


def _mapped(fd: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
