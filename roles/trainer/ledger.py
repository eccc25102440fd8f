"""The record of every credit on disk: one JSON object a line, appended before the act it describes.

A trainer appends ``transport/accounts.py`` records as its delivery emits them: a credit's line before the credit
leaves, the ids a step trained before their verdicts. Each append is one ``write``, so a kill leaves whole lines and at
most one torn one at the end, whose act then never happened. ``sync`` puts them on the disk; a checkpoint calls it
first, so that no checkpoint is ahead of its record.

``replay`` reads the records of all trainers of a run and says whether they close. Beyond the accounts of each trainer
it checks what only all of them together show: on one lineage, no prompt was trained twice in an epoch.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mesh.identity import PeerId
from mesh.version import Ballot, Lineage, Version
from transport.accounts import Accounts, AnyEntry, Closed, Descends, Ended, Opened, Trained

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyEntry).decode


class Ledger:
    """The open record of one trainer process. Only its owner's thread (the loop) appends."""

    def __init__(self, path: Path | str, *, peer: PeerId, run: str, first_id: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: a peer id is new at every start, so an existing file is somebody else's
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self.append(Opened(peer=peer, run=run, first_id=first_id))

    def append(self, record: AnyEntry) -> None:
        """Raises OSError when the line could not be written whole: the act must not happen then."""
        _append(self._fd, record, self.path)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)


@dataclass
class Replay:
    """The accounts of a run, over all its trainers."""

    accounts: Accounts = field(default_factory=Accounts)
    closed: list[Closed] = field(default_factory=list)
    next_id: int = 0
    trainers: list[PeerId] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, int]:
        return self.accounts.groups

    @property
    def tokens(self) -> dict[str, int]:
        return self.accounts.tokens

    def closes(self) -> bool:
        return self.accounts.closes()

    def __str__(self) -> str:
        return f"ledger of {len(self.trainers)} trainers {self.accounts}; {len(self.closed)} prompts closed untrained"


def replay(paths: Iterable[Path | str]) -> Replay:
    """Replay records. Raises ValueError naming file and line on a contradiction: a credit that ends twice, one trained
    without being issued, a prompt trained twice in an epoch of one lineage, a line that is no record. A torn last line
    is passed over."""
    result = Replay()
    lineages: dict[Ballot, Lineage] = {}
    trained: list[tuple[tuple[int, int], Version, str]] = []
    run = None
    for path in sorted(Path(p) for p in paths):
        accounts = Accounts()
        for where, record in _read(path):
            if isinstance(record, Opened) != (where.endswith(":1")):
                raise ValueError(f"{where}: a record opens with its owner's line, and has one")
            if isinstance(record, Opened):
                if run is not None and run != record.run:
                    raise ValueError(f"{where}: of run {record.run}, the others are of run {run}")
                run = record.run
                result.trainers.append(record.peer)
            elif isinstance(record, Descends):
                if record.lineage.terms:
                    lineages[record.lineage.terms[-1][0]] = record.lineage
            elif isinstance(record, Trained):
                for id in record.ids:
                    if id in accounts.open:
                        order = accounts.open[id].issued
                        trained.append(((order.epoch, order.prompt), record.version, where))
            elif isinstance(record, Closed):
                result.closed.append(record)
            try:
                accounts.apply(record)
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from None
        result.accounts.add(accounts)
        result.next_id = max(result.next_id, accounts.next_id)
    _check_once(trained, lineages)
    return result


def close_dead(path: Path | str, why: str = "its trainer died") -> int:
    """Account the open credits of a trainer that is gone as lost, in its own record; returns how many. A torn last line
    is cut off first. Survivors may call it at the same time: the second finds nothing open."""
    path = Path(path)
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        data = path.read_bytes()
        os.ftruncate(fd, data.rfind(b"\n") + 1)
        accounts = Accounts()
        for where, record in _read(path):
            try:
                accounts.apply(record)
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from None
        ids = list(accounts.open)
        if ids:
            _append(fd, Ended(outcome="lost", ids=ids, why=why), path)
            os.fsync(fd)
        return len(ids)
    finally:
        os.close(fd)  # frees the lock


def _append(fd: int, record: AnyEntry, path: Path) -> None:
    line = _encode(record) + b"\n"
    if os.write(fd, line) != len(line):
        raise OSError(f"ledger {path}: the disk took only part of a line; make room on it")


def _read(path: Path) -> Iterable[tuple[str, AnyEntry]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty, or torn
        try:
            yield f"{path}:{number}", _decode(line)
        except msgspec.DecodeError as e:
            raise ValueError(f"{path}:{number}: not a ledger record: {e}") from None


def _check_once(trained: list[tuple[tuple[int, int], Version, str]], lineages: dict[Ballot, Lineage]) -> None:
    """Two trainings of a prompt contradict each other when the weights that hold the first are ancestors of those that
    hold the second. Trained on version n, a group is in the weights from n + 1 on."""

    def holds(later: Version, earlier: Version) -> bool:
        lineage = lineages.get(later.term)
        return lineage is not None and lineage.holds(Version(earlier.term, earlier.number + 1))

    seen: dict[tuple[int, int], list[tuple[Version, str]]] = {}
    for key, version, where in trained:
        for other, there in seen.setdefault(key, []):
            if other.term == version.term or holds(version, other) or holds(other, version):
                raise ValueError(
                    f"{where}: prompt {key[1]} trained twice in epoch {key[0]} on one lineage, first in {there}"
                )
        seen[key].append((version, where))
