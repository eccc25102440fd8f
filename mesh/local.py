"""A whole mesh on this machine: spawns the peers, watches them as an observer, shows them, and sums up."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from mesh import config as settings
from mesh import exits, launch, logs, view
from mesh.identity import PeerCard
from mesh.node import Node
from mesh.observer import Observer
from mesh.peer import WARNING
from mesh.plan import Plan, victim
from mesh.rundir import RunDir, fresh

PR_SET_PDEATHSIG = 1
MOST_TOLD = 1000


class Child:
    """One spawned peer. It dies with this process, whatever ends that."""

    def __init__(self, role: str, name: str, run: RunDir, arguments: list[str]):
        self.name = name
        self.role = role
        self.out = run.logs / f"{name}.out"
        command = [sys.executable, "-m", "mesh.node", "--role", role, "--config", str(run.config)]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(
                [*command, "--run", str(run.path), "--name", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then asks the peers to leave
                preexec_fn=_die_with_parent,
            )

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def first_error(self) -> str:
        """The first line that says what went wrong, for a peer that failed."""
        lines = self.out.read_text(errors="replace").splitlines()
        errors = [line for line in lines if " E " in line] or [line for line in lines if "error:" in line]
        return (errors or lines[-1:] or ["no output"])[0].split(" E error: ")[-1].removeprefix("error: ")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def up(
    *,
    config_path: Path,
    rollouts: int,
    trainers: int,
    run: Path | None,
    overrides: list[str],
    resume: bool,
    kill_rollout_at: float,
    add_rollout_at: float,
    plain: bool,
) -> int:
    """Run a mesh of some trainers and rollouts to the end. Returns the exit code: 0 only if a trainer finished the run
    and the ledger closed."""
    console = Console(soft_wrap=plain)  # a line stays one
    try:
        config = settings.load(config_path, overrides)
        if resume and run is None:
            raise ValueError("--resume needs --run: the directory of the run to continue")
        if resume and run is not None and not run.exists():
            raise ValueError(f"{run} does not exist: there is nothing to resume; leave --resume out to begin a run")
        for role, count, least in (
            ("trainers", trainers, config.mesh.min_trainers), ("rollouts", rollouts, config.mesh.min_rollouts)
        ):  # fmt: skip
            if count < least:
                raise ValueError(
                    f"--{role} {count} is fewer than mesh.min_{role} = {least}: the mesh would wait for more"
                )
        directory = RunDir.make(run or fresh(Path("runs"), config.run.name))
        if not resume and directory.summary.exists():
            raise ValueError(f"{directory.path} holds a finished run; choose another with --run, or --resume it")
        os.close(directory.claim("mesh up", alone=True))  # nobody has it; the trainers take it next
        threads = launch.threads_for(0, trainers + rollouts)
        config.trainer.threads = config.trainer.threads or threads
        config.rollout.threads = config.rollout.threads or threads
        directory.write_config(config)
        log = logs.setup("mesh-up", directory.logs / "mesh-up.log", stderr=False)
        name = f"view@{socket.gethostname()}"
        node = Node(role="observer", config=config, run=directory, name=name, launch=launch.detect(), log=log)
        local = Local(node, console, trainers, rollouts, resume, kill_rollout_at, add_rollout_at, plain)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return exits.FAILURE
    node.stop.install()
    try:
        return local.watch()
    finally:
        local.end()


class Local:
    """The processes of a local mesh, and an observer among them."""

    def __init__(
        self,
        node: Node,
        console: Console,
        trainers: int,
        rollouts: int,
        resume: bool,
        kill_at: float,
        add_at: float,
        plain: bool,
    ):
        self.node = node
        self.console = console
        self.plain = plain or not console.is_terminal
        self.steps = node.config.run.steps
        self.plan = Plan(self.steps, kill_at, add_at)
        self.start_s = 10.0  # from a rollout's start to its joining, until the first has shown it
        self.joined: set[str] = set()
        self.told: dict[str, None] = {}  # warnings that were printed
        self.observer = Observer(node)
        self.observer.on_look = self._look
        self.seen, self.peer = self.observer.seen, self.observer.peer
        self.peer.start()
        host = socket.gethostname()
        names = [f"trainer-{i}@{host}" for i in range(trainers)] if trainers > 1 else [f"trainer@{host}"]
        arguments = ["--trainers", str(trainers), *(["--resume"] if resume else [])]
        self.children = [Child("trainer", name, node.run, arguments) for name in names]
        self.children += [Child("rollout", f"rollout-{i}@{host}", node.run, []) for i in range(rollouts)]
        self.began = time.monotonic()

    def _look(self, workers: list[PeerCard]) -> None:
        for card in workers:
            if card.role == "rollout" and card.name not in self.joined:
                self._joined(card.name)

    def _joined(self, name: str) -> None:
        if not self.joined:
            self.start_s = time.monotonic() - self.began
        elif self.seen.step:
            self._mark(self.seen.step, f"{name} joined")
        self.joined.add(name)

    def watch(self) -> int:
        """Until the run is over: draw, do the planned kill and join, and notice who ended."""
        if self.plain:
            self.console.print(f"run directory {self.node.run.path}")
            while self._goes_on():
                self._turn()
                self.console.print(view.line(self.seen), highlight=False, soft_wrap=True)
                self._pause(2.0)
        else:
            with Live(console=self.console, refresh_per_second=4, transient=False) as live:
                while self._goes_on():
                    self._turn()
                    live.update(view.draw(self.seen, self.console.width))
                    self._pause(0.25)
                live.update(view.draw(self.seen, self.console.width))
        if self.node.stop.is_set():
            self.console.print("stopping: the peers save and leave; Ctrl-C again ends them at once")
            self.end()
            return exits.STOPPED
        if not self._trained():
            failed = next(c for c in self.children if c.role == "rollout")
            return self._failed(f"no rollout is left: {failed.name}: {failed.first_error()}")
        return self._sum_up()

    def _of(self, role: str) -> list[Child]:
        return [c for c in self.children if c.role == role]

    def _trained(self) -> bool:
        """Whether a trainer has finished the run, or none is left."""
        codes = [c.code for c in self._of("trainer")]
        return exits.FINISHED in codes or None not in codes

    def _goes_on(self) -> bool:
        """Until the run is over, the user stops it, or every rollout has failed by itself: then nobody would come, and
        the reason is known."""
        failed = all(c.code == exits.FAILURE for c in self._of("rollout"))
        alone = failed and not self.peer.live("rollout")
        return not self._trained() and not self.node.stop.is_set() and not alone

    def _pause(self, seconds: float) -> None:
        """Sleep, but look at the plan (kill, join) often enough to be on the step."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._goes_on():
            time.sleep(0.05)
            self._plan()

    def _plan(self) -> None:
        step = self.seen.step
        self.plan.see(step, time.monotonic())
        if self.plan.kill_now():
            running = {c.name: c for c in self._of("rollout") if c.code is None}
            if name := victim(list(running), self.joined):
                os.kill(running[name].process.pid, signal.SIGKILL)
                self._mark(step, f"{name} killed (SIGKILL)")
        if self.plan.add_now(self.start_s):
            number = sum(c.role == "rollout" for c in self.children)
            name = f"rollout-{number}@{socket.gethostname()}"
            self.children.append(Child("rollout", name, self.node.run, []))

    def _mark(self, step: int, text: str) -> None:
        self.seen.marks.append((step, text))
        self.peer.note(f"step {step}: {text}")
        if self.plain:
            self.console.print(f"step {step}: {text}", highlight=False)

    def _turn(self) -> None:
        for child in self.children:
            if child.code not in (None, exits.FINISHED) and child.name not in self.seen.gone:
                assert child.code is not None
                killed = child.code < 0
                how = (
                    f"killed by {signal.Signals(-child.code).name}"
                    if killed
                    else f"exit {child.code}: {child.first_error()}"
                )
                self.seen.gone[child.name] = how
                if self.plain:
                    self.console.print(f"{child.name} ended: {how}", highlight=False, markup=False)
        if self.plain:
            self._tell_warnings()

    def _tell_warnings(self) -> None:
        """What peers warn of, once, whoever says it first."""
        for _, status in self.seen.status.values():
            for _, text in status.events:
                if text.startswith(WARNING) and text not in self.told:
                    self.told[text] = None
                    self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        while len(self.told) > MOST_TOLD:
            del self.told[next(iter(self.told))]

    def _sum_up(self) -> int:
        run = self.node.run
        trainers = self._of("trainer")
        trainer = next((c for c in trainers if c.code == exits.FINISHED), trainers[0])
        if trainer.code != exits.FINISHED or not run.summary.exists():
            code = self._failed(f"{trainer.name} ended with exit code {trainer.code}: {trainer.first_error()}")
            return trainer.code if trainer.code and trainer.code > 0 else code
        summary = json.loads(run.summary.read_text())
        self.console.print(
            _summary_text(summary, run, self.node.config.evaluation.temperature), highlight=False, soft_wrap=True
        )
        return exits.FINISHED if summary["ledger_closed"] else exits.FAILURE

    def _failed(self, how: str) -> int:
        self.console.print(f"[red]error:[/] {escape(how)}", highlight=False)
        self.console.print(f"logs in {self.node.run.logs}", highlight=False, markup=False)
        return exits.FAILURE

    def end(self, grace_s: float = 8.0) -> None:
        """Nothing is left running: peers leave by themselves when the run is over, are asked to, or are killed."""
        deadline = time.monotonic() + (3.0 if exits.FINISHED in [c.code for c in self._of("trainer")] else 0.0)
        while time.monotonic() < deadline and any(c.code is None for c in self.children):
            time.sleep(0.05)
        for child in self.children:
            if child.code is None:
                child.process.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(c.code is None for c in self.children):
            time.sleep(0.05)
        for child in self.children:
            if child.code is None:
                child.process.kill()
                child.process.wait(5.0)
        self.peer.leave("the view is closed")


def _summary_text(summary: dict, run: RunDir, temperature: float) -> str:
    ledger, tokens = summary["ledger"], summary["ledger_tokens"]
    wide = max(len(str(v)) for v in ledger.values())
    rows = [
        "",
        f"accuracy   {_accuracy(summary, temperature)}",
        f"steps      {summary['steps']} in {summary['wall_s']:.1f} s, {summary['tokens_per_s']:,.0f} sampled tokens/s, "
        f"trainer waiting {summary['trainer_wait_share']:.1%}",
        f"weights    {summary['versions_published']} versions published, {summary['versions_proved']} proved; "
        f"lag {summary['max_lag_trained']} of at most {summary['max_lag_allowed']} trained",
        "ledger     " + "  ".join(f"{k} {v:>{wide}}" for k, v in ledger.items()) + "   groups",
        "           " + "  ".join(f"{k} {v}" for k, v in tokens.items()) + "   tokens",
        f"           {'closed: every credit is in exactly one account' if summary['ledger_closed'] else 'NOT CLOSED'}",
        "",
        f"model      {run.model}",
        f"metrics    {run.metrics}   (tensorboard --logdir {run.tensorboard})",
        f"curve      {run.reward_png}",
        f"ledger     {run.ledgers}",
    ]
    return "\n".join(rows)


def _accuracy(summary: dict, temperature: float) -> str:
    if summary["accuracy_after"] is None:
        return "not measured"
    before = "?" if summary["accuracy_before"] is None else f"{summary['accuracy_before']:.3f}"
    return (
        f"{before} -> {summary['accuracy_after']:.3f}   "
        f"(one sample at temperature {temperature:g} on {summary['accuracy_samples']} held-out prompts, "
        f"95% {summary['accuracy_after_low']:.3f}-{summary['accuracy_after_high']:.3f})"
    )
