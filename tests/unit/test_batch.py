import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_groups import LINEAGE, NOW, TERM, VOCABULARY, completion, group

from mesh.version import Version
from roles.trainer.batch import malformed, micro_batches, samples_of
from transport.messages import Completion, Segment, Span


def samples_with_lengths(lengths):
    rng = np.random.default_rng(0)
    return samples_of([group(*(completion(rng, i % 2, sampled=(n,)) for i, n in enumerate(lengths)))], LINEAGE, NOW)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=30), st.integers(1, 120))
def test_every_completion_is_in_one_micro_batch_within_the_budget(lengths, budget):
    samples = samples_with_lengths(lengths)
    members = [i for i, s in enumerate(samples) if s.teaches]
    batches = micro_batches(samples, members, budget)
    assert sorted(i for b in batches for i in b.members) == members
    for b in batches:
        assert b.members
        assert b.tokens.size <= budget or len(b.members) == 1
        assert len(b.rows) == len(b.recorded) == sum(samples[i].sampled_tokens for i in b.members) > 0


def test_packing_is_deterministic_and_longest_first():
    samples = samples_with_lengths([3, 9, 3, 9, 1])
    first, second = (micro_batches(samples, range(5), 24) for _ in range(2))
    assert [b.members for b in first] == [b.members for b in second] == [[1, 3], [0, 2, 4]]


def test_nothing_to_teach_is_no_micro_batch():
    assert micro_batches(samples_with_lengths([3, 3]), [], 100) == []


def test_masks_come_from_lengths_even_when_text_is_made_of_the_padding_token():
    rng = np.random.default_rng(0)
    made = group(completion(rng, 1.0, sampled=(4,), tokens=[0, 0, 0, 0]), completion(rng, 0.0, sampled=(2,)))
    (batch,) = micro_batches(samples_of([made], LINEAGE, NOW), [0, 1], 100)
    assert batch.attention.tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert batch.rows.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.columns.tolist() == [3, 4, 5, 6, 3, 4]
    assert batch.positions.tolist() == [list(range(7))] * 2


def test_given_tokens_between_sampled_ones_carry_no_loss():
    rng = np.random.default_rng(0)
    sample, _ = samples_of([group(completion(rng, 1.0, sampled=(2, 3)), completion(rng, 0.0))], LINEAGE, NOW)
    assert sample.sampled.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert sample.sampled_tokens == 5


def test_lag_counts_from_the_oldest_token_and_tokens_keep_their_own():
    rng = np.random.default_rng(0)
    mixed = completion(rng, 1.0, sampled=(5,))
    spans = [Span(Version(TERM, NOW - 2), 0, 2), Span(Version(TERM, NOW), 2, 5)]
    last = mixed.segments[-1]
    mixed = Completion([mixed.segments[0], Segment(last.tokens, True, last.logprobs, spans)], 1.0, "stop")
    sample, fresh = samples_of([group(mixed, completion(rng, 0.0), lag=2)], LINEAGE, NOW)
    assert sample.lag == 2
    assert sample.token_lags.tolist() == [2, 2, 0, 0, 0]
    assert fresh.lag == 0


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_broken_off_completion_is_no_sample(finish):
    rng = np.random.default_rng(0)
    made = group(completion(rng, 1.0), completion(rng, 0.0, finish=finish), completion(rng, 0.0))
    advantages = [s.advantage for s in samples_of([made], LINEAGE, NOW)]
    assert advantages[0] == 0.5
    assert np.isnan(advantages[1])
    assert advantages[2] == -0.5


def test_a_sound_group_is_not_malformed():
    rng = np.random.default_rng(0)
    assert malformed(group(completion(rng, None, sampled=(2, 3)), completion(rng, 1.0, sampled=(0,))), VOCABULARY) == ""


def broken(segments):
    return group(Completion(segments, 1.0, "stop"))


GIVEN = Segment(np.array([1, 2], np.int32), False, np.empty(0, np.float32))


def sampled(n=2, logprobs=None, spans=((0, 2),), tokens=(3, 4)):
    lp = np.full(n, -1.0, np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Segment(np.array(tokens, np.int32), True, lp, [Span(Version(TERM, NOW), *s) for s in spans])


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([], "no prompt"),
        ([sampled()], "no prompt"),
        ([GIVEN, sampled(tokens=(3, VOCABULARY))], "outside the vocabulary"),
        ([GIVEN, sampled(tokens=(-1, 3))], "outside the vocabulary"),
        ([GIVEN, sampled(n=1)], "2 tokens and 1 log-probabilities"),
        ([GIVEN, sampled(logprobs=[-1.0, np.nan])], "not finite"),
        ([GIVEN, sampled(spans=((0, 1),))], "do not cover"),
        ([GIVEN, sampled(spans=((1, 2),))], "do not cover"),
        ([GIVEN, sampled(spans=((0, 2), (1, 2)))], "do not cover"),
        ([GIVEN, sampled(spans=())], "do not cover"),
    ],
)
def test_a_malformed_group_is_named(segments, reason):
    assert reason in malformed(broken(segments), VOCABULARY)


def test_a_group_of_nothing_is_not_malformed_and_raises_nothing():
    assert malformed(group(), VOCABULARY) == ""
