"""All pure machines together on the simulated network: one trainer, a few rollouts, any trouble; promises 2 to 5 after
every event, and training to the last step once the network is calm. And faults planted for the simulator to find."""

import re
from dataclasses import replace

import pytest

from mesh.convening import Convening
from mesh.version import Lineage
from roles.trainer.dataset import Dataset
from roles.trainer.ledger import Ledger, replay
from tests.sim.mesh import scenario
from tests.sim.trainer import Disk
from tests.sim.world import Failure
from transport import credits
from transport.accounts import Accounts, Opened
from transport.credits import TrainerDelivery
from transport.view import RolloutView
from transport.weights.reception import ReceiverSchedule
from transport.weights.schedule import PublisherSchedule, Release


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_training_goes_on_to_its_last_step_and_every_promise_holds(first):
    for seed in range(first, first + 25):
        scenario(seed)


def test_a_seed_replays_exactly():
    one, other = scenario(3), scenario(3)
    assert one.lines == other.lines
    assert (one.events, one.sent) == (other.events, other.sent)
    assert one.lines != scenario(4).lines


def test_the_seeds_are_no_calm_ones():
    worlds = [scenario(seed) for seed in range(20)]
    lines = [line for world in worlds for line in world.lines]
    for what in ("is killed", "slept", "part:", "cannot prove", "sits out", "formation", "refuses"):
        assert any(what in line for line in lines), what
    assert sum(len(world.promises.terms) > 1 for world in worlds) > 5  # trainers that were replaced
    outcomes = [outcome for world in worlds for outcome in world.promises.credits.values()]
    assert {"trained", "superseded", "failed", "lost", "evaluated"} == set(outcomes)


@pytest.mark.parametrize("seed", [0, 7, 12])
def test_the_ledgers_of_a_run_replay_to_the_accounts_it_kept(seed, tmp_path):
    world = scenario(seed)
    [disk] = [d["trainer"] for d in world.disks.values() if "trainer" in d]
    kept = Accounts()
    for peer, lines in disk.ledgers.items():
        opened, *rest = lines.lines
        assert isinstance(opened, Opened)
        ledger = Ledger(tmp_path / f"{peer}.jsonl", peer=peer, run=opened.run, first_id=opened.first_id)
        for line in rest:
            ledger.append(line)
        ledger.close()
        kept.add(lines.accounts())
    result = replay(tmp_path.glob("*.jsonl"))
    assert result.closes()
    assert (result.groups, result.tokens) == (kept.groups, kept.tokens)
    assert result.groups["in_flight"] == 0


# Faults that were planted for the simulator to find ------------------------------------------------------------------


def found_within(seeds: int) -> str:
    """The first line of what the simulator says of the first seed that fails; empty when none does."""
    for seed in range(seeds):
        try:
            scenario(seed)
        except Failure as failure:
            return str(failure).splitlines()[0]
    return ""


def test_a_forgotten_verdict_is_found(monkeypatch):
    answer = RolloutView.answer

    def forgetful(self, *args, **more):
        whole = answer(self, *args, **more)
        return type(whole)(**{f: getattr(whole, f) for f in whole.__struct_fields__} | {"verdicts": []})

    monkeypatch.setattr(RolloutView, "answer", forgetful)
    assert "keeps" in found_within(3)


def test_a_credit_that_is_never_free_again_is_found(monkeypatch):
    hear = RolloutView.hear
    monkeypatch.setattr(RolloutView, "hear", lambda self, ask, now: hear(self, ask, now)[:0])
    assert re.search("trainer is not done|does not come to rest", found_within(100))  # it holds up the one or the other


def test_a_member_that_accepts_two_conveners_at_one_counter_is_found(monkeypatch):
    invited = Convening._invited

    def faithless(self, sender, message, now):
        p = self._promise
        if p is not None and p.ballot.counter == message.ballot.counter and p.ballot != message.ballot:
            self._promise = None
        return invited(self, sender, message, now)

    monkeypatch.setattr(Convening, "_invited", faithless)
    assert "accepts two conveners" in found_within(100)


def test_a_ballot_that_is_decided_twice_is_found(monkeypatch):
    def hasty(self, sender, ballot):  # decides again for each that comes late
        r = self._round
        if r is not None and r.ballot == ballot:
            r.accepted.add(sender)
            decided = self._decide(r)
            self._round = r
            return decided
        return []

    monkeypatch.setattr(Convening, "_accepted", hasty)
    assert "decided twice" in found_within(10)


def test_lag_that_is_counted_across_lineages_is_found(monkeypatch):
    monkeypatch.setattr(Lineage, "holds", lambda self, version: True)
    assert "of another lineage" in found_within(100)


def test_lag_that_is_not_counted_is_found(monkeypatch):
    monkeypatch.setattr(credits, "superseded", lambda *args: None)
    monkeypatch.setattr("roles.trainer.buffer.superseded", lambda *args: None)
    assert "is trained with lag" in found_within(100)


def test_a_buffer_that_is_released_while_it_is_sent_is_found(monkeypatch):
    def careless(self):
        return [] if self.newest is None else [Release(self._slot)]

    monkeypatch.setattr(PublisherSchedule, "_release_newest", careless)
    assert "buffer" in found_within(200)


def test_a_shadow_that_is_written_in_the_engines_hands_is_found(monkeypatch):
    take = ReceiverSchedule.take

    def careless(self):
        taken = take(self)
        if taken:
            self._shadows[taken[1]].use = "free"
        return taken

    monkeypatch.setattr(ReceiverSchedule, "take", careless)
    assert "engine" in found_within(100)


def test_a_version_reported_before_it_is_proved_is_found(monkeypatch):
    ended = ReceiverSchedule.receive_ended

    def hasty(self, version, attempt, ok, now, **more):
        self.proved = version if ok else self.proved
        return ended(self, version, attempt, ok, now, **more)

    monkeypatch.setattr(ReceiverSchedule, "receive_ended", hasty)
    assert "as proved, and it is not" in found_within(3)


def test_a_prompt_that_is_dealt_again_after_it_was_trained_is_found(monkeypatch):
    monkeypatch.setattr(Dataset, "done", lambda self, ref: self.give_back(replace(ref, attempt=0)))
    assert "trained twice in epoch" in found_within(3)


def test_more_on_order_than_the_bound_allows_is_found(monkeypatch):
    monkeypatch.setattr(TrainerDelivery, "_places", lambda self: 1000)
    assert "more credits than the bound allows" in found_within(3)


def test_a_term_file_that_is_not_read_is_found(monkeypatch):
    monkeypatch.setattr(Disk, "term", property(lambda self: 0, lambda self, counter: None), raising=False)
    monkeypatch.setattr(Lineage, "open", lambda self, term, number: Lineage((*self.terms, (term, number))))
    assert "is not the highest" in found_within(100)
