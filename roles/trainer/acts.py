"""What a trainer's driver does for ``Company``: the contract of the two.

One ``Company`` a process, all of its methods on one thread. They return effects, which are executed in order: ``Send``
and ``Note`` as everywhere, and those below. ``now`` is the clock of the peer's other machines. The driver

* hands every message of ``STEP_MESSAGES`` to ``receive``, and calls ``tick`` several times a second;
* calls ``live`` with the ids of all live trainers on every change of membership, ``forming`` on every ``Form`` of kind
  gradients. A peer that slept is a new peer, with a new Company;
* calls ``ready(step, groups, tokens)`` when its gradient for ``step`` is there (the number that the weights get by it,
  ``place.step + 1``), or with 0 groups when it has nothing to contribute; again when that has changed. What was said
  holds, in every formation, until that step is applied;
* may call ``hold(newcomer)``; whoever seeks is taken in without it.

The main thread computes gradients and takes optimizer steps; a thread of its own runs the collectives, so that an
all-reduce never waits for a gradient. What one of them has finished is told on the Company's thread.
"""

from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.version import Ballot
from transport.messages import (
    Place,
    StepGo,
    StepHere,
    StepHold,
    StepOver,
    StepReady,
    StepReduced,
    StepSeek,
    StepStanding,
)

STEP_MESSAGES = (StepSeek, StepHere, StepStanding, StepReady, StepGo, StepReduced, StepHold, StepOver)


@dataclass(frozen=True)
class Convene:
    """Raise the convening's floor to ``above``, the highest term on live cards and in the run's term file; then convene
    these, in this order, one ``Member(peer, 0)`` each."""

    members: tuple[PeerId, ...]
    above: int


@dataclass(frozen=True)
class Build:
    """Build the group of this ballot, and no other; then ``formed(ballot)``, which says that all ranks are connected,
    or ``broken(ballot, reason)``. A Go that is not answered by this effect is not followed: the group there was goes
    on."""

    ballot: Ballot
    members: tuple[PeerId, ...]


@dataclass(frozen=True)
class Abandon:
    """The formation is over. End what is built, runs or is transferred in it (the event ``abandon`` of
    ``transport.formation``) and drop its group. What is reduced already stays."""

    ballot: Ballot


@dataclass(frozen=True)
class Opened:
    """All members stand at ``place``. Open the term ``ballot`` on ``place.lineage`` (term file synced first, card
    updated); the first of ``members`` publishes what it holds. Buffers of other reductions are free now. A gradient
    that was ready is still good; where there is none, for LeftBehind or a transfer, it is begun."""

    ballot: Ballot
    members: tuple[PeerId, ...]
    place: Place


@dataclass(frozen=True)
class Reduce:
    """All-reduce in this ballot's group, at once, in a *fresh* buffer: a copy of the gradient that is ready when this
    trainer is among ``contributors``, else zeros; with tokens, the ids it trains and ledger rows. Then
    ``reduced(ballot, step, digest)``, the digest over the result of all of it, or ``reduce_failed(ballot, step,
    reason)``.

    The result is kept under exactly (ballot, step) until it is applied or the next formation opens. The buffer of a
    failed or abandoned operation is out of use until ``Formation.ended()``. The local gradient stays as it is."""

    ballot: Ballot
    step: int
    contributors: tuple[PeerId, ...]


@dataclass(frozen=True)
class Apply:
    """Take the optimizer step with what (ballot, step) reduced, once. The others wait for it: a gradient still being
    computed is given up between two of its batches. Then ``applied(step, trained, state)``, where ``trained`` counts
    all groups in the weights and ``state`` is a digest of weights and optimizer (empty: none was taken); only then
    publish, record, settle and save.

    What the contributors brought is trained now, a dead one's too: by the rows that were reduced. Who is not among them
    has a gradient of old weights: it is void, and its groups go to the next step if they are still fresh."""

    ballot: Ballot
    step: int
    contributors: tuple[PeerId, ...]


@dataclass(frozen=True)
class Transfer:
    """All members stand at ``step``: send ``newcomer`` weights, optimizer, scheduler, random state and trained bits,
    with ballot, members and ``Company.place``; when it confirms, ``transferred(newcomer)``, else
    ``transfer_failed(newcomer, reason)``.

    The newcomer calls ``admitted(ballot, members, place)`` when all of it is loaded and its digest is right. It reports
    an optimizer step that is still under way before that."""

    ballot: Ballot
    step: int
    newcomer: PeerId
    members: tuple[PeerId, ...]


@dataclass(frozen=True)
class LeftBehind:
    """This trainer is out. Its lineage is superseded, with all credits, groups and gradients of it: say so loudly. It
    asks to be taken in, by itself."""

    reason: str


@dataclass(frozen=True)
class Diverged:
    """What must be alike is not: ``digests`` by trainer. Nobody applies, and this Company does nothing more. Say it
    with the trainers' names and the first tensor that differs, and stop."""

    text: str
    digests: tuple[tuple[PeerId, str], ...]
