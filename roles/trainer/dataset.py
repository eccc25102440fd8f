"""The order of the training prompts: which comes next, which is out, which was trained, and whose it is.

Every epoch deals all prompts once, in an order that depends on the seed and the epoch alone. A prompt given back
returns to its place in that order, before all that were never dealt; so losses, retries and the order in which they
happen do not change what comes next, and with ``max_lag = 0`` a run resumed from a checkpoint deals the same prompts in
the same order as one that was never stopped.

The next epoch begins when the last prompt of this one is dealt; stragglers may still be out. An epoch is remembered
while it is one of the last two or has prompts that are neither trained nor closed, in one bit a prompt and a few
entries for those closed untrained. A data set smaller than a batch works as well.

With several trainers every prompt of an epoch has exactly one **owner** among those who train together: the member for
whom a hash of member, epoch and prompt is highest (rendezvous hashing, Thaler and Ravishankar 1998). So all agree on it
without a word, and a death moves the prompts of the dead one only. Each trainer goes through the same order and takes
what is its own; what the others trained and closed it hears with every step, and remembers in the same bits. When the
members change, what became its own and lies behind its position, neither trained, closed nor out here, is given back.
So what is trained and closed is the same on all trainers, position and attempts are each one's own, and the state of
any of them serves them all. Trainers may be some epochs apart, by as much as their shares differ from what they own.

Only positions are kept here; the prompts themselves belong to the task.
"""

import base64
import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesh.identity import PeerId
from transport.prompts import PromptRef

MOST_EPOCHS = 256
"""Remembered at a time: how far trainers may be apart before what the last of them leaves untrained is not missed."""


def digest_of(prompts: Iterable[str]) -> str:
    """A digest of the data, so that a checkpoint can tell whether it belongs to it."""
    h = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        raw = prompt.encode()
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


def hashes(n: int, of: str) -> np.ndarray:
    """A hash of each of range(n), uint64 of shape (n,): splitmix64 (Steele, Lea and Flood 2014) seeded with ``of``.
    Written out because the generators of libraries may change their streams, and a resumed run must not."""
    start = int.from_bytes(hashlib.blake2b(of.encode(), digest_size=8).digest(), "little")
    z = np.uint64(start) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 of shape (n,)."""
    return np.argsort(hashes(n, f"{seed}/{epoch}"), kind="stable")


def owners(n: int, epoch: int, members: Sequence[PeerId]) -> np.ndarray:
    """The owner of each prompt, as an index into ``members``: int64 of shape (n,)."""
    best, owner = np.zeros(n, np.uint64), np.zeros(n, np.int64)
    for i, member in enumerate(members):
        h = hashes(n, f"{member}/{epoch}")
        higher = h > best
        best[higher], owner[higher] = h[higher], i
    return owner


@dataclass
class _Epoch:
    order: np.ndarray  # int64 (n,): the prompt at each place
    mine: np.ndarray  # bool (n,): whether prompt p is this trainer's
    trained: bytearray  # bit p: prompt p was trained
    position: int = 0  # places before it were passed
    back: list[int] = field(default_factory=list)  # heap of places given back
    open: dict[int, int] = field(default_factory=dict)  # place -> attempt, of prompts out
    attempts: dict[int, int] = field(default_factory=dict)  # place -> attempt, where over 0
    closed: dict[int, str] = field(default_factory=dict)  # prompt -> why it will not be trained in this epoch

    def has(self, prompt: int) -> bool:
        return bool(self.trained[prompt >> 3] & (1 << (prompt & 7)))

    def mark(self, prompt: int) -> None:
        self.trained[prompt >> 3] |= 1 << (prompt & 7)

    def ended(self, prompt: int) -> bool:
        return prompt in self.closed or self.has(prompt)

    @property
    def complete(self) -> bool:
        return sum(map(int.bit_count, self.trained)) + len(self.closed) >= len(self.order)

    def left(self) -> list[int]:
        """The places before its position whose prompts are to be dealt, and here."""
        trained = np.unpackbits(np.frombuffer(self.trained, np.uint8), bitorder="little")[: len(self.order)]
        passed = self.order[: self.position]
        return [p for p in np.flatnonzero(self.mine[passed] & (trained[passed] == 0)).tolist() if self.wants(p)]

    def wants(self, place: int) -> bool:
        """Whether the prompt at this place is to be dealt, and here."""
        prompt = int(self.order[place])
        return bool(self.mine[prompt]) and place not in self.open and not self.ended(prompt)


class Dataset:
    """A source of prompts for ``transport.delivery.TrainerDelivery``. Lives on the loop.

    ``name`` is what the user called the data; ``digest`` (see ``digest_of``) tells whether it is still the same."""

    def __init__(self, *, name: str, size: int, digest: str, seed: int) -> None:
        if size < 1:
            raise ValueError(f"data {name} has no training prompts")
        self.name, self.size, self.digest, self.seed = name, size, digest, seed
        self._epochs: dict[int, _Epoch] = {}  # in ascending order; those after ``epoch`` by what others trained of them
        self._members: tuple[PeerId, ...] = ()
        self._me: PeerId | None = None
        self.epoch = 0
        """The epoch whose prompts are being dealt."""
        self._begin(0)

    def deal(self, members: Sequence[PeerId], me: PeerId) -> None:
        """From now on every prompt has its owner among ``members``; who is not one of them owns none."""
        self._members, self._me = tuple(members), me
        for number, epoch in self._epochs.items():
            epoch.mine = self._mine(number)
            epoch.back = epoch.left()

    def take(self) -> PromptRef | None:
        """The next prompt: one that was given back, oldest first, else the next of the order. None: this trainer owns
        none."""
        for number, epoch in self._epochs.items():
            while epoch.back:
                place = heapq.heappop(epoch.back)
                if epoch.wants(place):
                    return self._deal(number, epoch, place)
        for _ in range(MOST_EPOCHS):  # few prompts, or none of one's own
            epoch = self._epochs[self.epoch]
            while epoch.position < self.size:
                epoch.position += 1
                if epoch.wants(epoch.position - 1):
                    return self._deal(self.epoch, epoch, epoch.position - 1)
            if not self._owns_any():
                return None
            self.epoch += 1
            self._begin(self.epoch)
        return None

    def claim(self, epoch: int, prompt: int) -> PromptRef | None:
        """This prompt, if it is to be dealt here and is not out: for a group that is there already."""
        e = self._epochs.get(epoch)
        if e is None or not 0 <= prompt < self.size or not e.mine[prompt] or e.ended(prompt):
            return None
        place = int(np.flatnonzero(e.order == prompt)[0])
        if place in e.open:
            return None
        if place in e.back:
            e.back.remove(place)
            heapq.heapify(e.back)
        return self._deal(epoch, e, place)

    def unwanted(self, ref: PromptRef) -> str:
        """Why a prompt that is out, or was, need not be answered any more; empty when it must."""
        epoch = self._epochs.get(ref.epoch)
        if epoch is None:  # it was complete
            return "trained or closed by another trainer"
        if epoch.has(ref.prompt):
            return "trained by another trainer"
        if ref.prompt in epoch.closed:
            return "closed by another trainer"
        return "" if epoch.mine[ref.prompt] else "dealt to another trainer"

    def give_back(self, ref: PromptRef) -> None:
        """The prompt was not trained; it is dealt again before all new ones, as attempt ``ref.attempt``."""
        epoch = self._release(ref)
        if ref.attempt:
            epoch.attempts[ref.place] = ref.attempt
        if ref.place < epoch.position and epoch.wants(ref.place):
            heapq.heappush(epoch.back, ref.place)

    def done(self, ref: PromptRef) -> None:
        """The prompt was trained. Only one that is out can be, and it is out at most once."""
        epoch = self._release(ref)
        epoch.mark(ref.prompt)
        epoch.attempts.pop(ref.place, None)

    def mark_trained(self, epoch: int, prompt: int) -> None:
        """Another trainer has trained this prompt."""
        if (e := self._marked(epoch, prompt)) is not None:
            e.mark(prompt)

    def mark_closed(self, epoch: int, prompt: int, reason: str) -> None:
        """Another trainer has given up on this prompt."""
        if (e := self._marked(epoch, prompt)) is not None and not e.has(prompt):
            e.closed.setdefault(prompt, reason)

    def close(self, ref: PromptRef, reason: str) -> None:
        """Give up on the prompt for this epoch."""
        epoch = self._release(ref)
        epoch.closed[ref.prompt] = reason
        epoch.attempts.pop(ref.place, None)

    def owns(self, epoch: int, prompt: int) -> bool:
        """Of a remembered epoch."""
        return epoch in self._epochs and bool(self._epochs[epoch].mine[prompt])

    def is_trained(self, epoch: int, prompt: int) -> bool:
        """For a remembered epoch; False for one that is forgotten or has not begun."""
        return epoch in self._epochs and self._epochs[epoch].has(prompt)

    def closed(self, epoch: int) -> dict[int, str]:
        """Prompts of a remembered epoch that were given up, with the reason."""
        return dict(self._epochs[epoch].closed) if epoch in self._epochs else {}

    def open(self) -> list[PromptRef]:
        """Prompts that are out, in the order of their places."""
        return [
            PromptRef(number, place, int(epoch.order[place]), attempt)
            for number, epoch in self._epochs.items()
            for place, attempt in sorted(epoch.open.items())
        ]

    def progress(self) -> float:
        """Epochs so far: those before the current one, and the share of its prompts that were trained or closed."""
        last = self._epochs[self.epoch]
        out = sum(place < last.position for place in last.open)
        return self.epoch + (last.position - out - len(last.back)) / self.size

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: for each remembered epoch the position, trained bits (base64), those
        closed, and attempts. A prompt that is out now counts as given back: its credit dies with this process."""
        return {
            "name": self.name,
            "size": self.size,
            "digest": self.digest,
            "seed": self.seed,
            "epoch": self.epoch,
            "epochs": [
                {
                    "epoch": number,
                    "position": e.position,
                    "trained": base64.b64encode(e.trained).decode(),
                    "closed": {str(prompt): why for prompt, why in e.closed.items()},
                    "attempts": {str(place): n for place, n in sorted((e.attempts | e.open).items()) if n},
                }
                for number, e in self._epochs.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the checkpoint was made with other data or another seed."""
        for what, mine in (("size", self.size), ("digest", self.digest), ("seed", self.seed)):
            if state[what] != mine:
                raise ValueError(
                    f"data {self.name} is not what the checkpoint was trained on ({state['name']}): its {what} was "
                    f"{state[what]} and is {mine} now; restore the data and task.seed, or start a new run"
                )
        self._epochs, self.epoch = {}, state["epoch"]
        for saved in state["epochs"]:
            e = self._epoch(saved["epoch"])
            bits = base64.b64decode(saved["trained"], validate=True)
            if len(bits) != len(e.trained) or not 0 <= saved["position"] <= self.size:
                raise ValueError(f"the checkpoint's order of {self.name} is damaged in epoch {saved['epoch']}")
            e.trained[:] = bits
            e.position = saved["position"]
            e.closed = {int(prompt): why for prompt, why in saved["closed"].items()}
            e.attempts = {int(place): n for place, n in saved["attempts"].items()}
            e.back = e.left()
            self._epochs[saved["epoch"]] = e
        if self.epoch not in self._epochs:
            raise ValueError(f"the checkpoint's order of {self.name} is damaged: epoch {self.epoch} is missing")

    def _epoch(self, number: int) -> _Epoch:
        order = permutation(self.size, self.seed, number)
        return _Epoch(order=order, mine=self._mine(number), trained=bytearray((self.size + 7) // 8))

    def _mine(self, number: int) -> np.ndarray:
        if self._me is None:
            return np.ones(self.size, bool)
        if self._me not in self._members:
            return np.zeros(self.size, bool)
        return owners(self.size, number, self._members) == self._members.index(self._me)

    def _owns_any(self) -> bool:
        return self._me is None or self._me in self._members

    def _begin(self, number: int) -> None:
        """Remember epoch ``number``; forget those before the last two that are complete, and the oldest of too many."""
        past = [n for n, e in self._epochs.items() if n < self.epoch - 1 and not e.open]
        many = len(self._epochs) - MOST_EPOCHS
        for i, old in enumerate(past):
            if i < many or self._epochs[old].complete:
                del self._epochs[old]
        if number not in self._epochs:
            self._epochs[number] = self._epoch(number)
            self._epochs = dict(sorted(self._epochs.items()))

    def _marked(self, number: int, prompt: int) -> _Epoch | None:
        """The epoch of what another trainer says; None for one that is forgotten."""
        if not 0 <= prompt < self.size or (number < self.epoch and number not in self._epochs):
            return None
        if number not in self._epochs:
            self._begin(number)
        return self._epochs[number]

    def _deal(self, number: int, epoch: _Epoch, place: int) -> PromptRef:
        attempt = epoch.attempts.get(place, 0)
        epoch.open[place] = attempt
        return PromptRef(number, place, int(epoch.order[place]), attempt)

    def _release(self, ref: PromptRef) -> _Epoch:
        epoch = self._epochs.get(ref.epoch)
        assert epoch is not None, f"{ref}: its epoch is forgotten"
        assert ref.place in epoch.open, f"{ref} is not out"
        del epoch.open[ref.place]
        return epoch
