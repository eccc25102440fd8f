"""Which weights: ballots, terms, version numbers and the lineage they descend from.

A *term* is the ballot of the gradient formation that opened it. A *version* is ``(term, number)``, where the number
counts optimizer steps since the run began. When a term opens it publishes the weights it holds, under the number
those weights already had: after a crash at step 40 and a resume from the checkpoint of step 38, the new term starts at
38, and versions 39 and 40 of the old term are on no living lineage.
"""

from typing import Annotated

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0, lt=2**53)]
"""What may arrive as a counter or number: exact in every language, and far from what a message cannot carry."""

MAX_TERMS = 4096  # of a lineage: each is a start of the run or a death among its trainers


class Ballot(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Names a formation. Unique by construction, since a convener uses a counter once; ordered by counter, then id."""

    counter: Number
    convener: Annotated[str, Meta(max_length=64)]

    def __str__(self) -> str:
        return f"{self.counter}.{self.convener[:4]}"


class Version(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One set of weights. Ordered by term, then number: what a receiver has applied never goes back in this order."""

    term: Ballot
    number: Number

    def __str__(self) -> str:
        return f"v{self.number}@{self.term.counter}"


class Lineage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The terms a run of weights descends from, oldest first, each with the number of its first version."""

    terms: Annotated[tuple[tuple[Ballot, Number], ...], Meta(max_length=MAX_TERMS)] = ()

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

    def at(self, number: int) -> Version:
        """The version with this number; below the lineage's first number, the first. Where a term opened, the number
        names the same weights in two terms: it is that of the older, so that who has it need not wait for the newer."""
        term, first = self.terms[0]
        for later, opened in self.terms[1:]:
            if number <= opened:
                break
            term = later
        return Version(term, max(number, first))

    def lag(self, version: Version, number: int) -> int | None:
        """How many steps ``version`` lies behind ``number`` on this lineage; None when it is not of this lineage."""
        return number - version.number if self.holds(version) else None
