"""An engine that has ended is started again, so many times within an hour; a rollout whose engine keeps ending leaves.

Starting one takes from seconds to minutes, on a thread of its own: whoever watches the rollout goes on meanwhile.
"""

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future

from roles.rollout.engines.base import Engine

WINDOW_S = 3600.0


class Restarts:
    """``make``: a new engine, not yet started. ``allowed``: within ``WINDOW_S``."""

    def __init__(self, make: Callable[[], Engine], allowed: int) -> None:
        self.make, self.allowed = make, allowed
        self.starting: Future[Engine] | None = None
        self._begun: collections.deque[float] = collections.deque()

    def begin(self, now: float) -> int:
        """Start an engine in the background; which restart of those allowed it is, or 0 when there were enough."""
        while self._begun and now - self._begun[0] > WINDOW_S:
            self._begun.popleft()
        if len(self._begun) >= self.allowed:
            return 0
        self._begun.append(now)
        self.starting = Future()
        threading.Thread(target=self._start, args=(self.starting,), name="engine start", daemon=True).start()
        return len(self._begun)

    def started(self) -> Engine | None:
        """The engine, once; None while it is being started. Raises what kept it from starting."""
        if self.starting is None or not self.starting.done():
            return None
        done, self.starting = self.starting, None
        return done.result()

    def _start(self, into: "Future[Engine]") -> None:
        try:
            into.set_result(self.make())
        except BaseException as e:  # raised where the engine is asked for
            into.set_exception(e)
