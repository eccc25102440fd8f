"""Several trainers share the prompts through deaths, splits and newcomers; and the faults that this must find."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from roles.trainer.dataset import Dataset
from roles.trainer.intake import Intake
from tests.sim import trainers
from tests.sim.world import Failure
from transport.credits import TrainerDelivery
from transport.prompts import PromptRef
from transport.view import RolloutView


@pytest.mark.parametrize("seeds", [range(i, i + 6) for i in range(0, 24, 6)], ids=str)
def test_every_prompt_is_trained_once_and_every_credit_accounted_through_deaths_and_splits(seeds):
    worlds = [trainers.scenario(seed, trouble_s=30.0) for seed in seeds]
    assert sum("adopts" in line for world in worlds for line in world.lines) > 0


def test_a_seed_repeats_exactly():
    first, again = trainers.scenario(5, trouble_s=20.0), trainers.scenario(5, trouble_s=20.0)
    assert first.lines == again.lines


# -- planted faults: what is wrong, and what is said of it -------------------------------------------------------------


def claims(wrong: Callable[[Any, int], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """``Dataset.claim`` that also gives out prompts for which ``wrong`` holds."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = Dataset.claim

        def claim(self: Dataset, epoch: int, prompt: int) -> PromptRef | None:
            e = self._epochs.get(epoch)
            if e is not None and wrong(e, prompt):
                place = e.order.tolist().index(prompt)
                if place not in e.open:
                    return self._deal(epoch, e, place)
            return right(self, epoch, prompt)

        patch.setattr(Dataset, "claim", claim)

    return plant


def leaks_on_adoption(patch: pytest.MonkeyPatch) -> None:
    right = RolloutView.order
    patch.setattr(RolloutView, "order", lambda self, credit: None if credit.adopts else right(self, credit))


def ignores_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dataset, "mark_trained", lambda self, epoch, prompt: None)


def keeps_what_went_to_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainerDelivery, "dealt", lambda self: [])


def keeps_credits_when_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainerDelivery, "restart", lambda self, now: [])


def deals_only_what_is_to_come(patch: pytest.MonkeyPatch) -> None:
    right = Dataset.deal

    def deal(self: Dataset, members: Any, me: str) -> None:
        back = {number: e.back for number, e in self._epochs.items()}
        right(self, members, me)
        for number, e in self._epochs.items():
            e.back = back[number]

    patch.setattr(Dataset, "deal", deal)


def hears_its_own_row_only(patch: pytest.MonkeyPatch) -> None:
    right = Intake.committed

    def committed(self: Intake, version: Any, lineage: Any, rows: Any, **more: Any) -> None:
        right(self, version, lineage, {peer: row for peer, row in rows.items() if peer == self.peer.id}, **more)

    patch.setattr(Intake, "committed", committed)


FAULTS = [
    ("adoption without ownership", claims(lambda e, p: not e.mine[p] and not e.ended(p)), "both have prompt"),
    ("adoption of a prompt trained already", claims(lambda e, p: e.has(p)), r"adopts .* was trained into"),
    ("a credit leaked on adoption", leaks_on_adoption, "neither out, held nor taken"),
    ("what others trained is not taken in", ignores_rows, "orders: prompt .* was trained into"),
    ("the rows of others are thrown away", hears_its_own_row_only, "orders: prompt .* was trained into"),
    ("credits stay when their prompts went to others", keeps_what_went_to_others, "both have prompt"),
    ("a dead trainer's prompts are not dealt again", deals_only_what_is_to_come, "is forgotten by"),
    ("a trainer left behind keeps its credits", keeps_credits_when_left_behind, "is not out"),
]


@pytest.mark.parametrize(("name", "plant", "says"), FAULTS, ids=[f[0].replace(" ", "_") for f in FAULTS])
def test_a_planted_fault_is_found(name, plant, says, monkeypatch):
    plant(monkeypatch)
    assert re.search(says, first_failure(range(12))), name


def first_failure(seeds: range) -> str:
    for seed in seeds:
        try:
            trainers.scenario(seed, trouble_s=30.0)
        except Failure as e:
            return str(e).splitlines()[0]
    return ""
