"""What can go wrong in a worker of vLLM, done to a real one: named as its extension in place of the project's own.

The file ``$VLLM_FAULT`` holds the name of the fault that the next version meets; without it all goes well."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from roles.rollout.engines import vllm_worker

PACK = vllm_worker.pack_tied_heads


class Faulty(vllm_worker.Extension):
    def mesh_before(self, payload: bytes) -> None:
        super().mesh_before(payload)
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        vllm_worker.pack_tied_heads = PACK
        vars(engine.model).pop("load_weights", None)
        for name in ("start_weight_update", "receive_weights", "finish_weight_update"):
            vars(engine).pop(name, None)
        fault = Path(os.environ["VLLM_FAULT"])
        if fault.exists():
            globals()[fault.read_text()](engine)


def stale_head(engine: Any) -> None:
    """What kernels have packed of the output head, which is tied to the embedding, stays that of the last version. Some
    kernels keep a copy of their own and some do not, so here the head is packed from a copy of the old weights."""
    old = nn.Parameter(engine.model.lm_head.weight.detach().clone(), requires_grad=False)

    def pack_old(model: nn.Module) -> None:
        head: Any = model.lm_head
        live, head.weight = head.weight, old
        head.quant_method.process_weights_after_loading(head)
        head.weight = live

    vllm_worker.pack_tied_heads = pack_old


def left_behind(engine: Any) -> None:
    """The worker keeps what it has, and says that all went well."""
    for name in ("start_weight_update", "receive_weights", "finish_weight_update"):
        setattr(engine, name, lambda *_: None)


def half_way(engine: Any) -> None:
    """Loading raises when half of the tensors are there."""
    load = engine.model.load_weights
    engine.model.load_weights = lambda weights: load(_half(weights))


def _half(weights: Any) -> Any:
    for i, pair in enumerate(weights):
        if i == 10:
            raise RuntimeError("the second half is missing")
        yield pair
