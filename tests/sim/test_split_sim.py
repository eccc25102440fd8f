"""Two halves that trained alone become one again: which weights go on, and who keeps its id."""

from collections import Counter

import pytest

from tests.sim.split import scenario


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_lineage_with_more_groups_trained_wins_and_nobody_starts_again(first):
    for seed in range(first, first + 20):
        scenario(seed)


def test_the_seeds_have_every_outcome():
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = scenario(seed)
        few, many = world.sides
        line = " ".join(world.lines)
        seen["fork"] += world.forked
        seen["few won"] += world.forked and len(few) < len(many) and world.kept[0]
        seen["many won"] += world.forked and len(few) < len(many) and world.kept[1]
        seen["waited"] += "are lost at once" in line
    assert all(seen[what] > 2 for what in ("fork", "few won", "many won", "waited")), seen
