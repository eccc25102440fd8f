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


def malformed(events: list[dict[str, Any]]) -> list[dict]:
    """What a viewer of Chrome's trace events would stumble over."""

    def well(e: dict[str, Any]) -> bool:
        whole = ["pid", "tid", *(["ts"] if e["ph"] != "M" else []), *(["dur"] if e["ph"] == "X" else [])]
        numbers = all(isinstance(e.get(name), int) and e[name] >= 0 for name in whole)
        return numbers and isinstance(e["name"], str) and e["ph"] in "XMisf"

    ends = [sorted(e["id"] for e in events if e["ph"] == ph) for ph in "sf"]
    return [e for e in events if not well(e) or (e["ph"] in "sf" and ends[0] != ends[1])]
