"""``mesh doctor``: what is wrong, or will be: of this machine before a run, or of a running mesh.

``machine`` looks at this host. ``mesh`` is a pure function of what an observer has collected. Both return findings, the
worst of which is the exit code: 1 when something is wrong, 0 otherwise.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.text import Text

from mesh import addresses, exits
from mesh import config as settings
from mesh.identity import PeerCard
from mesh.peer import WARNING
from transport.messages import Status

Level = Literal["ok", "note", "warning", "wrong"]
STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}
GIB = 1 << 30
COMMAND_S = 10.0
WATCH_S = 8.0  # of a running mesh: some steps of a small model
SILENT_S = 3.0  # an observer asks twice a second

ROLLOUTS_SHARE = 0.8  # of a trainer's time spent waiting for groups
IDLE_SHARE = 0.2
WEIGHTS_SHARE = 0.05
COLLECTIVES_SHARE = 0.1
STRAGGLER = 0.5  # of the median tokens per second
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    seen: str
    change: str = ""


# ----------------------------------------------------------------------------------------------------------------------
# A machine
# ----------------------------------------------------------------------------------------------------------------------


def machine(run: Path, config: settings.Config | None) -> list[Finding]:
    """Looks that take a moment each; none waits longer than ``COMMAND_S``. Imports neither torch nor vLLM."""
    port = config.mesh.port if config else 0
    looks: list[Callable[[], Finding]] = [
        _python, _torch, _gpus, _vllm, _shared_memory, _files, _network, lambda: _port(port), lambda: _disk(run),
        lambda: _clock(run), _nccl,
    ]  # fmt: skip
    if config is not None:
        looks.append(lambda: _model(config.model.path))
    return [look() for look in looks]


def _python() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok" if sys.version_info >= (3, 11) else "wrong", "Python", here, "3.11 or newer is needed")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _torch() -> Finding:
    here = _version("torch")
    return Finding("ok", "torch", here) if here else Finding("wrong", "torch", "missing", "install this project again")


def _gpus() -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("note", "GPUs", "none: weights travel over gloo, and everything runs on the CPU")
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return Finding("wrong", "GPUs", f"nvidia-smi has not answered within {COMMAND_S:.0f} s", "see the kernel's log")
    found = [line.split(" (UUID")[0] for line in said.stdout.splitlines()]
    if said.returncode or not found:
        why = (said.stderr or said.stdout).strip().splitlines() or ["nothing said"]
        return Finding("wrong", "GPUs", f"nvidia-smi fails: {why[0]}", "mend the driver, or hide the GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "; ".join(found) + (f"; CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "")
    if "+cpu" in _version("torch"):
        return Finding("warning", "GPUs", seen, f"torch {_version('torch')} cannot use them: install its CUDA build")
    return Finding("ok", "GPUs", seen)


def _vllm() -> Finding:
    from roles.rollout.engines.vllm_common import SUPPORTED, installed

    here = installed()
    if not here:
        return Finding("note", "vLLM", "not installed: rollouts sample with transformers", f"make vllm ({SUPPORTED})")
    if not here.startswith(f"{SUPPORTED}."):
        return Finding("warning", "vLLM", here, f"rollout.engine = vllm works with {SUPPORTED}.* only: install that")
    return Finding("ok", "vLLM", here)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as e:
        return Finding("wrong", "/dev/shm", e.strerror or str(e), "mount it: vLLM's workers and NCCL use it")
    seen = f"{free / GIB:.1f} GiB free"
    if free < GIB:
        return Finding("warning", "/dev/shm", seen, "give it 1 GiB or more (containers: --shm-size or --ipc=host)")
    return Finding("ok", "/dev/shm", seen)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft} at once, {hard} at most"
    if 0 <= hard < 4096:
        return Finding("warning", "open files", seen, "a peer of a large mesh needs more: raise the limit (ulimit -Hn)")
    return Finding("ok", "open files", seen)


def _network() -> Finding:
    chosen, names = addresses.default(), addresses.listing()
    if chosen is None:
        return Finding("warning", "network", names, "set mesh.address to the interface that others reach")
    return Finding("ok", "network", f"{chosen} of {names}")


def _port(port: int) -> Finding:
    what = f"port {port}" if port else "ports"
    try:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", port))
            s.listen()
            return Finding("ok", what, f"{s.getsockname()[1]} can be bound")
    except OSError as e:
        return Finding("wrong", what, e.strerror or str(e), "another process has it: set mesh.port to another, or to 0")


def _disk(run: Path) -> Finding:
    there = _existing(run)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        return Finding("wrong", "run directory", f"{there}: {e.strerror or e}", "choose another with --run")
    free = shutil.disk_usage(there).free
    seen = f"{there} can be written, {free / GIB:.1f} GiB free"
    return Finding("ok" if free > GIB else "warning", "run directory", seen, "checkpoints need more space")


def _clock(run: Path) -> Finding:
    """Against that of whoever keeps the run directory, which on a cluster is another machine."""
    there = _existing(run)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
            off = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:
        return Finding("note", "clock", "not compared: the run directory cannot be written")
    seen = f"{abs(off):.1f} s from that of {there}"
    return Finding(
        "ok" if abs(off) < 2 else "warning", "clock", seen, "let NTP set it: timelines of peers would differ"
    )


def _nccl() -> Finding:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    return Finding("note" if found else "ok", "NCCL", ", ".join(found) or "no variables set", "" if not found else
                   "they must be alike at all peers")  # fmt: skip


def _model(path: str) -> Finding:
    if path.startswith("starter:") or not path.startswith((".", "/", "~")):
        return Finding("ok", "model", f"{path}: made or downloaded at the first start")
    if not (Path(path).expanduser() / "config.json").exists():
        return Finding("wrong", "model", f"{path} has no config.json", "set model.path to a model directory")
    return Finding("ok", "model", path)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ----------------------------------------------------------------------------------------------------------------------
# A running mesh
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What was collected of one peer: its card, and its statuses from the oldest to the newest."""

    card: PeerCard
    statuses: Sequence[Status]
    silent_s: float

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def last(self) -> Status | None:
        return self.statuses[-1] if self.statuses else None


def mesh(peers: Sequence[Seen], max_lag: int) -> list[Finding]:
    """What is wrong with a mesh, and where its time goes. Pure."""
    trainers = [p for p in peers if p.card.role == "trainer"]
    rollouts = [p for p in peers if p.card.role == "rollout"]
    there = f"{len(trainers)} trainers, {len(rollouts)} rollouts"
    return [
        Finding("ok" if trainers and rollouts else "wrong", "peers", there, "start what is missing with --run"),
        *_deaths(peers), *_silent(peers), *_unproven(peers), *_versions(trainers, rollouts, max_lag), *_weights(peers),
        *_time(trainers), *_stragglers(rollouts), *_memory(peers),
    ]  # fmt: skip


def _deaths(peers: Sequence[Seen]) -> Iterator[Finding]:
    """What peers have seen happen of late, whoever tells it."""
    told = sorted((at, text.removeprefix(WARNING)) for p in peers if p.last for at, text in p.last.events)
    first: dict[tuple[str, float], str] = {}  # by who died and when, to a minute: each tells it in words of its own
    for at, text in told:
        if " died" in text:
            when = time.strftime("%H:%M:%S", time.localtime(at))
            first.setdefault((text.partition(" died")[0], at // 60), f"{text} at {when}")
    for seen in first.values():
        yield Finding("warning", "death", seen, "its log says why, if it could")


def _silent(peers: Sequence[Seen]) -> Iterator[Finding]:
    for p in peers:
        if p.silent_s > SILENT_S:
            yield Finding("wrong", p.name, f"has not answered for {p.silent_s:.0f} s",
                          f"look at logs/{p.name}.log; SIGUSR2 to it writes there what it does")  # fmt: skip


def _unproven(peers: Sequence[Seen]) -> Iterator[Finding]:
    for p in peers:
        if p.last is not None and p.last.state.startswith(("unproven", "engine dead")):
            yield Finding("wrong", p.name, p.last.state, "it samples nothing; its log has the cause")


def _versions(trainers: Sequence[Seen], rollouts: Sequence[Seen], max_lag: int) -> Iterator[Finding]:
    versions = [p.last.version for p in trainers if p.last is not None and p.last.version is not None]
    if not versions:
        return
    newest = max(versions)
    if len({v.term for v in versions}) > 1:
        yield Finding("wrong", "trainers", "work under different terms: " + ", ".join(map(str, versions)),
                      "is the network parted? they become one when they see each other")  # fmt: skip
    behind: list[int] = []
    for p in rollouts:
        if p.last is None or p.last.state.startswith("unproven"):
            continue
        if p.last.version is None:
            yield Finding("warning", p.name, "has no version yet", "it has just started, or no weights reach it")
        elif p.last.version.term == newest.term:
            behind.append(newest.number - p.last.version.number)
            if behind[-1] > max_lag + 2:
                yield Finding("warning", p.name, f"runs {p.last.version}, {behind[-1]} behind {newest}",
                              "its log says why; weights.pull_mib_s bounds how fast it catches up")  # fmt: skip
    if behind:
        yield Finding("ok", "versions", f"trainers at {newest}, rollouts at most {max(behind)} behind")


def _weights(peers: Sequence[Seen]) -> Iterator[Finding]:
    """Peers tell a digest of each of the last versions they had; of one version there can be only one."""
    digests: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for p in peers:
        for status in p.statuses:
            for told in status.texts.get("weights", "").split():
                version, _, digest = told.partition("=")
                digests[version][digest].add(p.name)
    compared = [by for by in digests.values() if sum(map(len, by.values())) > 1]
    for version, by in digests.items():
        if len(by) > 1:
            who = "; ".join(f"{digest} at {', '.join(sorted(names))}" for digest, names in sorted(by.items()))
            yield Finding("wrong", f"weights of {version}", who, "report this: a version cannot have two contents")
    if compared and not any(len(by) > 1 for by in compared):
        names = {name for by in compared for names in by.values() for name in names}
        yield Finding("ok", "weights", f"equal digests at {len(names)} peers, of {len(compared)} versions")
    differences = [p.last.figures["probe_difference"] for p in peers if p.last and "probe_difference" in p.last.figures]
    if differences:
        yield Finding("ok", "probes", f"differ by at most {max(differences):.1e} nat")


def _time(trainers: Sequence[Seen]) -> Iterator[Finding]:
    shares = _shares([s.figures for p in trainers for s in p.statuses])
    if not shares:
        yield Finding("note", "time", "no step was made yet")
        return
    wait = shares.get("wait", 0.0)
    weights = shares.get("snapshot", 0.0) + shares.get("probe", 0.0)
    sync = shares.get("sync", 0.0)
    parts = "  ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda p: -p[1]))
    yield Finding("ok", "a step's time", parts)
    if wait > ROLLOUTS_SHARE:
        yield Finding("warning", "bottleneck", f"trainers wait for rollouts {wait:.0%} of the time",
                      "start more rollouts, raise rollout.max_batch, or shorten rollout.max_new_tokens")  # fmt: skip
    elif wait > IDLE_SHARE:
        yield Finding(
            "note", "trainers", f"idle {wait:.0%} of the time", "more rollouts, or trainer.max_lag one higher"
        )
    if weights > WEIGHTS_SHARE:
        yield Finding("warning", "weights", f"snapshot and probe take {weights:.0%} of the time",
                      "weights.wire_dtype = bfloat16, or fewer weights.probe_tokens")  # fmt: skip
    if sync > COLLECTIVES_SHARE:
        yield Finding("warning", "collectives", f"trainers wait for each other {sync:.0%} of the time",
                      "more trainer.groups_per_step for each, a faster network, or fewer trainers")  # fmt: skip


def _shares(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    whole = sum(f.get("time/step_s", 0.0) for f in figures)
    parts: Counter[str] = Counter()
    for f in figures:
        parts.update({name[5:-2]: v for name, v in f.items() if name.startswith("time/") and name != "time/step_s"})
    return {name: seconds / whole for name, seconds in parts.items()} if whole else {}


def _stragglers(rollouts: Sequence[Seen]) -> Iterator[Finding]:
    rates = {p.name: median(s.figures.get("tokens_per_s", 0.0) for s in p.statuses) for p in rollouts if p.statuses}
    if len(rates) < 3:
        return
    middle = median(rates.values())
    for name, rate in rates.items():
        if rate < STRAGGLER * middle:
            yield Finding("warning", name, f"samples {rate:.0f} tokens/s, the middle of all is {middle:.0f}",
                          "see what else runs on its host")  # fmt: skip


def _memory(peers: Sequence[Seen]) -> Iterator[Finding]:
    hosts = {
        p.card.host: p.last.figures["host_memory_used"]
        for p in peers
        if p.last and "host_memory_used" in p.last.figures
    }
    for host, share in hosts.items():
        if share > MEMORY_SHARE:
            yield Finding("warning", host, f"{share:.0%} of its memory is used",
                          "fewer peers on it, a smaller rollout.max_batch or trainer.micro_batch_tokens")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


def doctor(*, run: Path | None, config: Path | None, rendezvous: str, watch_s: float = WATCH_S) -> int:
    """Print the findings of a running mesh when one is named, else of this machine. Returns the exit code."""
    try:
        if (run is not None and (run / "config.toml").exists()) or rendezvous:
            return tell(_watched(run, config, rendezvous, watch_s))
        loaded = settings.load(config) if config else None
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return exits.FAILURE
    return tell(machine(run or Path("runs"), loaded))


def _watched(run: Path | None, config: Path | None, rendezvous: str, watch_s: float) -> list[Finding]:
    from mesh.top import observe

    observer = observe(run, config, rendezvous)
    try:
        statuses: dict[str, list[Status]] = defaultdict(list)
        until = time.monotonic() + watch_s
        while time.monotonic() < until:
            for peer, (_, status) in list(observer.seen.status.items()):
                if not statuses[peer] or statuses[peer][-1] is not status:
                    statuses[peer].append(status)
            time.sleep(0.1)
        now = time.monotonic()
        heard = {peer: at for peer, (at, _) in observer.seen.status.items()}
        cards = sorted(observer.workers(), key=lambda card: (card.role != "trainer", card.name))
        peers = [Seen(card, statuses[card.id], now - heard.get(card.id, now - watch_s)) for card in cards]
        return mesh(peers, observer.max_lag)
    finally:
        observer.peer.leave("seen enough")


def tell(findings: Sequence[Finding]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    for f in findings:
        line = Text(f"{f.level:8}", style=STYLES[f.level]).append(f"{f.what}: {f.seen}", style="default")
        if f.change and f.level != "ok":
            line.append(f"; {f.change}", style="dim")
        console.print(line)
    return exits.FAILURE if any(f.level == "wrong" for f in findings) else exits.FINISHED
