"""Credits that failed at this rollout: what the log says of them, and when it is pointless to go on.

One failed credit is nothing: its prompt is dealt again. Where every credit fails, the cause is in the settings or in
the user's code, and asking for more would go on for ever. Pure.
"""

import collections
import re

HOPELESS = 64  # credits in a row: more than a bad prompt or two, a second or so of work
KINDS = 32  # kinds of failures told apart


class Setbacks:
    """``in_a_row``: credits failed since the last that succeeded. ``counts``: failures by kind, which is the error with
    its numbers left out."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last = ""
        self.counts: collections.Counter[str] = collections.Counter()

    def succeeded(self) -> None:
        self.in_a_row = 0

    def failed(self, error: BaseException) -> str:
        """One credit failed. Returns the line to log: for a kind's first failure, its tenth, its hundredth..."""
        self.in_a_row += 1
        self.last = described(error)
        kind = re.sub(r"\d+", "#", self.last)
        if kind not in self.counts and len(self.counts) >= KINDS:
            kind = "others"
        self.counts[kind] += 1
        n = self.counts[kind]
        if n == 1:
            return self.last
        return f"{self.last} ({n} times so far)" if n == 10 ** (len(str(n)) - 1) else ""

    def hopeless(self) -> str:
        """Why to give up, in one line, or nothing."""
        if self.in_a_row < HOPELESS:
            return ""
        return f"the last {self.in_a_row} credits failed here, none succeeded in between; the last: {self.last}"


def described(error: BaseException) -> str:
    """The error in one line: what the project's own errors say is enough, others come with their type."""
    text = " ".join(str(error).split())[:1000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
