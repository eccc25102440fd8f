"""What a run has come to, and who is told: rows of metrics, the log, observers, the summary and the reward curve."""

import collections
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from mesh.exits import GivenUp
from mesh.identity import PeerCard, PeerId
from mesh.node import Node
from mesh.rundir import write_whole
from mesh.version import Lineage, Version
from roles.metrics import process_figures
from roles.outlets import metrics_of
from roles.trainer import ledger
from roles.trainer.figures import Unrewarded, Watch, unrewarded_reasons
from roles.trainer.intake import Intake
from transport import spans
from transport.messages import Report, Status
from transport.weights.publisher import Publisher


class Progress:
    """The trainer's main thread writes; handlers marked *loop* run on the peer's loop.

    ``earlier`` has the sums of the processes of this run before this one, as the checkpoint kept them."""

    def __init__(self, node: Node, peer: Any, publisher: Publisher, intake: Intake, earlier: dict[str, float]):
        self.node, self.peer, self.publisher, self.intake = node, peer, publisher, intake
        self.steps = node.config.run.steps
        self.earlier = earlier
        self.began = time.monotonic()
        self.metrics = metrics_of(node, peer)
        self.watch = Watch()
        self.unrewarded = Unrewarded(node.config.task.reward)
        self.state = "starting"
        self.step = 0
        self.version: Version | None = None
        self.figures: dict[str, float] = {}
        self.split: dict[str, float] = collections.defaultdict(float)
        self.totals: dict[str, float] = collections.defaultdict(float)
        self.history: collections.deque[tuple[int, float]] = collections.deque(maxlen=2000)
        self.evaluations: list[dict[str, float]] = []
        self.proved: set[Version] = set()
        self.probes: dict[PeerId, tuple[float, float]] = {}  # difference and floor of the last report
        self.others: dict[PeerId, dict[str, float]] = {}  # what other trainers had published when last heard of
        self._others_before: dict[PeerId, dict[str, float]] = {}  # of it, what ``earlier`` has already
        self._taken_in = False
        self._happened: collections.deque[tuple[str, str]] = collections.deque(maxlen=1000)
        self._rollouts: dict[PeerId, str] = {}
        peer.on(Report, self._reported)
        peer.on_members(self._members)
        peer.on_departed(self._departed)
        peer.look = self.status

    def resume(self, step: int, earlier: dict[str, float], *, taken_in: bool = False) -> None:
        """Go on at ``step`` with the sums of a checkpoint, or of the trainer that takes this one in."""
        self.step, self.earlier, self.began = step, earlier, time.monotonic()
        self._taken_in = taken_in
        self.others.clear()
        self._others_before.clear()

    def published(self) -> dict[str, float]:
        """What this process has published so far, for the sums of the other trainers."""
        stats = self.publisher.stats()
        counts = {"published": stats.publications, "skipped": stats.skipped, "proved": len(self.proved)}
        return {name: float(n) for name, n in counts.items()}

    def others_published(self, peer: PeerId, figures: dict[str, float]) -> None:
        """The same of another trainer, with each of its gradients."""
        counts = {name: figures.get(name, 0.0) for name in ("published", "skipped", "proved")}
        if peer not in self._others_before:
            self._others_before[peer] = counts if self._taken_in else dict.fromkeys(counts, 0.0)
        self.others[peer] = counts

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to this step's time ``name``."""
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.split[name] += ended - started
        spans.record(name.removesuffix("_s"), started, ended, version=str(self.version))

    def waited(self, elapsed: float) -> float:
        """The share of this step, ``elapsed`` seconds long, that the trainer waited for groups."""
        return self.split["wait_s"] / max(elapsed, 1e-9)

    def stepped(self, figures: dict[str, float], elapsed: float, epoch: float) -> None:
        """One step is done: ``figures`` of its learning, ``elapsed`` seconds in all, ``epoch`` with its fraction.

        Raises GivenUp when no completion of the last steps has a reward."""
        delivery = self.peer.call(self.intake.delivery.metrics)
        failures = self.intake.take_failures()
        self.totals["max_lag"] = max(self.totals["max_lag"], figures["lag_highest"])
        self.totals["step_s"] += elapsed
        self.totals["wait_s"] += self.split["wait_s"]
        self.figures = {
            **figures,
            **{f"time/{name}": seconds for name, seconds in self.split.items()},
            "time/step_s": elapsed,
            "wait_share": self.waited(elapsed),
            "wall_s": self.sums()["wall_s"],
            "epoch": epoch,
            "tokens_per_s": delivery["tokens/delivered"] / max(1e-9, time.monotonic() - self.began),
            **delivery,
            **{f"weights/{name}": float(value) for name, value in vars(self.publisher.stats()).items()},
            "weights/proved": float(len(self.proved)),
            **{f"failures/{kind}": float(n) for kind, n in failures.items()},
            **self._probe_figures(),
            **process_figures(),
            "longest_gap_s": self.peer.longest_gap_s,
        }
        self._write_events()
        self.metrics.row(self.step, self.figures)
        unrewarded = self.unrewarded.see(figures["samples"], figures["unrewarded"], failures)
        for text in [*self.watch.see(self.figures), *([unrewarded] if unrewarded else [])]:
            self._warn(self.step, text)
        if "reward" in self.figures:
            self.history.append((self.step, self.figures["reward"]))
        self.peer.log.info(
            "step %d/%d reward %s lag %.1f masked %.0f%% loss %.4f waited %.0f%% of %.2f s",
            self.step,
            self.steps,
            f"{self.figures['reward']:.3f}" if "reward" in self.figures else "none",
            self.figures.get("lag_mean", 0.0),
            100 * self._masked_share(),
            self.figures["loss"],
            100 * self.figures["wait_share"],
            elapsed,
        )
        if hopeless := self.unrewarded.hopeless():
            self.metrics.close()
            raise GivenUp(hopeless)

    def evaluated(self, figures: dict[str, float]) -> None:
        """An evaluation is complete."""
        self.evaluations.append(figures)
        step = int(figures["eval_version"])
        self.metrics.row(step, figures)
        unscored = int(figures["eval_unscored"])
        if "eval_accuracy" in figures:
            self.peer.note(
                f"accuracy {figures['eval_accuracy']:.3f} at step {step} "
                f"(95% {figures['eval_low']:.3f}-{figures['eval_high']:.3f}, n = {figures['eval_samples']:.0f}"
                f"{f', {unscored} unscored' if unscored else ''})"
            )
        if unscored:
            kinds = {name.partition("/")[2]: int(n) for name, n in figures.items() if name.startswith("eval_failures/")}
            total = unscored + int(figures["eval_samples"])
            self._warn(
                step,
                f"{unscored} of {total} held-out answers at step {step} have no reward and are not in the accuracy: "
                f"{unrewarded_reasons(kinds, self.node.config.task.reward)}",
            )

    def _warn(self, step: int, text: str) -> None:
        self.metrics.event(step, "warning", text)
        self.peer.note(text, "warning")

    def sums(self) -> dict[str, float]:
        """What has been counted since the run began, over all its trainer processes; kept in each checkpoint."""
        here = {
            "wall_s": time.monotonic() - self.began,
            "step_s": self.totals["step_s"],
            "wait_s": self.totals["wait_s"],
            **self.published(),
        }
        for peer, counts in self.others.items():
            for name, n in counts.items():
                here[name] += n - self._others_before[peer][name]
        sums = {name: self.earlier.get(name, 0.0) + value for name, value in here.items()}
        sums["max_lag"] = max(self.earlier.get("max_lag", 0.0), self.totals["max_lag"])
        if "accuracy_before" in self.earlier:
            sums["accuracy_before"] = self.earlier["accuracy_before"]
        elif measured := [e["eval_accuracy"] for e in self.evaluations if "eval_accuracy" in e]:
            sums["accuracy_before"] = measured[0]
        return sums

    def close(self) -> None:
        self._write_events()
        self.metrics.close()

    def finished(self, lineage: Lineage, alive: Collection[PeerId]) -> dict[str, Any]:
        """The run is over, with weights of ``lineage`` and these trainers ``alive``: write the last events,
        ``summary.json`` and ``reward.png``; returns the summary."""
        self.close()
        summary = self._summary(lineage, alive)
        write_whole(self.node.run.summary, json.dumps(summary, indent=1) + "\n")
        self._plot()
        return summary

    def _summary(self, lineage: Lineage, alive: Collection[PeerId]) -> dict[str, Any]:
        replayed = ledger.replay(self.node.run.ledgers.glob("*.jsonl"), lineage, alive)
        sums = self.sums()
        last = self.evaluations[-1] if self.evaluations else {}
        after = last if last.get("eval_version") == self.step else {}  # an older one says nothing of this model
        tokens = {name: n for name, n in replayed.tokens.items() if name != "lost"}
        return {
            "steps": self.step,
            "wall_s": sums["wall_s"],
            "accuracy_before": sums.get("accuracy_before"),
            "accuracy_after": after.get("eval_accuracy"),
            "accuracy_after_low": after.get("eval_low"),
            "accuracy_after_high": after.get("eval_high"),
            "accuracy_samples": int(after.get("eval_samples", 0)),
            "versions_published": int(sums["published"]),
            "versions_proved": int(sums["proved"]),
            "snapshots_skipped": int(sums["skipped"]),
            "max_lag_allowed": self.node.config.trainer.max_lag,
            "max_lag_trained": int(sums["max_lag"]),
            "tokens_per_s": replayed.tokens["delivered"] / max(sums["wall_s"], 1e-9),
            "trainer_wait_share": sums["wait_s"] / max(sums["step_s"], 1e-9),
            "ledger": replayed.groups,
            "ledger_tokens": {**tokens, "failed": tokens["failed"] + replayed.tokens["lost"]},
            "ledger_closed": replayed.closes() and replayed.groups["in_flight"] == 0,
            "prompts_closed_untrained": [{"epoch": c.epoch, "prompt": c.prompt, "why": c.why} for c in replayed.closed],
        }

    def _plot(self) -> None:
        from roles.plot import plot_run

        try:
            plot_run(self.node.run.path, self.node.run.reward_png, title=self.node.config.run.name)
        except (ValueError, OSError) as e:  # the picture is not the run
            self.peer.note(f"the reward curve could not be drawn: {e}", "warning")

    def _write_events(self) -> None:
        while self._happened:
            self.metrics.event(self.step, *self._happened.popleft())

    def _probe_figures(self) -> dict[str, float]:
        """The largest difference between the probe's log-probabilities here and at a live receiver, and its floor."""
        probes = list(self.probes.values())
        return {"probe/difference": max(probes)[0], "probe/floor": max(probes)[1]} if probes else {}

    def _masked_share(self) -> float:
        masked = self.figures.get("tokens_masked", 0.0)
        kept = self.figures.get("tokens_trained", 0.0) + masked
        return masked / kept if kept else 0.0

    # ------------------------------------------------------------------------------------------------------------------
    # On the loop
    # ------------------------------------------------------------------------------------------------------------------

    def _reported(self, receiver: PeerId, report: Report) -> None:
        if report.proved is not None:
            self.proved.add(report.proved)
            self.probes[receiver] = (report.difference, report.floor)

    def _members(self) -> None:
        now = {card.id: card.name for card in self.peer.live("rollout")}
        for peer, name in now.items():
            if peer not in self._rollouts and self.step > 0:
                self._happened.append(("joined", f"{name} joined"))
        self._rollouts = now

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        self.probes.pop(card.id, None)
        if card.role in ("rollout", "trainer"):
            how = "died" if dead else "left"
            self._happened.append((how, f"{card.name} {how}"))

    def status(self) -> Status:
        """What an observer is shown."""
        f = self.figures
        accounts = self.intake.delivery.accounts
        figures = {
            "step": float(self.step),
            "tokens_per_s": f.get("tokens_per_s", 0.0),
            "groups": float(len(self.intake.buffer)),
            "superseded": float(accounts.groups["superseded"]),
            "in_flight": float(accounts.groups["in_flight"]),
            "masked_share": self._masked_share(),
            "wait_share": f.get("wait_share", 0.0),
            "lag_mean": f.get("lag_mean", 0.0),
            "wall_s": f.get("wall_s", 0.0),
            "host_memory_used": psutil.virtual_memory().percent / 100,
            **{f"ledger/{name}": float(count) for name, count in accounts.groups.items()},
            **{name: value for name, value in f.items() if name.startswith("time/")},
        }
        if "reward" in f:
            figures["reward"] = f["reward"]
        if self.evaluations and "eval_accuracy" in self.evaluations[-1]:
            figures["accuracy"] = self.evaluations[-1]["eval_accuracy"]
        return Status(
            seq=0,
            state=self.peer.short.text if self.peer.short is not None else self.state,
            version=self.version,
            figures=figures,
            texts={"weights": self.publisher.told.text},
            events=list(self.peer.events)[-8:],
            history=list(self.history),
        )
