import msgspec
import pytest
from processes import PATIENCE_S, Mesh

from roles.starter import Recipe, ensure

EASY = Recipe(
    steps=150, batch=32, length=3, ascending=0.2, descending=0.5, ramp_steps=10, hidden=64, feed_forward=192
)  # sorts three digits right in about one answer of eight

LEARNING = {
    "run.steps": 60,
    "task.heldout_prompts": 128,
    "trainer.group_size": 8,
    "trainer.adam_beta2": 0.99,
    "checkpoint.every_steps": 25,
}
SYNCHRONOUS = {"run.steps": 24, "trainer.max_lag": 0, "checkpoint.every_steps": 8, "checkpoint.keep": 3}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a small Llama to start from, made once."""
    return str(ensure(EASY, 0, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """A model of another architecture, with one layer less and none of its weights trained."""
    recipe = msgspec.structs.replace(EASY, steps=1, layers=1)
    return str(ensure(recipe, 0, tmp_path_factory.mktemp("models")))


@pytest.fixture
def mesh(tmp_path, model):
    mesh = Mesh(tmp_path, model)
    yield mesh
    mesh.close()


@pytest.fixture(scope="session")
def synchronous(tmp_path_factory, model):
    """A finished run with ``max_lag = 0`` of a trainer and one rollout, nothing done to it."""
    mesh = Mesh(tmp_path_factory.mktemp("synchronous"), model)
    rollout, trainer = [mesh.start(role, set=SYNCHRONOUS) for role in ("rollout", "trainer")]
    assert (trainer.ends(), rollout.ends()) == (0, 0), trainer.said + rollout.said
    mesh.close()
    return mesh


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model):
    """A run of ``mesh up`` with two rollouts that went to its end."""
    mesh = Mesh(tmp_path_factory.mktemp("finished"), model)
    up = mesh.up("--rollouts", "2", set=LEARNING)
    assert up.ends(2 * PATIENCE_S) == 0, up.said
    assert " ended: " not in up.said, "of no peer but the trainer, and of that only when it fails"
    mesh.leaves_nothing_running()
    yield mesh
    mesh.close()
