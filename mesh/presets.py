"""How fast a dead peer is noticed: named sets of timings for one machine, a local network, and a wide one."""

import math
from dataclasses import dataclass

CONFIRMATIONS = 2
"""Accusers beyond the first that shorten a suspicion to its least (Lifeguard's K; memberlist's default too)."""


@dataclass(frozen=True)
class Preset:
    """Timings in seconds, but for two factors. Suspicions are for a mesh of up to ten; they grow with log10 n."""

    period_s: float  # between two probes that one peer makes
    ack_s: float  # until others are asked to probe; the rest of the period is theirs
    suspicion_periods: float  # shortest suspicion
    patience: float  # longest suspicion over shortest
    gossip_s: float  # between two rounds of fresh news
    sync_s: float  # between two full exchanges
    reach_s: float  # between two tries to reach a dead peer or a seed

    def suspicion_s(self, size: int, confirmations: int) -> float:
        """How long a suspicion lasts among ``size`` peers with so many accusers beyond the first:
        high - (high - low) log(C + 1) / log(K + 1), Lifeguard section IV.B; ``low`` where K others do not exist."""
        low = self.suspicion_periods * self.period_s * max(1.0, math.log10(max(1, size)))
        if size - 2 < CONFIRMATIONS or confirmations >= CONFIRMATIONS:
            return low
        high = low * self.patience
        return high - (high - low) * math.log(confirmations + 1) / math.log(CONFIRMATIONS + 1)

    def detection_s(self, size: int = 10) -> float:
        """From a death until the views have noticed: a period until it is probed, one of silence, the suspicion.
        Usual, not certain: several peers dying at once, or an accuser that is slow itself, add a period or two."""
        return 2 * self.period_s + self.suspicion_s(size, 0)


LOCAL = Preset(
    period_s=0.6,  # detection within 1.8 to 3 s: somebody at one machine waits for it
    ack_s=0.35,  # a process starved of its core for 300 ms still answers
    suspicion_periods=2.0,  # 1.2 s: four starvations long
    patience=1.5,  # 1.8 s unconfirmed: one machine has few independent accusers
    gossip_s=0.1,  # loopback costs nothing
    sync_s=10.0,  # a few kilobytes
    reach_s=2.0,  # a half that was stopped and wakes is back before anyone looks
)
LAN = Preset(
    period_s=1.0,  # SWIM's and memberlist's: one ping a second is noise
    ack_s=0.5,  # many times the round trip of a LAN, and a busy interpreter's pause
    suspicion_periods=3.0,  # 3 s: a page-in or a collector's pause is no death; detection 4 to 6.5 s
    patience=1.5,  # 4.5 s unconfirmed
    gossip_s=0.2,  # memberlist's
    sync_s=30.0,  # memberlist's
    reach_s=10.0,  # a link that healed is used within seconds
)
WAN = Preset(
    period_s=3.0,  # round trips of 300 ms and retransmissions after a second occur
    ack_s=1.5,  # one lost and resent TCP segment
    suspicion_periods=4.0,  # 12 s: a route that flaps comes back; detection 15 to 30 s
    patience=2.0,  # 24 s unconfirmed
    gossip_s=0.5,  # memberlist's
    sync_s=60.0,  # memberlist's
    reach_s=30.0,  # a connection attempt across sites is slow, and firewalls log it
)
PRESETS = {"local": LOCAL, "lan": LAN, "wan": WAN}
