"""What becomes of every credit: one set of records, one set of accounts, kept live and replayed by the same code.

A trainer describes each act in a record and applies it to its ``Accounts`` before it acts; ``roles/trainer/ledger.py``
writes the same records to disk and later replays them into fresh accounts. So the live figures and the replayed ones
cannot disagree, and a contradiction (a credit that ends twice, one trained that was never issued) is found by either.

In groups:  issued = trained + superseded + failed + lost + in_flight      (evaluation: evaluated instead of trained)
In tokens:  delivered = trained + masked + superseded + failed + lost + held

* **in flight**: out at a rollout, also at a silent one, or delivered and waiting here, or in the batch in training.
* **superseded**: newer weights replaced those it came from, by age or by lineage; also one revoked before delivery.
* **failed**: the rollout said so, it was malformed, or it passed its deadline.
* **lost**: the holder died or gave it back, the order or the answer went missing, or the trainer itself ended. Tokens
  are lost only where a trainer ended with delivered groups in hand.

Tokens are sampled tokens. Evaluation has accounts of its own, in groups, and never enters those of training.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mesh.identity import PeerId
from mesh.version import Lineage, Version

MAX_REASONS = 64  # told apart by their text, which rollouts choose; the record on disk has all

CLOSED_A_ROW = 256
WHY_CHARS = 100

Ending = Literal["superseded", "failed", "lost", "evaluated"]


class Entry(Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag=True):
    """Base of all records; the tag is the class name."""


class Opened(Entry, frozen=True):
    """First record of a file: whose it is."""

    peer: PeerId
    run: str
    first_id: int = 0


class Descends(Entry, frozen=True):
    """From here on the trainer's weights are of this lineage."""

    lineage: Lineage


class Issued(Entry, frozen=True, omit_defaults=True):
    """An order to rollout ``to`` for one group of this prompt; ``adopts``: one that it has, made for that credit
    of a trainer that is gone."""

    id: int
    to: PeerId
    epoch: int
    prompt: int
    attempt: int
    evaluation: bool = False
    adopts: tuple[PeerId, int] | None = None


class Delivered(Entry, frozen=True):
    id: int
    tokens: int


class Trained(Entry, frozen=True):
    """These groups are in the step from ``version.number`` to the next; ``masked[i]`` tokens of ``ids[i]`` got no
    gradient."""

    ids: list[int]
    version: Version
    masked: list[int]
    failed: list[int] = []
    """Tokens of completions without a reward, which are no samples; empty: none."""


class Ended(Entry, frozen=True):
    outcome: Ending
    ids: list[int]
    why: str


class Closed(Entry, frozen=True):
    """This prompt will not be tried again in this epoch."""

    epoch: int
    prompt: int
    why: str


class RowGroup(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group of a step, by its trainer's credit. Of its ``tokens``, ``masked`` got no gradient and ``failed`` are of
    completions without a reward."""

    credit: int
    epoch: int
    prompt: int
    tokens: int
    masked: int = 0
    failed: int = 0


class ClosedPrompt(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: int
    prompt: int
    why: Annotated[str, Meta(max_length=WHY_CHARS)]


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One trainer's part in a step: its groups, and the prompts it has given up since its last part in one. It rides
    with the gradient, so that all know of all what they trained when they apply the step, or none does."""

    groups: list[RowGroup]
    closed: Annotated[list[ClosedPrompt], Meta(max_length=CLOSED_A_ROW)] = []


class Committed(Entry, frozen=True):
    """The step from ``version.number`` to the next was applied, with these rows, by trainer. Every trainer records it,
    before what follows from it in its own accounts: who dies then is closed by what the others say of it."""

    version: Version
    rows: dict[PeerId, Row]


AnyEntry = Opened | Descends | Issued | Delivered | Trained | Ended | Closed | Committed


@dataclass
class Open:
    """A credit in flight; ``tokens`` is None until its group is here."""

    issued: Issued
    tokens: int | None = None


@dataclass
class Accounts:
    """The sums of one trainer. ``apply`` raises ValueError, naming the credit, on a record that contradicts them."""

    groups: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("issued", "trained", "superseded", "failed", "lost", "in_flight"), 0)
    )
    tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("delivered", "trained", "masked", "superseded", "failed", "lost", "held"), 0
        )
    )
    evaluation: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("issued", "evaluated", "superseded", "failed", "lost", "in_flight"), 0)
    )
    reasons: dict[str, int] = field(default_factory=dict)
    """Groups of training by ``outcome: why``."""
    open: dict[int, Open] = field(default_factory=dict)
    next_id: int = 0

    def apply(self, record: AnyEntry) -> None:
        match record:
            case Issued():
                self._issue(record)
            case Delivered():
                self._deliver(record)
            case Trained():
                if len(record.masked) != len(record.ids):
                    raise ValueError(f"{len(record.ids)} groups trained with {len(record.masked)} mask counts")
                failed = record.failed or [0] * len(record.ids)
                for id, *parts in zip(record.ids, record.masked, failed, strict=True):
                    self._train(id, *parts)
            case Ended():
                for id in record.ids:
                    self._end(id, record.outcome, record.why)
            case Opened():
                self.next_id = max(self.next_id, record.first_id)
            case Descends() | Closed() | Committed():
                pass

    def closes(self) -> bool:
        """Whether both equations hold, and those of evaluation."""
        groups, tokens, evaluation = dict(self.groups), dict(self.tokens), dict(self.evaluation)
        return (
            groups.pop("issued") == sum(groups.values())
            and tokens.pop("delivered") == sum(tokens.values())
            and evaluation.pop("issued") == sum(evaluation.values())
        )

    def __str__(self) -> str:
        def sums(account: dict[str, int], whole: str) -> str:
            parts = [f"{n} {name.replace('_', ' ')}" for name, n in account.items() if name != whole]
            return f"{account[whole]} {whole} = {' + '.join(parts)}"

        text = f"groups: {sums(self.groups, 'issued')}; tokens: {sums(self.tokens, 'delivered')}"
        if self.evaluation["issued"]:
            text += f"; evaluation: {sums(self.evaluation, 'issued')}"
        return ("closes: " if self.closes() else "DOES NOT CLOSE: ") + text

    def add(self, other: "Accounts") -> None:
        """Add the sums of another trainer (not its open credits: ids are unique only within one trainer)."""
        for mine, theirs in (
            (self.groups, other.groups),
            (self.tokens, other.tokens),
            (self.evaluation, other.evaluation),
            (self.reasons, other.reasons),
        ):
            for name, n in theirs.items():
                mine[name] = mine.get(name, 0) + n

    def _issue(self, record: Issued) -> None:
        if record.id < self.next_id:
            raise ValueError(f"credit {record.id} issued twice, or out of order")
        self.next_id = record.id + 1
        self.open[record.id] = Open(issued=record)
        account = self.evaluation if record.evaluation else self.groups
        account["issued"] += 1
        account["in_flight"] += 1

    def _known(self, id: int, what: str) -> Open:
        if id not in self.open:
            had = "had ended already" if id < self.next_id else "was never issued"
            raise ValueError(f"credit {id} {what}, but it {had}")
        return self.open[id]

    def _deliver(self, record: Delivered) -> None:
        credit = self._known(record.id, "delivered")
        if credit.tokens is not None:
            raise ValueError(f"credit {record.id} delivered twice")
        credit.tokens = record.tokens
        if not credit.issued.evaluation:
            self.tokens["delivered"] += record.tokens
            self.tokens["held"] += record.tokens

    def _train(self, id: int, masked: int, failed: int) -> None:
        credit = self._known(id, "trained")
        if credit.issued.evaluation or credit.tokens is None:
            what = "is for evaluation" if credit.issued.evaluation else "has not arrived"
            raise ValueError(f"credit {id} trained, but it {what}")
        if min(masked, failed) < 0 or masked + failed > credit.tokens:
            raise ValueError(f"credit {id}: {masked} of its {credit.tokens} tokens masked, {failed} without a reward")
        del self.open[id]
        self.groups["in_flight"] -= 1
        self.groups["trained"] += 1
        self.tokens["held"] -= credit.tokens
        self.tokens["trained"] += credit.tokens - masked - failed
        self.tokens["masked"] += masked
        self.tokens["failed"] += failed

    def _end(self, id: int, outcome: Ending, why: str) -> None:
        credit = self._known(id, outcome)
        account = self.evaluation if credit.issued.evaluation else self.groups
        if outcome not in account:
            raise ValueError(f"credit {id} is of training, it cannot end as {outcome}")
        del self.open[id]
        account["in_flight"] -= 1
        account[outcome] += 1
        if credit.issued.evaluation:
            return
        reason = f"{outcome}: {why}"
        if reason not in self.reasons and len(self.reasons) >= MAX_REASONS:
            reason = f"{outcome}: other reasons"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if credit.tokens is not None:
            self.tokens["held"] -= credit.tokens
            self.tokens[outcome] += credit.tokens
