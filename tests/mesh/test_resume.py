"""Killed and resumed, a run with ``max_lag = 0`` ends with the same bits as one that nothing happened to."""

from conftest import SYNCHRONOUS
from safetensors.numpy import load_file

from roles.trainer import checkpoint, ledger

GROUPS = 8  # a step


def weights(mesh, step):
    [path] = (mesh.run / "checkpoints").glob(f"{step}-*")
    return {name: tensor.tobytes() for name, tensor in load_file(path / "model.safetensors").items()}


def test_killed_peers_resume_to_the_same_bits(mesh, synchronous):
    rollout, trainer = [mesh.start(role, set=SYNCHRONOUS) for role in ("rollout", "trainer")]
    mesh.hold_after(12 * GROUPS)
    mesh.is_held(11)
    killed(mesh, trainer, rollout)
    assert weights(mesh, 8) == weights(synchronous, 8)

    # the whole mesh was killed: start all of it again
    mesh.hold_after(12 * GROUPS)
    rollout, trainer = mesh.start("rollout", set=SYNCHRONOUS), mesh.start("trainer", "--resume", set=SYNCHRONOUS)
    trainer.says("resumed from")
    mesh.let_go()
    mesh.is_held(19)
    killed(mesh, trainer)
    assert weights(mesh, 16) == weights(synchronous, 16)

    # only the trainer was killed: its rollout goes on with the next one
    trainer = mesh.start("trainer", "--resume", set=SYNCHRONOUS)
    trainer.says("resumed from")
    mesh.let_go()
    assert (trainer.ends(), rollout.ends()) == (0, 0), trainer.said + rollout.said
    assert weights(mesh, 24) == weights(synchronous, 24)
    assert weights(mesh, 24) != weights(mesh, 16)
    lineage = checkpoint.newest(mesh.run / "checkpoints").state.lineage
    replayed = ledger.replay((mesh.run / "ledger").glob("*.jsonl"), lineage)
    assert len(replayed.trainers) == 3
    assert replayed.closes()
    assert replayed.groups["in_flight"] == 0
    assert mesh.summary()["ledger"] == replayed.groups
    assert replayed.groups["trained"] == 24 * GROUPS, "what was trained after the last checkpoint was superseded"
    assert replayed.groups["superseded"] == (11 - 8 + 19 - 16) * GROUPS
    assert mesh.summary()["steps"] == 24


def killed(mesh, *peers):
    """SIGKILL, while groups of the step after the last are on their way."""
    for peer in peers:
        peer.kill()
    assert not (mesh.run / "summary.json").exists()
