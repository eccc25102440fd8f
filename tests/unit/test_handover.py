"""What a newcomer among the trainers gets: in chunks, whole or not at all, whatever messages do."""

import random

import numpy as np
import pytest

from mesh.effects import Send
from mesh.version import Ballot
from roles.trainer.handover import AT_ONCE, CHUNK_BYTES, SILENT_S, Confirmed, Giving, Loaded, Taking
from transport.messages import Place, StateAsk, StateOffer, StateTaken, StateTell

BALLOT, PLACE = Ballot(3, "holder"), Place(step=7, trained=56, state="ab")
DATA = np.random.default_rng(0).bytes(11 * CHUNK_BYTES + 17)


class Link:
    """Both ends, and messages that are lost, doubled and overtake each other."""

    def __init__(self, data=DATA, limit=2 * len(DATA), loss=0.0, seed=0):
        self.rng, self.loss, self.now = random.Random(seed), loss, 0.0
        self.giving = Giving("newcomer", BALLOT, 7, ("holder", "other"), PLACE, data)
        self.taking, self.limit = None, limit
        self.loaded, self.confirmed, self.most = [], [], 0
        self.wire = []

    def run(self, until=60.0):
        while self.now < until and not self.confirmed and not (self.taking and self.taking.over):
            self.now += 0.05
            self.out(self.giving.tick(self.now))
            if self.taking:
                self.out(self.taking.tick(self.now))
            self.rng.shuffle(self.wire)
            wire, self.wire = self.wire, []
            self.most = max(self.most, sum(isinstance(m, StateTell) for m in wire))
            for message in wire:
                self.deliver(message)
        return self

    def out(self, effects):
        for effect in effects:
            match effect:
                case Send(_, message):
                    copies = 0 if self.rng.random() < self.loss else 2 if self.rng.random() < self.loss else 1
                    self.wire += [message] * copies
                case Loaded():
                    self.loaded.append(effect)
                    self.out(self.taking.taken("", self.now))
                case Confirmed():
                    self.confirmed.append(effect)

    def deliver(self, message):
        match message:
            case StateOffer() if self.taking is None:
                self.taking = Taking("holder", message, self.limit, self.now)
            case StateAsk() | StateTaken():
                self.out(self.giving.receive("newcomer", message))
            case StateTell():
                self.out(self.taking.receive("holder", message, self.now))


@pytest.mark.parametrize("seed", range(20))
def test_all_of_it_arrives_once_whatever_is_lost(seed):
    link = Link(loss=0.3, seed=seed).run()
    [loaded] = link.loaded
    assert loaded.data == DATA
    assert (loaded.holder, loaded.offer.place) == ("holder", PLACE)
    assert link.confirmed == [Confirmed("newcomer", "")]


def test_a_few_chunks_are_on_their_way_at_a_time():
    assert Link().run().most <= AT_ONCE


def test_what_is_empty_or_one_byte_more_than_a_chunk_arrives_too():
    for size in (1, CHUNK_BYTES, CHUNK_BYTES + 1):
        assert Link(data=DATA[:size]).run().loaded[0].data == DATA[:size]


def test_other_bytes_than_were_offered_are_not_loaded():
    link = Link()
    link.giving._data = DATA[:-1] + bytes([DATA[-1] ^ 1])
    link.run()
    assert not link.loaded
    assert link.confirmed == [Confirmed("newcomer", "what arrived is not what was sent (another digest)")]


def test_more_than_this_model_can_have_is_refused_before_anything_is_allocated():
    link = Link(limit=len(DATA) - 1).run()
    assert link.confirmed[0].reason == f"{len(DATA)} bytes are offered, this model has at most {len(DATA) - 1}"
    assert len(link.taking._buffer) == 0


def test_a_holder_that_falls_silent_is_given_up():
    link = Link()
    link.run(until=0.1)
    link.giving.receive = lambda *_: []
    link.run()
    assert link.taking.over
    assert SILENT_S < link.now < SILENT_S + 2


def test_strangers_and_other_ballots_change_nothing():
    giving = Giving("newcomer", BALLOT, 7, ("holder",), PLACE, DATA)
    [offered] = giving.tick(10.0)
    assert giving.receive("stranger", StateAsk(BALLOT, [0])) == []
    assert giving.receive("newcomer", StateAsk(Ballot(2, "holder"), [0])) == []
    assert giving.receive("newcomer", StateAsk(BALLOT, [99])) == []
    taking = Taking("holder", offered.message, len(DATA), 0.0)
    chunk = np.frombuffer(DATA[:CHUNK_BYTES], np.uint8)
    taking.receive("stranger", StateTell(BALLOT, 0, chunk), 0.0)
    taking.receive("holder", StateTell(BALLOT, 0, chunk[:-1]), 0.0)
    taking.receive("holder", StateTell(BALLOT, 99, chunk), 0.0)
    assert len(taking._lacks) == 12
