"""One-line records: to stderr with the peer's name, and to ``logs/<peer>.log`` with tracebacks.

What others send can make a peer say something. So that nobody fills its disk, lines come at most ``LINES_PER_S`` in the
long run; how many were left out is said. Errors always pass: a peer says them once, and ends.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOMS = ("mesh", "transport", "roles")
LINES_AT_ONCE = 1_000  # a mesh of hundreds that starts at once
LINES_PER_S = 30.0  # a step of a toy model every 30 ms; 4 KiB each, a disk of a terabyte lasts for months


class _Bounded(logging.Filter):
    """A token bucket for all handlers together: each record is judged once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._at = clock, clock()
        self._tokens, self._left_out = float(LINES_AT_ONCE), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if "passed" not in record.__dict__:
            record.__dict__["passed"] = self._passes(record)
        return record.__dict__["passed"]

    def _passes(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        self._tokens = min(LINES_AT_ONCE, self._tokens + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._tokens < 1 and record.levelno < logging.ERROR:
            self._left_out += 1
            return False
        self._tokens = max(0.0, self._tokens - 1)
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} ({self._left_out} lines before this were left out)", ()
            self._left_out = 0
        return True


class _Kept(logging.Formatter):
    """What is said stays on one line, with whatever names others have given themselves; a traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " | ".join(super().formatMessage(record).splitlines())


class _OneLine(_Kept):
    def format(self, record: logging.LogRecord) -> str:
        record.exc_info = None
        record.exc_text = None
        return super().format(record)


def setup(name: str, file: Path, *, stderr: bool = True) -> logging.Logger:
    """The logger ``mesh``, and those of the other rooms: INFO and above on stderr in one line, all in ``file``."""
    logging.raiseExceptions = False  # a full disk is said once, by whom it stops, not by every line that is not kept
    kept = logging.FileHandler(file, delay=False)
    kept.setFormatter(_Kept("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handlers: list[logging.Handler] = [kept]
    if stderr:
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(logging.INFO)
        shown.setFormatter(_OneLine(f"%(asctime)s {name} %(levelname).1s %(message)s", "%H:%M:%S"))
        handlers.append(shown)
    bounded = _Bounded()
    for handler in handlers:
        handler.addFilter(bounded)
    for room in ROOMS:
        log = logging.getLogger(room)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.handlers[:] = handlers
    return logging.getLogger("mesh")
