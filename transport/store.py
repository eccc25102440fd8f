"""The store through which torch connects the ranks of a formation, carried by the mesh's own authenticated messages.

torch's process groups exchange their socket addresses (gloo) or a communicator id (NCCL) through a key-value store. A
TCPStore would open a port to strangers; here the convener of a formation keeps the keys (``StoreHost``, pure) and every
rank reaches them by ``StoreSet`` and ``StoreGet`` (``MeshStore``). Keys belong to one (kind, ballot): those of an an
earlier formation are never seen by a later one, and are gone when the convener closes it.

Requests may be lost or doubled. Whoever carries them repeats a request with its number until it is answered; the host
answers a repeated ``StoreSet`` as it did the first time, so that ``add`` counts once.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from mesh.version import Ballot
from transport.messages import Kind, StoreAnswer, StoreGet, StoreSet
from transport.store_host import MAX_KEYS_ASKED

POLL_FIRST_S, POLL_MOST_S = 0.002, 0.05

Request = Callable[[StoreSet | StoreGet, float], StoreAnswer]
"""Carries one message to the convener within so many seconds, repeating it as needed; raises TimeoutError."""


class MeshStore(Store):
    """A rank's side: torch's Store over ``request``. Called by torch from the thread that builds the group.

    Keep this Python object as long as the group: torch calls into it. ``abandon`` ends every wait early.
    Waiting calls raise TimeoutError naming the keys that never came; RuntimeError when the store is kept no longer.
    """

    def __init__(
        self,
        kind: Kind,
        ballot: Ballot,
        request: Request,
        timeout_s: float,
        abandon: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self._kind: Kind = kind
        self._ballot = ballot
        self._request = request
        self._timeout_s = timeout_s
        self._abandon = abandon or threading.Event()
        self._silent = ""
        # Workers of one peer share its id: they must not take each other's numbers.
        self._number = secrets.randbits(52)
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(StoreSet(self._kind, self._ballot, self._next(), key, data), self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        message = StoreSet(self._kind, self._ballot, self._next(), key, b"", amount)
        return self._ask(message, self._timeout_s).count

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._look(keys, self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """All values once all are set, asked for again and again: an answer that says "not yet" may be repeated."""
        deadline = time.monotonic() + timeout_s
        pause = POLL_FIRST_S
        while True:
            found = self._look(keys, max(0.0, deadline - time.monotonic()))
            values = [value for value in found if value is not None]
            if len(values) == len(found):
                return values
            left = deadline - time.monotonic()
            if left <= 0 or self._abandon.wait(min(pause, left)):
                why = "abandoned" if self._abandon.is_set() else f"not set after {timeout_s:.1f} s"
                missing = [key for key, value in zip(keys, found, strict=True) if value is None]
                raise TimeoutError(
                    f"store of {self._kind} formation {self._ballot}: {why}: {', '.join(missing[:8])}"
                    + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                )
            pause = min(2 * pause, POLL_MOST_S)

    def _look(self, keys: Sequence[str], timeout_s: float) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), MAX_KEYS_ASKED):
            part = list(keys[start : start + MAX_KEYS_ASKED])
            answer = self._ask(StoreGet(self._kind, self._ballot, self._next(), part), timeout_s)
            if len(answer.values) != len(part):
                raise RuntimeError(
                    f"store of {self._kind} formation {self._ballot} answered {len(answer.values)} values "
                    f"for {len(part)} keys"
                )
            found += answer.values
        return found

    def _ask(self, message: StoreSet | StoreGet, timeout_s: float) -> StoreAnswer:
        if self._abandon.is_set():
            raise TimeoutError(f"store of {self._kind} formation {self._ballot}: abandoned")
        if self._silent:
            raise TimeoutError(self._silent)
        try:
            return self._request(message, timeout_s)
        except TimeoutError as e:  # whoever keeps the keys is gone: no later call waits for it again
            self._silent = str(e)
            raise
        except ValueError as e:  # the host is in this process and refused: it no longer keeps this formation
            raise RuntimeError(str(e)) from e

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number
