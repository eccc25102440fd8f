"""What a pure machine wants done. Effects are values; a driver (the peer, or the simulator) executes them in order.

Each machine adds effects of its own beside its code; sending is common to all.
"""

from dataclasses import dataclass
from typing import Any

from mesh.identity import PeerId


@dataclass(frozen=True)
class Send:
    """Send ``message`` to peer ``to`` at ``address``. ``to`` is empty for first contact with an unknown owner; an empty
    ``address`` means the one on the peer's card. Delivery is never certain."""

    to: PeerId
    message: Any
    address: str = ""
    bulk: bool = False


@dataclass(frozen=True)
class Note:
    """Something a person should see in the log; ``level`` is a name of the logging module."""

    text: str
    level: str = "info"
