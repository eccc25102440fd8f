"""Scenario: all pure machines together, one trainer and a few rollouts, through trouble and into calm; promises 2 to 5.

trouble  processes die between two effects, stop and wake, start again or late; a disk loses what was not synced; links
         part; messages are lost, doubled, overtaken; groups break, buckets arrive corrupt, proofs and verifiers fail
calm     the trainer goes on to its last step, every rollout proves the newest version, nothing stays on order
finish   the run is over everywhere, every credit is in one account, what was not trained is listed
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mesh.config import Checkpoint, Config, Evaluation, Run, Task, Trainer, Weights
from mesh.convening import Convening, Form
from mesh.identity import PeerId, Role
from tests.sim.groups import Groups
from tests.sim.node import Node, Part
from tests.sim.promises import Promises
from tests.sim.rollout import Samples
from tests.sim.trainer import Disk, Trains
from tests.sim.weights import Publishes, Receives
from tests.sim.world import CALM, Weather, World
from transport.accounts import Closed
from transport.messages import Accept, Decline, Go, Invite, Kind
from transport.weights.schedule import Convene

STEP_S = 12.0
"""Most that a step takes in calm, on average over the run, the wait for a version included."""
SETTLE_S = 120.0
"""From calm until every rollout takes part again: who failed often sits out for a while."""
FINISH_S = 10.0


@dataclass(frozen=True)
class Trouble:
    """What befalls the work of processes: seconds it takes at most (``transfer_s`` in the mean), and probabilities."""

    transfer_s: float = 0.01
    digest_s: float = 0.05
    connect_s: float = 0.1
    prove_s: float = 0.2
    learn_s: float = 0.6
    save_s: float = 0.1
    sample_s: float = 1.0
    operation: float = 0.0  # one rank of a broadcast fails, with or without its bytes
    build: float = 0.0  # one rank cannot connect
    corrupt: float = 0.0  # one bucket on its way to one rank
    proof: float = 0.0
    reward: float = 0.0
    returned: float = 0.0

    @property
    def calm(self) -> "Trouble":
        """Work as slow as it was, without failures; a transfer far from its time-out."""
        slow = {name: getattr(self, name) for name in ("prove_s", "learn_s", "sample_s")}
        return Trouble(transfer_s=min(self.transfer_s, 0.1), **slow)


class Mesh(World):
    """A world with what its processes have in common: settings, groups, and what was promised."""

    scenario = "mesh"

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.rng
        max_lag = rng.choice((0, 1, 2, 3))
        self.settings = Config(
            run=Run(steps=rng.randint(6, 14)),
            task=Task(heldout_prompts=3),
            trainer=Trainer(
                group_size=2,
                groups_per_step=rng.choice((2, 3, 4)),
                max_lag=max_lag,
                retries=rng.choice((0, 2)),
                credit_deadline_s=rng.choice((20.0, 600.0)),
            ),
            evaluation=Evaluation(every_steps=rng.choice((2, 4))),
            checkpoint=Checkpoint(every_steps=rng.choice((1, 3))),
            weights=Weights(op_timeout_s=1.0, ready_wait_s=1.5, form_timeout_s=3.0, reform_interval_s=0.5),
        )
        self.prompts = rng.randint(9, 25)
        self.trouble = Trouble()
        self.groups = Groups(self)
        self.promises = Promises(max_lag)
        self.disks: dict[str, dict[str, Any]] = {}
        self.over = False  # nobody starts any more
        self.broken = ""  # the address of a rollout whose engine proves nothing
        self.invariants.append(_check)

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def name(self, peer: PeerId) -> str:
        return next((n.label for n in reversed(self.nodes) if n.id == peer), peer[:4])

    def start(self, address: str, role: Role) -> None:
        if address not in self.bound and not self.over:
            parts = [Convenes, Publishes, Trains] if role == "trainer" else [Convenes, Receives, Samples]
            disk = self.disks.setdefault(address, {})
            Node(self, address, role=role, seeds=("tcp://sim:0", "tcp://sim:1"), parts=parts, disk=disk)

    def convening(self, node: Node, kind: Kind) -> Convening:
        return next(p for p in node.parts if isinstance(p, Convenes)).machines[kind]

    def send(self, source: Node, to: str, address: str, message: Any, *, bulk: bool = False) -> None:
        self.promises.sent(source, message)
        super().send(source, to, address, message, bulk=bulk)

    @property
    def trainers(self) -> list[Trains]:
        return [p for node in self.living for p in node.parts if isinstance(p, Trains)]

    @property
    def trainer(self) -> Trains:
        [trainer] = self.trainers
        return trainer

    @property
    def rollouts(self) -> list[Samples]:
        return [p for node in self.living for p in node.parts if isinstance(p, Samples)]

    def until(self, done: Callable[[], str], within_s: float, what: str) -> None:
        """Run until ``done`` returns nothing; what it returns else is what is missing. Raises Failure."""
        start = self.now
        while missing := done():
            if self.now - start > within_s:
                for trains in self.trainers:
                    for line in trains.publisher.schedule.table({n.id: n.label for n in self.nodes}):
                        self.log(trains.node, line)
                raise self.failure(f"{what} within {within_s:.0f} s: {missing}")
            self.run(self.now + 0.2)


class Convenes(Part):
    """Both kinds of formations, as ``mesh.peer`` drives them."""

    takes = (Invite, Accept, Decline, Go)

    def __init__(self, node: Node):
        super().__init__(node)
        kinds: tuple[Kind, ...] = ("weights", "gradients")
        self.machines = {kind: Convening(node.id, kind) for kind in kinds}

    def receive(self, sender: PeerId, message: Any, now: float) -> Iterable[Any]:
        return self.machines[message.kind].receive(sender, message, now)

    def tick(self, now: float) -> Iterable[Any]:
        return [effect for machine in self.machines.values() for effect in machine.tick(now)]

    def members(self, now: float) -> Iterable[Any]:
        for machine in self.machines.values():
            machine.live([card.id for card in self.node.membership.alive])
        return ()

    def effect(self, effect: Any, now: float) -> Iterable[Any]:
        match effect:
            case Convene(members):
                return self.machines["weights"].convene(members, now)
            case Form(go):
                self.node.world.promises.forms(self.node.id, go)  # type: ignore[attr-defined]
                self.node.world.log(self.node, f"forms {go.kind} {go.ballot} of {len(go.members)}")
        return ()


def _check(world: World) -> None:
    """After every event, of the process that acted: the bound, and the sums of its accounts."""
    node = world.touched
    if node is None or node.role != "trainer" or not node.running or not node.parts:
        return
    trains = node.parts[-1]
    assert isinstance(trains, Trains)
    d = trains.delivery
    assert d.load <= d.limit, f"{d.load} groups are on order, more than {d.limit}"
    out = d.metrics()["delivery/out"] - d.accounts.evaluation["in_flight"]
    assert d.load == out + len(trains.buffer) + len(trains.batch), "a credit is neither out, held nor in the batch"
    assert d.accounts.closes(), str(d.accounts)


def scenario(seed: int) -> Mesh:
    """One run from its first step to its last. Raises Failure."""
    world = Mesh(seed)
    rng = world.rng
    roles: dict[str, Role] = {"tcp://sim:0": "trainer"}
    roles |= {f"tcp://sim:{i}": "rollout" for i in range(1, rng.randint(2, 5) + 1)}
    if len(roles) > 2 and rng.random() < 0.2:
        world.broken = "tcp://sim:2"
    calm_at = rng.uniform(8.0, 20.0)
    for i, (address, role) in enumerate(roles.items()):
        late = i > 1 and rng.random() < 0.3
        world.at(rng.uniform(0.0, calm_at if late else 2.0), partial(world.start, address, role))
    world.weather = Weather(
        jitter_s=rng.choice((0.001, 0.03)),
        loss=rng.choice((0.0, 0.05, 0.2)),
        duplicate=rng.choice((0.0, 0.1)),
        straggler=rng.choice((0.0, 0.02)),
        connect_loss=rng.choice((0.0, 1.0)),
        late_tick=rng.choice((0.0, 0.1)),
        bulk_s=rng.choice((0.0, 0.1, 0.5)),
    )
    slow_network = rng.random() < 0.5  # broadcasts take longer than steps
    world.trouble = Trouble(
        transfer_s=rng.choice((0.1, 0.3)) if slow_network else 0.01,
        prove_s=rng.choice((0.2, 1.0)),
        learn_s=0.1 if slow_network else 0.6,
        sample_s=0.2 if slow_network else rng.choice((1.0, 3.0)),
        operation=rng.choice((0.0, 0.1)),
        build=rng.choice((0.0, 0.1)),
        corrupt=rng.choice((0.0, 0.05)),
        proof=rng.choice((0.0, 0.1)),
        reward=rng.choice((0.0, 0.05)),
        returned=rng.choice((0.0, 0.02)),
    )
    for _ in range(rng.randint(0, 12)):
        world.at(rng.uniform(1.0, calm_at), partial(_misfortune, world, roles))
    world.run(calm_at)
    _calm(world, roles)
    _finish(world)
    return world


def calm_scenario(seed: int) -> Mesh:
    """The same without any trouble, though work takes its time. Raises Failure."""
    world = Mesh(seed)
    rng = world.rng
    world.weather = CALM
    world.trouble = Trouble(prove_s=rng.choice((0.01, 0.2)), learn_s=rng.choice((0.05, 0.6)), sample_s=0.2)
    roles: dict[str, Role] = {"tcp://sim:0": "trainer"}
    roles |= {f"tcp://sim:{i}": "rollout" for i in range(1, rng.randint(2, 5) + 1)}
    _calm(world, roles)
    _finish(world)
    return world


def _misfortune(world: Mesh, roles: dict[str, Role]) -> None:
    rng = world.rng
    what = rng.choice(("kill", "doom", "restart", "stop", "nap", "part", "deaf"))
    address = rng.choice(list(roles)) if rng.random() < 0.7 else "tcp://sim:0"
    node = world.bound.get(address)
    if node is None:
        world.start(address, roles[address])
    elif what == "kill":
        node.kill()
        if rng.random() < 0.5 and "trainer" in node.disk:
            for peer, line in reversed(node.disk["trainer"].lose_power(rng.random())):
                world.promises.forgotten(peer, line)
        world.after(rng.uniform(0.5, 6.0), partial(world.start, address, roles[address]))
    elif what == "doom":
        node.doom(rng.randint(0, 60))
        world.after(rng.uniform(1.0, 6.0), partial(world.start, address, roles[address]))
    elif what == "restart":
        node.restart()
    elif what in ("stop", "nap"):
        node.stop()
        world.after(rng.uniform(3.5, 8.0) if what == "stop" else rng.uniform(0.1, 2.5), node.wake)
    else:
        some = rng.sample(list(roles), rng.randint(1, len(roles) - 1))
        rest = [a for a in roles if a not in some]
        world.log(None, f"{'part' if what == 'part' else 'deaf'}: {some} | {rest}")
        world.after(rng.uniform(0.5, 8.0), world.cut(some, rest, both=what == "part"))


def _calm(world: Mesh, roles: dict[str, Role]) -> None:
    world.log(None, "calm")
    world.weather, world.trouble = CALM, world.trouble.calm
    world.heal()
    for node in world.living:
        node.fuse = None
        node.wake()
    for address, role in roles.items():
        world.start(address, role)
    steps = world.settings.run.steps

    def last_step() -> str:
        trainer = world.trainer
        return "" if trainer.step == steps else f"it is at step {trainer.step} of {steps}"

    world.until(last_step, SETTLE_S + steps * STEP_S, "the trainer is not done")
    world.until(partial(_unsettled, world), SETTLE_S, "the mesh does not come to rest")
    trainer = world.trainer
    trained = world.promises.groups_in(trainer.version)
    if trained != steps * world.settings.trainer.groups_per_step:
        raise world.failure(f"{trained} groups are in the weights after {steps} steps")


def _unsettled(world: Mesh) -> str:
    """What is still to come once the last step is done: proofs, results, verdicts."""
    trainer = world.trainer
    if not trainer.finished:
        return "the last evaluation is not complete"
    newest = trainer.version
    for samples in world.rollouts:
        label, d = samples.node.label, samples.delivery
        broken = samples.node.address == world.broken
        if samples.receiver.schedule.proved != newest and not broken:
            return f"{label} has proved {samples.receiver.schedule.proved}, the newest is {newest}"
        if d.standing(trainer.node.id)[0] != newest or d.held or d.kept:
            return f"{label} holds {d.held} and keeps {d.kept} groups, and knows of {d.standing(trainer.node.id)[0]}"
    formation = trainer.publisher.schedule.formation
    members = {m.peer for m in formation[1]} if formation else set()
    outside = [n.label for n in world.living if n.id not in members and n.address != world.broken]
    if outside:
        return f"not in the weights formation: {', '.join(outside)}"
    return f"open at the trainer: {trainer.open_credits()}" if trainer.open_credits() else ""


def _finish(world: Mesh) -> None:
    trainer = world.trainer
    node = trainer.node
    node.execute(trainer.delivery.finish(node.now))
    world.over = True
    world.after(1.0, lambda: node.leave("finished"))
    world.until(lambda: ", ".join(n.label for n in world.living), FINISH_S, "not everybody has left")
    disk: Disk = node.disk["trainer"]
    listed: set[tuple[int, int]] = set()
    for peer, ledger in disk.ledgers.items():
        accounts = ledger.accounts()
        if not accounts.closes() or accounts.open:
            raise world.failure(f"the ledger of {peer[:4]} does not close: {accounts}")
        listed |= {(line.epoch, line.prompt) for line in ledger.lines if isinstance(line, Closed)}
    closed = {(epoch, prompt) for epoch in range(trainer.data.epoch + 1) for prompt in trainer.data.closed(epoch)}
    if not closed <= listed:
        raise world.failure(f"prompts are closed untrained and no ledger says so: {sorted(closed - listed)}")
