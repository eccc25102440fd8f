"""Replay one seed with its events, or try many:

python -m tests.sim SEED                      one seed, with its event log
python -m tests.sim --seeds 0-9999            many; prints those that fail
python -m tests.sim --scenario NAME ...       one scenario only: membership, or mesh (all machines together)
"""

import argparse
import sys

from tests.sim import membership, mesh, step
from tests.sim.world import Failure

SCENARIOS = {
    "membership": membership.scenario,
    "mesh": mesh.scenario,
    "step": step.scenario,
    "deaths": step.deaths,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.split("\n")[0])
    parser.add_argument("seed", nargs="?", type=int, help="replay this seed with its event log")
    parser.add_argument("--seeds", help="FIRST-LAST: run many, print the failing ones")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="this one only")
    args = parser.parse_args()
    chosen = [args.scenario] if args.scenario else list(SCENARIOS)
    if args.seeds:
        first, _, last = args.seeds.partition("-")
        return max([_many(name, range(int(first), int(last or first) + 1)) for name in chosen])
    if args.seed is None:
        parser.error("give a SEED, or --seeds FIRST-LAST")
    return max([_one(name, args.seed) for name in chosen])


def _one(name: str, seed: int) -> int:
    try:
        world = SCENARIOS[name](seed)
    except Failure as e:
        print(e)
        return 1
    print("\n".join(world.lines))
    print(f"{name}, seed {seed} holds: {world.events} events, {world.sent} messages, {world.now:.1f} s")
    return 0


def _many(name: str, seeds: range) -> int:
    failed = []
    for seed in seeds:
        try:
            SCENARIOS[name](seed)
        except Failure as e:
            failed.append(seed)
            print(f"{name}: {str(e).splitlines()[0]}", flush=True)
    print(f"{name}: {len(seeds)} seeds, {len(failed)} failed{': ' + ' '.join(map(str, failed)) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
