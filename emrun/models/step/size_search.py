"""Finds how many examples of a batch fit into the memory in a train step, on a copy of the model."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch

from emrun.base.errors import ArgumentError, reason_of
from emrun.base.randomness import preserved_randomness
from emrun.models.optimizer import Step

_LOG = logging.getLogger(__name__)

_STEPS = 2  # an optimizer makes its state in the first step, so the second one needs more memory
# attributes of a model that its copy for the search does not have
_NOT_COPIED = ("_main_loop", "write_setting", "_stream_metrics", "_evaluation_weights", "load_initial", "_before")
_FULL = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")  # in errors of PyTorch
_ADVICE = "set model.recompute, take a smaller module, or shorten the examples"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of a device, or of the machine, is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def find_size(model: Any, inputs: Mapping[str, Any], examples: int) -> int:
    """Return the largest part of a batch that fits, found by halving; the model and the random states do not change.

    The train step runs on a copy of the model and its optimizer, so that the memory has one more copy of the weights
    than in the run. Hooks are not called.

    Args:
        model: a `TorchModel` with a train stream.
        inputs: source name -> tensor of the first batch.
        examples: the number of examples of the batch.

    Raises:
        ArgumentError: not even one example fits, or the model cannot be copied.
        BaseException: any other error of the train step.
    """
    size = examples
    with preserved_randomness():
        twin = _twin(model)
        while not _fits(twin, inputs, size):
            if size == 1:
                device = "" if model.device.type == "cpu" else f" of {model.device}"
                message = f"auto: not even one example fits into the memory{device} in a train step; {_ADVICE}"
                raise ArgumentError("micro_batch_size", message)
            size //= 2
        del twin
        _free(model.device)
    _LOG.info("model.micro_batch_size: %d, found with the first batch of %d examples", size, examples)
    return size


def _twin(model: Any) -> Any:
    """Return a copy of a model, outside of its main loop."""
    kept: dict[int, Any] = {id(getattr(model, name)): None for name in _NOT_COPIED}
    kept |= {id(each): each for each in (model._prefetcher, None)}
    try:
        twin = copy.deepcopy(model, kept)
    except Exception as error:
        why = "does not fit into the memory" if is_out_of_memory(error) else f"failed: {reason_of(error)}"
        message = f"auto needs a copy of the model, which {why}; set a number instead of auto"
        raise ArgumentError("micro_batch_size", message) from error
    twin._looks = twin._weighs
    for each in twin._optimizers.members:
        each.scheduler, each.step = None, Step.of(each.optimizer)
    return twin


def _fits(twin: Any, inputs: Mapping[str, Any], size: int) -> bool:
    """Return whether the memory suffices for train steps of a copy with parts of a size."""
    twin._parts.size = size
    try:
        for _ in range(_STEPS * twin.iterations_per_update):
            twin._step.run(twin.train_step, inputs, inputs)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            error.add_note(
                f"while micro_batch_size: auto tried parts of {size} examples on a copy of the model that has no main "
                "loop; a number instead of auto needs no copy"
            )
            raise
    finally:
        twin._updates.forget()
        twin.step_outputs = None
    _free(twin.device)  # after the error, whose traceback holds tensors
    return False


def _free(device: torch.device) -> None:
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
        else f"not even one example fits into the memory; {_ADVICE}"
    )
