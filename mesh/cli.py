"""The commands ``mesh-node`` and ``mesh``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", "-c", help="Settings, a TOML file.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: trainer.max_lag=0")
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="Run directory; default runs/<name>, under SLURM runs/<name>-<job>.")
]


class RoleName(StrEnum):
    auto = "auto"
    rollout = "rollout"
    trainer = "trainer"


_node = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_mesh = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of language models on a mesh of equal processes.",
)


@_node.command()
def _run_node(
    config: Config,
    role: Annotated[
        RoleName,
        typer.Option("--role", help="What this peer does; auto: by its rank and mesh.trainers."),
    ] = RoleName.auto,
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", help="tcp://host:port,... or file:///dir; default: the run directory.")
    ] = "",
    run: RunOption = None,
    set_: Set = None,
    address: Annotated[
        str, typer.Option("--address", "--interface", help="An IP address or interface of this machine: mesh.address.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Trainer: continue from the newest checkpoint; by itself after a requeue.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Shown to others and in file names.")] = "",
    trainers: Annotated[
        int, typer.Option("--trainers", min=0, help="Trainer: how many start together; 0: look for others a moment.")
    ] = 0,
) -> None:
    """One peer of the mesh, in the foreground."""
    from mesh.node import end, run_node

    end(
        run_node(
            role=role.value,
            config_path=config,
            rendezvous_url=rendezvous,
            run=run,
            overrides=set_,
            address=address,
            resume=resume,
            name=name,
            trainers=trainers,
        )
    )


@_mesh.command("up")
def _up(
    config: Annotated[Path, typer.Argument(help="Settings, a TOML file.")],
    rollouts: Annotated[int, typer.Option("--rollouts", "-m", min=1, help="Rollout peers.")] = 2,
    trainers: Annotated[int, typer.Option("--trainers", "-n", min=1, help="Trainer peers.")] = 1,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory; default the first free runs/<name>.")
    ] = None,
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --run from its newest checkpoint.")
    ] = False,
    kill_rollout_at: Annotated[
        float, typer.Option(min=0, max=1, help="Kill one rollout (SIGKILL) at this share of the steps; 0: never.")
    ] = 0.0,
    add_rollout_at: Annotated[
        float, typer.Option(min=0, max=1, help="One more rollout joins at about this share of the steps; 0: never.")
    ] = 0.0,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
) -> None:
    """A whole mesh on this machine: trainers, rollouts, and a live view of them."""
    from mesh.local import up

    raise typer.Exit(
        up(
            config_path=config,
            rollouts=rollouts,
            trainers=trainers,
            run=run,
            overrides=set_ or [],
            resume=resume,
            kill_rollout_at=kill_rollout_at,
            add_rollout_at=add_rollout_at,
            plain=plain,
        )
    )


@_mesh.command("top")
def _top(
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory; default the one in runs/ that was written last.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Settings of the run, where its directory is out of reach.")
    ] = None,
    rendezvous: Annotated[str, typer.Option("--rendezvous", help="tcp://host:port of one of its peers.")] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture; so does an output that is no terminal.")
    ] = False,
) -> None:
    """A running mesh: who is there and in what state, the reward, where time goes, what happened."""
    from mesh.top import top

    raise typer.Exit(top(run=run, config=config, rendezvous=rendezvous, once=once))


@_mesh.command("doctor")
def _doctor(
    run: Annotated[Path | None, typer.Option("--run", help="Of a running mesh; else where a run is to be.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings, a TOML file.")] = None,
    rendezvous: Annotated[str, typer.Option("--rendezvous", help="tcp://host:port of a peer of a running mesh.")] = "",
) -> None:
    """What is wrong with this machine, or with a running mesh, and what to change. Exit code 1 when something is."""
    from mesh.doctor import doctor

    raise typer.Exit(doctor(run=run, config=config, rendezvous=rendezvous))


@_mesh.command("report")
def _report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path | None, typer.Option("--out", help="Default RUN/report.html.")] = None,
) -> None:
    """One page about a run, finished or not: what was learned, where time and samples went, who came and died."""
    from roles.report import write_report

    try:
        print(write_report(run, out))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


@_mesh.command("trace")
def _trace(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path | None, typer.Option("--out", help="Default RUN/trace.json.")] = None,
) -> None:
    """What every peer did and when, on one clock: a file for ui.perfetto.dev or chrome://tracing."""
    from roles.trace import write_trace

    try:
        path, processes = write_trace(run, out)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None
    for p in processes:
        if p.error is None:
            print(f"{p.peer}: nothing tells how its clock differs from others; its times are as it wrote them")
        elif p.offset:
            print(f"{p.peer}: {p.offset:+.3f} s added to its clock, right to within {p.error:.3f} s")
    print(f"{path}: open it at ui.perfetto.dev")


_config = typer.Typer(no_args_is_help=True, help="Look at settings.")
_mesh.add_typer(_config, name="config")


@_config.command("show")
def _show(config: Annotated[Path, typer.Argument()], set_: Set = None) -> None:
    """Print the effective settings, as TOML; behind each one that was set, where."""
    from mesh import config as settings

    try:
        print(settings.annotated(config, set_), end="")
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


@_config.command("check")
def _check(config: Annotated[Path, typer.Argument()], set_: Set = None) -> None:
    """Whether these settings can be started with; loads no torch."""
    from mesh import config as settings

    try:
        settings.load(config, set_)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{config} is good")


def node() -> None:
    """Entry point of ``mesh-node``."""
    _node()


def main() -> None:
    """Entry point of ``mesh``."""
    _mesh()
