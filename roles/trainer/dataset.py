"""The order of the training prompts: which comes next, which is out, which was trained.

Every epoch deals all prompts once, in an order that depends on the seed and the epoch alone. A prompt given back
returns to its place in that order, before all that were never dealt; so losses, retries and the order in which they
happen do not change what comes next, and with ``max_lag = 0`` a run resumed from a checkpoint deals the same prompts in
the same order as one that was never stopped.

The next epoch begins when the last prompt of this one is dealt; stragglers may still be out. An epoch is remembered
while it is one of the last two or has prompts open, in one bit a prompt and a few entries for those closed untrained.
Open prompts are bounded by the credits, so the epochs are too, and a data set smaller than a batch works as well.

Only positions are kept here; the prompts themselves belong to the task.
"""

import base64
import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transport.prompts import PromptRef


def digest_of(prompts: Iterable[str]) -> str:
    """A digest of the data, so that a checkpoint can tell whether it belongs to it."""
    h = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        raw = prompt.encode()
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 of shape (n,): indices sorted by their splitmix64 hash (Steele, Lea and Flood
    2014). Written out because the generators of libraries may change their streams, and a resumed run must not."""
    start = int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "little")
    z = np.uint64(start) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


@dataclass
class _Epoch:
    order: np.ndarray  # int64 (n,): the prompt at each place
    trained: bytearray  # bit p: prompt p was trained
    position: int = 0  # places before it were dealt
    back: list[int] = field(default_factory=list)  # heap of places given back
    open: dict[int, int] = field(default_factory=dict)  # place -> attempt, of prompts out
    attempts: dict[int, int] = field(default_factory=dict)  # place -> attempt, where over 0
    closed: dict[int, str] = field(default_factory=dict)  # prompt -> why it will not be trained in this epoch

    def has(self, prompt: int) -> bool:
        return bool(self.trained[prompt >> 3] & (1 << (prompt & 7)))


class Dataset:
    """A source of prompts for ``transport.delivery.TrainerDelivery``. Lives on the loop.

    ``name`` is what the user called the data; ``digest`` (see ``digest_of``) tells whether it is still the same."""

    def __init__(self, *, name: str, size: int, digest: str, seed: int) -> None:
        if size < 1:
            raise ValueError(f"data {name} has no training prompts")
        self.name, self.size, self.digest, self.seed = name, size, digest, seed
        self._epochs: dict[int, _Epoch] = {}
        self._begin(0)

    @property
    def epoch(self) -> int:
        """The epoch whose prompts are being dealt."""
        return next(reversed(self._epochs))

    def take(self) -> PromptRef:
        """The next prompt: one that was given back, oldest first, else the next of the order."""
        for number, epoch in self._epochs.items():
            if epoch.back:
                return self._deal(number, epoch, heapq.heappop(epoch.back))
        number = self.epoch
        if self._epochs[number].position == self.size:
            number += 1
            self._begin(number)
        epoch = self._epochs[number]
        epoch.position += 1
        return self._deal(number, epoch, epoch.position - 1)

    def give_back(self, ref: PromptRef) -> None:
        """The prompt was not trained; it is dealt again before all new ones, as attempt ``ref.attempt``."""
        epoch = self._release(ref)
        if ref.attempt:
            epoch.attempts[ref.place] = ref.attempt
        heapq.heappush(epoch.back, ref.place)

    def done(self, ref: PromptRef) -> None:
        """The prompt was trained. Only one that is out can be, and it is out at most once."""
        epoch = self._release(ref)
        epoch.trained[ref.prompt >> 3] |= 1 << (ref.prompt & 7)
        epoch.attempts.pop(ref.place, None)

    def close(self, ref: PromptRef, reason: str) -> None:
        """Give up on the prompt for this epoch."""
        epoch = self._release(ref)
        epoch.closed[ref.prompt] = reason
        epoch.attempts.pop(ref.place, None)

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
        return self.epoch + (last.position - len(last.open) - len(last.back)) / self.size

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: for each remembered epoch the position, trained bits (base64), those
        closed, and attempts. A prompt that is out now counts as given back: its credit dies with this process."""
        return {
            "name": self.name,
            "size": self.size,
            "digest": self.digest,
            "seed": self.seed,
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
        self._epochs = {}
        for saved in state["epochs"]:
            e = self._epoch(saved["epoch"])
            bits = base64.b64decode(saved["trained"], validate=True)
            if len(bits) != len(e.trained) or not 0 <= saved["position"] <= self.size:
                raise ValueError(f"the checkpoint's order of {self.name} is damaged in epoch {saved['epoch']}")
            e.trained[:] = bits
            e.position = saved["position"]
            e.closed = {int(prompt): why for prompt, why in saved["closed"].items()}
            e.attempts = {int(place): n for place, n in saved["attempts"].items()}
            dealt = e.order[: e.position]
            e.back = [place for place, p in enumerate(dealt.tolist()) if not e.has(p) and p not in e.closed]
            self._epochs[saved["epoch"]] = e

    def _epoch(self, number: int) -> _Epoch:
        return _Epoch(order=permutation(self.size, self.seed, number), trained=bytearray((self.size + 7) // 8))

    def _begin(self, number: int) -> None:
        for old in [n for n, e in self._epochs.items() if n < number - 1 and not e.open and not e.back]:
            del self._epochs[old]
        self._epochs[number] = self._epoch(number)

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
