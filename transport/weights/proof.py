"""Whether an engine really runs the version it was given. Three proofs, because each sees what the others cannot.

*Read-back* (``readback.py``) compares digests of the engine's live tensors with what was sent. It sees a step of 1e-6
that no log-probability shows, but not a copy that the engine hides.

*Drill*: an engine starts from dummy weights, so the first version changes every tensor, and its log-probabilities must
move from far away to the publisher's. It sees hidden copies (a prepacked or untied head), and the difference that is
left is the noise between trainer and engine.

*Probe*: at every version the engine scores a short token sequence; the mean absolute difference to the publisher's
log-probabilities must stay within max(floor, 5 x the drill's). How much the probe could have seen, the distance of this
version from the last one over the noise, is stated as the proof's ``power``.

A ``Prover`` keeps what the last *proved* version looked like. It is used on the engine's thread and lives as long as
the engine: a restarted engine gets a new one, and starts from dummy weights again.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from mesh.version import Version
from transport.messages import Probe
from transport.weights import readback
from transport.weights.buffers import digest_of
from transport.weights.manifest import Manifest

DRILL_RATIO = 10.0
"""Before the drill an engine must be this many times further from the publisher than after: else it shows nothing."""

NOISE_ALLOWED = 5.0
"""Times the drill's difference that a later version may differ: the noise varies with weights and tokens."""

TINY = 1e-9  # nat; stands for the noise where trainer and engine agree to the last bit


class Engine(Protocol):
    """What a proof asks of an engine. ``build`` names what decides its bytes (engine, version, dtype, device kind,
    layout): engines of one build must have equal ``live_digest`` at equal versions."""

    build: str

    def live_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every tensor that the weights determine, in a stable order, as the forward pass reads it; under its name on
        the wire where it lies there as it was sent. Not what weights do not determine (a cache of rotary angles)."""

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probability (temperature 1) of each of ``tokens`` (int32, (n,)) after the first: float32, (n-1,)."""


@dataclass(frozen=True)
class Proof:
    """The outcome for one version. ``reason`` is empty when it is proved, else one line. ``difference`` and ``floor``
    (the limit applied) are mean absolute nat; ``power`` has no unit; ``live_digest`` is hex; ``seconds`` is the stall
    of ``before`` and ``prove`` together."""

    version: Version
    proved: bool
    reason: str
    difference: float
    floor: float
    power: float
    live_digest: str
    seconds: float


@dataclass(frozen=True)
class _Proved:
    """The engine at the last proved version: what was sent, what lay in it, and the probe it passed."""

    wire: dict[str, readback.Sent]
    live: dict[str, readback.Live]
    probe: Probe


class Prover:
    """Proves one version after another for one engine: ``before``, load, ``prove``.

    ``floor`` (mean absolute nat) is what trainer and engine may always differ by: 1e-3 where both are float32, 0.1
    otherwise. A version that fails changes nothing here, so it can be loaded and proved again.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.noise: float | None = None
        """The drill's difference in nat; None before the drill has passed."""
        self._dummy: dict[str, readback.Live] = {}
        self._last: _Proved | None = None
        self._distance: float | None = None
        self._dummy_distance: float | None = None  # kept: a repeated drill no longer finds dummy weights
        self._spent_s = 0.0

    def before(self, engine: Engine, probe: Probe) -> None:
        """Look at the engine *before* a version with this ``probe`` is loaded: how far is it from there?

        Costs a forward only when the probe's tokens are new; otherwise the last version's probe tells the distance.
        """
        began = time.perf_counter()
        if self._last is None and not self._dummy:
            self._dummy = {name: readback.Live(digest_of(t), t.dtype) for name, t in engine.live_tensors()}
        if self._last is not None and np.array_equal(self._last.probe.tokens, probe.tokens):
            now = self._last.probe.logprobs
        else:
            now = engine.score(probe.tokens)
        self._distance = difference(now, probe.logprobs)
        if self._dummy_distance is None:
            self._dummy_distance = self._distance
        self._spent_s = time.perf_counter() - began

    def prove(
        self,
        engine: Engine,
        manifest: Manifest,
        tensor_digests: np.ndarray,
        probe: Probe,
        version: Version,
        flat: Tensor | None = None,
    ) -> Proof:
        """Look at the engine *after* ``version`` was loaded. ``tensor_digests`` (uint64, one an entry) are the wire's.

        ``flat`` (uint8, (manifest.nbytes,)), where the caller still has it, lets read-back check live tensors of
        another dtype than the wire's exactly; without it they need not change: a small step can vanish in rounding.
        """
        assert self._distance is not None, "before() was not called for this version"
        assert self._dummy_distance is not None
        began = time.perf_counter()
        wire = readback.sent(manifest, tensor_digests)
        live, broken = readback.look(engine.live_tensors(), manifest, wire, flat)
        score = engine.score(probe.tokens)
        after = difference(score, probe.logprobs)
        reason = f"weights hold NaN or infinity: {readback.some(broken)}" if broken else score_fault(score, probe)
        if self.noise is None or self._last is None:
            noise, limit = after, self.floor
            reason = reason or readback.drill_fault(self._dummy, live) or probe_fault(after, limit)
            reason = reason or drill_without_power(self._dummy_distance, after)
        else:
            noise, limit = self.noise, max(self.floor, NOISE_ALLOWED * self.noise)
            reason = reason or readback.read_back_fault(self._last.wire, wire, self._last.live, live)
            reason = reason or probe_fault(after, limit)
        power = self._distance / max(noise, TINY)
        self._distance = None
        if not reason:
            self.noise, self._last, self._dummy = noise, _Proved(wire, live, probe), {}
        return Proof(
            version=version,
            proved=not reason,
            reason=reason,
            difference=after,
            floor=limit,
            power=power,
            live_digest=readback.live_digest(live),
            seconds=self._spent_s + time.perf_counter() - began,
        )


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Mean absolute difference of two rows of log-probabilities, in nat; infinite when they are not of one length, are
    empty, or hold something not finite."""
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        return float("inf")
    mean = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).mean())
    return mean if np.isfinite(mean) else float("inf")


def score_fault(score: np.ndarray, probe: Probe) -> str:
    """What makes two rows of log-probabilities incomparable, or an empty string."""
    if score.shape != probe.logprobs.shape or score.size == 0:
        return f"the engine scored {score.shape} log-probabilities, the publisher {probe.logprobs.shape}"
    if not np.isfinite(probe.logprobs).all():
        return "the publisher's log-probabilities are not finite"
    if not np.isfinite(score).all():
        return "the engine's log-probabilities are not finite, though its weights are"
    return ""


def probe_fault(after: float, limit: float) -> str:
    """The difference and its limit, in nat, when it is over."""
    if after <= limit:
        return ""
    return f"log-probabilities differ from the publisher's by {after:.3g} nat on average; allowed are {limit:.3g}"


def drill_without_power(before: float, after: float) -> str:
    """A drill passes only when the engine came from far away, measured by the noise that is left."""
    if before > max(DRILL_RATIO * after, TINY):
        return ""
    return (
        f"the drill shows nothing: the engine differed by {before:.3g} nat under its dummy weights and by {after:.3g} "
        "now; start it from weights that are not the model's"
    )
