"""What is done to a run, and when, from one integer. Pure: the same seed gives the same plan on every machine.

Blows are dealt from a deck that is shuffled again when it is used up, so that even a short run sees every kind. A blow
names its target by what it does in the run (the publisher, the first seed, some rollout); which peer that is shows when
the blow falls, and ``pick`` decides where several fit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Act = Literal["kill", "stop", "leave"]
Target = Literal["rollout", "trainer", "publisher", "seed", "trainers"]

DECK: tuple[tuple[Act, Target], ...] = (
    ("kill", "rollout"),
    ("kill", "rollout"),
    ("kill", "rollout"),
    ("kill", "trainer"),
    ("kill", "trainer"),
    ("kill", "publisher"),
    ("kill", "publisher"),
    ("kill", "seed"),
    ("kill", "seed"),
    ("stop", "rollout"),
    ("stop", "publisher"),
    ("leave", "rollout"),
)
ALL_TRAINERS: tuple[Act, Target] = ("kill", "trainers")

GAP_S = 1.0, 5.0  # between two blows: some fall while the last one is still being noticed
STOPPED_S = 4.0, 8.0  # the local preset detects a death within 3 s
BACK_S = 0.0, 3.0  # until what was killed is started again


@dataclass(frozen=True)
class Blow:
    after_s: float  # since the last one
    act: Act  # SIGKILL, SIGSTOP and later SIGCONT, or SIGTERM
    target: Target
    pick: float  # in [0, 1): which of several
    lasts_s: float  # until it is continued, or started again

    def __str__(self) -> str:
        how = {"kill": "SIGKILL", "stop": f"SIGSTOP for {self.lasts_s:.1f} s", "leave": "SIGTERM"}[self.act]
        return f"{how} to {self.target}"


def blows(seed: int, *, all_trainers: bool) -> Iterator[Blow]:
    """Endless. ``all_trainers``: now and then all of them are killed at once, and the run must resume."""
    rng = random.Random(seed)
    while True:
        deck = list(DECK) + [ALL_TRAINERS] * all_trainers
        rng.shuffle(deck)
        for act, target in deck:
            lasts = rng.uniform(*(STOPPED_S if act == "stop" else BACK_S))
            yield Blow(rng.uniform(*GAP_S), act, target, rng.random(), lasts)
