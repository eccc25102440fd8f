"""Storms over real runs, until so many processes were killed; the seed of each is printed, and one can be repeated:

python -m tests.chaos                      until over 100 kills, as `make chaos`
python -m tests.chaos --seed 7 --runs 1    one storm
python -m tests.chaos --seed 7 --short     one short storm, as the tests have it
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.checks import shared_memory
from tests.chaos.storm import Size
from tests.chaos.trial import trial, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first storm; the others follow")
    parser.add_argument("--kills", type=int, default=101, help="storms follow until so many processes were killed")
    parser.add_argument("--runs", type=int, default=20, help="but no more than these")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--short", action="store_true", help="one storm; the reward need only rise")
    parser.add_argument("--keep", type=Path, help="where the runs are left; default: deleted when they are well")
    args = parser.parse_args()
    directory = args.keep or Path(tempfile.mkdtemp(prefix="mesh-chaos-"))
    size = Size(args.trainers, args.rollouts, args.steps)
    before = shared_memory()
    groups = None if args.short else undisturbed(directory / "undisturbed", size)
    kills, failed = 0, []
    for seed in range(args.seed, args.seed + (1 if args.short else args.runs)):
        checks, killed = trial(directory / f"seed-{seed}", seed, size, before, groups=groups)
        kills += killed
        failed += [seed] * any(check.complaints for check in checks)
        if kills >= args.kills:
            break
    print(f"{kills} processes were killed")
    if failed:
        print(f"FAILED with seed {', '.join(map(str, failed))}; the runs are in {directory}")
    elif not args.keep:
        shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
