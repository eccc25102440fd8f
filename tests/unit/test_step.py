"""Several trainers by hand: one step together, what follows from each kind of failure, and who trains with whom."""

from collections import deque
from itertools import pairwise

import pytest

from mesh.effects import Note, Send
from mesh.version import Ballot, Lineage
from roles.trainer.acts import Abandon, Apply, Build, Convene, Diverged, LeftBehind, Opened, Reduce, Transfer
from roles.trainer.agreement import agree
from roles.trainer.company import Company
from roles.trainer.step import Timing
from transport.messages import (
    Held,
    Place,
    StepGo,
    StepHere,
    StepHold,
    StepOver,
    StepReady,
    StepReduced,
    StepSeek,
    StepStanding,
)

A, B, C, D, E = "a", "b", "c", "d", "e"
T = Timing(
    step_wait_s=2.0, reduce_s=5.0, apply_s=4.0, split_wait_s=6.0, build_s=3.0, convene_s=2.0, takeover_s=1.0,
    hold_s=8.0, admit_interval_s=3.0, seek_s=0.5, gather_s=1.5,
)  # fmt: skip


class Net:
    """Companies whose messages lie in one queue, and a driver that does what they ask, but for what is in ``manual``:
    that waits in ``asked`` for the test to do it."""

    def __init__(self, *peers: str, manual=(), **settings):
        self.now = 100.0
        self.at: dict[str, Company] = {}
        self.queue: deque = deque()
        self.asked: list[tuple[str, object]] = []  # every effect that is no message, in order
        self.manual = tuple(manual)
        self.counter = 0
        self.there: dict[Ballot, list[str]] = {}
        self.settings = settings
        for p in peers:
            self.start(p)

    def start(self, peer: str, place: Place | None = None) -> None:
        self.at[peer] = Company(peer, place or Place(state="s0"), self.now, timing=T, **self.settings)
        self.see()

    def see(self) -> None:
        for p, company in list(self.at.items()):
            self.do(p, company.live(list(self.at), self.now))

    def kill(self, peer: str, *, seen: bool = True) -> None:
        del self.at[peer]
        if seen:
            self.see()

    def do(self, peer: str, effects) -> None:
        for e in effects:
            if isinstance(e, Send):
                self.queue.append((peer, e.to, e.message))
                continue
            self.asked.append((peer, e))
            if not isinstance(e, self.manual):
                self.drive(peer, e)

    def drive(self, peer: str, e) -> None:
        company = self.at[peer]
        match e:
            case Convene(members, above):
                self.counter = max(self.counter, above) + 1
                ballot = Ballot(self.counter, peer)
                for m in [m for m in members if m in self.at]:
                    self.do(m, self.at[m].forming(ballot, [m for m in members if m in self.at], self.now))
            case Build(ballot, members):  # a group is built when all of its members are there
                self.there.setdefault(ballot, []).append(peer)
                for m in members if len(self.there[ballot]) == len(members) else ():
                    self.do(m, self.at[m].formed(ballot, self.now))
            case Reduce(ballot, step, contributors):
                self.do(peer, company.reduced(ballot, step, f"{step}:{''.join(contributors)}", self.now))
            case Apply(_, step, contributors):
                trained = company.place.trained + len(contributors)
                self.do(peer, company.applied(step, trained, f"s{step}", self.now))
            case Transfer(ballot, _, newcomer, members):
                there = self.at[newcomer]
                self.do(newcomer, there.admitted(ballot, members, company.place, self.now))
                self.do(peer, company.transferred(newcomer, self.now))

    def run(self, lose=lambda sender, to, message: False) -> None:
        """Deliver all messages, and those that come of them."""
        while self.queue:
            sender, to, message = self.queue.popleft()
            if to in self.at and not lose(sender, to, message):
                self.do(to, self.at[to].receive(sender, message, self.now))

    def wait(self, seconds: float, lose=lambda sender, to, message: False) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for p, company in list(self.at.items()):
                if p in self.at:
                    self.do(p, company.tick(self.now))
            self.run(lose)

    def ready(self, *peers: str, groups: int = 1) -> None:
        for p in peers:
            self.do(p, self.at[p].ready(self.at[p].place.step + 1, groups, 10 * groups, self.now))

    def of(self, kind, *peers: str) -> list:
        return [e for p, e in self.asked if isinstance(e, kind) and (not peers or p in peers)]

    def clear(self) -> None:
        self.asked.clear()

    @property
    def steps(self) -> list[int]:
        return [company.place.step for company in self.at.values()]


def together(*peers: str, manual=(), **settings) -> Net:
    """These in their first formation, in this order, at step 0."""
    net = Net(*peers, **settings)
    net.drive(peers[0], Convene(peers, 0))
    net.run()
    assert {p: c.steps.phase for p, c in net.at.items()} == dict.fromkeys(peers, "open")
    net.clear()
    net.manual = tuple(manual)
    return net


def losing(kind):
    """Loses the first of these that each peer sends to each other."""
    seen = set()

    def lose(sender, to, message):
        first = isinstance(message, kind) and (sender, to) not in seen
        seen.add((sender, to)) if first else None
        return first

    return lose


# ----------------------------------------------------------------------------------------------------------------------
# A step
# ----------------------------------------------------------------------------------------------------------------------


def test_a_step_is_made_when_all_are_ready():
    net = together(A, B, C)
    net.ready(A, B)
    net.run()
    assert net.of(Reduce) == []
    net.ready(C)
    net.run()
    ballot = net.at[A].ballot
    assert net.of(Reduce) == 3 * [Reduce(ballot, 1, (A, B, C))]
    assert net.of(Apply) == 3 * [Apply(ballot, 1, (A, B, C))]
    assert net.steps == [1, 1, 1]
    assert {c.place for c in net.at.values()} == {Place(1, Lineage(((ballot, 0),)), 3, "s1")}


def test_who_is_not_ready_in_time_contributes_nothing_and_takes_part():
    net = together(A, B, C)
    net.ready(B)
    net.wait(1.5)
    assert net.of(Reduce) == []
    net.wait(0.7)
    assert net.of(Reduce) == 3 * [Reduce(net.at[A].ballot, 1, (B,))]
    assert net.steps == [1, 1, 1]


def test_who_has_nothing_to_contribute_is_not_waited_for():
    net = together(A, B)
    net.ready(A, groups=0)
    net.ready(B)
    net.run()
    assert net.of(Reduce, B) == [Reduce(net.at[A].ballot, 1, (B,))]


def test_a_step_to_which_nobody_contributes_is_not_made_until_somebody_does():
    net = together(A, B)
    net.ready(A, B, groups=0)
    net.wait(30.0)
    assert net.of(Reduce) == []
    net.ready(B, groups=2)
    net.run()
    assert net.steps == [1, 1]


def test_a_gradient_of_another_step_is_not_taken():
    net = together(A, B)
    net.ready(A, B)
    net.run()
    net.do(B, net.at[B].ready(1, 1, 10, net.now))  # the main thread has not heard of step 1 yet
    net.ready(A)
    net.wait(1.0)
    assert net.steps == [1, 1]


def test_go_waits_for_those_who_still_apply_the_step_before():
    net = together(A, B)
    net.ready(A, B)
    net.manual = (Apply,)
    net.run()
    net.drive(A, net.of(Apply, A)[0])
    net.ready(A)
    net.wait(3.0)
    assert len(net.of(Reduce)) == 2
    net.drive(B, net.of(Apply, B)[0])
    net.wait(0.5)
    assert net.of(Reduce)[2:] == 2 * [Reduce(net.at[A].ballot, 2, (A,))]


@pytest.mark.parametrize("kind", [StepReady, StepGo, StepReduced])
def test_every_message_of_a_step_may_be_lost(kind):
    net = together(A, B, C)
    lose = losing(kind)
    net.ready(A, B, C)
    net.run(lose)
    net.wait(1.0, lose)
    assert net.steps == [1, 1, 1]
    assert len(net.of(Apply)) == 3


@pytest.mark.parametrize("again", range(3))
def test_messages_that_come_again_do_nothing(again):
    net = together(A, B)
    net.ready(A, B)
    seen = []
    net.run(lambda *sent: bool(seen.append(sent)))
    net.ready(A)
    for sender, to, message in seen * (again + 1):
        net.do(to, net.at[to].receive(sender, message, net.now))
    net.run()
    assert net.steps == [1, 1]
    assert len(net.of(Apply)) == 2


def test_nobody_applies_before_all_hold_the_reduced_gradient():
    net = together(A, B, C, manual=(Reduce,))
    net.ready(A, B, C)
    net.run()
    reduces = dict(net.asked)
    for p in (A, B):
        net.drive(p, reduces[p])
    net.wait(1.0)
    assert net.of(Apply) == []
    net.drive(C, reduces[C])
    net.run()
    assert len(net.of(Apply)) == 3


def test_different_reductions_are_an_error_that_names_the_trainers():
    net = together(A, B, C, manual=(Reduce,))
    net.ready(A, B, C)
    net.run()
    ballot = net.at[A].ballot
    for p, digest in ((A, "right"), (B, "right"), (C, "wrong")):
        net.do(p, net.at[p].reduced(ballot, 1, digest, net.now))
    net.wait(1.0)
    assert net.of(Apply) == []
    assert net.of(Diverged, A, C)[0].text == "step 1 was reduced differently"
    assert dict(net.of(Diverged, C)[0].digests) == {A: "right", B: "right", C: "wrong"}
    assert {c.state for c in net.at.values()} == {"diverged"}
    net.wait(30.0)
    assert net.of(Convene, Build) == []


def test_weights_that_are_not_alike_are_an_error_before_the_next_step():
    net = together(A, B, manual=(Apply,))
    net.ready(A, B)
    net.run()
    net.do(A, net.at[A].applied(1, 2, "s1", net.now))
    net.do(B, net.at[B].applied(1, 2, "other", net.now))
    net.ready(A, B)
    net.run()
    error = net.of(Diverged)[0]
    assert (error.text, dict(error.digests)) == ("weights or optimizer differ before step 2", {A: "s1", B: "other"})


# ----------------------------------------------------------------------------------------------------------------------
# Failures
# ----------------------------------------------------------------------------------------------------------------------


def test_a_failed_all_reduce_is_made_again_without_the_dead_from_the_same_gradients():
    net = together(A, B, C, manual=(Reduce,))
    net.ready(A, B, C)
    net.run()
    first = net.at[A].ballot
    net.kill(C, seen=False)
    net.do(B, net.at[B].reduce_failed(first, 1, "connection reset", net.now))
    assert net.of(Abandon, B) == [Abandon(first)]
    net.manual = ()
    net.run()
    assert net.of(Abandon, A) == [Abandon(first)]
    again = net.at[A].ballot
    assert again > first
    assert net.of(Reduce)[3:] == 2 * [Reduce(again, 1, (A, B))]
    assert net.steps == [1, 1]


def test_all_who_hold_a_reduction_apply_it_although_one_of_them_is_dead():
    net = together(A, B, C)
    net.ready(A, B, C)
    net.run(lambda sender, to, message: isinstance(message, StepReduced))
    first = net.at[A].ballot
    assert net.of(Apply) == []
    net.kill(C)
    net.run()
    assert net.of(Apply) == 2 * [Apply(first, 1, (A, B, C))]
    assert net.steps == [1, 1]
    assert net.at[A].place.lineage.terms[-1] == (net.at[A].ballot, 1)


def test_what_one_has_applied_all_apply():
    net = together(A, B, C)
    net.ready(A, B, C)
    net.run(lambda sender, to, message: isinstance(message, StepReduced) and to != B)
    assert net.steps == [0, 1, 0]
    net.kill(C)
    net.run()
    assert net.steps == [1, 1]
    assert len(net.of(Apply, A)) == len(net.of(Apply, B)) == 1
    assert net.at[A].place == net.at[B].place


def test_what_one_does_not_hold_is_made_again_and_applied_once():
    net = together(A, B, C, manual=(Reduce,))
    net.ready(A, B, C)
    net.run()
    reduces = dict(net.asked)
    net.drive(A, reduces[A])
    net.run()
    net.kill(C)
    net.manual = ()
    net.run()
    assert net.of(Apply) == 2 * [Apply(net.at[A].ballot, 1, (A, B))]
    assert net.steps == [1, 1]


def test_a_result_that_comes_after_the_end_of_its_formation_is_void():
    net = together(A, B, C, manual=(Reduce, Convene))
    net.ready(A, B, C)
    net.run()
    ballot = net.at[A].ballot
    net.kill(C)
    net.do(A, net.at[A].reduced(ballot, 1, "1:abc", net.now))
    assert net.at[A].steps.held is None
    net.run()
    assert all(not isinstance(message, StepReduced) for _, _, message in net.queue)


def test_a_new_formation_hears_where_a_trainer_stands_when_its_optimizer_step_is_done():
    net = together(A, B, C, manual=(Apply,))
    net.ready(A, B, C)
    net.run()
    net.drive(A, net.of(Apply, A)[0])
    net.kill(C)
    net.wait(1.0)
    assert net.at[A].steps.phase == net.at[B].steps.phase == "standing"
    net.drive(B, net.of(Apply, B)[0])
    net.run()
    assert net.at[A].steps.phase == net.at[B].steps.phase == "open"
    assert net.steps == [1, 1]
    assert len(net.of(Apply)) == 3  # each once, the dead one too


def test_the_last_of_a_formation_goes_on_alone():
    net = together(A, B)
    net.ready(A, B)
    net.kill(A)
    net.wait(2.0)
    assert net.steps == [1]
    assert net.of(Reduce, B)[-1].contributors == (B,)


def test_who_loses_more_than_half_at_once_waits_before_it_decides_or_trains():
    net = together(A, B, C, D, E)
    net.ready(A, B, C, D, E)
    net.run(lambda sender, to, message: isinstance(message, StepReduced))
    for p in (C, D, E):
        net.kill(p, seen=False)
    net.see()
    net.wait(5.0)
    assert [e.text for e in net.of(Note) if e.level == "warning"] == 2 * [
        "3 of 5 trainers are lost at once: waiting 6 s for them"
    ]
    assert (net.steps, net.of(Apply)) == ([0, 0], [])
    net.wait(2.0)
    assert net.steps == [1, 1]
    net.kill(B)
    net.wait(1.0)
    assert net.at[A].steps.phase == "open"  # half is not more than half


# ----------------------------------------------------------------------------------------------------------------------
# Deadlines
# ----------------------------------------------------------------------------------------------------------------------


def over(net: Net, peer: str) -> str:
    """Why the formation ended for ``peer``, as it says."""
    [reason] = [e.text.split("is over: ")[1] for e in net.of(Note, peer) if "is over" in e.text]
    return reason


def test_an_all_reduce_that_does_not_end_has_a_deadline():
    net = together(A, B, manual=(Reduce, Convene))
    net.ready(A, B)
    net.run()
    net.wait(4.8)
    assert net.of(Abandon) == []
    net.wait(0.4)
    assert over(net, A) == "step 1 was not reduced by a, b"
    assert net.of(Convene, A)[0].members == (A, B)


def test_a_barrier_has_a_deadline_that_names_who_is_missing():
    net = together(A, B, manual=(Reduce, Convene))
    net.ready(A, B)
    net.run()
    net.drive(A, net.of(Reduce, A)[0])
    net.wait(5.2, lambda *_: True)
    assert over(net, A) == "step 1 was not reduced by b"


def test_the_wait_for_go_has_a_deadline():
    net = together(A, B, manual=(Convene,))
    net.ready(B)
    net.wait(T.go_s - 0.2, lambda *_: True)
    assert net.of(Abandon, B) == []
    net.wait(0.4, lambda *_: True)
    assert over(net, B) == f"a did not say Go within {T.go_s:g} s"


def test_the_wait_for_an_optimizer_step_has_a_deadline():
    net = together(A, B, C, manual=(Apply, Convene))
    net.ready(A, B, C)
    net.run()
    net.drive(A, net.of(Apply, A)[0])
    net.drive(B, net.of(Apply, B)[0])
    net.wait(4.2)
    assert over(net, A) == "did not apply step 1 within 4 s: c"


def test_a_standing_has_a_deadline():
    net = together(A, B, C, manual=())
    net.kill(C)
    net.run(lambda sender, to, message: isinstance(message, StepStanding))
    net.clear()
    net.manual = (Convene,)
    net.wait(4.2, lambda sender, to, message: isinstance(message, StepStanding) and sender == B)
    assert over(net, A) == "did not say within 4 s where they stand: b"
    assert net.of(Convene, A)[-1].members == (A,)  # a main thread that hangs does not hold the others up for ever


def test_a_trainer_whose_optimizer_step_takes_long_is_not_late_for_itself():
    net = together(A, B, C, manual=(Apply,))
    net.ready(A, B, C)
    net.run()
    net.kill(C)
    net.wait(6.0)
    assert net.at[A].steps.phase == net.at[B].steps.phase == "standing"
    for p in (A, B):
        net.drive(p, net.of(Apply, p)[0])
    net.run()
    assert net.steps == [1, 1]
    assert net.at[A].members == (A, B)


def test_building_has_a_deadline_and_its_failure_ends_it_for_all():
    net = together(A, B, manual=(Build,))
    net.do(A, net.at[A].reduce_failed(net.at[A].ballot, 1, "x", net.now))
    net.do(A, net.at[A].broken(net.at[A].ballot, "cut", net.now))
    net.run()
    assert net.at[A].state == "building"
    net.wait(2.8)
    assert len(net.of(Build, A)) == 1
    net.wait(0.4)
    assert len(net.of(Build, A)) == len(net.of(Build, B)) == 2
    net.do(B, net.at[B].broken(net.at[B].ballot, "could not connect", net.now))
    net.run()
    assert net.at[A].state == "over"
    net.manual = ()
    net.wait(2.0)
    assert net.at[A].steps.phase == net.at[B].steps.phase == "open"


def test_when_the_first_does_not_convene_the_next_does():
    net = together(A, B, C)
    net.kill(C, seen=False)
    net.at[A].live([A, B, C], net.now)
    convenes = []
    net.manual = (Convene,)
    net.see()
    for _ in range(30):
        net.wait(0.1)
        convenes += [(p, e.members) for p, e in net.asked if isinstance(e, Convene)]
        net.clear()
    assert convenes == [(A, (A, B)), (B, (A, B)), (A, (A, B))]


# ----------------------------------------------------------------------------------------------------------------------
# Newcomers
# ----------------------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_taken_in_between_two_steps_and_is_the_last():
    net = together(A, B)
    net.ready(A, B)
    net.run()
    net.ready(B)
    net.start(C)
    net.wait(0.8)
    ballot = net.of(Opened, C)[0].ballot
    assert net.of(Transfer) == [Transfer(Ballot(1, A), 1, C, (A, B))]
    assert net.of(Opened, A, B, C)[-3:] == 3 * [Opened(ballot, (A, B, C), net.at[A].place)]
    net.ready(A, C)
    net.run()
    assert net.steps == [2, 2, 2]
    assert net.of(Reduce, A)[-1].contributors == (A, B, C)  # what B had ready is still good


def test_nobody_is_taken_in_while_a_step_is_under_way():
    net = together(A, B, manual=(Reduce,))
    net.ready(A, B)
    net.run()
    net.start(C)
    net.wait(2.0)
    assert net.of(Transfer) == []
    for p in (A, B):
        net.drive(p, net.of(Reduce, p)[0])
    net.manual = ()
    net.wait(0.5)
    assert net.steps == [1, 1, 1]


def test_a_transfer_waits_until_all_stand_at_the_boundary():
    net = together(A, B, manual=(Apply,))
    net.ready(A, B)
    net.run()
    net.drive(A, net.of(Apply, A)[0])
    net.start(C)
    net.wait(1.0)
    assert net.of(Transfer) == []
    net.drive(B, net.of(Apply, B)[0])
    net.wait(0.5)
    assert len(net.of(Transfer)) == 1


def test_a_broken_transfer_drops_the_newcomer_and_not_the_step():
    net = together(A, B, manual=(Transfer,))
    net.ready(A)
    net.start(C)
    net.wait(1.0)
    net.do(A, net.at[A].transfer_failed(C, "the link broke", net.now))
    net.run()
    assert net.at[A].members == net.at[B].members == (A, B)
    net.ready(B)
    net.run()
    assert net.steps == [1, 1, 0]
    assert net.of(Reduce, A)[-1].contributors == (A, B)


def test_a_newcomer_that_cannot_be_taken_in_waits_longer_each_time():
    net = together(A, manual=(Transfer,))
    net.start(C)
    times = []
    for _ in range(400):
        before = len(net.of(Transfer))
        net.wait(0.1)
        if len(net.of(Transfer)) > before:
            times.append(net.now)
            net.do(A, net.at[A].transfer_failed(C, "the link broke", net.now))
    assert [round(b - a) for a, b in pairwise(times)] == [3, 6, 12]


@pytest.mark.parametrize("who", ["newcomer", "first", "member"])
def test_a_death_during_a_transfer_ends_the_hold(who):
    net = together(A, B, C, manual=(Transfer,))
    net.start(D)
    net.wait(1.0)
    assert net.of(Transfer) != []
    net.kill({"newcomer": D, "first": A, "member": C}[who])
    net.run()
    left = [p for p in (A, B, C) if p in net.at]
    assert {net.at[p].members for p in left} == {tuple(left)}
    assert {net.at[p].steps.phase for p in left} <= {"open", "holding"}
    net.ready(*left)
    net.wait(10.0)  # another try to take the newcomer in may end by its deadline
    assert {net.at[p].place.step for p in left} == {1}


def test_a_transfer_has_a_deadline():
    net = together(A, B, manual=(Transfer,))
    net.start(C)
    net.wait(8.8)
    assert any("nobody was taken in within 8 s" in e.text for e in net.of(Note, A))
    assert net.at[A].members == (A, B)


def test_a_newcomer_whose_weights_arrived_wrong_is_not_trained_with():
    net = together(A, B, manual=(Transfer,))
    net.ready(A, B)
    net.run()
    net.start(C)
    net.wait(1.0)
    wrong = Place(1, net.at[A].place.lineage, 2, "damaged")
    net.do(C, net.at[C].admitted(net.at[A].ballot, (A, B), wrong, net.now))
    net.do(A, net.at[A].transferred(C, net.now))
    net.run()
    assert len(net.of(LeftBehind, C)) == 1
    net.wait(1.5)
    assert net.at[A].members == net.at[B].members == (A, B)
    assert net.at[A].steps.phase == "open"


def test_the_driver_may_ask_for_somebody_to_be_taken_in():
    net = together(A, manual=(Transfer,))
    net.at[C] = net.at[A]
    net.see()
    del net.at[C]
    net.do(A, net.at[A].hold(C, net.now))
    assert net.of(Transfer) == [Transfer(Ballot(1, A), 0, C, (A,))]


# ----------------------------------------------------------------------------------------------------------------------
# Who trains with whom
# ----------------------------------------------------------------------------------------------------------------------


def test_those_who_were_announced_begin_together_at_once():
    net = Net(C, A, B, expected=3)
    net.wait(0.7)
    assert {c.members for c in net.at.values()} == {(A, B, C)}


def test_without_an_announcement_whoever_is_there_after_a_while_begins():
    net = Net(A, B, expected=3)
    net.wait(1.2)
    assert net.of(Convene) == []
    net.wait(0.6)
    assert {c.members for c in net.at.values()} == {(A, B)}


def test_one_that_starts_late_does_not_begin_anew():
    net = together(A, manual=(Transfer,))
    net.start(C)
    net.wait(30.0)
    assert net.of(Convene, C) == []


def test_from_different_checkpoints_the_one_that_trained_most_is_gone_on_from():
    term = Ballot(7, "x")
    net = Net(expected=2)
    net.start(A)
    net.start(B, Place(40, Lineage(((term, 0),)), 80, "s40"))
    net.wait(4.0)
    assert {c.place.step for c in net.at.values()} == {40}
    assert net.at[A].place == net.at[B].place
    assert net.at[B].ballot > term
    assert net.at[B].place.lineage.terms[0] == (term, 0)


def test_nobody_follows_into_a_formation_with_strangers():
    net = together(A, B, C)
    net.kill(C, seen=False)
    gone = net.at[A].ballot
    net.see()
    net.run()
    mine = net.at[A].ballot
    assert mine > gone
    assert net.at[A].forming(Ballot(9, C), [A, B, C], net.now)[1:] == [
        Send(B, StepOver(Ballot(9, C), "c must be taken in first")),
        Send(B, StepHere(mine, [A, B], 0)),
        Send(C, StepOver(Ballot(9, C), "c must be taken in first")),
        Send(C, StepHere(mine, [A, B], 0)),
    ]
    assert (net.at[A].ballot, net.at[A].state) == (mine, "in")


def test_what_was_decided_without_one_is_not_undone_with_it():
    """A and B hold step 1, C does not and is left out of their formation. A decides that all of it hold step 1, applies
    it and dies; B has not heard enough to decide. With C it would make step 1 again, differently."""
    net = together(A, B, C, manual=(Reduce,))
    net.ready(A, B, C)
    net.run()
    reduces = dict(net.asked)
    for p in (A, B):
        net.drive(p, reduces[p])
    net.run()
    for p in (A, B):
        net.do(p, net.at[p].live([A, B], net.now))
    net.drive(A, Convene((A, B), 1))
    net.run(lambda sender, to, message: C in (sender, to) or (isinstance(message, StepStanding) and sender == A))
    assert net.steps == [1, 0, 0]
    net.kill(A)
    net.run(lambda sender, to, message: C in (sender, to))
    net.drive(C, Convene((B, C), 2))
    net.manual = ()
    net.wait(8.0)
    assert net.of(Apply, A, B) == 2 * [Apply(Ballot(1, A), 1, (A, B, C))]
    assert len(net.of(LeftBehind, C)) == 1
    assert net.steps == [1, 1]


def test_one_that_was_left_out_hears_of_it_and_is_taken_in_again():
    net = together(A, B, C)
    for p in (A, B):
        net.do(p, net.at[p].live([A, B], net.now))
    net.drive(A, Convene((A, B), 1))
    net.run()
    net.ready(A, B)
    net.run()
    net.see()
    net.wait(5.0)
    assert len(net.of(LeftBehind, C)) == 1
    assert {c.members for c in net.at.values()} == {(A, B, C)}
    assert net.steps == [1, 1, 1]


def parted() -> Net:
    """Two halves, each in a formation of its own that believes the other dead."""
    net = together(A, B, C, D)
    for half in ((A, B), (C, D)):
        for p in half:
            net.do(p, net.at[p].live(half, net.now))
    net.run()
    assert net.at[A].members == (A, B)
    assert net.at[D].members == (C, D)
    return net


def test_of_two_formations_that_meet_the_one_that_trained_more_prevails():
    net = parted()
    for _ in range(2):
        net.ready(C, D)
        net.run()
    net.ready(A, B)
    net.run()
    net.see()
    net.wait(12.0)
    assert len(net.of(LeftBehind, A, B)) == 2
    assert net.of(LeftBehind, C, D) == []
    assert {(c.members[:2], len(c.members)) for c in net.at.values()} == {((C, D), 4)}
    assert net.steps == [2, 2, 2, 2]


def test_of_two_formations_alike_the_later_prevails():
    net = parted()
    net.see()
    net.wait(12.0)
    assert len(net.of(LeftBehind)) == 2
    assert {len(c.members) for c in net.at.values()} == {4}


def test_one_cut_off_from_many_does_not_run_ahead_of_them():
    net = together(A, B, C, manual=())
    net.do(C, net.at[C].live([C], net.now))
    net.ready(C)
    net.wait(3.0, lambda sender, to, message: C in (sender, to))
    assert net.at[C].place.step == 0
    for p in (A, B):
        net.do(p, net.at[p].live([A, B], net.now))
    net.run(lambda sender, to, message: C in (sender, to))
    net.ready(A, B)
    net.run(lambda sender, to, message: C in (sender, to))
    net.see()
    net.wait(8.0)
    assert len(net.of(LeftBehind, C)) == 1
    assert net.steps == [1, 1, 1]


def test_one_that_has_left_for_another_formation_is_not_waited_for():
    net = together(A, B, manual=(Transfer,))
    net.do(B, net.at[B].live([A, B, D], net.now))
    net.do(B, net.at[B].receive(D, StepHere(Ballot(9, D), [D], 100), net.now))
    assert net.at[B].state == "out"
    net.wait(0.2)
    assert net.at[A].members == (A,)
    assert net.of(Transfer, A)[0].newcomer == B
    assert net.at[B].forming(Ballot(20, A), [A, B], net.now)[1:] == [
        Send(A, StepOver(Ballot(20, A), "b must be taken in first")),
        Send(A, StepSeek(Ballot(20, A))),
    ]


def test_old_news_of_a_formation_changes_nothing():
    net = together(A, B)
    state = net.at[A].members, net.at[A].heirs, net.at[A].state
    for message in (
        StepHere(Ballot(0, B), [B], 0),
        StepOver(Ballot(0, B), "old"),
        StepSeek(Ballot(0, B)),
        StepHold(Ballot(0, B), 0, C),
        StepReduced(Ballot(0, B), 1, "x"),
        StepGo(Ballot(0, B), 1, [B]),
        StepReady(Ballot(0, B), 1, True, 5, 5),
    ):
        effects = net.at[A].receive(B, message, net.now)
        assert all(isinstance(e, Send) and isinstance(e.message, StepHere) for e in effects)
    assert (net.at[A].members, net.at[A].heirs, net.at[A].state) == state


# ----------------------------------------------------------------------------------------------------------------------
# Agreement
# ----------------------------------------------------------------------------------------------------------------------

F, G = Ballot(4, A), Ballot(5, A)
AT_F = Lineage(((F, 10),))
HELD = Held(F, 13, "x")


def standing(
    step: int, held: Held | None = None, lineage: Lineage = AT_F, opened: int = 3, state: str = ""
) -> StepStanding:
    return StepStanding(Ballot(6, A), Place(step, lineage, 2 * step, state), held, opened)


def test_rule_1_what_anybody_applied_all_apply():
    found = agree({A: standing(12, HELD), B: standing(13), C: standing(12, HELD)})
    assert (found.step, found.apply, found.behind) == (13, HELD, ())


def test_rule_2_what_all_hold_all_apply():
    found = agree({A: standing(12, HELD), B: standing(12, HELD)})
    assert (found.step, found.apply, found.lost, found.of) == (13, HELD, 1, 3)


@pytest.mark.parametrize("other", [None, Held(F, 13, "y")])
def test_rule_3_what_somebody_does_not_hold_is_made_again(other):
    found = agree({A: standing(12, HELD), B: standing(12, other)})
    assert (found.step, found.apply, found.behind) == (12, None, ())


def test_a_newcomer_that_holds_nothing_has_no_say():
    found = agree({A: standing(12, HELD), B: standing(12, HELD), C: standing(12, opened=0)})
    assert (found.step, found.apply, found.behind) == (13, HELD, (C,))


def test_a_reduction_is_void_once_another_formation_has_gone_on_without_it():
    later = Lineage(((F, 10), (G, 12)))
    found = agree({A: standing(12, HELD), B: standing(12, lineage=later)})
    assert (found.step, found.apply, found.lineage, found.behind) == (12, None, later, ())


def test_a_newcomer_with_the_same_weights_goes_on_with_the_others():
    found = agree({A: standing(12, state="s"), B: standing(12, opened=0, state="s")})
    assert (found.step, found.behind, found.lost, found.of) == (12, (), 2, 3)


def test_who_stands_on_another_lineage_is_behind():
    found = agree({A: standing(12), B: standing(12), C: standing(11, lineage=Lineage(((Ballot(4, C), 10),)))})
    assert (found.behind, found.lineage) == ((C,), AT_F)


def test_two_steps_behind_is_behind():
    assert agree({A: standing(13), B: standing(11, Held(F, 12, "x"))}).behind == (B,)


def test_weights_of_members_that_differ_are_told():
    found = agree({A: standing(12, state="s"), B: standing(12, state="t")})
    assert dict(found.differ) == {A: "s", B: "t"}
