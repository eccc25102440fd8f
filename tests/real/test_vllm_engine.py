"""The real vLLM on a small model: what it samples is what each version's own forward pass says, whatever version came
between two of its tokens; and what it must not take over it does not."""

import asyncio
import dataclasses
import os
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mesh.config import convert
from mesh.version import Ballot, Version
from roles.rollout.engines import vllm
from roles.rollout.engines.base import EngineDead, Request, RequestFailed
from transport.messages import Probe
from transport.weights.buffers import copy_in, tensor_digests
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover

pytestmark = [
    pytest.mark.skipif(not vllm.installed().startswith(vllm.SUPPORTED), reason=f"vLLM {vllm.SUPPORTED} is not here"),
    pytest.mark.timeout(600),
]
TERM = Ballot(1, "aa")
PROBE = np.arange(10, 40, dtype=np.int32)
PATIENCE_S = 200.0  # vLLM compiles on first use, on a machine that is busy


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def logprobs_of(model, prompt, tokens, temperature=1.0):
    """Of every sampled token, by one plain forward pass: float32 (n,)."""
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    with torch.no_grad():
        logp = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Engine:
    """A vLLM engine and the versions put into it; ``put`` waits until one is taken or refused."""

    def __init__(self, directory, **settings):
        self.others = {child.pid for child in psutil.Process().children(recursive=True)}
        self.fault = directory.parent / "fault"
        os.environ["VLLM_FAULT"] = str(self.fault)
        llama(0).save_pretrained(directory)
        config = convert({"model": {"path": str(directory)}, "rollout": {"threads": 1, "max_batch": 32, **settings}})
        args = vllm.engine_args(config, str(directory), "float32", cuda=False)
        args["worker_extension_cls"] = "vllm_faults.Faulty"
        self.real = vllm.VllmEngine(args, eos=[1], on_update=config.rollout.on_update, threads=1)
        self.number, self.next = 0, None
        self.taken: list[Version] = []
        self.proofs: list = []
        self.refusals: list = []
        self.real.start(self, Prover(1e-3))

    def offered(self):
        arrived, self.next = self.next, None
        return arrived

    def took(self, arrived, proof) -> None:
        self.proofs.append(proof)
        self.taken.append(arrived.version)

    def refused(self, arrived, reason) -> None:
        self.refusals.append(reason)

    def offer(self, model) -> Version:
        self.number += 1
        manifest = Manifest.from_module(model)
        flat = self.real.new_flat(manifest.nbytes)
        copy_in(manifest, model.state_dict(), flat)
        version = Version(TERM, self.number)
        self.next = SimpleNamespace(
            version=version,
            manifest=manifest,
            flat=flat,
            tensor_digests=tensor_digests(manifest, flat),
            probe=Probe(tokens=PROBE, logprobs=logprobs_of(model, PROBE[:1], PROBE[1:])),
        )
        self.real.wake()
        return version

    def put(self, model, fault: str = "") -> Version:
        if fault:
            self.fault.write_text(fault)
        before = len(self.taken) + len(self.refusals)
        version = self.offer(model)
        soon(lambda: len(self.taken) + len(self.refusals) > before, "the version is taken or refused")
        self.fault.unlink(missing_ok=True)
        return version

    def sample(self, *requests):
        return asyncio.run(asyncio.wait_for(self.real.generate(requests), PATIENCE_S))

    def offer_while_it_samples(self, model, asked):
        """The requests, what was sampled for them, and the version that was offered once they were running."""

        async def run():
            running = asyncio.ensure_future(self.real.generate(asked))
            while self.real.figures.running == 0:
                await asyncio.sleep(0.001)
            version = self.offer(model)
            return asked, await asyncio.wait_for(running, PATIENCE_S), version

        return asyncio.run(run())

    def processes(self):
        """vLLM's own. Python's resource tracker lives as long as this process, and so do those of other tests."""
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in self.others]
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def soon(what, why):
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.005)


def requests(count, new=24, temperature=1.0, seed=0, length=9):
    rng = np.random.default_rng(seed)
    return [
        Request(prompt=rng.integers(2, 64, length), max_new_tokens=new, temperature=temperature, seed=i)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("vllm") / "model")
    yield engine
    children = engine.processes()
    assert engine.real.close(30.0)
    _, left = psutil.wait_procs(children, timeout=30.0)
    assert not left


def test_the_log_probabilities_are_those_of_the_distribution_that_was_sampled(shared_engine):
    model = llama(1)
    version = shared_engine.put(model)
    assert shared_engine.taken[-1] == version, shared_engine.refusals
    assert shared_engine.proofs[-1].difference < 1e-4
    differences = []
    for temperature in (1.0, 0.7):
        asked = requests(8, temperature=temperature)
        for request, got in zip(asked, shared_engine.sample(*asked), strict=True):
            expected = logprobs_of(model, request.prompt, got.tokens, temperature)
            differences.append(np.abs(got.logprobs - expected).max())
            assert [(s.version, s.start, s.stop) for s in got.spans] == [(version, 0, len(got.tokens))]
            assert got.finish == ("stop" if got.tokens[-1] == 1 else "length")
            assert 1 not in got.tokens[:-1]
    assert max(differences) < 1e-4


def test_a_version_that_comes_while_it_samples_is_taken_between_two_tokens(shared_engine):
    old, new = llama(2), llama(3)
    first = shared_engine.put(old)
    asked, got, second = shared_engine.offer_while_it_samples(new, requests(16, new=900))
    assert shared_engine.taken[-2:] == [first, second], shared_engine.refusals
    crossed = [g for g in got if len(g.spans) == 2]
    assert crossed
    for request, g in zip(asked, got, strict=True):
        assert [s.version for s in g.spans] in ([first], [first, second])
        assert [s.start for s in g.spans] == [0, *(s.stop for s in g.spans[:-1])]
        assert g.spans[-1].stop == len(g.tokens)
        head = g.spans[0].stop
        expected = logprobs_of(old, request.prompt, g.tokens)[:head]
        np.testing.assert_allclose(g.logprobs[:head], expected, atol=1e-4)


def test_the_same_weights_twice_change_nothing(shared_engine):
    model = llama(4)
    shared_engine.put(model)
    asked = requests(4, temperature=0.0)
    before = shared_engine.sample(*asked)
    again = shared_engine.put(model)
    assert shared_engine.taken[-1] == again, shared_engine.refusals
    after = shared_engine.sample(*asked)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_what_old_weights_cached_of_a_prompt_is_not_found_by_new_ones(shared_engine):
    (asked,) = requests(1, temperature=0.0, length=300)  # more than two blocks
    again = dataclasses.replace(asked)
    shared_engine.put(llama(5))
    shared_engine.sample(asked)
    cached = shared_engine.real.figures.prompt_tokens_cached
    new = llama(6)
    shared_engine.put(new)
    (got,) = shared_engine.sample(asked)
    assert shared_engine.real.figures.prompt_tokens_cached == cached
    np.testing.assert_allclose(got.logprobs, logprobs_of(new, asked.prompt, got.tokens), atol=1e-4)
    shared_engine.sample(again)
    assert shared_engine.real.figures.prompt_tokens_cached >= cached + 256


def test_a_group_shares_its_prompt(shared_engine):
    shared_engine.put(llama(5))
    (asked,) = requests(1, seed=77, length=300)
    before = shared_engine.real.figures.prompt_tokens_cached
    shared_engine.sample(*(dataclasses.replace(asked, seed=i) for i in range(4)))
    assert shared_engine.real.figures.prompt_tokens_cached == before + 3 * 256


def test_a_request_that_cannot_be_served_fails_alone_and_an_aborted_one_brings_what_it_has(shared_engine):
    shared_engine.put(llama(7))
    real = shared_engine.real
    assert real.longest == 1024

    async def run():
        fit, long, late = *requests(2, new=1015), requests(1)[0]
        late.pinned = Version(TERM, 1)
        over = Request(prompt=np.full(1000, 5), max_new_tokens=25)
        tasks = [asyncio.ensure_future(real.sample(r)) for r in (fit, long, late, over)]
        while real.figures.running < 2:
            await asyncio.sleep(0.001)
        real.abort([long])
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)

    fit, long, late, over = asyncio.run(run())
    assert fit.finish in ("stop", "length")
    assert long.finish == "abort"
    assert 0 < len(long.tokens) < 1015
    assert isinstance(late, RequestFailed)
    assert "pinned" in str(late)
    assert isinstance(over, ValueError)
    assert "1025 positions" in str(over)


def test_a_version_with_other_tensors_is_refused_before_anything_is_touched(shared_engine):
    version = shared_engine.put(llama(8))
    torch.manual_seed(9)
    settings = llama(8).config.to_dict() | {"num_hidden_layers": 3}
    shared_engine.put(LlamaForCausalLM(LlamaConfig(**settings)))
    assert "layers.2" in shared_engine.refusals[-1]
    assert shared_engine.real.version == version
    assert shared_engine.sample(*requests(1))


def test_a_stale_tied_head_is_refused_and_the_next_good_version_is_sampled(shared_engine):
    engine = shared_engine
    assert engine.put(llama(1)) == engine.taken[-1], engine.refusals
    stale = engine.put(llama(2), fault="stale_head")
    proof = engine.refusals[-1]
    assert proof.version == stale
    assert "lm_head" in proof.reason, proof.reason
    assert proof.difference > 0.1  # the probe alone sees it too
    assert (engine.real.version, engine.real.state) == (None, "unproven")

    async def held():
        task = asyncio.ensure_future(engine.real.generate(requests(2)))
        await asyncio.sleep(0)
        good = llama(3)
        version = await asyncio.to_thread(engine.put, good)
        return good, version, await asyncio.wait_for(task, PATIENCE_S)

    good, version, got = asyncio.run(held())
    for request, g in zip(requests(2), got, strict=True):
        assert [s.version for s in g.spans] == [version]
        np.testing.assert_allclose(g.logprobs, logprobs_of(good, request.prompt, g.tokens), atol=1e-4)


def test_an_engine_left_behind_by_a_step_too_small_for_the_probe_is_refused_by_read_back(shared_engine):
    engine, model = shared_engine, llama(1)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim > 1):
            matrix.mul_(0.1)  # as small as those of real models: the step moves no probability by much
    assert engine.put(model) == engine.taken[-1], engine.refusals
    ids = torch.tensor([PROBE.tolist()])
    step = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(input_ids=ids, labels=ids).loss.backward()
    step.step()
    engine.put(model, fault="left_behind")
    proof = engine.refusals[-1]
    assert "still holds the last version's bytes" in proof.reason
    assert proof.difference < proof.floor
    assert engine.put(model) == engine.taken[-1], engine.refusals


def test_an_update_that_fails_half_way_is_refused_with_its_cause_and_the_next_one_is_sampled(shared_engine):
    engine = shared_engine
    engine.put(llama(1))
    engine.put(llama(2), fault="half_way")
    assert "the second half is missing" in engine.refusals[-1].reason
    model = llama(3)
    assert engine.put(model) == engine.taken[-1], engine.refusals
    (asked,) = requests(1)
    (got,) = engine.sample(asked)
    np.testing.assert_allclose(got.logprobs, logprobs_of(model, asked.prompt, got.tokens), atol=1e-4)


def test_a_pause_that_does_not_come_refuses_the_version_and_sampling_goes_on(shared_engine, monkeypatch):
    engine = shared_engine
    first = engine.put(llama(1))

    async def never(**_) -> None:
        await asyncio.sleep(PATIENCE_S)

    with monkeypatch.context() as broken:
        broken.setattr(engine.real._llm.engine_core, "pause_scheduler_async", never)
        broken.setattr(vllm, "CALL_S", 1.0)
        engine.put(llama(2))
    assert engine.refusals[-1] == "vLLM did not come to a pause within 1 s"
    [got] = engine.sample(*requests(1))
    assert [s.version for s in got.spans] == [first]
    assert engine.put(llama(3)) == engine.taken[-1], engine.refusals


@pytest.mark.parametrize("on_update", ["recompute", "wait", "abort"])
def test_running_completions_are_treated_as_the_settings_say(shared_engine, on_update, monkeypatch):
    engine = shared_engine
    monkeypatch.setattr(engine.real, "on_update", on_update)
    old, new = llama(1), llama(2)
    first = engine.put(old)
    asked, got, second = engine.offer_while_it_samples(new, requests(4, new=900))
    soon(lambda: engine.taken[-1] == second, "the second version is taken")
    versions = [[s.version for s in g.spans] for g in got]
    if on_update == "wait":
        assert versions == [[first]] * 4
    if on_update == "abort":
        assert [second] in versions
        assert [first, second] not in versions
    if on_update == "recompute":
        assert [first, second] in versions
        for request, g in zip(asked, got, strict=True):
            if len(g.spans) == 2:  # nothing of the old weights is left in the cache
                tail = g.spans[1].start
                np.testing.assert_allclose(
                    g.logprobs[tail:], logprobs_of(new, request.prompt, g.tokens)[tail:], atol=1e-4
                )


def test_a_dead_engine_says_so_to_all_who_wait_and_leaves_nothing_running(shared_engine):
    engine = shared_engine  # the last test that uses it
    engine.put(llama(1))
    lines = {p: " ".join(p.cmdline()) for p in engine.processes()}
    core = next(p for p, line in lines.items() if "EngineCore" in line)
    workers = [p for p, line in lines.items() if "Worker" in line]
    assert workers

    async def run():
        running = asyncio.ensure_future(engine.real.generate(requests(4, new=900)))
        while engine.real.figures.running == 0:
            await asyncio.sleep(0.001)
        core.kill()
        with pytest.raises(EngineDead, match=r"engine process has ended: ."):
            await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(run())
    assert engine.real.failure is not None
    _, left = psutil.wait_procs(workers, timeout=30.0)
    assert not left
