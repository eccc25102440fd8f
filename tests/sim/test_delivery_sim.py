"""Delivery on an unkind network: one trainer, three rollouts, everything from one seed.

Messages are lost, doubled, delayed and reordered; bulk is slower than control; rollouts are killed and start again
under a new id, unnoticed for a while; one of them, or all, are taken for dead and are not; engines lag behind the
trainer's weights. After every event the promises are checked.
"""

import heapq
import random
from typing import Any

import numpy as np
import pytest

from mesh.config import Trainer
from mesh.effects import Note, Send
from mesh.version import Ballot, Lineage, Version
from roles.trainer.buffer import Buffer
from roles.trainer.dataset import Dataset
from roles.trainer.ledger import Ledger, replay
from transport.accounts import Issued
from transport.credits import TrainerDelivery
from transport.delivery import Abort, Dropped, Evaluated, Held, Record, RolloutDelivery, RunOver, Start
from transport.evaluation import PASSED
from transport.messages import Answer, Completion, Credit, Group, Segment, Span

TRAINER = "trainer-0"


def make_group(rng: random.Random, credit: Credit, first: Version, last: Version) -> Group:
    def completion() -> Completion:
        n = rng.randint(1, 9)
        spans = [Span(first, 0, n)] if first == last else [Span(first, 0, 1), Span(last, 1, n)]
        sampled = Segment(np.zeros(n, np.int32), True, np.zeros(n, np.float32), spans)
        return Completion([Segment(np.zeros(3, np.int32), False, np.zeros(0, np.float32)), sampled], 1.0, "stop")

    return Group(completions=[completion() for _ in range(credit.size)], started=first)


class Rollout:
    """A rollout peer with an engine that takes its time."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.delivery = RolloutDelivery(places=world.rng.randint(2, 6))
        self.engine: Version | None = None
        self.waiting: list[Credit] = []
        self.working: dict[int, tuple[Credit, Version]] = {}
        self.alive = True
        self.unseen_until = 0.0  # the trainer takes it for dead

    def execute(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.world.send(self.name, effect.to, effect.message, effect.bulk)
                case Start():
                    self.waiting.append(effect.credit)
                case Abort():
                    self.waiting = [c for c in self.waiting if c.id != effect.credit]
                    if self.world.rng.random() < 0.7:  # else the engine finishes it all the same
                        self.working.pop(effect.credit, None)
                case RunOver():
                    pass
                case _:
                    raise AssertionError(effect)

    def work(self) -> None:
        """Start what may be started, finish some of what was."""
        rng, now = self.world.rng, self.world.now
        for credit in list(self.waiting):
            if self.engine is None or self.engine.number < credit.min_version.number:
                if rng.random() < 0.02:
                    self.waiting.remove(credit)
                    self.delivery.returned(TRAINER, credit.id, "weights unproven")
                continue
            self.waiting.remove(credit)
            if credit.evaluation and self.engine != credit.min_version:
                self.execute(self.delivery.failed(TRAINER, credit.id, PASSED, now))
                continue
            self.working[credit.id] = (credit, self.engine)
            self.delivery.started(TRAINER, credit.id, self.engine)
        for id, (credit, first) in list(self.working.items()):
            if rng.random() < 0.25:
                del self.working[id]
                if rng.random() < 0.03:
                    self.execute(self.delivery.failed(TRAINER, id, "the verifier raised", now))
                else:
                    last = first if credit.evaluation else self.engine
                    assert last is not None
                    self.execute(self.delivery.finished(TRAINER, id, make_group(rng, credit, first, last), now))
        self.execute(self.delivery.trainers([TRAINER], now) + self.delivery.tick(now))


class World:
    def __init__(self, seed: int, path: Any, *, max_lag: int, kind: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.kind = kind
        self.queue: list[tuple[float, int, str, str, Any]] = []
        self.count = 0
        self.settings = Trainer(group_size=2, groups_per_step=4, max_lag=max_lag, credit_deadline_s=20.0)
        self.data = Dataset(name="numbers", size=23, digest="d", seed=seed)
        self.delivery = TrainerDelivery(self.settings, self.data, seed=seed, steps=60)
        self.buffer = Buffer(limit=self.delivery.limit, max_lag=max_lag)
        self.ledger = Ledger(path, peer=TRAINER, run="run")
        self.term = 1
        self.lineage = Lineage().open(Ballot(1, TRAINER), 0)
        self.version = Version(Ballot(1, TRAINER), 0)
        self.batch: list[Any] = []
        self.done_at = 0.0
        self.trained: set[tuple[int, int]] = set()
        self.evaluated: list[Evaluated] = []
        self.recorded: set[int] = set()
        self.rollouts: dict[str, Rollout] = {}
        self.born = 0
        for _ in range(3):
            self.start_rollout()
        self.execute(self.delivery.advance(self.version, self.lineage, self.now))

    def start_rollout(self) -> None:
        self.born += 1
        name = f"rollout-{self.born:03}"
        self.rollouts[name] = Rollout(self, name)

    def send(self, source: str, to: str, message: Any, bulk: bool) -> None:
        rng = self.rng
        copies = 1 if self.kind else rng.choices((0, 1, 2), (0.1, 0.8, 0.1))[0]
        for _ in range(copies):
            delay = rng.random() * (3.0 if bulk else 0.3) * (0.1 if self.kind else rng.choice((1, 1, 1, 5)))
            self.count += 1
            heapq.heappush(self.queue, (self.now + delay, self.count, source, to, message))

    def execute(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    if isinstance(effect.message, Answer):
                        for credit in effect.message.credits:  # the record comes before the act
                            assert credit.id in self.recorded, f"credit {credit.id} left before its record"
                    self.send(TRAINER, effect.to, effect.message, effect.bulk)
                case Record():
                    self.ledger.append(effect.entry)
                    if isinstance(effect.entry, Issued):
                        self.recorded.add(effect.entry.id)
                case Held():
                    self.buffer.put(effect.rollout, effect.credit, effect.group)
                case Dropped():
                    self.buffer.drop(effect.credit)
                case Evaluated():
                    self.evaluated.append(effect)
                case Note():
                    pass
                case _:
                    raise AssertionError(effect)

    def trainer(self) -> None:
        d, now, rng = self.delivery, self.now, self.rng
        live = sorted(n for n, r in self.rollouts.items() if now >= r.unseen_until and (r.alive or rng.random() < 0.9))
        self.execute(d.rollouts(live, now) + d.tick(now))
        if not self.batch and d.version is not None and self.buffer.ready(self.version, self.lineage) >= 4:
            batch, stale = self.buffer.take(4, self.version, self.lineage)
            self.execute(d.supersede(stale, now))
            self.execute(d.take([t.credit.id for t in batch], now))
            self.batch, self.done_at = batch, now + rng.random() * 3
        if self.batch and now >= self.done_at:
            for t in self.batch:
                key = (t.credit.epoch, t.credit.prompt)
                assert key not in self.trained, "trained twice in an epoch"
                self.trained.add(key)
                assert all(self.lineage.holds(v) for v in t.versions)
                assert self.version.number - t.group.started.number <= self.settings.max_lag
            self.execute(d.settle([t.credit.id for t in self.batch], {self.batch[0].credit.id: 1}))
            self.batch = []
            number = self.version.number + 1
            if rng.random() < 0.1:  # another formation carries on
                self.term += 1
                self.lineage = self.lineage.open(Ballot(self.term, TRAINER), number)
            self.version = Version(Ballot(self.term, TRAINER), number)
            self.execute(d.advance(self.version, self.lineage, now, waited=rng.random() * 0.2))

    def step(self) -> None:
        self.now += 0.05
        rng = self.rng
        while self.queue and self.queue[0][0] <= self.now:
            _, _, source, to, message = heapq.heappop(self.queue)
            if to == TRAINER:
                self.execute(self.delivery.receive(source, message, self.now))
            elif to in self.rollouts and self.rollouts[to].alive:
                self.rollouts[to].execute(self.rollouts[to].delivery.receive(source, message, self.now))
            self.check()
        self.trainer()
        self.check()
        for r in [r for r in self.rollouts.values() if r.alive]:
            if r.engine is None or (r.engine != self.version and rng.random() < 0.1):
                r.engine = self.version  # newest wins
            r.work()
            if not self.kind and rng.random() < 0.002:
                r.alive = False
                self.start_rollout()
            if not self.kind and rng.random() < 0.002:
                for silent in rng.choice(([r], list(self.rollouts.values()))):
                    silent.unseen_until = self.now + rng.uniform(0.1, 6.0)
            self.check()
        for name in [n for n, r in self.rollouts.items() if not r.alive and rng.random() < 0.05]:
            del self.rollouts[name]

    def check(self) -> None:
        d = self.delivery
        out = d.metrics()["delivery/out"] - d.accounts.evaluation["in_flight"]
        assert d.load == out + len(self.buffer) + len(self.batch)
        assert d.load <= d.limit, "the bound"
        assert d.accounts.closes(), str(d.accounts)
        for r in self.rollouts.values():
            assert r.delivery.held <= r.delivery.places


def run(seed: int, path: Any, *, max_lag: int, steps: int, kind: bool = False) -> World:
    world = World(seed, path, max_lag=max_lag, kind=kind)
    while world.version.number < steps:
        assert world.now < 2000, f"no progress past step {world.version.number}: {world.delivery.metrics()}"
        world.step()
    return world


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_promises_hold_after_every_event_on_an_unkind_network(seed, max_lag, tmp_path):
    world = run(seed, tmp_path / "t.jsonl", max_lag=max_lag, steps=20)
    assert world.delivery.accounts.groups["trained"] == 80
    assert world.delivery.accounts.groups["lost"] > 0
    world.execute(world.delivery.finish(world.now))
    result = replay([world.ledger.path])
    assert result.closes(), str(result)
    assert result.groups == world.delivery.accounts.groups
    assert result.tokens == world.delivery.accounts.tokens
    assert result.groups["in_flight"] == 0
    assert result.tokens["masked"] == 20


def test_a_seed_repeats_exactly(tmp_path):
    first = run(3, tmp_path / "a.jsonl", max_lag=2, steps=8)
    again = run(3, tmp_path / "b.jsonl", max_lag=2, steps=8)
    assert first.ledger.path.read_bytes() == again.ledger.path.read_bytes()


def test_the_run_ends_everywhere_when_the_trainer_says_so(tmp_path):
    world = run(1, tmp_path / "t.jsonl", max_lag=1, steps=4)
    world.execute(world.delivery.finish(world.now))
    deadline = world.now + 60
    while not all(r.delivery.run_over and not r.delivery.held for r in world.rollouts.values() if r.alive):
        assert world.now < deadline
        world.step()


@pytest.mark.parametrize("seed", range(4))
def test_an_evaluation_completes_on_one_version_while_training_goes_on(seed, tmp_path):
    world = run(seed, tmp_path / "t.jsonl", max_lag=2, steps=3)
    world.execute(world.delivery.evaluate(range(12), world.version, world.now))
    deadline = world.now + 600
    while not (state := world.delivery.evaluation_state()).complete:
        assert world.now < deadline, state
        if state.stuck:
            world.evaluated.clear()
            world.execute(world.delivery.repin(world.version, world.now))
        world.step()
    assert sorted(e.prompt for e in world.evaluated) == list(range(12))
    assert {e.version for e in world.evaluated} == {state.version}
    assert world.delivery.accounts.evaluation["evaluated"] >= 12 - sum(e.group is None for e in world.evaluated)


def test_superseding_at_max_lag_zero_never_happens_when_nothing_goes_wrong(tmp_path):
    world = run(5, tmp_path / "t.jsonl", max_lag=0, steps=15, kind=True)
    assert world.delivery.accounts.groups["superseded"] == 0
