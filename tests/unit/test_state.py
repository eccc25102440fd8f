"""All that trainers have alike, as digests and as bytes."""

import numpy as np
import pytest
import torch
from made_groups import policy, settings
from test_checkpoint import bits, state, train

from roles.trainer import state as whole


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_newcomer_gets_it_to_the_last_bit(dtype, tied):
    config = settings(weight_decay=0.1, warmup_steps=6)
    there, here = policy(dtype, tied=tied, config=config), policy(dtype, tied=tied, seed=9, config=config)
    train(there, 3)
    assert whole.state_digest(there) != whole.state_digest(here)
    data = whole.dump(there, state(3, trained=24))
    assert len(data) < whole.most_bytes(here)
    told = whole.load(here, data)
    assert (told.version.number, told.groups_trained, told.steps) == (3, 24, 3)
    assert bits(here) == bits(there)
    assert whole.state_digest(here) == whole.state_digest(there)
    train(there, 2, first=3)
    train(here, 2, first=3)
    assert bits(here) == bits(there)
    assert whole.state_digest(here) == whole.state_digest(there)


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_one_bit_makes_another_digest_and_is_found_by_name(what):
    one, other = policy(), policy()
    train(one, 2)
    train(other, 2)
    assert whole.state_digest(one) == whole.state_digest(other)
    name, parameter = sorted(other.parameters.items())[1]
    tensor = parameter if what == "weight" else other.optimizer.state[parameter]["exp_avg_sq"]
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[3] ^= 1
    assert whole.state_digest(one) != whole.state_digest(other)
    digests = {who: whole.tensor_digests(p) for who, p in (("a", one), ("b", other))}
    names = list(digests["a"])
    assert names == list(digests["b"])
    arrays = {who: np.array(list(d.values()), np.uint64) for who, d in digests.items()}
    expected = f"weight/{name}" if what == "weight" else f"optimizer/exp_avg_sq/{name}"
    assert whole.first_difference(names, arrays) == expected
    assert whole.first_difference(names, {"a": arrays["a"], "b": arrays["a"]}) == ""


@pytest.mark.parametrize("data", [b"", b"x" * 100, (5).to_bytes(8, "little") + b"{}   " + b"\xff" * 40])
def test_rubbish_is_refused_in_one_line(data):
    with pytest.raises(ValueError, match="what the other trainer sent cannot be read"):
        whole.load(policy(), data)


def test_the_state_of_another_model_is_refused_by_the_tensor():
    with pytest.raises(ValueError, match=r"what the other trainer sent: \S+ is torch.float32 .* the model's"):
        whole.load(policy(torch.bfloat16), whole.dump(policy(), state(0)))
