"""What a run has left on disk, read line by line by code that shares nothing with what wrote it.

A ledger is one JSON object a line (``is`` names its kind), a trainer a file. A version is ``[term, number]``, a term
``[counter, convener]``, a lineage a list of ``[term, number of its first version]``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Term = tuple[int, str]
Lineage = list[tuple[Term, int]]


@dataclass
class Credit:
    epoch: int
    prompt: int
    evaluation: bool
    tokens: int | None = None  # once its group has arrived
    ends: list[str] = field(default_factory=list)  # each account that it was put into: one, when all is well


@dataclass
class Book:
    """One trainer's ledger."""

    path: Path
    peer: str = ""
    credits: dict[int, Credit] = field(default_factory=dict)
    trained: list[tuple[Term, int, list[int]]] = field(default_factory=list)  # term, number, credits
    committed: list[tuple[Term, int, dict[str, list[list[int]]]]] = field(default_factory=list)  # groups by trainer
    lineages: list[Lineage] = field(default_factory=list)  # that its weights were of, oldest first
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Book":
        book = cls(path)
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # behind the last newline: torn, or none
            book._line(number, json.loads(line))
        return book

    def _line(self, number: int, entry: dict[str, Any]) -> None:
        match entry["is"]:
            case "Opened":
                self.peer = entry["peer"]
            case "Descends":
                [terms] = entry["lineage"]
                self.lineages.append([(_term(term), first) for term, first in terms])
            case "Issued":
                if entry["id"] in self.credits:
                    self._problem(number, f"credit {entry['id']} issued twice")
                evaluation = entry.get("evaluation", False)
                self.credits[entry["id"]] = Credit(entry["epoch"], entry["prompt"], evaluation)
            case "Delivered":
                credit = self._open(number, entry["id"])
                if credit.tokens is not None:
                    self._problem(number, f"credit {entry['id']} delivered twice")
                credit.tokens = entry["tokens"]
            case "Trained":
                term, step = entry["version"]
                self.trained.append((_term(term), step, entry["ids"]))
                for id in entry["ids"]:
                    if self._open(number, id).tokens is None:
                        self._problem(number, f"credit {id} trained, and never delivered")
                    self.credits[id].ends.append("trained")
            case "Ended":
                for id in entry["ids"]:
                    self._open(number, id).ends.append(entry["outcome"])
            case "Committed":
                term, step = entry["version"]
                self.committed.append((_term(term), step, {peer: row[0] for peer, row in entry["rows"].items()}))

    def _open(self, number: int, id: int) -> Credit:
        credit = self.credits.get(id)
        if credit is None:
            self._problem(number, f"credit {id} was never issued")
            return Credit(0, 0, False)
        if credit.ends:
            self._problem(number, f"credit {id} had ended as {credit.ends[-1]}")
        return credit

    def _problem(self, number: int, what: str) -> None:
        self.problems.append(f"{self.path.name}:{number}: {what}")

    def sums(self) -> dict[str, int]:
        """Groups of training by account."""
        out = dict.fromkeys(("issued", "trained", "superseded", "failed", "lost", "in_flight"), 0)
        for credit in self.credits.values():
            if not credit.evaluation:
                out["issued"] += 1
                out[credit.ends[0] if credit.ends else "in_flight"] += 1
        return out


def _term(value: list[Any]) -> Term:
    return value[0], value[1]


@dataclass
class Run:
    """What lies in a run directory."""

    path: Path

    def books(self) -> list[Book]:
        return [Book.read(path) for path in sorted((self.path / "ledger").glob("*.jsonl"))]

    def rows(self, name: str = "") -> Iterator[dict[str, Any]]:
        """The metrics of a trainer, or of all: figures, evaluations and events."""
        for path in sorted((self.path / "metrics").glob("*.jsonl")):
            if name in ("", path.stem):
                for line in path.read_bytes().split(b"\n")[:-1]:
                    yield json.loads(line)

    def steps(self, name: str = "") -> list[dict[str, Any]]:
        """The optimizer steps, oldest first; one that several trainers made is there for each."""
        return sorted((row for row in self.rows(name) if "time/step_s" in row), key=lambda row: row["time"])

    def evaluations(self) -> list[dict[str, Any]]:
        return sorted((row for row in self.rows() if "eval_accuracy" in row), key=lambda row: row["time"])

    def summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None


def final(books: list[Book]) -> Lineage:
    """What the run's weights descend from: the lineage whose last term is the highest."""
    return max((lineage for book in books for lineage in book.lineages), key=lambda lineage: lineage[-1][0])


def on(lineage: Lineage, term: Term, number: int) -> bool:
    """Whether the step from version ``number`` of ``term`` to the next is in the weights that ``lineage`` leads to."""
    for i, (own, first) in enumerate(lineage):
        if own == term:
            return number >= first and (i + 1 == len(lineage) or number < lineage[i + 1][1])
    return False
