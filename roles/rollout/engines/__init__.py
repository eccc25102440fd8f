"""Engines by name. What an engine is stands in ``base.py``; importing this package imports no torch."""

from typing import TYPE_CHECKING, Any

from mesh.config import Config

if TYPE_CHECKING:
    from roles.rollout.engines.base import Engine


def load_engine(config: Config, device: str = "cpu", threads: int = 0) -> "tuple[Engine, Any]":
    """The engine of ``rollout.engine`` with dummy weights, not yet started, and the model's tokenizer.

    ``threads``: CPU threads where ``rollout.threads`` leaves them open. Raises ValueError naming the setting."""
    from roles.models import DTYPES, load_tokenizer
    from roles.rollout.engines.transformers import TransformersEngine, dummy_model, end_tokens
    from roles.starter import resolve

    kind = chosen(config)
    path, trust = resolve(config.model.path, config.run.seed), config.model.trust_remote_code
    wire = config.weights.wire_dtype if config.weights.wire_dtype != "auto" else config.model.dtype
    dtype = config.rollout.dtype if config.rollout.dtype != "auto" else wire
    threads = config.rollout.threads or threads
    try:
        tokenizer = load_tokenizer(path, config.model)
        eos = end_tokens(path, extra=[tokenizer.eos_token_id], trust_remote_code=trust)
        if kind == "transformers":
            model = dummy_model(path, dtype=DTYPES[dtype], device=device, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"model.path = {config.model.path} cannot be loaded: {str(e).splitlines()[0]}") from e
    if kind == "transformers":
        return TransformersEngine(model, eos=eos, max_batch=config.rollout.max_batch, threads=threads), tokenizer
    from roles.rollout.engines.vllm import VllmEngine, engine_args

    args = engine_args(config, path, dtype, cuda=device.startswith("cuda"))
    return VllmEngine(args, eos=eos, on_update=config.rollout.on_update, threads=threads), tokenizer


def chosen(config: Config) -> str:
    """The engine that ``rollout.engine`` means here. Raises ValueError where that one is not installed."""
    from roles.rollout.engines import vllm

    if config.rollout.engine == "auto":
        return "vllm" if vllm.installed().startswith(vllm.SUPPORTED) else "transformers"
    if config.rollout.engine == "vllm":
        vllm.require()
    return config.rollout.engine
