"""Which weights: ballots, terms, version numbers and the lineage they descend from.

A *term* is the ballot of the gradient formation that opened it. A *version* is ``(term, number)``, where the number
counts optimizer steps since the run began. When a term opens it publishes the weights it holds, under the number
those weights already had: after a crash at step 40 and a resume from the checkpoint of step 38, the new term starts at
38, and versions 39 and 40 of the old term are on no living lineage.
"""

from msgspec import Struct


class Ballot(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Names a formation. Unique by construction, since a convener uses a counter once; ordered by counter, then id."""

    counter: int
    convener: str

    def __str__(self) -> str:
        return f"{self.counter}.{self.convener[:4]}"


class Version(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One set of weights. Ordered by term, then number: what a receiver has applied never goes back in this order."""

    term: Ballot
    number: int

    def __str__(self) -> str:
        return f"v{self.number}@{self.term.counter}"


class Lineage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The terms a run of weights descends from, oldest first, each with the number of its first version."""

    terms: tuple[tuple[Ballot, int], ...] = ()

    def open(self, term: Ballot, number: int) -> "Lineage":
        """The lineage of a new ``term`` whose first version has this ``number``."""
        if self.terms and term <= self.terms[-1][0]:
            raise ValueError(f"term {term} does not lie above the lineage's last term {self.terms[-1][0]}")
        return Lineage(terms=(*self.terms, (term, number)))

    def holds(self, version: Version) -> bool:
        """Whether ``version`` is an ancestor on this lineage (or of its last term, whatever its number)."""
        for i, (term, first) in enumerate(self.terms):
            if term == version.term:
                last = i + 1 == len(self.terms)
                return version.number >= first and (last or version.number <= self.terms[i + 1][1])
        return False

    def lag(self, version: Version, number: int) -> int | None:
        """How many steps ``version`` lies behind ``number`` on this lineage; None when it is not of this lineage."""
        return number - version.number if self.holds(version) else None
