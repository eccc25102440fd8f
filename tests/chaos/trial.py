"""One run under one storm, and what must be true afterwards."""

from pathlib import Path

from mesh import config as settings
from tests.chaos import checks
from tests.chaos.checks import Check
from tests.chaos.peers import free
from tests.chaos.plan import blows
from tests.chaos.storm import CONFIG, Size, Storm, Stuck

ACCURACY = 0.85
MORE_SAMPLES = 1.5  # than the undisturbed run


def undisturbed(directory: Path, size: Size) -> int:
    """The groups that the settings' own number of steps trains, nothing being done to the run."""
    print(f"undisturbed: {size.trainers} trainers, {size.rollouts} rollouts")
    steps = settings.load(CONFIG).run.steps
    storm = Storm(directory, Size(size.trainers, size.rollouts, steps, size.settings))
    storm.run([])
    last = storm.records.evaluations()[-1]["eval_accuracy"]
    trained = sum(book.sums()["trained"] for book in storm.records.books())
    print(f"undisturbed: accuracy {last:.3f} after {trained} groups")
    return trained


def trial(directory: Path, seed: int, size: Size, shared: set[str], *, groups: int | None) -> tuple[list[Check], int]:
    """Checks of one storm, and how many processes it killed. ``groups`` are those of the undisturbed run; None: a short
    storm, in which some trainer always lives and the reward need only rise."""
    print(f"seed {seed}: {size.trainers} trainers, {size.rollouts} rollouts, {size.steps} steps in {directory}")
    storm = Storm(directory, size)
    try:
        storm.run(blows(seed, all_trainers=groups is not None))
    except Stuck as e:
        print(f"the run is stuck: {e}")
    run = storm.records
    found = [
        storm.check(),
        *checks.ledgers(run),
        checks.lag(run, settings.load(CONFIG).trainer.max_lag),
        checks.same_weights(run, at_least=size.trainers),
        checks.reward_rises(run) if groups is None else checks.accuracy(run, ACCURACY, MORE_SAMPLES * groups),
        checks.leftovers(shared, storm.left, storm.ports, free),
    ]
    for line in [*storm.recovery(), *map(str, found)]:
        print(line)
    print(f"seed {seed}: {'FAILED' if any(check.complaints for check in found) else 'all holds'}", flush=True)
    return found, storm.kills()
