"""How a peer's process groups are built: over the store that the mesh carries, on the address chosen for the mesh."""

import threading
from typing import Any

from transport.formation import Formation, FormationBroken
from transport.messages import Go, Member
from transport.store import MeshStore
from transport.weights.mover import Build


def group_builder(peer: Any, backend: str = "gloo", worker: int = 0) -> Build:
    """Builds the group of a Go for worker ``worker`` of this peer; called on the thread that runs its collectives."""
    weights = peer.config.weights

    def build(go: Go, abandon: threading.Event) -> Formation:
        me, convener = Member(peer.id, worker), Member(go.ballot.convener)
        if me not in go.members or len(set(go.members)) != len(go.members):
            raise FormationBroken(f"{go.kind} formation {go.ballot}: its convener names no possible ranks", [convener])
        store = MeshStore(go.kind, go.ballot, peer.request_store, weights.form_timeout_s, abandon)
        return Formation.build(
            go,
            me,
            store,
            host=peer.ip,
            backend=backend,
            timeout_s=weights.form_timeout_s,
            abandon=abandon,
        )

    return build
