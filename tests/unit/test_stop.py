"""A process that was told to stop and hangs says where, and ends."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

HANGS = """
import os, signal, sys, time
from mesh.node import Stop, _show_stacks

stop = Stop()
stop.install()
_show_stacks(open(sys.argv[1], "ab", buffering=0), stop, float(sys.argv[2]))

def hangs_here():
    print("ready", flush=True)
    while True:
        time.sleep(1)

hangs_here()
"""


@contextmanager
def hanging(log, leave_s):
    """A process that hangs, told to leave or not."""
    process = subprocess.Popen([sys.executable, "-c", HANGS, log, str(leave_s)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()


def test_a_peer_that_does_not_leave_writes_its_stacks_and_ends(tmp_path):
    log = tmp_path / "peer.log"
    with hanging(log, 0.2) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 1
    assert "in hangs_here" in log.read_text()


def test_stacks_are_shown_on_demand_and_nothing_ends(tmp_path):
    log = tmp_path / "peer.log"
    with hanging(log, 0) as process:
        process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 30.0
        while "in hangs_here" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "in hangs_here" in log.read_text()
        assert process.poll() is None
