"""What rides with a gradient: records of a step in slots of bytes, one a trainer."""

import pytest
import torch

from roles.trainer.gradients import SLOT_BYTES, Brought, pack, unpack
from transport.accounts import CLOSED_A_ROW, WHY_CHARS, ClosedPrompt, Row, RowGroup


def brought(groups, closed=0):
    row = Row(
        [RowGroup(2**53 - i, 2**31, 2**31, 2**31, 2**31, 2**31) for i in range(groups)],
        [ClosedPrompt(2**31, 2**31 + i, "w" * WHY_CHARS) for i in range(closed)],
    )
    return Brought(123, row, {"loss": -0.5})


def test_slots_summed_with_zeros_are_what_each_trainer_brought():
    a, b = brought(3), brought(1)
    slots = torch.stack([pack(a, SLOT_BYTES), torch.zeros(SLOT_BYTES, dtype=torch.uint8), pack(b, SLOT_BYTES)])
    assert unpack(slots, ["a", "nobody", "b"]) == {"a": a, "b": b}


def test_the_most_that_a_trainer_can_bring_fits():
    groups = 64
    most = brought(groups, CLOSED_A_ROW)
    slot = pack(most, SLOT_BYTES + 128 * groups)
    assert unpack(slot[None], ["a"]) == {"a": most}


def test_figures_are_left_out_before_records_are():
    much = Brought(1, Row([RowGroup(1, 0, 1, 5)]), {f"figure {i}": 0.0 for i in range(100)})
    assert unpack(pack(much, 200)[None], ["a"])["a"] == Brought(1, much.row, {})
    with pytest.raises(ValueError, match="do not fit into 16"):
        pack(much, 16)
