"""How many groups a trainer keeps on order: as few as keep it busy.

``max_lag`` is a ceiling on age, not a target: every group on order beyond what the trainer needs to stay busy only
waits, and ages. So the window starts at one batch (generation and training take turns) and grows a quarter of a batch
a step while the trainer waits for more than ``wait_target`` of its step *and* the window is what held rollouts back: a
trainer that waits because every rollout is busy would gain nothing. It shrinks a sixteenth of a batch a step while the
trainer has lost less than half of the target over the last steps together: so it settles just above what is needed.
A size too small by one can cost the sampling of a whole batch at once: if the next step, which waits for nothing, were
reason enough to shrink again, that wait would come back every few steps.
"""

MEMORY = 64  # steps


class Window:
    """``size`` is the number of credits out and groups held, the batch in training included; always within
    [groups_per_step, (max_lag + 1) * groups_per_step], hence constant at ``max_lag = 0``. Of several trainers each has
    one for its share of the batch."""

    def __init__(self, groups_per_step: int, max_lag: int, wait_target: float) -> None:
        self._floor = groups_per_step
        self._max_lag = max_lag
        self._wait_target = wait_target
        self.size = groups_per_step
        self._lost = 0.0  # time waited over time worked: a running mean over MEMORY steps, at most the target

    @property
    def ceiling(self) -> int:
        return (self._max_lag + 1) * self._floor

    def resize(self, groups_per_step: int) -> None:
        """Another share, and as many batches on order as before."""
        self.size = self.size * groups_per_step // self._floor if self._floor else groups_per_step
        self._floor = groups_per_step
        self.size = max(self.size, self._floor)

    def step(self, waited: float, limited: bool) -> None:
        """After each step: ``waited`` is the share of the step the trainer spent waiting for groups (0 to 1),
        ``limited`` whether a rollout with a free place got no credit because of the window."""
        lost = waited / max(1.0 - waited, 0.1)
        self._lost = min(self._lost + (lost - self._lost) / MEMORY, self._wait_target)
        if waited > self._wait_target and limited:
            self.size += max(1, self._floor // 4)
        elif max(waited, self._lost) < self._wait_target / 2:
            self.size -= max(1, self._floor // 16)
        self.size = min(max(self.size, self._floor), self.ceiling)
