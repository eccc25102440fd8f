"""What a user gets wrong: one line that says what, where and what to change, the exit code, nothing left running."""

import contextlib
import http.server
import os
import shutil
import socket
import sys
import threading

import pytest
from processes import Mesh
from test_busy_peer import make_peer


@pytest.fixture
def mesh(mesh):
    """Peers start as a user's do: nothing is imported before they need it."""
    mesh.forked = False
    return mesh


def fails(mesh, process, *says):
    """It ends with 1 and says nothing but one line with these texts in it."""
    assert process.ends() == 1, process.said
    for text in says:
        assert text in process.error
    assert process.said.splitlines() == [process.error], "an error is one line"
    mesh.leaves_nothing_running()


# ----------------------------------------------------------------------------------------------------------------------
# Found before anything is loaded
# ----------------------------------------------------------------------------------------------------------------------


def test_a_missing_settings_file(mesh):
    mesh.config.unlink()
    fails(mesh, mesh.start("trainer"), str(mesh.config), "does not exist")


def test_malformed_settings(mesh):
    mesh.config.write_text(mesh.config.read_text().replace("steps = 16", "steps = = 16"))
    fails(mesh, mesh.start("trainer"), str(mesh.config), "not valid TOML", "line 3")


@pytest.mark.parametrize(
    ("key", "says", "nearest"),
    [
        ("trainer.group_sizes", "key trainer.group_sizes", "trainer.group_size"),
        ("trainer.temperature", "key trainer.temperature", "rollout.temperature"),
        ("mash.port", "section [mash]", "mesh"),
    ],
)
def test_an_unknown_key_names_the_nearest(mesh, key, says, nearest):
    fails(mesh, mesh.start("rollout", set={key: 4}), f"unknown {says}; did you mean {nearest}?")


def test_a_value_of_the_wrong_type(mesh):
    fails(mesh, mesh.start("trainer", set={"trainer.max_lag": "much"}), "trainer.max_lag", "int")


def test_no_model(mesh):
    fails(mesh, mesh.start("trainer", set={"model.path": '""'}), "model.path is missing")


def test_a_rendezvous_that_is_none(mesh):
    fails(mesh, mesh.start("rollout", "--rendezvous", "http://127.0.0.1:80"), "http://127.0.0.1:80", "tcp://host:port")


def test_a_secret_that_is_too_short(mesh):
    fails(mesh, mesh.start("trainer", env={"MESH_SECRET": "hunter2"}), "MESH_SECRET", "7 characters", "32")


def test_two_peers_of_one_name(mesh):
    first = mesh.start("rollout", name="twin")
    first.says("waiting for a trainer")
    second = mesh.start("rollout", name="twin")
    assert second.ends() == 1
    assert "another process of this run is named twin" in second.error
    assert "--name" in second.error
    assert first.code is None


@pytest.mark.parametrize("place", ["recipe.toml/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_made(mesh, place):
    path = mesh.directory / place  # below a file, or where not even root may write
    fails(mesh, mesh.start("trainer", run=path), f"run directory {path}", "--run")


@pytest.mark.parametrize(
    "arguments",
    [["--role", "leader"], ["--role", "trainer"], ["--role", "trainer", "--config", "x", "--steps", "4"]],
)
def test_a_command_that_is_none_exits_with_2(mesh, arguments):
    process = mesh.spawn("usage", [sys.executable, "-m", "mesh.node", *arguments])
    assert process.ends() == 2
    assert "Usage" in process.said
    assert "Traceback" not in process.said


# ----------------------------------------------------------------------------------------------------------------------
# Found when models and tasks are loaded, or the mesh is looked for
# ----------------------------------------------------------------------------------------------------------------------

LATER = {  # role, settings, what the line says
    "no such directory": ("trainer", {"model.path": "{dir}/nothing"}, ['model.path = "{dir}/nothing"', "no such dir"]),
    "no model in it": ("rollout", {"model.path": "{dir}"}, ['model.path = "{dir}" cannot be loaded', "config.json"]),
    "no such hub id": ("trainer", {"model.path": "nobody/nothing"}, ['model.path = "nobody/nothing"', "hub"]),
    "no such task": ("rollout", {"task.data": "srot"}, ['task.data = "srot" is unknown; did you mean sort?']),
    "no such gym task": ("trainer", {"task.data": "reasoning-gym:chess_"}, ["task.data", "chess_"]),
    "more tokens than the model has positions": (
        "rollout",
        {"rollout.max_new_tokens": 100_000},
        ["rollout.max_new_tokens = 100000", "positions", "the model has"],
    ),
    "chats for a model that knows none": (
        "rollout",
        {"task.data": "reasoning-gym:chain_sum", "task.options": "{{}}", "task.system_prompt": "Be brief."},
        ["prompts are chats", "no chat template"],
    ),
    "no such file": ("rollout", {"task.data": "nothing.jsonl"}, ["task.data", "nothing.jsonl"]),
    "no such module": ("rollout", {"task.reward": "nowhere:f"}, ['task.reward = "nowhere:f"', "nowhere"]),
    "no such function": ("rollout", {"task.reward": "gate:exactly"}, ['task.reward = "gate:exactly"']),
    "a port in use": ("trainer", {"mesh.port": "{silent}"}, ["mesh.port = {silent} on 127.0.0.1 is in use", "choose"]),
    "an address of another machine": (
        "rollout",
        {"mesh.address": "192.0.2.7"},
        ["mesh.address = 192.0.2.7 is not an address of this machine"],
    ),
    "a loopback address, and others are remote": (
        "rollout",
        {"mesh.address": "127.0.0.1", "mesh.rendezvous": "tcp://198.51.100.1:4000"},
        ["must reach this one from 198.51.100.1, and 127.0.0.1 is a loopback address; set mesh.address to one of"],
    ),
    "a rendezvous whose name nobody knows": (
        "rollout",
        {"mesh.rendezvous": "tcp://no-such-host.invalid:4000"},
        ["mesh.rendezvous: host no-such-host.invalid cannot be resolved"],
    ),
    **{
        f"a rendezvous where {where}": (
            "rollout",
            {"mesh.rendezvous": f"tcp://127.0.0.1:{{{port}}}", "mesh.join_timeout_s": 1},
            ["no peer of this run answered rollout on ", " within 1 s: ", says, f":{{{port}}}", "(mesh.address)"],
        )
        for where, port, says in (
            ("nobody listens", "free", "nobody listens at"),
            ("a web server waits for a request", "web", "another program"),
            ("somebody listens and never speaks", "silent", "a connection opens, but nobody speaks"),
            ("packets vanish", "hole", "its host is down, or something on the way drops packets"),
            ("peers of another secret live", "other", "refuses this run's secret: another run, or another secret"),
        )
    },
}


@contextlib.contextmanager
def neighbours(directory):
    """Ports of this machine where all kinds of programs but no peer of the run are found."""
    with contextlib.ExitStack() as stack:
        silent, hole, free = (stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)) for _ in range(3))
        for _ in range(4):  # a queue of connections that nobody accepts: when it is full, the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(hole.getsockname())
        silent.listen(64)
        web = stack.enter_context(
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        )
        threading.Thread(target=web.serve_forever, daemon=True).start()
        stack.callback(web.shutdown)
        other = make_peer(directory, "other")
        other.start()
        stack.callback(other.leave, "done")
        ports = {"silent": silent, "hole": hole, "free": free, "web": web.socket}
        names = {name: end.getsockname()[1] for name, end in ports.items()}
        free.close()
        yield names | {"other": other.address.rpartition(":")[2]}


@pytest.fixture(scope="module")
def later(tmp_path_factory, model):
    """All of them at once: most of their time goes into importing torch."""
    with neighbours(tmp_path_factory.mktemp("other")) as names:
        started = {}
        for case, (role, settings, says) in LATER.items():
            mesh = Mesh(tmp_path_factory.mktemp("later"), model)
            names |= {"dir": mesh.directory}
            filled = {key: str(value).format(**names) for key, value in settings.items()}
            process = mesh.start(role, set=filled, env={"HF_HUB_OFFLINE": "1"})
            started[case] = (mesh, process, [text.format(**names) for text in says])
        yield started
        for mesh, _, _ in started.values():
            mesh.close()


@pytest.mark.parametrize("case", LATER)
def test_what_is_found_later(later, case):
    mesh, process, says = later[case]
    fails(mesh, process, *says)
    [log] = (mesh.run / "logs").iterdir()
    assert "Traceback" in log.read_text()


def test_two_hosts_with_other_models_at_the_same_path(mesh, model, other_model):
    mesh.forked = True
    path = mesh.directory / "model"
    shutil.copytree(model, path)
    trainer = mesh.start("trainer", set={"model.path": path})
    trainer.joins(mesh)
    os.rename(path, mesh.directory / "model-of-the-trainer")
    shutil.copytree(other_model, path)
    rollout = mesh.start("rollout", set={"model.path": path})
    assert rollout.ends() == 1
    for text in ("model.path name files that differ between rollout on ", " and trainer on ", "give both the same"):
        assert text in rollout.error
    trainer.says("refused rollout on ")
    assert trainer.code is None


def test_a_local_mesh_whose_rollouts_all_fail_does_not_wait_for_others(mesh):
    up = mesh.up("--rollouts", "1", set={"task.reward": "nowhere:exact"})
    assert up.ends() == 1
    assert "no rollout is left" in up.error
    assert 'task.reward = "nowhere:exact"' in up.error
    mesh.leaves_nothing_running()


def test_a_name_with_a_slash_names_no_directory(mesh):
    process = mesh.start("trainer", name="here/trainer", set={"mesh.rendezvous": "none"})
    fails(mesh, process, "mesh.rendezvous")
    assert [p.name for p in (mesh.run / "logs").iterdir()] == ["here_trainer.log"]


def test_another_secret_in_the_same_run_directory(mesh):
    mesh.forked = True
    first = mesh.start("trainer", env={"MESH_SECRET": "a" * 32})
    first.joins(mesh)
    second = mesh.start("rollout", env={"MESH_SECRET": "b" * 32})
    assert second.ends() == 1
    assert "trainer on " in second.error
    assert "in the same directory with another secret, so rollout on " in second.error
    assert "the same MESH_SECRET" in second.error
    assert first.code is None
