"""The description of a version: layout, ties, what may travel, and what a receiver refuses."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from transport.messages import TensorEntry
from transport.weights.buffers import copy_in, load_into, new_flat
from transport.weights.manifest import ALIGN, DTYPES, Manifest


class Tied(nn.Module):
    """A tied head, a persistent and a transient buffer, an integer counter."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("bias_of_experts", torch.randn(4))
        self.register_buffer("angles", torch.randn(4), persistent=False)
        self.register_buffer("seen", torch.tensor(7, dtype=torch.int64))


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True)


def test_tied_tensors_are_one_entry_and_persistent_buffers_travel():
    manifest = Manifest.from_module(Tied(), torch.bfloat16)
    assert [(e.names, e.dtype, e.shape, e.offset, e.nbytes, e.buffer) for e in manifest.entries] == [
        (("bias_of_experts",), "bfloat16", (4,), 0, 8, True),
        (("seen",), "int64", (), 64, 8, True),
        (("embed.weight", "head.weight"), "bfloat16", (5, 3), 128, 30, False),
    ]
    assert all(e.offset % ALIGN == 0 for e in manifest.entries)
    assert manifest.nbytes == 3 * ALIGN
    assert (manifest.buckets(ALIGN), manifest.buckets(100), manifest.buckets(10**9)) == (3, 2, 1)


def test_awkward_tensors_travel_with_their_values():
    state = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "also_empty": torch.empty(3, 0),
        "turned": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "strided": torch.arange(10)[::3],
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, dtype=torch.float16),
        "expanded": torch.tensor([2.0]).expand(4),
    }
    manifest = Manifest.from_state(state)
    flat = new_flat(manifest.nbytes)
    copy_in(manifest, state, flat)
    got = manifest.views(flat)
    assert got.keys() == state.keys()
    for name, tensor in state.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "expanded"}
    target["expanded"] = torch.zeros(4)
    manifest.fits(target, "here")
    load_into(manifest, flat, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(3).to_sparse(), "tensor layer.w is sparse"),
        (torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8), "tensor layer.w is quantised"),
        (torch.empty(3, device="meta"), "tensor layer.w is without data"),
        (torch.ones(3, dtype=torch.complex64), "tensor layer.w is complex64"),
        (torch.ones(3).to(torch.float8_e5m2), "tensor layer.w is float8_e5m2"),
        ({"extra": 1}, "state layer.w is a dict"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensor, what):
    with pytest.raises(ValueError, match=what):
        Manifest.from_state({"fine": torch.ones(2), "layer.w": tensor})


names = st.lists(st.text("abc.", min_size=1, max_size=8), unique=True, min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.data(), names)
def test_decode_is_the_inverse_of_encode(data, names):
    state = {n: torch.zeros(data.draw(shapes), dtype=data.draw(st.sampled_from(list(DTYPES.values())))) for n in names}
    manifest = Manifest.from_state(state, wire_dtype=data.draw(st.sampled_from([None, torch.bfloat16])))
    again = Manifest.decode(manifest.encode())
    assert again.entries == manifest.entries
    assert (again.nbytes, again.digest) == (manifest.nbytes, manifest.digest)
    assert {n: tuple(v.shape) for n, v in again.views(new_flat(again.nbytes)).items()} == {
        n: tuple(t.shape) for n, t in state.items()
    }


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_or_make_a_sound_manifest(payload):
    try:
        manifest = Manifest.decode(payload)
    except ValueError:
        return
    assert Manifest.decode(manifest.encode()).digest == manifest.digest


def entry(name="w", dtype="float32", shape=(2, 3), offset=0, nbytes=24) -> TensorEntry:
    return TensorEntry((name,), dtype, shape, offset, nbytes)


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([], "has 0 tensors"),
        ([entry(nbytes=25)], "tensor w, float32 of shape .* has 24 bytes; the manifest says 25"),
        ([entry(), entry("x")], "tensor x must lie at byte 64; the manifest says 0"),
        ([entry(), entry("x", offset=128)], "tensor x must lie at byte 64"),
        ([entry(), entry(offset=64)], "tensor w is in the manifest twice"),
        ([entry(dtype="object")], "tensor w has dtype 'object'"),
        ([entry(shape=(-2, -3))], "tensor w has an impossible shape"),
        ([entry(shape=(1,) * 20, nbytes=4)], "tensor w has an impossible shape"),
        ([entry(shape=(1 << 45,), nbytes=1 << 47)], "tensor w ends beyond"),
        ([entry(name="")], "entry 0 needs names"),
        ([TensorEntry((), "float32", (), 0, 4)], "entry 0 needs names"),
    ],
)
def test_a_forged_manifest_is_refused_by_name(entries, what):
    with pytest.raises(ValueError, match=what):
        Manifest.decode(msgspec.msgpack.encode(entries))


def test_a_receiver_of_the_same_model_fits_tied_or_not():
    manifest = Manifest.from_module(Tied(), torch.bfloat16)
    manifest.fits(state_of(Tied()), "rollout-1@host")
    manifest.fits(state_of(Tied(tie=False)), "rollout-1@host")
    once = state_of(Tied())
    del once["head.weight"]
    manifest.fits(once, "rollout-1@host")


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_every_name_of_a_tied_tensor_is_written(tie):
    model = Tied()
    manifest = Manifest.from_module(model)
    flat = new_flat(manifest.nbytes)
    copy_in(manifest, state_of(model), flat)
    other = Tied(tie=tie)
    load_into(manifest, flat, state_of(other))
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert torch.equal(other.bias_of_experts, model.bias_of_experts)


def test_two_tensors_for_what_the_receiver_ties_are_refused():
    manifest = Manifest.from_module(Tied(tie=False))
    with pytest.raises(ValueError, match=r"embed.weight and head.weight: one tied tensor at r1, sent .* as two"):
        manifest.fits(state_of(Tied()), "r1")


def test_every_misfit_is_named_with_both_sides():
    manifest = Manifest.from_state(
        {"a": torch.ones(2, 3), "gone": torch.ones(1), "count": torch.ones(2, dtype=torch.int64)}
    )
    tensors = {"a": torch.ones(3, 2), "count": torch.ones(2), "never": torch.ones(1)}
    with pytest.raises(ValueError, match="weights do not fit rollout-2@host") as caught:
        manifest.fits(tensors, "rollout-2@host")
    for part in (
        "a: shape (2, 3) from the trainer, (3, 2) at rollout-2@host",
        "gone: sent by the trainer, unknown at rollout-2@host",
        "count: int64 from the trainer, float32 at rollout-2@host",
        "never: at rollout-2@host, never written",
    ):
        assert part in str(caught.value)


def test_a_flat_buffer_of_another_size_is_refused():
    manifest = Manifest.from_state({"a": torch.ones(2)})
    for flat in (torch.empty(63, dtype=torch.uint8), torch.empty(64), torch.empty(128, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match=r"needs contiguous uint8 of shape \(64,\)"):
            manifest.views(flat)
