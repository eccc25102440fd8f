"""Replay one seed with its events, or try many:

python -m tests.sim SEED                      one seed of every scenario, each with its event log
python -m tests.sim --seeds 10000             the first so many; or a range, 500-999. Prints those that fail
python -m tests.sim --scenario NAME ...       one scenario only
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.sim import membership, mesh, pull, split, step, trainers
from tests.sim.world import Failure

SCENARIOS = {
    "membership": membership.scenario,
    "mesh": mesh.scenario,
    "step": step.scenario,
    "deaths": step.deaths,
    "pull": pull.scenario,
    "split": split.scenario,
    "trainers": trainers.scenario,
}
BATCH = 50  # seeds that a process tries before it tells of them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.split("\n")[0])
    parser.add_argument("seed", nargs="?", type=int, help="replay this seed with its event log")
    parser.add_argument("--seeds", type=_seeds, help="COUNT or FIRST-LAST: run many, print the failing ones")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="this one only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one a core")
    args = parser.parse_args()
    chosen = [args.scenario] if args.scenario else list(SCENARIOS)
    if args.seeds is not None:
        return max([_many(name, args.seeds, args.jobs) for name in chosen])
    if args.seed is None:
        parser.error("give a SEED, or --seeds")
    return max([_one(name, args.seed) for name in chosen])


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def _one(name: str, seed: int) -> int:
    try:
        world = SCENARIOS[name](seed)
    except Failure as e:
        print(e)
        return 1
    print("\n".join(world.lines))
    print(f"{name}, seed {seed} holds: {world.events} events, {world.sent} messages, {world.now:.1f} s")
    return 0


def _many(name: str, seeds: range, jobs: int) -> int:
    began, failed = time.perf_counter(), []
    for seed, why in _failures(name, seeds, jobs):
        failed.append(seed)
        print(f"{name}: {why}", flush=True)
    rate = len(seeds) / (time.perf_counter() - began)
    names = f": {' '.join(map(str, sorted(failed)))}" if failed else ""
    print(f"{name}: {len(seeds)} seeds, {rate:.0f} a second, {len(failed)} failed{names}", flush=True)
    return 1 if failed else 0


def _failures(name: str, seeds: range, jobs: int) -> Iterator[tuple[int, str]]:
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_try, name, batch) for batch in _batches(seeds)]):
            yield from done.result()


def _try(name: str, seeds: range) -> list[tuple[int, str]]:
    failed = []
    for seed in seeds:
        try:
            SCENARIOS[name](seed)
        except Failure as e:
            failed.append((seed, str(e).splitlines()[0]))
    return failed


def _batches(seeds: range) -> list[range]:
    return [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]


if __name__ == "__main__":
    sys.exit(main())
