"""Groups and tiny models for the tests of the learning: everything from one seed."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mesh.config import Config, convert
from mesh.version import Ballot, Lineage, Version
from roles.starter import character_tokenizer
from roles.trainer.policy import Policy
from transport.messages import Completion, Group, Segment, Span

TERM = Ballot(1, "00")
LINEAGE = Lineage().open(TERM, 0)
NOW = 5  # the trainer's version number in these tests
VOCABULARY = 23


def completion(rng, reward, *, prompt=3, sampled=(4,), lag=0, finish="stop", logprobs=None, tokens=None) -> Completion:
    """A prompt, then sampled segments of these lengths with a given token between each two."""
    version = Version(TERM, NOW - lag)
    segments = [Segment(rng.integers(0, VOCABULARY, prompt, dtype=np.int32), False, np.empty(0, np.float32))]
    for i, n in enumerate(sampled):
        if i:
            segments.append(Segment(rng.integers(0, VOCABULARY, 1, dtype=np.int32), False, np.empty(0, np.float32)))
        ids = rng.integers(0, VOCABULARY, n, dtype=np.int32) if tokens is None else np.array(tokens, np.int32)
        lp = np.full(n, -np.log(VOCABULARY), np.float32) if logprobs is None else np.array(logprobs, np.float32)
        segments.append(Segment(ids, True, lp, [Span(version, 0, n)] if n else []))
    return Completion(segments, reward, finish)


def group(*completions, lag=0) -> Group:
    return Group(list(completions), Version(TERM, NOW - lag))


def settings(**trainer) -> Config:
    return convert({"model": {"path": "made"}, "trainer": {"learning_rate": 1e-2, **trainer}})


def llama(dtype=torch.float32, tied=True, seed=0) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                tie_word_embeddings=tied,
                pad_token_id=0,
                eos_token_id=0,
            )
        )
        for p in model.parameters():  # larger than the usual start, so that log-probabilities differ
            p.data += 0.3 * torch.randn_like(p)
    return model.to(dtype)


def policy(dtype=torch.float32, *, tied=True, seed=0, config: Config | None = None) -> Policy:
    return Policy(llama(dtype, tied, seed), character_tokenizer(), config or settings())
