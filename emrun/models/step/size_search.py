"""Errors that say that the memory is full, and the number of examples of a part that needs less."""

from __future__ import annotations

import gc

import torch

ADVICE = "set model.recompute, take a smaller module, or shorten the examples"
_FULL = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")  # in errors of PyTorch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of a device, or of the machine, is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def free(device: torch.device) -> None:
    """Give back the memory of a device that nothing uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def advise(error: BaseException, size: int | None, examples: int) -> None:
    """Add a note to an out-of-memory error of a train step: which `micro_batch_size` needs less memory.

    Args:
        error: any error.
        size: the current size; None without one.
        examples: the number of examples of the batch.
    """
    if not is_out_of_memory(error):
        return
    largest = examples if size is None else -(-examples // -(-examples // size))  # of parts that are nearly equal
    error.add_note(
        f"the train step ran on {largest} examples at once; with model.micro_batch_size={largest // 2} it needs "
        "less memory, and the gradients are those of the whole batch"
        if largest > 1
        else f"not even one example fits into the memory; {ADVICE}"
    )
