"""A run over ``tcp://``: peers that share no directory, only an address and a secret."""

import secrets
import socket

RIGHT, WRONG = ({"MESH_SECRET": secrets.token_hex(32)} for _ in range(2))


def test_peers_meet_at_an_address_and_a_wrong_secret_lets_nobody_in(mesh):
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    mesh.hold()  # the run goes on until the stranger has been turned away
    rollout = mesh.start("rollout", "--rendezvous", url, env=RIGHT, run=mesh.directory / "elsewhere")
    trainer = mesh.start("trainer", "--rendezvous", url, set={"mesh.port": port}, env=RIGHT)
    trainer.says("rollout joined")
    stranger = mesh.start(
        "rollout",
        "--rendezvous",
        url,
        name="stranger",
        set={"mesh.join_timeout_s": 1},
        env=WRONG,
        run=mesh.directory / "x",
    )
    assert stranger.ends() == 1
    assert f"127.0.0.1:{port}" in stranger.error
    assert "secret" in stranger.error

    mesh.let_go()
    assert (trainer.ends(), rollout.ends()) == (0, 0), trainer.said + rollout.said
    assert "stranger" not in trainer.said + rollout.said
    assert mesh.summary()["steps"] == 16
    assert mesh.summary()["ledger_closed"]
    for run in (mesh.run, mesh.directory / "elsewhere"):
        assert not list((run / "rendezvous").iterdir())
        assert not (run / "secret").exists()


def test_the_peer_by_whom_all_were_let_in_dies_and_later_ones_get_in_by_another(mesh):
    first, second = free_port(), free_port()
    settings = {"run.steps": 24}
    seed = mesh.start(
        "rollout",
        "--rendezvous",
        f"tcp://127.0.0.1:{first}",
        name="seed",
        set=settings | {"mesh.port": first},
        env=RIGHT,
    )
    trainer = mesh.start(
        "trainer", "--rendezvous", f"tcp://127.0.0.1:{first}", set=settings | {"mesh.port": second}, env=RIGHT
    )
    trainer.says("seed joined")
    mesh.hold()
    seed.kill()
    trainer.says("seed died")
    both = f"tcp://127.0.0.1:{first},127.0.0.1:{second}"
    late = mesh.start("rollout", "--rendezvous", both, name="late", set=settings, env=RIGHT)
    trainer.says("late joined")
    mesh.let_go()
    assert (trainer.ends(), late.ends()) == (0, 0), trainer.said + late.said
    assert mesh.summary()["steps"] == 24
    assert mesh.summary()["ledger_closed"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
