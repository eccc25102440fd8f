"""What it costs a peer to belong, and how soon a death is known: simulated to 1,000 peers, and real ones beside Serf.

Simulated are the protocol and its messages, in simulated time (``tests/sim/scale.py``: the same code as in a peer).
Real are processes on this machine that do nothing else, the mesh's and Serf's by turns, each with its settings for a
local network and encrypted. A peer of the mesh is a Python process with two ZeroMQ sockets over TCP, Serf's agent a Go
program that sends over UDP. They share nothing but the machine: its noise is in both.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from parts.measure import ROOT, Result, Spread, compare
from parts.members import Members, Mesh, Serf, serf_version
from parts.picture import Panel, point
from parts.script import Findings, flags, run

sys.path.append(str(ROOT))
from tests.sim import scale

SIMULATED = (10, 30, 100, 300, 1000)
REAL = (10, 100)
QUIET_S = 8.0
DEATHS = 2
UNITS = {"processor": "ms/s", "loopback": "B/s", "memory": "MiB", "first": "s", "last": "s", "join": "s"}
WHAT = {
    "processor": "processor time of a member",
    "loopback": "bytes on the wire of a member, headers included",
    "memory": "memory of a member (PSS)",
    "first": "from a death until the first has noticed",
    "last": "from a death until all have noticed",
    "join": "from the start of all until all see each other",
}


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument("--real", type=int, nargs="*", default=list(REAL), help="so many real members")
    parser.add_argument("--rounds", type=int, default=1, help="of starting all of them anew")
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    simulated, real, quiet_s, deaths = SIMULATED, arguments.real, QUIET_S, DEATHS
    if arguments.quick:
        simulated, real, quiet_s, deaths = (10,), [3], 1.0, 1
    figures = [scale.measure(size) for size in simulated]
    found = {n: both(n, quiet_s, deaths, arguments.rounds) for n in real}
    results = [r for f in figures for r in simulated_rows(f)]
    results += [r for n, contestants in found.items() for r in real_rows(n, contestants, deaths, quiet_s)]
    return Findings(results, pictures(figures, found))


def both(count: int, quiet_s: float, deaths: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Of mesh and Serf, by what is measured."""
    names = ["mesh", "serf"] if serf_version() else ["mesh"]
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in WHAT} for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            with tempfile.TemporaryDirectory(prefix="mesh-members-") as directory:
                members: Members = Mesh(Path(directory) / "run", count) if name == "mesh" else Serf(count)
                try:
                    _one(members, found[name], quiet_s, deaths)
                finally:
                    members.close()
    return found


def _one(members: Any, found: dict[str, list[float]], quiet_s: float, deaths: int) -> None:
    found["join"].append(members.join_s)
    quiet = members.quiet(quiet_s)
    for what, value in zip(("processor", "loopback", "memory"), quiet, strict=True):
        found[what].append(value)
    for i in range(deaths):
        first, last = members.kill(f"member-{i + 1}")
        found["first"].append(first)
        found["last"].append(last)


def simulated_rows(f: scale.Figures) -> list[Result]:
    settings = {"peers": f.size, "preset": "lan", "seed": 0, "simulated": True}
    details = {"messages_a_second": f.quiet.messages, "connections": f.connections, "death_bytes": f.death.bytes,
               "detection_first_s": f.detection_s, "join_s": f.join_s}  # fmt: skip
    where = f"{f.size} simulated peers"
    return [
        Result(f"{where}: bytes of a peer", "B/s", Spread.of([f.quiet.bytes]), details=details, settings=settings),
        Result(f"{where}: until all have noticed a death", "s", Spread.of([f.gone_s]), settings=settings),
    ]


def real_rows(n: int, found: dict[str, dict[str, list[float]]], deaths: int, quiet_s: float) -> list[Result]:
    settings = {"members": n, "preset": "lan", "quiet_s": quiet_s, "deaths": deaths, "serf": serf_version()}
    rows = []
    for what, text in WHAT.items():
        name = f"{n} real members: {text}"
        if serf := found.get("serf"):
            rows.append(compare(name, UNITS[what], found["mesh"][what], serf[what], serf_version(), settings=settings))
        else:
            rows.append(Result(name, UNITS[what], Spread.of(found["mesh"][what]), settings=settings))
    return rows


def pictures(figures: list[scale.Figures], found: dict[int, dict[str, dict[str, list[float]]]]) -> list[Panel]:
    death = Panel("from a death until all have noticed", "seconds", "members", log_x=True)
    traffic = Panel("on the wire, of each member", "bytes a second", "members", log_x=True, log_y=True)
    death.lines["mesh, simulated"] = [[f.size, *[f.gone_s] * 3] for f in figures]
    traffic.lines["mesh, simulated, without headers"] = [[f.size, *[f.quiet.bytes] * 3] for f in figures]
    for name, label in (("mesh", "mesh"), ("serf", "Serf")):
        mine = {n: contestants[name] for n, contestants in found.items() if name in contestants}
        if mine:
            death.lines[label] = [point(n, Spread.of(f["last"])) for n, f in mine.items()]
            traffic.lines[label] = [point(n, Spread.of(f["loopback"])) for n, f in mine.items()]
    return [death, traffic]


if __name__ == "__main__":
    main()
