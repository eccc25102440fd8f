"""The mesh inside vLLM's worker processes: new weights are loaded, read back and probed here. vLLM 0.32.

The peer receives versions into shadow buffers that its workers share (``shared.py``), so nothing is sent a second time.
An update is a pause, ``Extension.mesh_before``, vLLM's ``start_weight_update``, ``update_weights`` and
``finish_weight_update`` with the engine below as its backend, ``Extension.mesh_prove``, and going on.

Two things that vLLM's reload leaves to us. The output head that is tied to the embedding is never loaded by itself, so
the copy of it that CPU kernels prepack stays that of the old weights: it is packed again. And what CPU kernels have
prepacked cannot be read back, so what is digested of it are its products with unit vectors: some of its columns.

The probe runs as a step of the model runner that vLLM's scheduler does not know of. It uses the block of the KV cache
that vLLM keeps for nobody, so the sequences that wait in the others are not touched.
"""

import contextlib
import logging
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from mesh.version import Version
from roles.rollout.engines import shared
from roles.rollout.engines.vllm_common import OWNER, WORDS, first_cause
from transport.messages import Probe
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover

log = logging.getLogger(__name__)

BACKEND = "mesh"
NOBODYS_BLOCK = 0  # vLLM's null block: in no block table but as a place holder, so whatever lies in it is not read
PROBE = "mesh-probe"
COLUMNS = 32  # read back of a packed matrix: as much work as the probe, and a step of 1e-6 in bfloat16 changes some


class Update(Struct, frozen=True, array_like=True):
    """One version, as the peer tells its workers. ``path``: of the shared buffer. ``floor``: the prover's."""

    path: str
    manifest: bytes
    tensor_digests: bytes  # uint64
    tokens: bytes  # int32, of the probe
    logprobs: bytes  # float32, the publisher's
    version: Version
    floor: float
    build: str

    @property
    def probe(self) -> Probe:
        return Probe(np.frombuffer(self.tokens, np.int32), np.frombuffer(self.logprobs, np.float32))


def decode(payload: bytes) -> Update:
    return msgspec.msgpack.decode(payload, type=Update)


@dataclass
class Nothing(WeightTransferInitInfo):
    """Nothing is to be set up: what is needed comes with each update."""


@dataclass
class Payload(WeightTransferUpdateInfo):
    payload: bytes


class MeshTransfer(WeightTransferEngine[Nothing, Payload]):
    """Takes a version over from shared memory through vLLM's own reload path, for this worker's part of the model."""

    init_info_cls = Nothing
    update_info_cls = Payload
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class would wait for an accelerator

    def receive_weights(self, update_info: Payload) -> None:
        update = decode(update_info.payload)
        manifest = Manifest.decode(update.manifest)
        on_gpu = self.device.type != "cpu"
        views = manifest.views(shared.opened(update.path, manifest.nbytes, pin=on_gpu))
        try:
            self.model.load_weights((name, views[name].to(self.device)) for e in manifest.entries for name in e.names)
        except BaseException:
            self.finish_weight_update()  # half loaded, but whole layers again: the next version finds a clean start
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        pass


def pack_tied_heads(model: nn.Module) -> None:
    """Pack again what CPU kernels hold of a weight that two modules share: a reload packs it for the first alone."""
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not weight.numel():
            continue
        if weight.data_ptr() in seen and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a version decides, as the forward pass reads it; of a prepacked one some columns."""
    seen: set[int] = set()
    packed = {name for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if not tensor.numel() or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        yield name, tensor.detach()
    for name, module in model.named_modules():
        if name in packed and (inputs := _inputs(module)):
            yield f"{name}.packed", _columns(module, inputs)


def _inputs(module: nn.Module) -> int:
    """How many inputs a linear layer, or an output head, of this worker has; 0 for what is called otherwise."""
    for name in ("input_size_per_partition", "embedding_dim"):
        if isinstance(size := getattr(module, name, None), int):
            return size
    return 0


@torch.inference_mode()
def _columns(module: nn.Module, inputs: int) -> Tensor:
    """Some columns of what was packed, exactly: a product with a unit vector is one in whatever order it is summed,
    which that with other vectors is not. ``+ 0`` because the sign of a zero depends on the order."""
    at = torch.linspace(0, inputs - 1, min(COLUMNS, inputs)).long()
    units = torch.zeros(len(at), inputs, dtype=module.weight.dtype).scatter_(1, at[:, None], 1)
    return module.cpu_linear(units, module.weight, None) + 0


class Extension:
    """Mixed into vLLM's worker, whose attributes it uses; each is called on all workers between two steps."""

    def mesh_before(self, payload: bytes) -> None:
        """Look at the weights that are about to be replaced."""
        update = decode(payload)
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        if not hasattr(engine, "mesh_prover"):
            engine.mesh_prover = Prover(update.floor)
        engine.mesh_prover.before(_Live(self, update.build), update.probe)

    def mesh_prove(self, payload: bytes) -> dict[str, Any]:
        """Prove the weights that were loaded; a ``Proof`` as a dictionary, without its version."""
        update = decode(payload)
        manifest = Manifest.decode(update.manifest)
        digests = np.frombuffer(update.tensor_digests, dtype=np.uint64)
        flat = shared.opened(update.path, manifest.nbytes)
        prover: Prover = self.weight_transfer_engine.mesh_prover  # type: ignore[attr-defined]
        proof = prover.prove(_Live(self, update.build), manifest, digests, update.probe, update.version, flat)
        return {name: value for name, value in asdict(proof).items() if name != "version"}


class _Live:
    """This worker as what a proof asks of an engine."""

    def __init__(self, worker: Any, build: str) -> None:
        self.worker, self.build = worker, build

    def live_tensors(self) -> list[tuple[str, Tensor]]:
        return list(live_tensors(self.worker.get_model()))  # all at once: two with one address would pass for tied ones

    def score(self, tokens: np.ndarray) -> np.ndarray:
        runner = self.worker.model_runner
        blocks = runner.kv_cache_config.kv_cache_groups
        size = min(group.kv_cache_spec.block_size for group in blocks)
        if len(tokens) > size:
            raise ValueError(
                f"weights.probe_tokens = {len(tokens)} do not fit one block of {size}: set rollout.vllm.block_size"
            )
        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=PROBE,
                prompt_token_ids=tokens.tolist(),
                prefill_token_ids=tokens.tolist(),
                mm_features=[],
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
                pooling_params=None,
                block_ids=tuple([NOBODYS_BLOCK] for _ in blocks),
                num_computed_tokens=0,
                lora_request=None,
            )
        ]
        step.num_scheduled_tokens = {PROBE: len(tokens)}
        step.total_num_scheduled_tokens = len(tokens)
        output = self.worker.execute_model(step)
        if output is None:
            output = self.worker.sample_tokens(None)
        if hasattr(output, "get_output"):
            output = output.get_output()
        end = SchedulerOutput.make_empty()
        end.finished_req_ids = {PROBE}
        self.worker.execute_model(end)
        return output.prompt_logprobs_dict[PROBE].logprobs[:, 0].float().cpu().numpy()


def register() -> None:
    """vLLM calls this in each of its processes, by the entry point ``vllm.general_plugins``."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, MeshTransfer.__name__)
    # Layers without weights of their own, such as a rotary embedding, are named on every update.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    owner = int(os.environ.get(OWNER, "0"))
    if owner and owner != os.getpid() and not _watching:
        logging.getLogger("vllm").addHandler(_Words(logging.ERROR))
        _watching.append(threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True))
        _watching[0].start()


class _Words(logging.Handler):
    """What a peer cannot see of its engine's processes but on the screen: why they fail."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = first_cause(error) if error is not None else record.getMessage()
        with contextlib.suppress(OSError), open(os.environ[WORDS], "a") as words:
            words.write(" ".join(text.split())[:1000] + "\n")


_watching: list[threading.Thread] = []


def _end_with(owner: int) -> None:
    """End this process when the peer it works for is gone, however it went."""
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    select.select([fd], [], [])
    os._exit(1)
