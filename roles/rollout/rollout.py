"""A rollout: credits come in, groups of scored completions go out.

For each credit, in order: wait until the engine holds a proved version that the credit admits; sample its completions;
score them; deliver the group. Many credits are under way at once, each a task of one asyncio loop on the main thread.
The engine samples on a thread of its own and takes over new weights between two tokens; the peer's loop answers pings,
asks trainers for credits and sends groups (``transport/delivery.py``).
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil

from mesh.config import Rollout as RolloutSettings
from mesh.effects import Send
from mesh.exits import FINISHED, GivenUp, Requeue, parting
from mesh.identity import PeerCard, PeerId
from mesh.node import Node
from mesh.version import Version
from roles.device import backend_of, device_of
from roles.formations import group_builder
from roles.metrics import process_figures
from roles.models import files_digest
from roles.outlets import metrics_of
from roles.rollout.changed import Changed
from roles.rollout.engines import load_engine
from roles.rollout.engines.base import Engine, EngineDead, Request, RequestFailed
from roles.rollout.restarts import Restarts
from roles.rollout.rewards import RewardPool
from roles.rollout.setbacks import Setbacks, described
from roles.rollout.tasks import load_task
from roles.rollout.tasks.base import Prompt, Sampler, Task, Transcript, encode
from transport import spans
from transport.delivery import Abort, RolloutDelivery, RunOver, Start, admits
from transport.evaluation import PASSED
from transport.messages import Answer, Completion, Credit, CreditId, Group, Status
from transport.weights.proof import Proof, Prover
from transport.weights.receiver import Arrived, Receiver

TICK_S = 0.02
WAIT_STEP_S = 0.5
FIGURES_S = 5.0
LEAST_WAIT_S = 0.001  # from a credit to its group's begin, when nothing is waited for
LATE_S = 15.0  # without a trainer: enough for one that resumes a finished run to take it up


class Rollout:
    """The work of one rollout peer. Everything but the handlers marked *loop* runs on the asyncio loop."""

    def __init__(
        self, node: Node, peer: Any, engine: Engine, receiver: Receiver, task: Task, tokenizer: Any, restarts: Restarts
    ):
        self.node, self.peer, self.config = node, peer, node.config
        self.engine, self.receiver, self.task, self.tokenizer = engine, receiver, task, tokenizer
        self.delivery = RolloutDelivery(self.config.rollout.groups_in_flight, max_lag=self.config.trainer.max_lag)
        self.rewards = RewardPool(self.config.task, self.config.rollout)
        self.metrics = metrics_of(node, peer)
        self.setbacks = Setbacks()
        self.restarts = restarts
        self.tasks: dict[tuple[PeerId, CreditId], asyncio.Task] = {}
        self.pins: dict[Version, int] = {}
        self.unsent: collections.deque[Send] = collections.deque()
        self.over = ""
        self.proof: Proof | None = None
        self.unproven = ""
        self.sampled_again = 0  # completions that the engine had lost
        self.started = self._trainer_seen = time.monotonic()
        self.rate = 0.0
        self._measured = (time.monotonic(), 0)
        self._making = 0  # groups
        self._idle_since = time.perf_counter()
        peer.on(Answer, self._answer)
        peer.on_members(self._members)
        peer.on_departed(self._departed)
        peer.every(TICK_S, self._tick)
        peer.look = self.status

    # ------------------------------------------------------------------------------------------------------------------
    # On the peer's loop
    # ------------------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._send_unsent()
        self._do(self.delivery.tick(time.monotonic()))

    def _send_unsent(self) -> None:
        """Groups that found the pipe full, or not yet connected, go again, oldest first, as far as it takes them. There
        are no more of them than credits."""
        while self.unsent:
            send = self.unsent[0]
            wanted = self.delivery.keeps(send.to, send.message.credit)
            if wanted and not self.peer.send(send.to, send.message, bulk=True):
                return
            self.unsent.popleft()

    def _answer(self, trainer: PeerId, answer: Answer) -> None:
        self._do(self.delivery.receive(trainer, answer, time.monotonic()))

    def _members(self) -> None:
        trainers = [card.id for card in self.peer.live("trainer")]
        self._do(self.delivery.trainers(trainers, time.monotonic()))

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        if card.role == "trainer" and not dead and reason == "finished":
            self.over = f"{card.name} finished the run"

    def _do(self, effects: list[Any]) -> None:
        """Execute in order; what starts together is handed over together, so that it is sampled in one batch."""
        starts = []
        for effect in effects:
            match effect:
                case Start(trainer, credit):
                    starts.append((trainer, credit))
                case Abort(trainer, credit):
                    self._hand_over(self._abort, trainer, credit)
                case RunOver(trainer):
                    self.over = "the run is over"
                case Send(to, message, _, bulk):
                    if bulk:
                        self.unsent.append(effect)
                    else:
                        self.peer.send(to, message)
        self._send_unsent()
        if starts:
            self._hand_over(self._start, starts)

    def _hand_over(self, fn: Callable[..., None], *args: Any) -> None:
        """Any thread: have ``fn`` called on the asyncio loop. When that has ended this peer is leaving, which tells the
        trainers of all its credits; the peer's own loop must live on to say so."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._aio.call_soon_threadsafe(fn, *args)

    # ------------------------------------------------------------------------------------------------------------------
    # On the asyncio loop
    # ------------------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the run is over, or too few peers are left to go on. Returns the exit code."""
        self._aio = asyncio.get_running_loop()
        self._changed = Changed()
        self.node.stop.on_stop(self.look_again)
        await self.rewards.start()
        self.engine.start(_Source(self), Prover(probe_floor(self.config)))
        spans.open_file(self.node.run.path, peer=self.node.name, id=self.peer.id, role="rollout")
        self._idle_since = time.perf_counter()
        self.node.join(self.peer)
        waiting = "" if self.peer.live("trainer") else ", waiting for a trainer"
        self.peer.log.info(
            "%s at %s, run directory %s%s", self.node.name, self.peer.address, self.node.run.path, waiting
        )
        try:
            await self._watch()
        finally:
            for task in self.tasks.values():
                task.cancel()
            await self.rewards.close()
            self.metrics.row(self._step(), self._figures())
            self.metrics.close()
            spans.flush()
        self.peer.note(f"leaving: {self.over}")
        return FINISHED

    async def _watch(self) -> None:
        next_figures = time.monotonic() + FIGURES_S
        while not self.over:
            self.node.stop.check()
            self.peer.check()
            if self.rewards.failure is not None:
                raise self.rewards.failure
            if self.engine.failure is not None:
                self._restart_engine(self.engine.failure)
            if hopeless := self.setbacks.hopeless():
                raise GivenUp(hopeless)
            if (short := self.peer.short) is not None and short.over:
                raise Requeue(f"{short.text}; start peers with --run {self.node.run.path}")
            now = time.monotonic()
            if self._too_late(now):
                self.over = f"{self.node.run.path} holds a run that has finished, and no trainer has taken it up again"
            if now >= next_figures:
                next_figures = now + FIGURES_S
                self.metrics.row(self._step(), self._figures())
            await self._changed.wait(WAIT_STEP_S)

    def _too_late(self, now: float) -> bool:
        """Whether this rollout came when all was over: as the run directory says, where that is shared."""
        if self.peer.live("trainer"):
            self._trainer_seen = now
        alone = now - self._trainer_seen > LATE_S
        return alone and self.node.run.summary.exists() and not self.node.run.others()

    def _restart_engine(self, failure: BaseException) -> None:
        """Called again and again while the engine is dead: a new one takes its place, and gets the newest version.
        Raises EngineDead when that was tried often enough."""
        if self.restarts.starting is None:
            nth = self.restarts.begin(time.monotonic())
            if not nth:
                raise EngineDead(self._obituary(failure)) from failure
            self.peer.note(f"{self._cause(failure)}; it is started again, {nth} of {self.restarts.allowed}", "warning")
            self.pause("its engine is started again")
            self.engine.close()
        try:
            engine = self.restarts.started()
        except Exception as e:  # its end is looked at like the first one
            self.engine.failure = e
            return
        if engine is not None:
            engine.figures.go_on_from(self.engine.figures)
            self.engine = engine
            engine.start(_Source(self), Prover(probe_floor(self.config)))
            self.receiver.forget()

    def look_again(self) -> None:
        """Any thread: whoever waits, for a version or for the end, looks again, all in one turn of the loop."""
        self._hand_over(self._changed.tell)

    def pause(self, why: str) -> None:
        """From the engine's thread: its weights failed their proof."""
        self.unproven = why
        self.peer.post(lambda: self._do(self.delivery.pause("unproven weights", time.monotonic())))

    def resume(self) -> None:
        """From the engine's thread: its weights are proved."""
        if self.unproven:
            self.unproven = ""
            self.peer.post(lambda: self._do(self.delivery.resume(time.monotonic())))

    def saw_term(self, counter: int) -> None:
        """From the engine's thread: the card carries the highest term applied, so that a new trainer opens a higher."""
        if counter > self.peer.card.highest_term:
            self.peer.update_card(highest_term=counter)

    def _start(self, starts: list[tuple[PeerId, Credit]]) -> None:
        if not self.tasks:
            spans.record("wait for credit", self._idle_since)
            self._idle_since = time.perf_counter()
        for trainer, credit in starts:
            if credit.evaluation:
                self._pin(credit.min_version)
            task = self._aio.create_task(self._work(trainer, credit), name=f"credit {credit.id}")
            self.tasks[trainer, credit.id] = task

    def _abort(self, trainer: PeerId, credit: CreditId) -> None:
        task = self.tasks.get((trainer, credit))
        if task is not None:
            task.cancel()

    def _pin(self, version: Version) -> None:
        """While evaluation credits of a version are here it must not be skipped for a newer one."""
        self.pins[version] = self.pins.get(version, 0) + 1
        self.receiver.pin(min(self.pins))

    def _unpin(self, version: Version) -> None:
        self.pins[version] -= 1
        if not self.pins[version]:
            del self.pins[version]
        self.receiver.pin(min(self.pins) if self.pins else None)

    async def _work(self, trainer: PeerId, credit: Credit) -> None:
        """One credit, from its order to its delivery. A failure is the credit's, not the peer's."""
        d = self.delivery
        try:
            group = await self._group(trainer, credit)
        except EngineDead:
            self.peer.post(lambda: d.returned(trainer, credit.id, "engine dead"))
        except Exception as e:  # a task's, the settings' or a bug's: one credit fails, many in a row end this rollout
            gone_on = credit.evaluation and (self.engine.version or credit.min_version) > credit.min_version
            passed = str(e) == PASSED or (gone_on and isinstance(e, RequestFailed | ValueError))
            why = PASSED if passed else described(e)
            if not passed and (line := self.setbacks.failed(e)):
                self.peer.log.warning("credit %s of %s failed: %s", credit.id, trainer, line)
                self.peer.log.debug("traceback", exc_info=True)
            self.peer.post(lambda: self._do(d.failed(trainer, credit.id, why, time.monotonic())))
        else:
            self.setbacks.succeeded()
            self.peer.post(lambda: self._do(d.finished(trainer, credit.id, group, time.monotonic())))
        finally:
            self.tasks.pop((trainer, credit.id), None)
            if credit.evaluation:
                self._unpin(credit.min_version)

    async def _group(self, trainer: PeerId, credit: Credit) -> Group:
        prompts = self.task.heldout if credit.evaluation else self.task.train
        if credit.prompt >= len(prompts):
            raise ValueError(f"prompt {credit.prompt} is not among the {len(prompts)} of this rollout's data")
        prompt = prompts[credit.prompt]
        begun = await self._admitted(trainer, credit)
        self.peer.post(lambda: self.delivery.started(trainer, credit.id, begun))
        with self._at_work():
            return await self._made(prompt, trainer, credit, begun)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Groups are made; without any, this rollout waits for credit, and once it has some, for weights they admit."""
        if not self._making and time.perf_counter() - self._idle_since > LEAST_WAIT_S:
            spans.record("wait for weights", self._idle_since)
        self._making += 1
        try:
            yield
        finally:
            self._making -= 1
            self._idle_since = time.perf_counter()

    async def _made(self, prompt: Prompt, trainer: PeerId, credit: Credit, begun: Version) -> Group:
        start, began = time.time(), time.perf_counter()
        tokens = encode(prompt.content, self.tokenizer)
        sampled = await asyncio.gather(
            *(self._completion(prompt, tokens, credit, i) for i in range(credit.size)), return_exceptions=True
        )
        stop, generated = time.time(), time.perf_counter()
        of = {"credit": credit.id, "trainer": trainer, "version": str(begun)}
        spans.record("generate", began, generated, lane="credits", **of)
        if broken := [s for s in sampled if isinstance(s, BaseException)]:
            raise broken[0]  # a trainer takes whole groups only
        completions, reasons = await self._scored(prompt, [s for s in sampled if isinstance(s, Transcript)])
        spans.record("score", generated, lane="credits", **of)
        versions = [span.version for c in completions for s in c.segments for span in s.spans]
        return Group(
            completions=completions,
            started=min(versions, default=begun),
            generate_start=start,
            generate_stop=stop,
            failures=reasons,
        )

    async def _admitted(self, trainer: PeerId, credit: Credit) -> Version:
        """The engine's version, once it is one that the credit admits."""
        while True:
            version, (_, lineage) = self.engine.version, self.delivery.standing(trainer)
            # an engine that cannot prove its version leaves an evaluation to others
            gone = credit.evaluation and (bool(self.unproven) or self.receiver.passed(credit.min_version))
            admitted = admits(credit, version, lineage, gone=gone)
            if admitted is None:
                raise RequestFailed(PASSED)
            if admitted and version is not None:
                return version
            await self._changed.wait(WAIT_STEP_S)

    async def _completion(self, prompt: Prompt, tokens: np.ndarray, credit: Credit, index: int) -> Transcript:
        """Completion ``index`` of the group: the task's rollout, which may take several turns. One that the engine has
        lost is begun once more, while the others of its group go on."""
        try:
            return await self.task.rollout(prompt, self._sampler(prompt, tokens, credit, index))
        except RequestFailed:
            if credit.evaluation:
                raise
            self.sampled_again += 1
            return await self.task.rollout(prompt, self._sampler(prompt, tokens, credit, index))

    def _sampler(self, prompt: Prompt, tokens: np.ndarray, credit: Credit, index: int) -> Sampler:
        settings = self.config.rollout
        return Sampler(
            self.engine,
            self.tokenizer,
            seed=credit.seed,
            index=index,
            max_new_tokens=settings.max_new_tokens,
            temperature=self.config.evaluation.temperature if credit.evaluation else settings.temperature,
            top_p=1.0 if credit.evaluation else settings.top_p,
            pinned=credit.min_version if credit.evaluation else None,
            encoded=(prompt.content, tokens),
        )

    async def _scored(self, prompt: Prompt, transcripts: list[Transcript]) -> tuple[list[Completion], dict[str, int]]:
        scored = await self.rewards.score(prompt, [t.text() for t in transcripts])
        reasons: dict[str, int] = {}
        completions = []
        for transcript, score in zip(transcripts, scored, strict=True):
            if score.reward is None:
                reasons[score.reason] = reasons.get(score.reason, 0) + 1
            completions.append(
                Completion(segments=transcript.segments, reward=score.reward, finish=transcript.finish, metrics={})
            )
        return completions, reasons

    # ------------------------------------------------------------------------------------------------------------------
    # What others see
    # ------------------------------------------------------------------------------------------------------------------

    def _figures(self) -> dict[str, float]:
        proof = self.proof
        return {
            "wall_s": time.monotonic() - self.started,
            "tokens_per_s": self._rate(),
            "version": float(self._step()),
            **{f"engine/{k}": v for k, v in self.engine.figures.as_dict().items()},
            **{f"groups/{k}": float(v) for k, v in self.delivery.counts.items()},
            "groups/failed_in_a_row": float(self.setbacks.in_a_row),
            "completions_sampled_again": float(self.sampled_again),
            **{f"rewards/{k}": float(v) for k, v in self.rewards.counts.items()},
            **{f"weights/{k}": float(v) for k, v in vars(self.receiver.stats()).items()},
            **(
                {"probe/difference": proof.difference, "probe/floor": proof.floor, "probe/power": proof.power}
                if proof
                else {}
            ),
            **process_figures(),
            "longest_gap_s": self.peer.longest_gap_s,
        }

    def _step(self) -> int:
        version = self.engine.version
        return version.number if version else -1

    def _rate(self) -> float:
        """Sampled tokens per second since the last call that lies a second back."""
        now, tokens = time.monotonic(), self.engine.figures.tokens
        since, before = self._measured
        if now - since >= 1.0:
            self.rate = (tokens - before) / (now - since)
            self._measured = (now, tokens)
        return self.rate

    def status(self) -> Status:
        """*loop*: for an observer."""
        proof = self.proof
        figures = {"tokens_per_s": self._rate(), "groups": float(self.delivery.held)}
        figures["host_memory_used"] = psutil.virtual_memory().percent / 100
        if proof is not None:
            figures["probe_difference"] = proof.difference
        return Status(
            seq=0,
            state=self._state(),
            version=self.engine.version,
            figures=figures,
            texts={"weights": self.receiver.told.text},
            events=list(self.peer.events)[-5:],
        )

    def _cause(self, failure: BaseException) -> str:
        card = self.peer.card
        how = " ".join(str(failure).split()) or type(failure).__name__
        return f"the engine of {card.name} on {card.host} has ended: {how}"

    def _obituary(self, failure: BaseException) -> str:
        return f"{self._cause(failure)}; start this rollout again"

    def _state(self) -> str:
        if self.engine.failure is not None:
            return "engine dead" if self.restarts.starting is None else "engine is started again"
        if self.unproven:
            return f"unproven: {self.unproven}"[:60]
        if self.peer.short is not None:
            return self.peer.short.text
        if self.engine.version is None:
            return "waiting for weights"
        return "sampling" if self.engine.figures.running else "waiting for credit"


class _Source:
    """The receiver as the engine's source of weights, telling the rollout when the engine's version has changed."""

    def __init__(self, rollout: Rollout):
        self._rollout = rollout
        self.offered = rollout.receiver.offered  # looked at between any two tokens

    def took(self, arrived: Arrived, proof: Proof) -> None:
        self._rollout.receiver.took(arrived, proof)
        self._rollout.proof = proof
        self._rollout.resume()
        self._rollout.saw_term(arrived.version.term.counter)
        self._rollout.look_again()

    def refused(self, arrived: Arrived, reason: Proof | str) -> None:
        self._rollout.receiver.refused(arrived, reason)  # which tells user and publisher
        if isinstance(reason, Proof):  # it was loaded: nothing is sampled until a good version comes
            self._rollout.pause(reason.reason)
        self._rollout.look_again()


def probe_floor(config: Any) -> float:
    """The probe's floor, mean absolute nat: what two honest float32 implementations differ by, or two bfloat16 ones."""
    if config.weights.probe_floor > 0:
        return config.weights.probe_floor
    narrow = "bfloat16" in (config.model.dtype, config.weights.wire_dtype, config.rollout.dtype)
    return 0.1 if narrow else 1e-3


def check_prompts(task: Task, tokenizer: Any, engine: Engine, settings: RolloutSettings) -> None:
    """Whether the first prompt of each kind can be encoded and sampled. Raises ValueError, in one line."""
    for prompts in (task.train, task.heldout):
        if len(prompts):
            tokens = encode(prompts[0].content, tokenizer)
            engine.check(Request(prompt=tokens, max_new_tokens=settings.max_new_tokens, top_p=settings.top_p))


def main(node: Node) -> int:
    """Load what is slow, then join, then work."""
    task = load_task(node.config.task)
    device = device_of(node.launch)
    backend = backend_of(node.config.weights.backend, device)
    engine, tokenizer = load_engine(node.config, device)
    restarts = Restarts(lambda: load_engine(node.config, device)[0], node.config.rollout.engine_restarts)
    check_prompts(task, tokenizer, engine, node.config.rollout)
    peer = node.peer(model=files_digest(node.config), data=task.digest)
    receiver = Receiver(
        peer, node.config.weights, group_builder(peer, backend), engine_build=engine.build, new_buffer=engine.new_flat
    )
    rollout = Rollout(node, peer, engine, receiver, task, tokenizer, restarts)
    reason = parting(None)
    try:
        return asyncio.run(rollout.run())
    except BaseException as e:
        reason = parting(e)
        raise
    finally:
        rollout.engine.close()
        receiver.close()
        peer.leave(reason)
