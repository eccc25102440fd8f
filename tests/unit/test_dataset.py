import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.trainer.dataset import MOST_EPOCHS, Dataset, digest_of, owners, permutation


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


# -- several trainers --------------------------------------------------------------------------------------------------


def dealt(members: tuple[str, ...], size: int = 60) -> dict[str, Dataset]:
    found = {name: make(size) for name in members}
    for name, data in found.items():
        data.deal(members, name)
    return found


def test_every_prompt_has_one_owner_and_a_death_moves_only_those_of_the_dead_one():
    members = ("a", "b", "c")
    before = owners(3000, 5, members)
    assert all(800 < n < 1200 for n in np.bincount(before))
    after = owners(3000, 5, ("a", "c"))
    kept = before != 1
    assert [("a", "c")[i] for i in after[kept]] == [members[i] for i in before[kept]]
    assert set(after[~kept]) == {0, 1}
    assert (owners(3000, 6, members) != before).any()


def test_the_owners_of_prompts_never_change():
    assert owners(8, 0, ("a", "b", "c")).tolist() == [0, 0, 0, 0, 1, 0, 1, 2]


def test_trainers_take_their_own_prompts_only_and_together_all_of_them():
    trainers = dealt(("a", "b", "c"))
    taken: list[int] = []
    for name, data in trainers.items():
        while (ref := data.take()).epoch == 0:
            assert data.owns(0, ref.prompt)
            assert not any(other.owns(0, ref.prompt) for n, other in trainers.items() if n != name)
            taken.append(ref.prompt)
    assert sorted(taken) == list(range(60))


def test_a_single_member_takes_what_a_trainer_without_others_takes():
    data, alone = make(30), make(30)
    data.deal(["a"], "a")
    assert [data.take() for _ in range(70)] == [alone.take() for _ in range(70)]


def test_who_is_no_member_owns_nothing():
    data = make()
    data.deal(["a"], "b")
    assert data.take() is None


def test_a_dead_trainers_prompts_come_back_but_for_those_that_are_trained_closed_or_out():
    a, b = dealt(("a", "b")).values()
    mine = [a.take() for _ in range(20)]
    theirs = []
    while (ref := b.take()).place < mine[-1].place:
        theirs.append(ref)
    b.give_back(ref)
    a.mark_trained(0, theirs[0].prompt)
    a.mark_closed(0, theirs[1].prompt, "too slow")
    a.done(mine[0])
    a.give_back(mine[1])
    a.deal(["a"], "a")
    back = [a.take() for _ in range(1 + len(theirs) - 2)]
    assert sorted(back) == back == sorted([mine[1], *theirs[2:]])
    assert a.take().place == mine[-1].place + 1
    assert a.closed(0) == {theirs[1].prompt: "too slow"}


def test_a_prompt_that_went_to_another_is_not_dealt_here_any_more():
    data = make(40)
    refs = [data.take() for _ in range(40)]
    for ref in refs[:20]:
        data.give_back(ref)
    data.deal(["a", "b"], "a")
    assert {data.unwanted(ref) for ref in refs[20:]} == {"", "dealt to another trainer"}
    for ref in refs[20:]:
        data.give_back(ref)
    mine = [ref for ref in refs if data.owns(0, ref.prompt)]
    assert [data.take() for _ in mine] == mine
    assert data.take().epoch == 1


def test_what_another_trainer_trained_while_the_prompt_is_out_here_is_not_wanted():
    data = make()
    ref, other = data.take(), data.take()
    assert data.unwanted(ref) == ""
    data.mark_trained(0, ref.prompt)
    data.mark_closed(0, other.prompt, "too slow")
    assert (data.unwanted(ref), data.unwanted(other)) == ("trained by another trainer", "closed by another trainer")
    data.give_back(ref)
    assert data.take().place == 2


def test_a_prompt_is_claimed_once_and_by_its_owner_only():
    a, b = dealt(("a", "b")).values()
    prompt = next(p for p in range(60) if a.owns(0, p))
    assert b.claim(0, prompt) is None
    ref = a.claim(0, prompt)
    assert ref.prompt == prompt
    assert a.claim(0, prompt) is None
    assert prompt not in take_epoch(a)
    a.done(ref)
    assert a.claim(0, prompt) is None
    assert a.claim(9, prompt) is None
    assert a.claim(0, 10**9) is None


def take_epoch(data: Dataset, epoch: int = 0) -> list[int]:
    prompts = []
    while (ref := data.take()).epoch == epoch:
        prompts.append(ref.prompt)
    return prompts


def test_a_prompt_given_back_can_be_claimed_and_is_then_not_dealt():
    data = make()
    refs = [data.take() for _ in range(3)]
    for ref in refs:
        data.give_back(ref)
    assert data.claim(0, refs[1].prompt) == refs[1]
    assert [data.take().place for _ in range(3)] == [0, 2, 3]


def test_an_epoch_that_others_are_in_already_is_remembered_until_one_gets_there():
    data = make(4)
    data.mark_trained(2, 1)
    assert data.epoch == 0
    assert len([data.take() for _ in range(8)]) == 8
    assert sorted(data.take().prompt for _ in range(3)) == [0, 2, 3]
    assert data.take().epoch == 3


def test_an_epoch_with_prompts_that_nobody_has_trained_yet_is_not_forgotten():
    a, b = dealt(("a", "b"), size=8).values()
    for _ in range(100):
        ref = a.take()
        a.done(ref)
        b.mark_trained(ref.epoch, ref.prompt)
    a.deal(["a"], "a")
    left = a.take()
    assert left.epoch == 0
    assert b.owns(0, left.prompt)


def test_the_epochs_remembered_are_bounded():
    data = make(2)
    data.deal(["a", "b"], "a")
    for _ in range(3 * MOST_EPOCHS):
        data.done(data.take())
    assert len(data.state_dict()["epochs"]) <= MOST_EPOCHS + 1


def test_the_state_of_one_trainer_serves_another():
    a, b = dealt(("a", "b")).values()
    for ref in [a.take() for _ in range(10)]:
        a.done(ref)
        b.mark_trained(0, ref.prompt)
    for ref in [b.take() for _ in range(15)]:
        b.done(ref)
        a.mark_trained(0, ref.prompt)
    newcomer = make(60)
    newcomer.load_state_dict(json.loads(json.dumps(a.state_dict())))
    everybody = ("a", "b", "n")
    for name, data in zip(everybody, (a, b, newcomer), strict=True):
        data.deal(everybody, name)
    rest = [prompt for data in (a, b, newcomer) for prompt in take_epoch(data)]
    assert sorted(rest) == [p for p in range(60) if not a.is_trained(0, p)]
