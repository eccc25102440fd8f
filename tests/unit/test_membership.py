import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import roster
from mesh.effects import Send
from mesh.identity import PeerCard
from mesh.membership import (
    LAN,
    LOCAL,
    PRESETS,
    WAN,
    Asleep,
    Changed,
    Contacted,
    Departed,
    Joined,
    Membership,
    Refusal,
    Suspected,
)
from mesh.prober import AWARENESS_MAX
from mesh.roster import MAX_BUSY_S, NEWS, Roster
from transport.messages import Ack, Compare, Hello, Nack, News, NotMe, Ping, PingReq, Refused, Sync, Welcome

STEP_S = 0.05


def card(name: str, **changes) -> PeerCard:
    own = PeerCard(id=name, name=f"{name}-name", role="rollout", host="host", address=f"tcp://{name}", bulk_address="")
    return msgspec.structs.replace(own, **changes)


def peer(name: str, preset=LOCAL, **changes) -> Membership:
    return Membership(card(name, **changes), preset, random.Random(name), 0.0)


def knowing(name: str, *others: str, preset=LOCAL, **changes) -> Membership:
    """A peer that has heard of others, and whose first news is spread."""
    m = peer(name, preset, **changes)
    m.receive("x", Sync([News(card(other), 0, "alive") for other in others]), 0.0)
    m.roster.fresh.clear()
    return m


def sends(effects, kind, to: str | None = None) -> list[Send]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind) and to in (None, e.to)]


def of(effects, kind) -> list:
    return [e for e in effects if isinstance(e, kind)]


def until(m: Membership, start: float, stop: float, answering=()) -> list:
    """All effects of ticking; peers in ``answering`` acknowledge every ping at once."""
    effects, now = [], start
    while now < stop:
        now = round(now + STEP_S, 6)
        new = m.tick(now)
        for ping in sends(new, Ping):
            if ping.to in answering:
                effects += m.receive(ping.to, Ack(ping.message.seq, []), now)
        effects += new
    return effects


def state(m: Membership, of_peer: str) -> str | None:
    return m.state_of(of_peer)


def accused(name: str, incarnation: int = 0, by: str = "z", as_: str = "suspect") -> Sync:
    return Sync([News(card(name), incarnation, as_, accuser=by)])


# First contact -------------------------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_everybody_known():
    b = knowing("b", "c")
    (hello,) = sends(peer("a").contact(["tcp://b"], 0.0), Hello)
    assert (hello.to, hello.address) == ("", "tcp://b")
    effects = b.receive("a", hello.message, 0.0, "tcp://a")
    (welcome,) = sends(effects, Welcome)
    assert (welcome.to, welcome.address) == ("a", "tcp://a")
    assert [news.card.id for news in welcome.message.members] == ["b", "c"]
    assert of(effects, Joined) == [Joined(card("a"))]


def test_a_newcomer_that_is_welcomed_sees_all_and_is_contacted_once():
    a, b = peer("a"), knowing("b", "c")
    (hello,) = sends(a.contact(["tcp://b"], 0.0), Hello)
    (welcome,) = sends(b.receive("a", hello.message, 0.0), Welcome)
    effects = a.receive("b", welcome.message, 0.1) + a.receive("b", welcome.message, 0.2)
    assert [c.id for c in a.alive] == ["a", "b", "c"]
    assert [e.card.id for e in of(effects, Joined)] == ["b", "c"]
    assert len(of(effects, Contacted)) == 1


def test_a_lone_peer_repeats_its_hello_ever_more_slowly():
    a = peer("a")
    a.contact(["tcp://b"], 0.0)
    times = []
    for i in range(1, 600):
        if sends(a.tick(i * STEP_S), Hello):
            times.append(i * STEP_S)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] == pytest.approx(0.5)
    assert gaps[-1] == pytest.approx(5.0)
    assert gaps == sorted(gaps)


def test_an_address_is_greeted_once_however_often_it_is_given():
    a = peer("a")
    assert len(sends(a.contact(["tcp://b", "tcp://b", "tcp://a", ""], 0.0), Hello)) == 1
    assert a.contact(["tcp://b"], 0.1) == []


def test_of_a_full_directory_a_few_are_greeted_at_once_and_others_while_nobody_answers():
    a = peer("a")
    addresses = [f"tcp://d:{i}" for i in range(1, 1001)]
    greeted = [s.address for s in sends(a.contact(addresses, 0.0), Hello)]
    assert len(greeted) == 3
    greeted += [s.address for s in sends(until(a, 0.0, 30.0), Hello)]
    assert len(set(greeted)) > 100
    assert set(greeted) <= set(addresses)


def test_settings_that_differ_are_refused_with_their_sections_and_both_names():
    b = peer("b", agreed={"model": "1", "trainer": "1", "task": "1"})
    stranger = card("a", agreed={"model": "1", "trainer": "2"})
    (refused,) = sends(b.receive("a", Hello(stranger, 0), 0.0), Refused)
    assert refused.address == "tcp://a"
    for part in ("settings differ in [task], [trainer]", "a-name", "b-name"):
        assert part in refused.message.reason
    assert [c.id for c in b.alive] == ["b"]


def test_a_refused_peer_learns_by_whom_and_why():
    assert of(peer("a").receive("b", Refused("because"), 0.0, "tcp://b"), Refusal) == [Refusal("tcp://b", "because")]


def test_another_protocol_is_refused():
    (refused,) = sends(peer("b").receive("a", Hello(card("a"), 0, 999), 0.0), Refused)
    assert "999" in refused.message.reason


def test_observers_need_not_agree():
    b = peer("b", agreed={"model": "1"})
    assert sends(b.receive("a", Hello(card("a", role="observer"), 0), 0.0), Welcome)
    c = peer("c", role="observer")
    assert sends(c.receive("b", Hello(card("b", agreed={"model": "1"}), 0), 0.0), Welcome)


def test_a_misfit_that_comes_by_ping_is_refused_too():
    b = peer("b", agreed={"model": "1"})
    misfit = News(card("a", agreed={"model": "2"}), 0, "alive")
    effects = b.receive("a", Ping(1, [misfit]), 0.0, "tcp://a")
    assert sends(effects, Refused)
    assert [c.id for c in b.alive] == ["b"]


def test_an_unknown_sender_without_a_card_is_answered_and_leaves_no_trace():
    b = knowing("b", "c")
    for message in (Ping(1, []), PingReq(2, "nobody", []), Sync([]), Ack(3, []), Nack(4, []), NotMe("nobody")):
        effects = b.receive("a", message, 0.1, "tcp://a")
        assert all(e.address == "tcp://a" for e in effects)
    assert b.state_of("a") is None
    assert [c.id for c in b.alive] == ["b", "c"]
    assert not b.prober.relays


# Probing -------------------------------------------------------------------------------------------------------------


def test_every_peer_is_pinged_once_a_round():
    a = knowing("a", "b", "c", "d", "e")
    effects = until(a, 0.0, 8 * LOCAL.period_s + 0.5, answering="bcde")
    pinged = [s.to for s in sends(effects, Ping)][:8]
    assert sorted(pinged[:4]) == sorted(pinged[4:]) == list("bcde")


def test_a_silent_peer_is_asked_for_by_others_then_accused_then_dead():
    a = knowing("a", "b", "c", "d", "e")
    effects = until(a, 0.0, 12.0, answering="cde")
    helpers = sends(effects, PingReq)[:3]
    assert sorted(s.to for s in helpers) == ["c", "d", "e"]
    assert {s.message.target for s in helpers} == {"b"}
    order = [type(e) for e in effects if isinstance(e, PingReq | Suspected | Departed) or e in helpers]
    assert order == [Send, Send, Send, Suspected, Departed]
    (departed,) = of(effects, Departed)
    assert departed == Departed(card("b"), True, "did not answer a-name")
    assert state(a, "b") == "dead"
    assert a.reason_of("b") == departed.reason
    assert a.departed == [departed]


def test_an_ack_through_a_helper_saves_the_silent():
    a = knowing("a", "b", "c")
    now = 0.0
    for _ in range(200):
        now += STEP_S
        for send in (effects := a.tick(now)):
            if isinstance(send, Send) and isinstance(send.message, PingReq):
                a.receive(send.to, Ack(send.message.seq, []), now)
            elif isinstance(send, Send) and isinstance(send.message, Ping) and send.to == "c":
                a.receive("c", Ack(send.message.seq, []), now)
        assert not of(effects, Suspected)


def test_a_helper_pings_the_target_and_passes_its_ack_on():
    b = knowing("b", "a", "t")
    (ping,) = sends(b.receive("a", PingReq(7, "t", []), 0.0), Ping)
    assert ping.to == "t"
    (ack,) = sends(b.receive("t", Ack(ping.message.seq, []), 0.1), Ack)
    assert (ack.to, ack.message.seq) == ("a", 7)


def test_a_helper_that_hears_nothing_says_so_and_still_passes_a_late_ack_on():
    b = knowing("b", "a", "t")
    (ping,) = sends(b.receive("a", PingReq(7, "t", []), 0.0), Ping)
    (nack,) = sends(until(b, 0.0, LOCAL.period_s - LOCAL.ack_s), Nack)
    assert (nack.to, nack.message.seq) == ("a", 7)
    (ack,) = sends(b.receive("t", Ack(ping.message.seq, []), 0.3), Ack)
    assert (ack.to, ack.message.seq) == ("a", 7)


def test_an_ack_from_a_third_party_does_not_count():
    a = knowing("a", "b", "c")
    ping = next(s for i in range(1, 50) for s in sends(a.tick(i * STEP_S), Ping))
    other = "c" if ping.to == "b" else "b"
    a.receive(other, Ack(ping.message.seq, []), a._now)
    assert of(until(a, a._now, a._now + LOCAL.period_s + STEP_S), Suspected)


def test_the_accused_is_told_until_it_answers():
    a = knowing("a", "b")
    effects = until(a, 0.0, 3.0)
    told = [s for s in sends(effects, Ping, "b") if any(n.state == "suspect" for n in s.message.news)]
    assert len(told) >= 3


def test_a_peer_that_is_slow_itself_probes_more_slowly():
    a = knowing("a", "b", "c", "d", "e")
    until(a, 0.0, 6.0)  # no target answers, no helper says Nack
    assert a.prober.awareness == AWARENESS_MAX
    b = knowing("a", "b", "c", "d", "e")
    until(b, 0.0, 6.0, answering="bcde")
    assert b.prober.awareness == 0


# Suspicion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS.values())
def test_a_suspicion_lasts_shorter_the_more_confirm_it(preset):
    alone, one, two = (preset.suspicion_s(10, c) for c in range(3))
    low = preset.suspicion_periods * preset.period_s
    assert alone == pytest.approx(low * preset.patience)
    assert two == pytest.approx(low)
    assert two < one < alone
    assert preset.suspicion_s(3, 0) == pytest.approx(low)  # nobody else could confirm
    assert preset.suspicion_s(1000, 2) == pytest.approx(3 * low)


def test_detection_times_are_what_the_presets_promise():
    assert 1.5 <= LOCAL.detection_s(2) <= LOCAL.detection_s() <= 3.0
    assert 4.0 <= LAN.detection_s(2) <= LAN.detection_s() <= 6.5
    assert 15.0 <= WAN.detection_s(2) <= WAN.detection_s() <= 30.0


def test_confirmations_bring_death_sooner():
    def dies_at(accusers: str) -> float:
        a = knowing("a", "b", "c", "d", "e")
        for accuser in accusers:
            a.receive("c", accused("b", by=accuser), 0.0)
        times = [i * STEP_S for i in range(1, 60) if of(a.tick(i * STEP_S), Departed)]
        return times[0]

    assert dies_at("cde") < dies_at("cd") < dies_at("c") == dies_at("cc")


def test_a_suspect_is_still_a_member():
    a = knowing("a", "b")
    assert of(a.receive("c", accused("b"), 0.0), Suspected) == [Suspected(card("b"), "z")]
    assert state(a, "b") == "suspect"
    assert "b" in [c.id for c in a.alive]


def test_suspicion_is_refuted_by_a_higher_incarnation_only():
    a = knowing("a", "b")
    a.receive("c", accused("b"), 0.0)
    a.receive("b", Sync([News(card("b"), 0, "alive")]), 0.1)
    assert state(a, "b") == "suspect"
    a.receive("b", Sync([News(card("b"), 1, "alive")]), 0.2)
    assert state(a, "b") == "alive"


@pytest.mark.parametrize("as_", ["suspect", "dead"])
def test_an_accused_peer_raises_its_incarnation_and_answers_the_accuser(as_):
    b = knowing("b", "a")
    effects = b.receive("a", accused("b", by="a", as_=as_), 0.1)
    (answer,) = sends(effects, Sync, "a")
    (own,) = answer.message.members
    assert (own.card.id, own.incarnation, own.state) == ("b", 1, "alive")
    assert b.incarnation == 1
    assert b.prober.awareness == 1


def test_an_accusation_that_is_already_refuted_changes_nothing_and_is_corrected():
    a = knowing("a", "b", "c")
    a.receive("b", Sync([News(card("b"), 3, "alive")]), 0.1)
    a.roster.fresh.clear()
    assert not of(a.receive("c", accused("b", incarnation=2, as_="dead"), 0.2), Suspected)
    assert state(a, "b") == "alive"
    told = [n for s in sends(until(a, 0.2, 0.5), Sync) for n in s.message.members if n.card.id == "b"]
    assert {n.incarnation for n in told} == {3}


def test_death_by_hearsay_is_an_accusation():
    a = knowing("a", "b", "c")
    effects = a.receive("c", accused("b", by="c", as_="dead"), 0.0)
    assert of(effects, Suspected)
    assert not of(effects, Departed)
    assert not of(a.receive("c", accused("b", by="c", as_="dead"), 0.1), Departed)


def test_death_is_refuted_and_both_halves_exchange_what_they_know():
    a = knowing("a", "b", "c")
    until(a, 0.0, 12.0, answering="c")
    assert state(a, "b") == "dead"
    effects = a.receive("b", Sync([News(card("b"), 1, "alive")]), 12.0)
    assert of(effects, Joined) == [Joined(card("b"))]
    (comparison,) = sends(effects, Compare, "b")
    assert comparison.message == Compare(a.roster.digests())


def test_whoever_hears_of_a_dead_peer_as_alive_asks_that_peer_itself():
    a = knowing("a", "b", "c")
    until(a, 0.0, 12.0, answering="c")
    a._next_reach = 99.0  # it would come to b by itself
    assert not sends(a.tick(12.1), Ping, "b")
    a.receive("c", Sync([News(card("b"), 0, "alive")]), 12.2)
    assert state(a, "b") == "dead"
    (ping,) = sends(a.tick(12.3), Ping, "b")
    assert any(n.card.id == "b" and n.state == "dead" for n in ping.message.news)


def test_a_dead_sender_is_told_that_it_is_held_dead():
    a = knowing("a", "b", "c")
    until(a, 0.0, 12.0, answering="c")
    (ack,) = sends(a.receive("b", Ping(1, [News(card("b"), 0, "alive")]), 12.0), Ack)
    assert any(n.card.id == "b" and n.state == "dead" for n in ack.message.news)


# Addresses -----------------------------------------------------------------------------------------------------------


def test_not_me_makes_the_one_that_was_meant_suspect():
    a = knowing("a", "b")
    assert of(a.receive("n", NotMe("b"), 0.0, "tcp://b"), Suspected)


def test_not_me_from_elsewhere_is_ignored():
    a = knowing("a", "b")
    assert a.receive("n", NotMe("b"), 0.0, "tcp://elsewhere") == []
    assert state(a, "b") == "alive"


def test_a_new_process_at_the_address_makes_the_old_member_suspect():
    a = knowing("a", "b")
    effects = a.receive("n", Hello(card("n", address="tcp://b"), 0), 0.0)
    assert of(effects, Joined) == [Joined(card("n", address="tcp://b"))]
    assert [e.card.id for e in of(effects, Suspected)] == ["b"]


def test_the_dead_and_the_seeds_are_tried_now_and_then():
    a = knowing("a", "b", "c")
    a.contact(["tcp://seed", "tcp://c"], 0.0)
    effects = until(a, 0.0, 60.0, answering="c")
    late = until(a, 60.0, 120.0, answering="c")
    assert of(effects, Departed)
    assert len(sends(late, Ping, "b")) > 5
    assert len({s.address for s in sends(late, Hello)}) == 1
    assert sends(late, Hello)[0].address == "tcp://seed"


def test_a_seed_that_is_this_peer_under_another_name_is_not_tried_again():
    a = knowing("a", "b")
    a.contact(["tcp://alias"], 0.0)
    hello = sends(until(a, 0.0, 5.0, answering="b"), Hello)[-1]
    a.receive("a", hello.message, 5.0, "tcp://a")
    assert not sends(until(a, 5.0, 60.0, answering="b"), Hello)


# Busy, asleep, leaving -----------------------------------------------------------------------------------------------


def test_a_busy_peer_is_not_accused_until_its_time_is_over():
    a = knowing("a", "b")
    a.receive("b", Sync([News(card("b", busy_for_s=20.0), 1, "alive")]), 0.0)
    assert not of(until(a, 0.0, 20.0), Suspected)
    assert of(until(a, 20.0, 24.0), Suspected)


def test_nobody_is_busy_for_longer_than_the_limit():
    a = knowing("a", "b")
    a.receive("b", Sync([News(card("b", busy_for_s=1e9), 1, "alive")]), 0.0)
    assert of(until(a, 0.0, MAX_BUSY_S + 5.0), Suspected)
    with pytest.raises(ValueError, match="busy_for_s = 301"):
        a.update(310.0, busy_for_s=301)


def test_a_forwarded_card_is_busy_for_what_is_left():
    a = knowing("a", "b", "c")
    a.receive("b", Sync([News(card("b", busy_for_s=20.0), 1, "alive")]), 0.0)
    told = [n for s in sends(a.tick(15.0), Sync) for n in s.message.members if n.card.id == "b"]
    assert told == [] or told[0].card.busy_for_s <= 5.0
    assert a.roster._preset is LOCAL
    (news,) = [n for n in a.roster.everybody("c", 15.0) if n.card.id == "b"]
    assert news.card.busy_for_s == pytest.approx(5.0)


def test_a_change_of_the_card_reaches_the_others_with_a_higher_incarnation():
    a, b = knowing("a", "b"), knowing("b", "a")
    (send,) = sends(a.update(0.1, highest_term=7), Sync, "b")
    effects = b.receive("a", send.message, 0.1)
    assert of(effects, Changed) == [Changed(card("a", highest_term=7))]
    assert b.card_of("a").highest_term == 7
    with pytest.raises(ValueError, match="new peer"):
        a.update(0.2, id="other")


def test_time_in_which_this_peer_did_not_run_counts_against_nobody():
    a = knowing("a", "b", "c")
    a.receive("c", accused("b"), 0.0)
    assert not of(a.tick(2.0), Departed)  # a refutation may lie unread
    a.receive("b", Sync([News(card("b"), 1, "alive")]), 2.0)
    assert state(a, "b") == "alive"


def test_a_peer_that_slept_for_the_detection_time_is_over():
    a = knowing("a", "b")
    now = LOCAL.detection_s(2) + 0.1
    assert a.asleep(now)
    assert a.receive("b", Ping(1, []), now) == [Asleep(now)]
    assert a.tick(now + 1) == []
    assert a.over


def test_a_peer_that_worked_through_the_detection_time_is_not_over():
    a = knowing("a", "b")
    now = LOCAL.detection_s(2) + 0.1
    a.was_busy(now)
    assert not of(a.tick(now + 0.01), Asleep)
    assert not a.over


def test_a_pause_within_the_announced_busy_time_is_no_sleep():
    a = knowing("a", "b")
    a.update(0.0, busy_for_s=60.0)
    assert not of(a.tick(59.0), Asleep)
    assert of(a.tick(90.0), Asleep)


def test_leaving_gives_the_reason_and_then_is_silent():
    a, b = knowing("a", "b"), knowing("b", "a")
    (send,) = sends(a.leave("finished", 0.1), Sync, "b")
    assert of(b.receive("a", send.message, 0.1), Departed) == [Departed(card("a"), False, "finished")]
    assert (b.state_of("a"), b.reason_of("a")) == ("left", "finished")
    assert a.tick(0.2) == []
    assert a.receive("b", Ping(1, []), 0.3) == []


def test_late_news_does_not_bring_back_who_has_left():
    b = knowing("b", "a", "c")
    b.receive("a", Sync([News(card("a"), 1, "left", "finished")]), 0.1)
    for late in (News(card("a"), 0, "alive"), News(card("a"), 0, "suspect", accuser="c"), News(card("a"), 1, "alive")):
        b.receive("c", Sync([late]), 0.2)
        assert state(b, "a") == "left"


def test_a_newcomer_is_told_who_left_and_why():
    b = knowing("b", "a")
    b.receive("a", Sync([News(card("a"), 1, "left", "finished")]), 0.1)
    (welcome,) = sends(b.receive("n", Hello(card("n"), 0), 0.2), Welcome)
    n = peer("n")
    n.receive("b", welcome.message, 0.3)
    assert n.reason_of("a") == "finished"


# Bounds --------------------------------------------------------------------------------------------------------------


def test_news_is_bounded_in_a_message_and_in_repetitions():
    a = peer("a")
    a.receive("x", Sync([News(card(f"p{i:03}"), 0, "alive") for i in range(200)]), 0.0)
    told = []
    for i in range(1, 2000):
        for send in sends(a.tick(i * STEP_S), Sync | Ping):
            news = send.message.news if isinstance(send.message, Ping) else send.message.members
            assert len(news) <= NEWS + 2
            told += [n.card.id for n in news if n.state == "alive"]
        a.prober._probe = None  # whether they answer is of no interest here
    for i in range(200):
        assert 1 <= told.count(f"p{i:03}") <= roster.RETRANSMIT * 3 + 1


def test_joins_and_deaths_are_told_before_changed_cards():
    r = Roster(card("a"), LOCAL, 0)
    for i in range(2 * NEWS):
        r.hear(News(card(f"p{i}"), 0, "alive"), 0.0)
    r.fresh.clear()
    r.hear(News(card("late"), 0, "alive"), 0.0)
    for i in range(2 * NEWS):
        r.hear(News(card(f"p{i}", highest_term=1), 1, "alive"), 0.0)
    for _ in range(roster.RETRANSMIT):
        assert "late" in [n.card.id for n in r.news("p0", 0.0)]


def test_the_memory_of_the_dead_is_bounded_in_number_and_time(monkeypatch):
    monkeypatch.setattr(roster, "MAX_DEAD", 10)
    r = Roster(card("a"), LOCAL, 0)
    for i in range(50):
        r.hear(News(card(f"p{i}"), 0, "dead"), float(i))
    assert list(r.dead) == [f"p{i}" for i in range(40, 50)]
    assert set(r.fresh) == set(r.dead)
    r.forget(45.0 + roster.REMEMBER_S)
    assert list(r.dead) == [f"p{i}" for i in range(45, 50)]


def test_a_large_mesh_is_told_in_pieces():
    a = peer("a")
    everybody = [News(card(f"p{i:04}"), 0, "alive") for i in range(1200)]
    a.receive("x", Sync(everybody), 0.0)
    pieces = sends(a.receive("n", Hello(card("n"), 0), 0.1), Welcome)
    assert [len(p.message.members) for p in pieces] == [500, 500, 201]
    assert len(msgspec.msgpack.encode(pieces[0].message)) < 1 << 20


def test_what_a_newcomer_is_told_by_its_host_is_not_spread_and_what_others_tell_is():
    a = peer("a")
    a.receive("h", Welcome([News(card(n), 0, "alive") for n in ("h", "b", "c")]), 0.0)
    assert not a.roster.fresh
    a.receive("x", Welcome([News(card(n), 0, "alive") for n in ("x", "b")]), 0.1)
    assert list(a.roster.fresh) == ["x"]


# Comparing views ------------------------------------------------------------------------------------------------------


def compared(a: Membership, b: Membership, now: float) -> tuple[int, int]:
    """Let ``a`` compare itself with ``b``; the messages and the members told."""
    a._compare(b.id)
    waiting = [(b, a, send) for send in a._take()]
    messages = told = 0
    while waiting:
        there, here, send = waiting.pop(0)
        if not isinstance(send, Send) or send.to != there.id:
            continue
        messages += 1
        told += len(send.message.members) if isinstance(send.message, Sync) else 0
        waiting += [(here, there, effect) for effect in there.receive(here.id, send.message, now)]
    return messages, told


def test_equal_views_cost_one_message_whatever_their_size():
    for size in (5, 500):
        others = [f"p{i}" for i in range(size)]
        a, b = knowing("a", "b", *others), knowing("b", "a", *others)
        assert compared(a, b, 1.0) == (1, 0)


def test_views_that_differ_are_alike_after_one_comparison_and_tell_only_what_may_differ():
    others = [f"p{i}" for i in range(1000)]
    a, b = knowing("a", "b", "only-a", *others), knowing("b", "a", "only-b", *others)
    a.receive("p7", Sync([News(card("p7"), 1, "left", "finished")]), 0.0)
    b.receive("p8", Sync([News(card("p8", highest_term=3), 1, "alive")]), 0.0)
    messages, told = compared(a, b, 1.0)
    assert a.roster.digests() == b.roster.digests()
    assert messages <= 5
    assert told < 0.4 * len(others)
    assert b.reason_of("p7") == "finished"
    assert a.card_of("p8").highest_term == 3


def test_a_comparison_ends_though_one_holds_dead_whom_the_other_sees():
    a, b = knowing("a", "b", "c"), knowing("b", "a", "c")
    until(a, 0.0, 12.0, answering="b")
    until(b, 0.0, 12.0, answering="ac")
    assert state(a, "c") == "dead"
    assert compared(a, b, 12.0)[0] <= 4
    assert "c" in a.roster.doubts


STATES = st.sampled_from(["alive", "suspect", "dead", "left"])
HEARD = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4), STATES, st.floats(0.0, 1.5)), max_size=40)


@given(HEARD)
def test_whatever_is_heard_views_are_what_joined_and_departed_and_incarnations_never_fall(heard):
    m, now, view, seen = peer("a"), 0.0, set(), {}
    for name, incarnation, as_, pause in heard:
        now += pause
        message = Sync([News(card(name), incarnation, as_, "r", "z")])
        for effect in m.tick(now) + m.receive("z", message, now):
            if isinstance(effect, Joined):
                assert effect.card.id not in view
                view.add(effect.card.id)
            elif isinstance(effect, Departed):
                view.remove(effect.card.id)
        assert {c.id for c in m.alive} == view | {"a"}
        for name in "bcd":
            record = m.roster.record(name)
            assert (record.incarnation if record else -1) >= seen.get(name, -1)
            seen[name] = record.incarnation if record else -1


@given(st.permutations([(i, s) for i in range(3) for s in ("alive", "left")]))
def test_the_order_in_which_a_life_is_heard_does_not_matter(heard):
    m = peer("a")
    for incarnation, as_ in heard:
        news = News(card("b", highest_term=incarnation), 2 * incarnation + (as_ == "left"), as_)
        m.receive("b", Sync([news]), 0.0)
    assert (m.state_of("b"), m.card_of("b").highest_term) == ("left", 2)
