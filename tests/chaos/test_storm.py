"""Short versions, for every change; `make chaos` has the long one."""

import pytest

from tests.chaos.checks import shared_memory
from tests.chaos.network import refused
from tests.chaos.parted import Parted
from tests.chaos.storm import Size
from tests.chaos.trial import trial

SEED = 1708  # its first seven blows, within 14 s, are of all kinds
SHORT = Size(trainers=2, rollouts=3, steps=130, forked=True)


@pytest.mark.timeout(600)
def test_a_run_goes_on_whatever_dies_or_stops(tmp_path):
    checks, kills = trial(tmp_path, SEED, SHORT, shared_memory(), groups=None)
    assert [str(check) for check in checks if check.complaints] == []
    assert kills >= 3, "a storm that kills nobody shows nothing"


@pytest.mark.timeout(600)
def test_two_halves_of_a_parted_network_become_one_mesh_again(tmp_path):
    if why := refused():
        pytest.skip(why)
    parted = Parted(tmp_path)
    parted()
    assert [str(check) for check in parted.checks if check.complaints] == []
