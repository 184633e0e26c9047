"""The device of a model, as the trace of a run has it."""

from __future__ import annotations

import torch

from emrun.model import AbstractModel


def unused_gpu(model: AbstractModel) -> str | None:
    """Return what to say of a model on the CPU of a machine with a GPU; None for nothing."""
    device = getattr(model, "device", None)
    if not isinstance(device, torch.device) or device.type != "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return f"the model is trained on the CPU, and the GPU ({name}) is not used; model.device=auto takes the GPU"


def device_of(model: AbstractModel) -> str | None:
    """Return the device of a model with what its results may depend on: `cpu, 4 threads`, `cuda:0, NVIDIA H200`.

    None if the model does not say.
    """
    found = getattr(model, "device", None)
    if not isinstance(found, torch.device):
        return None
    if found.type == "cpu":
        count = torch.get_num_threads()
        return f"cpu, {count} thread{'s' * (count > 1)}"
    if found.type == "cuda":
        return f"{found}, {torch.cuda.get_device_name(found)}"
    return str(found)
