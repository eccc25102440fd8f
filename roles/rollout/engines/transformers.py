"""The transformers engine: any causal language model of that library, decoded by our own loop on a thread of its own.

One turn of the thread: look for a new version, end what was aborted, admit what waits, one token for every running
sequence. Weights can change only in the first of these, so no forward pass ever sees two versions, and every token is
labelled with the version whose forward pass it was drawn from.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mesh.version import Version
from roles.rollout.engines.base import (
    NOTHING,
    Engine,
    EngineDead,
    Pending,
    Prover,
    Request,
    RequestFailed,
    Sampled,
    WeightSource,
    answer,
    check_request,
    passed,
)
from roles.rollout.engines.decode import Batch
from transport import spans
from transport.weights.buffers import load_into

log = logging.getLogger(__name__)

DUMMY_SEED = 0x64756D6D79  # "dummy": a trainer's own fresh weights, from whatever seed, are never these
POLL_S = 0.02


class TransformersEngine(Engine):
    """``model`` is put in eval mode and belongs to the engine's thread from ``start`` to ``close``.

    ``eos``: token ids that end a completion. ``max_batch``: rows in one forward; more requests queue. ``threads``: CPU
    threads of torch on the engine's thread, 0 leaves them as they are."""

    def __init__(self, model: nn.Module, *, eos: Iterable[int], max_batch: int = 256, threads: int = 0) -> None:
        super().__init__()
        self.model = model.eval()
        self.max_batch, self.threads = max_batch, threads
        config = model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self.longest = getattr(config, "max_position_embeddings", None)
        parameter = next(model.parameters())
        self._device = parameter.device
        attention = getattr(config, "_attn_implementation", "")
        self.build = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, {type(model).__name__}, "
            f"{str(parameter.dtype).removeprefix('torch.')}, {attention}, {self._device.type}"
        )
        with torch.inference_mode():
            self._batch = Batch(model, sorted(set(eos)))
        self._lock = threading.Condition()  # guards the five below
        self._submitted: list[Pending] = []
        self._aborts: set[int] = set()  # by id() of the request
        self._unanswered: dict[int, Pending] = {}  # by id() of the request
        self._woken = self._closing = False
        self._queue: deque[Pending] = deque()  # the thread's own
        self._arrived: Any = None  # handed out by the source, which does so once, and not taken over yet
        self._last_token_at: float | None = None  # while a sequence is running
        self._stepped = False  # in the last turn: then there may be more to do at once
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- the rollout's side --------------------------------------------------------------------------------------------

    def start(self, source: WeightSource, prover: Prover) -> None:
        self.source, self.prover = source, prover
        self._thread.start()

    def check(self, request: Request) -> None:
        if request.top_p < 1:
            raise ValueError('rollout.top_p below 1 needs rollout.engine = "vllm"')
        check_request(request, self.longest, self._vocabulary)

    def submit(self, pending: list[Pending]) -> None:
        with self._lock:
            gone = self._closing or self.failure is not None
            if not gone:
                pending = [p for p in pending if not p.future.cancelled()]
                self._submitted += pending
                self._unanswered.update((id(p.request), p) for p in pending)
                self._lock.notify()
        if gone:
            answer([(p, self._dead()) for p in pending])

    def abort(self, requests: Iterable[Request]) -> None:
        with self._lock:
            self._aborts.update(id(r) for r in requests if id(r) in self._unanswered)
            self._lock.notify()

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            self._lock.notify()

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if not ended:
            log.warning("the engine did not end within %.1f s and is abandoned", timeout_s)
        with self._lock:
            left, self._unanswered = list(self._unanswered.values()), {}
        answer([(p, self._dead()) for p in left])
        return ended

    def _dead(self) -> EngineDead:
        error = EngineDead(f"the engine has ended: {self.failure!r}" if self.failure else "the engine is closed")
        error.__cause__ = self.failure
        return error

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)  # of this thread's parallel regions
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
            self.state = "closed"
        except BaseException as e:  # not handled here: everybody who waits is told, and the peer sees ``failure``
            log.exception("the engine's thread ends")
            self.failure, self.state = e, "dead"
        finally:
            self.version = None
            with self._lock:
                self._closing = True
                left, self._unanswered = list(self._unanswered.values()), {}
            answer([(p, self._dead()) for p in left])

    def _turn(self) -> bool:
        with self._lock:
            if not (self._stepped or self._submitted or self._aborts or self._woken or self._closing):
                self._lock.wait(POLL_S)
            self._woken = False
            self._queue += self._submitted
            self._submitted = []
            aborts, self._aborts = self._aborts, set()
            closing = self._closing
        if closing:
            self._end(aborts=None)
            return False
        if aborts:
            self._end(aborts)
        self._take_over()
        if self.version is not None:
            self._admit(self.version)
        self.figures.running, self.figures.queued = len(self._batch), len(self._queue)
        self._stepped = self.version is not None and len(self._batch) > 0
        if self._stepped:
            started = time.perf_counter()
            ended = self._batch.step()
            now = time.perf_counter()
            self._count(started, now, tokens=len(self._batch) + len(ended))
            self._deliver(ended)
        return True

    def _admit(self, version: Version) -> None:
        room = self.max_batch - len(self._batch)
        chosen: list[Pending] = []
        later: list[Pending] = []
        gone_by: list[Pending] = []
        while self._queue and len(chosen) < room:
            pending = self._queue.popleft()
            pinned = pending.request.pinned or version
            (gone_by if pinned < version else later if pinned > version else chosen).append(pending)
        self._queue.extendleft(reversed(later))
        self._deliver([(p, passed(p.request, version)) for p in gone_by])
        if chosen:
            with self._timed():
                self._batch.admit(chosen, version)

    def _end(self, aborts: set[int] | None) -> None:
        """End these requests (None: all) as aborted."""

        def hit(pending: Pending) -> bool:
            return aborts is None or id(pending.request) in aborts

        ended: list[tuple[Pending, Any]] = [(p, NOTHING) for p in self._queue if hit(p)]
        self._queue = deque(p for p in self._queue if not hit(p))
        leaving = [hit(row.pending) for row in self._batch.rows]
        if any(leaving):
            ended += self._batch.remove(leaving)
        self._deliver(ended)

    def _deliver(self, ended: list[tuple[Pending, Sampled | Exception]]) -> None:
        if not len(self._batch):
            self._last_token_at = None
        if not ended:
            return
        with self._lock:
            for pending, _ in ended:
                self._unanswered.pop(id(pending.request), None)
        answer([(p, RequestFailed(str(r)) if isinstance(r, FloatingPointError) else r) for p, r in ended])

    def _count(self, started: float, now: float, tokens: int) -> None:
        f = self.figures
        f.tokens += tokens
        f.steps += 1
        f.busy_s += now - started
        if self._last_token_at is not None:
            f.longest_gap_s = max(f.longest_gap_s, now - self._last_token_at)
        self._last_token_at = now
        self._brought_tokens()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.figures.busy_s += time.perf_counter() - started

    # -- weights -------------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        self._arrived = arrived = self._arrived or self.source.offered()
        if arrived is None or self._held_for_evaluation():
            return
        self._arrived = None
        started = time.perf_counter()
        self.prover.before(self, arrived.probe)
        try:
            arrived.manifest.fits(self.state_tensors(), "the engine")
        except ValueError as e:  # nothing was touched: go on with the version there is
            self.source.refused(arrived, str(e))
            return
        before = time.perf_counter()
        self.version, self.state = None, "unproven"
        self.load(arrived.manifest, arrived.flat)
        copied = time.perf_counter()
        proof = self.prover.prove(
            self, arrived.manifest, arrived.tensor_digests, arrived.probe, arrived.version, arrived.flat
        )
        proved = time.perf_counter()
        if not proof.proved:
            self.source.refused(arrived, proof)
            return
        self._pass_over(arrived.version)
        self._batch.reweigh(arrived.version)
        self.version, self.state = arrived.version, "ready"
        f, now = self.figures, time.perf_counter()
        f.takeovers += 1
        f.takeover_copy_s += copied - before
        f.takeover_proof_s += (before - started) + (proved - copied)
        f.takeover_longest_s = max(f.takeover_longest_s, now - started)
        spans.record("apply", started, now, lane="engine", version=str(arrived.version))
        self._applied_at = now
        f.busy_s += now - started
        self.source.took(arrived, proof)

    def _held_for_evaluation(self) -> bool:
        if self.version is None:
            return False
        running = (row.pending for row in self._batch.rows)
        return any(p.request.pinned == self.version for group in (running, self._queue) for p in group)

    def _pass_over(self, version: Version) -> None:
        """Running requests that were pinned to a version whose successor failed, and which is not coming back."""
        leaving = [row.pending.request.pinned not in (None, version) for row in self._batch.rows]
        if any(leaving):
            self._deliver([(p, passed(p.request, version)) for p, _ in self._batch.remove(leaving)])

    def state_tensors(self) -> dict[str, Tensor]:
        """The tensors a version is loaded into, by the names of the model's state_dict, tied names included."""
        return self.model.state_dict(keep_vars=True)

    def live_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every distinct tensor that a version decides, in a stable order, in the layout the forward pass reads."""
        seen: set[int] = set()
        for name, tensor in self.state_tensors().items():
            if id(tensor) not in seen:  # tied names share one tensor
                seen.add(id(tensor))
                yield name, tensor.detach()

    def load(self, manifest: Any, flat: Tensor) -> None:
        """Copy a flat uint8 buffer into the live tensors."""
        load_into(manifest, flat, self.state_tensors())

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> np.ndarray:
        """float32 (n-1,): log-probability of ``tokens[1:]`` (int32 (n,)) at temperature 1."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64)).to(self._device)[None]
        logp = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logp.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def dummy_model(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """A model of a directory's (or hub id's) configuration with seeded random weights, never its own."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DUMMY_SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        scramble(model)
    return model.to(device)


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Make random, from torch's generator, also what initialises to constants: norms, biases, persistent buffers. The
    first proof then shows of every tensor that it arrived. What no version decides stays as it was configured."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}
    for tensor in tensors.values():
        noise = torch.rand(tensor.shape) * 0.02 + 0.01  # at least one bfloat16 step away from 1
        tensor.add_((noise * (torch.rand(tensor.shape) < 0.5).mul(2).sub(1)).to(tensor.dtype))


def end_tokens(path: str | Path, extra: Iterable[int | None] = (), trust_remote_code: bool = False) -> list[int]:
    """The ids that end a completion: of the model's configuration, of its generation settings, and ``extra`` ones (the
    tokenizer's). Empty when the model names none: completions then end by length only."""
    found: set[int] = {i for i in extra if i is not None}
    settings = [AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()]
    if (Path(path) / "generation_config.json").exists():
        settings.append(GenerationConfig.from_pretrained(path))
    for one in settings:
        ids = getattr(one, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return sorted(found)
