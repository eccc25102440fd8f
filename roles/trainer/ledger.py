"""The record of every credit on disk: one JSON object a line, appended before the act it describes.

A trainer appends ``transport/accounts.py`` records as its delivery emits them: a credit's line before the credit
leaves, the ids a step trained before their verdicts. Each append is one ``write``, so a kill leaves whole lines and at
most one torn one at the end, whose act then never happened. ``sync`` puts them on the disk; a checkpoint calls it
first, so that no checkpoint is ahead of its record.

Of a step every trainer records what all contributors trained (``Committed``): so what a trainer that died in the
middle of one has trained is known by the others. Its own record is closed from theirs: what they say was trained is,
the rest of what was open is lost. The owner of a record holds a lock on it while it lives.

``replay`` reads the records of all trainers of a run and says whether they close. Beyond the accounts of each trainer
it checks what only all of them together show: on one lineage, no prompt was trained twice in an epoch. Given the
lineage of the final weights, it accounts as trained exactly what is in these: what was trained into weights that the
mesh has left is superseded, and a group that the others applied is trained, whatever its trainer, left behind at that
moment, wrote of it.
"""

import fcntl
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mesh.identity import PeerId
from mesh.version import Ballot, Lineage, Version
from transport.accounts import (
    Accounts,
    AnyEntry,
    Closed,
    Committed,
    Delivered,
    Descends,
    Ended,
    Issued,
    Opened,
    RowGroup,
    Trained,
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyEntry).decode


class Ledger:
    """The open record of one trainer process. Only its owner's thread (the loop) appends."""

    def __init__(self, path: Path | str, *, peer: PeerId, run: str, first_id: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: a peer id is new at every start, so an existing file is somebody else's
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # until this process ends: nobody closes the record of one who lives
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


@dataclass
class _Credit:
    """What the records say of one credit. ``versions`` are those in whose step it was trained, by its own trainer or
    by what the others applied; ``group`` has its tokens as the last of them tells."""

    issued: Issued
    tokens: int | None = None
    account: str = "in_flight"
    why: str = ""
    versions: dict[Version, str] = field(default_factory=dict)  # with where it is said
    group: RowGroup | None = None

    def trained(self, version: Version, group: RowGroup, where: str) -> None:
        self.versions.setdefault(version, where)
        self.group = group


@dataclass
class _Trainer:
    """The record of one trainer, read."""

    peer: PeerId = ""
    run: str = ""
    accounts: Accounts = field(default_factory=Accounts)
    credits: dict[int, _Credit] = field(default_factory=dict)
    committed: list[tuple[str, Committed]] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)
    lineages: dict[Ballot, Lineage] = field(default_factory=dict)

    def apply(self, where: str, record: AnyEntry) -> None:
        if isinstance(record, Opened) != where.endswith(":1"):
            raise ValueError(f"{where}: a record opens with its owner's line, and has one")
        try:
            self.accounts.apply(record)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        match record:
            case Opened():
                self.peer, self.run = record.peer, record.run
            case Issued() if not record.evaluation:
                self.credits[record.id] = _Credit(record)
            case Delivered() if record.id in self.credits:
                self.credits[record.id].tokens = record.tokens
            case Trained():
                for id, masked, failed in _parts(record):
                    self._trained(id, record.version, masked, failed, where)
            case Ended():
                for c in [self.credits[id] for id in record.ids if id in self.credits]:
                    c.account, c.why = record.outcome, record.why
            case Descends() if record.lineage.terms:
                self.lineages[record.lineage.terms[-1][0]] = record.lineage
            case Closed():
                self.closed.append(record)
            case Committed():
                self.committed.append((where, record))

    def _trained(self, id: int, version: Version, masked: int, failed: int, where: str) -> None:
        c = self.credits[id]
        c.account = "trained"
        c.trained(version, RowGroup(id, c.issued.epoch, c.issued.prompt, c.tokens or 0, masked, failed), where)


def _parts(record: Trained) -> Iterable[tuple[int, int, int]]:
    return zip(record.ids, record.masked, record.failed or [0] * len(record.ids), strict=True)


def replay(
    paths: Iterable[Path | str], lineage: Lineage | None = None, alive: Collection[PeerId] | None = None
) -> Replay:
    """Replay records; ``lineage`` is that of the final weights; what is open at trainers that are not ``alive`` counts
    as lost: their processes may be stopped or cut off, and their records theirs still.

    Raises ValueError naming file and line on a contradiction: a credit that ends twice, one trained without being
    issued, a prompt trained twice in an epoch of one lineage, a line that is no record. A torn last line is passed
    over."""
    result = Replay()
    trainers: dict[PeerId, _Trainer] = {}
    for path in sorted(Path(p) for p in paths):
        t = _Trainer()
        for where, record in _read(path):
            t.apply(where, record)
            if isinstance(record, Opened):
                run = next(iter(trainers.values()), t).run
                if run != t.run:
                    raise ValueError(f"{where}: of run {t.run}, the others are of run {run}")
        if alive is not None and t.peer not in alive and t.accounts.open:
            t.apply(f"{path}:end", Ended(outcome="lost", ids=list(t.accounts.open), why="its trainer is cut off"))
        trainers[t.peer] = t
        result.trainers.append(t.peer)
        result.accounts.add(t.accounts)
        result.next_id = max(result.next_id, t.accounts.next_id)
    for t in trainers.values():
        for where, step in t.committed:
            _apply_rows(step, where, trainers)
    lineages = {term: line for t in trainers.values() for term, line in t.lineages.items()}
    credits = [c for t in trainers.values() for c in t.credits.values()]
    _check_once(credits, lineages)
    if lineage is not None:
        for c in credits:
            _settle(c, lineage, result.accounts)
    trained = {(c.issued.epoch, c.issued.prompt) for c in credits if c.account == "trained"}
    closed = {(c.epoch, c.prompt): c for t in trainers.values() for c in t.closed}
    result.closed = [c for prompt, c in closed.items() if prompt not in trained]
    return result


def _apply_rows(step: Committed, where: str, trainers: Mapping[PeerId, _Trainer]) -> None:
    """What one trainer's record says that all of them trained. Those without a record here are passed over."""
    for peer, row in step.rows.items():
        for group in row.groups if peer in trainers else ():
            c = trainers[peer].credits.get(group.credit)
            if c is None or c.tokens is None:
                had = "was never issued" if c is None else "was never delivered"
                raise ValueError(f"{where}: credit {group.credit} of {peer} trained, but it {had}")
            if (c.issued.epoch, c.issued.prompt) != (group.epoch, group.prompt):
                raise ValueError(f"{where}: credit {group.credit} of {peer} was issued for another prompt")
            c.trained(step.version, group, where)


def _settle(c: _Credit, lineage: Lineage, accounts: Accounts) -> None:
    """Move a credit to the account that the final weights say is right. Trained on version n, a group is in the weights
    from n + 1 on."""
    kept = any(lineage.holds(Version(v.term, v.number + 1)) for v in c.versions)
    account = "trained" if kept else "superseded" if c.account == "trained" else c.account
    if account == c.account:
        return
    assert c.group is not None
    for sign, name, why in ((-1, c.account, c.why), (1, account, "lineage")):
        accounts.groups[name] += sign
        if name not in ("trained", "in_flight"):
            reason = f"{name}: {why}"
            accounts.reasons[reason] = max(0, accounts.reasons.get(reason, 0) + sign)
        for part, tokens in _tokens(c, name, c.group).items():
            accounts.tokens[part] += sign * tokens
    c.account, c.why = account, "lineage"


def _tokens(c: _Credit, account: str, group: RowGroup) -> dict[str, int]:
    tokens = c.tokens or 0
    if account != "trained":
        return {"held" if account == "in_flight" else account: tokens}
    return {"trained": tokens - group.masked - group.failed, "masked": group.masked, "failed": group.failed}


def close_dead(path: Path | str, why: str = "its trainer died") -> int:
    """Account the open credits of a trainer that is gone, in its own record, and return how many: as trained where the
    records beside it say so, else as lost. A torn last line is cut off first. The record of a trainer that lives is
    left alone. Survivors may call it at the same time: the second finds the record locked, or nothing open."""
    path = Path(path)
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data = path.read_bytes()
        os.ftruncate(fd, data.rfind(b"\n") + 1)
        t = _Trainer()
        for where, record in _read(path):
            t.apply(where, record)
        ids = list(t.accounts.open)
        if not ids:
            return 0
        for record in _endings(t, _committed(path.parent, t.peer), why):
            _append(fd, record, path)
        os.fsync(fd)
        return len(ids)
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)  # frees the lock


def close_all_dead(directory: Path) -> int:
    """Close the records of all trainers of a run that are gone; returns the first credit id that nobody has used."""
    next_id = 0
    for path in sorted(directory.glob("*.jsonl")):
        close_dead(path)
        for _, record in _read(path):
            if isinstance(record, Issued | Opened):
                next_id = max(next_id, record.first_id if isinstance(record, Opened) else record.id + 1)
    return next_id


def _endings(t: _Trainer, committed: Mapping[Version, list[RowGroup]], why: str) -> list[AnyEntry]:
    records: list[AnyEntry] = []
    left = dict(t.accounts.open)
    for version, groups in committed.items():
        trained = [g for g in groups if (c := left.get(g.credit)) is not None and c.tokens is not None]
        if trained:
            ids = [g.credit for g in trained]
            records.append(Trained(ids, version, [g.masked for g in trained], [g.failed for g in trained]))
            for id in ids:
                del left[id]
    return [*records, Ended(outcome="lost", ids=list(left), why=why)] if left else records


def _committed(directory: Path, peer: PeerId) -> dict[Version, list[RowGroup]]:
    """What the records of a run say that this trainer has trained."""
    found: dict[Version, list[RowGroup]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for _, record in _read(path, only=(b'"Committed"', peer.encode())):
            if isinstance(record, Committed) and peer in record.rows:
                found.setdefault(record.version, record.rows[peer].groups)
    return found


def _append(fd: int, record: AnyEntry, path: Path) -> None:
    line = _encode(record) + b"\n"
    if os.write(fd, line) != len(line):
        raise OSError(f"ledger {path}: the disk took only part of a line; make room on it")


def _read(path: Path, only: tuple[bytes, ...] = ()) -> Iterable[tuple[str, AnyEntry]]:
    """The records of a file, or those with all of ``only`` in their line."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty, or torn
        if not all(part in line for part in only):
            continue
        try:
            yield f"{path}:{number}", _decode(line)
        except msgspec.DecodeError as e:
            raise ValueError(f"{path}:{number}: not a ledger record: {e}") from None


def _check_once(credits: Iterable[_Credit], lineages: Mapping[Ballot, Lineage]) -> None:
    """Two trainings of a prompt contradict each other when the weights that hold the first are ancestors of those that
    hold the second. Trained on version n, a group is in the weights from n + 1 on."""

    def holds(later: Version, earlier: Version) -> bool:
        lineage = lineages.get(later.term)
        return lineage is not None and lineage.holds(Version(earlier.term, earlier.number + 1))

    seen: dict[tuple[int, int], list[tuple[Version, str]]] = {}
    for c in credits:
        epoch, prompt = c.issued.epoch, c.issued.prompt
        for version, where in c.versions.items():
            earlier = seen.setdefault((epoch, prompt), [])
            for other, there in earlier:
                if other.term == version.term or holds(version, other) or holds(other, version):
                    raise ValueError(
                        f"{where}: prompt {prompt} trained twice in epoch {epoch} on one lineage, first in {there}"
                    )
            earlier.append((version, where))
