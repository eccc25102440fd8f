"""What must be true of a trace."""

from typing import Any


def overlapping(events: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Of each thread, the spans that lie neither behind nor inside one another."""
    threads: dict[tuple[int, int], list[dict]] = {}
    for e in events:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append(e)
    wrong: list[tuple[dict, dict]] = []
    for spans in threads.values():
        around: list[dict] = []
        for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            around = [a for a in around if a["ts"] + a["dur"] > e["ts"]]
            wrong += [(a, e) for a in around if e["ts"] + e["dur"] > a["ts"] + a["dur"]]
            around.append(e)
    return wrong
