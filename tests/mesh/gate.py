"""The reward of the tests' runs, with a gate: while the file ``closed`` is in directory ``$GATE``, nothing is scored.

So a test decides when a run goes on, and what is on its way when a process is killed does not depend on any clock.
``after`` in that directory closes the gate by itself: each call takes one character off it, and the last one closes.
"""

import fcntl
import os
import time
from pathlib import Path

GATE = Path(os.environ["GATE"])
CLOSED, AFTER = GATE / "closed", GATE / "after"


def exact(prompts, completions, answer, **_):
    if AFTER.exists():
        with open(AFTER, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            left = len(file.read())
            if left == 1:
                CLOSED.touch()
            file.truncate(max(0, left - 1))
    while CLOSED.exists():
        time.sleep(0.01)
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
