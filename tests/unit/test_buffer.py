import numpy as np
import pytest

from mesh.version import Ballot, Lineage, Version
from roles.trainer.buffer import Buffer
from transport.messages import Completion, Credit, Group, Segment, Span

TERM, NEXT = Ballot(1, "a"), Ballot(2, "b")
LINEAGE = Lineage(((TERM, 0), (NEXT, 5)))
NONE, FLOAT = np.zeros(2, np.int32), np.zeros(2, np.float32)


def v(number: int, term: Ballot = TERM) -> Version:
    return Version(term, number)


def put(buffer: Buffer, id: int, *versions: Version) -> None:
    credit = Credit(id=id, prompt=id, epoch=0, attempt=0, size=1, min_version=versions[0], seed=0)
    spans = [Span(version, i, i + 1) for i, version in enumerate(versions)]
    group = Group([Completion([Segment(NONE, True, FLOAT, spans)], 1.0, "stop")], versions[0])
    buffer.put("rollout", credit, group)


def test_a_batch_is_the_oldest_admissible_groups_by_version_then_credit():
    buffer = Buffer(limit=8, max_lag=2)
    for id, number in ((9, 4), (4, 3), (3, 4), (8, 3)):
        put(buffer, id, v(number))
    batch, stale = buffer.take(3, v(5), LINEAGE)
    assert [t.credit.id for t in batch] == [4, 8, 3]
    assert stale == []
    assert len(buffer) == 1


def test_groups_that_newer_weights_replaced_come_out_with_the_reason():
    buffer = Buffer(limit=8, max_lag=2)
    put(buffer, 1, v(4))  # age: 7 - 4
    put(buffer, 2, v(6))  # the old term ended at 5
    put(buffer, 3, v(5))
    put(buffer, 4, v(5), v(6))  # started well, went on with weights of a lost branch
    put(buffer, 5, v(5), v(6, NEXT))
    assert buffer.ready(v(7, NEXT), LINEAGE) == 2
    batch, stale = buffer.take(9, v(7, NEXT), LINEAGE)
    assert [t.credit.id for t in batch] == [3, 5]
    assert stale == [(1, "age"), (2, "lineage"), (4, "lineage")]
    assert len(buffer) == 0


def test_lags_are_counted_on_the_trainers_lineage():
    buffer = Buffer(limit=8, max_lag=2)
    for id, version in enumerate((v(4), v(5), v(5, NEXT), v(9))):
        put(buffer, id, version)
    assert buffer.lags(v(6, NEXT), LINEAGE) == {1: 2, 2: 1}


def test_more_groups_than_the_bound_are_a_bug():
    buffer = Buffer(limit=1, max_lag=0)
    put(buffer, 1, v(0))
    with pytest.raises(AssertionError, match="over the bound"):
        put(buffer, 2, v(0))


def test_a_dropped_group_leaves_and_dropping_one_put_aside_is_fine():
    buffer = Buffer(limit=2, max_lag=0)
    put(buffer, 1, v(0))
    buffer.drop(1)
    buffer.drop(1)
    assert list(buffer) == []
