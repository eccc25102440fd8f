"""``mesh top``: a running mesh from outside, live, or once where nobody watches."""

import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mesh import config as settings
from mesh import exits, launch, secret, view
from mesh.node import Node
from mesh.observer import Observer
from mesh.rundir import RunDir

FOUND_S = 10.0  # for a peer of the mesh to be seen
TOLD_S = 3.0  # for all of them to have said how they are
GONE_S = 5.0  # without anybody: the mesh has ended
DRAW_S = 0.5


def observe(run: Path | None, config: Path | None, rendezvous: str, runs: Path = Path("runs")) -> Observer:
    """An observer that has found a mesh: that of the run directory ``run`` (default: the one in ``runs`` that was
    written last), or, where that is out of reach, the one of these settings at ``rendezvous``.

    Raises ValueError, in one line, when there is none, or nobody answers."""
    if run is None and config is None:
        run = _newest(runs)
    if run is not None and not (run / "config.toml").exists():
        raise ValueError(f"{run} is no run directory: it has no config.toml; name one with --run")
    if run is None and secret.VARIABLE not in os.environ:
        raise ValueError(f"without the run directory its secret is not known: set {secret.VARIABLE}, or give --run")
    found = settings.load(config or run / "config.toml")  # type: ignore[operator]
    if rendezvous:
        found.mesh.rendezvous = rendezvous
    elif run is None:
        raise ValueError("--config alone says what to look for but not where: add --rendezvous tcp://host:port")
    log = logging.getLogger("mesh")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    directory = RunDir(run or runs / found.run.name)
    name = f"observer-{secrets.token_hex(2)}@{socket.gethostname()}"
    observer = Observer(Node("observer", found, directory, name, launch.detect(), log))
    observer.peer.start()
    try:
        observer.peer.join(FOUND_S)
        deadline = time.monotonic() + FOUND_S
        while not observer.workers():
            if time.monotonic() > deadline:
                raise ValueError(_nobody(directory))
            time.sleep(0.05)
    except BaseException:
        observer.peer.leave("found nobody")
        raise
    return observer


def told(observer: Observer) -> None:
    """Wait until all have said how they are, or had the time to."""
    deadline = time.monotonic() + TOLD_S
    while observer.silent(TOLD_S) and time.monotonic() < deadline:
        time.sleep(0.05)


def top(*, run: Path | None, config: Path | None, rendezvous: str, once: bool) -> int:
    """Show the mesh until it ends or Ctrl-C. Returns the exit code: 0 when a mesh was seen."""
    console = Console()
    try:
        observer = observe(run, config, rendezvous)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return exits.FAILURE
    except KeyboardInterrupt:
        return exits.STOPPED
    try:
        told(observer)
        if once or not console.is_terminal:
            console.print(view.draw(observer.seen, console.width))
            return exits.FINISHED
        with Live(console=console, refresh_per_second=4) as live:
            last = time.monotonic()
            while time.monotonic() - last < GONE_S:
                if observer.workers():
                    last = time.monotonic()
                live.update(view.draw(observer.seen, console.width))
                time.sleep(DRAW_S)
        console.print("the mesh has ended")
        return exits.FINISHED
    except KeyboardInterrupt:
        return exits.FINISHED
    finally:
        observer.peer.leave("seen enough")


def _newest(runs: Path) -> Path:
    found = [path.parent for path in runs.glob("*/config.toml")]
    if not found:
        raise ValueError(f"there is no run in {runs.absolute()}: name one with --run")
    return max(found, key=lambda path: max((f.stat().st_mtime for f in (path / "metrics").glob("*")), default=0.0))


def _nobody(run: RunDir) -> str:
    if run.summary.exists():
        return f"{run.path} holds a run that has finished: nobody is at work there; its figures are in summary.json"
    return f"no peer of {run.path} answers: start some with --run {run.path}, or give --rendezvous"
