import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.trainer.dataset import Dataset, digest_of, permutation


def make(size: int = 10, seed: int = 7, digest: str = "abc") -> Dataset:
    return Dataset(name="numbers.jsonl", size=size, digest=digest, seed=seed)


def test_an_epoch_deals_every_prompt_once_and_the_next_has_another_order():
    data = make(50)
    refs = [data.take() for _ in range(100)]
    first, second = ([r.prompt for r in refs if r.epoch == e] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [r.prompt for r in (make(50, seed=8).take() for _ in range(50))]


def test_the_permutation_never_changes():
    assert permutation(8, 7, 0).tolist() == [2, 6, 5, 0, 4, 7, 3, 1]
    assert sorted(permutation(1000, 3, 5).tolist()) == list(range(1000))


def test_prompts_given_back_come_first_and_in_their_order():
    data = make()
    refs = [data.take() for _ in range(5)]
    for r in (refs[3], refs[1], refs[2]):
        data.give_back(r)
    assert [data.take() for _ in range(3)] == [refs[1], refs[2], refs[3]]
    assert data.take().place == 5


def test_a_prompt_is_never_trained_twice_in_an_epoch():
    data = make(3)
    ref = data.take()
    data.done(ref)
    assert data.is_trained(0, ref.prompt)
    with pytest.raises(AssertionError, match="not out"):
        data.done(ref)
    with pytest.raises(AssertionError, match="not out"):
        data.give_back(ref)


def test_an_epoch_with_a_straggler_is_remembered_and_one_without_is_forgotten():
    data = make(2)
    straggler = data.take()
    for _ in range(9):
        data.done(data.take())
    assert [ref.epoch for ref in data.open()] == [0]
    data.done(straggler)
    assert data.is_trained(0, straggler.prompt)
    data.done(data.take())
    assert not data.is_trained(0, straggler.prompt)
    assert len(data.state_dict()["epochs"]) == 2


def test_closed_prompts_are_listed_with_their_reason_and_not_dealt_again():
    data = make(3)
    ref = data.take()
    data.close(ref, "too slow")
    assert data.closed(0) == {ref.prompt: "too slow"}
    assert [data.take().epoch for _ in range(3)] == [0, 0, 1]


def test_changed_data_is_named_on_resume():
    state = make().state_dict()
    with pytest.raises(ValueError, match=r"data numbers.jsonl .* its digest was abc and is xyz now"):
        make(digest="xyz").load_state_dict(state)
    with pytest.raises(ValueError, match="its size was 10 and is 11 now"):
        make(size=11).load_state_dict(state)


def test_a_digest_tells_boundaries_apart():
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert digest_of(["ab", "c"]) == digest_of(iter(["ab", "c"]))


ACTS = ("take", "done", "back", "retry", "close", "resume")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.sampled_from(ACTS), max_size=80), st.data())
def test_whatever_happens_no_prompt_is_lost_and_a_resume_deals_the_same(size, acts, draw):
    data = make(size)
    ended: dict[tuple[int, int], str] = {}
    for act in acts:
        out = data.open()
        if act == "take":
            ref = data.take()
            assert (ref.epoch, ref.prompt) not in ended
        elif act == "resume":
            other = make(size)
            other.load_state_dict(json.loads(json.dumps(data.state_dict())))
            for ref in out:
                data.give_back(ref)
            assert other.state_dict() == data.state_dict()
            data = other
        elif out:
            ref = draw.draw(st.sampled_from(out))
            if act == "back":
                data.give_back(ref)
            elif act == "retry":
                data.give_back(replace(ref, attempt=ref.attempt + 1))
            else:
                ended[(ref.epoch, ref.prompt)] = act
                data.done(ref) if act == "done" else data.close(ref, "slow")
    last = data.epoch
    for ref in data.open():
        data.give_back(ref)
    while (ref := data.take()).epoch <= last:
        assert ended.setdefault((ref.epoch, ref.prompt), "done") == "done"
        data.done(ref)
    assert {key for key in ended if key[0] <= last} == {(e, p) for e in range(last + 1) for p in range(size)}
