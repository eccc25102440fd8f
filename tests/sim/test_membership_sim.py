"""Promise 1 on a simulated network: a live peer is in every live peer's view soon, a dead one leaves every view within
the detection time, healed halves become one. And the simulator itself: it replays."""

import pytest

from mesh.effects import Send
from tests.sim.membership import disagreements, scenario, until_agreed, watch
from tests.sim.node import Node, Part
from tests.sim.world import CALM, Weather, World
from transport.messages import Look, Status


def mesh(world: World, size: int, **settings) -> list[Node]:
    watch(world)
    nodes = [Node(world, f"tcp://sim:{i}", seeds=["tcp://sim:0"], **settings) for i in range(size)]
    until_agreed(world, 10.0, "the peers do not find each other")
    world.run(world.now + 2.0)
    return nodes


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_views_are_exactly_the_living_after_any_chaos(first):
    for seed in range(first, first + 50):
        scenario(seed)


def test_a_seed_replays_exactly():
    one, other = scenario(11), scenario(11)
    assert one.lines == other.lines
    assert (one.events, one.sent) == (other.events, other.sent)
    assert one.lines != scenario(12).lines


@pytest.mark.parametrize("seed", range(3))
def test_halves_that_parted_each_go_on_and_become_one_again(seed):
    world = World(seed)
    nodes = mesh(world, 7)
    left, right = nodes[:3], nodes[3:]
    heal = world.cut([n.address for n in left], [n.address for n in right])
    world.run(world.now + 30.0)
    for half in (left, right):
        for node in half:
            assert {card.id for card in node.membership.alive} == {n.id for n in half}
    heal()
    took = until_agreed(world, 15.0, "the halves do not become one")
    assert took > 0
    world.run(world.now + 20.0)
    assert not disagreements(world)


def test_a_restarted_peer_is_a_new_member_and_the_old_one_dies():
    world = World(1)
    nodes = mesh(world, 4)
    old = nodes[2].id
    new = nodes[2].restart()
    until_agreed(world, 6.0, "the restarted peer is not seen, or the old one still is")
    for node in world.living:
        assert node.membership.state_of(new.id) == "alive"
        assert node is new or node.membership.state_of(old) == "dead"


def test_a_peer_that_was_stopped_for_long_comes_back_under_a_new_id():
    world = World(2)
    nodes = mesh(world, 4)
    old = nodes[1].id
    nodes[1].stop()
    world.run(world.now + 60.0)
    nodes[1].wake()
    assert nodes[1].id != old
    until_agreed(world, 10.0, "the peer that woke is not seen")


def test_short_stops_and_late_ticks_kill_nobody():
    world = World(3)
    nodes = mesh(world, 5)
    world.weather = Weather(jitter_s=0.01, late_tick=0.2)
    for i in range(400):
        node = world.rng.choice(nodes)
        world.at(world.now + i * 0.3, node.stop)
        world.at(world.now + i * 0.3 + 0.3 * world.rng.random(), node.wake)
    world.run(world.now + 125.0)
    assert [gone for node in nodes for gone in node.departures] == []


def test_a_third_of_all_messages_lost_kills_hardly_anybody_and_nobody_for_long():
    world = World(4)
    nodes = mesh(world, 6)
    world.weather = Weather(loss=0.3, duplicate=0.1, jitter_s=0.02)
    world.run(world.now + 120.0)
    departures = sum(len(node.departures) for node in nodes)
    world.weather = CALM
    until_agreed(world, 10.0, "the views are not one again")
    assert departures <= 6  # of 30 pairs in 200 periods; textbook SWIM has hundreds


class Looks(Part):
    """Asks every member for its status until it has it."""

    takes = (Look, Status)

    def __init__(self, node: Node):
        super().__init__(node)
        self.seen: dict[str, None] = {}

    def tick(self, now: float) -> list[Send]:
        others = [card.id for card in self.node.membership.alive if card.id != self.node.id]
        return [Send(peer, Look(1)) for peer in others if peer not in self.seen]

    def receive(self, sender: str, message: Look | Status, now: float) -> list[Send]:
        if isinstance(message, Status):
            self.seen[sender] = None
            return []
        return [Send(sender, Status(1, "here", None, {}, {}))]


def test_further_machines_run_in_the_same_node():
    world = World(6)
    nodes = mesh(world, 3, parts=[Looks])
    for node in nodes:
        assert sorted(node.parts[0].seen) == sorted(other.id for other in nodes if other is not node)
