"""What a death costs: steps a minute before, during and after, and seconds to the next step.

A mesh of two trainers and three rollouts trains the quickstart; by turns one peer is killed (SIGKILL), the others go on
without it for a while, and a new one takes its place. Everything is compared with the same run undisturbed, just before
the death, and with what is done where a death ends the job: all of it is stopped and started again from its checkpoint.
README.md beside this file says what each line means.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parts.job import Job
from parts.measure import ROOT, Result, Spread, compare
from parts.picture import Panel, point
from parts.script import Findings, flags, run

from mesh.presets import PRESETS

CONFIG = ROOT / "configs/quickstart.toml"
TRAINERS, ROLLOUTS = 2, 3
ENDLESS = ["run.steps=1000000", "task.heldout_prompts=0", "evaluation.every_steps=0"]
DEATHS = ("a rollout", "a trainer", "the publisher")
RESTART = "everything"


@dataclass
class Found:
    """Of one kind of death, round by round."""

    before: list[float] = field(default_factory=list)  # steps a minute, undisturbed
    during: list[float] = field(default_factory=list)  # from the death on, nobody in its place
    noticed: list[float] = field(default_factory=list)  # from the time on by which it must have been noticed
    after: list[float] = field(default_factory=list)  # with another in its place
    next_s: list[float] = field(default_factory=list)  # from the death to the next step
    pause_s: list[float] = field(default_factory=list)  # the longest time between two steps that it caused
    redone: list[float] = field(default_factory=list)  # steps that had to be made again


def main() -> None:
    parser = flags(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all deaths, about five minutes each")
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    rounds, window_s = (1, 5.0) if arguments.quick else (arguments.rounds, 20.0)
    directory = Path(tempfile.mkdtemp(prefix="mesh-recovery-"))
    job = Job(directory / "run", CONFIG, TRAINERS, ROLLOUTS, ENDLESS)
    try:
        found = kill(job, rounds, window_s)
    except BaseException:
        print(f"what was written so far is in {directory}", file=sys.stderr)
        raise
    finally:
        job.close()
    shutil.rmtree(directory)
    ours, theirs = (found[name] for name in DEATHS), [found[RESTART]] * len(DEATHS)
    next_s = {
        name: [point(i, Spread.of(f.next_s)) for i, f in enumerate(which)]
        for name, which in (("the mesh goes on", ours), ("all is started again", theirs))
    }
    panel = Panel("from a death to the next step", "seconds", lines=next_s, ticks=list(DEATHS), log_y=True)
    return Findings(results(found, window_s), [panel])


def kill(job: Job, rounds: int, window_s: float) -> dict[str, Found]:
    found = {name: Found() for name in (*DEATHS, RESTART)}
    job.soon(job.whole, "all peers work")
    for i in range(rounds):
        for name in (*DEATHS[i % len(DEATHS) :], *DEATHS[: i % len(DEATHS)]):
            one_dies(job, name, found[name], window_s)
        all_die(job, found[RESTART], window_s)
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def one_dies(job: Job, name: str, found: Found, window_s: float) -> None:
    found.before.append(rate(job, *job.goes_on(window_s)))
    publisher = job.publisher()
    others = [child for child in job.of("trainer") if child is not publisher]
    victim = {"a rollout": job.of("rollout")[0], "a trainer": others[0], "the publisher": publisher}[name]
    at = job.kill(victim)
    detected = at + PRESETS[job.config.mesh.preset].detection_s()
    job.soon(lambda: bool(job.made(at)) and time.time() >= detected, "a step after the death")
    _, until = job.goes_on(window_s)
    found.during.append(rate(job, at, until))
    found.noticed.append(rate(job, detected, until))
    found.next_s.append(job.made(at)[0] - at)
    found.pause_s.append(pause(job, at, until))
    found.redone.append(0.0)
    job.start(victim.role, *(["--resume"] if victim.role == "trainer" else []))
    job.soon(job.whole, "another in its place")
    found.after.append(rate(job, *job.goes_on(window_s)))


def all_die(job: Job, found: Found, window_s: float) -> None:
    """Also what is done where one death ends the job; here nobody waits until it is noticed."""
    found.before.append(rate(job, *job.goes_on(window_s)))
    at = job.kill(*job.children)
    highest = max(step.number for step in job.steps())
    job.start_all("--resume", "--trainers", str(TRAINERS))
    job.soon(lambda: bool(job.made(at)), "a new step after the restart")
    again = [step for step in job.steps() if step.at > at and step.number <= highest]
    _, until = job.goes_on(window_s)
    found.during.append(rate(job, at, until))
    found.next_s.append(job.made(at)[0] - at)
    found.pause_s.append(pause(job, at, until))
    found.redone.append(float(len({step.number for step in again})))
    job.soon(job.whole, "all peers work again")
    found.after.append(rate(job, *job.goes_on(window_s)))


def rate(job: Job, since: float, until: float) -> float:
    """New steps a minute."""
    return 60 * len(job.made(since, until)) / (until - since)


def pause(job: Job, since: float, until: float) -> float:
    made = [since, *job.made(since, until)]
    return max((b - a for a, b in itertools.pairwise(made)), default=until - since)


def results(found: dict[str, Found], window_s: float) -> list[Result]:
    restart = found[RESTART]
    detection = PRESETS["local"].detection_s()
    settings = {"config": CONFIG.name, "trainers": TRAINERS, "rollouts": ROLLOUTS, "window_s": window_s,
                "without": ENDLESS, "detection_s": detection}  # fmt: skip
    rows: list[Result] = []
    for name, f in found.items():

        def row(what: str, mesh: Sequence[float], f: Found = f, name: str = name, **rest) -> Result:
            what = f"steps a minute, {name} killed{' and started again' if f is restart else ''}: {what}"
            return compare(
                what,
                "1/min",
                mesh,
                f.before,
                "undisturbed, just before",
                settings=settings,
                more_is_better=True,
                **rest,
            )

        rows.append(row("from the death on", f.during, details={"longest_pause_s": Spread.of(f.pause_s).median}))
        if f.noticed:
            rows.append(row("once it is noticed", f.noticed, aim="the survivors' share, within 5%"))
        rows.append(row("another in its place", f.after))
    for name in DEATHS:
        aim = "" if name == "a rollout" else f"under {detection + 2:.1f} s: detection and 2 s"
        what, how = f"from the death of {name} to the next step", "the job is killed and started again"
        rows.append(compare(what, "s", found[name].next_s, restart.next_s, how, aim=aim, settings=settings))
    rows.append(
        Result(
            "from the death of everything to the first new step after a restart",
            "s",
            Spread.of(restart.next_s),
            details={"steps_made_again": Spread.of(restart.redone).median},
            settings=settings,
        )
    )
    return rows


if __name__ == "__main__":
    main()
