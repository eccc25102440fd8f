"""What a mesh at work listens on, and who can read its secret: looked at from outside, by the processes themselves."""

import secrets
import stat

import psutil
import pytest
from processes import Mesh, soon

from mesh import secret

CHOSEN = "127.0.0.2"  # an address of this machine that nothing else chooses


@pytest.mark.parametrize("where", ["file", "environment"])
def test_every_socket_listens_at_the_chosen_address_and_nobody_tells_the_secret(mesh, where):
    """In the middle of training, when a weights formation has its sockets too; reward workers are looked at as well."""
    given = {"MESH_SECRET": secrets.token_hex(32)} if where == "environment" else {}
    settings = {"run.steps": 100_000, "mesh.address": CHOSEN}
    for role, name in (("trainer", "trainer"), ("rollout", "one"), ("rollout", "two")):
        mesh.start(role, name=name, set=settings, env=given)
    mesh.reaches(3)
    soon(lambda: "two joined" in mesh.processes[0].said and mesh.processes[1].listens(), "all are there")
    step = mesh.step()
    for process in mesh.processes:
        soon(lambda process=process: len(process.listens()) >= 3, f"{process.name} has endpoints and a formation")
    for process in family(mesh):
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {CHOSEN}, process.cmdline()
        receiving = [c.laddr for c in process.net_connections("udp")]
        assert receiving == [], process.cmdline()
    key = given.get("MESH_SECRET") or secret.load(mesh.run)
    told = [key, secret.keys(key).private.decode(), secret.keys(key).public.decode()]
    peers = {process.pid for process in mesh.processes}
    for process in family(mesh):
        assert not any(text in part for text in told for part in process.cmdline())
        holders = {name for name, value in process.environ().items() if any(text in value for text in told)}
        may = set(given) if process.pid in peers else set()  # rewards are the user's code: they get no secret
        assert holders == may, process.cmdline()
    mesh.reaches(step + 3)
    for process in mesh.processes:
        process.interrupt()
    assert [process.ends() for process in mesh.processes] == [130, 130, 130]
    files = [path for path in mesh.directory.rglob("*") if path.is_file() and path != mesh.run / "secret"]
    assert mesh.run / "logs" / "trainer.log" in files
    for path in files:
        content = path.read_bytes()
        assert not any(text.encode() in content for text in told), path
    if where == "file":
        assert stat.S_IMODE((mesh.run / "secret").stat().st_mode) == 0o600
    else:
        assert not (mesh.run / "secret").exists()


def family(mesh: Mesh) -> list[psutil.Process]:
    """The peers, and the processes that they have started."""
    peers = [psutil.Process(process.pid) for process in mesh.processes]
    return peers + [child for peer in peers for child in peer.children(recursive=True)]
