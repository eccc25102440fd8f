"""What must be true when a run is over, whatever was done to it. Each check returns its complaints; none: it holds."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.records import Book, Lineage, Run, final, on

SHARED_MEMORY = Path("/dev/shm")
REWARD_STEPS = 10  # at either end of the run, whose rewards are compared


@dataclass
class Check:
    name: str
    complaints: list[str]
    figures: str = ""

    def __str__(self) -> str:
        mark = "FAILED" if self.complaints else "holds "
        return "\n".join([f"{mark} {self.name}: {self.figures}", *(f"       {text}" for text in self.complaints[:10])])


def ledgers(run: Run) -> list[Check]:
    """That the records close, and say that nothing was trained twice."""
    books = run.books()
    summary = run.summary()
    if not books or summary is None:
        return [Check("the run finished", [f"{len(books)} ledgers, {'a' if summary else 'no'} summary"])]
    return [closes(books, summary), once(books, final(books), summary["steps"])]


def closes(books: list[Book], summary: dict[str, Any]) -> Check:
    complaints = [problem for book in books for problem in book.problems]
    complaints += [
        f"{book.path.name}: credit {id} has not ended"
        for book in books
        for id, credit in book.credits.items()
        if not credit.ends
    ]
    total: dict[str, int] = defaultdict(int)
    for book in books:
        for account, groups in book.sums().items():
            total[account] += groups
    if summary["ledger"]["issued"] != total["issued"] or not summary["ledger_closed"]:
        complaints.append(f"the summary says {summary['ledger']}, closed: {summary['ledger_closed']}")
    figures = ", ".join(f"{groups} {account}" for account, groups in total.items())
    return Check("the ledger closes", complaints, f"{len(books)} trainers, {figures}")


def once(books: list[Book], lineage: Lineage, steps: int) -> Check:
    """On the final lineage each step was made once, of prompts that no other step has. What one trainer says that
    all have trained, and what each says of itself, must agree."""
    seen: dict[tuple[int, int], str] = {}
    made: dict[int, dict[str, dict[int, tuple[int, int]]]] = defaultdict(dict)  # step -> trainer -> credit -> prompt
    complaints, lost = [], 0
    for book in books:
        for term, number, ids in book.trained:
            if on(lineage, term, number):
                mine = made[number].setdefault(book.peer, {})
                mine |= {id: (book.credits[id].epoch, book.credits[id].prompt) for id in ids}
            else:
                lost += len(ids)
    for book in books:
        for term, number, rows in book.committed:
            if not on(lineage, term, number):
                continue
            for peer, groups in rows.items():
                told = {group[0]: (group[1], group[2]) for group in groups}
                if told != made[number].setdefault(peer, told):
                    complaints.append(f"step {number}: {book.peer} and {peer} differ about what {peer} trained")
    for number in range(steps):
        if number not in made:
            complaints.append(f"step {number} of the final lineage was made by nobody")
        for peer, groups in sorted(made.get(number, {}).items()):
            for prompt in groups.values():
                here = f"step {number} by {peer}"
                if prompt in seen:
                    complaints.append(f"prompt {prompt} trained twice: {seen[prompt]}, {here}")
                seen[prompt] = here
    return Check("no group trained twice", complaints, f"{len(seen)} groups in {steps} steps; {lost} on weights lost")


def lag(run: Run, max_lag: int) -> Check:
    lags = [int(row["lag_highest"]) for row in run.steps() if row.get("lag_highest") is not None]
    over = [f"lag {lag}" for lag in lags if lag > max_lag]
    return Check("no trained lag over max_lag", over, f"at most {max(lags, default=0)} of {max_lag}")


def accuracy(run: Run, least: float, most_groups: float) -> Check:
    """At the end, and what it took: all groups trained, those included whose weights were lost."""
    trained = sum(len(ids) for book in run.books() for _, _, ids in book.trained)
    last = run.evaluations()[-1]["eval_accuracy"] if run.evaluations() else 0.0
    complaints = [f"below {least}"] * (last < least)
    complaints += [f"more than {most_groups:.0f} groups"] * (trained > most_groups)
    return Check("it learned", complaints, f"accuracy {last:.3f} after {trained} groups of at most {most_groups:.0f}")


def reward_rises(run: Run) -> Check:
    rewards = [row["reward"] for row in sorted(run.steps(), key=lambda row: row["step"]) if "reward" in row]
    first, last = rewards[:REWARD_STEPS], rewards[-REWARD_STEPS:]
    before, after = sum(first) / max(1, len(first)), sum(last) / max(1, len(last))
    return Check("the reward rises", [] if after > before else ["it does not"], f"{before:.4f} -> {after:.4f}")


def same_weights(run: Run, *, at_least: int) -> Check:
    """Every trainer that made a step has the same weights after it."""
    digests: dict[tuple[int, int], set[Any]] = defaultdict(set)
    last: dict[str, dict[str, Any]] = {}
    for path in sorted((run.path / "metrics").glob("*.jsonl")):
        for row in run.steps(path.stem):
            if "state_digest" in row:
                digests[int(row["term"]), row["step"]].add(row["state_digest"])
                last[path.stem] = row
    steps = max((row["step"] for row in last.values()), default=0)
    finished = [name for name, row in last.items() if row["step"] == steps]
    complaints = [f"step {step} of term {term}: {len(d)} digests" for (term, step), d in digests.items() if len(d) > 1]
    if len(finished) < at_least:
        complaints.append(f"only {len(finished)} trainers made the last step, {steps}")
    return Check("bit-identical weights", complaints, f"{len(digests)} steps, {len(finished)} trainers made the last")


def shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir(SHARED_MEMORY)} if SHARED_MEMORY.is_dir() else set()


def unowned(names: set[str]) -> set[str]:
    """Those segments that no process has open or mapped: nobody will ever remove them."""
    left = {str(SHARED_MEMORY / name) for name in names & shared_memory()}
    for process in Path("/proc").iterdir():
        if left and process.name.isdigit():
            left -= _held(process)
    return {Path(path).name for path in left}


def _held(process: Path) -> set[str]:
    """What it has mapped or open, as far as it may be seen."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is not ours
        lines = (process / "maps").read_text().splitlines()
        found = {line.split(maxsplit=5)[5] for line in lines if str(SHARED_MEMORY) in line}
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(descriptor))
    return found


def leftovers(before: set[str], running: list[str], ports: list[int], free: Callable[[int], bool]) -> Check:
    complaints = list(running)
    complaints += [f"{SHARED_MEMORY / name}" for name in sorted(unowned(shared_memory() - before))]
    complaints += [f"somebody listens on port {port}" for port in ports if not free(port)]
    return Check("nothing is left behind", complaints, f"{len(ports)} ports free again")
