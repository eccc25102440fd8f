"""First contact: where a starting peer finds addresses of others. Whoever answers there admits it; nothing is elected.

A rendezvous only ever yields *addresses to try*. Whether a peer of this run answers at one is settled by the secret, so
a forgotten card or a wrong seed costs an attempt and nothing else. Another kind (a launcher's store) is one more class
with these four methods and one more line in `parse`.
"""

import logging
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from mesh import addresses, nodelist
from mesh.identity import PeerCard

RENEW_S = 60.0  # how often `renew` is to be called
STALE_S = 600.0  # a card not renewed for so long is nobody's
MAX_CARDS = 256  # read at once, the newest first: one answer is enough
MAX_CARD_BYTES = 64 << 10
STORE_WAIT_S = 5.0  # for torchrun's store, on a thread of its own
MAX_SEEDS = 64  # of a node list, the first: one answer is enough
FORMS = (
    "tcp://host:port[,host:port...] with IPv6 in brackets, tcp://NODELIST:port as SLURM writes it, or file:///directory"
)

_SEED = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+(?:\[[\d,-]+\][\w.-]*)*)(?::(\d{1,5}))?")

log = logging.getLogger("mesh.rendezvous")
T = TypeVar("T")


class Rendezvous(Protocol):
    def publish(self, card: PeerCard, run: str) -> None:
        """Let others find the peer of ``card``. Raises ValueError when that is impossible."""

    def addresses(self) -> list[str]:
        """ZeroMQ addresses to try, possibly one's own. Waits at most a second for a resolver or a disk."""

    def renew(self) -> None:
        """Say again that the peer is there; to be called every RENEW_S. Returns at once."""

    def withdraw(self) -> None:
        """Take back what was published. Harmless when nothing was."""


def parse(url: str) -> "Seeds | Directory":
    """The rendezvous that ``url`` names. Raises ValueError naming the valid forms."""
    scheme, _, rest = url.partition("://")
    if scheme == "tcp" and rest:
        return Seeds(tuple(_seeds(rest, url))[:MAX_SEEDS])
    if scheme == "file" and rest.removeprefix("localhost").startswith("/"):
        return Directory(Path(urllib.parse.unquote(rest.removeprefix("localhost"))))
    raise ValueError(f"mesh.rendezvous = {url!r} is none; write {FORMS}")


def _seeds(text: str, url: str) -> Iterator[tuple[str, int]]:
    """Hosts without a port have that of the next one that has: ``n[1-3],gpu4:4242``."""
    waiting: list[str] = []
    for part in (part.strip().removeprefix("tcp://") for part in nodelist.split(text)):
        match = _SEED.fullmatch(part)
        port = int(match[2] or 0) if match else 0
        if not match or (match[2] and not 0 < port < 1 << 16):
            raise _no_seed(part, url)
        if not match[2]:
            waiting.append(match[1])
        else:
            try:
                hosts = [host for name in (*waiting, match[1]) for host in nodelist.expand(name)]
            except ValueError as e:
                raise ValueError(f"mesh.rendezvous = {url!r}: {e}; write {FORMS}") from None
            yield from ((host.strip("[]"), port) for host in hosts)
            waiting = []
    if waiting:
        raise _no_seed(waiting[-1], url)


def _no_seed(text: str, url: str) -> ValueError:
    hint = "is IPv6 without brackets" if text.count(":") > 1 and "[" not in text else "is no host:port"
    return ValueError(f"mesh.rendezvous = {url!r}: {text!r} {hint}; write {FORMS}")


class Seeds:
    """``tcp://``: addresses that must be known beforehand. A peer's own may be among them."""

    def __init__(self, seeds: tuple[tuple[str, int], ...]) -> None:
        self.seeds = seeds
        self._found: _Latest[list[str]] = _Latest(self._resolve, [])

    def publish(self, card: PeerCard, run: str) -> None:
        pass  # being there is enough

    def addresses(self) -> list[str]:
        return self._found.get()

    def renew(self) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def _resolve(self) -> list[str]:
        """Names are looked up every time: they may move. One that is unknown stays as it is, for a diagnosis."""
        found = []
        for host, port in self.seeds:
            try:
                ips = addresses.resolve(host)[:8]
            except ValueError:
                ips = [host]
            if names_this_machine(host, ips) and (own := addresses.default()):
                ips.append(own)
            found += [f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}" for ip in ips]
        return list(dict.fromkeys(found))


def names_this_machine(host: str, ips: list[str]) -> bool:
    """Whether ``host`` is this machine's own name, which its hosts file maps to the loopback: others know it by another
    address, and this machine must listen there."""
    named = host != "localhost" and not host.endswith(".localhost") and host not in ips
    return named and any(map(addresses.is_loopback, ips))


class _Entry(Struct):
    """What a card in the directory says."""

    run: str
    time: float
    id: str
    name: str
    role: str
    host: str
    address: str


class Directory:
    """``file://``: a directory that all peers see, in which each keeps a card ``<id>.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entry: _Entry | None = None
        self._found: _Latest[list[str]] = _Latest(self._read, [])
        self._renewed = _Latest(self._write, None)
        self._said: set[str] = set()
        self.strangers: list[tuple[str, str]] = []  # peer and address of young cards of another run, or another secret

    def publish(self, card: PeerCard, run: str) -> None:
        self._entry = _Entry(run, time.time(), card.id, card.name, card.role, card.host, card.address)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as e:
            raise ValueError(f"the rendezvous directory {self.path} cannot be written: {e.strerror}") from None

    def addresses(self) -> list[str]:
        return self._found.get()

    def renew(self) -> None:
        self._renewed.get(wait_s=0.0)

    def withdraw(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            try:
                self._file(entry).unlink(missing_ok=True)
            except OSError as e:  # leaving goes on; the card goes stale by itself
                log.warning("the card %s cannot be removed: %s", self._file(entry), e.strerror)

    def _file(self, entry: _Entry) -> Path:
        return self.path / f"{entry.id}.json"

    def _write(self) -> None:
        entry = self._entry
        if entry is None:
            return
        entry.time = time.time()
        temporary = self.path / f".{entry.id}.tmp"
        with open(temporary, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._file(entry))  # never a half-written card
        if self._entry is None:  # withdrawn meanwhile
            self._file(entry).unlink(missing_ok=True)

    def _read(self) -> list[str]:
        mine = self._entry
        found: list[str] = []
        strangers: list[tuple[str, str]] = []
        for path in self._newest():
            entry = self._load(path)
            if entry is None or mine is None or entry.id == mine.id:
                continue
            if entry.run != mine.run:
                if time.time() - entry.time < STALE_S:
                    strangers.append((f"{entry.name} on {entry.host}", entry.address))
                continue
            if time.time() - entry.time > STALE_S:
                path.unlink(missing_ok=True)  # of a peer that was killed; a living one writes it again
            elif entry.host != mine.host and addresses.is_loopback(entry.address.split("//")[-1].rpartition(":")[0]):
                self._say(path, f"{entry.name} on {entry.host} advertises a loopback address; set mesh.address there")
            else:
                found.append(entry.address)
        self.strangers = strangers
        return found

    def _newest(self) -> list[Path]:
        try:
            entries = [e for e in os.scandir(self.path) if e.name.endswith(".json") and e.name[0] != "."]
        except FileNotFoundError:
            return []
        aged = []
        for e in entries:
            try:
                if e.is_file(follow_symlinks=False):
                    aged.append((-e.stat().st_mtime, e.path))
            except FileNotFoundError:
                continue  # withdrawn while we looked
        return [Path(path) for _, path in sorted(aged)[:MAX_CARDS]]

    def _load(self, path: Path) -> _Entry | None:
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(MAX_CARD_BYTES), type=_Entry)
        except FileNotFoundError:
            return None  # withdrawn while we looked
        except (OSError, ValueError, RecursionError) as e:
            self._say(path, f"ignored: {e}")
            return None

    def _say(self, path: Path, what: str) -> None:
        if path.name not in self._said and len(self._said) < MAX_CARDS:
            self._said.add(path.name)
            log.warning("card %s: %s", path, what)


class LauncherStore(Directory):
    """The run directory, and beside it torchrun's store, where each worker of the agents leaves its card under its
    rank: machines that do not share a directory meet there. For first contact only: the store goes with its agent."""

    def __init__(self, path: Path, host: str, port: int, rank: int, size: int) -> None:
        super().__init__(path)
        self._at, self._rank, self._size = (host, port), rank, min(size, MAX_CARDS)
        self._store: Any = None

    def _write(self) -> None:
        super()._write()
        if self._entry is not None:
            entry = self._entry
            self._ask(lambda store: store.set(f"mesh-node/{self._rank}", msgspec.json.encode(entry)))

    def _read(self) -> list[str]:
        found = super()._read()
        for rank in range(self._size):
            card = self._ask(partial(_get, f"mesh-node/{rank}"))
            entry = msgspec.json.decode(card, type=_Entry) if card else None
            if entry is None or self._entry is None or rank == self._rank:
                continue
            if entry.run == self._entry.run:
                found.append(entry.address)
            else:
                self.strangers.append((f"{entry.name} on {entry.host}", entry.address))
        return list(dict.fromkeys(found))

    def _ask(self, what: Callable[[Any], T]) -> T | None:
        """None when the store does not answer: its agent has ended, or is elsewhere."""
        from torch.distributed import TCPStore

        try:
            if self._store is None:
                wait = timedelta(seconds=STORE_WAIT_S)
                self._store = TCPStore(*self._at, is_master=False, timeout=wait, wait_for_workers=False)
            return what(self._store)
        except RuntimeError as e:
            self._store = None
            self._say(Path("store"), f"torchrun's store at {self._at[0]}:{self._at[1]} does not answer: {e}")
            return None


def _get(key: str, store: Any) -> bytes:
    return store.get(key) if store.check([key]) else b""  # to get what is not there is to wait for it


class _Latest(Generic[T]):
    """The value of a call that may hang (a resolver, a network file system), made on a thread of its own, one at a
    time. Who asks waits a little, and then gets the last value there was: the loop that answers pings asks too."""

    def __init__(self, fn: Callable[[], T], first: T) -> None:
        self._fn = fn
        self._value = first
        self._thread: threading.Thread | None = None

    def get(self, wait_s: float = 1.0) -> T:
        if self._thread is None or not self._thread.is_alive():  # a call that hangs is waited for once
            self._thread = threading.Thread(target=self._run, name="mesh-rendezvous", daemon=True)
            self._thread.start()
            self._thread.join(wait_s)
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._fn()
        except OSError as e:  # a disk that is full or away for a while: asked again later
            log.warning("rendezvous: %s", e)
