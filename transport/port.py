"""What the parts of a peer ask of the peer they live in. ``mesh.peer.Peer`` is the real one."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mesh.config import Config
from mesh.identity import PeerCard, PeerId, Role
from transport.messages import Go, Kind, Member, Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Port(Protocol):
    """One thread, the peer's loop, owns sockets and pure machines. Methods marked *loop* are called on it alone, the
    others from any thread."""

    id: PeerId
    config: Config

    def on(self, kind: type[M], handler: Callable[[PeerId, M], None]) -> None:
        """Call ``handler(sender, message)`` on the loop for every message of this class. Register before start."""

    def on_go(self, kind: Kind, handler: Callable[[Go], None]) -> None:
        """Call on the loop when this peer is to build a formation of this kind."""

    def on_members(self, handler: Callable[[], None]) -> None:
        """Call on the loop whenever a peer joined, left, died or changed its card."""

    def every(self, period_s: float, fn: Callable[[], None]) -> None:
        """Call ``fn`` on the loop about every ``period_s``."""

    def post(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the loop soon; returns at once."""

    def call(self, fn: Callable[[], T], timeout_s: float = 10.0) -> T:
        """Run ``fn`` on the loop and wait for its value; raises TimeoutError, or what ``fn`` raised."""

    def send(self, to: PeerId, message: Message, *, bulk: bool = False) -> bool:
        """*loop*: False when the peer is unknown or its pipe is full; the message is then dropped and counted."""

    def live(self, role: Role | None = None) -> list[PeerCard]:
        """The peers alive as this one sees it, itself included, ordered by id."""

    def convene(self, kind: Kind, members: Sequence[Member]) -> None:
        """*loop*: ask these members for a new formation; ``on_go`` handlers run at every member that took part."""

    def note(self, text: str, level: str = "info") -> None:
        """Log one line, and keep it among the events an observer sees."""
