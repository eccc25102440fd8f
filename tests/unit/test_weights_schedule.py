"""The two ends of a publication by hand-driven messages, then together on a lossy network that hypothesis drives."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.config import Weights
from mesh.effects import Note, Send
from mesh.version import Ballot, Lineage, Version
from transport.messages import (
    Announce,
    Begin,
    ManifestAsk,
    Member,
    Probe,
    PullAsk,
    PullDecline,
    PullTell,
    Report,
)
from transport.weights.pull import Check, Write
from transport.weights.reception import Offer, ReceiverSchedule, Refuse, Released, StartReceive
from transport.weights.schedule import (
    AnnounceTo,
    Convene,
    Disband,
    EnginesDiffer,
    PublisherSchedule,
    Release,
    SatOut,
    StartBroadcast,
)

W = Weights(ready_wait_s=3.0, reform_interval_s=1.0, form_timeout_s=10.0)
T, A, B, C = Member("t"), Member("a"), Member("b"), Member("c")
TERM, NEWER = Ballot(3, "t"), Ballot(9, "t")
B1, B2, B3 = Ballot(11, "t"), Ballot(12, "t"), Ballot(13, "t")


def v(number, term=TERM):
    return Version(term, number)


def of(effects, *kinds):
    return [e for e in effects if isinstance(e, kinds)]


def ready(version, attempt=1, ballot=B1, **more):
    return Report(ballot=ballot, ready_for=version, attempt=attempt, **more)


def formed(*receivers, ballot=B1, now=0.0):
    p = PublisherSchedule(T, W)
    assert p.live(receivers, now) == [Convene((T, *receivers))]
    assert p.formed(ballot, (T, *receivers), now) == []
    return p


def sent(p, version, *peers, now=0.0, slot=0, ballot=B1, attempt=1):
    """Drive one version to the end of its broadcast; its receivers have not reported yet."""
    p.snapshot(version, slot, now)
    effects = [e for peer in peers for e in p.report(peer, ready(version, attempt, ballot), now)]
    assert of(effects, StartBroadcast) == [StartBroadcast(ballot, version, attempt, slot)]
    return p.broadcast_ended(version, attempt, True, now)


# ----------------------------------------------------------------------------------------------------------------------
# The publisher
# ----------------------------------------------------------------------------------------------------------------------


def test_alone_a_publisher_keeps_the_newest_and_does_nothing():
    p = PublisherSchedule(T, W)
    assert p.snapshot(v(0), 0, 0.0) == []
    assert p.snapshot(v(1), 1, 1.0) == [Release(0)]
    assert [e for t in range(100) for e in p.tick(float(t))] == []


def test_versions_only_rise():
    p = PublisherSchedule(T, W)
    p.snapshot(v(1), 0, 0.0)
    with pytest.raises(ValueError, match="versions only rise"):
        p.snapshot(v(1), 1, 0.0)
    assert p.snapshot(v(0, NEWER), 2, 0.0) == [Release(0)]


def test_a_version_is_announced_again_and_again_to_those_not_ready():
    p = formed(A, B)
    assert p.snapshot(v(0), 7, 0.0) == [AnnounceTo("a", B1, v(0), 1, 7), AnnounceTo("b", B1, v(0), 1, 7)]
    assert p.report("a", ready(v(0)), 0.1) == []
    assert p.tick(0.2) == []
    assert p.tick(0.3) == [AnnounceTo("b", B1, v(0), 1, 7)]


def test_a_broadcast_begins_when_all_are_ready_for_this_version_attempt_and_ballot():
    p = formed(A, B)
    p.snapshot(v(1), 7, 0.0)
    p.report("a", ready(v(1)), 0.1)
    for other in (ready(v(0)), ready(v(1), attempt=2), ready(v(1), ballot=B2), ready(v(1), ballot=None)):
        assert of(p.report("b", other, 0.1), StartBroadcast, Send) == []
    begin = Begin(B1, v(1), 1)
    assert p.report("b", ready(v(1)), 0.2) == [Send("a", begin), Send("b", begin), StartBroadcast(B1, v(1), 1, 7)]
    assert p.report("b", ready(v(1)), 0.2) == []


def test_begin_is_repeated_until_the_broadcast_has_ended():
    p = formed(A)
    p.snapshot(v(0), 7, 0.0)
    p.report("a", ready(v(0)), 0.0)
    assert p.tick(0.3) == [Send("a", Begin(B1, v(0), 1))]
    p.broadcast_ended(v(0), 1, True, 0.4)
    assert p.tick(0.8) == []


def test_a_queued_version_is_replaced_by_a_newer_and_its_buffer_released():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    assert p.snapshot(v(1), 1, 0.1) == [Release(0), AnnounceTo("a", B1, v(1), 1, 1)]


def test_a_buffer_being_sent_is_released_only_when_the_broadcast_has_ended():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", ready(v(0)), 0.0)
    assert of(p.snapshot(v(1), 1, 0.1), Release) == []
    assert p.snapshot(v(2), 2, 0.1) == [Release(1)]
    assert p.broadcast_ended(v(0), 1, True, 0.2) == [Release(0), AnnounceTo("a", B1, v(2), 1, 2)]


def test_the_newest_stays_leased_after_it_was_sent():
    p = formed(A)
    assert sent(p, v(0), "a") == []
    assert p.report("a", Report(B1, verified=v(0)), 0.1) == []
    assert p.tick(100.0) == []
    assert p.snapshot(v(1), 1, 101.0)[0] == Release(0)


def test_who_is_not_ready_in_time_sits_out_and_the_rest_reconvene():
    p = formed(A, B)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", ready(v(0)), 0.1)
    p.report("b", Report(B1, reason="no shadow buffer is free"), 0.1)
    assert of(p.tick(2.9), SatOut) == []
    effects = p.tick(3.0)
    reason = "was not ready for v0@3 within 3 s: no shadow buffer is free"
    assert effects == [SatOut("b", 1, reason), Convene((T, A)), AnnounceTo("b", None, v(0), 1, 0, ("t",))]
    assert of(p.formed(B2, (T, A), 3.1), AnnounceTo) == [AnnounceTo("a", B2, v(0), 2, 0)]
    assert of(p.report("a", ready(v(0), 2, B2), 3.2), StartBroadcast) == [StartBroadcast(B2, v(0), 2, 0)]


def test_a_newer_version_gives_the_late_no_more_time():
    p = formed(A, B)
    p.snapshot(v(0), 0, 0.0)
    p.snapshot(v(1), 1, 2.5)
    p.report("a", ready(v(1)), 2.6)
    assert [e.peer for e in of(p.tick(3.0), SatOut)] == ["b"]


def test_who_sat_out_is_asked_again_after_one_publication():
    p = formed(A, B)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", ready(v(0)), 0.1)
    p.tick(3.0)
    p.formed(B2, (T, A), 3.1)
    p.report("a", ready(v(0), 2, B2), 3.2)
    p.broadcast_ended(v(0), 2, True, 3.3)
    assert of(p.report("a", Report(B2, verified=v(0)), 3.4), Convene) == []
    p.snapshot(v(1), 1, 4.1)
    p.report("a", ready(v(1), 1, B2), 4.2)
    assert of(p.broadcast_ended(v(1), 1, True, 4.3), Convene) == [Convene((T, A, B))]


def test_sitting_out_doubles_and_ends_with_a_proved_version():
    p, now, counts = PublisherSchedule(T, W), 0.0, []
    p.snapshot(v(0), 0, now)
    p.live([A, B], now)
    for k in range(4):
        ballot = Ballot(20 + k, "t")
        attempt = of(p.formed(ballot, (T, A, B), now), AnnounceTo)[0].attempt
        p.report("a", ready(v(0), attempt, ballot), now)
        now += 3.0
        counts += [(e.peer, e.publications) for e in of(p.tick(now), SatOut)]
        now += 1000.0
    assert counts == [("b", 1), ("b", 2), ("b", 4), ("b", 8)]
    assert not p.receivers["b"].sits_out(0, now)
    p.receivers["b"].heard(Report(ballot, verified=v(0)))
    assert p.receivers["b"].strikes == 4  # its engine may still not prove it
    p.receivers["b"].heard(Report(ballot, verified=v(0), proved=v(0)))
    assert p.receivers["b"].strikes == 0


def test_when_all_would_sit_out_nobody_does():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    effects = p.tick(3.0)
    assert [e.peer for e in of(effects, SatOut)] == ["a"]
    assert of(p.tick(3.3), AnnounceTo) == [AnnounceTo("a", B1, v(0), 1, 0)]
    assert of(p.report("a", ready(v(0)), 3.4), StartBroadcast)


def test_a_group_that_broke_at_its_receivers_alone_is_renewed_even_when_all_would_sit_out():
    p = formed(A, B)
    sent(p, v(0), "a", "b")
    for peer in "ab":
        p.report(peer, Report(None, attempt=1), 0.1)  # the publisher's end was done, theirs timed out
    effects = [e for k in range(1, 80) for e in p.tick(k / 10)]
    assert Disband(B1) in effects
    [convene] = of(effects, Convene)
    assert convene == Convene((T, A, B))


def test_a_lone_receiver_that_stays_silent_is_not_complained_about_for_ever():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    outs = [e for k in range(1, 4000) for e in of(p.tick(0.5 * k), SatOut)]
    assert [e.publications for e in outs] == [1, 2, 4, 8, 16, 32, 64]


def test_who_sits_out_already_does_not_sit_out_longer_for_being_taken_along():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    outs = [(k, e.publications) for k in range(1, 60) for e in of(p.tick(float(k)), SatOut)]
    assert outs == [(3, 1), (9, 2), (21, 4), (45, 8)]


def test_who_does_not_answer_the_invitation_sits_out():
    p = PublisherSchedule(T, W)
    p.live([A, B], 0.0)
    assert of(p.formed(B1, (T, A), 1.0), SatOut) == [SatOut("b", 1, "did not answer the invitation")]
    assert of(p.tick(2.0), Convene) == []


def test_a_joiner_pulls_the_newest_at_once_and_is_taken_in_at_the_interval():
    p = formed(A)
    sent(p, v(0), "a", now=0.5)
    p.report("a", Report(B1, verified=v(0), proved=v(0)), 0.6)
    assert p.live([A, B], 0.7) == [AnnounceTo("b", None, v(0), 1, 0, ("a", "t"))]
    assert p.tick(1.0) == [Convene((T, A, B))]
    assert p.formed(B2, (T, A, B), 1.1) == []
    assert p.tick(1.7) == [AnnounceTo("b", None, v(0), 1, 0, ("a", "t"))]
    assert p.report("b", Report(B2, verified=v(0)), 1.8) == []
    assert p.tick(9.0) == []


def test_most_of_a_formation_gets_a_version_by_broadcast_and_not_by_pull():
    p = formed(A, B, C)
    sent(p, v(0), "a", "b", "c")
    p.report("a", Report(B1, attempt=1, verified=v(0)), 0.1)
    p.report("b", Report(B1, attempt=1, refused=v(0), reason="bucket 3"), 0.2)
    effects = p.report("c", Report(B1, attempt=1, refused=v(0), reason="bucket 3"), 0.2)
    assert [(e.peer, e.ballot, e.attempt) for e in of(effects, AnnounceTo)] == [(x, B1, 2) for x in "abc"]


def test_without_groups_everybody_pulls_and_nobody_is_convened():
    p = PublisherSchedule(T, Weights(transport="endpoint"))
    assert p.live([A, B], 0.0) == []
    told = p.snapshot(v(0), 0, 0.0)
    assert told == [AnnounceTo(x, None, v(0), 0, 0, ("t",)) for x in "ab"]
    assert p.report("a", Report(None, verified=v(0), proved=v(0)), 0.5) == []
    assert p.tick(1.0) == [AnnounceTo("b", None, v(0), 0, 0, ("a", "t"))]
    assert p.snapshot(v(1), 1, 1.1)[0] == Release(0)


def test_an_older_version_is_pulled_from_who_still_runs_it():
    p = formed(A, B)
    for number in (0, 1):
        sent(p, v(number), "a", "b", slot=number)
        for peer in "ab":
            p.report(peer, Report(B1, attempt=1, verified=v(number), proved=v(0)), 0.1)
    behind = Report(B1, attempt=1, verified=v(1), wants=v(0))
    assert p.report("b", behind, 0.2) == [AnnounceTo("b", None, v(0), 1, 0, ("a",))]
    p.report("a", Report(B1, attempt=1, verified=v(1), proved=v(1)), 0.3)
    assert p.tick(2.0) == [], "nobody runs it any more"


def test_a_version_that_is_wanted_and_comes_by_broadcast_is_not_pulled_as_well():
    """Who pulls it is missing in the broadcast, which then waits for it until its time-out."""
    p = formed(A, B)
    p.snapshot(v(0), 0, 0.0)
    wanting = Report(B1, attempt=0, wants=v(0))
    assert of(p.report("a", wanting, 0.1), AnnounceTo) == []
    p.report("a", ready(v(0)), 0.2)
    assert of(p.report("b", ready(v(0)), 0.2), StartBroadcast)
    assert of(p.report("a", wanting, 0.3), AnnounceTo) == []


def test_who_wants_a_version_that_nobody_runs_any_more_pulls_the_newest():
    p = formed(A, B)
    for number in (0, 1, 2):
        sent(p, v(number), "a", "b", slot=number)
        p.report("a", Report(B1, attempt=1, verified=v(number), proved=v(number)), 0.1)
    behind = Report(B1, attempt=1, verified=v(0), wants=v(1))
    p.report("b", behind, 0.2)
    [told] = of(p.tick(100.0), AnnounceTo)
    assert (told.peer, told.ballot, told.version) == ("b", None, v(2))


def test_a_joiner_waits_until_a_running_broadcast_has_ended():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", ready(v(0)), 0.0)
    p.live([A, B], 5.0)
    assert of(p.tick(6.0), Convene) == []
    assert of(p.broadcast_ended(v(0), 1, True, 6.1), Convene) == [Convene((T, A, B))]


def test_a_formation_whose_members_all_have_the_newest_sends_nothing():
    p = formed(A, B)
    sent(p, v(0), "a", "b")
    for peer in "ab":
        p.report(peer, Report(B1, verified=v(0)), 0.1)
    p.live([A], 0.2)
    assert p.formed(B2, (T, A), 0.3) == []
    assert p.tick(60.0) == []


def test_a_dead_member_ends_the_formation_at_once():
    p = formed(A, B)
    p.snapshot(v(0), 5, 0.0)
    p.report("a", ready(v(0)), 0.1)
    p.report("b", ready(v(0)), 0.1)
    assert p.live([A], 0.2) == [Disband(B1), Convene((T, A))]
    assert p.broadcast_ended(v(0), 1, False, 0.3) == []
    assert p.formed(B2, (T, A), 0.4) == [AnnounceTo("a", B2, v(0), 2, 5)]


def test_a_new_group_sends_nothing_while_the_abandoned_broadcast_runs():
    p = formed(A, B)
    p.snapshot(v(0), 5, 0.0)
    p.report("a", ready(v(0)), 0.1)
    p.report("b", ready(v(0)), 0.1)
    p.live([A], 0.2)
    assert p.formed(B2, (T, A), 0.3) == []
    assert p.broadcast_ended(v(0), 1, False, 0.4) == [AnnounceTo("a", B2, v(0), 2, 5)]


def test_a_member_that_dies_while_it_is_convened_is_convened_without():
    p = PublisherSchedule(T, W)
    p.live([A, B], 0.0)
    assert p.live([A], 0.1) == [Convene((T, A))]


def test_a_group_that_comes_with_a_dead_member_is_disbanded():
    p = PublisherSchedule(T, W)
    p.live([A, B], 0.0)
    p.live([A], 0.1)
    assert p.formed(B1, (T, A, B), 0.2) == [Disband(B1), Convene((T, A))]


def test_after_a_failed_broadcast_the_group_is_renewed_and_the_wait_doubles():
    p, now, waits = formed(A), 0.0, []
    p.snapshot(v(0), 0, 0.0)
    for k in range(5):
        ballot = p.formation[0]
        p.report("a", ready(v(0), k + 1, ballot), now)
        assert of(p.broadcast_ended(v(0), k + 1, False, now), Disband) == [Disband(ballot)]
        failed = now
        while not of(p.tick(now), Convene):
            now += 0.25
        waits.append(now - failed)
        p.formed(Ballot(20 + k, "t"), (T, A), now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_group_that_fails_strikes_who_never_came():
    p = PublisherSchedule(T, W)
    p.live([A, B], 0.0)
    effects = p.group_failed(B1, "not there after 10 s: peer b", (B,), 10.0)
    assert effects[1:] == [SatOut("b", 1, "did not come to build the group")]
    assert "weights formation 11.t failed" in effects[0].text
    assert p.tick(11.0) == [Convene((T, A))]


def test_a_group_that_never_comes_about_is_convened_again():
    p = PublisherSchedule(T, W)
    p.live([A], 0.0)
    assert p.tick(14.9) == []
    effects = p.tick(15.0)
    assert of(effects, Convene) == [Convene((T, A))]
    assert of(effects, Note)


def test_a_version_corrupt_on_arrival_is_pulled_once_and_then_left():
    p = formed(A, B)
    sent(p, v(0), "a", "b")
    p.report("a", Report(B1, attempt=1, verified=v(0)), 0.1)
    effects = p.report("b", Report(B1, attempt=1, refused=v(0), reason="bucket 3"), 0.2)
    assert effects == [AnnounceTo("b", None, v(0), 2, 0, ("t",))]
    effects = p.report("b", Report(B1, attempt=2, refused=v(0), reason="probe differs"), 0.5)
    assert of(effects, SatOut) == [SatOut("b", 1, "refused v0@3: probe differs")]
    assert of(effects + p.tick(2.0), AnnounceTo) == []


def test_a_version_that_failed_twice_comes_again_when_the_receiver_has_sat_out():
    p, now = formed(A), 0.0
    sent(p, v(0), "a")
    again = []
    for attempt in (1, 2, 3, 4):
        effects = p.report("a", Report(B1, attempt=attempt, refused=v(0), reason="bucket 3"), now)
        failed = now
        while not of(effects, AnnounceTo):
            assert now < 100.0, "it never comes again, and the next version may wait for this receiver"
            now += 0.5
            effects = p.tick(now)
        again.append(now - failed)
        p.report("a", ready(v(0), attempt + 1), now)
        p.broadcast_ended(v(0), attempt + 1, True, now)
    assert again == [0.0, 6.0, 12.0, 24.0]


def test_who_refuses_an_announced_version_sits_out_at_once():
    p = formed(A, B)
    p.snapshot(v(0), 0, 0.0)
    effects = p.report("b", Report(B1, attempt=1, refused=v(0), reason="another manifest"), 0.1)
    assert of(effects, SatOut) == [SatOut("b", 1, "refused v0@3: another manifest")]
    assert of(p.tick(1.0), Convene) == [Convene((T, A))]


def test_a_lone_receiver_that_refuses_is_tried_again_with_the_next_version_only():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", Report(B1, attempt=1, refused=v(0), reason="another manifest"), 0.1)
    assert [e for k in range(1, 100) for e in of(p.tick(float(k)), AnnounceTo, SatOut)] == []
    assert of(p.snapshot(v(1), 1, 100.0), AnnounceTo) == [AnnounceTo("a", B1, v(1), 1, 1)]


def test_no_word_after_a_broadcast_counts_as_failed_but_does_not_hold_up_a_newer():
    p = formed(A, B)
    sent(p, v(0), "a", "b")
    p.report("a", Report(B1, verified=v(0)), 0.1)
    assert p.tick(2.9) == []
    assert of(p.tick(3.0), AnnounceTo) == [AnnounceTo("b", None, v(0), 2, 0, ("t",))]
    q = formed(A, B)
    sent(q, v(0), "a", "b")
    assert of(q.snapshot(v(1), 1, 0.1), AnnounceTo) == [
        AnnounceTo("a", B1, v(1), 1, 1),
        AnnounceTo("b", B1, v(1), 1, 1),
    ]


def test_reports_that_overtake_each_other_take_nothing_back():
    p = formed(A)
    p.report("a", Report(B1, verified=v(2), proved=v(1)), 0.0)
    p.report("a", Report(B1, verified=v(1), proved=v(0)), 0.0)
    assert p.proved_by(v(1)) == ("a",)
    assert p.proved_by(v(2)) == ()
    assert p.table({"a": "rollout-1@h"}) == ["rollout-1@h: verified v2@3, proved v1@3"]


def test_the_table_says_why_a_receiver_is_no_further():
    p = formed(A, B, C)
    p.report("b", Report(B1, refused=v(1), reason="bucket 3 is corrupt"), 0.0)
    p.report("c", Report(B1, reason="waiting for the manifest"), 0.0)
    assert p.table({}) == [
        "a: verified nothing, proved nothing, never reported",
        "b: verified nothing, proved nothing, refused v1@3: bucket 3 is corrupt",
        "c: verified nothing, proved nothing, not ready: waiting for the manifest",
    ]


def test_engines_of_one_build_must_agree_under_one_version():
    p = formed(A, B, C)
    p.report("a", Report(B1, proved=v(1), build="x", live_digest="1"), 0.0)
    assert p.report("b", Report(B1, proved=v(1), build="y", live_digest="2"), 0.0) == []
    report = Report(B1, proved=v(1), build="x", live_digest="3")
    assert p.report("c", report, 0.0) == [EnginesDiffer("c", "a", report)]
    assert p.report("c", Report(B1, proved=v(1), build="x", live_digest="3"), 0.0) == []


def test_closing_gives_every_buffer_back_once():
    p = formed(A)
    p.snapshot(v(0), 0, 0.0)
    p.report("a", ready(v(0)), 0.0)
    p.snapshot(v(1), 1, 0.1)
    assert p.close() == [Disband(B1), Release(1)]
    assert p.broadcast_ended(v(0), 1, False, 0.2) == [Release(0)]
    assert p.tick(100.0) == []


def test_workers_of_one_engine_are_members_of_their_own():
    p = PublisherSchedule(T, W)
    workers = (Member("a", 0), Member("a", 1))
    assert p.live(workers, 0.0) == [Convene((T, *workers))]
    p.formed(B1, (T, *workers), 0.0)
    assert p.snapshot(v(0), 0, 0.0) == [AnnounceTo("a", B1, v(0), 1, 0)]


# ----------------------------------------------------------------------------------------------------------------------
# The receiver
# ----------------------------------------------------------------------------------------------------------------------

NONE = np.empty(0, np.uint64)
PROBE = Probe(np.empty(0, np.int32), np.empty(0, np.float32))


def announce(version, attempt=1, ballot=B1, manifest="m"):
    return Announce(ballot, version, Lineage(), manifest, 8, attempt, NONE, NONE, PROBE)


def joined(now=0.0, ballot=B1):
    r = ReceiverSchedule()
    r.manifest_known("m", 16)
    assert r.formed(ballot, (T, A), now) == [Send("t", Report(ballot))]
    return r


def get(r, version, attempt=1, ballot=B1, now=0.0):
    """Announce, begin and receive a version well; returns the effects of its end."""
    r.announced("t", announce(version, attempt, ballot), now)
    assert of(r.began("t", Begin(ballot, version, attempt), now), StartReceive)
    return r.receive_ended(version, attempt, True, now)


def taken(r):
    announce, slot = r.take()
    return announce.version, slot


def report_of(effects):
    [send] = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Report)]
    return send.message


def test_without_a_formation_nothing_is_ready():
    r = ReceiverSchedule()
    r.manifest_known("m", 16)
    assert report_of(r.announced("t", announce(v(0)), 0.0)) == Report(None)
    r.formed(B1, (T, A), 0.1)
    assert report_of(r.announced("t", announce(v(0), ballot=B2), 2.0)).ready_for is None
    assert report_of(r.announced("t", announce(v(0)), 2.0)).ready_for == v(0)
    assert report_of(r.disbanded(B1, 2.1)) == Report(None, attempt=1)


def test_a_receiver_whose_next_group_fails_tells_whoever_announces_that_it_is_in_none():
    r = joined()
    r.announced("t", announce(v(0)), 0.0)
    assert report_of(r.forming(Ballot(12, "u"), 0.1)) == Report(None, attempt=1)
    assert r.forming(B1, 0.1) == []
    [send] = r.announced("u", announce(v(0, NEWER), ballot=Ballot(12, "u")), 1.2)
    assert send == Send("u", Report(None, attempt=1))


def test_only_the_convener_of_the_formation_publishes_in_it():
    r = joined()
    assert r.announced("z", announce(v(0)), 5.0) == []
    assert r.publisher == "t"
    assert r._ready is None


def test_an_unknown_manifest_is_asked_for_until_it_is_there():
    r = ReceiverSchedule()
    r.formed(B1, (T, A), 0.0)
    for now in (0.0, 0.3):
        assert Send("t", ManifestAsk("m")) in r.announced("t", announce(v(0)), now)
    r.manifest_known("m", 16)
    assert report_of(r.announced("t", announce(v(0)), 0.6)) == Report(B1, ready_for=v(0), attempt=1)


def test_a_repeated_announce_is_answered_again():
    r = joined()
    first = report_of(r.announced("t", announce(v(0)), 0.0))
    assert report_of(r.announced("t", announce(v(0)), 0.01)) == first


def test_a_broadcast_is_entered_once_and_only_when_it_is_the_announced_one():
    r = joined()
    r.announced("t", announce(v(0), 2), 0.0)
    for begin in (Begin(B2, v(0), 2), Begin(B1, v(1), 2), Begin(B1, v(0), 1)):
        assert r.began("t", begin, 0.0) == []
    [start] = r.began("t", Begin(B1, v(0), 2), 0.0)
    assert (start.ballot, start.version, start.attempt, start.slot) == (B1, v(0), 2, 0)
    assert r.began("t", Begin(B1, v(0), 2), 0.1) == []


def test_a_verified_version_is_offered_taken_and_proved():
    r = joined()
    assert Offer(v(0), 0) in get(r, v(0))
    assert (r.verified, r.proved) == (v(0), None)
    assert taken(r) == (v(0), 0)
    assert r.take() is None
    effects = r.applied(v(0), True, 0.1, build="x", live_digest="d", power=2.0)
    assert Released(0) in effects
    assert report_of(effects) == Report(
        B1, attempt=1, verified=v(0), proved=v(0), build="x", live_digest="d", power=2.0
    )
    assert r.applied(v(0), True, 0.2) == []


def test_a_version_the_engine_refuses_is_not_reported_as_proved():
    r = joined()
    get(r, v(0))
    r.take()
    effects = r.applied(v(0), False, 0.1, reason="probe differs")
    assert of(effects, Refuse) == [Refuse(v(0), "t", "probe differs")]
    report = report_of(effects)
    assert (report.refused, report.proved, report.reason) == (v(0), None, "probe differs")


def test_a_version_that_failed_its_proof_may_come_again():
    r = joined()
    get(r, v(0))
    r.take()
    r.announced("t", announce(v(0), 2), 0.1)  # others lack it: it was to go into scratch memory here
    report = report_of(r.applied(v(0), False, 0.2, reason="probe differs"))
    assert (report.verified, report.refused, report.attempt, report.ready_for) == (None, v(0), 1, None)
    r.announced("t", announce(v(0), 2), 0.3)
    [start] = r.began("t", Begin(B1, v(0), 2), 0.3)
    assert start.slot is not None
    assert of(r.receive_ended(v(0), 2, True, 0.4), Offer)
    p = formed(A)
    sent(p, v(0), "a")
    p.report("a", Report(B1, attempt=1, verified=v(0)), 0.1)
    assert p.tick(0.2) == []
    effects = p.report("a", report, 0.3)
    assert of(effects, AnnounceTo) == [AnnounceTo("a", B1, v(0), 2, 0)]
    p.report("a", Report(B1, attempt=2), 0.35)
    assert p.table({}) == ["a: verified nothing, proved nothing, refused v0@3: probe differs"]
    p.report("a", ready(v(0), 2), 0.4)
    p.broadcast_ended(v(0), 2, True, 0.5)
    p.report("a", Report(B1, attempt=2, verified=v(0)), 0.6)
    effects = p.report("a", Report(B1, attempt=2, refused=v(0), reason="probe differs"), 0.7)
    assert of(effects, SatOut, AnnounceTo) == [SatOut("a", 1, "refused v0@3: probe differs")]


def test_a_failed_proof_leaves_the_next_version_ready():
    r = joined()
    get(r, v(0))
    r.take()
    r.announced("t", announce(v(1), 1), 0.1)
    report = report_of(r.applied(v(0), False, 0.2, reason="probe differs"))
    assert (report.verified, report.refused, report.ready_for, report.attempt) == (None, v(0), v(1), 1)


def test_a_term_or_number_that_goes_back_is_refused():
    r = joined()
    get(r, v(5))
    r.take()
    r.applied(v(5), True, 0.0)
    for version in (v(9, Ballot(2, "t")), v(4)):
        effects = r.announced("t", announce(version), 0.1)
        assert of(effects, Refuse) == [Refuse(version, "t", "it lies below v5@3, which was proved here")]
        assert report_of(effects).ready_for is None
    report = report_of(r.announced("t", announce(v(2, NEWER)), 0.2))
    assert (report.ready_for, report.refused) == (v(2, NEWER), None)


def test_a_number_below_an_offered_one_is_refused_and_a_repeated_refusal_said_once():
    r = joined()
    get(r, v(5))
    assert of(r.announced("t", announce(v(4)), 0.1), Refuse)
    again = r.announced("t", announce(v(4)), 0.2)
    assert of(again, Refuse) == []
    assert report_of(again).refused == v(4)


def test_what_the_driver_objects_to_is_refused():
    r = joined()
    effects = r.announced("t", announce(v(0)), 0.0, objection="another manifest")
    assert of(effects, Refuse) == [Refuse(v(0), "t", "another manifest")]


def test_a_newer_verified_version_replaces_one_not_taken():
    r = joined()
    get(r, v(0))
    effects = get(r, v(1))
    assert effects[:2] == [Released(0), Offer(v(1), 1)]
    assert taken(r) == (v(1), 1)


def test_one_is_in_the_engine_while_the_other_receives_and_an_offer_gives_way_to_a_newer():
    r = joined()
    get(r, v(0))
    r.take()
    assert Offer(v(1), 1) in get(r, v(1))
    effects = r.announced("t", announce(v(2)), 1.0)
    assert Released(1) in effects
    assert report_of(effects).ready_for == v(2)
    assert r.take() is None


def test_a_pinned_version_is_kept_and_the_only_one_handed_out():
    r = joined()
    r.pin(v(0), 0.0)
    get(r, v(0))
    get(r, v(1))
    get(r, v(2))
    assert taken(r) == (v(0), 0)
    assert r.take() is None
    r.applied(v(0), True, 1.0)
    r.pin(None, 0.0)
    assert taken(r) == (v(2), 1)


def test_lifting_a_pin_gives_up_what_is_older_than_the_newest():
    r = joined()
    r.pin(v(0), 0.0)
    get(r, v(0))
    get(r, v(1))
    assert r.pin(None, 0.0) == [Released(0)]
    assert taken(r) == (v(1), 1)


def test_a_version_has_passed_when_a_newer_was_announced_and_it_is_not_here():
    r = joined()
    r.pin(v(1), 0.0)
    assert not r.passed(v(1), 100.0)
    get(r, v(0))
    r.announced("t", announce(v(1)), 0.1)
    r.began("t", Begin(B1, v(1), 1), 0.1)
    assert not r.passed(v(1), 100.0)
    r.receive_ended(v(1), 1, False, 0.2)
    assert not r.passed(v(1), 100.0)  # it may come again
    r.announced("t", announce(v(2)), 0.3)
    assert r.passed(v(1), 100.0)
    assert not r.passed(v(2), 100.0)


def test_an_abandoned_buffer_is_out_of_use_until_freed():
    r = joined()
    r.announced("t", announce(v(0)), 0.0)
    r.began("t", Begin(B1, v(0), 1), 0.0)
    r.receive_ended(v(0), 1, False, 0.1, busy=True)
    assert Offer(v(1), 1) in get(r, v(1), now=0.2)
    report = report_of(r.announced("t", announce(v(2)), 0.3))
    assert report.ready_for is None
    assert "an abandoned transfer busy" in report.reason
    r.freed(0)
    assert report_of(r.announced("t", announce(v(2)), 0.4)).ready_for == v(2)


def test_a_corrupt_version_is_refused_and_its_next_attempt_welcome():
    r = joined()
    r.announced("t", announce(v(0)), 0.0)
    r.began("t", Begin(B1, v(0), 1), 0.0)
    r.progress(3)
    effects = r.receive_ended(v(0), 1, False, 0.1, reason="bucket 3 of 8")
    assert of(effects, Refuse) == [Refuse(v(0), "t", "bucket 3 of 8")]
    report = report_of(effects)
    assert (report.refused, report.attempt, report.buckets, report.verified) == (v(0), 1, 3, None)
    report = report_of(r.announced("t", announce(v(0), 2), 0.2))
    assert (report.refused, report.ready_for, report.attempt) == (None, v(0), 2)


def test_a_version_already_verified_is_received_into_scratch():
    r = joined()
    get(r, v(0))
    assert report_of(r.announced("t", announce(v(0), 2), 0.1)).ready_for == v(0)
    [start] = r.began("t", Begin(B1, v(0), 2), 0.1)
    assert start.slot is None
    assert of(r.receive_ended(v(0), 2, True, 0.2), Offer, Refuse) == []
    assert taken(r) == (v(0), 0)


def test_a_new_formation_forgets_what_was_ready_in_the_old():
    r = joined()
    r.announced("t", announce(v(0)), 0.0)
    assert report_of(r.formed(B2, (T, A, B), 0.1)) == Report(B2, attempt=1)
    assert r.began("t", Begin(B1, v(0), 1), 0.2) == []
    assert r.formed(B1, (T, A), 0.3) == []
    assert Offer(v(0), 0) in get(r, v(0), 2, B2)


def test_a_restarted_engine_gets_the_highest_version_again_but_none_below():
    r = joined()
    for number in (0, 1):
        get(r, v(number))
        r.take()
        r.applied(v(number), True, 0.0)
    effects = r.forget(0.1)
    assert of(effects, Offer) == [Offer(v(1), 1)]
    report = report_of(effects)
    assert (report.verified, report.proved) == (v(1), None)
    assert of(r.announced("t", announce(v(0)), 0.2), Refuse)
    assert taken(r) == (v(1), 1)
    effects = r.forget(0.3)  # it ended again, with a version in its hands
    assert of(effects, Offer) == [Offer(v(1), 1)]
    p = formed(A)
    sent(p, v(1), "a")
    p.report("a", Report(B1, verified=v(1), proved=v(1)), 0.1)
    assert p.proved_by(v(1)) == ("a",)
    assert of(p.report("a", Report(B1), 0.2), AnnounceTo) == [AnnounceTo("a", B1, v(1), 2, 0)]
    assert p.proved_by(v(1)) == ()


def test_a_report_goes_out_on_change_and_every_second():
    r = joined()
    assert [bool(r.tick(t)) for t in (0.5, 1.0, 1.5, 2.0)] == [False, True, False, True]
    r.progress(4)
    assert report_of(r.tick(2.1)).buckets == 4


# ----------------------------------------------------------------------------------------------------------------------
# Both ends
# ----------------------------------------------------------------------------------------------------------------------


class World:
    """A publisher and receivers on a network that loses, doubles and reorders; groups form of all who are up, and a
    broadcast reaches, after a while, exactly those who entered it. Checks the invariants at every effect."""

    def __init__(self, rng, count):
        self.rng, self.now, self.loss = rng, 0.0, 0.3
        self.p = PublisherSchedule(T, W)
        self.r = {f"r{i}": ReceiverSchedule() for i in range(count)}
        for r in self.r.values():
            r.manifest_known("m", 16)
        self.up = list(self.r)
        self.deaf = {}
        self.wire, self.later = [], []
        self.counter, self.slots, self.number = 20, set(), 0
        self.sending, self.entered, self.sent = None, {}, set()
        self.highest = dict.fromkeys(self.r)
        self.writing = {}
        self.pulled = {}

    def publish(self):
        slot = next((s for s in range(3) if s not in self.slots), None)
        if slot is not None:
            self.slots.add(slot)
            self.number += 1
            self.do(self.p.snapshot(v(self.number), slot, self.now))

    def members(self):
        self.do(self.p.live([Member(x) for x in self.up], self.now))

    def do(self, effects):
        for e in effects:
            match e:
                case Convene(members):
                    self.counter += 1
                    self.later.append((self.now + 0.2, self.form, Ballot(self.counter, "t"), members))
                case AnnounceTo(peer, ballot, version, attempt, _, holders):
                    digests = np.full(2, version.number, np.uint64)
                    changes = {"bucket_digests": digests, "tensor_digests": digests, "holders": list(holders)}
                    a = msgspec.structs.replace(announce(version, attempt, ballot), **changes)
                    self.wire.append((peer, a))
                case Send(to=to, message=message):
                    self.wire.append((to, message))
                case StartBroadcast(ballot, version, attempt, slot):
                    assert self.sending is None
                    assert (version, attempt) not in self.sent
                    assert slot in self.slots
                    assert self.p.formation[0] == ballot
                    self.sent.add((version, attempt))
                    self.sending, self.entered = e, {}
                    self.later.append((self.now + 1.0, self.end, e, None))
                case Release(slot):
                    assert self.sending is None or self.sending.slot != slot
                    self.slots.remove(slot)

    def receiver_does(self, name, effects):
        for e in effects:
            match e:
                case Send(to=to, message=PullAsk() as ask):
                    self.later.append((self.now + 0.1, self.serve, name, (to, ask)))
                case Write(chunk, payload):
                    self.pulled[name, chunk] = int(payload[0])
                case Check(bucket):
                    pull = self.r[name].pull
                    ok = self.pulled[name, bucket] == int(pull.announce.bucket_digests[bucket])
                    self.receiver_does(name, self.r[name].checked(bucket, ok, self.now))
                case Send(message=message):
                    proved = getattr(message, "proved", None)
                    if proved is not None:
                        assert self.highest[name] is None or proved >= self.highest[name]
                        self.highest[name] = proved
                    self.wire.append(("t", (name, message)))
                case StartReceive(version=version, attempt=attempt, slot=slot):
                    if self.sending is not None and (version, attempt) == (self.sending.version, self.sending.attempt):
                        self.entered[name] = e
                    else:
                        self.later.append((self.now + 0.5, self.received, (name, e), False))
                    self.writing[name] = slot

    def serve(self, name, asked):
        to, ask = asked
        here = self.p.newest == ask.version if to == "t" else to in self.up and self.r[to].holds(ask.version)
        number = ask.version.number if self.rng.random() > self.loss / 3 else 0
        for chunk in ask.chunks:
            tell = PullTell(ask.version, chunk, np.full(8, number, np.uint8))
            self.wire.append((name, (to, tell if here else PullDecline(ask.version, "gone"))))

    def form(self, ballot, members):
        alive = tuple(m for m in members if m == T or m.peer in self.up)
        if self.rng.random() < self.loss / 3:
            self.do(self.p.group_failed(ballot, "broken", (), self.now))
            return
        for m in alive[1:]:
            self.receiver_does(m.peer, self.r[m.peer].formed(ballot, alive, self.now))
        self.do(self.p.formed(ballot, alive, self.now))

    def end(self, start, _):
        whole = {m.peer for m in self.p.formation[1]} - {"t"} == set(self.entered) if self.p.formation else False
        ok = whole and self.rng.random() > self.loss / 3
        for name, e in self.entered.items():
            self.received((name, e), ok or self.rng.random() < 0.2)
        self.sending = None
        self.do(self.p.broadcast_ended(start.version, start.attempt, ok, self.now))

    def received(self, who, ok):
        name, e = who
        r = self.r[name]
        self.writing[name] = None
        why = "corrupt" if not ok and self.rng.random() < 0.5 else ""
        effects = r.receive_ended(e.version, e.attempt, ok, self.now, reason=why)
        if not ok and not why:
            effects += r.disbanded(e.ballot, self.now)
        self.receiver_does(name, effects)

    def engine(self, name):
        taken = self.r[name].take()
        if taken is not None:
            assert self.writing.get(name) != taken[1]
            self.later.append((self.now + 0.3, self.prove, name, taken[0].version))

    def prove(self, name, version):
        proved = self.rng.random() > self.loss / 3
        self.receiver_does(name, self.r[name].applied(version, proved, self.now, reason="" if proved else "probe"))

    def deliver(self):
        for _ in range(len(self.wire)):
            to, message = self.wire.pop(self.rng.randrange(len(self.wire)) if self.loss else 0)
            if self.rng.random() < self.loss:
                continue
            if self.loss and self.rng.random() < 0.1:
                self.wire.append((to, message))
            if to == "t":
                name, report = message
                self.do(self.p.report(name, report, self.now))
            elif to in self.up and self.deaf.get(to, 0.0) <= self.now:
                r = self.r[to]
                match message:
                    case Announce():
                        effects = r.announced("t", message, self.now)
                    case Begin():
                        effects = r.began("t", message, self.now)
                    case (holder, PullTell() as tell):
                        effects = r.told(holder, tell, self.now)
                    case (holder, decline):
                        effects = r.declined(holder, decline, self.now)
                self.receiver_does(to, effects)

    def step(self):
        self.now += 0.1
        due = [x for x in self.later if x[0] <= self.now]
        self.later = [x for x in self.later if x[0] > self.now]
        for _, fn, *args in due:
            fn(*args)
        self.do(self.p.tick(self.now))
        for name in self.up:
            self.receiver_does(name, self.r[name].tick(self.now))
            if self.rng.random() < 0.5:
                self.engine(name)
        self.deliver()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_after_any_trouble_every_live_receiver_proves_the_newest_version(seed, count):
    w = World(random.Random(seed), count)
    w.members()
    for _ in range(150):
        if w.rng.random() < 0.1:
            w.publish()
        if w.rng.random() < 0.03:
            name = w.rng.choice(list(w.r))
            w.up = [x for x in w.r if (x in w.up) != (x == name)] or list(w.r)
            w.members()
        if w.rng.random() < 0.02:
            w.deaf[w.rng.choice(list(w.r))] = w.now + 6.0
        w.step()
    w.loss, w.up = 0.0, list(w.r)
    w.members()
    w.publish()
    newest = w.p.newest
    for k in range(3000):
        if k % 300 == 299:
            w.publish()  # whoever gave up on a version, or sits out, has the next
            newest = w.p.newest
        w.step()
        if newest is not None and all(r.proved == newest for r in w.r.values()) and len(w.slots) == 1:
            break
    assert newest is not None
    assert {name: r.proved for name, r in w.r.items()} == dict.fromkeys(w.r, newest)
