"""The keys through which the ranks of a formation meet, kept by its convener. Pure, and free of torch.

What they are for, and the ranks' side, stands in ``store.py``.
"""

from dataclasses import dataclass, field

from mesh.identity import PeerId
from mesh.version import Ballot
from transport.messages import Kind, StoreAnswer, StoreGet, StoreSet

MAX_KEYS = 1 << 16  # of one formation; gloo sets one a rank
MAX_BYTES = 64 << 20  # keys and values of one formation
MAX_VALUE = 1 << 16  # gloo's value grows by 8 bytes a rank
MAX_KEYS_ASKED = 4096  # in one StoreGet
MAX_ANSWER = 1 << 19  # bytes of values in one StoreAnswer, which must fit a frame
MAX_OPEN = 16  # formations one peer convenes at a time


@dataclass
class _Keys:
    values: dict[str, bytes] = field(default_factory=dict)
    answered: dict[tuple[PeerId, int], int] = field(default_factory=dict)
    nbytes: int = 0


class StoreHost:
    """The convener's side: the keys of each formation it convened and still keeps. Pure; one thread at a time."""

    def __init__(self) -> None:
        self._open: dict[tuple[Kind, Ballot], _Keys] = {}

    def open(self, kind: Kind, ballot: Ballot) -> None:
        """Keep keys for this formation. When there are too many, the oldest ones are closed first."""
        self._open.setdefault((kind, ballot), _Keys())
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def close(self, kind: Kind, ballot: Ballot) -> None:
        """Forget the formation's keys; no effect when it is not open."""
        self._open.pop((kind, ballot), None)

    def receive(self, sender: PeerId, message: StoreSet | StoreGet) -> StoreAnswer:
        """Answer one request. Raises ValueError for a formation not open here, or beyond the bounds above; then drop
        the message: its sender runs into its deadline, which names what it waited for."""
        keys = self._open.get((message.kind, message.ballot))
        if keys is None:
            raise ValueError(f"store of {message.kind} formation {message.ballot} is not kept here (asked by {sender})")
        if isinstance(message, StoreGet):
            if len(message.keys) > MAX_KEYS_ASKED:
                raise ValueError(f"{sender} asks for {len(message.keys)} store keys at once; most is {MAX_KEYS_ASKED}")
            found = [keys.values.get(key) for key in message.keys]
            if (nbytes := sum(len(value or b"") for value in found)) > MAX_ANSWER:
                raise ValueError(f"{sender} asks for {nbytes} bytes of store values at once; most is {MAX_ANSWER}")
            return StoreAnswer(message.kind, message.ballot, message.number, found)
        request = (sender, message.number)
        if request not in keys.answered:
            keys.answered[request] = self._write(keys, sender, message)
        return StoreAnswer(message.kind, message.ballot, message.number, [], keys.answered[request])

    def _write(self, keys: _Keys, sender: PeerId, message: StoreSet) -> int:
        count, value = 0, message.value
        if message.add is not None:
            old = keys.values.get(message.key, b"0")
            if not old.removeprefix(b"-").isdigit():
                raise ValueError(f"store key {message.key} holds no integer to add to (asked by {sender})")
            count = int(old) + message.add
            value = str(count).encode()
        if len(value) > MAX_VALUE:
            raise ValueError(f"store key {message.key}: {len(value)} bytes from {sender}; most is {MAX_VALUE}")
        grown = keys.nbytes + len(value) - len(keys.values.get(message.key, b""))
        grown += 0 if message.key in keys.values else len(message.key)
        if grown > MAX_BYTES or len(keys.answered) >= MAX_KEYS:
            raise ValueError(f"store of {message.kind} formation {message.ballot} is full ({sender}: {message.key})")
        keys.nbytes = grown
        keys.values[message.key] = value
        return count
