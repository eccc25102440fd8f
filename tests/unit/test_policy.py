import json

import numpy as np
import pytest
import torch
from made_groups import LINEAGE, NOW, VOCABULARY, completion, group, llama, policy, settings
from transformers import LlamaForCausalLM

from mesh.config import convert
from roles.starter import character_tokenizer
from roles.trainer.batch import samples_of
from roles.trainer.figures import step_figures
from roles.trainer.losses import DriftThreshold
from roles.trainer.policy import Policy, load_policy, warm


def batch(seed=0, rewards=(1.0, 0.0, 0.0)):
    rng = np.random.default_rng(seed)
    return samples_of([group(*(completion(rng, r, sampled=(2 + i,)) for i, r in enumerate(rewards)))], LINEAGE, NOW)


def weights(p):
    return {name: t.clone() for name, t in p.named_state().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_step_raises_the_likelihood_of_successes_and_lowers_that_of_failures():
    p, samples = policy(), batch()
    first = p.accumulate(samples, DriftThreshold(9))
    figures = p.step(first.tokens)
    second = p.accumulate(samples, DriftThreshold(9))
    change = [float((b - a).mean()) for a, b in zip(first.current, second.current, strict=True)]
    assert change[0] > 0 > max(change[1:])
    assert figures["grad_norm"] > 0
    assert p.steps == 1


def test_two_trainers_that_add_their_gradients_equal_one_that_has_both_batches():
    together, apart = policy(torch.float64), [policy(torch.float64), policy(torch.float64)]
    batches = [batch(0), batch(1, rewards=(1.0, 0.0, 1.0, 1.0))]
    scores = together.accumulate([*batches[0], *batches[1]], DriftThreshold(9))
    together.step(scores.tokens)
    each = [p.accumulate(b, DriftThreshold(9)) for p, b in zip(apart, batches, strict=True)]
    total = sum(p.flat_gradient() for p in apart)
    for p in apart:
        p.load_flat_gradient(total)
        p.step(sum(s.tokens for s in each))
    assert same(weights(apart[0]), weights(apart[1]))
    for name, tensor in weights(together).items():
        torch.testing.assert_close(tensor, weights(apart[0])[name], rtol=0, atol=1e-5)


def test_a_trainer_without_samples_adds_nothing_and_steps_with_the_others():
    idle, busy = policy(), policy()
    scores = busy.accumulate(batch(), DriftThreshold(9))
    nothing = idle.accumulate([], DriftThreshold(9))
    assert nothing.tokens == 0
    assert not idle.flat_gradient().any()
    total = idle.flat_gradient() + busy.flat_gradient()
    for p in (idle, busy):
        p.load_flat_gradient(total)
        p.step(scores.tokens)
    assert same(weights(idle), weights(busy))


def test_the_flat_gradient_is_a_copy_and_a_wrong_length_is_refused():
    p = policy()
    p.accumulate(batch(), DriftThreshold(9))
    flat = p.flat_gradient()
    flat.zero_()
    assert p.flat_gradient().any()
    with pytest.raises(ValueError, match="gradient of shape"):
        p.load_flat_gradient(flat[1:])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_counted(poison):
    p = policy()
    before = weights(p)
    scores = p.accumulate(batch(), DriftThreshold(9))
    next(iter(p.parameters.values())).grad[0] = poison
    assert p.step(scores.tokens)["skipped_steps"] == 1
    assert same(before, weights(p))
    assert not p.optimizer.state
    scores = p.accumulate(batch(), DriftThreshold(9))
    assert p.step(scores.tokens)["skipped_steps"] == 1
    assert not same(before, weights(p))


def test_a_loss_that_is_not_finite_skips_the_step_and_its_figures_stay_finite():
    p, samples = policy(), batch()
    with torch.no_grad():
        p.model.model.norm.weight[0] = torch.inf
    before = weights(p)
    scores = p.accumulate(samples, DriftThreshold(9))
    assert not np.isfinite(scores.loss_sum)
    assert p.step(scores.tokens)["step_skipped"] == 1
    assert same(before, weights(p))
    figures = step_figures(samples, scores, max_lag=0)
    assert figures["not_finite"] == 3
    assert all(np.isfinite(v) for v in figures.values())


@pytest.mark.parametrize(
    "rewards", [(1.0, 1.0, 1.0), (None, None), (float("nan"), 1.0), (float("inf"), None, float("nan"))]
)
def test_a_batch_that_teaches_nothing_leaves_the_weights_as_they_are(rewards):
    p = policy()
    before = weights(p)
    scores = p.accumulate(batch(rewards=rewards), DriftThreshold(9))
    p.step(scores.tokens)
    assert scores.loss_sum == 0.0
    assert scores.micro_batches == 0
    assert same(before, weights(p))


def test_empty_and_truncated_completions_give_no_loss_and_finite_gradients():
    rng = np.random.default_rng(0)
    made = group(completion(rng, 1.0, sampled=(0,)), completion(rng, 0.0, finish="length"), completion(rng, 0.2))
    p = policy(config=settings(mask_truncated=True, mask_negatives="off"))
    samples = samples_of([made], LINEAGE, NOW)
    scores = p.accumulate(samples[:2], DriftThreshold(9))
    assert scores.loss_sum == 0.0
    assert scores.cut.tolist() == [False, True]
    assert not p.flat_gradient().any()
    p.accumulate(samples, DriftThreshold(9))
    assert torch.isfinite(p.flat_gradient()).all()
    assert p.flat_gradient().any()


def test_a_very_unlikely_token_gives_a_finite_gradient():
    p = policy()
    with torch.no_grad():
        p.model.lm_head.weight[1] *= 1e4
    p.accumulate(batch(), DriftThreshold(9))
    assert torch.isfinite(p.flat_gradient()).all()


def test_the_gradient_is_clipped_to_its_norm():
    steps = []
    for limit in (1e9, 1e-3):
        p = policy(config=settings(max_grad_norm=limit))
        p.optimizer = torch.optim.SGD(list(p.parameters.values()), lr=1.0)
        p.settings.trainer.learning_rate, p.settings.trainer.warmup_steps = 1.0, 1
        before = weights(p)
        norm = p.step(p.accumulate(batch(), DriftThreshold(9)).tokens)["grad_norm"]
        after = weights(p)
        moved = sum(float((after[n] - before[n]).square().sum()) for n, _ in p.model.named_parameters()) ** 0.5
        steps.append((norm, moved))
    assert steps[0][1] == pytest.approx(steps[0][0], rel=1e-3)
    assert steps[1] == (pytest.approx(steps[0][0]), pytest.approx(1e-3, rel=1e-2))


def test_the_learning_rate_ramps_up_in_a_line():
    assert [warm(1.0, 4, s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warm(1.0, 0, 0) == 1.0


def test_scores_at_lag_0_calibrate_the_threshold():
    rng = np.random.default_rng(0)
    made = group(completion(rng, 1.0, lag=0), completion(rng, 0.0, lag=1, logprobs=[50.0] * 4))
    threshold = DriftThreshold()
    scores = policy().accumulate(samples_of([made], LINEAGE, NOW), threshold)
    expected = 3 * np.abs(-np.log(VOCABULARY) - scores.current[0]).mean()
    assert threshold.value == pytest.approx(expected, rel=1e-5)
    assert scores.threshold == 0.02  # of this very batch the mask knew nothing yet


# ---- the probe and the state that is published -----------------------------------------------------------------------


def test_the_probe_at_the_master_dtype_is_the_model_itself():
    p = policy()
    tokens = np.arange(6, dtype=np.int32)
    out = p.probe(tokens, torch.float32)
    ids = torch.arange(6)[None]
    expected = torch.log_softmax(p.model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    assert out.dtype == np.float32
    assert out.shape == (5,)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_probe_at_another_wire_dtype_is_that_of_rounded_weights_and_leaves_the_model(tied):
    p, tokens = policy(tied=tied), np.arange(6, dtype=np.int32)
    before = weights(p)
    out = p.probe(tokens, torch.bfloat16)
    assert same(before, weights(p))
    rounded = llama(tied=tied)
    with torch.no_grad():
        for x in rounded.parameters():
            x.copy_(x.bfloat16())
    expected = Policy(rounded, p.tokenizer, p.settings).probe(tokens, torch.float32)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    assert not np.array_equal(out, p.probe(tokens, torch.float32))


def test_tied_weights_have_both_names_and_one_storage():
    state = policy(tied=True).named_state()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    state = policy(tied=False).named_state()
    assert state["lm_head.weight"].data_ptr() != state["model.embed_tokens.weight"].data_ptr()


def test_persistent_buffers_are_published_and_others_are_not():
    p = policy()
    p.model.register_buffer("correction_bias", torch.tensor(2.5))
    p.model.register_buffer("cache", torch.zeros(3), persistent=False)
    assert p.named_state()["correction_bias"] == 2.5
    assert "cache" not in p.named_state()
    p.probe(np.arange(4, dtype=np.int32), torch.bfloat16)


def test_names_of_a_compiled_model_are_those_of_the_model():
    plain = llama()
    compiled = Policy(torch.compile(plain, backend="eager"), character_tokenizer(), settings())
    assert compiled.named_state().keys() == plain.state_dict().keys()
    assert list(compiled.parameters) == [n for n, _ in plain.named_parameters()]


def test_a_wrapped_model_is_refused_by_the_name_of_a_weight():
    wrapped = torch.nn.Module()
    wrapped.module = llama()
    with pytest.raises(ValueError, match=r"weight module\.model\.embed_tokens\.weight"):
        Policy(wrapped, character_tokenizer(), settings())


# ---- loading ---------------------------------------------------------------------------------------------------------


def saved(tmp_path, **changes):
    llama().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(path, **model):
    return load_policy(convert({"model": {"path": str(path), **model}}))


def test_a_saved_model_loads_as_it_was(tmp_path):
    p = load(saved(tmp_path))
    assert same(weights(p), dict(llama().state_dict()))
    assert p.vocabulary == VOCABULARY
    assert p.notes == []


def test_bfloat16_master_weights_with_a_small_rate_are_remarked_on(tmp_path):
    p = load(saved(tmp_path), dtype="bfloat16")
    assert p.dtype == torch.bfloat16
    assert "learning_rate" in p.notes[0]


def test_a_path_that_is_no_model_is_one_clear_line(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="cannot be loaded") as caught:
            load(path)
        assert f'model.path = "{path}"' in str(caught.value)
        assert "set model.path to" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_said_after_one_attempt(monkeypatch):
    attempts = []

    def refuse(address, timeout):
        attempts.append(address)
        raise OSError("no network")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("roles.models.getproxies", dict)
    with pytest.raises(ValueError, match=r'model\.path = "nobody/nothing" cannot be loaded'):
        load("nobody/nothing")
    assert len(attempts) == 1


def test_code_from_a_model_directory_is_not_run_unless_asked(tmp_path):
    ran = tmp_path / "ran"
    saved(tmp_path, model_type="strange", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w').close()")
    with pytest.raises(ValueError, match=r"model\.trust_remote_code = true"):
        load(tmp_path)
    assert not ran.exists()


def test_weights_that_lack_a_tensor_are_refused_by_name(tmp_path):
    saved(tmp_path)
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_weights_that_are_damaged_or_of_another_shape_are_one_clear_line(tmp_path):
    saved(tmp_path, intermediate_size=32)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(tmp_path)


def test_a_model_with_sampling_settings_can_be_saved_after_training(tmp_path):
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    load(tmp_path).model.save_pretrained(tmp_path / "again")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "again")
