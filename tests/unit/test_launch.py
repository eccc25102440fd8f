import os
import socket
from pathlib import Path

import pytest

from mesh import addresses, launch
from mesh.rendezvous import parse

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "run-7",
}
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_a_process_started_by_hand_is_alone() -> None:
    here = launch.detect({"CUDA_VISIBLE_DEVICES": ""})
    assert here == launch.Launch(node=socket.gethostname())
    assert here.peers_announced == 0


def test_torchrun_is_recognised() -> None:
    here = launch.detect({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert (here.kind, here.rank, here.local_rank, here.world_size) == ("torchrun", 5, 1, 8)
    assert (here.local_world_size, here.nodes, here.device_index, here.job) == (4, 2, 1, "run-7")
    assert here.peers_announced == 8
    assert here.warnings == ()


def test_a_task_of_srun_is_recognised() -> None:
    here = launch.detect(STEP)
    assert (here.kind, here.rank, here.local_rank, here.world_size) == ("slurm", 3, 1, 5)
    assert (here.local_world_size, here.nodes, here.job, here.warnings) == (2, 3, "42", ())
    assert (here.step, here.restarts, here.unique) == (3, 0, "3-42.3")


def test_under_slurm_a_job_has_a_run_directory_and_finds_it_again() -> None:
    first, again = launch.detect(STEP), launch.detect({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert (first.restarts, again.restarts) == (0, 2)
    assert first.run_directory("sort") == again.run_directory("sort") == Path("runs/sort-42")
    assert launch.detect({"CUDA_VISIBLE_DEVICES": ""}).run_directory("sort") == Path("runs/sort")


def test_components_of_a_heterogeneous_job_are_one_run() -> None:
    component = {"SLURM_HET_SIZE": "2", "SLURM_HET_JOB_ID": "41", "SLURM_STEP_NUM_TASKS": "2"}
    here = launch.detect({**STEP, **component})
    assert (here.job, here.rank, here.world_size, here.warnings) == ("41", 3, 2, ())


def test_torchrun_that_restarts_its_workers_is_recognised() -> None:
    assert launch.detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).restarts == 1


def test_the_first_ranks_are_trainers_and_the_others_rollouts() -> None:
    roles = [launch.role_of("auto", launch.detect({**STEP, "SLURM_PROCID": str(rank)}), 2) for rank in range(5)]
    assert roles == [("trainer", 2)] * 2 + [("rollout", 2)] * 3
    assert launch.role_of("auto", launch.detect(STEP), 9) == ("trainer", 5)


def test_a_step_of_trainers_announces_how_many_they_are() -> None:
    assert launch.role_of("trainer", launch.detect(STEP), 1) == ("trainer", 5)
    assert launch.role_of("rollout", launch.detect(STEP), 1) == ("rollout", 0)
    assert launch.role_of("trainer", launch.detect({}), 1) == ("trainer", 0)
    with pytest.raises(ValueError, match="say trainer or rollout"):
        launch.role_of("auto", launch.detect({}), 1)


def test_the_step_counts_not_the_allocation() -> None:
    here = launch.detect({**STEP, "SLURM_NTASKS": "64", "SLURM_NNODES": "16"})
    assert (here.world_size, here.nodes) == (5, 3)


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_an_allocation_without_srun_is_left_over_and_said(step: str | None) -> None:
    env = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "5", "SLURM_NODELIST": "n[1-3]", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"SLURM_STEP_ID": step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"} if step else {}
    here = launch.detect(env)
    assert (here.kind, here.world_size) == ("alone", 1)
    assert "not started by srun" in here.warnings[0]


def test_torchrun_inside_srun_wins_and_the_difference_is_said() -> None:
    here = launch.detect({**STEP, **TORCHRUN})
    assert (here.kind, here.rank) == ("torchrun", 5)
    assert here.warnings == ("RANK=5 of WORLD_SIZE=8 is used, not SLURM's task 3 of 5",)


def test_torchrun_and_srun_that_agree_need_no_warning() -> None:
    assert launch.detect({**STEP, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5"}).warnings == ()


def test_a_rank_expanded_too_early_is_suspected() -> None:
    here = launch.detect({**STEP, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "5"})
    assert "unset RANK" in here.warnings[0]


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, {"RANK": "x"}])
def test_half_of_torchruns_variables_is_ignored_and_said(env: dict[str, str]) -> None:
    here = launch.detect({**env, "CUDA_VISIBLE_DEVICES": ""})
    assert here.kind == "alone"
    assert "ignored" in here.warnings[0]


def test_a_heterogeneous_job_counts_through() -> None:
    here = launch.detect({**STEP, "SLURM_PROCID": "6"})
    assert (here.rank, here.world_size) == (6, 7)
    assert "heterogeneous" in here.warnings[0]


def test_flags_come_before_everything() -> None:
    here = launch.detect({**STEP, **TORCHRUN}, rank=2, local_rank=0, world_size=3)
    assert (here.kind, here.rank, here.local_rank, here.world_size) == ("flags", 2, 0, 3)
    with pytest.raises(ValueError, match=r"rank 3 .* of 3 processes"):
        launch.detect({}, rank=3, world_size=3)


@pytest.mark.parametrize(
    ("visible", "local", "index"),
    [
        ("0", 3, 0),
        ("GPU-8a5f0a1e-5b1e-4b0a-9a53-1f0a7c1f3c11", 3, 0),
        ("GPU-1,GPU-2", 3, 1),
        ("0,1,2,3", 3, 3),
        ("0,1,-1,3", 3, 1),
        ("", 3, None),
        ("-1", 3, None),
        ("NoDevFiles", 3, None),
    ],
)
def test_the_device_is_one_that_this_task_sees(visible: str, local: int, index: int | None) -> None:
    env = {**STEP, "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "CUDA_VISIBLE_DEVICES": visible}
    assert launch.detect({**env, "SLURM_GPUS_ON_NODE": "4" if index is not None else ""}).device_index == index


def test_peers_that_share_a_gpu_are_told_how_to_part() -> None:
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    [warning] = launch.detect(env).warnings
    assert "8 peers share 4 GPUs" in warning
    assert "--gpus-per-task" in warning
    assert launch.detect({**env, "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "CUDA_VISIBLE_DEVICES": "0"}).warnings == ()


# ----------------------------------------------------------------------------------------------------------------------
# Addresses. The network of the machine is replaced: what it looks like must not matter.
# ----------------------------------------------------------------------------------------------------------------------

HOSTS = {
    "login": ["10.0.0.5"],
    "me": ["127.0.1.1"],
    "localhost": ["127.0.0.1", "::1"],
    "dual": ["fd00::5", "10.0.0.5"],
    "v6only": ["fd00::5"],
}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """lo, docker0, eth0 (v4 and v6) and ib0, with a hosts file that maps the machine's own name to 127.0.1.1."""

    def resolve(host: str) -> list[str]:
        if host in HOSTS:
            return HOSTS[host]
        if ":" in host or host.replace(".", "").isdigit():
            return [host]
        raise ValueError(f"host {host} cannot be resolved: Name or service not known")

    def towards(ip: str) -> str | None:
        routes = {"127.": ip, "::1": "::1", "10.0.": "10.0.0.9", "192.168.": "192.168.0.9", "fd00:": "fd00::9"}
        return next((local for prefix, local in routes.items() if ip.startswith(prefix)), None)

    known = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.9", "fd00::9"]}
    known["ib0"] = ["192.168.0.9", "fe80::9%ib0"]
    monkeypatch.setattr(addresses, "resolve", resolve)
    monkeypatch.setattr(addresses, "towards", towards)
    monkeypatch.setattr(addresses, "default", lambda: "10.0.0.9")
    monkeypatch.setattr(addresses, "interfaces", lambda: known)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("url", "override", "nodes", "address"),
    [
        ("tcp://login:4242", "", 1, "10.0.0.9"),
        ("tcp://192.168.0.3:4242", "", 1, "192.168.0.9"),
        ("tcp://127.0.0.1:4242,login:4242", "", 1, "10.0.0.9"),
        ("tcp://localhost:4242", "", 1, "127.0.0.1"),
        ("tcp://[::1]:4242", "", 1, "::1"),
        ("tcp://v6only:4242", "", 1, "fd00::9"),
        ("tcp://dual:4242", "", 1, "fd00::9"),
        ("tcp://me:4242", "", 1, "10.0.0.9"),
        ("tcp://nobody:4242,login:4242", "", 1, "10.0.0.9"),
        ("file:///shared/run", "", 1, "127.0.0.1"),
        ("file:///shared/run", "", 4, "10.0.0.9"),
        ("file:///shared/run", "ib0", 4, "192.168.0.9"),
        ("tcp://login:4242", "192.168.0.9", 1, "192.168.0.9"),
        ("tcp://login:4242", "[fd00::9]", 1, "fd00::9"),
    ],
)
def test_the_address_that_others_reach_is_chosen(url: str, override: str, nodes: int, address: str) -> None:
    assert launch.advertised_address(parse(url), override, launch.Launch(nodes=nodes)) == address


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("url", "override", "nodes", "says"),
    [
        ("tcp://login:4242", "lo", 1, "127.0.0.1 is a loopback address.*set mesh.address to one of: .*ib0 192.168.0.9"),
        ("tcp://me:4242", "127.0.0.1", 1, "reach this one from me"),
        ("file:///shared/run", "me", 2, "the other nodes of this job, and 127.0.1.1 is a loopback"),
        ("tcp://172.30.0.1:4242", "", 1, "from 172.30.0.1, and no local address leads there"),
        ("tcp://login:4242", "^lo,docker", 1, "no address, interface or name known here; .*eth0 10.0.0.9"),
        ("tcp://nobody:4242", "", 1, "mesh.rendezvous: host nobody cannot be resolved"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(url: str, override: str, nodes: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launch.advertised_address(parse(url), override, launch.Launch(nodes=nodes))


def test_routes_are_looked_up_on_the_real_machine() -> None:
    assert addresses.towards("127.0.0.1") == "127.0.0.1"
    assert addresses.resolve("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" in [ip for ips in addresses.interfaces().values() for ip in ips]
    assert "127.0.0.1" not in addresses.listing()
    assert addresses.is_loopback("::1")
    assert addresses.interface_of("127.0.0.1")
    assert addresses.interface_of("192.0.2.7") == ""
    assert not addresses.is_loopback("fe80::1%eth0")
    found = addresses.default()
    if found is not None:
        assert not addresses.is_loopback(found)
        assert addresses.towards(found) == found
        with socket.create_server((found, 0), family=socket.AF_INET6 if ":" in found else socket.AF_INET):
            pass


# ----------------------------------------------------------------------------------------------------------------------


def test_threads_are_shared_between_the_peers_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert launch.threads_for(0, 3, {}) == 2
    assert launch.threads_for(0, 100, {}) == 1
    assert launch.threads_for(5, 3, {}) == 5
    assert launch.threads_for(0, 3, {**STEP, "SLURM_CPUS_PER_TASK": "6"}) == 6
    assert launch.threads_for(0, 4, {"SLURM_CPUS_PER_TASK": "6"}) == 2  # left over: not a task of srun


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "Path", lambda _: tmp_path)
    assert launch.detect({}, rank=3, local_rank=3, world_size=4).device_index == 1
