"""Lists of hosts as SLURM writes them: ``n[1-3,07],gpu4`` is n1, n2, n3, n07 and gpu4."""

import re
from collections.abc import Iterator

MOST = 1 << 16  # hosts of one list

_BRACKET = re.compile(r"\[(\d[\d,-]*)\]")  # an IPv6 address in brackets has colons
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    return re.split(r",(?![^\[\]]*\])", text)


def expand(name: str) -> list[str]:
    """The hosts of one part of a list; a name without brackets is itself. Raises ValueError."""
    found = [""]
    rest = name
    while match := _BRACKET.search(rest):
        numbers = list(_numbers(match[1], name))
        if len(found) * len(numbers) > MOST:
            raise ValueError(f"{name} has more than {MOST} hosts")
        found = [f"{before}{rest[: match.start()]}{number}" for before in found for number in numbers]
        rest = rest[match.end() :]
    return [f"{before}{rest}" for before in found]


def _numbers(text: str, name: str) -> Iterator[str]:
    """As wide as the first of each range is written."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MOST:
            raise ValueError(f"{part!r} in {name} is no range of hosts")
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))
