"""The transformers engine on real tiny models: what it samples is what each version's own forward pass says."""

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from mesh.config import convert
from mesh.version import Ballot, Version
from roles.rollout.engines import load_engine, vllm
from roles.rollout.engines.base import EngineDead, Request, RequestFailed, sample_seed
from roles.rollout.engines.decode import draw
from roles.rollout.engines.transformers import TransformersEngine, dummy_model, end_tokens, scramble
from roles.starter import character_tokenizer
from transport.messages import Probe
from transport.weights.buffers import copy_in, new_flat, tensor_digests
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover

TERM = Ballot(1, "aa")
PROBE = np.arange(10, 40, dtype=np.int32)


def v(number: int) -> Version:
    return Version(TERM, number)


def llama(seed: int, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    base = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(base | settings))).eval()


def gemma(seed: int) -> Gemma3ForCausalLM:
    """A window of 8 tokens in every other layer: a cache that cannot be padded from the left."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=40,
        max_position_embeddings=512,
        initializer_range=0.2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Gemma3ForCausalLM(config).eval()


class Versions:
    """A weight source that hands out once what the test puts in, newest only, and a record of what became of it."""

    def __init__(self) -> None:
        self.next = None
        self.taken: list[Version] = []
        self.refusals: list[tuple[Version, object]] = []

    def put(self, model: torch.nn.Module, number: int, probed: torch.nn.Module | None = None) -> None:
        """Offer ``model``; with ``probed``, wrongly announced with the log-probabilities of that one."""
        manifest = Manifest.from_module(model)
        flat = new_flat(manifest.nbytes)
        copy_in(manifest, model.state_dict(), flat)
        self.next = SimpleNamespace(
            version=v(number),
            manifest=manifest,
            flat=flat,
            tensor_digests=tensor_digests(manifest, flat),
            probe=Probe(tokens=PROBE, logprobs=logprobs_of(probed or model, PROBE[:1], PROBE[1:])),
        )

    def offered(self):
        arrived, self.next = self.next, None
        return arrived

    def took(self, arrived, proof) -> None:
        self.taken.append(arrived.version)

    def refused(self, arrived, reason) -> None:
        self.refusals.append((arrived.version, reason))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start():
    engines = []

    def make(model, *, versions, eos=(), **settings):
        scramble(model)
        engine = TransformersEngine(model, eos=eos, **settings)
        engines.append(engine)
        engine.start(versions, Prover(floor=1e-3))
        return engine

    yield make
    for engine in engines:
        assert engine.close()


async def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        await asyncio.sleep(0.002)


def logprobs_of(model, prompt, tokens, temperature=1.0):
    """Of every sampled token, by one plain forward pass: float32 (n,)."""
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    with torch.no_grad():
        logp = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def requests(count, new=8, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=rng.integers(0, 40, 1 + i % 7),
            max_new_tokens=new,
            temperature=temperature,
            seed=sample_seed(seed, i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("make", [llama, gemma], ids=["plain cache", "windowed cache"])
def test_every_token_across_versions_is_what_its_own_version_would_give(start, make):
    models = {number: make(number) for number in (1, 2, 3, 4)}
    versions = Versions()
    engine = start(make(99), versions=versions)
    # lengths differ, so rows leave and newcomers join while versions change
    batch = [*requests(6, new=80), *requests(4, new=9, seed=1)]
    late = requests(3, new=40, seed=2)

    async def run():
        versions.put(models[1], 1)
        running = asyncio.gather(engine.generate(batch), _join(engine, late))
        for number in (2, 3, 4):
            await until(lambda number=number: engine.version == v(number - 1))
            seen = engine.figures.tokens
            await until(lambda seen=seen: engine.figures.tokens > seen + 40)
            versions.put(models[number], number)
            engine.wake()
        return [sampled for part in await running for sampled in part]

    results = asyncio.run(run())
    assert versions.taken == [v(1), v(2), v(3), v(4)]
    used = set()
    for request, sampled in zip([*batch, *late], results, strict=True):
        assert sampled.finish == "length"
        assert len(sampled.tokens) == len(sampled.logprobs) == request.max_new_tokens
        assert sampled.tokens.dtype == np.int32
        assert sampled.logprobs.dtype == np.float32
        at = 0
        for span in sampled.spans:
            assert span.start == at
            assert span.stop > at
            own = logprobs_of(models[span.version.number], request.prompt, sampled.tokens)
            np.testing.assert_allclose(sampled.logprobs[at : span.stop], own[at : span.stop], atol=1e-4)
            at = span.stop
            used.add(span.version.number)
        assert at == len(sampled.tokens)
    assert len(used) >= 3
    assert max(len(s.spans) for s in results) >= 3


async def _join(engine, late):
    await until(lambda: engine.figures.steps >= 5)
    return await engine.generate(late)


def test_log_probabilities_are_those_of_the_tempered_distribution(start):
    model, versions = llama(1), Versions()
    versions.put(model, 1)
    engine = start(llama(2), versions=versions)
    batch = requests(5, temperature=0.6)
    for request, sampled in zip(batch, asyncio.run(engine.generate(batch)), strict=True):
        own = logprobs_of(model, request.prompt, sampled.tokens, 0.6)
        np.testing.assert_allclose(sampled.logprobs, own, atol=1e-4)


def test_what_is_sampled_does_not_depend_on_the_company(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions, max_batch=5)
    batch = requests(12, new=20)
    together = asyncio.run(engine.generate(batch))
    again = asyncio.run(engine.generate(batch))
    alone = [asyncio.run(engine.sample(request)) for request in batch]
    turned = asyncio.run(engine.generate(batch[::-1]))[::-1]
    for a, b, c, d in zip(together, again, alone, turned, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() == c.tokens.tolist() == d.tokens.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()  # the same batches: the same bits
        np.testing.assert_allclose(a.logprobs, c.logprobs, atol=1e-5)
    assert len({tuple(s.tokens) for s in together}) > 6


def test_requests_of_one_turn_of_the_loop_are_admitted_in_one_batch(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions)

    async def run():
        await until(lambda: engine.version is not None)
        await asyncio.gather(*(engine.sample(r) for r in requests(30, new=4)))

    asyncio.run(run())
    assert engine.figures.steps == 4
    assert engine.figures.tokens == 120


def test_a_step_never_mixes_versions(start):
    """The whole model is one constant a version; a hook in the middle of the forward pass sees it."""
    model, versions = llama(1), Versions()
    seen: list[set[float]] = []

    def begin(module, args, kwargs):
        seen.append(set())

    def note(module, args):
        seen[-1].add(float(module.weight.view(-1)[0]))
        time.sleep(0.0005)  # widen the window in which a careless take-over would hit

    engine_model = llama(2)
    engine_model.register_forward_pre_hook(begin, with_kwargs=True)
    for layer in engine_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(note)
    engine = start(engine_model, versions=versions)

    def constant(number):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(number / 64)
        versions.put(model, number)

    async def run():
        constant(1)
        running = asyncio.ensure_future(engine.generate(requests(16, new=60)))
        number = 1
        while not running.done():
            await until(lambda number=number: engine.version == v(number) or running.done())
            if number < 12:
                number += 1
                constant(number)
            await asyncio.sleep(0.003)
        return await running

    results = asyncio.run(run())
    assert len(seen[0]) > 1  # the prover's look at the dummy weights: the hook does tell them apart
    assert all(len(values) == 1 for values in seen[1:])
    assert len(set.union(*seen[1:])) > 3
    assert all(np.isfinite(s.logprobs).all() for s in results)


def test_nothing_is_sampled_before_the_first_proved_version(start):
    versions = Versions()
    engine = start(llama(2), versions=versions)

    async def run():
        task = asyncio.ensure_future(engine.sample(requests(1)[0]))
        await until(lambda: engine.figures.queued == 1)
        assert engine.figures.steps == 0
        versions.put(llama(1), 1)
        return await task

    assert asyncio.run(run()).spans[0].version == v(1)


def test_a_version_that_fails_its_proof_holds_what_runs_until_a_good_one_comes(start):
    good, better, versions = llama(1), llama(3), Versions()
    versions.put(good, 1)
    engine = start(llama(2), versions=versions)
    request = Request(prompt=np.array([5, 6, 7]), max_new_tokens=200, seed=4)

    async def run():
        task = asyncio.ensure_future(engine.sample(request))
        await until(lambda: engine.figures.tokens > 10)
        versions.put(llama(9), 2, probed=llama(8))
        await until(lambda: engine.state == "unproven")
        await until(lambda: bool(versions.refusals))
        assert engine.version is None
        tokens = engine.figures.tokens
        engine.wake()
        await asyncio.sleep(0.05)
        assert engine.figures.tokens == tokens
        assert not task.done()
        versions.put(better, 3)
        return await task

    sampled = asyncio.run(run())
    ((refused, proof),) = versions.refusals
    assert refused == v(2)
    assert "log-probabilities differ from the publisher's" in proof.reason
    assert [s.version.number for s in sampled.spans] == [1, 3]
    cut = sampled.spans[0].stop
    own = np.concatenate(
        [
            logprobs_of(good, request.prompt, sampled.tokens)[:cut],
            logprobs_of(better, request.prompt, sampled.tokens)[cut:],
        ]
    )
    np.testing.assert_allclose(sampled.logprobs, own, atol=1e-4)


def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_version_goes_on(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions)

    async def run():
        await until(lambda: engine.version == v(1))
        versions.put(llama(1, num_hidden_layers=1), 2)
        await until(lambda: bool(versions.refusals))
        return await engine.sample(requests(1)[0])

    assert asyncio.run(run()).spans[0].version == v(1)
    assert "model.layers.1" in versions.refusals[0][1]


def test_a_pinned_request_keeps_its_version_and_newer_weights_wait(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions, max_batch=2)
    pinned = requests(6, new=30)
    for r in pinned:
        r.pinned = v(1)

    async def run():
        task = asyncio.ensure_future(engine.generate(pinned))
        await until(lambda: engine.figures.tokens > 5)
        versions.put(llama(3), 2)
        results = await task
        await until(lambda: engine.version == v(2))
        with pytest.raises(RequestFailed, match="pinned to v1@1, the engine has gone on to v2@1"):
            await engine.sample(pinned[0])
        ahead = requests(1)[0]
        ahead.pinned = v(3)
        waiting = asyncio.ensure_future(engine.sample(ahead))
        assert (await engine.sample(requests(2)[1])).spans[0].version == v(2)
        versions.put(llama(4), 3)
        return results, await waiting

    results, later = asyncio.run(run())
    assert {s.version for r in results for s in r.spans} == {v(1)}
    assert {s.version for s in later.spans} == {v(3)}


def test_every_end_token_ends_a_completion_and_is_part_of_it(start):
    model, versions = llama(1), Versions()
    versions.put(model, 1)
    engine = start(llama(2), versions=versions, eos=[3, 11, 17])
    results = asyncio.run(engine.generate(requests(40, new=50)))
    ends = set()
    for sampled in results:
        body, last = sampled.tokens[:-1].tolist(), int(sampled.tokens[-1])
        assert not {3, 11, 17} & set(body)
        assert (sampled.finish == "stop") == (last in (3, 11, 17))
        ends.add(last)
    assert ends >= {3, 11, 17}


def test_aborting_and_cancelling_end_a_request_and_no_other(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions, max_batch=3)
    batch = [Request(prompt=np.array([1 + i]), max_new_tokens=400, seed=i) for i in range(5)]

    async def run():
        tasks = [asyncio.ensure_future(engine.sample(r)) for r in batch]
        await until(lambda: engine.figures.tokens > 10)
        engine.abort([batch[1], batch[4]])  # one that runs, one that waits
        tasks[0].cancel()
        ended, waiting = await asyncio.gather(tasks[1], tasks[4])
        kept = await asyncio.gather(tasks[2], tasks[3])
        assert tasks[0].cancelled()
        return ended, waiting, kept

    ended, waiting, kept = asyncio.run(run())
    assert ended.finish == waiting.finish == "abort"
    assert 0 < len(ended.tokens) < 400
    assert ended.spans[-1].stop == len(ended.tokens)
    assert len(waiting.tokens) == 0
    assert all(s.finish == "length" and len(s.tokens) == 400 for s in kept)
    assert engine.figures.running == 0


def test_a_prompt_that_cannot_fit_fails_alone_and_says_what_to_change(start):
    versions = Versions()
    versions.put(llama(1), 1)
    engine = start(llama(2), versions=versions)

    async def run():
        good, long, odd, empty = await asyncio.gather(
            engine.sample(requests(1)[0]),
            engine.sample(Request(prompt=np.zeros(500), max_new_tokens=13)),
            engine.sample(Request(prompt=np.array([40]), max_new_tokens=1)),
            engine.sample(Request(prompt=np.array([]), max_new_tokens=1)),
            return_exceptions=True,
        )
        assert good.finish == "length"
        assert isinstance(long, ValueError)
        assert "500 tokens and rollout.max_new_tokens = 13 need 513 positions, the model has 512" in str(long)
        assert "token 40 is outside the vocabulary of 40" in str(odd)
        assert "at least one prompt token" in str(empty)
        exact = await engine.sample(Request(prompt=np.zeros(499), max_new_tokens=13))
        assert len(exact.tokens) == 13

    asyncio.run(run())


def test_logits_that_are_no_numbers_fail_their_request_alone(start):
    model, versions = llama(2), Versions()
    versions.put(llama(1), 1)
    engine = start(model, versions=versions)
    # as an overflow in the model would: finite weights, and logits that are not, for some inputs
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: torch.where(args[0][..., None] == 7, torch.nan, out)
    )

    async def run():
        greedy = [Request(prompt=np.array([t]), max_new_tokens=1, temperature=0) for t in (3, 7)]
        good, bad = await asyncio.gather(*map(engine.sample, greedy), return_exceptions=True)
        assert good.finish == "length"
        assert good.logprobs.tolist() == [0.0]
        assert isinstance(bad, RequestFailed)
        assert "not finite under v1@1" in str(bad)

    asyncio.run(run())


def test_an_exception_on_the_engines_thread_reaches_everybody_who_waits(start, caplog):
    versions, model = Versions(), llama(2)
    engine = start(model, versions=versions)

    def explode(module, args, kwargs):
        raise MemoryError("no more memory")

    async def run():
        tasks = [asyncio.ensure_future(engine.sample(r)) for r in requests(4)]
        await until(lambda: engine.figures.queued == 4)
        model.register_forward_pre_hook(explode, with_kwargs=True)
        versions.put(llama(1), 1)
        for ended in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10):
            assert isinstance(ended, EngineDead)
            assert "no more memory" in str(ended)
            assert isinstance(ended.__cause__, MemoryError)
        with pytest.raises(EngineDead, match="no more memory"):
            await engine.sample(requests(1)[0])

    asyncio.run(run())
    assert engine.state == "dead"
    assert engine.version is None


def test_closing_ends_what_runs_and_the_thread():
    versions = Versions()
    versions.put(llama(1), 1)
    model = llama(2)
    scramble(model)
    engine = TransformersEngine(model, eos=[])
    engine.start(versions, Prover(floor=1e-3))

    async def run():
        task = asyncio.ensure_future(engine.sample(Request(prompt=np.array([1]), max_new_tokens=500)))
        await until(lambda: engine.figures.tokens > 3)
        assert await asyncio.to_thread(engine.close)
        assert (await task).finish == "abort"
        with pytest.raises(EngineDead, match="closed"):
            await engine.sample(requests(1)[0])

    asyncio.run(run())
    assert "engine" not in {t.name for t in threading.enumerate()}


def test_draws_follow_the_distribution_and_never_take_an_impossible_token():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0, float("-inf")]]).repeat(20_000, 1)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((20_000, 1)))
    uniforms[0], uniforms[1] = 0.0, 1.0 - 2**-53
    tokens, logprobs = draw(logits, torch.full((20_000, 1), 0.7), uniforms)
    wanted = (logits[0] / 0.7).softmax(0)
    counts = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(counts, wanted, atol=0.02, rtol=0)
    assert counts[2] == counts[4] == 0
    assert tokens[0] == 0
    assert tokens[1] == 3
    torch.testing.assert_close(logprobs, wanted.log()[tokens])


def test_the_dummy_model_shares_no_tensor_with_any_fresh_model_and_is_repeatable(tmp_path):
    llama(0).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        one, two = dummy_model(tmp_path, dtype=dtype), dummy_model(tmp_path, dtype=dtype)
        fresh = llama(0).to(dtype)
        for (name, a), b, c in zip(
            one.state_dict().items(), two.state_dict().values(), fresh.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), name
            assert not torch.equal(a, c), name
            assert a.dtype == dtype
        assert one.lm_head.weight is one.model.embed_tokens.weight
        assert torch.equal(one.model.rotary_emb.inv_freq, llama(0).model.rotary_emb.inv_freq)  # not random


def test_end_tokens_come_from_the_model_its_generation_settings_and_the_caller(tmp_path):
    model = llama(0, eos_token_id=2)
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path)
    assert end_tokens(tmp_path, extra=[5, None]) == [2, 5, 9]


def test_an_engine_is_made_from_the_settings_and_says_what_is_wrong_with_them(tmp_path):
    model = llama(0, eos_token_id=2, vocab_size=64)
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    settings = {"rollout": {"engine": "transformers"}, "weights": {"wire_dtype": "bfloat16"}}
    config = convert({"model": {"path": str(tmp_path)}, **settings})
    engine, tokenizer = load_engine(config)
    assert "bfloat16" in engine.build
    assert engine.longest == 512
    assert tokenizer("12=")["input_ids"]
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(ValueError, match=f"model.path = {tmp_path} cannot be loaded") as error:
        load_engine(config)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(bool(vllm.installed()), reason="vLLM is installed here")
def test_without_vllm_its_engine_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"vLLM is not installed here: install .*, or set rollout\.engine = "):
        load_engine(convert({"model": {"path": "starter:sort"}, "rollout": {"engine": "vllm"}}))
