"""Convening by hand-driven messages, and under every order of losses and doubles that hypothesis finds."""

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.convening import Convening, Form, Timing
from mesh.effects import Note, Send
from mesh.version import Ballot
from transport.messages import Accept, Decline, Go, Invite, Member

A, B, C, D = "a", "b", "c", "d"


def members(*peers):
    return [Member(p) for p in peers]


class Net:
    """Peers whose messages lie in one queue; ``run`` delivers them in order, time passes by ``tick``."""

    def __init__(self, *peers, kind="gradients", timing=None):
        self.at = {p: Convening(p, kind, rng=random.Random(p), timing=timing) for p in peers}
        self.now = 0.0
        self.queue = deque()
        self.forms = {p: [] for p in peers}
        self.notes = []
        self.down = set()
        for c in self.at.values():
            c.live(peers)

    def do(self, peer, effects):
        for e in effects:
            match e:
                case Send(to=to, message=message):
                    self.queue.append((peer, to, message))
                case Form(go):
                    self.forms[peer].append(go)
                case Note(text):
                    self.notes.append(text)

    def convene(self, peer, *peers):
        self.do(peer, self.at[peer].convene(members(*peers), self.now))

    def deliver(self, index=0, keep=False):
        sender, to, message = self.queue[index]
        if not keep:
            del self.queue[index]
        if to in self.at and to not in self.down and sender not in self.down:
            self.do(to, self.at[to].receive(sender, message, self.now))

    def run(self, lose=lambda sender, to, message: False):
        while self.queue:
            if lose(*self.queue[0]):
                self.queue.popleft()
            else:
                self.deliver()

    def pass_time(self, seconds, lose=lambda sender, to, message: False):
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for p, c in self.at.items():
                if p not in self.down:
                    self.do(p, c.tick(self.now))
            self.run(lose)


def test_all_who_are_invited_form_in_the_same_order():
    net = Net(A, B, C)
    net.convene(A, C, A, B)
    net.run()
    gos = [net.forms[p] for p in (A, B, C)]
    assert gos[0] == gos[1] == gos[2]
    assert [(g.ballot, g.members) for g in gos[0]] == [(Ballot(1, A), members(C, A, B))]


def test_who_does_not_answer_is_left_out_after_gather():
    net = Net(A, B, C)
    net.down.add(C)
    net.convene(A, A, B, C)
    net.run()
    assert net.forms[A] == []
    net.pass_time(1.2)
    assert net.forms[A] == net.forms[B]
    assert net.forms[A][0].members == members(A, B)


def test_a_convener_whom_nobody_answers_forms_alone():
    net = Net(A, B)
    net.down.add(B)
    net.convene(A, A, B)
    net.pass_time(1.2)
    assert net.forms[A][0].members == members(A)


def test_a_late_acceptance_is_told_that_it_is_left_out_and_stops_asking():
    net = Net(A, B)
    net.convene(A, A, B)
    lost = lambda sender, to, message: isinstance(message, Accept)  # noqa: E731
    net.pass_time(1.2, lost)
    net.pass_time(0.5)
    assert net.forms[A][0].members == members(A)
    assert net.forms[B] == []
    net.pass_time(8.0)
    assert net.forms[B] == []
    assert len(net.forms[A]) == 1


def test_a_lost_invitation_is_repeated():
    net = Net(A, B)
    net.convene(A, A, B)
    net.queue.clear()
    net.pass_time(0.5)
    assert net.forms[A] == net.forms[B] != []


def test_a_lost_go_is_asked_for():
    net = Net(A, B)
    net.convene(A, A, B)
    net.run(lose=lambda sender, to, message: isinstance(message, Go))
    assert net.forms[B] == []
    net.pass_time(0.5)
    assert net.forms[B] == net.forms[A] != []


def test_the_order_is_kept_and_newcomers_go_to_the_end():
    net = Net(A, B, C, D)
    net.convene(A, C, A)
    net.run()
    net.convene(A, A, B, C, D)
    net.run()
    assert net.forms[D][-1].members == members(C, A, B, D)


def test_workers_are_members_of_their_own_and_answer_through_their_peer():
    net = Net(A, B)
    net.do(A, net.at[A].convene([Member(A), Member(B, 0), Member(B, 1)], 0.0))
    net.run()
    assert net.forms[B][0].members == [Member(A), Member(B, 0), Member(B, 1)]
    assert net.forms[A] == net.forms[B]


def test_a_member_accepts_one_ballot_a_counter_and_none_below():
    c = Convening(B, "gradients")
    assert c.receive(A, Invite("gradients", Ballot(5, A), members(A, B)), 0.0) == [
        Send(A, Accept("gradients", Ballot(5, A)))
    ]
    for rival in (Ballot(5, C), Ballot(4, C)):
        effects = c.receive(C, Invite("gradients", rival, members(B, C)), 0.0)
        assert effects == [Send(C, Decline("gradients", rival, Ballot(5, A)))]
    assert c.receive(C, Go("gradients", Ballot(4, C), members(B, C)), 0.0) == []
    assert c.receive(C, Invite("gradients", Ballot(6, C), members(B, C)), 0.0) == [
        Send(C, Accept("gradients", Ballot(6, C)))
    ]
    assert c.receive(A, Go("gradients", Ballot(5, A), members(A, B)), 0.0) == []


def test_a_declined_convener_tries_again_above():
    net = Net(A, B)
    net.at[B].raise_floor(8)
    net.convene(B, B)
    net.convene(A, A, B)
    net.run()
    net.pass_time(1.0)
    assert net.forms[A] == net.forms[B][1:]
    assert net.forms[A][0].ballot == Ballot(10, A)


def test_a_convener_that_is_always_declined_gives_up_and_says_so():
    c = Convening(A, "gradients", rng=random.Random(1))
    now, sent = 0.0, []
    effects = c.convene(members(A, B), now)
    for _ in range(1000):
        for e in effects:
            if isinstance(e, Send):
                sent.append(e.message.ballot)
        now += 0.1
        invited = [e.message for e in effects if isinstance(e, Send)]
        effects = c.tick(now)
        for m in invited:
            effects += c.receive(B, Decline("gradients", m.ballot, Ballot(m.ballot.counter + 1, C)), now)
        if any(isinstance(e, Note) for e in effects):
            break
    assert "gave up convening gradients" in next(e.text for e in effects if isinstance(e, Note))
    assert len(sent) == Timing().tries
    assert [e for k in range(100) for e in c.tick(now + k)] == []


def test_two_conveners_at_once_end_in_one_formation():
    net = Net(A, B, C, D)
    net.convene(A, A, B, C, D)
    net.convene(B, A, B, C, D)
    net.pass_time(10.0)
    last = [net.forms[p][-1] for p in (A, B, C, D)]
    assert all(g == last[0] for g in last)
    assert len(last[0].members) == 4


def test_no_go_after_accepting_the_next_in_the_last_order_convenes():
    net = Net(A, B, C)
    net.convene(A, A, C, B)
    net.run()
    net.convene(A, A, B, C)
    net.run(lose=lambda sender, to, message: isinstance(message, Go))
    net.down.add(A)
    net.at[B].live([B, C])
    net.at[C].live([B, C])
    net.pass_time(6.0)
    assert net.forms[C][-1] == net.forms[B][-1]
    assert net.forms[B][-1].ballot.convener == C
    assert net.forms[B][-1].members == members(C, B)


def test_a_dead_successor_is_passed_over():
    net = Net(A, B, C)
    net.convene(A, A, B, C)
    net.run()
    net.convene(A, C, B, A)
    net.run(lose=lambda sender, to, message: isinstance(message, Go))
    net.down |= {A, B}
    net.at[C].live([C])
    net.pass_time(6.0)
    assert net.forms[C][-1].members == members(C)


def test_receivers_of_weights_do_not_take_over():
    net = Net(A, B, C, kind="weights")
    net.convene(A, A, B, C)
    net.run(lose=lambda sender, to, message: isinstance(message, Go))
    net.down.add(A)
    net.pass_time(20.0)
    assert net.forms[B] == net.forms[C] == []
    assert not net.queue


def test_a_convener_abandons_its_round_when_it_promises_above():
    c = Convening(A, "gradients")
    c.convene(members(A, B), 0.0)
    c.receive(B, Invite("gradients", Ballot(7, B), members(A, B)), 0.1)
    assert c.receive(B, Accept("gradients", Ballot(1, A)), 0.2) == []
    assert not any(isinstance(e, Form) for k in range(100) for e in c.tick(0.2 + k / 10))


def test_counters_lie_above_the_floor_and_are_used_once():
    c = Convening(A, "weights", floor=40)
    first = c.convene(members(A), 0.0)
    c.raise_floor(60)
    second = c.convene(members(A), 0.0)
    assert [e.go.ballot.counter for e in first + second if isinstance(e, Form)] == [41, 61]


def test_a_round_under_way_for_the_same_members_goes_on():
    c = Convening(A, "weights")
    c.convene(members(A, B), 0.0)
    assert c.convene(members(A, B), 0.1) == []
    assert [e.message.ballot for e in c.tick(0.3)] == [Ballot(1, A)]


def test_what_others_forge_or_another_kind_changes_nothing():
    c = Convening(A, "weights")
    assert c.receive(B, Invite("weights", Ballot(3, C), members(A, B)), 0.0) == []
    assert c.receive(B, Invite("gradients", Ballot(3, B), members(A, B)), 0.0) == []
    assert c.receive(B, Invite("weights", Ballot(3, B), members(B, C)), 0.0) == []
    assert c.receive(B, Go("weights", Ballot(3, B), members(A, B)), 0.0) == []


def test_a_convener_outside_its_members_or_a_double_is_refused():
    with pytest.raises(ValueError, match="must be a member itself"):
        Convening(A, "weights").convene(members(B), 0.0)
    with pytest.raises(ValueError, match="given twice"):
        Convening(A, "weights").convene(members(A, A), 0.0)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("convene"), st.sampled_from([A, B, C]), st.sampled_from([(A, B, C), (A, B), (C, B, A)])),
        st.tuples(st.just("deliver"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 30), st.just(None)),
        st.tuples(st.just("tick"), st.sampled_from([0.05, 0.3, 1.1, 3.0]), st.sampled_from([A, B, C])),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(moves)
def test_whatever_the_messages_do_a_ballot_means_one_thing_and_is_formed_once(steps):
    net = Net(A, B, C)
    for what, x, y in steps:
        if what == "convene" and x in y:
            net.convene(x, *y)
        elif what == "deliver" and net.queue:
            net.deliver(x % len(net.queue), keep=y)
        elif what == "lose" and net.queue:
            del net.queue[x % len(net.queue)]
        elif what == "tick":
            net.now += x
            net.do(y, net.at[y].tick(net.now))
    decided = {}
    for peer, gos in net.forms.items():
        ballots = [g.ballot for g in gos]
        assert max(Counter(ballots).values(), default=1) == 1
        assert ballots == sorted(ballots)
        for g in gos:
            assert Member(peer) in g.members
            assert Member(g.ballot.convener) in g.members
            assert decided.setdefault(g.ballot, g.members) == g.members


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_when_messages_come_through_again_one_formation_of_all_comes_about(rng):
    net = Net(A, B, C)
    for p in (A, B, C):
        if rng.random() < 0.7:
            net.convene(p, A, B, C)
    net.pass_time(2.0, lose=lambda *_: rng.random() < 0.5)
    net.pass_time(10.0)
    net.convene(B, A, B, C)
    net.pass_time(10.0)
    last = [net.forms[p][-1] for p in (A, B, C)]
    assert last[0] == last[1] == last[2]
    assert len(last[0].members) == 3
