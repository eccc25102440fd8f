from typing import Any

import numpy as np
import pytest

from mesh.config import Trainer
from mesh.effects import Note, Send
from mesh.version import Ballot, Lineage, Version
from roles.trainer.dataset import Dataset
from transport.accounts import Closed, Ended, Issued, Trained
from transport.credits import TrainerDelivery
from transport.delivery import Abort, Dropped, Evaluated, Held, Record, RolloutDelivery, RunOver, Start, admits
from transport.evaluation import PASSED
from transport.messages import (
    Answer,
    Ask,
    Completion,
    Credit,
    Delivery,
    Group,
    HeldCredit,
    Orphan,
    Segment,
    Span,
    Verdict,
)
from transport.window import Window

TERM = Ballot(1, "t")
LINEAGE = Lineage(((TERM, 0),))


def v(number: int, term: Ballot = TERM) -> Version:
    return Version(term, number)


def group(version: Version, *, size: int = 2, tokens: int = 3) -> Group:
    segment = Segment(np.zeros(tokens, np.int32), True, np.zeros(tokens, np.float32), [Span(version, 0, tokens)])
    return Group([Completion([segment], 1.0, "stop") for _ in range(size)], version)


def make_trainer(*, live=("r",), size: int = 1000, first_id: int = 0, start: int = 0, steps=None, **settings):
    settings = {"group_size": 2, "groups_per_step": 4, "max_lag": 1, "credit_deadline_s": 60.0} | settings
    data = Dataset(name="d", size=size, digest="", seed=1)
    trainer = TrainerDelivery(Trainer(**settings), data, seed=1, first_id=first_id, steps=steps)
    trainer.rollouts(live, 0.0)
    trainer.advance(v(start), LINEAGE, 0.0)
    return trainer


class Peer:
    """What a rollout says, by hand."""

    def __init__(self, name: str = "r") -> None:
        self.name, self.seq = name, 0

    def ask(self, trainer: TrainerDelivery, *, answered=0, free=0, held=(), kept=(), now=1.0) -> tuple[Answer, list]:
        self.seq += 1
        rows = [h if isinstance(h, HeldCredit) else HeldCredit(h, None) for h in held]
        effects = trainer.receive(self.name, Ask(self.seq, answered, free, rows, list(kept)), now)
        return answer(effects, self.name), effects

    def deliver(
        self, trainer: TrainerDelivery, credit: Credit, version: Version | None = None, now=1.0, **more
    ) -> list:
        made = group(version or credit.min_version, size=credit.size, **more)
        return trainer.receive(self.name, Delivery(credit.id, made), now)


def answer(effects: list[Any], to: str = "r") -> Answer:
    return next(e.message for e in effects if isinstance(e, Send) and e.to == to)


def records(effects: list[Any], kind: type) -> list[Any]:
    return [e.entry for e in effects if isinstance(e, Record) and isinstance(e.entry, kind)]


# -- the trainer's end -------------------------------------------------------------------------------------------------


def test_credits_are_recorded_before_they_leave_and_stay_within_the_window_and_the_bound():
    trainer, peer = make_trainer(max_lag=1), Peer()
    said, effects = peer.ask(trainer, free=100)
    kinds = [type(e) for e in effects]
    assert kinds.index(Send) > max(i for i, k in enumerate(kinds) if k is Record)
    assert len(said.credits) == len(records(effects, Issued)) == 4  # the window
    trainer.window.size = 1000
    said, _ = peer.ask(trainer, answered=1, free=100, held=[c.id for c in said.credits])
    assert len(said.credits) == 4  # the bound
    assert trainer.load == trainer.limit == 8


def test_a_place_in_the_queue_sets_the_oldest_version_a_credit_may_start_from():
    trainer, peer = make_trainer(max_lag=2, start=10), Peer()
    trainer.window.size = 12
    said, _ = peer.ask(trainer, free=12)
    assert [c.min_version.number for c in said.credits] == [8] * 4 + [9] * 4 + [10] * 4


def test_a_new_term_does_not_hold_up_engines_that_are_still_at_the_one_before():
    trainer, peer = make_trainer(max_lag=2, start=10), Peer()
    new = Ballot(2, "u")
    trainer.advance(v(10, new), LINEAGE.open(new, 10), 0.0)
    said, _ = peer.ask(trainer, free=4)
    assert {c.min_version for c in said.credits} == {v(8)}


def test_free_places_are_not_filled_twice_when_an_ask_crosses_an_answer():
    trainer, peer = make_trainer(), Peer()
    said, _ = peer.ask(trainer, free=3)
    assert len(said.credits) == 3
    said, _ = peer.ask(trainer, free=3)  # sent before it saw the first Answer
    assert said.credits == []


def test_a_repeated_or_old_ask_changes_nothing():
    trainer, peer = make_trainer(), Peer()
    peer.ask(trainer, free=1)
    before = trainer.metrics()
    assert trainer.receive("r", Ask(1, 0, 4, [], []), 1.0) == []
    assert trainer.metrics() == before


def test_a_credit_whose_answer_was_lost_is_dealt_again_with_the_same_seed():
    trainer, peer = make_trainer(), Peer()
    lost, _ = peer.ask(trainer, free=1)
    peer.ask(trainer, answered=0, free=0)  # not yet known to be lost
    assert trainer.load == 1
    said, effects = peer.ask(trainer, answered=2, free=1)
    assert records(effects, Ended) == [Ended("lost", [0], "not at its rollout")]
    (again,) = said.credits
    assert (again.prompt, again.seed, again.attempt) == (lost.credits[0].prompt, lost.credits[0].seed, 0)
    assert again.id != lost.credits[0].id


def test_a_dead_rollouts_credits_go_to_the_living_and_its_groups_stay():
    trainer, dead, living = make_trainer(live=("r", "s"), groups_per_step=4), Peer("r"), Peer("s")
    said, _ = dead.ask(trainer, free=3)
    living.ask(trainer, free=0)
    dead.deliver(trainer, said.credits[0])
    living.ask(trainer, free=4)
    effects = trainer.rollouts(["s"], 2.0)
    assert {e.to for e in effects if isinstance(e, Send)} == {"s"}
    assert [c.prompt for c in answer(effects, "s").credits] == [c.prompt for c in said.credits[1:]]
    assert trainer.accounts.groups["lost"] == 2
    assert trainer.load == 4


def test_a_late_ask_of_a_dead_rollout_is_not_served():
    trainer = make_trainer()
    trainer.rollouts([], 1.0)
    assert trainer.receive("r", Ask(1, 0, 4, [], []), 1.0) == []


def test_a_rollout_wrongly_taken_for_dead_is_served_again():
    trainer, rollout = make_trainer(), RolloutDelivery(places=2)
    ask = rollout.trainers(["t"], 0.0)[0].message
    rollout.receive("t", answer(trainer.receive("r", ask, 0.0)), 0.0)
    trainer.rollouts([], 1.0)
    trainer.rollouts(["r"], 2.0)
    for now in (3.0, 5.0, 7.0):
        for ask in [e.message for e in rollout.changed(now)]:
            rollout.receive("t", answer(trainer.receive("r", ask, now)), now)
    assert rollout.held == 2
    assert trainer.load == 2
    assert rollout.counts["aborted"] == 2


def test_rollouts_share_a_new_batch_evenly_after_a_step():
    trainer, peers = make_trainer(live=("r", "s"), max_lag=0), (Peer("r"), Peer("s"))
    said, _ = peers[0].ask(trainer, free=4)
    peers[1].ask(trainer, free=4)
    for credit in said.credits:
        peers[0].deliver(trainer, credit)
    ids = [c.id for c in said.credits]
    peers[0].ask(trainer, answered=said.seq, free=4, kept=ids)
    trainer.take(ids, 1.0)
    effects = trainer.settle(ids) + trainer.advance(v(1), LINEAGE, 2.0)
    assert [len(answer(effects, p).credits) for p in ("r", "s")] == [2, 2]
    assert answer(effects, "r").verdicts == [Verdict(id, "trained") for id in ids]


def test_trained_ids_are_recorded_before_their_verdicts_with_the_masked_tokens():
    trainer, peer = make_trainer(), Peer()
    said, _ = peer.ask(trainer, free=4)
    for credit in said.credits:
        assert [type(e) for e in peer.deliver(trainer, credit)] == [Record, Held]
    ids = [c.id for c in said.credits]
    trainer.take(ids, 1.0)
    effects = trainer.settle(ids, {ids[0]: 5}) + trainer.advance(v(1), LINEAGE, 2.0)
    assert effects[0] == Record(Trained(ids, v(0), [5, 0, 0, 0]))
    assert trainer.accounts.tokens["trained"] == 4 * 6 - 5
    assert answer(effects).verdicts == [Verdict(id, "trained") for id in ids]


def test_a_group_delivered_twice_is_counted_and_harmless():
    trainer, peer = make_trainer(), Peer()
    said, _ = peer.ask(trainer, free=1)
    assert any(isinstance(e, Held) for e in peer.deliver(trainer, said.credits[0]))
    assert peer.deliver(trainer, said.credits[0]) == []
    assert trainer.counts["duplicates"] == 1
    assert trainer.load == 1


def test_a_group_of_another_rollouts_credit_is_not_taken():
    trainer, peer = make_trainer(live=("r", "s")), Peer()
    said, _ = peer.ask(trainer, free=1)
    assert Peer("s").deliver(trainer, said.credits[0]) == []
    assert trainer.accounts.tokens["delivered"] == 0


def test_a_delivery_that_does_not_come_is_asked_for_again_but_not_at_once():
    trainer, peer = make_trainer(), Peer()
    said, _ = peer.ask(trainer, free=1)
    id = said.credits[0].id
    again = [peer.ask(trainer, answered=1, kept=[id], now=now)[0].again for now in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert again == [[], [], [id], [], [id]]
    peer.deliver(trainer, said.credits[0])
    assert peer.ask(trainer, answered=5, kept=[id], now=9.0)[0].again == []


def test_an_unknown_kept_group_is_called_failed_and_an_unknown_held_credit_is_revoked():
    trainer, peer = make_trainer(), Peer()
    said, _ = peer.ask(trainer, kept=[77], held=[78])
    assert said.verdicts == [Verdict(77, "failed")]
    assert said.revoked == [78]


def test_a_credit_that_started_too_long_ago_is_revoked_and_its_prompt_dealt_first():
    trainer, peer = make_trainer(max_lag=1), Peer()
    said, _ = peer.ask(trainer, free=1)
    slow = said.credits[0]
    peer.ask(trainer, answered=1, held=[HeldCredit(slow.id, v(0))])
    assert answer(trainer.advance(v(1), LINEAGE, 2.0)).revoked == []
    effects = trainer.advance(v(2), LINEAGE, 3.0)
    assert records(effects, Ended) == [Ended("superseded", [slow.id], "age")]
    assert answer(effects).revoked == [slow.id]
    said, _ = peer.ask(trainer, answered=3, free=1)
    assert (said.credits[0].prompt, said.credits[0].attempt) == (slow.prompt, 1)
    assert said.credits[0].seed != slow.seed


def test_a_prompt_superseded_too_often_is_closed_as_too_slow_and_the_user_is_told():
    trainer, peer = make_trainer(max_lag=0, retries=2, size=50, groups_per_step=1), Peer()
    for number in range(3):
        said, _ = peer.ask(trainer, answered=100 * number, free=1)
        (credit,) = said.credits
        peer.ask(trainer, answered=100 * (number + 1), held=[HeldCredit(credit.id, v(number))])
        effects = trainer.advance(v(number + 1), LINEAGE, 2.0)
        assert credit.attempt == number
    assert records(effects, Closed) == [Closed(0, credit.prompt, "too slow")]
    (note,) = [e for e in effects if isinstance(e, Note)]
    assert note.level == "warning"
    assert "1 of 50 prompts of epoch 0 are closed untrained; 1 were too slow" in note.text


def test_held_groups_that_age_while_a_batch_trains_are_dropped_when_it_is_taken():
    trainer, peer = make_trainer(max_lag=1, groups_per_step=1), Peer()
    trainer.window.size = 2
    said, _ = peer.ask(trainer, free=2)
    trainer.advance(v(1), LINEAGE, 2.0)
    for credit in said.credits:
        peer.deliver(trainer, credit, v(0))
    effects = trainer.take([said.credits[0].id], 3.0)
    assert [e for e in effects if isinstance(e, Dropped)] == [Dropped(said.credits[1].id, "age")]


def test_groups_of_another_lineage_are_superseded_on_arrival_without_blaming_the_prompt():
    trainer, peer = make_trainer(max_lag=1), Peer()
    said, _ = peer.ask(trainer, free=1)
    effects = peer.deliver(trainer, said.credits[0], v(0, Ballot(9, "x")))
    assert records(effects, Ended)[0].why == "lineage"
    assert trainer.accounts.tokens["superseded"] == 6
    said, _ = peer.ask(trainer, answered=5, free=1, kept=[said.credits[0].id])
    assert said.verdicts == [Verdict(0, "superseded")]
    assert said.credits[0].attempt == 0


def test_a_failure_and_a_missed_deadline_are_failed_and_tried_again():
    trainer, peer = make_trainer(credit_deadline_s=60.0), Peer()
    said, _ = peer.ask(trainer, free=2)
    effects = trainer.receive("r", Delivery(0, None, "the verifier raised"), 2.0)
    assert records(effects, Ended) == [Ended("failed", [0], "the verifier raised")]
    effects = trainer.tick(62.0)
    assert records(effects, Ended) == [Ended("failed", [1], "not delivered within 60 s")]
    said, _ = peer.ask(trainer, answered=9, free=2, held=[1], kept=[0])
    assert said.revoked == [1]
    assert said.verdicts == [Verdict(0, "failed")]
    assert [c.attempt for c in said.credits] == [1, 1]


def test_a_group_of_the_wrong_size_is_failed():
    trainer, peer = make_trainer(), Peer()
    peer.ask(trainer, free=1)
    effects = trainer.receive("r", Delivery(0, group(v(0), size=3)), 2.0)
    assert records(effects, Ended)[0].why == "3 completions instead of 2"


def test_no_order_is_made_for_a_step_that_will_not_come():
    trainer, peer = make_trainer(steps=1), Peer()
    trainer.window.size = 8
    assert len(peer.ask(trainer, free=8)[0].credits) == 4


def test_at_max_lag_zero_a_resumed_run_issues_the_same_prompts_and_seeds():
    def make(start: int = 0) -> tuple[TrainerDelivery, Dataset]:
        data = Dataset(name="d", size=10, digest="", seed=1)
        trainer = TrainerDelivery(Trainer(group_size=2, groups_per_step=4, max_lag=0), data, seed=1)
        trainer.rollouts(["r"], 0.0)
        trainer.advance(v(start), LINEAGE, 0.0)
        return trainer, data

    def play(trainer: TrainerDelivery, first: int, last: int) -> list[tuple]:
        issued, peer, seq = [], Peer(), 0
        for number in range(first, last):
            said, _ = peer.ask(trainer, answered=seq, free=9)
            issued += [(c.epoch, c.prompt, c.attempt, c.seed, c.min_version.number) for c in said.credits]
            ids = [c.id for c in said.credits]
            for credit in reversed(said.credits):
                peer.deliver(trainer, credit)
            peer.ask(trainer, answered=said.seq, free=0, kept=ids)  # no place yet when the step ends
            trainer.take(ids, 1.0)
            trainer.settle(ids)
            seq = answer(trainer.advance(v(number + 1), LINEAGE, 2.0)).seq
        return issued

    whole = play(make()[0], 0, 7)
    trainer, data = make()
    begun = play(trainer, 0, 3)
    said = answer(trainer.receive("r", Ask(99, 99, 9, [], []), 3.0))  # a batch is out when it is killed
    resumed, restored = make(start=3)
    restored.load_state_dict(data.state_dict())
    resumed.load_state_dict(trainer.state_dict())
    assert len(said.credits) == 4
    assert begun + play(resumed, 3, 7) == whole
    assert len(whole) == 28
    assert resumed.accounts.next_id == said.credits[-1].id + 1 + 16


def test_the_end_of_the_run_reaches_every_rollout_and_closes_the_accounts():
    trainer, peer = make_trainer(), Peer()
    peer.ask(trainer, free=3)
    effects = trainer.finish(5.0)
    assert answer(effects).finished
    assert trainer.load == 0
    said, _ = peer.ask(trainer, answered=2, free=3)
    assert said.finished
    assert said.credits == []


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_goes_first_takes_no_place_and_is_not_counted_in_the_bound():
    trainer, peer = make_trainer(max_lag=0), Peer()
    trainer.evaluate([5, 6], v(0), 0.0)
    said, _ = peer.ask(trainer, free=4)
    assert [(c.prompt, c.evaluation) for c in said.credits[:2]] == [(5, True), (6, True)]
    assert len(said.credits) == 2 + 4
    assert trainer.load == 4
    effects = peer.deliver(trainer, said.credits[0])
    assert [e.prompt for e in effects if isinstance(e, Evaluated)] == [5]
    assert peer.ask(trainer, answered=1, kept=[0], held=[1, 2, 3, 4, 5])[0].verdicts == [Verdict(0, "evaluated")]
    assert trainer.accounts.evaluation["evaluated"] == 1
    assert trainer.accounts.tokens["delivered"] == 0


def test_an_evaluation_that_every_rollout_has_passed_is_stuck_and_starts_again_when_repinned():
    trainer, peers = make_trainer(live=("r", "s"), max_lag=0), (Peer("r"), Peer("s"))
    trainer.evaluate([5], v(0), 0.0)
    for peer in peers:
        assert not trainer.evaluation_state().stuck
        said, _ = peer.ask(trainer, free=0)
        (credit,) = said.credits
        assert credit.evaluation
        trainer.receive(peer.name, Delivery(credit.id, None, PASSED), 1.0)
    state = trainer.evaluation_state()
    assert (state.stuck, state.done, state.out) == (True, 0, 0)
    trainer.advance(v(1), LINEAGE, 2.0)
    trainer.repin(v(1), 2.0)
    said, _ = peers[0].ask(trainer, answered=9, free=1)
    assert said.credits[0].min_version == v(1)
    peers[0].deliver(trainer, said.credits[0])
    assert trainer.evaluation_state().complete


def test_an_evaluation_that_is_given_up_is_revoked_and_another_may_begin():
    trainer, peer = make_trainer(), Peer()
    trainer.evaluate([5, 6], v(0), 0.0)
    said, _ = peer.ask(trainer, free=0)
    ids = [c.id for c in said.credits]
    trainer.abandon_evaluation(1.0)
    assert trainer.evaluation_state() is None
    assert peer.ask(trainer, answered=1, held=ids)[0].revoked == ids
    assert trainer.accounts.evaluation["in_flight"] == 0
    trainer.evaluate([7], v(0), 2.0)
    assert not trainer.evaluation_state().complete


def test_a_group_mixed_from_two_versions_is_no_result():
    trainer, peer = make_trainer(), Peer()
    trainer.evaluate([5], v(0), 0.0)
    said, _ = peer.ask(trainer, free=1)
    effects = peer.deliver(trainer, said.credits[0], v(1))
    assert not any(isinstance(e, Evaluated) for e in effects)
    assert trainer.evaluation_state().stuck


def test_an_evaluation_prompt_that_keeps_failing_ends_without_a_group():
    trainer, peer = make_trainer(retries=1), Peer()
    trainer.evaluate([5], v(0), 0.0)
    for attempt in range(2):
        said, _ = peer.ask(trainer, answered=10 * attempt, free=1)
        effects = trainer.receive("r", Delivery(said.credits[0].id, None, "the verifier raised"), 1.0)
    assert [e for e in effects if isinstance(e, Evaluated)] == [Evaluated(5, v(0), None)]
    assert trainer.evaluation_state().complete


# -- the rollout's end -------------------------------------------------------------------------------------------------


def credit(id: int) -> Credit:
    return Credit(id=id, prompt=id, epoch=0, attempt=0, size=2, min_version=v(0), seed=0)


def say(seq: int, credits=(), revoked=(), verdicts=(), again=(), finished=False) -> Answer:
    return Answer(seq, list(credits), list(revoked), list(verdicts), list(again), v(0), LINEAGE, finished)


def asks(effects: list[Any]) -> dict[str, Ask]:
    return {e.to: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ask)}


def test_free_places_are_shared_among_the_trainers_and_the_odd_one_goes_round():
    rollout = RolloutDelivery(places=5)
    rollout.trainers(["a", "b"], 0.0)
    shares = [tuple(ask.free for ask in asks(rollout.tick(float(now))).values()) for now in (1, 2)]
    assert sorted(shares) == [(2, 3), (3, 2)]


def test_an_ask_goes_out_every_second_and_on_change_but_not_for_an_answer_that_says_nothing():
    rollout = RolloutDelivery(places=2)
    assert asks(rollout.trainers(["t"], 0.0))
    assert not asks(rollout.receive("t", say(1), 0.5))
    assert not asks(rollout.tick(0.9))
    assert asks(rollout.tick(1.0))
    assert asks(rollout.receive("t", say(2, [credit(1)]), 1.5))["t"].held == [HeldCredit(1, None)]
    rollout.started("t", 1, v(3))
    assert asks(rollout.tick(1.6))["t"].held == [HeldCredit(1, v(3))]


def test_a_group_is_kept_until_its_verdict_and_sent_again_when_asked():
    rollout = RolloutDelivery(places=2)
    rollout.trainers(["t"], 0.0)
    assert rollout.receive("t", say(1, [credit(1)]), 1.0)[0] == Start("t", credit(1))
    effects = rollout.finished("t", 1, group(v(0)), 2.0)
    assert effects[0].bulk
    assert effects[0].message.credit == 1
    assert asks(effects)["t"].kept == [1]
    assert rollout.receive("t", say(2, again=[1, 99]), 3.0)[0] == effects[0]
    rollout.receive("t", say(3, verdicts=[Verdict(1, "trained")]), 4.0)
    assert rollout.kept == 0


def test_an_old_answer_is_ignored():
    rollout = RolloutDelivery(places=2)
    rollout.trainers(["t"], 0.0)
    rollout.receive("t", say(2, [credit(5)]), 1.0)
    assert rollout.receive("t", say(1, [credit(4)], revoked=[5]), 1.0) == []
    assert rollout.held == 1


def test_a_revoked_credit_is_aborted_and_what_it_still_yields_is_not_sent():
    rollout = RolloutDelivery(places=2)
    rollout.trainers(["t"], 0.0)
    rollout.receive("t", say(1, [credit(1)]), 1.0)
    assert rollout.receive("t", say(2, revoked=[1, 7]), 2.0)[0] == Abort("t", 1)
    assert rollout.finished("t", 1, group(v(0)), 3.0) == []


def test_credits_over_the_places_and_those_returned_are_simply_not_held():
    rollout = RolloutDelivery(places=1)
    rollout.trainers(["t"], 0.0)
    effects = rollout.receive("t", say(1, [credit(1), credit(2)]), 1.0)
    assert [e for e in effects if isinstance(e, Start)] == [Start("t", credit(1))]
    rollout.returned("t", 1, "weights unproven")
    ask = asks(rollout.tick(2.0))["t"]
    assert (ask.held, ask.answered, ask.free) == ([], 1, 1)
    assert ask.returned == {"no place": 1, "weights unproven": 1}


def test_a_credit_is_begun_with_a_version_of_its_lineage_that_is_new_enough():
    lineage = LINEAGE.open(Ballot(2, "t"), 5)
    order = Credit(id=1, prompt=0, epoch=0, attempt=0, size=2, min_version=v(4), seed=0)
    for version, admitted in ((None, False), (v(3), False), (v(4), True), (v(5), True), (v(6), False)):
        assert admits(order, version, lineage, gone=False) is admitted
    assert admits(order, v(6, Ballot(2, "t")), lineage, gone=False)


def test_an_evaluation_whose_version_will_not_come_is_given_up_even_by_an_engine_without_any():
    order = Credit(id=1, prompt=0, epoch=0, attempt=0, size=1, min_version=v(4), seed=0, evaluation=True)
    assert admits(order, v(4), LINEAGE, gone=False)
    for version in (None, v(3)):
        assert admits(order, version, LINEAGE, gone=False) is False
        assert admits(order, version, LINEAGE, gone=True) is None
    assert admits(order, v(5), LINEAGE, gone=False) is None


def test_a_paused_rollout_gives_its_credits_back_and_takes_no_more():
    rollout = RolloutDelivery(places=3)
    rollout.trainers(["t"], 0.0)
    rollout.receive("t", say(1, [credit(1), credit(2)]), 1.0)
    rollout.finished("t", 1, group(v(0)), 1.5)
    effects = rollout.pause("unproven", 2.0)
    assert [e for e in effects if isinstance(e, Abort)] == [Abort("t", 2)]
    ask = asks(effects)["t"]
    assert (ask.free, ask.held, ask.kept) == (0, [], [1])
    crossing = rollout.receive("t", say(2, [credit(3)]), 3.0)
    assert not [e for e in crossing if isinstance(e, Start)]
    assert (asks(crossing)["t"].answered, asks(crossing)["t"].returned) == (2, {"unproven": 2})
    assert asks(rollout.resume(4.0))["t"].free == 3
    assert Start("t", credit(4)) in rollout.receive("t", say(3, [credit(4)]), 5.0)


def test_a_dead_trainers_credits_are_aborted_and_its_groups_offered_to_the_others():
    rollout = RolloutDelivery(places=3)
    rollout.trainers(["t", "u"], 0.0)
    rollout.receive("t", say(1, [credit(1), credit(2)]), 1.0)
    rollout.finished("t", 1, group(v(0)), 2.0)
    effects = rollout.trainers(["u"], 3.0)
    assert effects[0] == Abort("t", 2)
    assert asks(effects)["u"].free == 3
    assert asks(effects)["u"].orphans == [Orphan(("t", 1), 0, 1, 2, v(0))]
    assert rollout.receive("t", say(9, [credit(4)]), 4.0) == []


def test_the_end_of_the_run_is_told_once():
    rollout = RolloutDelivery(places=1)
    rollout.trainers(["t"], 0.0)
    assert RunOver("t") in rollout.receive("t", say(1, finished=True), 1.0)
    assert RunOver("t") not in rollout.receive("t", say(2, finished=True), 2.0)
    assert rollout.run_over


# -- the window --------------------------------------------------------------------------------------------------------


def test_the_window_grows_while_the_trainer_waits_for_want_of_orders_and_shrinks_slowly():
    window = Window(groups_per_step=32, max_lag=2, wait_target=0.05)
    sizes = []
    for waited in (0.5, 0.5, 0.03, 0.0, 0.0):
        window.step(waited, limited=True)
        sizes.append(window.size)
    assert sizes == [40, 48, 48, 46, 44]
    window.step(1.0, limited=False)  # every rollout is busy: more orders would only wait
    assert window.size == 44


@pytest.mark.parametrize("max_lag", [0, 3])
def test_the_window_stays_between_one_batch_and_the_bound(max_lag):
    window = Window(groups_per_step=8, max_lag=max_lag, wait_target=0.05)
    for _ in range(50):
        window.step(1.0, limited=True)
    assert window.size == 8 * (max_lag + 1)
    for _ in range(50):
        window.step(0.0, limited=True)
    assert window.size == 8
