"""Publisher and receivers over real gloo groups, buffers and threads.

The mesh itself is a hub of ports in this process: each port has a loop thread of its own, real convening and a real
store; messages pass between them as objects. What may go wrong is put in by ``hub.drop`` and by wrapping a formation.
"""

import heapq
import itertools
import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from mesh.config import Config, Weights
from mesh.convening import Convening, Form
from mesh.effects import Note, Send
from mesh.identity import PeerCard
from mesh.version import Ballot, Lineage, Version
from transport.formation import Formation
from transport.messages import (
    Accept,
    Announce,
    Begin,
    Decline,
    Go,
    Invite,
    Member,
    Probe,
    PullAsk,
    PullDecline,
    PullTell,
)
from transport.store import MeshStore
from transport.store_host import StoreHost
from transport.weights.manifest import Manifest
from transport.weights.mover import peer_name
from transport.weights.proof import Proof
from transport.weights.publisher import Publisher
from transport.weights.receiver import Receiver

WEIGHTS = Weights(
    bucket_mib=1, op_timeout_s=4.0, ready_wait_s=1.0, form_timeout_s=5.0, reform_interval_s=0.1
)  # fmt: skip
TERM = Ballot(3, "t")
LINEAGE = Lineage().open(TERM, 0)
PROBE = Probe(np.arange(4, dtype=np.int32), np.zeros(3, np.float32))


class Hub:
    def __init__(self):
        self.ports = {}
        self.drop = lambda sender, to, message: False
        self.notes = []

    def alive(self):
        return [p for p in self.ports.values() if not p.dead]

    def changed(self):
        for port in self.alive():
            port.post(port.members_changed)


class HubPort:
    """What ``transport.port.Port`` asks for, on one thread."""

    def __init__(self, hub, peer, role):
        self.id, self.hub = peer, hub
        self.card = PeerCard(peer, f"{role}-{peer}", role, f"host-{peer}", "", "")
        self.config = Config(weights=WEIGHTS)
        self.dead = False
        self.error = None
        self.convening = Convening(peer, "weights")
        self.stores = StoreHost()
        self._handlers, self._go, self._on_members, self._timers = {}, [], [], []
        self._queue = queue.Queue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self):
        self.every(0.05, lambda: self._do(self.convening.tick(time.monotonic())))
        self.hub.ports[self.id] = self
        self._thread.start()
        self.hub.changed()

    def stop(self):
        self.dead = True
        self._queue.put(lambda: None)
        self._thread.join(5.0)
        self.hub.changed()

    def on(self, kind, handler):
        self._handlers.setdefault(kind, []).append(handler)

    def on_go(self, kind, handler):
        self._go.append(handler)

    def on_members(self, handler):
        self._on_members.append(handler)

    def every(self, period_s, fn):
        heapq.heappush(self._timers, (time.monotonic() + period_s, next(self._order), period_s, fn))

    def post(self, fn):
        self._queue.put(fn)

    def call(self, fn, timeout_s=10.0):
        future = Future()
        self.post(lambda: future.set_result(fn()))
        return future.result(timeout_s)

    def send(self, to, message, *, bulk=False):
        port = self.hub.ports.get(to)
        if port is None or port.dead or self.hub.drop(self.id, to, message):
            return False
        port.post(lambda: port.receive(self.id, message))
        return True

    def live(self, role=None):
        cards = sorted((p.card for p in self.hub.alive()), key=lambda c: c.id)
        return [c for c in cards if role in (None, c.role)]

    def convene(self, kind, members):
        self._do(self.convening.convene(members, time.monotonic()))

    def note(self, text, level="info"):
        self.hub.notes.append(text)

    def receive(self, sender, message):
        if isinstance(message, Invite | Accept | Decline | Go):
            self._do(self.convening.receive(sender, message, time.monotonic()))
        for handler in self._handlers.get(type(message), ()):
            handler(sender, message)

    def members_changed(self):
        self.convening.live([c.id for c in self.live()])
        for handler in self._on_members:
            handler()

    def build(self, go, abandon):
        host = self.hub.ports[go.ballot.convener]
        request = lambda message, t: host.call(lambda: host.stores.receive(self.id, message), t)  # noqa: E731
        store = MeshStore(go.kind, go.ballot, request, WEIGHTS.form_timeout_s, abandon)
        return Formation.build(
            go, Member(self.id), store, host="127.0.0.1", timeout_s=WEIGHTS.form_timeout_s, abandon=abandon
        )

    def _do(self, effects):
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    self.send(to, message)
                case Note(text=text):
                    self.note(text)
                case Form(go):
                    if go.ballot.convener == self.id:
                        self.stores.open(go.kind, go.ballot)
                    for handler in self._go:
                        handler(go)

    def _loop(self):
        try:
            while not self.dead:
                while self._timers and self._timers[0][0] <= time.monotonic():
                    _, _, period, fn = heapq.heappop(self._timers)
                    fn()
                    self.every(period, fn)
                try:
                    self._queue.get(timeout=max(0.0, self._timers[0][0] - time.monotonic()))()
                except queue.Empty:
                    continue
        except BaseException as e:
            self.error = e
            raise


class Spoiled:
    """A formation in which this member's ``bucket``-th operation flips a byte after it arrived, ``times`` times."""

    def __init__(self, formation, bucket, state):
        self._formation, self._bucket, self._state, self._count = formation, bucket, state, 0

    def __getattr__(self, name):
        return getattr(self._formation, name)

    def broadcast(self, tensor, *args):
        self._formation.broadcast(tensor, *args)
        if self._count == self._bucket and self._state["times"] > 0:
            self._state["times"] -= 1
            tensor[5] ^= 1
        self._count += 1


@pytest.fixture
def hub():
    hub = Hub()
    hub.open = []
    yield hub
    for part in hub.open:
        part.close()
    for port in hub.ports.values():
        port.stop()
    assert [p.error for p in hub.ports.values() if p.error] == []


def state(seed, dtype=torch.float32):
    """About 3 MiB in float32, so several buckets, the last one short, and a tied pair."""
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "embed": torch.randn(500, 700, generator=g).to(dtype),
        "layer.weight": torch.randn(640, 640, generator=g).to(dtype),
        "layer.steps": torch.arange(7) + seed,
    }
    tensors["head"] = tensors["embed"]
    return tensors


def publisher(hub, manifest, peer="t", weights=WEIGHTS):
    port = HubPort(hub, peer, "trainer")
    p = Publisher(port, manifest, weights, port.build)
    hub.open.append(p)
    port.start()
    return p


def receiver(hub, peer, build=None):
    port = HubPort(hub, peer, "rollout")
    r = Receiver(port, WEIGHTS, build(port) if build else port.build, engine_build="test")
    hub.open.append(r)
    port.start()
    return r


def soon(what, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.005)
    return value


def prove(r, version, timeout_s=15.0):
    """Play the engine until ``version`` is taken; returns a copy of its bytes as tensors by name."""

    def take():
        arrived = r.offered()
        if arrived is None:
            return None
        got = {name: t.clone() for name, t in arrived.manifest.views(arrived.flat).items()}
        r.took(arrived, Proof(arrived.version, True, "", 0.0, 1e-3, 1.0, f"d{arrived.version}", 0.0))
        return SimpleNamespace(tensors=got, arrived=arrived) if arrived.version == version else None

    return soon(take, timeout_s)


def same(got, sent):
    return got.keys() == sent.keys() and all(torch.equal(got[n], sent[n]) for n in sent)


def v(number, term=TERM):
    return Version(term, number)


def test_three_versions_arrive_bit_identical_at_two_receivers(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    receivers = [receiver(hub, "a"), receiver(hub, "b")]
    p.open_term(LINEAGE)
    for number in range(3):
        sent = state(number)
        assert p.publish(v(number), sent, PROBE)
        for r in receivers:
            taken = prove(r, v(number))
            assert same(taken.tensors, sent)
            assert taken.arrived.lineage == LINEAGE
            assert taken.arrived.manifest.digest == p.manifest.digest
        soon(lambda n=number: set(p.proved_by(v(n))) == {"a", "b"})
        assert p.wait_until_proved(v(number), 1.0)
    assert p.stats().publications == p.stats().broadcasts == 3
    assert p.proved_by(v(3)) == ()


def test_a_float32_master_travels_as_bfloat16(hub):
    sent = state(1)
    p = publisher(hub, Manifest.from_state(sent, wire_dtype=torch.bfloat16))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), sent, PROBE)
    got = prove(r, v(0)).tensors
    assert torch.equal(got["embed"], sent["embed"].to(torch.bfloat16))
    assert torch.equal(got["head"], got["embed"])
    assert torch.equal(got["layer.steps"], sent["layer.steps"])


def test_a_corrupt_bucket_is_refused_by_name_and_the_version_comes_again(hub):
    spoil = {"times": 1}
    p = publisher(hub, Manifest.from_state(state(0)))
    good = receiver(hub, "a")
    bad = receiver(hub, "b", lambda port: lambda go, abandon: Spoiled(port.build(go, abandon), 1, spoil))
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    assert same(prove(good, v(0)).tensors, state(0))
    assert same(prove(bad, v(0)).tensors, state(0))
    assert spoil["times"] == 0
    [said] = [n for n in hub.notes if "is refused" in n]
    assert "v0@3 of trainer-t@host-t is refused: bucket 1 of" in said
    assert (p.stats().broadcasts, bad.stats().pulls) == (1, 1), "it disturbs nobody but who sent it again"


def test_a_receiver_that_never_says_ready_sits_out_and_the_others_go_on(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    good = receiver(hub, "a")
    deaf = receiver(hub, "b")
    hub.drop = lambda sender, to, message: to == "b" and isinstance(message, Announce)
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    assert same(prove(good, v(0)).tensors, state(0))
    assert any("rollout-b@host-b sits out 1 publication: was not ready for v0@3 within 1 s" in n for n in hub.notes)
    hub.drop = lambda sender, to, message: False
    p.publish(v(1), state(1), PROBE)
    assert same(prove(good, v(1)).tensors, state(1))
    assert same(prove(deaf, v(1)).tensors, state(1))


def test_a_late_joiner_gets_the_newest_version(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    early = receiver(hub, "a")
    p.open_term(LINEAGE)
    for number in range(2):
        p.publish(v(number), state(number), PROBE)
        prove(early, v(number))
    late = receiver(hub, "b")
    assert same(prove(late, v(1)).tensors, state(1))
    assert early.offered() is None
    assert late.stats().pulls == 1
    assert p.stats().broadcasts == 2, "who has the version is not disturbed for who joins late"
    assert set(soon(lambda: len(p.proved_by(v(1))) == 2 and p.proved_by(v(1)))) == {"a", "b"}


def test_a_version_published_before_anybody_is_there_reaches_who_comes(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    assert same(prove(receiver(hub, "a"), v(0)).tensors, state(0))


def test_a_receiver_that_dies_does_not_keep_the_others_from_the_next_version(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    alive, dying = receiver(hub, "a"), receiver(hub, "b")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    prove(alive, v(0))
    prove(dying, v(0))
    hub.ports["b"].stop()
    p.publish(v(1), state(1), PROBE)
    assert same(prove(alive, v(1)).tensors, state(1))


def test_a_receiver_that_dies_inside_a_broadcast_costs_no_version(hub):
    def dies(port):
        def build(go, abandon):
            formation = port.build(go, abandon)
            inner = formation.broadcast

            def broadcast(tensor, *args):
                inner(tensor, *args)
                formation.close()
                threading.Thread(target=port.stop, daemon=True).start()

            formation.broadcast = broadcast
            return formation

        return build

    p = publisher(hub, Manifest.from_state(state(0)))
    alive = receiver(hub, "a")
    receiver(hub, "b", dies)
    soon(lambda: len(hub.ports) == 3)
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    assert same(prove(alive, v(0)).tensors, state(0))
    soon(lambda: hub.ports["b"].dead)


def test_newest_wins_when_the_trainer_is_faster_than_the_network(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    hub.drop = lambda sender, to, message: isinstance(message, Begin)
    p.open_term(LINEAGE)
    taken = [p.publish(v(n), state(n), PROBE) for n in range(8)]
    hub.drop = lambda sender, to, message: False
    if not taken[-1]:  # skipped: it may be made up for
        soon(lambda: p.publish(v(7), state(7), PROBE))
    assert same(prove(r, v(7)).tensors, state(7))
    stats = p.stats()
    assert stats.skipped == taken.count(False)
    assert stats.publications == 8 - taken[:-1].count(False)
    assert stats.broadcasts < 8


def test_a_pinned_engine_gets_that_version_and_then_the_newest(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    r.pin(v(1))
    for number in range(4):
        p.publish(v(number), state(number), PROBE)
        soon(lambda n=number: any(f"verified v{n}@3" in line for line in p.table()))
    arrived = soon(r.offered)
    assert arrived.version == v(1)
    assert same(dict(arrived.manifest.views(arrived.flat)), state(1))
    assert r.offered() is None
    r.took(arrived, Proof(v(1), True, "", 0.0, 0.0, 0.0, "", 0.0))
    r.pin(None)
    assert same(prove(r, v(3)).tensors, state(3))


def test_a_lost_tenth_of_all_messages_loses_no_version(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    receivers = [receiver(hub, "a"), receiver(hub, "b")]
    counter = itertools.count()
    hub.drop = lambda sender, to, message: next(counter) % 10 == 7
    p.open_term(LINEAGE)
    for number in range(3):
        p.publish(v(number), state(number), PROBE)
        for r in receivers:
            assert same(prove(r, v(number)).tensors, state(number))


def test_a_new_publisher_takes_over_and_the_old_term_is_refused(hub):
    manifest = Manifest.from_state(state(0))
    first, second = publisher(hub, manifest, "t"), publisher(hub, manifest, "u")
    r = receiver(hub, "a")
    first.open_term(LINEAGE)
    first.publish(v(0), state(0), PROBE)
    prove(r, v(0))
    hub.ports["t"].stop()
    newer = LINEAGE.open(Ballot(5, "u"), 0)
    second.open_term(newer)
    second.publish(v(0, Ballot(5, "u")), state(4), PROBE)
    assert same(prove(r, v(0, Ballot(5, "u"))).tensors, state(4))
    with pytest.raises(ValueError, match="not of the term that is open"):
        second.publish(v(1), state(1), PROBE)


def test_what_a_rollout_proved_is_pulled_from_it_when_the_publisher_does_not_answer(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    early = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    prove(early, v(0))
    soon(lambda: p.proved_by(v(0)))
    hub.drop = lambda sender, to, message: to == "t" and isinstance(message, PullAsk)
    late = receiver(hub, "b")
    assert same(prove(late, v(0)).tensors, state(0))
    assert early.stats().served_bytes == late.stats().pulled_bytes == p.manifest.nbytes


def test_a_pull_goes_on_at_another_holder_when_one_dies(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    receivers = [receiver(hub, peer) for peer in "abc"]
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    for r in receivers:
        prove(r, v(0))
    soon(lambda: len(p.proved_by(v(0))) == 3)
    told = []

    def dies_after_one_chunk(sender, to, message):
        if isinstance(message, PullTell):
            told.append(sender)
            if told.count(told[0]) == 2 and sender == told[0]:
                threading.Thread(target=hub.ports[sender].stop, daemon=True).start()
            return told.count(told[0]) > 1 and sender == told[0]
        return False

    hub.drop = dies_after_one_chunk
    late = receiver(hub, "d")
    assert same(prove(late, v(0)).tensors, state(0))
    assert hub.ports[told[0]].dead
    assert set(told) > {told[0]}


def test_a_pull_never_costs_the_trainer_a_snapshot(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    prove(r, v(0))
    soon(lambda: p.proved_by(v(0)))
    puller = HubPort(hub, "x", "observer")
    declined = []
    puller.on(PullDecline, lambda sender, message: declined.append(message.version))
    puller.start()
    ask = PullAsk(v(0), [0])
    puller.post(lambda: puller.send("t", ask))
    soon(lambda: p.stats().served_bytes)
    hub.drop = lambda sender, to, message: isinstance(message, Begin)
    assert p.publish(v(1), state(1), PROBE)
    soon(lambda: p._schedule._sending)  # and nobody takes part: it goes on until its deadline
    assert p.publish(v(2), state(2), PROBE)
    assert sorted(owner for _, owner in p._leases.held()) == ["v0@3", "v1@3", "v2@3"]
    assert p.publish(v(3), state(3), PROBE)
    puller.post(lambda: puller.send("t", ask))
    assert soon(lambda: declined) == [v(0)]
    hub.drop = lambda sender, to, message: False
    assert same(prove(r, v(3)).tensors, state(3))
    assert p.stats().skipped == 0


def test_a_new_term_with_the_same_weights_moves_no_bytes(hub):
    manifest = Manifest.from_state(state(0))
    first, second = publisher(hub, manifest, "t"), publisher(hub, manifest, "u")
    receivers = [receiver(hub, "a"), receiver(hub, "b")]
    first.open_term(LINEAGE)
    for number in range(2):
        first.publish(v(number), state(number), PROBE)
        for r in receivers:
            prove(r, v(number))
    hub.ports["t"].stop()
    term = Ballot(5, "u")
    second.open_term(LINEAGE.open(term, 1))
    second.publish(v(1, term), state(1), PROBE)
    for r in receivers:
        taken = prove(r, v(1, term))
        assert same(taken.tensors, state(1))
        assert taken.arrived.lineage == LINEAGE.open(term, 1)
        assert (r.stats().adopted, r.stats().pulled_bytes) == (1, 0)
    soon(lambda: len(second.proved_by(v(1, term))) == 2)
    assert second.stats().broadcasts == second.stats().served_bytes == 0
    second.publish(v(2, term), state(2), PROBE)
    for r in receivers:
        assert same(prove(r, v(2, term)).tensors, state(2))


def test_a_publisher_that_another_has_replaced_is_refused_while_that_one_lives(hub):
    manifest = Manifest.from_state(state(0))
    first, second = publisher(hub, manifest, "t"), publisher(hub, manifest, "u")
    r = receiver(hub, "a")
    first.open_term(LINEAGE)
    first.publish(v(0), state(0), PROBE)
    prove(r, v(0))
    term = Ballot(5, "u")
    second.open_term(LINEAGE.open(term, 0))
    second.publish(v(0, term), state(3), PROBE)
    assert same(prove(r, v(0, term)).tensors, state(3))
    first.publish(v(1), state(1), PROBE)  # it has not heard of its successor
    second.publish(v(1, term), state(4), PROBE)
    taken = []
    while not taken or taken[-1] != v(1, term):
        arrived = soon(r.offered)
        r.took(arrived, Proof(arrived.version, True, "", 0.0, 1e-3, 1.0, "", 0.0))
        taken.append(arrived.version)
    assert {version.term for version in taken} == {term}
    soon(lambda: second.proved_by(v(1, term)))


def test_weights_travel_by_the_endpoint_alone_when_so_set(hub):
    p = publisher(hub, Manifest.from_state(state(0)), weights=msgspec.structs.replace(WEIGHTS, transport="endpoint"))
    receivers = [receiver(hub, "a", lambda port: None), receiver(hub, "b", lambda port: None)]
    p.open_term(LINEAGE)
    for number in range(3):
        p.publish(v(number), state(number), PROBE)
        for r in receivers:
            assert same(prove(r, v(number)).tensors, state(number))
    assert p.stats().broadcasts == 0
    assert p.stats().served_bytes >= 3 * p.manifest.nbytes


def test_nobody_proves_in_time_and_the_error_has_a_line_a_receiver(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    arrived = soon(r.offered)
    r.refused(arrived, "lm_head still holds its dummy weights")
    soon(lambda: any("refused v0@3" in line for line in p.table()))
    with pytest.raises(
        TimeoutError, match=r"no rollout proved v0@3 .*\n  rollout-a@host-a: verified v0@3, proved"
    ) as e:
        p.wait_until_proved(v(0), 0.05)
    assert "refused v0@3: lm_head still holds its dummy weights" in str(e.value)
    assert peer_name(hub.ports["t"], "zz") == "peer zz (gone)"


def test_versions_only_rise_and_need_a_term(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    with pytest.raises(ValueError, match="open_term comes first"):
        p.publish(v(0), state(0), PROBE)
    p.open_term(LINEAGE)
    p.publish(v(1), state(0), PROBE)
    with pytest.raises(ValueError, match="versions only rise"):
        p.publish(v(1), state(0), PROBE)


def test_a_retired_publisher_sends_no_more_and_gives_its_buffers_back(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    prove(r, v(0))
    p.retire()
    soon(lambda: p._leases.held() == [])
    with pytest.raises(ValueError, match="open_term comes first"):
        p.publish(v(1), state(1), PROBE)


def test_engines_of_one_build_that_differ_are_named(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    receivers = [receiver(hub, "a"), receiver(hub, "b")]
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    for i, r in enumerate(receivers):
        arrived = soon(r.offered)
        r.took(arrived, Proof(arrived.version, True, "", 0.0, 0.0, 0.0, f"digest{i}", 0.0))
    [said] = soon(lambda: [n for n in hub.notes if "hold different weights under v0@3" in n])
    assert "rollout-a@host-a" in said
    assert "rollout-b@host-b" in said


def test_a_restarted_engine_gets_the_newest_version_again(hub):
    p = publisher(hub, Manifest.from_state(state(0)))
    r = receiver(hub, "a")
    p.open_term(LINEAGE)
    p.publish(v(0), state(0), PROBE)
    prove(r, v(0))
    soon(lambda: p.proved_by(v(0)))
    r.forget()
    assert same(prove(r, v(0)).tensors, state(0))
    soon(lambda: p.proved_by(v(0)))
