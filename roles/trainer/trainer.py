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
import os
import threading
import time
from typing import Any

import numpy as np
import torch

from mesh.exits import FINISHED, GivenUp, Requeue, Slept, Stopped
from mesh.identity import PeerCard
from mesh.node import Node
from mesh.presets import PRESETS
from mesh.version import Lineage, Version
from roles.device import backend_of, device_of
from roles.formations import group_builder
from roles.models import DTYPES
from roles.rollout.tasks import load_task
from roles.trainer import checkpoint, ledger
from roles.trainer.batch import samples_of
from roles.trainer.buffer import Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.figures import step_figures
from roles.trainer.intake import Intake, open_ledger
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import Policy, load_policy
from roles.trainer.progress import Progress
from transport.messages import Go, Member, Probe
from transport.weights.manifest import Manifest
from transport.weights.publisher import Publisher

OPEN_TERM_S = 10.0


class Trainer:
    """One trainer peer, on the main thread."""

    def __init__(self, node: Node, peer: Any, policy: Policy, data: Dataset, restored: checkpoint.Found):
        self.node, self.peer, self.policy, self.data = node, peer, policy, data
        self.config = node.config
        self.step = 0
        self.lineage = Lineage()
        self.groups_trained = 0
        self._served_at = self._unproved_since = self._evaluation_moved = time.monotonic()
        self._evaluation_at: tuple[Version, int] | None = None
        self.threshold = DriftThreshold(self.config.trainer.negative_max_drift)
        wire = self.config.weights.wire_dtype
        self.wire_dtype = policy.dtype if wire == "auto" else DTYPES[wire]
        buffers = {name for name, _ in policy.model.named_buffers()}
        manifest = Manifest.from_state(policy.named_state(), buffers, self.wire_dtype)
        backend = backend_of(self.config.weights.backend, str(policy.device))
        self.publisher = Publisher(peer, manifest, self.config.weights, group_builder(peer, backend))
        rng = np.random.default_rng(self.config.run.seed)
        self._unpublished: Probe | None = None  # of a snapshot that found no buffer free
        self.probe = rng.integers(0, policy.vocabulary, self.config.weights.probe_tokens).astype(np.int32)
        first_id = _close_dead_ledgers(node)
        self.ledger = open_ledger(node.run.ledgers, peer.id, peer.run, first_id)
        self.intake = Intake(peer, self.config, data, self.ledger, first_id=first_id, vocabulary=policy.vocabulary)
        earlier = restored.state.axis if restored.state is not None else {}
        self.progress = Progress(node, peer, self.publisher, self.intake, earlier)
        if restored.state is not None:
            self._restore(restored)
        for text in policy.notes:
            peer.note(text, "warning")

    # ------------------------------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.open_term()
        self.publish()
        self.intake.advance(self.version, self.lineage)
        self.evaluate()
        while self.step < self.config.run.steps:
            started = time.perf_counter()
            self.progress.split.clear()
            batch = self.wait()
            figures, masked, failed = self.learn(batch)
            if _due(self.step, self.config.evaluation.every_steps):
                self.evaluate()
            self.publish()
            self.settle(batch, masked, failed, time.perf_counter() - started)
            self._note_evaluation()
            self.progress.stepped(figures, time.perf_counter() - started, self.data.progress())
            if _due(self.step, self.config.checkpoint.every_steps):
                self._save_or_say()
        return self.finish()

    @property
    def version(self) -> Version:
        return Version(self.lineage.terms[-1][0], self.step)

    def open_term(self) -> None:
        """Form the gradient formation and open its term, above every term this run has ever had."""
        if others := self._other_trainers():
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

    def _other_trainers(self) -> list[PeerCard]:
        """Those that are still seen when one that was killed just now has had the time to be noticed."""
        deadline = time.monotonic() + 2 * PRESETS[self.config.mesh.preset].detection_s()
        while others := [card for card in self.peer.live("trainer") if card.id != self.peer.id]:
            if time.monotonic() > deadline:
                break
            self.node.stop.check()
            time.sleep(0.1)
        return others

    def publish(self) -> None:
        """Snapshot the weights and hand them to the publisher's thread, with a probe that receivers can check."""
        with self.progress.timed("probe_s"):
            probe = Probe(tokens=self.probe, logprobs=self.policy.probe(self.probe, self.wire_dtype))
        self._unpublished = probe
        self._snapshot()
        self.progress.version = self.version

    def _snapshot(self) -> None:
        """One that was skipped is made up for while the trainer waits: what it waits for may need this very version."""
        if self._unpublished is None:
            return
        with self.progress.timed("snapshot_s"):
            if self.publisher.publish(self.version, self.policy.named_state(), self._unpublished):
                self._unpublished = None

    def wait(self) -> list[Trajectory]:
        """The groups of this step: oldest first, none over ``max_lag``, none of another lineage."""
        self.progress.state = "waiting for groups"
        self._served_at = self._unproved_since = time.monotonic()
        with self.progress.timed("wait_s"):
            n = self.config.trainer.groups_per_step
            batch = self.intake.batch(n, self.version, self.lineage, self._patience)
        self.progress.state = "training"
        return batch

    def learn(self, batch: list[Trajectory]) -> tuple[dict[str, float], dict[int, int], dict[int, int]]:
        """One optimizer step. Returns its figures, and the tokens of each credit that were masked or had no reward."""
        settings = self.config.trainer
        groups = [t.group for t in batch]
        train_start = time.time()
        with self.progress.timed("learn_s"):
            samples = samples_of(groups, self.lineage, self.step, divide_by_std=settings.divide_by_std)
            scores = self.policy.accumulate(samples, self.threshold)
        with self.progress.timed("optimizer_s"):
            stepped = self.policy.step(scores.tokens)
        train_stop = time.time()
        skipped = stepped["step_skipped"] > 0
        self.step = self.progress.step = self.step + 1
        self.groups_trained += len(groups)
        dropped = self.intake.take_superseded()
        figures = {
            **step_figures(samples, scores, max_lag=settings.max_lag, superseded=dropped),
            **stepped,
            "loss": scores.loss_sum / max(1, scores.tokens),
            "drift_threshold": scores.threshold,
            "lag_highest": float(max(s.lag for s in samples)),
            "at/generate_first": min(g.generate_start for g in groups),
            "at/generate_last": max(g.generate_stop for g in groups),
            "at/train_start": train_start,
            "at/train_stop": train_stop,
        }
        masked: collections.Counter[int] = collections.Counter()
        failed: collections.Counter[int] = collections.Counter()
        for sample, out in zip(samples, scores.masked, strict=True):
            account = failed if not sample.counts else masked if out or skipped else None
            if account is not None:
                account[batch[sample.group].credit.id] += sample.sampled_tokens
        return figures, masked, failed

    def settle(self, batch: list[Trajectory], masked: dict[int, int], failed: dict[int, int], elapsed: float) -> None:
        """The step is applied and published: record it, hand out verdicts and the credits of the next."""
        waited = self.progress.waited(elapsed)
        ids = [t.credit.id for t in batch]
        self.intake.advance(self.version, self.lineage, trained=ids, masked=masked, failed=failed, waited=waited)

    def evaluate(self) -> None:
        """Have the held-out prompts answered by this version while training goes on. Rollouts hear of it before the
        version reaches them, so that they do not pass it."""
        if self.config.task.heldout_prompts and not self.intake.evaluating():
            self.intake.evaluate(self.version)

    def finish(self) -> int:
        """The last version is published: evaluate it, save it, and tell everybody that the run is over."""
        self.save()
        self.progress.state = "evaluating"
        self._finish_evaluation()
        if self.config.task.heldout_prompts and (
            not self.progress.evaluations or self.progress.evaluations[-1]["eval_version"] != self.step
        ):
            self.intake.evaluate(self.version)
            self._finish_evaluation()
        self.progress.state = "saving"
        checkpoint.save_model(self.node.run.model, self.policy)
        self.intake.finish()
        summary = self.progress.finished()
        self.progress.state = "finished"
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
        self._snapshot()
        self._note_evaluation()
        rollouts = self._need_rollouts()
        now = time.monotonic()
        limit = self.config.weights.prove_deadline_s
        self._watch_evaluation()
        if not rollouts or self._somebody_proved():
            self._unproved_since = now
        elif now - self._unproved_since > limit:
            self.save()
            raise GivenUp(
                f"no rollout has proved a version that step {self.step} admits within {limit:.0f} s "
                f"(weights.prove_deadline_s): {'; '.join(self.publisher.table())}"
            )

    def _need_rollouts(self) -> list[PeerCard]:
        """The live rollouts. Raises Requeue, after saving, when there was none for ``trainer_timeout_s``."""
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
        return rollouts

    def _somebody_proved(self) -> bool:
        """Whether a rollout runs a version that this step admits, or the one that an evaluation holds it at."""
        oldest = Version(self.version.term, max(0, self.step - self.config.trainer.max_lag))
        state = self.intake.delivery.evaluation_state()
        if state is not None and not state.complete:
            oldest = min(oldest, state.version)
        return bool(self.publisher.proved_by(oldest))

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation under way, as long as it makes progress."""
        self._served_at = time.monotonic()
        while self.intake.evaluating():
            self.node.stop.check()
            self.peer.check()
            self._snapshot()
            self._note_evaluation()
            self._need_rollouts()
            self._watch_evaluation()
            time.sleep(0.02)
        self._note_evaluation()

    def _watch_evaluation(self) -> None:
        """Give up an evaluation that made no progress for ``prove_deadline_s``: it holds the engines at its version."""
        state = self.intake.delivery.evaluation_state()
        if state is None or state.complete:
            return
        now, at = time.monotonic(), (state.version, state.done)
        if at != self._evaluation_at or not self.peer.live("rollout"):
            self._evaluation_at, self._evaluation_moved = at, now
        limit = self.config.weights.prove_deadline_s
        if now - self._evaluation_moved > limit:
            self.intake.abandon_evaluation()
            self.peer.note(
                f"the evaluation of {state.version} has {state.done} of {state.total} results, none new for "
                f"{limit:.0f} s (weights.prove_deadline_s): it is given up",
                "warning",
            )

    def _note_evaluation(self) -> None:
        figures = self.intake.evaluated(self.version)
        if figures is not None:
            self.progress.evaluated(figures)

    # ------------------------------------------------------------------------------------------------------------------
    # Saving and resuming
    # ------------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of this step; the ledger reaches the disk before it."""
        if not self.lineage.terms:
            return
        if broken := [n for n, w in self.policy.named_state().items() if not torch.isfinite(w).all()]:
            raise GivenUp(
                f"the weights of step {self.step} hold NaN or infinity ({broken[0]} and {len(broken) - 1} more); they "
                f"are not saved, and the last good checkpoint is in {self.node.run.checkpoints}; lower "
                "trainer.learning_rate"
            )
        data = self.peer.call(lambda: {"order": self.data.state_dict(), "delivery": self.intake.delivery.state_dict()})
        self.peer.call(self.ledger.sync)  # after it: a prompt that is closed in the checkpoint is listed in the ledger
        state = checkpoint.State(
            version=self.version,
            lineage=self.lineage,
            groups_trained=self.groups_trained,
            data=data,
            settings=dict(self.peer.card.agreed),
            axis=self.progress.sums(),
            threshold=(self.threshold.total, self.threshold.tokens),
        )
        path = checkpoint.save(self.node.run.checkpoints, self.policy, state, keep=self.config.checkpoint.keep)
        self.peer.log.info("saved %s", path)

    def _save_or_say(self) -> None:
        """A checkpoint on the way: training goes on without it when the disk does not take it."""
        try:
            self.save()
        except OSError as e:
            self.peer.note(f"{e}; training goes on, the last good checkpoint is kept", "error")

    def _restore(self, found: checkpoint.Found) -> None:
        state = found.state
        assert state is not None
        assert found.path is not None
        checkpoint.restore(found.path, self.policy, state)
        self.step, self.lineage, self.groups_trained = state.version.number, state.lineage, state.groups_trained
        self.progress.step = self.step
        self.threshold.total, self.threshold.tokens = state.threshold
        self.data.load_state_dict(state.data["order"])
        self.intake.delivery.load_state_dict(state.data["delivery"])
        changed = [k for k, v in state.settings.items() if self.peer.card.agreed.get(k, v) != v]
        if changed:
            sections = ", ".join(f"[{name}]" for name in changed)
            self.peer.note(
                f"settings in {sections} differ from those of the checkpoint: resuming with the new", "warning"
            )
        self.peer.note(f"resumed from {found.path} at step {self.step}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


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
    claim = node.run.claim(node.name)
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
        node.log.info("%s at %s, run directory %s, waiting for rollouts", node.name, peer.address, node.run.path)
        code = trainer.run()
        reason = "finished"
        return code
    except (Stopped, Slept) as e:
        reason = "stopped" if isinstance(e, Stopped) else "slept"
        trainer.save()
        raise
    finally:
        trainer.publisher.close()
        os.close(claim)
        peer.leave(reason, linger_s=1.0 if reason == "finished" else 0.3)
