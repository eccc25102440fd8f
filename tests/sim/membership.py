"""Scenario: peers of one mesh through bad weather and into calm; promise 1 of the design.

chaos   peers start, die between two effects, stop and wake, leave, restart at their address; links part
calm    links heal, the stopped wake; ``settle`` later every view must be exactly the living
deaths  one more dies, one leaves, one is replaced: in every view within the detection time
"""

from functools import partial

from mesh.membership import LOCAL, MAX_SEEDS, Membership
from mesh.prober import MAX_RELAYS
from tests.sim.node import Node
from tests.sim.world import CALM, Weather, World

SETTLE_S = 16.0
"""From calm to one mesh: detection of those who died last (3 s), a lone peer's slowest Hello (5 s), and a few tries to
reach the dead of the other half (2 s each); all with an awareness that the chaos left behind."""


STRAGGLERS_S = Weather().straggler_s + 0.5


def watch(world: World) -> None:
    """Check the membership's own promises after every event of ``world``."""
    world.invariants.append(partial(_check, {}))
    world.invariants.append(partial(_check_deaths, {}))


def _check_deaths(checked: dict[str, int], world: World) -> None:
    """Nobody is taken for dead without a whole suspicion in which it could have refuted."""
    node = world.touched
    if node is None or checked.get(node.id, 0) == len(node.departures):
        return
    shortest = node.preset.suspicion_s(1, 0)
    for when, gone in node.departures[checked.get(node.id, 0) :]:
        if gone.dead:
            heard = node.suspected.pop(gone.card.id, None)
            assert heard is not None, f"{node.label} took {gone.card.name} for dead without suspicion"
            assert when - heard >= shortest - 1e-6, f"{node.label} took {gone.card.name} for dead too soon"
    checked[node.id] = len(node.departures)


def _check(seen: dict[tuple[str, str], int], world: World) -> None:
    node = world.touched
    if node is None or not node.running or node.membership.over:
        return
    m = node.membership
    alive = {card.id for card in m.alive}
    assert alive == {node.id, *node.view}, f"{node.label}: the view differs from what joined and departed"
    for peer, record in [*m.roster.living.items(), *m.roster.dead.items()]:
        assert record.incarnation <= world.incarnations[peer], f"{node.label} raised the incarnation of {peer}"
        assert record.incarnation >= seen.get((node.id, peer), 0), f"{node.label}: incarnation of {peer} fell"
        seen[node.id, peer] = record.incarnation
    assert len(m.roster.fresh) <= 1 + len(m.roster.living) + len(m.roster.dead), f"{node.label}: news piles up"
    assert len(m.prober.relays) <= MAX_RELAYS, f"{node.label}: relays pile up"
    assert len(m._seeds) <= MAX_SEEDS, f"{node.label}: seeds pile up"


def disagreements(world: World) -> list[str]:
    """Where a view is not exactly the processes that live."""
    wrong = []
    living = {node.id: node for node in world.living}
    for node in world.living:
        seen = {card.id for card in node.membership.alive}
        wrong += [f"{node.label} does not see {living[peer].label}" for peer in living if peer not in seen]
        wrong += [f"{node.label} still sees {c.name}/{c.id[:4]}" for c in node.membership.alive if c.id not in living]
    return wrong


def until_agreed(world: World, within_s: float, what: str) -> float:
    """Run until all views are exact; returns how long it took. Raises Failure when it takes longer."""
    start = world.now
    while disagreements(world):
        if world.now - start > within_s:
            raise world.failure(f"{what}, after {within_s:.1f} s: " + "; ".join(disagreements(world)[:6]))
        world.run(world.now + 0.1)
    return world.now - start


def scenario(seed: int, machine: type[Membership] = Membership) -> World:
    """One life of a mesh. Raises Failure."""
    world = World(seed)
    rng = world.rng
    watch(world)
    addresses = [f"tcp://sim:{i}" for i in range(rng.randint(2, 7))]
    seeds = addresses[: rng.randint(1, 2)]

    def start(address: str) -> None:
        if address not in world.bound:
            Node(world, address, role=rng.choice(("rollout", "trainer", "observer")), seeds=seeds, machine=machine)

    world.weather = Weather(
        delay_s=rng.choice((0.0005, 0.02)),
        jitter_s=rng.choice((0.001, 0.05)),
        loss=rng.choice((0.0, 0.05, 0.3)),
        duplicate=rng.choice((0.0, 0.1)),
        straggler=rng.choice((0.0, 0.05)),
        connect_loss=rng.choice((0.0, 1.0)),
        late_tick=rng.choice((0.0, 0.1)),
    )
    for address in addresses:
        world.at(rng.uniform(0.0, 3.0), partial(start, address))
    calm_at = rng.uniform(6.0, 18.0)
    for _ in range(rng.randint(0, 8)):
        world.at(rng.uniform(1.0, calm_at), partial(_misfortune, world, addresses, start))
    world.run(calm_at)

    world.log(None, "calm")
    world.weather = CALM
    world.heal()
    for node in world.living:
        node.fuse = None
        node.wake()
    for address in seeds:  # without any seed, peers that never met cannot meet
        start(address)
    until_agreed(world, SETTLE_S, "the views are not one")
    world.run(calm_at + STRAGGLERS_S)  # the last messages of the dead: each may raise one for a moment
    until_agreed(world, SETTLE_S, "the views are not one after the last stragglers")
    _quiet(world, 4.0)
    _deaths(world)
    return world


def _misfortune(world: World, addresses: list[str], start) -> None:
    rng = world.rng
    what = rng.choice(("kill", "doom", "restart", "stop", "nap", "part", "part", "deaf", "leave", "start", "update"))
    node = rng.choice(world.living) if world.living else None
    if what == "start" or node is None:
        start(rng.choice(addresses))
    elif what == "kill":
        node.kill()
    elif what == "doom":
        node.doom(rng.randint(0, 12))
        world.after(rng.uniform(0.5, 4.0), partial(start, node.address))
    elif what == "restart":
        node.restart()
    elif what in ("stop", "nap"):
        node.stop()
        world.after(rng.uniform(3.5, 12.0) if what == "stop" else rng.uniform(0.1, 2.5), node.wake)
    elif what == "leave":
        node.leave("finished")
    elif what == "update":
        node.execute(node.membership.update(node.now, highest_term=rng.randint(0, 9)))
    else:
        some = rng.sample(addresses, rng.randint(1, len(addresses) - 1))
        rest = [a for a in addresses if a not in some]
        world.log(None, f"{'part' if what == 'part' else 'deaf'}: {some} | {rest}")
        world.after(rng.uniform(0.5, 12.0), world.cut(some, rest, both=what == "part"))


def _quiet(world: World, for_s: float) -> None:
    """In calm weather nobody who lives is taken for dead."""
    before = {node.id: len(node.departures) for node in world.living}
    world.run(world.now + for_s)
    for node in world.living:
        for _, gone in node.departures[before[node.id] :]:
            if gone.card.id in before:
                raise world.failure(f"{node.label} took {gone.card.name} for dead in calm weather: {gone.reason}")


def _deaths(world: World) -> None:
    rng = world.rng
    size = len(world.living)
    limit = LOCAL.detection_s(size) + size * LOCAL.period_s  # it may be the last that every round comes to
    if len(world.living) > 1:
        rng.choice(world.living).kill()
        until_agreed(world, limit, "a dead peer is still seen")
    if len(world.living) > 1:
        leaver = rng.choice(world.living)
        leaver.leave("finished")
        until_agreed(world, 1.0, "one that left is still seen")
        for node in world.living:
            if node.membership.reason_of(leaver.id) != "finished":
                raise world.failure(f"{node.label} does not know why {leaver.label} left")
    if world.living:
        rng.choice(world.living).restart(seeds=[node.address for node in world.living])
        until_agreed(world, max(limit, 8.0), "a replaced peer is still seen, or its successor is not")
