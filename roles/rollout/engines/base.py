"""What an engine is: token ids in, sampled tokens with their log-probabilities and versions out.

An engine owns a thread (or processes) of its own. The rollout calls ``await engine.sample(request)`` on its asyncio
loop. Requests that become ready in one turn of the loop are handed over together, in the order of the calls, and
admitted together: with one rollout and ``max_lag = 0`` a run can then be repeated bit for bit.

Weights come from the other side, between two tokens: the engine's thread asks its ``WeightSource`` for a version that
arrived complete, copies it in, lets the ``Prover`` check it, and only then steps again. Before the first proved
version, and after one that failed its proof, requests wait and nothing is sampled.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mesh.version import Version
from transport import spans
from transport.messages import FinishReason, Segment, Span

if TYPE_CHECKING:
    import torch

State = Literal["waiting", "ready", "unproven", "dead", "closed"]
"""``waiting``: no version yet. ``unproven``: the last version failed its proof; running requests are held."""


class EngineDead(RuntimeError):
    """The engine's thread or process has ended (the cause says how) and will sample nothing more."""


class RequestFailed(RuntimeError):
    """This request alone cannot be sampled; the engine goes on."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One completion to sample.

    ``prompt``: int32 token ids of shape (n,), n >= 1. ``temperature`` 0 takes the likeliest token; ``top_p`` below 1
    keeps to the likeliest ones. ``seed`` (uint64) alone decides the draws. ``pinned``: sample under exactly this
    version; the engine takes no other while the request runs, and fails it with RequestFailed when the version has
    passed already.
    """

    prompt: np.ndarray
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    pinned: Version | None = None

    def __post_init__(self) -> None:
        self.prompt = np.ascontiguousarray(self.prompt, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """``tokens`` int32 (n,), with the end-of-sequence token where one was sampled; ``logprobs`` float32 (n,), of each
    token under softmax(logits / temperature); ``spans`` tile [0, n) by version. An aborted sample is not complete."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: list[Span]
    finish: FinishReason

    def segment(self) -> Segment:
        return Segment(tokens=self.tokens, sampled=True, logprobs=self.logprobs, spans=self.spans)


NOTHING = Sampled(tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=[], finish="abort")


class WeightSource(Protocol):
    """Where versions come from (``transport.weights.receiver``). Called on the engine's thread."""

    def offered(self) -> Any | None:
        """The newest complete, verified version the engine does not have (an ``Arrived``), or None. Cheap. Handed out
        once: the engine answers by ``took`` or ``refused``, however much later."""

    def took(self, arrived: Any, proof: Any) -> None: ...

    def refused(self, arrived: Any, reason: Any) -> None: ...


class Prover(Protocol):
    """Checks what an engine really runs (``transport.weights.proof``). Called on the engine's thread, with what answers
    for the live weights; an engine whose weights live in other processes has provers of the same floor there."""

    floor: float

    def before(self, engine: Any, probe: Any) -> None: ...

    def prove(
        self,
        engine: Any,
        manifest: Any,
        tensor_digests: np.ndarray,
        probe: Any,
        version: Version,
        flat: "torch.Tensor | None" = None,
    ) -> Any:
        """A ``Proof``: ``proved``, and else a ``reason``."""


@dataclass
class Figures:
    """What an engine has done since its start; times in seconds."""

    tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0  # stepping or taking over
    longest_gap_s: float = 0.0  # between two tokens of one sequence, take-overs included
    takeovers: int = 0
    takeover_copy_s: float = 0.0
    takeover_proof_s: float = 0.0
    takeover_longest_s: float = 0.0
    running: int = 0
    queued: int = 0
    prompt_tokens: int = 0  # of engines with a prefix cache
    prompt_tokens_cached: int = 0

    def go_on_from(self, before: "Figures") -> None:
        """Count on from those of an engine that this one replaces."""
        for name, value in vars(before).items():
            if name in ("longest_gap_s", "takeover_longest_s"):
                setattr(self, name, max(value, getattr(self, name)))
            elif name not in ("running", "queued"):
                setattr(self, name, value + getattr(self, name))

    def as_dict(self) -> dict[str, float]:
        """For the metrics; ``prefix_hit_rate``: of all prompt tokens, the share that was found in the prefix cache."""
        figures = {name: float(value) for name, value in vars(self).items()}
        if self.prompt_tokens:
            figures["prefix_hit_rate"] = self.prompt_tokens_cached / self.prompt_tokens
        return figures


@dataclass(eq=False)
class Pending:
    """A request on its way, the future that waits for it and the loop the future belongs to."""

    request: Request
    future: asyncio.Future
    loop: asyncio.AbstractEventLoop = field(repr=False)


class Engine(ABC):
    """Base of all engines. ``version`` is the proved version it runs, or None; ``build`` names everything that makes
    its live tensors what they are (engines of one build must agree on their digests)."""

    build: str = ""
    version: Version | None = None
    state: State = "waiting"
    failure: BaseException | None = None
    """What ended it, set within a second of its end whether it was sampling or idle: the peer then leaves."""
    longest: int | None = None
    """Most tokens of a sequence, prompt included; None where the model sets no limit."""

    def __init__(self) -> None:
        self.figures = Figures()
        self._fresh: list[Pending] = []  # of this turn of the loop
        self._applied_at: float | None = None  # when the weights were taken over that have given no token yet

    # -- the rollout's side, on its asyncio loop -----------------------------------------------------------------------

    async def sample(self, request: Request) -> Sampled:
        """Sample one completion. Raises ValueError when the request can never be served (too long, empty, unknown
        tokens), RequestFailed when it failed alone, EngineDead when the engine is gone. Cancelling aborts it."""
        if self.failure is not None:
            raise EngineDead(f"the engine has ended: {self.failure!r}") from self.failure
        self.check(request)
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop.create_future(), loop)
        if not self._fresh:
            loop.call_soon(self._flush)
        self._fresh.append(pending)
        try:
            return await pending.future
        finally:
            if pending.future.cancelled():
                self.abort([request])

    async def generate(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample several, admitted together in this order; the first failure is raised once all have ended."""
        ended = await asyncio.gather(*(self.sample(r) for r in requests), return_exceptions=True)
        for result in ended:
            if isinstance(result, BaseException):
                raise result
        return ended

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        self.submit(fresh)

    def _brought_tokens(self) -> None:
        """A step has ended; the first one under a version is among the spans."""
        if self._applied_at is not None:
            spans.record("first token", self._applied_at, lane="engine", version=str(self.version))
            self._applied_at = None

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise ValueError, in one line, when this request can never be served."""

    @abstractmethod
    def submit(self, pending: list[Pending]) -> None:
        """Queue requests that belong together. Returns at once."""

    @abstractmethod
    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests soon, with what they have and the finish reason ``abort``. Unknown ones are ignored.
        Any thread."""

    @abstractmethod
    def start(self, source: WeightSource, prover: Prover) -> None:
        """Begin to take versions and to sample."""

    @abstractmethod
    def wake(self) -> None:
        """A version may be waiting: look now instead of within 20 ms. Any thread."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """Abort what runs and stop. False when the engine did not end in time (it is abandoned)."""

    def new_flat(self, nbytes: int) -> "torch.Tensor":
        """A buffer that versions are received into, where this engine takes them from: uint8, (nbytes,)."""
        from transport.weights.buffers import new_flat

        return new_flat(nbytes)


def sample_seed(seed: int, index: int, turn: int = 0) -> int:
    """The uint64 seed of one request: sample ``index`` of the group with ``seed``, in its turn ``turn``."""
    key = b"".join(int(n).to_bytes(8, "little") for n in (seed, index, turn))
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def check_request(request: Request, longest: int | None, vocabulary: int) -> None:
    """Raise ValueError, in one line, for what no model of ``longest`` positions and this vocabulary can sample."""
    n = len(request.prompt)
    if n == 0 or request.max_new_tokens < 1:
        raise ValueError("a request needs at least one prompt token and one new token")
    if longest is not None and n + request.max_new_tokens > longest:
        raise ValueError(
            f"a prompt of {n} tokens and rollout.max_new_tokens = {request.max_new_tokens} need "
            f"{n + request.max_new_tokens} positions, the model has {longest}: shorten one of them"
        )
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"prompt token {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
    if not request.temperature >= 0:
        raise ValueError(f"temperature {request.temperature} must not be negative")


def passed(request: Request, version: Version) -> RequestFailed:
    return RequestFailed(f"the request is pinned to {request.pinned}, the engine has gone on to {version}")


def answer(ended: list[tuple[Pending, Sampled | Exception]]) -> None:
    """Give each future its result, on its own loop: one call into a loop for all of them."""
    loops = {id(p.loop): p.loop for p, _ in ended}
    for key, loop in loops.items():
        mine = [(p.future, result) for p, result in ended if id(p.loop) == key]
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, mine)


def _resolve(results: list[tuple[Any, Sampled | Exception]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
