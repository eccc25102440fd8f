"""The trainer: the algorithm, in order.

    open a term; publish the weights it starts from; evaluate
    for each step:
        wait for the oldest admissible groups             (intake.py: credits, buffer, ledger)
        advantages, mask, loss, gradient                  (advantages.py, batch.py, losses.py, policy.py)
        optimizer step
        publish: probe, snapshot; the broadcast goes on in the background   (transport/weights/)
        settle: record what was trained, hand out verdicts and new credits
    evaluate; save the model; tell everybody that the run is over

There is one trainer so far: its gradient formation has one member, and between the gradient and the optimizer step
nothing is exchanged. Everything else is written for several (terms, lineage, ballots).
"""

import collections
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mesh.exits import FINISHED, Requeue, Slept, Stopped
from mesh.identity import PeerCard, PeerId
from mesh.node import Node
from mesh.rundir import write_whole
from mesh.version import Lineage, Version
from roles.device import backend_of, device_of
from roles.formations import group_builder
from roles.metrics import MetricsWriter, process_figures
from roles.models import DTYPES
from roles.rollout.tasks import load_task
from roles.trainer import checkpoint, ledger
from roles.trainer.batch import samples_of
from roles.trainer.buffer import Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.figures import Watch, step_figures
from roles.trainer.intake import Intake, open_ledger
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import Policy, load_policy
from transport.messages import Go, Member, Probe, Report, Status
from transport.weights.manifest import Manifest
from transport.weights.publisher import Publisher

OPEN_TERM_S = 10.0


class Trainer:
    """One trainer peer. All methods run on the main thread unless they say otherwise."""

    def __init__(self, node: Node, peer: Any, policy: Policy, data: Dataset, restored: checkpoint.Found):
        self.node, self.peer, self.policy, self.data = node, peer, policy, data
        self.config = node.config
        self.step = 0
        self.lineage = Lineage()
        self.groups_trained = 0
        self.earlier: dict[str, float] = {}  # sums of the processes of this run before this one
        self.threshold = DriftThreshold(self.config.trainer.negative_max_drift)
        self.watch = Watch()
        wire = self.config.weights.wire_dtype
        self.wire_dtype = policy.dtype if wire == "auto" else DTYPES[wire]
        buffers = {name for name, _ in policy.model.named_buffers()}
        manifest = Manifest.from_state(policy.named_state(), buffers, self.wire_dtype)
        backend = backend_of(self.config.weights.backend, str(policy.device))
        self.publisher = Publisher(peer, manifest, self.config.weights, group_builder(peer, backend))
        self.proved: set[Version] = set()
        rng = np.random.default_rng(self.config.run.seed)
        self.tokens = rng.integers(0, policy.vocabulary, self.config.weights.probe_tokens).astype(np.int32)
        peer.on(Report, self._reported)
        first_id = 0
        if restored.state is not None:
            self._restore(restored)
        first_id = _close_dead_ledgers(node)
        self.ledger = open_ledger(node.run.ledgers, peer.id, peer.run, first_id)
        self.intake = Intake(peer, self.config, data, self.ledger, first_id=first_id, vocabulary=policy.vocabulary)
        self.metrics = MetricsWriter(node.run.path, node.name, on_error=lambda text: peer.note(text, "warning"))
        self.figures: dict[str, float] = {}
        self.split: dict[str, float] = collections.defaultdict(float)
        self.totals: dict[str, float] = collections.defaultdict(float)
        self.history: collections.deque[tuple[int, float]] = collections.deque(maxlen=2000)
        self.evaluations: list[dict[str, float]] = []
        self.state = "starting"
        self.happened: collections.deque[tuple[str, str]] = collections.deque(maxlen=1000)
        self._rollouts: dict[str, str] = {}
        peer.on_members(self._members)
        peer.on_departed(self._departed)
        peer.look = self.status
        for text in policy.notes:
            peer.note(text, "warning")

    # ------------------------------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.began = time.monotonic()
        self.open_term()
        self.publish()
        self.intake.advance(self.version, self.lineage)
        self.evaluate()
        while self.step < self.config.run.steps:
            started = time.perf_counter()
            self.split.clear()
            batch = self.wait()
            masked, failed = self.learn(batch)
            if _due(self.step, self.config.evaluation.every_steps):
                self.evaluate()
            self.publish()
            self.settle(batch, masked, failed, time.perf_counter() - started)
            self.report(time.perf_counter() - started)
            if _due(self.step, self.config.checkpoint.every_steps):
                self.save()
        return self.finish()

    @property
    def version(self) -> Version:
        return Version(self.lineage.terms[-1][0], self.step)

    def open_term(self) -> None:
        """Form the gradient formation and open its term, above every term this run has ever had."""
        others = [card for card in self.peer.live("trainer") if card.id != self.peer.id]
        if others:
            raise ValueError(
                f"this run has a trainer already: {others[0].name} on {others[0].host}; a mesh has one trainer so far: "
                "stop that one, or start this one with another --run"
            )
        formed: list[Go] = []
        ready = threading.Event()

        def on_go(go: Go) -> None:
            formed.append(go)
            ready.set()

        self.peer.on_go("gradients", on_go)
        seen = [card.highest_term for card in self.peer.live()]
        floor = max([self.node.run.highest_term(), *seen, *(t.counter for t, _ in self.lineage.terms)])

        def convene() -> None:
            self.peer.convening["gradients"].raise_floor(floor)
            self.peer.convene("gradients", [Member(self.peer.id)])

        self.peer.call(convene)
        if not ready.wait(OPEN_TERM_S):
            raise RuntimeError(f"no gradient formation within {OPEN_TERM_S:.0f} s, though it has one member only")
        term = formed[-1].ballot
        self.node.run.opened_term(term.counter)
        self.lineage = self.lineage.open(term, self.step)
        self.publisher.open_term(self.lineage)
        self.peer.update_card(highest_term=term.counter)

    def publish(self) -> None:
        """Snapshot the weights and hand them to the publisher's thread, with a probe that receivers can check."""
        with self.timed("probe_s"):
            probe = Probe(tokens=self.tokens, logprobs=self.policy.probe(self.tokens, self.wire_dtype))
        with self.timed("snapshot_s"):
            self.publisher.publish(self.version, self.policy.named_state(), probe)

    def wait(self) -> list[Trajectory]:
        """The groups of this step: oldest first, none over ``max_lag``, none of another lineage."""
        self.state = "waiting for groups"
        self._patience_began = time.monotonic()
        self._served_at = time.monotonic()
        with self.timed("wait_s"):
            n = self.config.trainer.groups_per_step
            batch = self.intake.batch(n, self.version, self.lineage, self._patience)
        self.state = "training"
        return batch

    def learn(self, batch: list[Trajectory]) -> tuple[dict[int, int], dict[int, int]]:
        """One optimizer step. Returns the tokens of each credit that were masked, and those without a reward."""
        settings = self.config.trainer
        groups = [t.group for t in batch]
        train_start = time.time()
        with self.timed("learn_s"):
            samples = samples_of(groups, self.lineage, self.step, divide_by_std=settings.divide_by_std)
            scores = self.policy.accumulate(samples, self.threshold)
        with self.timed("optimizer_s"):
            stepped = self.policy.step(scores.tokens)
        train_stop = time.time()
        skipped = stepped["step_skipped"] > 0
        self.step += 1
        self.groups_trained += len(groups)
        dropped = self.intake.take_superseded()
        self.figures = {
            **step_figures(samples, scores, max_lag=settings.max_lag, superseded=dropped),
            **stepped,
            "loss": scores.loss_sum / max(1, scores.tokens),
            "drift_threshold": scores.threshold,
            "at/generate_first": min(g.generate_start for g in groups),
            "at/generate_last": max(g.generate_stop for g in groups),
            "at/train_start": train_start,
            "at/train_stop": train_stop,
        }
        self.totals["max_lag"] = max(self.totals["max_lag"], *(s.lag for s in samples))
        masked: collections.Counter[int] = collections.Counter()
        failed: collections.Counter[int] = collections.Counter()
        for sample, out in zip(samples, scores.masked, strict=True):
            account = failed if not sample.counts else masked if out or skipped else None
            if account is not None:
                account[batch[sample.group].credit.id] += sample.sampled_tokens
        return masked, failed

    def settle(self, batch: list[Trajectory], masked: dict[int, int], failed: dict[int, int], elapsed: float) -> None:
        """The step is applied and published: record it, hand out verdicts and the credits of the next."""
        waited = self.split["wait_s"] / max(elapsed, 1e-9)
        ids = [t.credit.id for t in batch]
        self.intake.advance(self.version, self.lineage, trained=ids, masked=masked, failed=failed, waited=waited)

    def report(self, elapsed: float) -> None:
        """Everything a user needs to judge this step, to metrics, log and observers."""
        delivery = self.peer.call(self.intake.delivery.metrics)
        self.totals["step_s"] += elapsed
        self.totals["wait_s"] += self.split["wait_s"]
        waiting = self.split["wait_s"] / max(elapsed, 1e-9)
        self.figures |= {
            **{f"time/{name}": seconds for name, seconds in self.split.items()},
            "time/step_s": elapsed,
            "wait_share": waiting,
            "wall_s": self._sums()["wall_s"],
            "epoch": self.data.progress(),
            "tokens_per_s": delivery["tokens/delivered"] / max(1e-9, time.monotonic() - self.began),
            **delivery,
            **{f"weights/{name}": float(value) for name, value in vars(self.publisher.stats()).items()},
            "weights/proved": float(len(self.proved)),
            **process_figures(),
            "longest_gap_s": self.peer.longest_gap_s,
        }
        for kind, text in _drain(self.happened):
            self.metrics.event(self.step, kind, text)
        self._note_evaluation()
        self.metrics.row(self.step, self.figures)
        for text in self.watch.see(self.figures):
            self.metrics.event(self.step, "warning", text)
            self.peer.note(text, "warning")
        if "reward" in self.figures:
            self.history.append((self.step, self.figures["reward"]))
        self.peer.log.info(
            "step %d/%d reward %.3f lag %.1f masked %.0f%% loss %.4f waited %.0f%% of %.2f s",
            self.step,
            self.config.run.steps,
            self.figures.get("reward", float("nan")),
            self.figures.get("lag_mean", 0.0),
            100 * self._masked_share(),
            self.figures["loss"],
            100 * waiting,
            elapsed,
        )

    def evaluate(self) -> None:
        """Have the held-out prompts answered by this version while training goes on. Rollouts hear of it before the
        version reaches them, so that they do not pass it."""
        if self.config.task.heldout_prompts and not self.intake.evaluating():
            self.intake.evaluate(self.version)

    def finish(self) -> int:
        """The last version is published: evaluate it, save it, and tell everybody that the run is over."""
        self.state = "evaluating"
        self._finish_evaluation()
        if self.config.task.heldout_prompts and (
            not self.evaluations or self.evaluations[-1]["eval_version"] != self.step
        ):
            self.intake.evaluate(self.version)
            self._finish_evaluation()
        self.state = "saving"
        self.save()
        checkpoint.save_model(self.node.run.model, self.policy)
        self.intake.finish()
        for kind, text in _drain(self.happened):
            self.metrics.event(self.step, kind, text)
        self.metrics.close()
        summary = self.summary()
        write_whole(self.node.run.summary, json.dumps(summary, indent=1) + "\n")
        self._plot()
        self.state = "finished"
        how = "closes" if summary["ledger_closed"] else "DOES NOT CLOSE"
        self.peer.note(f"finished {self.step} steps; accuracy {summary['accuracy_after']}; the ledger {how}")
        return FINISHED

    # ------------------------------------------------------------------------------------------------------------------
    # Waiting that ends
    # ------------------------------------------------------------------------------------------------------------------

    def _patience(self) -> None:
        """Called while groups are missing. Raises when no more can come."""
        self.node.stop.check()
        self.peer.check()
        self._note_evaluation()
        now = time.monotonic()
        rollouts = self.peer.live("rollout")
        if rollouts:
            self._served_at = now
        elif now - self._served_at > self.config.mesh.trainer_timeout_s:
            self.save()
            raise Requeue(
                f"no rollout in the mesh for {now - self._served_at:.0f} s (mesh.trainer_timeout_s); saved at step "
                f"{self.step}; start rollouts with --role rollout --run {self.node.run.path}, then this with --resume"
            )
        limit = self.config.weights.prove_deadline_s
        if rollouts and now - self._patience_began > limit and not self._somebody_proved():
            raise RuntimeError(
                f"no rollout has proved a version that step {self.step} admits within {limit:.0f} s "
                f"(weights.prove_deadline_s): {'; '.join(self.publisher.table())}"
            )

    def _somebody_proved(self) -> bool:
        oldest = self.step - self.config.trainer.max_lag
        return bool(self.publisher.proved_by(Version(self.version.term, max(0, oldest))))

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation under way; give it up after ``prove_deadline_s`` without progress."""
        limit = self.config.weights.prove_deadline_s
        progress, since = -1, time.monotonic()
        while self.intake.evaluating():
            self.node.stop.check()
            self.peer.check()
            self._note_evaluation()
            state = self.intake.delivery.evaluation_state()
            if state is not None and state.done != progress:
                progress, since = state.done, time.monotonic()
            if time.monotonic() - since > limit:
                self.peer.note(f"the evaluation made no progress for {limit:.0f} s and is given up", "warning")
                return
            time.sleep(0.02)
        self._note_evaluation()

    def _note_evaluation(self) -> None:
        figures = self.intake.evaluated(self.version)
        if figures is None:
            return
        self.evaluations.append(figures)
        step = int(figures["eval_version"])
        self.metrics.row(step, figures)
        self.peer.note(
            f"accuracy {figures['eval_accuracy']:.3f} at step {step} "
            f"(95% {figures['eval_low']:.3f}-{figures['eval_high']:.3f}, n = {figures['eval_samples']:.0f})"
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Saving and resuming
    # ------------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of this step; the ledger reaches the disk before it."""
        if not self.lineage.terms:
            return
        self.peer.call(self.ledger.sync)
        data = self.peer.call(lambda: {"order": self.data.state_dict(), "delivery": self.intake.delivery.state_dict()})
        state = checkpoint.State(
            version=self.version,
            lineage=self.lineage,
            groups_trained=self.groups_trained,
            data=data,
            settings=dict(self.peer.card.agreed),
            axis=self._sums(),
            threshold=(self.threshold.total, self.threshold.tokens),
        )
        path = checkpoint.save(self.node.run.checkpoints, self.policy, state, keep=self.config.checkpoint.keep)
        self.peer.log.info("saved %s", path)

    def _restore(self, found: checkpoint.Found) -> None:
        state = found.state
        assert state is not None
        assert found.path is not None
        checkpoint.restore(found.path, self.policy, state)
        self.step, self.lineage, self.groups_trained = state.version.number, state.lineage, state.groups_trained
        self.earlier = dict(state.axis)
        self.threshold.total, self.threshold.tokens = state.threshold
        self.data.load_state_dict(state.data["order"])
        changed = [k for k, v in state.settings.items() if self.peer.card.agreed.get(k, v) != v]
        if changed:
            sections = ", ".join(f"[{name}]" for name in changed)
            self.peer.note(
                f"settings in {sections} differ from those of the checkpoint: resuming with the new", "warning"
            )
        self.peer.note(f"resumed from {found.path} at step {self.step}")

    def _plot(self) -> None:
        from roles.plot import plot_run

        try:
            plot_run(self.node.run.path, self.node.run.reward_png, title=self.config.run.name)
        except (ValueError, OSError) as e:  # the picture is not the run
            self.peer.note(f"the reward curve could not be drawn: {e}", "warning")

    def _sums(self) -> dict[str, float]:
        """What has been counted since the run began, over all its trainer processes; kept in each checkpoint."""
        stats = self.publisher.stats()
        here = {
            "wall_s": time.monotonic() - self.began,
            "step_s": self.totals["step_s"],
            "wait_s": self.totals["wait_s"],
            "published": stats.publications,
            "skipped": stats.skipped,
            "proved": len(self.proved),
        }
        sums = {name: self.earlier.get(name, 0.0) + value for name, value in here.items()}
        sums["max_lag"] = max(self.earlier.get("max_lag", 0.0), self.totals["max_lag"])
        if "accuracy_before" in self.earlier:
            sums["accuracy_before"] = self.earlier["accuracy_before"]
        elif self.evaluations:
            sums["accuracy_before"] = self.evaluations[0]["eval_accuracy"]
        return sums

    def summary(self) -> dict[str, Any]:
        replayed = ledger.replay(self.node.run.ledgers.glob("*.jsonl"))
        sums = self._sums()
        after = self.evaluations[-1] if self.evaluations else {}
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
            "max_lag_allowed": self.config.trainer.max_lag,
            "max_lag_trained": int(sums["max_lag"]),
            "tokens_per_s": replayed.tokens["delivered"] / max(sums["wall_s"], 1e-9),
            "trainer_wait_share": sums["wait_s"] / max(sums["step_s"], 1e-9),
            "ledger": replayed.groups,
            "ledger_tokens": {**tokens, "failed": tokens["failed"] + replayed.tokens.get("lost", 0)},
            "ledger_closed": replayed.closes() and replayed.groups["in_flight"] == 0,
            "prompts_closed_untrained": [{"epoch": c.epoch, "prompt": c.prompt, "why": c.why} for c in replayed.closed],
        }

    # ------------------------------------------------------------------------------------------------------------------
    # What others see
    # ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.split[name] += time.perf_counter() - started

    def _masked_share(self) -> float:
        f = self.figures
        kept = f.get("tokens_trained", 0.0) + f.get("tokens_masked", 0.0)
        return f.get("tokens_masked", 0.0) / kept if kept else 0.0

    def _reported(self, _: PeerId, report: Report) -> None:
        """*loop*"""
        if report.proved is not None:
            self.proved.add(report.proved)

    def _members(self) -> None:
        """*loop*"""
        now = {card.id: card.name for card in self.peer.live("rollout")}
        for peer, name in now.items():
            if peer not in self._rollouts and self.step > 0:
                self.happened.append(("joined", f"{name} joined"))
        self._rollouts = now

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        """*loop*"""
        if card.role == "rollout":
            self.happened.append(("died" if dead else "left", f"{card.name} {'died' if dead else 'left'}"))

    def status(self) -> Status:
        """*loop*: for an observer."""
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
        }
        if "reward" in f:
            figures["reward"] = f["reward"]
        if self.evaluations:
            figures["accuracy"] = self.evaluations[-1]["eval_accuracy"]
        version = self.version if self.lineage.terms else None
        return Status(
            seq=0,
            state=self.state,
            version=version,
            figures=figures,
            texts={},
            events=list(self.peer.events)[-8:],
            history=list(self.history),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _drain(queue: collections.deque) -> Iterator[Any]:
    while queue:
        yield queue.popleft()


def _close_dead_ledgers(node: Node) -> int:
    """Account what earlier trainers of this run left open as lost; the first credit id that none of them used."""
    paths = sorted(node.run.ledgers.glob("*.jsonl"))
    for path in paths:
        ledger.close_dead(path)
    return ledger.replay(paths).next_id if paths else 0


def _found(node: Node) -> checkpoint.Found:
    """What to resume from. Raises ValueError when the directory holds a run that nobody asked to continue."""
    found = checkpoint.newest(node.run.checkpoints)
    if node.resume:
        return found
    if found.state is not None or node.run.summary.exists():
        at = f"at step {found.state.version.number}" if found.state else "finished"
        raise ValueError(f"{node.run.path} holds a run {at}: continue it with --resume, or choose another --run")
    return checkpoint.Found(None, None)


def main(node: Node) -> int:
    """Load what is slow, then join, then train."""
    config = node.config
    torch.set_num_threads(config.trainer.threads or torch.get_num_threads())
    found = _found(node)
    for text in found.skipped:
        node.log.warning(text)
    if node.resume and found.state is None:
        node.log.warning(f"nothing to resume in {node.run.checkpoints}: starting at step 0")
    node.run.write_config(config)
    policy = load_policy(config, device_of(node.launch))
    task = load_task(config.task)
    data = Dataset(name=config.task.data, size=len(task.train), digest=task.digest, seed=config.run.seed)
    peer = node.peer()
    trainer = Trainer(node, peer, policy, data, found)
    reason = "failed"
    try:
        node.join(peer)
        code = trainer.run()
        reason = "finished"
        return code
    except (Stopped, Slept) as e:
        reason = "stopped" if isinstance(e, Stopped) else "slept"
        trainer.save()
        raise
    finally:
        trainer.publisher.close()
        peer.leave(reason, linger_s=1.0 if reason == "finished" else 0.3)
