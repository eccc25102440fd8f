"""Where am I: which process of how many, on which device, at which address.

Precedence: explicit flags, then torchrun, then a SLURM step, then alone. A launcher's variables count only as a whole:
an interactive allocation leaves SLURM variables in the shell, and scripts export RANK by hand; what is left over or
contradicts is reported and not used.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mesh import addresses
from mesh.identity import Role
from mesh.rendezvous import Directory, LauncherStore, Rendezvous, Seeds, names_this_machine

_SPECIAL_STEP = 0xFFFFFFF0  # ids from here on are SLURM's batch script, interactive shell and the like: no srun step


@dataclass(frozen=True)
class Launch:
    """``device_index`` is an index among the GPUs this process sees, None without any. ``peers_announced`` is how many
    processes the launcher starts, 0 when nobody said. ``job`` names the launcher's job, ``step`` this part of it, and
    ``restarts`` counts how often it was started again. ``node`` is this machine's name. ``warnings`` go to the log."""

    kind: Literal["flags", "torchrun", "slurm", "alone"] = "alone"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    device_index: int | None = None
    job: str = ""
    step: int = 0
    restarts: int = 0
    node: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def peers_announced(self) -> int:
        return 0 if self.kind == "alone" else self.world_size

    @property
    def unique(self) -> str:
        """What tells this process from the others of its run in its name, the same after a restart; empty alone."""
        if self.kind == "alone" or (self.kind == "torchrun" and self.world_size == 1):  # an agent for each peer
            return ""
        return f"{self.rank}-{self.job}.{self.step}" if self.kind == "slurm" else str(self.rank)

    def run_directory(self, name: str) -> Path:
        """Where the run ``name`` keeps its files unless it is told: under SLURM each job has its own, so that the same
        script may be submitted twice, and one that is requeued finds what it has left."""
        return Path("runs") / (f"{name}-{self.job}" if self.kind == "slurm" else name)


def detect(
    env: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
) -> Launch:
    """What the environment says of this process; flags that are given override it. Raises ValueError for flags that
    contradict each other."""
    env = os.environ if env is None else env
    torchrun, slurm = _torchrun(env), _slurm(env)
    found = torchrun or slurm or Launch()
    warnings = list(found.warnings)
    if torchrun and slurm:
        warnings += _contradictions(torchrun, slurm, env)
    elif not torchrun and not slurm:
        warnings += _leftovers(env)
    kind, here, size = found.kind, found.rank, found.world_size
    local, local_size = found.local_rank, found.local_world_size
    if rank is not None or world_size is not None or local_rank is not None:
        kind = "flags"
        here = here if rank is None else rank
        size = max(size, here + 1) if world_size is None else world_size
        local = local if local_rank is None else local_rank
        local_size = max(local_size, local + 1)
        if not 0 <= here < size or local < 0:
            raise ValueError(f"rank {here} (local rank {local}) of {size} processes: ranks run from 0 to size - 1")
    devices, shared = _devices(env, local_size)
    if shared:
        warnings.append(shared)
    device = None if not devices else local % devices
    return replace(
        found,
        kind=kind,
        rank=here,
        local_rank=local,
        world_size=size,
        local_world_size=local_size,
        device_index=device,
        node=found.node or socket.gethostname(),
        warnings=tuple(warnings),
    )


def role_of(role: Literal["auto", "trainer", "rollout"], launch: Launch, trainers: int) -> tuple[Role, int]:
    """The role of this process, and how many trainers the launcher starts together with it (0: nobody knows).

    With ``auto`` the first ``trainers`` of the launcher's processes are trainers and the others rollouts; else all that
    this step (or agent) starts are what they are told to be. Raises ValueError where there is no launcher to count."""
    if role == "auto":
        if launch.kind == "alone":
            raise ValueError("--role auto needs srun or torchrun, which number the processes; say trainer or rollout")
        role = "trainer" if launch.rank < trainers else "rollout"
        return role, min(trainers, launch.world_size)
    return role, launch.peers_announced if role == "trainer" else 0


def default_rendezvous(path: Path, launch: Launch, env: Mapping[str, str] | None = None) -> Directory:
    """The directory ``path`` of the run; under several agents of torchrun also the store that the first one keeps."""
    env = os.environ if env is None else env
    host, port = env.get("MASTER_ADDR", ""), _int(env, "MASTER_PORT")
    if launch.kind == "torchrun" and launch.nodes > 1 and host and port and _agents_store(env):
        return LauncherStore(path, host, port, launch.rank, launch.world_size)
    return Directory(path)


def _agents_store(env: Mapping[str, str]) -> bool:
    """Whether torchrun's agent keeps the store: else its first worker would have to."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    rank, local, size = (_int(env, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank is None or local is None or size is None or not 0 <= rank < size:
        return None
    local_size = _int(env, "LOCAL_WORLD_SIZE") or max(local + 1, 1)
    nodes = _int(env, "GROUP_WORLD_SIZE") or -(-size // local_size)
    restarts = _int(env, "TORCHELASTIC_RESTART_COUNT") or 0
    job = env.get("TORCHELASTIC_RUN_ID", "")
    return Launch("torchrun", rank, local, size, local_size, nodes, job=job, restarts=restarts)


def _slurm(env: Mapping[str, str]) -> Launch | None:
    step, rank, local = (_int(env, name) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"))
    if step is None or rank is None or local is None or not 0 <= step < _SPECIAL_STEP:
        return None
    size = _int(env, "SLURM_STEP_NUM_TASKS") or _int(env, "SLURM_NTASKS") or 1
    nodes = _int(env, "SLURM_STEP_NUM_NODES") or _int(env, "SLURM_NNODES") or 1
    warnings = []
    if rank >= size and "SLURM_HET_SIZE" not in env:  # a component knows its own size, but ranks count through
        warnings.append(f"SLURM_PROCID={rank} is not below the step's {size} tasks (a heterogeneous job?)")
        size = rank + 1
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    node = _int(env, "SLURM_NODEID") or 0
    local_size = per_node[node] if node < len(per_node) else -(-size // nodes)
    return Launch(
        kind="slurm",
        rank=rank,
        local_rank=local,
        world_size=size,
        local_world_size=max(local_size, local + 1),
        nodes=nodes,
        job=env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID", ""),
        step=step,
        restarts=_int(env, "SLURM_RESTART_COUNT") or 0,
        node=env.get("SLURMD_NODENAME", ""),
        warnings=tuple(warnings),
    )


def _contradictions(torchrun: Launch, slurm: Launch, env: Mapping[str, str]) -> list[str]:
    if (torchrun.rank, torchrun.world_size) == (slurm.rank, slurm.world_size):
        return []
    text = (
        f"RANK={torchrun.rank} of WORLD_SIZE={torchrun.world_size} is used, "
        f"not SLURM's task {slurm.rank} of {slurm.world_size}"
    )
    if "TORCHELASTIC_RUN_ID" not in env:
        text += (
            "; torchrun did not set it: a batch script that exports RANK=$SLURM_PROCID gives every task the same one; "
            "unset RANK"
        )
    return [text]


def _leftovers(env: Mapping[str, str]) -> list[str]:
    said = []
    torch_names = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in env]
    if torch_names:
        values = ", ".join(f"{name}={env[name]}" for name in torch_names)
        said.append(
            f"{values}: ignored; torchrun sets RANK, LOCAL_RANK and WORLD_SIZE together, with RANK below WORLD_SIZE"
        )
    if (_int(env, "SLURM_NTASKS") or 1) > 1:
        said.append(
            f"inside SLURM job {env.get('SLURM_JOB_ID', '')} with {env['SLURM_NTASKS']} tasks, but not started by "
            "srun: this process runs alone"
        )
    return said


def _devices(env: Mapping[str, str], local_size: int) -> tuple[int, str]:
    """How many GPUs this process sees (without loading torch), and a warning when several peers must share one."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        seen = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    else:  # indices or UUIDs; CUDA stops at the first that is none
        names = [name.strip() for name in visible.split(",")]
        seen = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    here = _int(env, "SLURM_GPUS_ON_NODE") or seen  # under SLURM each task may see only its own
    if 0 < here < local_size:
        return seen, (
            f"{local_size} peers share {here} GPU{'s' if here > 1 else ''} on this machine, and NCCL refuses two ranks "
            "on one; with SLURM give each its own: --gpus-per-task=1 or --gpu-bind=single:1"
        )
    return seen, ""


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's ``2(x3),1`` as [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * min(int(match[2] or 1), 1 << 16)
    return counts


def _int(env: Mapping[str, str], name: str) -> int | None:
    """SLURM writes some values as ``4(x2)`` or ``gpu:4``; only plain numbers are taken."""
    text = env.get(name, "").strip()
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


# ----------------------------------------------------------------------------------------------------------------------
# Address and threads
# ----------------------------------------------------------------------------------------------------------------------


def advertised_address(rendezvous: Rendezvous, override: str = "", launch: Launch | None = None) -> str:
    """The IP address to bind and to tell others.

    ``override`` is an IP address, an interface or a name. Else, for seeds, the local address of the route towards the
    first that is not on this machine; for a directory the loopback, unless the launcher spreads the run over several
    nodes: then the address of the default route. Under SLURM it is that one also for a step on one node, where there is
    such a route: other steps and jobs may join the run from elsewhere. May ask the resolver.

    Raises ValueError, listing the interfaces, when there is none, or other machines would be told a loopback address.
    """
    seeds = rendezvous.seeds if isinstance(rendezvous, Seeds) else ()
    spread = launch is not None and launch.nodes > 1
    remote, own_name, local = _look_at(seeds)
    if override:
        chosen: str | None = _overridden(override)
    elif remote:
        chosen = addresses.towards(remote)
    elif spread or own_name:
        chosen = addresses.default()
    elif not seeds and launch is not None and launch.kind == "slurm":
        chosen = addresses.default() or local
    else:
        chosen = local
    why = remote or ("the other nodes of this job" if spread else own_name)
    if chosen is None or (why and addresses.is_loopback(chosen)):
        problem = f"{chosen} is a loopback address" if chosen else "no local address leads there"
        raise ValueError(
            f"peers must reach this one from {why}, and {problem}; set mesh.address to one of: {addresses.listing()}"
        )
    return chosen


def _look_at(seeds: tuple[tuple[str, int], ...]) -> tuple[str, str, str]:
    """The first seed's address on the network, the first seed that is this machine's own name as its hosts file maps it
    to the loopback (both empty where there is none), and the loopback address to use where neither is."""
    remote, own_name, local, unknown = "", "", "", []
    for host, _ in seeds:
        try:
            ips = addresses.resolve(host)
        except ValueError as e:  # others may do; its peer may come later
            unknown.append(str(e))
            continue
        for ip in ips:
            if addresses.is_loopback(ip):
                local = local or ip
            elif addresses.towards(ip):
                return ip, own_name, local
            else:
                remote = remote or ip
        if names_this_machine(host, ips):
            own_name = own_name or host
    if seeds and len(unknown) == len(seeds):
        raise ValueError(f"mesh.rendezvous: {unknown[0]}")
    return remote, own_name, local or "127.0.0.1"


def _overridden(override: str) -> str:
    here = addresses.interfaces()
    if override in here:
        return here[override][0]
    try:
        return addresses.resolve(override.strip("[]"))[0]
    except ValueError:
        raise ValueError(
            f"mesh.address = {override!r} is no address, interface or name known here; there are {addresses.listing()}"
        ) from None


def threads_for(config_threads: int, peers_on_this_machine: int, env: Mapping[str, str] | None = None) -> int:
    """CPU threads of one peer: what the settings say, else what SLURM gave this task, else its share of the cores that
    this process may use. At least 1."""
    env = os.environ if env is None else env
    if config_threads > 0:
        return config_threads
    if _slurm(env) and (given := _int(env, "SLURM_CPUS_PER_TASK")):
        return given
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, peers_on_this_machine))
