"""What delivery needs of the training data, and when it gives up on a prompt."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from mesh.effects import Note

CLOSED_WARNING = 0.01  # share of an epoch's prompts closed untrained that a user must hear of
TOO_SLOW = "too slow"


@dataclass(frozen=True, order=True)
class PromptRef:
    """A prompt as the data's owner dealt it: ``place`` is its position in the epoch's order, ``attempt`` how often it
    was superseded by age or failed before."""

    epoch: int
    place: int
    prompt: int
    attempt: int = 0


class PromptSource(Protocol):
    """Deals prompts and takes them back; ``roles/trainer/dataset.py`` is the real one."""

    size: int

    def take(self) -> PromptRef | None: ...
    def claim(self, epoch: int, prompt: int) -> PromptRef | None: ...
    def unwanted(self, ref: PromptRef) -> str: ...
    def give_back(self, ref: PromptRef) -> None: ...
    def done(self, ref: PromptRef) -> None: ...
    def close(self, ref: PromptRef, reason: str) -> None: ...
    def closed(self, epoch: int) -> dict[int, str]: ...


class Retries:
    """A prompt whose group was superseded by age, or failed, is tried again ``retries`` times, then closed for the
    epoch. Warns once an epoch when more than 1% of its prompts were closed."""

    def __init__(self, source: PromptSource, retries: int) -> None:
        self._source, self._retries = source, retries
        self._warned = -1

    def last(self, ref: PromptRef) -> bool:
        """Whether this was the prompt's last attempt."""
        return ref.attempt >= self._retries

    def again(self, ref: PromptRef) -> None:
        self._source.give_back(replace(ref, attempt=ref.attempt + 1))

    def close(self, ref: PromptRef, why: str) -> list[Any]:
        self._source.close(ref, why)
        closed = self._source.closed(ref.epoch)
        if len(closed) <= CLOSED_WARNING * self._source.size or ref.epoch <= self._warned:
            return []
        self._warned = ref.epoch
        slow = list(closed.values()).count(TOO_SLOW)
        text = f"{len(closed)} of {self._source.size} prompts of epoch {ref.epoch} are closed untrained"
        if slow:
            text += (
                f"; {slow} were too slow, so what is trained leans towards short answers: raise trainer.max_lag, or "
                "lower rollout.groups_in_flight or rollout.max_new_tokens"
            )
        failures = [reason for reason in closed.values() if reason != TOO_SLOW]
        if failures:
            text += f"; {len(failures)} failed, the last one with: {failures[-1]}"
        return [Note(text, "warning")]
