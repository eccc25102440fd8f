"""What it takes to bring new weights from one trainer to its rollouts, next to what else a user has.

    the mesh             snapshot and probe, broadcast in the background, verified, taken over and proved
    raw broadcast        the bytes alone: gloo, the same buckets, processes and order, nothing copied or compared
    memcpy               one copy of as many bytes in the trainer
    everybody paused     copied into one buffer, broadcast, copied into the model, tried once; nothing is compared
    a file               safetensors on this disk: written, synced, dropped from the page cache, loaded, tried once

For the mesh and the file the trainer goes on after its own stall; with everybody paused it stalls for all of it. What
the sequences that run lose at a take-over, whose caches are computed again, is in ``smoke.py``, with a real engine. On
one machine nothing crosses a network: receivers compete for memory bandwidth and two cores instead.
"""

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from parts.measure import Result, Spread, by_turns, compare
from parts.picture import Panel, point
from parts.receivers import Trainer, forkserver
from parts.script import Findings, flags, run

SIZES = {1: (1, 2, 4, 8), 16: (1, 2, 4, 8), 128: (1, 2, 4, 8), 1024: (1, 2)}  # MiB: receivers that memory allows
KILLED = (128, 4)  # where a receiver is killed too
LIMIT_S = 300.0  # for one size
WARM = 3  # publications, until every buffer was written once
LARGE_MIB = 512  # from here on fewer rounds


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each size; 2 of the largest")
    parser.add_argument("--most-mib", type=int, default=max(SIZES), help="1 GiB to 2 receivers needs 16 GiB of memory")
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    sizes = {8: (2,)} if arguments.quick else {s: n for s, n in SIZES.items() if s <= arguments.most_mib}
    rounds = 2 if arguments.quick else arguments.rounds
    killed = (8, 2) if arguments.quick else KILLED
    found: dict[tuple[int, int], dict[str, list[Any]]] = {}
    for mib, counts in sizes.items():
        for receivers in counts:
            some = min(2, rounds) if mib >= LARGE_MIB else rounds
            with ProcessPoolExecutor(1, mp_context=forkserver()) as pool:  # its memory goes with it
                work = pool.submit(one, mib, receivers, some, (mib, receivers) == killed)
                found[mib, receivers] = work.result(LIMIT_S)
    return Findings([r for where, f in found.items() for r in rows(*where, f)], pictures(found))


def one(mib: int, receivers: int, rounds: int, kill: bool) -> dict[str, list[Any]]:
    """By contestant, what each round showed."""
    with tempfile.TemporaryDirectory(prefix="mesh-weights-") as directory:
        trainer = Trainer(Path(directory), mib << 20, receivers)
        try:
            contestants: dict[str, Callable[[], Any]] = {
                "mesh": trainer.publish,
                "raw": trainer.broadcast,
                "memcpy": trainer.memcpy,
                "paused": trainer.paused,
                "file": trainer.file,
            }
            for _ in range(WARM):
                trainer.publish()
            by_turns({name: run for name, run in contestants.items() if name != "mesh"}, 1)
            found = by_turns(contestants, rounds)
            if kill:
                usual = Spread.of([proved for _, proved, _ in found["mesh"]]).median
                found["killed"] = [trainer.publish(kill_after_s=usual / 3)]
        finally:
            trainer.close()
    found["nbytes"] = [trainer.nbytes]
    return found


def rows(mib: int, receivers: int, found: dict[str, list[Any]]) -> list[Result]:
    nbytes = found["nbytes"][0]
    stall, proved, taking = ([1e3 * x for x in part] for part in zip(*found["mesh"], strict=True))
    file_stall, file_all, loading = ([1e3 * x for x in part] for part in zip(*found["file"], strict=True))
    raw, memcpy, paused = ([1e3 * x for x in found[name]] for name in ("raw", "memcpy", "paused"))
    where = f"{mib} MiB to {receivers}"
    settings = {"bytes": nbytes, "receivers": receivers, "bucket_mib": 16, "backend": "gloo", "threads": 1}

    def row(what: str, mesh: list[float], reference: list[float], how: str, **details: float) -> Result:
        return compare(f"{where}: {what}", "ms", mesh, reference, how, details=details, settings=settings)

    def gb_s(ms: list[float]) -> float:
        return nbytes / Spread.of(ms).median / 1e6

    rates = {"mesh_gb_s": gb_s(proved), "raw_gb_s": gb_s(raw), "memcpy_gb_s": gb_s(memcpy)}
    results = [
        row("until all have proved it", proved, raw, "raw broadcast", **rates),
        row("until all have proved it", proved, paused, "broadcast, everybody paused"),
        row("until all have proved it", proved, file_all, "a file, until all have loaded it"),
        row("the trainer's stall", stall, memcpy, "one memcpy"),
        row("the trainer's stall", stall, paused, "broadcast, everybody paused"),
        row("the trainer's stall", stall, file_stall, "a file, written and synced"),
        row("a receiver's stall, the longest", taking, paused, "broadcast, everybody paused"),
        row("a receiver's stall, the longest", taking, loading, "a file, loaded"),
    ]
    for _, after, _ in found.get("killed", []):
        what = "until the others have proved it, one killed on the way"
        results.append(row(what, [1e3 * after], [Spread.of(proved).median], "nobody killed"))
    return results


def pictures(found: dict[tuple[int, int], dict[str, list[Any]]]) -> list[Panel]:
    many = max(n for _, n in found if (max(m for m, _ in found), n) in found)
    whole = Panel(f"until {many} receivers run it", "milliseconds", "MiB", log_x=True, log_y=True)
    stalls = Panel(f"the trainer's stall, {many} receivers", "milliseconds", "MiB", log_x=True, log_y=True)
    for (mib, receivers), f in found.items():
        if receivers != many:
            continue
        for panel, lines in (
            (whole, {"mesh, proved": [t[1] for t in f["mesh"]], "raw broadcast": f["raw"],
                     "everybody paused": f["paused"], "file": [t[1] for t in f["file"]]}),
            (stalls, {"mesh": [t[0] for t in f["mesh"]], "memcpy": f["memcpy"],
                      "everybody paused": f["paused"], "file": [t[0] for t in f["file"]]}),
        ):  # fmt: skip
            for name, seconds in lines.items():
                panel.lines.setdefault(name, []).append(point(mib, Spread.of([1e3 * s for s in seconds])))
    return [whole, stalls]


if __name__ == "__main__":
    main()
