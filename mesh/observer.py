"""A peer that does no work and takes no part: it sees who is in the mesh, and asks all twice a second how they are."""

import time
from collections.abc import Callable

from mesh.identity import PeerCard
from mesh.node import Node
from mesh.view import Seen
from transport.messages import Look, Status

LOOK_S = 0.5


class Observer:
    """``seen`` is what is known. ``on_look``, when set, is called on the peer's loop with the living, before it asks
    them. Nobody counts an observer, waits for it, or gives it anything to do."""

    def __init__(self, node: Node):
        self.seen = Seen(run=node.run.path.name, steps=node.config.run.steps)
        self.on_look: Callable[[list[PeerCard]], None] = lambda cards: None
        self.max_lag = node.config.trainer.max_lag
        self.peer = node.peer()
        self.peer.on(Status, self._status)
        self.peer.every(LOOK_S, self._look)
        self._number = 0

    def workers(self) -> list[PeerCard]:
        """The peers that are alive and do something."""
        return [card for card in self.peer.live() if card.role != "observer"]

    def silent(self, seconds: float) -> list[PeerCard]:
        """Peers that are held to be alive and have not said for so long how they are."""
        now = time.monotonic()
        return [card for card in self.workers() if now - self.seen.status.get(card.id, (0.0, None))[0] > seconds]

    def _look(self) -> None:
        self._number += 1
        workers = self.workers()
        if self.peer.live("trainer") or not self.seen.step:  # keep the last picture of a mesh that has finished
            self.seen.cards = {card.id: card for card in workers}
        self.on_look(workers)
        for card in workers:
            self.peer.send(card.id, Look(seq=self._number))

    def _status(self, sender: str, status: Status) -> None:
        self.seen.status[sender] = (time.monotonic(), status)
