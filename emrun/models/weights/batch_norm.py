"""The running statistics of BatchNorm, calculated anew for other weights than those that were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from emrun.models.modes import in_mode


@contextmanager
def calculated_anew(module: Module) -> Iterator[None]:
    """Replace the running statistics by means over the batches on which the module runs in this block.

    The module is in training mode, as in `torch.optim.swa_utils.update_bn`. BatchNorm that is in evaluation mode while
    the rest is trained, because it is frozen, keeps its statistics. Afterwards, all other buffers are as before;
    the statistics are too after an error, and in parts that the module did not use.
    """
    with nullcontext() if module.training else in_mode(module, train=True):
        momenta = {
            part: part.momentum
            for part in module.modules()
            if isinstance(part, _BatchNorm) and part.track_running_stats and part.training
        }
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        new: set[int] = set()
        try:
            for part in momenta:
                part.reset_running_stats()
            _set_momenta(dict.fromkeys(momenta))  # None is the mean of all batches, with equal weights
            yield
            used = [part for part in momenta if part.num_batches_tracked]
            new = {id(buffer) for part in used for buffer in part.buffers(recurse=False)}
        finally:
            _set_momenta(momenta)
            with torch.no_grad():
                for buffer, values in before:
                    if id(buffer) not in new:
                        buffer.copy_(values)


def _set_momenta(momenta: Mapping[_BatchNorm, float | None]) -> None:
    for part, momentum in momenta.items():
        part.momentum = momentum
