"""One-line records: to stderr with the peer's name, and to ``logs/<peer>.log`` with tracebacks."""

import logging
import sys
from pathlib import Path

ROOMS = ("mesh", "transport", "roles")


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.exc_info = None
        record.exc_text = None
        return super().format(record).replace("\n", " | ")


def setup(name: str, file: Path, *, stderr: bool = True) -> logging.Logger:
    """The logger ``mesh``, and those of the other rooms: INFO and above on stderr in one line, all in ``file``."""
    kept = logging.FileHandler(file, delay=False)
    kept.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handlers: list[logging.Handler] = [kept]
    if stderr:
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(logging.INFO)
        shown.setFormatter(_OneLine(f"%(asctime)s {name} %(levelname).1s %(message)s", "%H:%M:%S"))
        handlers.append(shown)
    for room in ROOMS:
        log = logging.getLogger(room)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.handlers[:] = handlers
    return logging.getLogger("mesh")
