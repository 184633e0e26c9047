"""The device of a model, as the trace of a run has it."""

from __future__ import annotations

import torch

from emrun.model import AbstractModel


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
