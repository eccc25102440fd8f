"""Two hosts with peers on both; the network between them is cut, both halves go on, and it is healed:

python -m tests.chaos.parted [--keep DIR]

At the end it is one mesh of the same processes and, for rollouts, the same ids; the half that had trained more groups
has won, and the other has said so.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos import checks
from tests.chaos.checks import Check
from tests.chaos.network import Network, refused
from tests.chaos.peers import Peer, Peers, free_ports
from tests.chaos.records import Book, Lineage, Run, final, on
from tests.chaos.storm import CONFIG, PATIENCE_S
from tests.chaos.watcher import Seen

SIDES = (("trainer", "rollout", "rollout"), ("trainer", "rollout"))
STEPS = 120
FIRST, ALONE = 5, 6  # steps before the cut, and of each half during it
SETTINGS = ("trainer.threads=1", "rollout.threads=1", "checkpoint.every_steps=0", "evaluation.every_steps=0",
            "task.heldout_prompts=0")  # fmt: skip


class Parted:
    """The whole experiment; ``checks`` has the verdict."""

    def __init__(self, directory: Path, say: Callable[[str], None] = print):
        self.run, self.say = Run(directory / "run"), say
        self.began = time.time()
        self.checks: list[Check] = []
        self.peers = Peers(self.run.path, CONFIG, [f"run.steps={STEPS}", *SETTINGS], len(SIDES))
        self.sides: list[list[Peer]] = [[] for _ in SIDES]
        self.watched = [directory / f"watcher-{i}.json" for i in range(len(SIDES))]
        self.network = Network(len(SIDES))

    def __call__(self) -> None:
        try:
            self._start()
            self._soon(lambda: self._whole() and self._steps() >= FIRST, "one mesh that trains")
            ids = self._ids()
            self.network.cut(1)
            self.event("the network is cut")
            self._soon(self._apart, "each half sees itself alone")
            self.event("each half sees itself alone")
            since = {peer.name: self._made(peer) for side in self.sides for peer in side if peer.role == "trainer"}
            self._soon(lambda: all(self._made(self._named(n)) >= m + ALONE for n, m in since.items()), "both train")
            self.event("both halves have trained")
            self.network.heal(1)
            self.event("the network is healed")
            self._soon(self._whole, "one mesh again")
            self.event("one mesh again")
            self._soon(self._together, "both trainers in one formation")
            self.event("both trainers in one formation")
            after = self._ids()
            self._soon(lambda: self.run.summary() is not None, "the run ends", 2 * PATIENCE_S)
            self.event("the run is over")
            self._ended()
            self._judge(ids, after)
        finally:
            for peer in self.peers.peers.values():
                if peer.life.alive:
                    self.peers.kill(peer)
            left = self.peers.close()
            self.network.close()
        self.checks.append(Check("nothing is left behind", left))

    def _start(self) -> None:
        ports = free_ports(len(SIDES))
        seeds = [f"{a}:{p}" for a, p in zip(self.network.addresses, ports, strict=True)]
        rendezvous = f"tcp://{','.join(seeds)}"
        numbers = dict.fromkeys(("trainer", "rollout"), 0)
        for side, roles in enumerate(SIDES):
            inside = self.network.inside(side)
            for i, role in enumerate(roles):
                name = f"{role}-{numbers[role]}"
                numbers[role] += 1
                port = ports[side] if i == 0 else 0
                arguments = ["--rendezvous", rendezvous, "--set", f"mesh.port={port}"]
                self.sides[side].append(self.peers.add(role, name, arguments, inside))
            self.peers.watch(rendezvous, self.watched[side], inside)

    def _judge(self, before: dict[str, str], after: dict[str, str]) -> None:
        kept = [f"{name} was {id} and is {after.get(name)}" for name, id in before.items() if after.get(name) != id]
        self.checks += [
            Check("rollouts keep their ids", kept, f"{len(before)} rollouts"),
            *checks.ledgers(self.run),
            checks.same_weights(self.run, at_least=len(SIDES)),
            more_groups_won(self.run.books(), self.run.path / "logs"),
        ]

    # -- what is seen --------------------------------------------------------------------------------------------------

    def _seen(self, side: int) -> set[str]:
        return {row["name"] for row in Seen.read(self.watched[side]).peers}

    def _whole(self) -> bool:
        return all(self._seen(side) == set(self.peers.peers) for side in range(len(SIDES)))

    def _apart(self) -> bool:
        return all(self._seen(side) == {peer.name for peer in peers} for side, peers in enumerate(self.sides))

    def _ids(self) -> dict[str, str]:
        return {row["name"]: row["id"] for row in Seen.read(self.watched[0]).peers if row["role"] == "rollout"}

    def _named(self, name: str) -> Peer:
        return self.peers.peers[name]

    def _made(self, peer: Peer) -> int:
        return len(self.run.steps(peer.name))

    def _steps(self) -> int:
        return max((row["step"] for row in self.run.steps()), default=0)

    def _together(self) -> bool:
        last = [self.run.steps(peer.name)[-1] for side in self.sides for peer in side if peer.role == "trainer"]
        return all(row["trainers"] == len(SIDES) for row in last)

    def _ended(self) -> None:
        codes = {peer.name: peer.life.process.wait(PATIENCE_S) for peer in self.peers.peers.values()}
        bad = [f"{name}: {code}, {self._named(name).life.why()}" for name, code in codes.items() if code]
        self.checks.append(Check("all processes end well, none was restarted", bad, f"{len(codes)} processes"))

    def _soon(self, true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.time() + patience_s
        while not true():
            for peer in self.peers.peers.values():
                if not peer.life.alive and self.run.summary() is None and peer.life.process.returncode != 0:
                    raise AssertionError(f"{peer.name} ended with {peer.life.process.returncode}: {peer.life.why()}")
            if time.time() > deadline:
                raise AssertionError(f"not within {patience_s:.0f} s: {what}")
            time.sleep(0.05)

    def event(self, text: str) -> None:
        self.say(f"{time.time() - self.began:7.1f} s  step {self._steps():>3}  {text}")


def more_groups_won(books: list[Book], logs: Path) -> Check:
    """Of the two lineages that a cut made, the last one descends from that which had trained more groups since."""
    won = final(books)
    lost = [lineage for book in books for lineage in book.lineages if not _leads_to(lineage, won)]
    said = [line for path in logs.glob("*.log") for line in path.read_text().splitlines() if "left behind" in line]
    if not lost:
        return Check("the lineage with more groups wins", ["no lineage was given up"])
    loser = max(lost, key=lambda lineage: lineage[-1][0])
    fork = next(i for i, term in enumerate(loser) if term not in won)
    until = _taken_in_at(next(book for book in books if loser in book.lineages), loser, won)
    groups = [_groups(books, loser[fork:], None), _groups(books, won[fork:], until)]
    complaints = [f"the winner had trained {groups[1]}, the loser {groups[0]}"] * (groups[1] < groups[0])
    complaints += ["nobody has said that it was left behind"] * (not said)
    return Check(
        "the lineage with more groups wins", complaints, f"{groups[1]} against {groups[0]} groups since the cut"
    )


def _taken_in_at(book: Book, loser: Lineage, won: Lineage) -> int | None:
    """The version with which the loser went on as one of the others."""
    later = book.lineages[book.lineages.index(loser) + 1 :]
    return next((lineage[-1][1] for lineage in later if _leads_to(lineage, won)), None)


def _leads_to(lineage: Lineage, later: Lineage) -> bool:
    return lineage == later[: len(lineage)]


def _groups(books: list[Book], branch: Lineage, until: int | None) -> int:
    """Groups trained on ``branch`` before version ``until``, whoever wrote it down."""
    made: dict[tuple, int] = {}
    for book in books:
        for term, number, rows in book.committed:
            if on(branch, term, number) and (until is None or number < until):
                made[term, number] = sum(map(len, rows.values()))
    return sum(made.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.parted", description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="where the run is left; default: deleted")
    args = parser.parse_args()
    if why := refused():
        print(f"skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mesh-parted-") as temporary:
        parted = Parted(args.keep or Path(temporary))
        parted()
    for check in parted.checks:
        print(check)
    return 1 if any(check.complaints for check in parted.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
