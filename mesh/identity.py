"""Who a peer is: its id, and the card by which the others know it."""

import secrets
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mesh.version import Number, Version

PeerId = Annotated[str, Meta(max_length=64)]
"""16 hexadecimal digits, random and new at every start of a process."""

Name = Annotated[str, Meta(max_length=256)]
Names = Annotated[dict[Name, Name], Meta(max_length=64)]

Role = Literal["rollout", "trainer", "observer"]


def new_peer_id() -> PeerId:
    return secrets.token_hex(8)


class PeerCard(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a peer tells about itself. It travels with every first contact and with news about the peer.

    ``address`` and ``bulk_address`` are ZeroMQ endpoints (``tcp://10.0.0.7:4242``, IPv6 in brackets); replies always go
    there, never back along an inbound connection. ``busy_for_s`` announces that the peer will not answer for so many
    seconds from the moment the card arrives (at most 300). ``highest_term`` is the highest term counter it has seen: a
    new formation's counter must lie above it. ``agreed`` maps a section of the settings to the digest of what peers of
    one run must agree on.
    """

    id: PeerId
    name: Name
    role: Role
    host: Name
    address: Name
    bulk_address: Name
    busy_for_s: float = 0.0
    highest_term: Number = 0
    version: Version | None = None
    agreed: Names = {}
    offers: Names = {}
