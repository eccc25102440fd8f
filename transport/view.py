"""What a trainer knows of one rollout: its last Ask, and what it was sent since."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from mesh.version import Lineage, Version
from transport.messages import Answer, Ask, Credit, CreditId, Orphan, Outcome, Verdict

AGAIN_AFTER_S = 2.0  # a bulk message may be this much later than the Ask that mentions its group


@dataclass
class RolloutView:
    """``out`` has the credits that are open there and ``unseen`` those the last Ask could not know of, each with the
    Answer that carries it, ``evaluations`` those of evaluation; ``kept`` since when a group waits for its verdict, or
    was last asked for; ``orphans`` the groups without a trainer that it offers."""

    ask: int = 0
    answers: int = 0
    free: int = 0
    returned: dict[str, int] = field(default_factory=dict)
    held: dict[CreditId, Version | None] = field(default_factory=dict)
    kept: dict[CreditId, float] = field(default_factory=dict)
    out: dict[CreditId, int] = field(default_factory=dict)
    unseen: dict[CreditId, int] = field(default_factory=dict)
    evaluations: dict[CreditId, None] = field(default_factory=dict)
    orphans: list[Orphan] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Free places, less what was sent since they were counted."""
        return self.free - len(self.unseen)

    def hear(self, ask: Ask, now: float) -> list[CreditId]:
        """Take a newer Ask; the credits that are not there although their Answer, or one after it, was processed."""
        self.ask, self.free, self.returned = ask.seq, ask.free, ask.returned
        # one that was taken for dead, and lived, goes on from the Answer it saw last
        self.answers = max(self.answers, ask.answered)
        self.orphans = ask.orphans
        self.held = {h.id: h.started for h in ask.held}
        self.kept = {id: self.kept.get(id, now) for id in ask.kept}
        self.unseen = {id: seq for id, seq in self.unseen.items() if seq > ask.answered}
        return [id for id, seq in self.out.items() if seq <= ask.answered and not self.has(id)]

    def order(self, credit: Credit) -> None:
        """A credit that goes out with the next Answer. Those of evaluation, and adoptions, take no place."""
        self.out[credit.id] = self.answers + 1
        if credit.evaluation:
            self.evaluations[credit.id] = None
        elif credit.adopts is None:
            self.unseen[credit.id] = self.answers + 1

    def has(self, id: CreditId) -> bool:
        """Whether its last Ask showed this credit, in work or finished."""
        return id in self.held or id in self.kept

    def resumed(self, id: CreditId) -> None:
        """A credit that it has, by its last Ask, from before it was taken for dead. A group that it keeps was delivered
        to nobody then: it is asked for at once."""
        self.out[id] = 0
        if id in self.kept:
            self.kept[id] = float("-inf")

    def ended(self, id: CreditId) -> None:
        """A credit that is no longer out."""
        self.out.pop(id, None)
        self.evaluations.pop(id, None)

    def delivered(self, id: CreditId, now: float) -> None:
        self.held.pop(id, None)
        self.kept.setdefault(id, now)

    def answer(
        self,
        credits: Sequence[Credit],
        *,
        open: Container[CreditId],
        verdicts: Mapping[CreditId, Outcome],
        current: Version,
        lineage: Lineage,
        finished: bool,
        share: int,
        now: float,
    ) -> Answer:
        """The next Answer: ``credits``, and whatever differs between its last Ask and what is ``open``."""
        self.answers += 1
        again = [id for id, since in self.kept.items() if id in self.out and now - since >= AGAIN_AFTER_S]
        for id in again:
            self.kept[id] = now
        return Answer(
            seq=self.answers,
            credits=list(credits),
            revoked=[id for id in self.held if id not in open],
            verdicts=[Verdict(id, verdicts.get(id, "failed")) for id in self.kept if id not in open],
            again=again,
            current=current,
            lineage=lineage,
            finished=finished,
            share=share,
        )
