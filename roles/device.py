"""Where a peer computes, and by which backend its groups talk."""

import torch

from mesh.launch import Launch


def device_of(launch: Launch) -> str:
    """``cuda:N`` for the GPU that belongs to this process, else ``cpu``."""
    if launch.device_index is None or not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{launch.device_index % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def backend_of(setting: str, device: str) -> str:
    """``weights.backend`` resolved: NCCL where weights are on GPUs, gloo otherwise. All peers of a run must agree; the
    formation's roll-call refuses a difference by name."""
    if setting == "auto":
        return "nccl" if device.startswith("cuda") else "gloo"
    if setting == "nccl" and not device.startswith("cuda"):
        raise ValueError('weights.backend = "nccl" needs a GPU and there is none here; use "gloo" or "auto"')
    return setting
