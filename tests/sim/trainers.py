"""Scenario: the prompts, groups and ledgers of several trainers, with the shipped ``Intake`` of each.

How trainers find together and make a step is simulated elsewhere (``step.py``); here a ``Company`` stands for its
result: who is in it, which step is reduced, and who has applied it. Trainers and rollouts die at any moment, trainers
come and are taken in, a company parts into two that both train on, until one is left behind; a rollout takes a trainer
for gone that is not. Messages are lost, doubled and late. After every event the promises are checked; at the end the
records of all trainers are replayed and must tell what is in the weights.
"""

import contextlib
import heapq
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.config import Config, Run, Task
from mesh.config import Trainer as Settings
from mesh.effects import Send
from mesh.version import Ballot, Lineage, Version
from roles.trainer import intake
from roles.trainer.buffer import Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.intake import Intake
from roles.trainer.ledger import Ledger, close_all_dead, replay
from tests.sim.test_delivery_sim import make_group
from tests.sim.world import Failure
from transport.accounts import Row
from transport.delivery import Abort, RolloutDelivery, Start, admits
from transport.messages import MAX_ORPHANS, Answer, Credit

TICK_S = 0.05
CALM_S = 300.0
LAST_EVENTS = 40

Prompt = tuple[int, int]


@dataclass
class Line:
    """Weights as one company has made them: the truth about what is in them. ``trained`` has the number of the version
    by which each prompt came in."""

    lineage: Lineage
    number: int = 0
    trained: dict[Prompt, int] = field(default_factory=dict)

    def copy(self) -> "Line":
        return Line(self.lineage, self.number, dict(self.trained))


@dataclass
class Saved:
    line: Line
    order: dict[str, Any]


class Company:
    """A formation: its members, the line of weights they are on, and the step that is reduced and not yet applied."""

    def __init__(self, world: "Trainers", members: list["Trainer"], line: Line):
        self.world, self.members, self.line = world, members, line
        world.ballots += 1
        self.ballot = Ballot(world.ballots, members[0].id)
        line.lineage = line.lineage.open(self.ballot, line.number)
        self.rows: dict[str, Row] | None = None
        self.waiting: list[Trainer] = []
        self.held_over = 0.0
        for m in members:
            m.company, m.opened = self, False
            m.opens_at = world.now + world.rng.random() * 2
        world.log(f"company {self.ballot} of {[m.id for m in members]} at {line.number}")

    @property
    def complete(self) -> bool:
        return all(m.alive for m in self.members)

    def turn(self) -> None:
        rng, now = self.world.rng, self.world.now
        for m in [m for m in self.waiting if m.alive and rng.random() < 0.3]:
            self.apply(m)
        if self.rows is not None and not any(m.alive for m in self.waiting):
            self.rows = None
        for m in self.members:
            if m.alive and not m.opened and self.rows is None and now >= m.opens_at:
                m.open()
            if m.alive and m.opened and self.rows is None:
                m.gather()
        ready = [m for m in self.members if m.batch and now >= m.ready_at]
        if self.rows is None and self.complete and ready and all(m.opened for m in self.members):
            late = len(ready) < len([m for m in self.members if m.intake.share])
            if (not late or rng.random() < 0.02) and rng.random() > self.world.broken:
                self.rows = {m.id: m.intake.row(m.batch) for m in ready}
                self.waiting = list(self.members)
                self.world.log(f"{self.ballot} reduces step {self.line.number + 1} of {[m.id for m in ready]}")

    def apply(self, m: "Trainer") -> None:
        assert self.rows is not None
        if m.number == self.line.number:
            self.world.trained(self.line, self.rows)
        self.waiting.remove(m)
        m.apply(self.rows, self.line)

    def part(self) -> None:
        """It is over: who lives has applied what was reduced, or all void it where nobody can have applied it."""
        for m in [m for m in self.waiting if m.alive]:
            self.apply(m)
        self.rows, self.waiting = None, []


class Peer:
    """What ``Intake`` asks of the peer."""

    def __init__(self, world: "Trainers", id: str):
        self.world, self.id, self.handlers = world, id, {}
        self.members: Any = None

    def on(self, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    def on_members(self, handler: Any) -> None:
        self.members = handler

    def on_departed(self, _: Any) -> None:
        """Nobody says goodbye here."""

    def every(self, _: float, tick: Any) -> None:
        self.tick = tick

    def call(self, do: Any) -> Any:
        return do()

    def note(self, text: str, level: str = "info") -> None:
        self.world.log(f"{self.id} says {text}")

    def live(self, _: str) -> list[Any]:
        now = self.world.now
        seen = [r for r in self.world.rollouts if (r.alive or now < r.noticed_at) and now >= r.unseen.get(self.id, now)]
        return [SimpleNamespace(id=r.id) for r in seen]

    def send(self, to: str, message: Any, *, bulk: bool = False) -> bool:
        if isinstance(message, Answer):
            self.world.issued(self.id, message.credits)
        self.world.send(self.id, to, message, bulk)
        return True


class Trainer:
    def __init__(self, world: "Trainers"):
        self.world, self.id = world, world.new_id("trainer")
        self.peer = Peer(world, self.id)
        self.data = Dataset(name="numbers", size=world.prompts, digest="d", seed=world.seed)
        first_id = close_all_dead(world.directory)
        self.ledger = Ledger(world.directory / f"{self.id}.jsonl", peer=self.id, run="sim", first_id=first_id)
        self.intake = Intake(self.peer, world.config, self.data, self.ledger, first_id=first_id, vocabulary=9)
        self.company: Company | None = None
        self.alive, self.opened = True, False
        self.noticed_at = self.opens_at = self.ready_at = 0.0
        self.line, self.number, self.lineage = Line(Lineage()), 0, Lineage()
        self.batch: list[Trajectory] = []

    @property
    def version(self) -> Version:
        return Version(self.lineage.terms[-1][0], self.number)

    def open(self) -> None:
        assert self.company is not None
        self.opened = True
        self.line, self.number, self.lineage = self.company.line, self.company.line.number, self.company.line.lineage
        members = [m.id for m in self.company.members]
        ended = self.intake.opened(members, self.id, self.version, self.lineage)
        left = [t for t in self.batch if t.credit.id not in ended]
        if len(left) < len(self.batch) and self.world.rng.random() < 0.5:
            self.intake.put_back(left)
            left = []
        self.batch = left
        self.world.log(f"{self.id} opens {self.version}, {len(ended)} groups taken from it")

    def gather(self) -> None:
        if not self.batch and self.intake.share:
            self.batch = self.intake.take(self.version, self.lineage)
            self.ready_at = self.world.now + self.world.rng.random()
        elif self.batch and self.world.rng.random() < 0.002:
            self.intake.put_back(self.batch)
            self.batch = []

    def apply(self, rows: dict[str, Row], line: Line) -> None:
        if self.id not in rows and self.batch:
            self.intake.put_back(self.batch)
        self.batch, self.number, self.line = [], line.number, line
        self.intake.committed(self.version, self.lineage, rows, waited=self.world.rng.random() * 0.2)
        self.world.log(f"{self.id} is at {self.version}")
        if self.world.rng.random() < 0.2:
            self.world.saved = Saved(line.copy(), self.data.state_dict())

    def restart(self) -> None:
        self.batch, self.company, self.opened = [], None, False
        self.intake.restart()
        self.world.log(f"{self.id} is left behind")

    def stand(self, line: Line, order: dict[str, Any]) -> None:
        self.intake.load(order)
        self.number, self.lineage, self.line = line.number, line.lineage, line

    def die(self) -> None:
        os.close(self.ledger._fd)
        self.alive, self.noticed_at = False, self.world.now + self.world.rng.uniform(0.5, 3.0)
        self.world.log(f"{self.id} dies")


class Rollout:
    """A rollout peer with an engine that takes its time."""

    def __init__(self, world: "Trainers"):
        self.world, self.id = world, world.new_id("rollout")
        self.delivery = RolloutDelivery(world.rng.randint(2, 6), max_lag=world.config.trainer.max_lag)
        self.engine: Version | None = None
        self.work: dict[tuple[str, int], tuple[Credit, Version | None]] = {}
        self.blind: dict[str, float] = {}  # trainers that it takes for gone, until when
        self.unseen: dict[str, float] = {}  # trainers that take it for dead, until when
        self.alive, self.noticed_at = True, 0.0

    def execute(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.world.send(self.id, effect.to, effect.message, effect.bulk)
                case Start(trainer, credit):
                    self.work[trainer, credit.id] = (credit, None)
                case Abort(trainer, id):
                    del self.work[trainer, id]
                case _:
                    raise AssertionError(effect)

    def turn(self) -> None:
        world, rng, now = self.world, self.world.rng, self.world.now
        live = [t.id for t in world.everybody if t.alive or now < t.noticed_at]
        live = [t for t in live if now >= self.blind.get(t, now)]
        self.execute(self.delivery.trainers(live, now))
        publishers = [c.members[0] for c in world.companies if c.members[0].alive and c.members[0].opened]
        if publishers and rng.random() < 0.2:
            newest = rng.choice(publishers).version
            if self.engine is None or newest > self.engine:  # never back
                self.engine = newest
        for (trainer, id), (credit, begun) in list(self.work.items()):
            if begun is None and self.engine is not None:
                _, lineage = self.delivery.standing(trainer)
                if admits(credit, self.engine, lineage, gone=False):
                    self.work[trainer, id] = (credit, self.engine)
                    self.delivery.started(trainer, id, self.engine)
            elif begun is not None and rng.random() < 0.15:
                del self.work[trainer, id]
                if rng.random() < world.failing:
                    self.execute(self.delivery.failed(trainer, id, "the verifier raised", now))
                else:
                    assert self.engine is not None
                    group = make_group(rng, credit, begun, self.engine)
                    self.execute(self.delivery.finished(trainer, id, group, now))
        self.execute(self.delivery.tick(now))


class Trainers:
    """The world. ``failing`` and the like are probabilities; they are 0 in calm."""

    def __init__(self, seed: int, directory: Path):
        self.seed, self.directory = seed, directory
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.events = self.sent = self.ballots = self.born = 0
        self.lines: list[str] = []
        self.settings = Settings(
            group_size=2,
            groups_per_step=rng.choice((4, 5, 6)),
            max_lag=rng.choice((0, 1, 2, 3)),
            credit_deadline_s=rng.choice((20.0, 600.0)),
        )
        self.config = Config(run=Run(steps=10_000, seed=seed), task=Task(heldout_prompts=0), trainer=self.settings)
        self.prompts = rng.choice((17, 40, 200))
        self.loss, self.failing, self.broken, self.death = rng.choice((0.0, 0.1)), 0.03, 0.1, rng.choice((0.002, 0.006))
        self.queue: list[tuple[float, int, str, str, Any]] = []
        self.everybody: list[Trainer] = []
        self.rollouts: list[Rollout] = []
        self.companies: list[Company] = []
        self.saved = Saved(
            Line(Lineage()), Dataset(name="numbers", size=self.prompts, digest="d", seed=seed).state_dict()
        )
        self.heal_at = 0.0
        self.everybody = [Trainer(self) for _ in range(rng.randint(2, 4))]
        self.rollouts = [Rollout(self) for _ in range(rng.randint(2, 4))]

    def new_id(self, role: str) -> str:
        self.born += 1
        return f"{role}-{self.born:03}"

    def log(self, text: str) -> None:
        self.events += 1
        self.lines.append(f"{self.now:8.2f} {text}")

    @property
    def living(self) -> list[Trainer]:
        return [t for t in self.everybody if t.alive]

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, source: str, to: str, message: Any, bulk: bool) -> None:
        rng = self.rng
        for _ in range(rng.choices((0, 1, 2), (self.loss, 1 - 2 * self.loss, self.loss))[0]):
            delay = rng.random() * (2.0 if bulk else 0.2) * rng.choice((1, 1, 1, 5))
            self.sent += 1
            heapq.heappush(self.queue, (self.now + delay, self.sent, source, to, message))

    def deliver(self) -> None:
        while self.queue and self.queue[0][0] <= self.now:
            _, _, source, to, message = heapq.heappop(self.queue)
            for t in [t for t in self.living if t.id == to]:
                t.peer.handlers[type(message)](source, message)
                self.check(t)
            for r in [r for r in self.rollouts if r.alive and r.id == to]:
                r.execute(r.delivery.receive(source, message, self.now))

    # Promises ---------------------------------------------------------------------------------------------------------

    def trained(self, line: Line, rows: dict[str, Row]) -> None:
        """The first of a company applies a step."""
        line.number += 1
        for peer, row in rows.items():
            for group in row.groups:
                prompt = (group.epoch, group.prompt)
                assert prompt not in line.trained, f"{prompt} of {peer} is trained into {line.number}, and was before"
                line.trained[prompt] = line.number
        for t in self.everybody:
            for trajectory in t.batch if t.id in rows else ():
                for v in trajectory.versions:
                    assert line.lineage.holds(v), f"{v} is not of the lineage it is trained on"
                    lag = line.number - 1 - v.number
                    assert lag <= self.settings.max_lag, f"{t.id} trains a group with lag {lag}"

    def issued(self, trainer: str, credits: list[Credit]) -> None:
        t = next(t for t in self.everybody if t.id == trainer)
        for credit in credits:
            into = t.line.trained.get((credit.epoch, credit.prompt))
            what = f"adopts {credit.adopts}" if credit.adopts else "orders"
            assert into is None or into > t.number, f"{trainer} {what}: prompt {credit.prompt} was trained into {into}"
            if credit.adopts:
                self.log(f"{trainer} {what} as {credit.id}")

    def check(self, t: Trainer) -> None:
        d = t.intake.delivery
        assert d.accounts.closes(), str(d.accounts)
        out = sum(len(r.out) for r in d._rollouts.values())
        assert d.load == out + len(t.intake.buffer) + len(t.intake.taken), "a credit is neither out, held nor taken"
        assert d.load <= (self.settings.max_lag + 1) * self.settings.groups_per_step, "the bound"
        assert set(t.intake.taken) == {x.credit.id for x in t.batch}
        out_prompts = {(ref.epoch, ref.prompt) for ref in t.data.open()} if d._missing else set()
        for prompt, id in d._missing.items():
            assert prompt not in out_prompts, f"credit {id} of {t.id} is missing, and its prompt {prompt} is out"
            late = self.now - d._open[id].at - self.settings.credit_deadline_s
            assert late < 1.0, f"credit {id} of {t.id} is missing for ever"

    def check_all(self) -> None:
        for t in self.living:
            self.check(t)
        for c in self.companies:
            if all(m.alive and m.opened for m in c.members):
                owner: dict[Prompt, str] = {}
                for m in c.members:
                    for ref in m.data.open():
                        other = owner.setdefault((ref.epoch, ref.prompt), m.id)
                        assert other == m.id, f"{m.id} and {other} both have prompt {ref.prompt} of epoch {ref.epoch}"
        for r in self.rollouts:
            assert r.delivery.held <= r.delivery.places
            assert r.delivery.orphans <= MAX_ORPHANS

    # What happens -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += TICK_S
        self.deliver()
        self.misfortunes()
        self.regroup()
        for company in self.companies:
            company.turn()
        for t in self.living:
            t.peer.members()
            t.peer.tick()
        self.check_all()
        for r in [r for r in self.rollouts if r.alive]:
            r.turn()
        self.rollouts = [r for r in self.rollouts if r.alive or self.now < r.noticed_at]

    def misfortunes(self) -> None:
        rng = self.rng
        if rng.random() < self.death and self.living:
            rng.choice(self.living).die()
        if self.death and len(self.living) < 4 and rng.random() < 0.01:
            self.everybody.append(Trainer(self))
        if rng.random() < self.death:
            r = rng.choice(self.rollouts)
            r.alive, r.noticed_at = False, self.now + rng.random() * 3
        if sum(r.alive for r in self.rollouts) < 2:
            self.rollouts.append(Rollout(self))
        if self.living and rng.random() < 2 * self.death:
            rng.choice(self.rollouts).blind[rng.choice(self.living).id] = self.now + rng.uniform(1, 6)
        if self.living and rng.random() < 2 * self.death:
            for r in rng.choice((self.rollouts, self.rollouts[-1:])):
                r.unseen[rng.choice(self.living).id] = self.now + rng.uniform(0.5, 6)
        if len(self.companies) == 1 and len(self.companies[0].members) > 1 and rng.random() < self.death / 2:
            self.split(self.companies[0])

    def split(self, company: Company) -> None:
        """Both halves go on."""
        company.part()
        members = [m for m in company.members if m.alive]
        at = self.rng.randint(1, max(1, len(members) - 1))
        self.companies = []
        for half in (members[:at], members[at:]):
            if half:
                self.companies.append(Company(self, half, company.line.copy()))
        self.heal_at = self.now + self.rng.uniform(2, 12)

    def regroup(self) -> None:
        """What the trainers' own protocol comes to (``company.py``), some time after the fact."""
        for company in list(self.companies):
            gone = [m for m in company.members if not m.alive and self.now >= m.noticed_at]
            if gone:
                company.part()
                self.companies.remove(company)
                if left := [m for m in company.members if m not in gone and m.alive]:
                    self.companies.append(Company(self, left, company.line))
        if len(self.companies) == 2 and self.now >= self.heal_at:
            lost, _ = sorted(self.companies, key=lambda c: (len(c.line.trained), len(c.members), c.ballot))
            lost.part()
            self.companies.remove(lost)
            for m in [m for m in lost.members if m.alive]:
                m.restart()
        terms = [r.engine.term for r in self.rollouts if r.alive and r.engine]
        if len(self.companies) == 1 and max(terms, default=self.companies[0].ballot) > self.companies[0].ballot:
            [company] = self.companies  # an engine took weights of a half that is gone, and refuses older terms
            company.part()
            self.companies = [Company(self, [m for m in company.members if m.alive] or company.members, company.line)]
        seekers = [t for t in self.living if t.company is None]
        if len(self.companies) == 1 and seekers and self.rng.random() < 0.05:
            [company] = self.companies
            if company.rows is None and company.complete and all(m.opened for m in company.members):
                seekers[0].stand(company.line, company.members[0].data.state_dict())
                self.companies = [Company(self, [*company.members, seekers[0]], company.line)]
        elif not self.companies and seekers and self.rng.random() < 0.05:
            for t in seekers:
                t.stand(self.saved.line, self.saved.order)
            self.companies = [Company(self, seekers, self.saved.line.copy())]

    def calm(self) -> None:
        self.log("calm")
        self.loss = self.failing = self.broken = self.death = 0.0
        for r in self.rollouts:
            r.blind.clear()
            r.unseen.clear()
        self.everybody.append(Trainer(self))

    def forgotten(self, t: Trainer, line: Line) -> None:
        """A prompt that its owner has passed is in the weights, given up, out, or to be dealt again."""
        for number, e in t.data._epochs.items():
            for place, prompt in enumerate(e.order[: e.position].tolist()):
                known = (number, prompt) in line.trained or prompt in e.closed or place in e.open or place in e.back
                assert known or not e.mine[prompt], f"prompt {prompt} of epoch {number} is forgotten by {t.id}"

    def finish(self) -> None:
        """Every trainer closes; the records tell what is in the weights, and nothing else."""
        [company] = self.companies
        company.part()
        line = company.line
        for m in [m for m in company.members if m.alive and m.opened]:
            self.forgotten(m, line)
        for t in self.living:
            t.intake._do(t.intake.delivery.finish(self.now))
            t.ledger.close()
        close_all_dead(self.directory)
        result = replay(self.directory.glob("*.jsonl"), line.lineage)
        assert result.closes(), str(result)
        assert result.groups["in_flight"] == 0, str(result)
        assert result.groups["trained"] == len(line.trained), f"{len(line.trained)} are in the weights; {result}"
        closed = {(c.epoch, c.prompt) for c in result.closed}
        assert not closed & set(line.trained), "a prompt that was trained is listed as given up"


def scenario(seed: int, *, trouble_s: float = 60.0, steps: int = 6) -> Trainers:
    """Trouble, then calm until ``steps`` more are made. Raises Failure."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: world.now, perf_counter=lambda: world.now)
        world: Any = SimpleNamespace(now=0.0)
        patch.setattr(intake, "time", clock)
        world = Trainers(seed, Path(directory))
        try:
            while world.now < trouble_s:
                world.step()
            world.calm()
            goal = max((c.line.number for c in world.companies), default=world.saved.line.number) + steps
            while len(world.companies) != 1 or world.companies[0].line.number < goal:
                where = [(str(c.ballot), c.line.number, len(c.members)) for c in world.companies]
                assert world.now < trouble_s + CALM_S, f"no progress to step {goal}: {where}"
                world.step()
            world.finish()
        except (AssertionError, ValueError) as e:
            events = "\n".join(world.lines[-LAST_EVENTS:])
            replay_it = f"python -m tests.sim {seed} --scenario trainers"
            raise Failure(f"seed {seed}, {world.now:.2f} s: {e}\n{events}\nreplay: {replay_it}") from e
        finally:
            for t in world.living:
                with contextlib.suppress(OSError):  # closed by ``finish``
                    os.close(t.ledger._fd)
        return world
