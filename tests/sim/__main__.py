"""Replay one seed with its events, or try many:

python -m tests.sim SEED                      one seed, with its event log
python -m tests.sim --seeds 0-9999            many; prints those that fail
python -m tests.sim --scenario NAME ...       another scenario than membership
"""

import argparse
import sys
from collections.abc import Callable

from tests.sim import membership
from tests.sim.world import Failure, World

SCENARIOS: dict[str, Callable[[int], World]] = {"membership": membership.scenario}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.split("\n")[0])
    parser.add_argument("seed", nargs="?", type=int, help="replay this seed with its event log")
    parser.add_argument("--seeds", help="FIRST-LAST: run many, print the failing ones")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="membership")
    args = parser.parse_args()
    run = SCENARIOS[args.scenario]
    if args.seeds:
        first, _, last = args.seeds.partition("-")
        return _many(run, range(int(first), int(last or first) + 1))
    if args.seed is None:
        parser.error("give a SEED, or --seeds FIRST-LAST")
    return _one(run, args.seed)


def _one(run: Callable[[int], World], seed: int) -> int:
    try:
        world = run(seed)
    except Failure as e:
        print(e)
        return 1
    print("\n".join(world.lines))
    print(f"seed {seed} holds: {world.events} events, {world.sent} messages, {world.now:.1f} s")
    return 0


def _many(run: Callable[[int], World], seeds: range) -> int:
    failed = []
    for seed in seeds:
        try:
            run(seed)
        except Failure as e:
            failed.append(seed)
            print(str(e).splitlines()[0], flush=True)
    print(f"{len(seeds)} seeds, {len(failed)} failed{': ' + ' '.join(map(str, failed)) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
