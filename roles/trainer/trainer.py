"""The trainer: the algorithm, in order.

    meet the other trainers; open a term                  (gradients.py, company.py)
    for each step:
        take the oldest admissible groups                 (intake.py: credits, buffer, ledger)
        advantages, mask, loss, gradient                  (advantages.py, batch.py, losses.py, policy.py)
        sum the gradients of all trainers                 (gradients.py; a trainer alone has nothing to sum)
        optimizer step
        publish: probe, snapshot; the broadcast goes on in the background   (transport/weights/)
        settle: record what was trained, hand out verdicts and new credits
    evaluate; save the model; tell everybody that the run is over

Trainers are equal. The first of their formation publishes, evaluates, saves and finishes; when it is gone, the next
does, under a new term. What comes from the others (a formation has opened, a step is to be applied, a newcomer needs
the state, this trainer was left behind) is an event: the main thread looks for them between any two things it does, and
between two micro-batches.
"""

import collections
import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from mesh.exits import FINISHED, GivenUp, Requeue, Slept, Stopped, parting
from mesh.identity import PeerCard, PeerId
from mesh.node import Node
from mesh.version import Lineage, Version
from roles.device import backend_of, device_of
from roles.formations import group_builder
from roles.models import DTYPES, files_digest
from roles.rollout.tasks import load_task
from roles.trainer import checkpoint, ledger, state
from roles.trainer.acts import Apply, Diverged, LeftBehind, Opened, Transfer
from roles.trainer.batch import Sample, samples_of
from roles.trainer.buffer import Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.evaluating import Evaluating
from roles.trainer.figures import batch_sums, step_figures, summed_figures
from roles.trainer.gradients import Brought, Contribution, Gradients, Reduction
from roles.trainer.handover import Loaded
from roles.trainer.intake import Intake, open_ledger
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import Policy, Scores, load_policy
from roles.trainer.progress import Progress
from roles.trainer.starting import what_is_there
from transport import spans
from transport.accounts import Row
from transport.messages import Place, Probe, StateTensors
from transport.weights.manifest import Manifest
from transport.weights.publisher import Publisher

AGAIN_S = 5.0  # between two tries to save what is finished
EVALUATION_LOOK_S = 0.02  # a run waits for its last evaluation
WAIT_S = 0.2  # between two looks at whether waiting still makes sense
CLOSING_S = 10.0  # for the other trainers to close their accounts when the run is over
DIFFER_S = 3.0  # for trainers that differ to tell each other in what


@dataclass
class Learned:
    """A gradient that waits for its step: the groups it is of, and what their forward passes said."""

    batch: list[Trajectory]
    samples: list[Sample]
    scores: Scores
    contribution: Contribution
    began: float
    ended: float


class Trainer:
    """One trainer peer, on the main thread."""

    def __init__(
        self, node: Node, peer: Any, policy: Policy, data: Dataset, restored: checkpoint.Found, refusal: str = ""
    ):
        self.node, self.peer, self.policy, self.data = node, peer, policy, data
        self.config = node.config
        self.step = 0
        self.lineage = Lineage()
        self.groups_trained = 0
        self.first = False  # of its formation: it publishes, evaluates, saves and finishes
        self.opened = False  # it is in a formation, or in one that is over and followed by another
        self.learned: Learned | None = None
        self.told = 0  # the step for which the others know what this trainer brings
        self.wake = threading.Event()
        self.run_over = False  # another trainer has said that it has finished it
        self._summary_was = self._summary_time()
        self._refusal = refusal  # why this trainer may join a run, but not begin it
        self._members: tuple[PeerId, ...] = ()  # of the formation
        self._gathered = False  # as many peers were here as a start needs
        self._evaluated = False  # the weights this trainer began with, or that is not its to do
        self._fresh = True  # no term was opened yet
        self._undealt = False  # the formation has grown, and prompts are still to be dealt to all its members
        self._idle_at = -1  # the step from which this trainer was taken in: it brings nothing to the first one it makes
        self._closed = False
        self._stepped_at = time.perf_counter()
        self._unproved_since = time.monotonic()
        self.threshold = DriftThreshold(self.config.trainer.negative_max_drift)
        wire = self.config.weights.wire_dtype
        self.wire_dtype = policy.dtype if wire == "auto" else DTYPES[wire]
        buffers = {name for name, _ in policy.model.named_buffers()}
        manifest = Manifest.from_state(policy.named_state(), buffers, self.wire_dtype)
        build = group_builder(peer, backend_of(self.config.weights.backend, str(policy.device)))
        self.publisher = Publisher(peer, manifest, self.config.weights, build)
        self.gradients = Gradients(
            peer,
            build,
            size=sum(p.numel() for p in policy.parameters.values()),
            groups=self.config.trainer.groups_per_step,
            device=policy.device,
            state_bytes=state.most_bytes(policy),
            highest_term=node.run.highest_term,
            opened_term=node.run.opened_term,
            wake=self.wake.set,
        )
        rng = np.random.default_rng(self.config.run.seed)
        self._unpublished: Probe | None = None  # of a snapshot that found no buffer free
        self.probe = rng.integers(0, policy.vocabulary, self.config.weights.probe_tokens).astype(np.int32)
        first_id = ledger.close_all_dead(node.run.ledgers)
        self.ledger = open_ledger(node.run.ledgers, peer.id, peer.run, first_id)
        self.intake = Intake(peer, self.config, data, self.ledger, first_id=first_id, vocabulary=policy.vocabulary)
        self.intake.arrived = self.wake.set
        earlier = restored.state.axis if restored.state is not None else {}
        self.progress = Progress(node, peer, self.publisher, self.intake, earlier)
        self.evaluating = Evaluating(
            peer,
            self.intake,
            self.progress,
            prompts=self.config.task.heldout_prompts,
            limit_s=self.config.weights.prove_deadline_s,
        )
        peer.on_departed(self._departed)
        if restored.state is not None:
            self._resume(restored)
        for text in policy.notes:
            peer.note(text, "warning")

    # ------------------------------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------------------------------

    def run(self, expected: int) -> int:
        """Until the run is over. Each turn does what there is to do, then waits for something to happen."""
        place = Place(self.step, self.lineage, self.groups_trained, state.state_digest(self.policy))
        self.gradients.begin(place, expected)
        while True:
            self.wake.clear()
            self.serve()
            if self.opened and self.step < self.config.run.steps:
                self.work()
            elif self.opened and self.first and not self._finished():
                with contextlib.suppress(Overtaken):
                    return self.finish()
            elif self.opened and self._over():
                return FINISHED
            if not self.gradients.events:
                self._patience()
                with self.progress.timed("wait_s" if self.learned is None else "sync_s"):
                    self.wake.wait(WAIT_S)

    @property
    def version(self) -> Version:
        return Version(self.lineage.terms[-1][0], self.step)

    def serve(self) -> None:
        """What has come from the other trainers, in order."""
        while self.gradients.events:
            match event := self.gradients.events.popleft():
                case Opened():
                    self.open(event)
                case Apply():
                    self.apply(event)
                case Transfer():
                    self.give(event)
                case Loaded():
                    self.take_over(event)
                case LeftBehind():
                    self.left_behind(event)
                case Diverged():
                    self.diverged(event)

    def work(self) -> None:
        """Have a gradient ready for the next step, once its groups are here."""
        if not self._gathered and self.peer.short is None:
            self._gathered = True
            self._order()
        if self.told > self.step or not self._gathered:
            return
        if self.intake.share == 0:
            self.told = self.step + 1
            self.gradients.ready(self.told, None)
            return
        batch = self.intake.take(self.version, self.lineage)
        if not batch:
            self.progress.state = "waiting for groups"
            return
        self._unproved_since = time.monotonic()
        self.progress.state = "training"
        self.learned = self.learn(batch)
        if self.learned is None:
            self.intake.put_back(batch)
            return
        self.told = self.step + 1
        self.gradients.ready(self.told, self.learned.contribution)

    def learn(self, batch: list[Trajectory]) -> Learned | None:
        """The gradient of a batch, summed over its samples; None when something came that must not wait for it."""
        began = time.time()
        with self.progress.timed("learn_s"):
            groups = [t.group for t in batch]
            samples = samples_of(groups, self.lineage, self.step, divide_by_std=self.config.trainer.divide_by_std)
            scores = self.policy.accumulate(samples, self.threshold, lambda: bool(self.gradients.events))
            if scores is None:
                return None
            gradient = None if self.gradients.alone else self.policy.flat_gradient()
        contribution = Contribution(self.step + 1, self._brought(batch, samples, scores), gradient)
        return Learned(batch, samples, scores, contribution, began, time.time())

    def apply(self, event: Apply) -> None:
        """Take the optimizer step that all trainers of the formation take, and do what follows from it."""
        reduction = self.gradients.reduction(event)
        if not self._gathered:  # the others do not wait
            self._gathered = True
            self._order()
        learned, self.learned = self.learned, None
        if learned is not None and self.peer.id not in reduction.brought:
            self.intake.put_back(learned.batch)
            learned = None
        with self.progress.timed("optimizer_s"):
            if reduction.gradient is not None:
                self.policy.load_flat_gradient(reduction.gradient)
            stepped = self.policy.step(reduction.tokens)
        rows = {peer: b.row for peer, b in reduction.brought.items()}
        if stepped["step_skipped"]:
            rows = {peer: all_masked(row) for peer, row in rows.items()}
        self.step = self.progress.step = self.step + 1
        self.groups_trained += sum(len(row.groups) for row in rows.values())
        with self.progress.timed("digest_s"):
            digest = "" if self.gradients.alone else state.state_digest(self.policy)
        self.gradients.applied(self.step, self.groups_trained, digest)
        figures = self._figures(learned, reduction) | stepped
        if digest:  # for the record: what the trainers compare, of which a float holds 48 bits
            figures["state_digest"] = float(int(digest[:12], 16))
        if self.first and _due(self.step, self.config.evaluation.every_steps):
            self.evaluating.begin(self.version)
        self.publish()
        elapsed = time.perf_counter() - self._stepped_at
        self.intake.committed(self.version, self.lineage, rows, waited=self.progress.waited(elapsed))
        if self._undealt:
            self._deal()
        self.evaluating.note(self.version)
        elapsed = time.perf_counter() - self._stepped_at
        self.progress.stepped(figures, elapsed, self.data.progress())
        self._stepped_at = time.perf_counter()
        self.progress.split.clear()
        if self.first and _due(self.step, self.config.checkpoint.every_steps):
            self._save_or_say()

    def publish(self) -> None:
        """The first of the formation: snapshot the weights and hand them to the publisher's thread, with a probe that
        receivers can check."""
        self.progress.version = self.version
        if not self.first:
            return
        with self.progress.timed("probe_s"):
            probe = Probe(tokens=self.probe, logprobs=self.policy.probe(self.probe, self.wire_dtype))
        self._unpublished = probe
        self._snapshot()

    def _snapshot(self) -> None:
        """One that was skipped is made up for while the trainer waits: what it waits for may need this very version."""
        if self._unpublished is None:
            return
        with self.progress.timed("snapshot_s"):
            if self.publisher.publish(self.version, self.policy.named_state(), self._unpublished):
                self._unpublished = None

    def finish(self) -> int:
        """The last version is published: evaluate it, save it, and tell everybody that the run is over."""
        self._save_at_last()
        self.progress.state = "evaluating"
        self._finish_evaluation()
        if not self.evaluating.done(self.step):
            self.evaluating.begin(self.version)
            self._finish_evaluation()
        self.progress.state = "saving"
        checkpoint.save_model(self.node.run.model, self.policy)
        self.intake.finish()
        self._close_accounts()
        summary = self.progress.finished(self.lineage, self._alive())
        self.progress.state = "finished"
        how = "closes" if summary["ledger_closed"] else "DOES NOT CLOSE"
        self.peer.note(f"finished {self.step} steps; accuracy {summary['accuracy_after']}; the ledger {how}")
        return FINISHED

    # ------------------------------------------------------------------------------------------------------------------
    # What the other trainers bring about
    # ------------------------------------------------------------------------------------------------------------------

    def open(self, event: Opened) -> None:
        """A formation has opened a term on the weights that all its members hold."""
        if self._refusal and self._fresh:
            raise ValueError(self._refusal)
        grown = self._undealt or not set(event.members) <= set(self._members)
        self._members = event.members
        self.lineage = event.place.lineage
        assert event.place.step == self.step, f"at step {self.step}, opened at {event.place.step}"
        self.first, self.opened = event.members[0] == self.peer.id, True
        self.peer.update_card(highest_term=event.ballot.counter)
        others = f" of {len(event.members)} trainers" if len(event.members) > 1 else ""
        self.peer.log.info("term %s%s opens at step %d%s", event.ballot, others, self.step,
                           ", published here" if self.first else "")  # fmt: skip
        if self.first:
            self.publisher.open_term(self.lineage)
        else:
            self._unpublished = None
            self.publisher.retire()
        self.publish()
        self._unproved_since = time.monotonic()
        self._gathered = self._gathered or self.peer.short is None
        if self._gathered:
            self._order(grown)
        if self._fresh:
            self._stepped_at = time.perf_counter()
            self.progress.split.clear()
        self._fresh = False

    def _order(self, grown: bool = False) -> None:
        """Have groups made for the steps to come."""
        self._undealt = grown and self.learned is not None
        if (
            self._undealt
        ):  # its gradient is good still, and newcomers bring none to this step: the prompts come after it
            self.intake.advance(self.version, self.lineage)
            self._offer_again()
        else:
            self._deal()
        if self.step == self._idle_at:
            self.told = self.step + 1
            self.gradients.ready(self.told, None)
        if self.first and not self._evaluated:
            self.evaluating.begin(self.version)
        self._evaluated = True

    def _deal(self) -> None:
        """Each trainer of the formation has its own prompts, and its share of a step."""
        self._undealt = False
        self.intake.opened(self._members, self.peer.id, self.version, self.lineage)
        if self.learned is None:
            self.told = 0

    def _offer_again(self) -> None:
        """A gradient that was computed alone was not copied; it is to be summed with others now."""
        if self.learned is not None and self.learned.contribution.gradient is None and not self.gradients.alone:
            flat = self.policy.flat_gradient()
            self.learned.contribution = replace(self.learned.contribution, gradient=flat)
            self.gradients.ready(self.told, self.learned.contribution)

    def give(self, transfer: Transfer) -> None:
        """All hold at this step: a newcomer gets what they have alike."""
        place = self.gradients.place
        if transfer.step == self.step == place.step:
            place = msgspec.structs.replace(place, state=state.state_digest(self.policy))
            self.gradients.give(transfer, place, state.dump(self.policy, self._state()))

    def take_over(self, loaded: Loaded) -> None:
        """This trainer is the newcomer, and everything is here."""
        place = loaded.offer.place
        try:
            there = state.load(self.policy, loaded.data)
            if state.state_digest(self.policy) != place.state:
                raise ValueError("weights and optimizer have another digest once they are loaded")
            self._stand(there)
            self.progress.resume(self.step, there.axis, taken_in=True)
            self.intake.load(there.data["order"])
        except ValueError as e:
            self.gradients.taken(loaded, str(e))
            raise ValueError(f"this trainer cannot join the others: {e}") from e
        self.learned, self.told = None, 0
        self._refusal = ""
        self._fresh = False
        self._evaluated = True
        self._idle_at = self.step
        self._stepped_at = time.perf_counter()
        self.progress.split.clear()
        self.gradients.taken(loaded, "")
        self.peer.note(f"taken in at step {self.step}")

    def left_behind(self, event: LeftBehind) -> None:
        """Others have gone on without this trainer: what it holds is of a lineage that ends here."""
        self.peer.note(f"left behind at step {self.step}: {event.reason}; what is open here is superseded", "warning")
        self.opened = self.first = False
        self.learned, self.told = None, 0
        self._members = ()
        self._unpublished = None
        self.publisher.retire()
        self.intake.restart()
        self.progress.state = "waiting to be taken in"

    def diverged(self, event: Diverged) -> None:
        """Trainers differ that must be alike: find out in what, say it, and stop."""
        digests = state.tensor_digests(self.policy)
        mine = StateTensors(self.step, np.array(list(digests.values()), np.uint64))
        deadline = time.monotonic() + DIFFER_S
        others = [peer for peer, _ in event.digests if peer != self.peer.id]
        while time.monotonic() < deadline:
            self.wake.clear()
            self.gradients.tell_tensors(mine, others)
            if all(p in self.gradients.tensors for p in others):
                break
            self.wake.wait(WAIT_S)
        known = {self.peer.id: mine.digests} | {p: m.digests for p, m in self.gradients.tensors.items()}
        first = state.first_difference(list(digests), known)
        names = ", ".join(f"{self.gradients.name_of(peer)} {digest}" for peer, digest in event.digests)
        what = f"; the first tensor that differs is {first}" if first else ""
        raise GivenUp(
            f"{event.text}: {names}{what}; nothing was applied; start the trainers again with --resume, on one kind of "
            "machine and one version of torch"
        )

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        """On the loop."""
        if card.role == "trainer" and not dead and reason == parting(None):
            self.run_over = True
        self.wake.set()

    def _over(self) -> bool:
        """Every step is made and another trainer finishes the run; this one closes its accounts and stands by."""
        if not self._closed:
            self._closed = True
            self.intake.close()
        self.progress.state = "standing by"
        return self.run_over or self._finished()

    def _finished(self) -> bool:
        """Whether another trainer has finished this run, by what it has left: its goodbye may have been lost."""
        return self._summary_time() != self._summary_was

    def _summary_time(self) -> float:
        try:
            return self.node.run.summary.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _close_accounts(self) -> None:
        """The other trainers close theirs when they have made the last step; those of the dead are closed here."""
        deadline = time.monotonic() + CLOSING_S
        while time.monotonic() < deadline:
            paths = sorted(self.node.run.ledgers.glob("*.jsonl"))
            for path in paths:
                ledger.close_dead(path)
            if ledger.replay(paths, self.lineage, self._alive()).groups["in_flight"] == 0:
                return
            self.node.stop.check()
            time.sleep(0.05)

    def _alive(self) -> list[PeerId]:
        return [card.id for card in self.peer.live("trainer")]

    # ------------------------------------------------------------------------------------------------------------------
    # Waiting that ends
    # ------------------------------------------------------------------------------------------------------------------

    def _patience(self) -> None:
        """Called while there is nothing to do. Raises when no more can come."""
        self.node.stop.check()
        self.peer.check()
        self._need_peers()
        if not self.first:
            return
        self._snapshot()
        self.evaluating.note(self.version)
        self.evaluating.watch()
        now = time.monotonic()
        limit = self.config.weights.prove_deadline_s
        if self.learned is not None or not self.peer.live("rollout") or self._somebody_proved():
            self._unproved_since = now
        elif now - self._unproved_since > limit:
            self.save()
            raise GivenUp(
                f"no rollout has proved a version that step {self.step} admits within {limit:.0f} s "
                f"(weights.prove_deadline_s): {'; '.join(self.publisher.table())}"
            )

    def _need_peers(self) -> None:
        """Raises Requeue, after saving, when the mesh had too few peers for ``mesh.grace_s``."""
        if (short := self.peer.short) is not None and short.over:
            self.save()
            raise Requeue(
                f"{short.text}; saved at step {self.step}; start peers with --run {self.node.run.path}, a trainer "
                "with --resume"
            )

    def _somebody_proved(self) -> bool:
        """Whether a rollout runs a version that this step admits, or the one that an evaluation holds it at."""
        oldest = Version(self.version.term, max(0, self.step - self.config.trainer.max_lag))
        if (held := self.evaluating.holds()) is not None:
            oldest = min(oldest, held)
        return bool(self.publisher.proved_by(oldest))

    def _meanwhile(self, most_s: float) -> None:
        """While the last trainer waits for something of its own: it goes on to serve the others. Raises Overtaken when
        it is not the first any more."""
        self.wake.clear()
        self.serve()
        if not self.first:
            raise Overtaken
        self._patience()
        self.wake.wait(most_s)

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation under way, as long as it makes progress."""
        while self.evaluating.running:
            self._meanwhile(EVALUATION_LOOK_S)
        self.evaluating.note(self.version)

    # ------------------------------------------------------------------------------------------------------------------
    # Figures
    # ------------------------------------------------------------------------------------------------------------------

    def _brought(self, batch: list[Trajectory], samples: list[Sample], scores: Scores) -> Brought:
        """What the others record of this batch: which tokens were masked, or had no reward; and sums for figures."""
        masked: collections.Counter[int] = collections.Counter()
        failed: collections.Counter[int] = collections.Counter()
        for sample, out in zip(samples, scores.masked, strict=True):
            account = failed if not sample.counts else masked if out else None
            if account is not None:
                account[batch[sample.group].credit.id] += sample.sampled_tokens
        figures = batch_sums(samples, scores) | self.progress.published()
        return Brought(scores.tokens, self.intake.row(batch, masked, failed), figures)

    def _figures(self, learned: Learned | None, reduction: Reduction) -> dict[str, float]:
        """Of the step: sums over all trainers, and what this one's own batch shows."""
        for peer, brought in reduction.brought.items():
            if peer != self.peer.id:
                self.progress.others_published(peer, brought.figures)
        figures: dict[str, float] = {}
        if learned is not None:
            dropped = self.intake.take_superseded()
            groups = [t.group for t in learned.batch]
            figures = {
                **step_figures(
                    learned.samples, learned.scores, max_lag=self.config.trainer.max_lag, superseded=dropped
                ),
                "drift_threshold": learned.scores.threshold,
                "at/generate_first": min(g.generate_start for g in groups),
                "at/generate_last": max(g.generate_stop for g in groups),
                "at/train_start": learned.began,
                "at/train_stop": learned.ended,
            }
        return figures | {
            **summed_figures([b.figures for b in reduction.brought.values()], reduction.tokens),
            "groups": float(sum(len(b.row.groups) for b in reduction.brought.values())),
            "trainers": float(len(self._members)),
            "term": float(self.version.term.counter),
            "publishes": float(self.first),
        }

    # ------------------------------------------------------------------------------------------------------------------
    # Saving and resuming
    # ------------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of this step, by the first of the trainers or the last one left."""
        if not self.lineage.terms or (self.opened and not self.first and len(self._alive()) > 1):
            return
        if broken := [n for n, w in self.policy.named_state().items() if not torch.isfinite(w).all()]:
            raise GivenUp(
                f"the weights of step {self.step} hold NaN or infinity ({broken[0]} and {len(broken) - 1} more); they "
                f"are not saved, and the last good checkpoint is in {self.node.run.checkpoints}; lower "
                "trainer.learning_rate"
            )
        began = time.perf_counter()
        saved = self._state()
        self.peer.call(self.ledger.sync)  # after it: a prompt that is closed in the checkpoint is listed in the ledger
        path = checkpoint.save(self.node.run.checkpoints, self.policy, saved, keep=self.config.checkpoint.keep)
        spans.record("save", began, version=str(self.version))
        self.peer.log.info("saved %s", path)

    def _save_at_last(self) -> None:
        """The last checkpoint, for which a full disk is waited for as long as for peers: all is trained by now."""
        deadline = time.monotonic() + self.config.mesh.grace_s
        while True:
            try:
                return self.save()
            except OSError as e:
                if time.monotonic() > deadline:
                    raise GivenUp(
                        f"{e.strerror or e} (waited mesh.grace_s = {self.config.mesh.grace_s:g} s for it)"
                    ) from e
                self.progress.state = "waiting for the disk"
                self.peer.note(f"{e.strerror or e}; tried again every {AGAIN_S:g} s", "error")
            again = time.monotonic() + AGAIN_S
            while time.monotonic() < again:
                self._meanwhile(WAIT_S)

    def _state(self) -> checkpoint.State:
        data = self.peer.call(lambda: {"order": self.data.state_dict(), "delivery": self.intake.delivery.state_dict()})
        return checkpoint.State(
            version=self.version,
            lineage=self.lineage,
            groups_trained=self.groups_trained,
            data=data,
            settings=dict(self.peer.card.agreed),
            axis=self.progress.sums(),
            threshold=(self.threshold.total, self.threshold.tokens),
        )

    def _save_or_say(self) -> None:
        """A checkpoint on the way: training goes on without it when the disk does not take it."""
        try:
            self.save()
        except OSError as e:
            self.peer.note(f"{e.strerror or e}; training goes on, the last good checkpoint is kept", "error")

    def _resume(self, found: checkpoint.Found) -> None:
        found = checkpoint.restore_found(found, self.policy)
        saved = found.state
        assert saved is not None
        self._stand(saved)
        self.progress.resume(self.step, saved.axis)
        self.data.load_state_dict(saved.data["order"])
        self.intake.delivery.load_state_dict(saved.data["delivery"])
        changed = [k for k, v in saved.settings.items() if self.peer.card.agreed.get(k, v) != v]
        if changed:
            sections = ", ".join(f"[{name}]" for name in changed)
            self.peer.note(
                f"settings in {sections} differ from those of the checkpoint: resuming with the new", "warning"
            )
        self.peer.note(f"resumed from {found.path} at step {self.step}")

    def _stand(self, saved: checkpoint.State) -> None:
        """Where ``saved`` stands; weights and optimizer are loaded."""
        self.step, self.lineage, self.groups_trained = saved.version.number, saved.lineage, saved.groups_trained
        self.threshold.total, self.threshold.tokens = saved.threshold


class Overtaken(Exception):
    """This trainer was about to finish the run, and is not the first of the trainers any more."""


def all_masked(row: Row) -> Row:
    """Of a step whose gradient was not finite: nothing was learnt from any token."""
    groups = [msgspec.structs.replace(g, masked=g.tokens - g.failed) for g in row.groups]
    return msgspec.structs.replace(row, groups=groups)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(node: Node) -> int:
    """Load what is slow, then join, then train."""
    config = node.config
    torch.set_num_threads(config.trainer.threads or torch.get_num_threads())
    claim = node.run.claim(node.name)
    found, refusal = what_is_there(node)
    node.run.write_config(config)
    policy = load_policy(config, device_of(node.launch))
    task = load_task(config.task)
    data = Dataset(name=config.task.data, size=len(task.train), digest=task.digest, seed=config.run.seed)
    peer = node.peer(model=files_digest(config), data=task.digest)
    trainer = Trainer(node, peer, policy, data, found, refusal)
    reason = parting(None)
    try:
        spans.open_file(node.run.path, peer=node.name, id=peer.id, role="trainer")
        node.join(peer)
        node.log.info("%s at %s, run directory %s, waiting for rollouts", node.name, peer.address, node.run.path)
        return trainer.run(node.trainers)
    except BaseException as e:
        reason = parting(e)
        if isinstance(e, Stopped | Slept):
            trainer.save()
        raise
    finally:
        trainer.publisher.close()
        trainer.gradients.close()
        trainer.progress.close()
        spans.flush()
        os.close(claim)
        peer.leave(reason, linger_s=1.0 if reason == parting(None) else 0.3)
