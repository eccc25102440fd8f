"""What a member costs does not grow with the mesh: on the simulated clock, in counted bytes. 300 peers are more than
twice the connections that one holds; ``make sim-scale`` has 1,000, and prints the figures."""

import math
import os

import pytest

from mesh.membership import LAN
from mesh.roster import RETRANSMIT
from tests.sim.scale import Figures, measure
from transport.endpoint import CONNECTIONS

LARGE = int(os.environ.get("MEMBERS", "300"))


@pytest.fixture(scope="module")
def figures() -> dict[int, Figures]:
    return {size: measure(size) for size in (10, 100, LARGE)}


def test_in_quiet_a_member_of_a_large_mesh_sends_what_a_member_of_ten_sends(figures):
    """A ping and an ack a period, and now and then digests: nothing of it depends on the size. The twentieth is for the
    end of a round, at which the next may begin with the same peer."""
    for size in (100, LARGE):
        assert figures[size].quiet.bytes < 1.05 * figures[10].quiet.bytes
        assert figures[size].quiet.messages < 1.05 * figures[10].quiet.messages


@pytest.mark.parametrize("change", ["join", "death"])
def test_news_costs_each_member_the_logarithm_of_the_mesh(figures, change):
    """Everybody repeats a piece ``RETRANSMIT ceil(log10(n + 1))`` times: SWIM's price for reaching all. Half as much
    again is for messages that carried it alone here and together with other news there."""
    small, repeats = getattr(figures[10], change), {n: RETRANSMIT * math.ceil(math.log10(n + 1)) for n in figures}
    for size in (100, LARGE):
        assert getattr(figures[size], change).bytes < 1.5 * small.bytes * repeats[size] / repeats[10]


def test_connections_are_bounded_and_none_is_opened_without_a_message(figures):
    for f in figures.values():
        assert f.connections <= min(f.size + 1, CONNECTIONS)
        assert f.quiet.opened <= f.quiet.messages
    assert figures[10].quiet.opened == 0


def test_a_newcomer_is_seen_by_all_within_seconds(figures):
    """News reaches all in about seven rounds; twice that, since the newcomer has to be told of them too."""
    for f in figures.values():
        assert f.join_s < 14 * LAN.gossip_s


def test_a_death_is_noticed_within_the_detection_time_of_a_mesh_of_that_size(figures):
    """Three periods more: who is silent may be probed late, and the last view waits for the news."""
    for f in figures.values():
        assert f.gone_s < LAN.detection_s(f.size) + 3 * LAN.period_s
