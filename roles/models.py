"""A causal language model and its tokenizer by ``model.path``: a directory, or a hub id.
One clear line when there is none.

Safetensors only, and no code from the directory unless ``model.trust_remote_code`` says so.
"""

import hashlib
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError

from mesh.config import Config, Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(path: str, settings: Model) -> torch.nn.Module:
    """A transformers causal language model from a directory or a hub id, master dtype, safetensors only.

    Every tensor must be in the files: one that is missing would silently start at random."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[settings.dtype],
            trust_remote_code=settings.trust_remote_code,
            local_files_only=only_local(path),
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as e:
        raise _unusable(settings, e) from e
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f'model.path = "{settings.path}" lacks {len(missing)} tensors of its architecture, such as {missing[0]}; '
            "point model.path at complete weights"
        )
    generation = getattr(model, "generation_config", None)
    if generation is not None and not generation.do_sample:
        generation.do_sample = True  # with sampling settings but without this, saving raises at the end of the run
    return model


def load_tokenizer(path: str, settings: Model):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=settings.trust_remote_code, local_files_only=only_local(path)
        )
    except (OSError, ValueError, ImportError) as e:
        raise _unusable(settings, e) from e


IDENTITY = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files of a model that its peers must have alike: they decide the tensors' shapes, what a token means, and what a
prompt looks like. Weights are compared elsewhere, tensor by tensor."""

UNIMPORTANT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # what a library writes about itself


def files_digest(config: Config) -> str:
    """A digest, 16 hexadecimal digits, of what ``IDENTITY`` lists of the model at ``model.path``. To be asked once the
    model is loaded: a hub's files are in the cache then."""
    from transformers.utils import cached_file

    from roles.starter import resolve

    path = resolve(config.model.path, config.run.seed)
    digest = hashlib.blake2b(digest_size=8)
    for name in IDENTITY:
        found = cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            digest.update(f"{name}\0".encode() + _without_the_unimportant(Path(found)))
    return digest.hexdigest()


def _without_the_unimportant(path: Path) -> bytes:
    data = path.read_bytes()
    if not path.name.endswith("config.json"):
        return data
    tree = json.loads(data)
    return json.dumps({k: v for k, v in tree.items() if k not in UNIMPORTANT}, sort_keys=True).encode()


def only_local(path: str) -> bool:
    """Whether to keep to local files and not ask the hub. Its client retries for most of a minute before it falls back
    to its cache or says that there is no network; one attempt to connect tells the same."""
    from huggingface_hub import constants

    if Path(path).is_dir():
        return True
    if getproxies().get("https") or getproxies().get("all"):
        return False  # the proxy may reach what this machine cannot
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5.0).close()
    except OSError:
        return True
    return False


def _unusable(settings: Model, error: Exception) -> ValueError:
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "trust_remote_code" in text:
        advice = "it brings its own code; if you trust it, set model.trust_remote_code = true"
    else:
        advice = (
            "set model.path to a directory with config.json, tokenizer and *.safetensors, to a hub id this machine can "
            "reach (or has cached), or to starter:sort"
        )
    return ValueError(f'model.path = "{settings.path}" cannot be loaded: {first} - {advice}')
