"""When a local mesh kills a rollout and starts another: the demonstration of ``mesh up``, pure."""

from collections import deque
from collections.abc import Collection, Sequence

PACE_S = 10.0  # over which the pace of the steps is measured


class Plan:
    """``kill_at`` and ``add_at`` are shares of ``steps``, 0: never. A process needs seconds before it joins, so the new
    rollout is started earlier, by as many steps as pass in that time: it joins at about ``add_at``."""

    def __init__(self, steps: int, kill_at: float, add_at: float) -> None:
        self.kill_step = int(kill_at * steps)
        self.add_step = int(add_at * steps)
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, step: int, now: float) -> None:
        """The trainer is at ``step``; ``now`` in seconds."""
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now - PACE_S:
            self._seen.popleft()

    @property
    def pace(self) -> float:
        """Steps a second lately."""
        if len(self._seen) < 2:
            return 0.0
        (since, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - since) if now > since else 0.0

    def kill_now(self) -> bool:
        """True once, when the step to kill at is reached."""
        due = bool(self.kill_step and self._seen and self._seen[-1][1] >= self.kill_step)
        self.kill_step = 0 if due else self.kill_step
        return due

    def add_now(self, start_s: float) -> bool:
        """True once, when a process that needs ``start_s`` to join should be started."""
        ahead = self._seen[-1][1] + self.pace * start_s if self._seen else 0.0
        due = bool(self.add_step and self._seen and self._seen[-1][1] > 0 and ahead >= self.add_step)
        self.add_step = 0 if due else self.add_step
        return due


def victim(running: Sequence[str], joined: Collection[str]) -> str | None:
    """Whom to kill of the rollouts that run, in the order of their start: the newest that works already."""
    return next((name for name in reversed(running) if name in joined), None)
