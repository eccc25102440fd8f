"""Storms over real runs, until so many processes were killed; the seed of each is printed, and one can be repeated:

python -m tests.chaos                      until over 100 kills, as `make chaos`
python -m tests.chaos --seed 7 --runs 1    one storm
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.checks import Check, shared_memory
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
    parser.add_argument("--keep", type=Path, help="where the runs are left; default: deleted when they are well")
    args = parser.parse_args()
    directory = args.keep or Path(tempfile.mkdtemp(prefix="mesh-chaos-"))
    size = Size(args.trainers, args.rollouts, args.steps)
    before = shared_memory()
    groups = undisturbed(directory / "undisturbed", size)
    kills, failed = 0, []
    for seed in range(args.seed, args.seed + args.runs):
        checks, killed = trial(directory / f"seed-{seed}", seed, size, before, groups=groups)
        kills += killed
        failed += [seed] * any(check.complaints for check in checks)
        if kills >= args.kills:
            break
    enough = Check("enough kills", [] if kills >= args.kills or args.runs < 20 else [f"under {args.kills}"], f"{kills}")
    print(enough)
    if failed:
        print(f"FAILED with seed {', '.join(map(str, failed))}; the runs are in {directory}")
    elif not args.keep:
        shutil.rmtree(directory)
    return 1 if failed or enough.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
