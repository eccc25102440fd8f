"""A process that was told to stop and hangs says where, and ends."""

import signal
import subprocess
import sys
import time

HANGS = """
import os, signal, sys, time
from pathlib import Path
from mesh.node import Stop, _show_stacks

stop = Stop()
stop.install()
_show_stacks(Path(sys.argv[1]), stop, float(sys.argv[2]))
print("ready", flush=True)

def hangs_here():
    while True:
        time.sleep(1)

hangs_here()
"""


def test_a_peer_that_does_not_leave_writes_its_stacks_and_ends(tmp_path):
    log = tmp_path / "peer.log"
    process = subprocess.Popen([sys.executable, "-c", HANGS, log, "0.2"], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 1
    finally:
        process.kill()
    assert "in hangs_here" in log.read_text()


def test_stacks_are_shown_on_demand_and_nothing_ends(tmp_path):
    log = tmp_path / "peer.log"
    process = subprocess.Popen([sys.executable, "-c", HANGS, log, "0"], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 30.0
        while "in hangs_here" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "in hangs_here" in log.read_text()
        assert process.poll() is None
    finally:
        process.kill()
