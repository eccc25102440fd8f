"""Loss, mask, denominators and gradients against a reference that does one completion at a time, without padding."""

import numpy as np
import pytest
import torch
from made_groups import LINEAGE, NOW, completion, group, policy, settings

from roles.trainer.batch import samples_of
from roles.trainer.losses import FLOOR, DriftThreshold, failures_already_avoided, mean_drift, token_logprobs


def ragged_groups():
    """Mixed lengths and lags, given tokens in the middle, no reward, equal rewards, an empty completion."""
    rng = np.random.default_rng(7)
    return [
        group(
            completion(rng, 1.0, sampled=(5,)),
            completion(rng, 0.0, sampled=(3, 2), lag=2),
            completion(rng, 0.0, prompt=6, sampled=(1,), lag=1, logprobs=[-90.0]),
            completion(rng, None, sampled=(4,)),
            lag=2,
        ),
        group(completion(rng, 0.5, sampled=(7,)), completion(rng, 0.5, sampled=(2,)), completion(rng, 0.5)),
        group(
            completion(rng, 0.0, sampled=(8,), lag=1, logprobs=[-0.01] * 8),
            completion(rng, 0.3, sampled=(2, 1, 4), finish="length"),
            completion(rng, 1.0, sampled=(0,)),
            completion(rng, 0.0, sampled=(6,), logprobs=[-0.01] * 6),
            lag=1,
        ),
    ]


def reference(model, groups, rule, threshold, temperature=1.0, mask_truncated=False):
    """N, N x L, and which completions were masked, in float64, straight from the formula of losses.py."""
    total, n, masked = torch.zeros((), dtype=torch.float64), 0, []
    for g in groups:
        rewards = [c.reward for c in g.completions if c.reward is not None]
        for c in g.completions:
            if c.reward is None:
                continue
            tokens = torch.from_numpy(np.concatenate([s.tokens for s in c.segments])).long()
            sampled = torch.from_numpy(np.concatenate([np.full(len(s.tokens), s.sampled) for s in c.segments]))
            recorded = torch.from_numpy(np.concatenate([s.logprobs for s in c.segments])).double()
            n += int(sampled.sum())
            a = c.reward - sum(rewards) / len(rewards)
            if a == 0 or not sampled.any():
                continue
            log_pi = torch.log_softmax(model(input_ids=tokens[None]).logits[0] / temperature, -1)
            log_pi = log_pi[:-1].gather(1, tokens[1:, None])[:, 0][sampled[1:]]
            lag = NOW - min(s.version.number for x in c.segments for s in x.spans)
            left = {"drift": (recorded - log_pi).mean() > threshold, "age": lag > 0, "off": False}[rule]
            if (a < 0 and left) or (mask_truncated and c.finish == "length"):
                masked.append(c)
            else:
                total = total - a * log_pi.sum()
    return n, total, masked


@pytest.mark.parametrize("rule", ["drift", "age", "off"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_loss_mask_denominator_and_gradient_are_those_of_the_formula(rule, temperature, mask_truncated):
    groups = ragged_groups()
    config = settings(mask_negatives=rule, micro_batch_tokens=24, mask_truncated=mask_truncated)
    config.rollout.temperature = temperature
    p = policy(torch.float64, config=config)
    n, expected, masked = reference(p.model, groups, rule, 0.5, temperature, mask_truncated)
    gradient = torch.autograd.grad(expected, list(p.parameters.values()))

    scores = p.accumulate(samples_of(groups, LINEAGE, NOW), DriftThreshold(0.5))

    completions = [c for g in groups for c in g.completions]
    assert scores.micro_batches >= 3
    assert scores.tokens == n
    assert [id(c) for c, m in zip(completions, scores.masked, strict=True) if m] == [id(c) for c in masked]
    assert scores.loss_sum == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(p.parameters.values(), gradient, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-10, atol=1e-12)


def test_the_rules_differ_on_these_groups():
    p, groups = policy(torch.float64), ragged_groups()
    masked = {rule: [id(c) for c in reference(p.model, groups, rule, 0.5)[2]] for rule in ("drift", "age", "off")}
    assert masked["off"] == []
    assert masked["drift"]
    assert masked["age"]
    assert masked["drift"] != masked["age"]


def test_micro_batches_do_not_change_the_gradient():
    gradients = []
    for budget in (8, 24, 10_000):
        p = policy(torch.float64, config=settings(micro_batch_tokens=budget))
        p.accumulate(samples_of(ragged_groups(), LINEAGE, NOW), DriftThreshold(0.5))
        gradients.append(torch.cat([x.grad.reshape(-1) for x in p.parameters.values()]))
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-10, atol=1e-13)


def test_recorded_log_probabilities_decide_the_mask_and_scale_nothing():
    rng = np.random.default_rng(0)
    fresh = group(completion(rng, 1.0), completion(rng, 0.0))
    gradients = []
    for shift in (0.0, -1.0):
        samples = samples_of([fresh], LINEAGE, NOW)
        for s in samples:
            s.recorded[:] += shift
        p = policy(torch.float64, config=settings(mask_negatives="off"))
        p.accumulate(samples, DriftThreshold(0.5))
        gradients.append(p.flat_gradient())
    assert torch.equal(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_log_probabilities_and_their_gradient_are_right_in_chunks(temperature, monkeypatch):
    monkeypatch.setattr("roles.trainer.losses._TokenLogprobs.CHUNK_BYTES", 4 * 11 * 2)  # two rows a chunk
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    where, tokens = torch.tensor([0, 2, 3, 5, 6]), torch.tensor([1, 10, 0, 4, 4])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, where, tokens, temperature)[0], logits)
    logprobs, entropy = token_logprobs(logits, where, tokens, temperature)
    full = torch.log_softmax(logits[where] / temperature, -1)
    torch.testing.assert_close(logprobs, full.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(1))


def test_bfloat16_logits_are_normalised_in_float32_and_ruled_out_tokens_add_no_entropy():
    logits = torch.tensor([[2.0, 1.0, -torch.inf]], dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([0]), 1.0)
    p = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs[0], p[0].log())
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())


def test_drift_is_a_mean_per_completion_and_zero_without_tokens():
    recorded, current = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, -2.5, -1.0])
    drift = mean_drift(recorded, current, torch.tensor([0, 0, 2]), 3)
    assert drift.tolist() == [1.0, 0.0, -1.0]


def test_only_failures_are_ever_masked():
    advantages, drift = torch.tensor([1.0, -1.0, -1.0, 0.0]), torch.tensor([9.0, 9.0, 0.1, 9.0])
    lags = torch.tensor([3, 0, 3, 3])
    assert failures_already_avoided(advantages, drift, lags, "drift", 0.5).tolist() == [False, True, False, False]
    assert failures_already_avoided(advantages, drift, lags, "age", 0.5).tolist() == [False, False, True, False]
    assert not failures_already_avoided(advantages, drift, lags, "off", 0.5).any()


def test_the_threshold_is_calibrated_on_noise_at_lag_0():
    threshold = DriftThreshold()
    assert threshold.value == FLOOR
    threshold.observe(np.array([0.1, -0.1, np.nan, 0.1], np.float32))
    assert threshold.value == pytest.approx(0.3)
    threshold.observe(np.zeros(10_000, np.float32))
    assert threshold.value == FLOOR


def test_a_fixed_threshold_stays():
    threshold = DriftThreshold(0.7)
    threshold.observe(np.array([9.0]))
    assert threshold.value == 0.7


def test_the_threshold_forgets_old_noise():
    threshold = DriftThreshold(memory=100)
    threshold.observe(np.full(100, 1.0))
    for _ in range(20):
        threshold.observe(np.full(50, 0.1))
    assert threshold.value == pytest.approx(0.3, rel=1e-3)
