"""Names of weights under the wrappers that people put around models: those of the plain model, or refused by name. The
wrappers are the real ones."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from made_groups import llama, settings
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from roles.starter import character_tokenizer
from roles.trainer.policy import Policy, clean_name, unwrapped
from transport.weights.manifest import Manifest


@pytest.fixture
def world(tmp_path):
    """The global process group of one rank, which these wrappers ask for."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def policy_of(model):
    return Policy(model, character_tokenizer(), settings())


def layers(model, wrap):
    """Wrap every block of the model in its place."""
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrap(layer)
    return model


def compiled(module):
    return torch.compile(module, backend="eager")


NESTED = {
    "compiled": compiled,
    "compiled blocks": lambda m: layers(m, compiled),
    "checkpointed": checkpoint_wrapper,
    "checkpointed blocks": lambda m: layers(m, checkpoint_wrapper),
    "compiled checkpointed blocks, compiled": lambda m: compiled(layers(m, lambda b: compiled(checkpoint_wrapper(b)))),
    "checkpointed compiled blocks": lambda m: layers(m, lambda b: checkpoint_wrapper(compiled(b))),
}


@pytest.mark.parametrize("how", NESTED)
def test_a_wrapped_model_has_the_names_and_weights_of_the_plain_one(how):
    plain, wrapped = llama(), NESTED[how](llama())
    p = policy_of(wrapped)
    state = p.named_state()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    assert list(p.parameters) == [name for name, _ in plain.named_parameters()]
    assert type(unwrapped(wrapped)) is type(plain)
    assert Manifest.from_state(state).digest == Manifest.from_state(plain.state_dict()).digest
    tokens = np.arange(4, dtype=np.int32)
    expected = policy_of(plain).probe(tokens, torch.bfloat16)
    np.testing.assert_allclose(p.probe(tokens, torch.bfloat16), expected, rtol=1e-5)


def test_weights_sharded_by_fsdp2_are_refused_by_name(world):
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.\S+ is sharded and cannot be sent"):
        Manifest.from_state(policy_of(model).named_state())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_weights_in_fsdp1_are_refused_by_name(whole, world):
    """Its state dict holds copies, in which tied weights are two; its parameters may be parts of one flat tensor."""
    wrapped = FullyShardedDataParallel(llama(), use_orig_params=whole, device_id=torch.device("cpu"))
    for model in (wrapped, compiled(wrapped), checkpoint_wrapper(wrapped)):
        with pytest.raises(ValueError, match=r"_fsdp_wrapped_module\.\S+ is that of a model sharded by FSDP"):
            policy_of(model)


def test_a_data_parallel_model_is_refused_by_name(world):
    with pytest.raises(ValueError, match=r"weight module\.model\.embed_tokens\.weight is that of .* data-parallel"):
        policy_of(DistributedDataParallel(llama()))
    with pytest.raises(ValueError, match=r"weight _orig_mod\.module\.model\."):
        policy_of(compiled(DistributedDataParallel(llama())))


def test_a_parametrized_weight_is_refused_by_name():
    model = llama()
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match=r"weight lm_head\.parametrizations\.weight\.original0"):
        policy_of(model)


def test_only_whole_parts_of_a_name_are_taken_off():
    assert clean_name("block_orig_mod.weight") == "block_orig_mod.weight"
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module._orig_mod.b") == "a.b"
