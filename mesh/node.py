"""One peer in the foreground: what ``mesh-node`` and ``python -m mesh.node`` run."""

import faulthandler
import fcntl
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import psutil

from mesh import addresses, exits, launch, logs, rendezvous, secret
from mesh import config as settings
from mesh.identity import Role
from mesh.rundir import RunDir

LEAST_JOIN_S = 5.0  # for somebody to answer, however long loading took
LEAVE_S = 20.0  # ten times what it takes a rollout, which has nothing to save


class Stop:
    """Set by the first SIGINT, SIGTERM or SIGUSR1; a second one ends the process at once. While the peer loads, before
    others know it, the first one raises ``exits.Stopped`` wherever the main thread is: loading may take minutes.

    SIGUSR1 is a scheduler's warning before it takes the machine away, and so is SIGTERM where one has ``scheduled``
    this process: the peer leaves with the exit code that asks to be started again. Such signals come several times (to
    srun, which passes them on, and to each task): only a user is impatient."""

    def __init__(self, scheduled: bool = False) -> None:
        self._warnings = {signal.SIGUSR1, signal.SIGTERM} if scheduled else {signal.SIGUSR1}
        self._warned = False
        self.event = threading.Event()
        self.why = ""
        self.loading = False
        self._wake: list[Callable[[], None]] = []

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def on_stop(self, wake: Callable[[], None]) -> None:
        """``wake`` is called from the signal handler, so that whoever waits looks at once."""
        self._wake.append(wake)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.event.is_set():
            if number in self._warnings:
                return
            os._exit(exits.STOPPED)
        self._warned = number in self._warnings
        self.why = signal.Signals(number).name
        self.event.set()
        for wake in self._wake:
            wake()
        if self.loading:
            self.check()

    def is_set(self) -> bool:
        return self.event.is_set()

    def check(self) -> None:
        if self.event.is_set():
            raise exits.Stopped(self.why)

    @property
    def code(self) -> int:
        return exits.TRY_AGAIN if self._warned else exits.STOPPED


@dataclass
class Node:
    """What a role needs to know of the process it runs in."""

    role: Role
    config: settings.Config
    run: RunDir
    name: str
    launch: launch.Launch
    log: logging.Logger
    resume: bool = False
    trainers: int = 0  # that start together; 0: nobody knows
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        """Raises ValueError when secret or rendezvous are wrong: before anything slow is loaded."""
        url = self.config.mesh.rendezvous
        self._key = secret.load(self.run.path)
        self._meeting = rendezvous.parse(url) if url else launch.default_rendezvous(self.run.rendezvous, self.launch)

    def peer(self, **files: str) -> Any:
        """The peer of this process, its sockets bound but not yet joined. ``files``: digests of what must be alike at
        all peers beside the settings, as ``agreed_digests`` takes them. Raises ValueError, in one line."""
        from mesh.peer import Peer

        address = launch.advertised_address(self._meeting, self.config.mesh.address, self.launch)
        if self.config.mesh.address and (interface := addresses.interface_of(address)):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        return Peer(
            config=self.config,
            role=self.role,
            name=self.name,
            host=socket.gethostname(),
            run=secret.run_id(self._key, self._distinguishing_name()),
            keys=secret.keys(self._key),
            rendezvous=self._meeting,
            address=address,
            agreed=settings.agreed_digests(self.config, **files) if self.role != "observer" else {},
        )

    def _distinguishing_name(self) -> str:
        """A secret of the run directory is of one run. One from the environment may serve several, told by name."""
        return self.config.run.name if secret.VARIABLE in os.environ else ""

    def join(self, peer: Any) -> None:
        """Start the peer and wait until the mesh has answered, or go on as its first. Call it when all is loaded: the
        garbage collector passes over that from here on. Going through it would stop every thread for 0.1 s or more."""
        gc.collect()
        gc.freeze()
        gc.enable()
        self.stop.loading = False
        self.stop.check()
        peer.start()
        most = self.config.mesh.join_timeout_s
        peer.join(max(min(LEAST_JOIN_S, most), most - self._age_s()), self.stop.check)

    def _age_s(self) -> float:
        """Seconds since this process started: a person waits for an answer from then on."""
        return max(0.0, time.time() - psutil.Process().create_time())


def run_node(
    *,
    role: Literal["auto", "trainer", "rollout"],
    config_path: Path,
    rendezvous_url: str = "",
    run: Path | None = None,
    overrides: list[str] | None = None,
    address: str = "",
    resume: bool = False,
    name: str = "",
    trainers: int = 0,
) -> int:
    """Start one peer and work until the run is over. Returns the exit code; errors are one line on stderr, with the
    traceback in the peer's log."""
    where = ""
    try:
        config = settings.load(config_path, overrides)
        if rendezvous_url:
            config.mesh.rendezvous = rendezvous_url
        if address:
            config.mesh.address = address
        here = launch.detect()
        own, together = launch.role_of(role, here, config.mesh.trainers)
        directory = RunDir.make(run or here.run_directory(config.run.name))
        name = name or f"{own}-{here.unique or secrets.token_hex(2)}@{here.node}"
        log_file = directory.logs / f"{name.replace('/', '_')}.log"
        held = _only_one(log_file, name)
        log = logs.setup(name, log_file)
        where = f" (traceback in {log_file})"
        for warning in here.warnings:
            log.warning(warning)
        if here.kind != "alone":
            config.trainer.threads = launch.threads_for(config.trainer.threads, here.local_world_size)
            config.rollout.threads = launch.threads_for(config.rollout.threads, here.local_world_size)
        resume = resume or here.restarts > 0
        stop = Stop(scheduled=here.kind == "slurm")
        node = Node(own, config, directory, name, here, log, resume=resume, trainers=trainers or together, stop=stop)
        node.stop.install()
        _show_stacks(held, node.stop, LEAVE_S if own == "rollout" else 0.0)
        gc.disable()  # until all is loaded (Node.join): a sixth of the time that loading takes
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return exits.FAILURE
    try:
        node.stop.loading = True
        return _main_of(node.role)(node)
    except exits.Stopped as e:
        log.info("stopped by %s", e)
        return node.stop.code
    except exits.Requeue as e:
        log.error("%s", e)
        return exits.TRY_AGAIN
    except exits.Slept as e:
        log.warning("%s: starting again as a new peer", e)
        again = ["--resume"] if node.role == "trainer" and not resume else []
        os.execv(sys.executable, [sys.executable, "-m", "mesh.node", *sys.argv[1:], *again])
    except (ValueError, exits.GivenUp) as e:
        log.debug("failed", exc_info=True)
        log.error("error: %s", e)
        return exits.FAILURE
    except Exception as e:  # the last place that can say it in one line
        log.debug("failed", exc_info=True)
        log.error("error: %s%s", exits.unexpected(e), where)
        return exits.FAILURE


def _only_one(log_file: Path, name: str) -> IO[bytes]:
    """The log of this peer, held as long as this process lives. Raises ValueError when another one of the run holds it:
    two of one name would write into each other's files."""
    log = open(log_file, "ab", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        log.close()
        raise ValueError(
            f"another process of this run is named {name}: it holds {log_file}; give this one another --name"
        ) from None
    return log


def _show_stacks(stacks: IO[bytes], stop: Stop, leave_s: float) -> None:
    """SIGUSR2 writes where every thread is to the peer's log. So does a peer that was told to stop and is still there
    after ``leave_s`` (unless that is 0), which then ends, whatever it hangs in."""
    faulthandler.register(signal.SIGUSR2, file=stacks)
    if leave_s:
        stop.on_stop(lambda: faulthandler.dump_traceback_later(leave_s, exit=True, file=stacks))


def end(code: int) -> NoReturn:
    """Leave the process now. Everything with an owner is closed by then; what is left is the interpreter taking torch
    apart, which takes more than a second and can crash while a process group's threads still run."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main_of(role: Role) -> Callable[[Node], int]:
    from transport.nccl_env import set_nccl_environment

    set_nccl_environment()  # before torch is imported
    if role == "trainer":
        from roles.trainer.trainer import main
    elif role == "rollout":
        from roles.rollout.rollout import main
    else:
        raise ValueError(f"role {role} does no work; mesh-node takes rollout or trainer")
    return main


if __name__ == "__main__":
    from mesh.cli import node

    node()
