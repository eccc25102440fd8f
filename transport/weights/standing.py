"""What a publisher knows of each receiver, and whether it sits out. Pure.

A receiver that does not answer an invitation, is not ready in time, or twice fails to verify a version sits out 1, 2,
4, ... publications, or as many times ``2 x ready_wait_s`` if that is over sooner: a run whose next version waits for
this very receiver must not stand still. Then it gets the version again that it failed to verify, unless it refused that
before the first byte. Proving a version clears its record.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.version import Version
from transport.messages import Member, Report

MOST_STRIKES = 7  # 64 publications; after that a receiver is as good as gone, but is still tried
FAILURES_OF_A_VERSION = 2  # deliveries of one version to one receiver: one chance more, then it sits out


@dataclass
class Standing:
    """``failures`` counts how often the receiver did not verify ``failed``, last at ``failed_attempt``; ``final``: it
    would never take it."""

    members: tuple[Member, ...] = ()
    report: Report | None = None
    verified: Version | None = None
    proved: Version | None = None
    strikes: int = 0
    failed: Version | None = None
    failures: int = 0
    failed_attempt: int = 0
    final: bool = False
    failed_reason: str = ""
    back_at_publication: int = 0
    back_at: float = 0.0
    reason: str = ""
    compared: Version | None = None

    def heard(self, report: Report) -> None:
        """Reports may overtake each other: what is verified and proved only rises, except to nothing at all, which a
        receiver reports whose engine was restarted."""
        self.report = report
        self.verified = _higher(self.verified, report.verified)
        before, self.proved = self.proved, _higher(self.proved, report.proved)
        if self.proved is not None and self.proved != before:
            self.strikes, self.back_at = 0, 0.0

    def lacks(self, version: Version, publications: int, now: float) -> bool:
        """Whether sending it ``version`` (again) makes sense."""
        if self.verified is not None and self.verified >= version:
            return False
        if self.failed != version:
            return True
        over = self.failures < FAILURES_OF_A_VERSION or not self.sits_out(publications, now)
        return over and not self.final

    def runs(self, version: Version) -> bool:
        """Whether its engine runs exactly this version, proved: it holds the bytes, most likely."""
        return self.report is not None and self.report.proved == version

    def failed_in(self, version: Version, attempt: int) -> bool:
        return (self.failed, self.failed_attempt) == (version, attempt)

    def failure(self, version: Version, attempt: int, reason: str, final: bool) -> bool:
        """It did not verify this attempt; ``final``: another would not help. True when that was one too many."""
        if self.failed_in(version, attempt):
            return False
        self.failures = self.failures + 1 if self.failed == version else 1
        self.failed, self.failed_attempt, self.final, self.failed_reason = version, attempt, final, reason
        return final or self.failures >= FAILURES_OF_A_VERSION

    def strike(self, reason: str, publications: int, now: float, unit_s: float) -> int:
        """Sit out from now on; returns how many publications, 0 when there is no news in it. Who sits out already, and
        was taken along for want of others, does not sit out longer for it."""
        if self.sits_out(publications, now):
            return 0
        news = self.strikes < MOST_STRIKES
        self.strikes = min(self.strikes + 1, MOST_STRIKES)
        count = 2 ** (self.strikes - 1)
        self.back_at_publication, self.back_at, self.reason = publications + count, now + unit_s * count, reason
        return count if news else 0

    def sits_out(self, publications: int, now: float) -> bool:
        return publications < self.back_at_publication and now < self.back_at


def differing_engine(peer: PeerId, receivers: Mapping[PeerId, Standing]) -> PeerId | None:
    """Engines of one build that run one version must hold the same live tensors: another receiver whose engine differs
    from that of ``peer``, given once a version."""
    mine = receivers[peer]
    report = mine.report
    if report is None or report.proved is None or not report.live_digest or mine.compared == report.proved:
        return None
    for other, standing in receivers.items():
        theirs = standing.report
        if other == peer or theirs is None or (theirs.build, theirs.proved) != (report.build, report.proved):
            continue
        if theirs.live_digest and theirs.live_digest != report.live_digest:
            mine.compared = report.proved
            return other
    return None


def table(receivers: Mapping[PeerId, Standing], names: Mapping[PeerId, str]) -> list[str]:
    """A line a receiver: where it is, and why it is no further."""
    lines = []
    for peer, r in receivers.items():
        line = f"{names.get(peer, peer)}: verified {r.verified or 'nothing'}, proved {r.proved or 'nothing'}"
        if r.report is None:
            line += ", never reported"
        elif r.report.refused is not None:
            line += f", refused {r.report.refused}: {r.report.reason}"
        elif r.failed is not None and (r.proved is None or r.proved < r.failed):
            line += f", refused {r.failed}: {r.failed_reason}"
        elif r.report.reason:
            line += f", not ready: {r.report.reason}"
        lines.append(line + (f", sits out: {r.reason}" if r.strikes else ""))
    return lines


def _higher(a: Version | None, b: Version | None) -> Version | None:
    return b if a is None or b is None or b > a else a
