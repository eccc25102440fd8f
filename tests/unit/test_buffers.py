"""Flat buffers: copying in and out, digests in place, leases."""

import threading

import numpy as np
import pytest
import torch
import xxhash

from transport.weights.buffers import (
    Leases,
    bucket_digest,
    bucket_digests,
    copy_in,
    digest_of,
    load_into,
    new_flat,
    non_finite,
    tensor_digests,
)
from transport.weights.manifest import Manifest


def filled(state, wire_dtype=None):
    manifest = Manifest.from_state(state, wire_dtype=wire_dtype)
    flat = new_flat(manifest.nbytes)
    copy_in(manifest, state, flat)
    return manifest, flat


def test_copy_in_casts_floats_to_the_wire_dtype_and_nothing_else():
    state = {"w": torch.randn(7, 5, requires_grad=True), "n": torch.tensor([2**40 + 1])}
    manifest, flat = filled(state, torch.bfloat16)
    views = manifest.views(flat)
    assert torch.equal(views["w"], state["w"].to(torch.bfloat16))
    assert views["n"].item() == 2**40 + 1


def test_load_into_casts_to_what_the_receiver_has_and_leaves_gradients_alone():
    state = {"w": torch.randn(4, 4)}
    manifest, flat = filled(state)
    half = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    load_into(manifest, flat, {"w": half})
    assert torch.equal(half.detach(), state["w"].to(torch.bfloat16))
    assert half.is_leaf
    assert half.grad is None


def test_a_model_that_changed_under_its_manifest_is_refused_by_name():
    manifest, flat = filled({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="tensor b is in the manifest but not in the weights"):
        copy_in(manifest, {"a": torch.ones(2)}, flat)
    with pytest.raises(ValueError, match=r"tensor b has shape \(4,\); the manifest says \(3,\)"):
        copy_in(manifest, {"a": torch.ones(2), "b": torch.ones(4)}, flat)


def test_equal_weights_give_equal_bucket_digests_whatever_lay_in_the_buffer():
    state = {"a": torch.randn(5), "b": torch.randn(3), "c": torch.ones(1, dtype=torch.bool)}
    manifest = Manifest.from_state(state)
    digests = []
    for dirt in (0, 255):
        flat = new_flat(manifest.nbytes).fill_(dirt)
        copy_in(manifest, state, flat)
        digests.append(bucket_digests(flat, 48))
    assert np.array_equal(*digests)
    assert digests[0].dtype == np.uint64


def test_digests_are_xxh3_of_the_bytes_and_name_the_bucket_that_differs():
    state = {"a": torch.randn(100), "b": torch.randn(100)}
    manifest, flat = filled(state)
    raw = flat.numpy().tobytes()
    before = bucket_digests(flat, 128)
    assert before.tolist() == [xxhash.xxh3_64_intdigest(raw[i : i + 128]) for i in range(0, len(raw), 128)]
    assert tensor_digests(manifest, flat).tolist() == [
        xxhash.xxh3_64_intdigest(state[name].numpy().tobytes()) for name in ("a", "b")
    ]
    flat[300] ^= 1
    assert np.flatnonzero(bucket_digests(flat, 128) != before).tolist() == [2]
    assert bucket_digest(flat, 2, 128) != int(before[2])


def test_the_digest_of_a_view_is_that_of_its_elements():
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest_of(x.t()) == digest_of(x.t().contiguous())
    assert digest_of(torch.tensor(3.0)) == digest_of(torch.tensor([3.0]))
    assert digest_of(torch.empty(0)) == xxhash.xxh3_64_intdigest(b"")
    assert digest_of(torch.ones(3, dtype=torch.bfloat16, requires_grad=True)) == digest_of(
        torch.ones(3, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_parameters_are_named_and_masks_are_not(bad):
    state = {"fine": torch.ones(3), "w": torch.tensor([[1.0, bad, 2.0]]), "mask": torch.tensor([-float("inf")])}
    manifest = Manifest.from_state(state, buffers=["mask"])
    flat = new_flat(manifest.nbytes)
    copy_in(manifest, state, flat)
    assert non_finite(manifest, flat) == ["w"]


def test_leases_never_wait_and_know_their_owners():
    leases = Leases(2, 64)
    a, b = leases.acquire("sending"), leases.acquire("newest")
    assert {a.index, b.index} == {0, 1}
    assert leases.acquire("third") is None
    assert leases.held() == [(0, "sending"), (1, "newest")]
    leases.release(a)
    again = leases.acquire("spare")
    assert again.flat.data_ptr() == a.flat.data_ptr()
    with pytest.raises(AssertionError, match="buffer 0 is not leased to sending"):
        leases.release(a)  # a late release must not free another's lease
    assert leases.held() == [(0, "spare"), (1, "newest")]


def test_a_quarantined_buffer_is_free_only_when_every_abandoned_operation_has_ended():
    leases = Leases(1, 64)
    slot = leases.acquire("receiver")
    first, second = threading.Event(), threading.Event()
    leases.quarantine(slot, first.is_set)
    leases.quarantine(slot, second.is_set)
    first.set()
    leases.release(slot)
    assert leases.held() == [(0, "quarantine")]
    assert leases.acquire("next") is None
    second.set()
    assert leases.acquire("next").owner == "next"


def test_no_two_threads_get_one_buffer():
    leases = Leases(3, 64)
    holders = [0] * 3
    clashes = []

    def work() -> None:
        for _ in range(300):
            if slot := leases.acquire("thread"):
                holders[slot.index] += 1
                if holders[slot.index] != 1:
                    clashes.append(slot.index)
                holders[slot.index] -= 1
                leases.release(slot)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert leases.held() == []
