"""What a peer tells of the versions it has had: one short digest each, by which an observer finds two that differ.

A publisher adds what it has staged; a receiver what its engine has proved to run, whose live tensors are those."""

import hashlib
from collections import deque

import numpy as np

from mesh.version import Version

LAST = 64  # versions; an observer asks twice a second


class Told:
    """Add on one thread; ``text`` may be read on any."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=LAST)
        self.text = ""

    def add(self, version: Version, tensor_digests: np.ndarray) -> None:
        """``tensor_digests``: uint64, of each tensor of the version as it was sent."""
        digest = hashlib.blake2b(np.ascontiguousarray(tensor_digests).tobytes(), digest_size=4).hexdigest()
        self._last.append(f"{version.number}@{version.term.counter}.{version.term.convener}={digest}")
        self.text = " ".join(self._last)
