"""Environment that must stand before torch is imported. Imports no torch, so that a launcher can call it first."""

import os

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # a failed collective frees its communicator; 1 and 3 end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor ends a process whose collective waits for a dead peer
}
"""With torch's own values the death of one peer takes its survivors down with it."""


def set_nccl_environment() -> list[str]:
    """Set them, whatever stood there: the mesh's promises rest on them. Returns a line for each value replaced."""
    replaced = []
    for name, value in NCCL_ENVIRONMENT.items():
        if os.environ.get(name, value) != value:
            replaced.append(f"{name}={os.environ[name]} replaced by {value}: a dead peer must not end the others")
        os.environ[name] = value
    return replaced
