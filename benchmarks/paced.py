"""What the protocol adds to the waits: a real mesh whose sampling and training are drawn waits, against the ideal.

Synchronous and asynchronous runs get the same draws. With ``Tg`` the time a batch takes to sample, ``Tt`` to train and
``Tw`` until a rollout has proved new weights, nobody can make a step in less than

    synchronous    E[longest completion of a batch] + Tt + Tw     (Tw is measured; the ideal here counts it as 0)
    asynchronous   max(Tg, Tt), Tg = groups a step x E[longest completion of a group] / groups sampled at a time

and efficiency is the ideal over what was measured. How much there is to gain from being asynchronous is what sampling
and training overlap, and the headroom of stragglers: how much longer the longest of a batch takes than the mean.
"""

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from parts.measure import Result, Spread, compare
from parts.paced_mesh import GROUP, Ran, Spec, Waits, paced_run
from parts.picture import Panel, point
from parts.script import Findings, flags, run

SLOTS = 2  # groups at a time, of each rollout
WARM = 10  # steps, in which the window of credits grows; half of them where it is constant, as synchronously
BLOCK = 5  # steps a value
TWICE = "twice as long"  # what the protocol costs is the same: as a share it is half
MANY = 20_000  # draws, for the expectation of a longest


def kinds(step_s: float) -> list[Waits]:
    return [
        Waits("balanced", generate_s=step_s, train_s=step_s),
        Waits("generation-bound", generate_s=2 * step_s, train_s=step_s, sigma=0.2),
        Waits("heavy-tailed", generate_s=step_s, train_s=step_s, sigma=1.0),
        Waits(TWICE, generate_s=2 * step_s, train_s=2 * step_s),
    ]


@dataclass
class Cell:
    waits: Waits
    peers: int
    lag: int
    ran: Ran

    @property
    def step_s(self) -> list[float]:
        """Of blocks of steps, the mean."""
        at = [row["time"] for row in self.ran.rows]
        return [(at[i + BLOCK] - at[i]) / BLOCK for i in range(self.warm - 1, len(at) - BLOCK, BLOCK)]

    @property
    def warm(self) -> int:
        return WARM if self.lag else WARM // 2

    def ideal(self) -> float:
        groups = np.concatenate([d[: len(d) // GROUP * GROUP].reshape(-1, GROUP).max(1) for d in self.ran.drawn])
        if self.lag:
            return max(self.waits.train_s, float(groups.mean()))  # as many groups at a time as a step takes
        batch = SLOTS * (self.peers - 1)
        return self.waits.train_s + float(np.random.default_rng(0).choice(groups, (MANY, batch)).max(1).mean())


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument(
        "--steps", type=int, default=25, help=f"of each run, the first {WARM} not counted; half as many if synchronous"
    )
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="some of them: balanced, generation-bound, ...")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4], help="trainer.max_lag; 0 is synchronous")
    parser.add_argument("--step-s", type=float, default=0.5, help="what a batch takes to train")
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 32], help="one of them the trainer (up to 64)")
    parser.add_argument("--weights-mib", type=float, default=1.0)
    parser.add_argument("--wait-target", type=float, default=0.05, help="trainer.wait_target")
    parser.add_argument("--seed", type=int, default=0)
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    step_s, steps, sizes, lags = arguments.step_s, arguments.steps, arguments.peers, arguments.lags
    if arguments.quick:
        step_s, steps, sizes, lags = 0.05, WARM + BLOCK, [3], [0, 4]
    cells: list[Cell] = []
    directory = Path(tempfile.mkdtemp(prefix="mesh-paced-"))
    for peers in sizes:
        for waits in kinds(step_s)[: 1 if arguments.quick or peers != sizes[0] else None]:
            if waits.name not in (arguments.kinds or [waits.name]):
                continue
            some = lags if peers == sizes[0] else lags[-1:]
            for lag in some if waits.name != TWICE else [lag for lag in some if lag]:
                spec = Spec(
                    directory=str(directory / f"{waits.name}-{peers}-{lag}"),
                    rollouts=peers - 1,
                    slots=SLOTS,
                    groups_per_step=SLOTS * (peers - 1),
                    max_lag=lag,
                    steps=steps if lag else max(steps // 2, WARM // 2 + BLOCK),
                    waits=waits,
                    seed=arguments.seed,
                    weights_mib=arguments.weights_mib,
                    wait_target=arguments.wait_target,
                )
                limit_s = 60.0 + steps * 4 * (waits.train_s + waits.most * waits.generate_s)
                cells.append(Cell(waits, peers, lag, paced_run(spec, limit_s)))
    shutil.rmtree(directory)
    return Findings([row(c, arguments) for c in cells], pictures(cells))


def row(cell: Cell, arguments: argparse.Namespace) -> Result:
    made = cell.step_s
    ideal, rows = cell.ideal(), cell.ran.rows[cell.warm :]
    drawn = np.concatenate(cell.ran.drawn)
    ledger = cell.ran.summary["ledger"]
    how = f"max_lag {cell.lag}" if cell.lag else "synchronous"
    return compare(
        f"a step, {cell.waits.name}, {cell.peers} peers, {how}",
        "s",
        made,
        [ideal] * len(made),
        "ideal",
        aim="efficiency 0.97" if cell.lag and cell.peers == 8 else "",
        details={
            "efficiency": ideal / float(np.mean(made)),
            "trainer_waits": float(np.mean([r["time/wait_s"] / r["time/step_s"] for r in rows])),
            "straggler_headroom": float(drawn.max() / drawn.mean()) if not cell.waits.sigma else _headroom(cell, drawn),
            "superseded_share": ledger["superseded"] / max(1, ledger["issued"]),
        },
        settings={
            "waits": {name: getattr(cell.waits, name) for name in cell.waits.__struct_fields__},
            "slots": SLOTS, "groups_per_step": SLOTS * (cell.peers - 1), "group_size": GROUP,
            "steps": cell.ran.rows[-1]["step"],
            "from_step": cell.warm, "weights_mib": arguments.weights_mib, "wait_target": arguments.wait_target,
            "seed": arguments.seed, "preset": "lan",
        },
    )  # fmt: skip


def _headroom(cell: Cell, drawn: np.ndarray) -> float:
    """E[longest of a batch] / E[mean]."""
    batch = np.random.default_rng(0).choice(drawn, (MANY, SLOTS * (cell.peers - 1) * GROUP))
    return float(batch.max(1).mean() / drawn.mean())


def pictures(cells: list[Cell]) -> list[Panel]:
    first = cells[0].peers
    names = list(dict.fromkeys(c.waits.name for c in cells))
    steps = Panel(f"a step, {first} peers", "seconds", ticks=[name.replace("-", "\n") for name in names])
    efficiency = Panel("efficiency, balanced", "ideal / measured", x="peers", log_x=True, level=1.0)
    for lag in dict.fromkeys(c.lag for c in cells):
        how = f"max_lag {lag}" if lag else "synchronous"
        mine = [c for c in cells if c.lag == lag]
        steps.lines[how] = [point(names.index(c.waits.name), Spread.of(c.step_s)) for c in mine if c.peers == first]
        efficiency.lines[how] = [
            point(c.peers, Spread.of([c.ideal() / s for s in c.step_s])) for c in mine if c.waits.name == names[0]
        ]
    steps.lines["ideal asynchronous"] = [
        [names.index(c.waits.name), *[c.ideal()] * 3] for c in cells if c.lag == cells[-1].lag and c.peers == first
    ]
    return [steps, efficiency]


if __name__ == "__main__":
    main()
