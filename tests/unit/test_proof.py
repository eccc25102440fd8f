"""Weights that look synced and are not: each kind is caught, and by which of the three proofs."""

import numpy as np
import pytest
import torch
from torch import nn

from mesh.version import Ballot, Version
from transport.messages import Probe
from transport.weights.buffers import copy_in, load_into, new_flat, tensor_digests
from transport.weights.manifest import Manifest
from transport.weights.proof import Proof, Prover, difference

TERM = Ballot(1, "t")
VOCAB, WIDTH = 50, 16
TOKENS = np.arange(1, 33, dtype=np.int32) * 7 % VOCAB


class Model(nn.Module):
    """A next-token model with a tied head: small, but every tensor matters to its log-probabilities."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mlp = nn.ModuleDict({"q": nn.Linear(WIDTH, WIDTH), "k": nn.Linear(WIDTH, WIDTH)})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + torch.tanh(self.mlp["q"](x)) * self.mlp["k"](x)
        return x @ (self.head.weight if head is None else head).t()


@torch.no_grad()
def logprobs(model: Model, tokens: np.ndarray, head: torch.Tensor | None = None) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))
    rows = model(ids[:-1], head).float().log_softmax(-1)
    return rows.gather(-1, ids[1:, None])[:, 0].numpy()


class Engine:
    """An engine that starts from dummy weights. ``head`` is how it holds its output head."""

    build = "test"

    def __init__(self, seed: int = 99, dtype: torch.dtype = torch.float32, head: str = "tied") -> None:
        self.model = Model(seed).to(dtype)
        self.packed = self.model.head.weight.detach().clone()
        self.head = head

    def score(self, tokens: np.ndarray) -> np.ndarray:
        return logprobs(self.model, tokens, None if self.head == "tied" else self.packed)

    def live_tensors(self):
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            yield name, self.packed if name == "head.weight" and self.head == "listed" else tensor


class Fused(Engine):
    """Holds q and k as one tensor under a name that the wire does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.stale_qk = False
        self.fuse()

    def fuse(self) -> None:
        if not self.stale_qk:
            self.qk = torch.cat([self.model.mlp["q"].weight.detach(), self.model.mlp["k"].weight.detach()])

    def live_tensors(self):
        for name, tensor in super().live_tensors():
            if name not in ("mlp.q.weight", "mlp.k.weight"):
                yield name, tensor
        yield "mlp.qk.weight", self.qk


class Publisher:
    """A trainer's model and what it sends; ``step`` moves every parameter by about ``size``."""

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        self.model = Model(seed=1)
        self.manifest = Manifest.from_module(self.model, wire_dtype)
        self.flat = new_flat(self.manifest.nbytes)
        self.number = -1
        self.publish()

    def publish(self) -> None:
        self.number += 1
        copy_in(self.manifest, self.model.state_dict(keep_vars=True), self.flat)
        self.digests = tensor_digests(self.manifest, self.flat)
        self.probe = Probe(TOKENS, logprobs(self.model, TOKENS))

    @torch.no_grad()
    def step(self, size: float, only: str = "") -> None:
        for name, parameter in self.model.named_parameters():
            if only in name:
                parameter += size * torch.randn_like(parameter).sign()
        self.publish()


def take(prover: Prover, engine: Engine, publisher: Publisher, load=load_into, probe=None, flat=False) -> Proof:
    probe = probe or publisher.probe
    prover.before(engine, probe)
    load(publisher.manifest, publisher.flat, dict(engine.model.state_dict(keep_vars=True)))
    if isinstance(engine, Fused):
        engine.fuse()
    elif engine.head == "follows":
        engine.packed = engine.model.head.weight.detach().clone()
    version = Version(TERM, publisher.number)
    return prover.prove(engine, publisher.manifest, publisher.digests, probe, version, publisher.flat if flat else None)


def no_load(manifest, flat, tensors) -> None:
    """A sync that "runs" and does nothing."""


def test_an_engine_that_follows_is_proved_at_every_version_and_twice_the_same():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    drill = take(prover, engine, publisher)
    assert drill.proved, drill.reason
    assert drill.reason == ""
    assert drill.power > 10
    assert prover.noise == drill.difference
    same = take(prover, engine, publisher)
    assert same.proved, same.reason
    assert (same.live_digest, same.power) == (drill.live_digest, 0.0)
    publisher.step(1e-3)
    new = take(prover, engine, publisher)
    assert new.proved, new.reason
    assert new.live_digest != same.live_digest
    assert new.power > 0


def test_engines_of_one_build_agree_on_the_digest_of_a_version():
    publisher = Publisher()
    one, two = Engine(seed=5), Engine(seed=6)
    assert take(Prover(1e-3), one, publisher).live_digest == take(Prover(1e-3), two, publisher).live_digest


def test_a_stale_hidden_head_is_caught_by_the_drills_probe():
    proof = take(Prover(1e-3), Engine(head="hidden"), Publisher())
    assert not proof.proved
    assert f"differ from the publisher's by {proof.difference:.3g} nat on average; allowed are 0.001" in proof.reason


def test_a_stale_listed_head_is_caught_by_read_back_and_named():
    proof = take(Prover(1e9), Engine(head="listed"), Publisher())
    assert "still holds its dummy weights in head.weight" in proof.reason
    publisher, engine, prover = Publisher(), Engine(head="follows"), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    engine.head = "listed"  # from now on the copy is forgotten
    publisher.step(1e-6)
    proof = take(prover, engine, publisher)
    assert not proof.proved
    assert "still holds the last version's bytes in head.weight" in proof.reason
    assert "embed.weight" not in proof.reason


def test_an_engine_left_behind_by_a_tiny_step_is_caught_by_read_back_where_the_probe_is_blind():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    publisher.step(1e-6)
    proof = take(prover, engine, publisher, load=no_load)
    assert proof.difference < proof.floor
    assert not proof.proved
    assert "the engine still holds the last version's bytes in embed.weight" in proof.reason
    assert take(prover, engine, publisher).proved, "a second, right load is proved"


def test_a_tensor_that_is_half_loaded_is_named():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    publisher.step(1e-6)

    def half(manifest, flat, tensors) -> None:
        kept = tensors["mlp.q.weight"].detach()[8:].clone()
        load_into(manifest, flat, tensors)
        tensors["mlp.q.weight"].detach()[8:] = kept

    proof = take(prover, engine, publisher, load=half)
    assert proof.reason.endswith("the engine holds other bytes than were sent in mlp.q.weight")


def test_a_second_load_that_is_not_idempotent_is_named():
    publisher, engine, prover = Publisher(), Fused(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    engine.stale_qk = True
    engine.qk = engine.qk.flip(0)
    proof = take(prover, engine, publisher)
    assert "changed what this version does not mlp.qk.weight" in proof.reason


def test_a_fused_layout_is_proved_and_a_fused_tensor_left_behind_is_named():
    publisher, engine, prover = Publisher(), Fused(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    publisher.step(1e-6, only="mlp.k")
    assert take(prover, engine, publisher).proved
    engine.stale_qk = True
    publisher.step(1e-6, only="mlp.k.weight")
    assert "last version's bytes in mlp.qk.weight" in take(prover, engine, publisher).reason
    engine.stale_qk = False
    publisher.step(1e-6, only="embed")
    proof = take(prover, engine, publisher)
    assert proof.proved, proof.reason


def test_a_narrower_engine_may_round_a_step_away_but_not_with_the_bytes_at_hand():
    publisher = Publisher()
    blind, sharp = (Prover(0.3), Engine(dtype=torch.bfloat16)), (Prover(0.3), Engine(dtype=torch.bfloat16))
    assert take(*blind, publisher).proved
    assert take(*sharp, publisher, flat=True).proved
    publisher.step(1e-7)
    assert take(*blind, publisher).proved
    assert take(*sharp, publisher, flat=True).proved
    publisher.step(1e-2)
    proof = take(*sharp, publisher, load=no_load, flat=True)
    assert proof.difference < proof.floor
    assert "still holds the last version's bytes in embed.weight" in proof.reason


def test_a_wrong_probe_is_refused_with_the_size_of_the_difference():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    wrong = Probe(TOKENS, publisher.probe.logprobs - np.float32(0.25))
    proof = take(prover, engine, publisher, probe=wrong)
    assert proof.reason == "log-probabilities differ from the publisher's by 0.25 nat on average; " \
        "allowed are 0.001"  # fmt: skip
    assert proof.difference == pytest.approx(0.25, abs=1e-5)


def test_an_engine_that_starts_from_the_models_own_weights_has_shown_nothing():
    proof = take(Prover(1e-3), Engine(seed=1), Publisher())
    assert not proof.proved
    assert "the drill shows nothing" in proof.reason


def test_a_drill_that_failed_can_be_repeated():
    publisher, engine, prover = Publisher(), Engine(head="hidden"), Prover(1e-3)
    assert not take(prover, engine, publisher).proved
    engine.head = "follows"
    proof = take(prover, engine, publisher)
    assert proof.proved, proof.reason


def test_nan_weights_are_refused_and_named():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    with torch.no_grad():
        publisher.model.mlp["k"].bias[3] = float("nan")
    publisher.publish()
    proof = take(prover, engine, publisher)
    assert not proof.proved
    assert "weights hold NaN or infinity: mlp.k.bias" in proof.reason
    assert proof.difference == float("inf")


def test_scores_that_cannot_be_compared_are_refused():
    publisher, engine = Publisher(), Engine()
    short = Probe(TOKENS, publisher.probe.logprobs[:-1])
    assert (
        "scored (31,) log-probabilities, the publisher (30,)"
        in take(Prover(1e-3), engine, publisher, probe=short).reason
    )
    nan = Probe(TOKENS, publisher.probe.logprobs * np.float32("nan"))
    assert "publisher's log-probabilities are not finite" in take(Prover(1e-3), engine, publisher, probe=nan).reason
    assert difference(np.zeros(0), np.zeros(0)) == float("inf")


def test_a_repeated_probe_costs_no_forward_before_the_load():
    publisher, engine, prover = Publisher(), Engine(), Prover(1e-3)
    assert take(prover, engine, publisher).proved
    publisher.step(1e-3)
    calls = []
    engine.score = lambda tokens: calls.append(1) or logprobs(engine.model, tokens)
    assert take(prover, engine, publisher).power > 0
    assert len(calls) == 1
