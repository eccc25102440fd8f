"""The corrections that benchmarks set the mask against are what their papers say."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture
def corrections(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import parts.corrections

    return parts.corrections


def test_the_clip_has_the_gradient_of_ppo(corrections):
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0], dtype=torch.float64)
    recorded = torch.full_like(ratio, -1.5)
    owner = torch.arange(len(ratio))
    for advantage in (0.7, -0.7):
        current = (recorded + ratio.log()).requires_grad_()
        r = (current - recorded).exp()
        torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage).sum().backward()
        success = torch.full(ratio.shape, advantage > 0)
        coefficient = corrections.ppo((current - recorded).detach(), owner, success)
        torch.testing.assert_close(coefficient * advantage, current.grad)


def test_ratios_of_completions_are_over_their_own_tokens(corrections):
    log_ratio = torch.tensor([0.1, 0.3, -0.5, -1.0, 2.0])
    owner = torch.tensor([0, 0, 1, 1, 2])
    failure = torch.zeros(5, dtype=torch.bool)
    expected = torch.tensor([0.0, 0.0, -1.5, -1.5, 0.0]).exp()
    torch.testing.assert_close(corrections.topr(log_ratio, owner, failure), expected)
    torch.testing.assert_close(corrections.topr(log_ratio, owner, ~failure), torch.ones(5))
    kept = corrections.gspo_wide(log_ratio, owner, ~failure)  # successes above 1.2 are held
    torch.testing.assert_close(kept, torch.tensor([0.0, 0.0, math.exp(-0.75), math.exp(-0.75), 0.0]))


def test_a_correction_multiplies_the_gradient_of_the_product(corrections):
    from transformers import LlamaConfig, LlamaForCausalLM

    from mesh import config as settings
    from roles.trainer.batch import Sample
    from roles.trainer.losses import DriftThreshold

    config = settings.convert({"model": {"path": "x"}, "trainer": {"mask_negatives": "off"}})
    model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                         num_key_value_heads=1, vocab_size=16))  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=rng.integers(0, 16, 6).astype(np.int32),
            sampled=np.arange(6) >= 2,
            recorded=np.full(4, -2.0, np.float32),
            token_lags=np.ones(4, np.int32),
            reward=float(i),
            advantage=i - 0.5,
            lag=1,
            group=0,
            finish="stop",
            metrics={},
        )
        for i in range(2)
    ]

    def gradient(correction):
        policy = corrections.Corrected(model, None, config, correction=correction)
        policy.accumulate(samples, DriftThreshold())
        return policy.flat_gradient()

    def of_failures(log_ratio, owner, success):
        return torch.where(success, 0.0, 2.0)

    def of_successes(log_ratio, owner, success):
        return torch.where(success, 2.0, 0.0)

    assert gradient(None).norm() > 0
    torch.testing.assert_close(gradient(of_failures) + gradient(of_successes), 2 * gradient(None))
    assert not torch.allclose(gradient(of_failures), gradient(of_successes))
