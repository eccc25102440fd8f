"""One evaluation: held-out prompts answered by exactly one version of the weights.

Its credits are pinned, so a rollout whose engine has moved past the version cannot take part; it says so by failing the
credit with the reason ``PASSED`` and gets no more of them. When no rollout is left that could, and none is at work,
the evaluation is *stuck*: the trainer pins it to a newer version and all of it starts again, because figures of two
versions must not be mixed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.version import Version
from transport.delivery import Evaluated, seed_of
from transport.messages import Credit, CreditId

PASSED = "the pinned version has passed"


@dataclass(frozen=True)
class EvaluationState:
    """``done`` of ``total`` prompts have a result under ``version``; ``stuck``: every rollout has passed that version,
    so pin it to a newer one."""

    version: Version
    total: int
    done: int
    out: int
    repins: int
    stuck: bool

    @property
    def complete(self) -> bool:
        return self.done == self.total


class Evaluation:
    """Which prompts are pending, out and done. Seeds depend on the prompt alone, so that two versions are compared on
    the same draws."""

    def __init__(self, prompts: Sequence[int], version: Version, *, size: int, seed: int, retries: int) -> None:
        self.version = version
        self.pending = deque(prompts)
        self._prompts = tuple(prompts)
        self._size, self._seed, self._retries = size, seed, retries
        self._attempts: dict[int, int] = {}
        self._passed: dict[PeerId, None] = {}
        self._done = self._out = self._repins = 0

    def offers(self, rollout: PeerId) -> bool:
        """Whether there is a prompt this rollout could do."""
        return bool(self.pending) and rollout not in self._passed

    def order(self, id: CreditId) -> Credit:
        """A credit for the next pending prompt."""
        prompt = self.pending.popleft()
        self._out += 1
        attempt = self._attempts.get(prompt, 0)
        return Credit(
            id=id,
            prompt=prompt,
            epoch=0,
            attempt=attempt,
            size=self._size,
            min_version=self.version,
            seed=seed_of(self._seed, "evaluation", 0, prompt, attempt),
            evaluation=True,
        )

    def end(self, rollout: PeerId, prompt: int, outcome: str, why: str) -> list[Evaluated]:
        """A credit for this prompt has ended. One that failed too often is done, without a group."""
        self._out -= 1
        if outcome == "evaluated":
            self._done += 1
        elif outcome == "failed":
            self._attempts[prompt] = self._attempts.get(prompt, 0) + 1
            if self._attempts[prompt] > self._retries:
                self._done += 1
                return [Evaluated(prompt, self.version, None)]
            self.pending.append(prompt)
        else:
            if why == PASSED:
                self._passed[rollout] = None
            self.pending.appendleft(prompt)
        return []

    def repin(self, version: Version) -> None:
        """Start again with ``version``; all credits have ended."""
        assert self._out == 0, "credits of the old version are still out"
        self.version = version
        self.pending = deque(self._prompts)
        self._attempts.clear()
        self._passed.clear()
        self._done = 0
        self._repins += 1

    def state(self, rollouts: Iterable[PeerId]) -> EvaluationState:
        peers = list(rollouts)
        everybody = bool(peers) and all(peer in self._passed for peer in peers)
        stuck = bool(self.pending) and self._out == 0 and everybody
        return EvaluationState(self.version, len(self._prompts), self._done, self._out, self._repins, stuck)
