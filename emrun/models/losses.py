"""Losses and metrics: what is calculated from outputs and sources, and the mean over the examples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.errors import ArgumentError, StreamError, add_inputs
from emrun.models.inputs import describe
from emrun.wording import did_you_mean, listed


class Calculation:
    """A loss or metric with the names of its inputs.

    Args:
        key: its key in the model's section.
        form: makes the object or function; its options are `inputs` and, of a loss, `scale`.
        device: where a loss that is a module goes.

    Raises:
        ArgumentError: it cannot be calculated.
    """

    def __init__(self, key: str, form: Any, device: torch.device) -> None:
        self.key = key
        if not callable(form):
            raise self._wrong(f"{form!r} is no form; write {{class: ..., inputs: [...]}}")
        options: Mapping[str, Any] = getattr(form, "options", {})
        self.inputs: Sequence[str] = options.get("inputs", ())
        self.scale = options.get("scale", 1.0)
        if not isinstance(self.inputs, list | tuple) or not self.inputs:
            raise self._wrong("'inputs' lists the outputs and sources it is called with, e.g. [logits, label]")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float):
            raise self._wrong(f"scale {self.scale!r} is no number")
        function = form()
        if isinstance(function, torch.nn.Module):
            function = function.to(device)
            if any(parameter.requires_grad for parameter in function.parameters()):
                raise self._wrong("it has parameters, which nothing would train or save; make it part of the module")
        if not callable(function):
            raise self._wrong(f"{type(function).__name__} cannot be called")
        self.function = function

    def _wrong(self, problem: str) -> ArgumentError:
        return ArgumentError(self.key.partition(".")[0], f"{self.key}: {problem}")

    def __call__(self, outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Any:
        """Return the loss or metric; what fails in it tells what it was called with."""
        arguments = []
        try:
            for name in self.inputs:
                arguments.append(outputs[name] if name in outputs else inputs[name])  # noqa: PERF401 - no slower call
        except KeyError as error:
            there = [*outputs, *inputs]
            message = f"model.{self.key} needs {error.args[0]!r}, which is neither an output nor a source"
            hint = did_you_mean(str(error.args[0]), there)
            raise StreamError(f"{message}{hint} (there is {listed(there)})", first_batch=True) from None
        try:
            return self.function(*arguments)
        except Exception as error:
            add_inputs(error, f"model.{self.key}", map(describe, self.inputs, arguments))
            raise


Calculations = Mapping[str, Calculation]
"""The losses or metrics by their names."""


def calculations(key: str, forms: Any, device: torch.device) -> Calculations:
    """Return the losses or metrics by their names.

    Args:
        key: `loss` or `metrics`.
        forms: a form, named `loss`, or name -> form.
        device: the model's.

    Raises:
        ArgumentError: one cannot be calculated, or has a name that it cannot have.
    """
    if forms is None:
        return {}
    if key == "loss" and callable(forms):
        return {"loss": Calculation("loss", forms, device)}
    if not isinstance(forms, Mapping):
        raise ArgumentError(key, f"{forms!r} is no form; write {{class: ..., inputs: [...]}}")
    if "loss" in forms:
        raise ArgumentError(key, "'loss' is the name of what is minimised; choose another name")
    return {name: Calculation(f"{key}.{name}", form, device) for name, form in forms.items()}


def mean_loss(outputs: Mapping[str, Any]) -> Tensor:
    """Return the mean of the output `loss` over the examples.

    Raises:
        StreamError: there is no tensor `loss`, or no weight for each of its examples.
    """
    loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        return mean(loss, outputs.get("example_weight"))
    if "loss" in outputs:
        kind = "NumPy array" if isinstance(loss, np.ndarray) else type(loss).__name__
        shown = "None" if loss is None else f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
        message = f"the output 'loss' is {shown}, not a tensor: forward must return a tensor with gradients"
        raise StreamError(f"{message}, without .item(), float() or .numpy()", first_batch=True)
    message = f"the outputs have no tensor 'loss', but {listed(list(outputs))}; return one from forward"
    raise StreamError(f"{message}, or set model.loss", first_batch=True)


def mean(loss: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over the examples, weighted if there are weights; a scalar is the mean already.

    Args:
        loss: of shape (B, ...), or a scalar.
        weights: of shape (B,).

    Raises:
        StreamError: the weights have another shape.
    """
    if loss.dim() == 0:
        return loss
    if weights is None:
        return loss.mean()
    per_example = loss.flatten(1).mean(dim=1) if loss.dim() > 1 else loss
    if weights.shape != per_example.shape:
        message = f"output 'example_weight' has shape {tuple(weights.shape)}, not {tuple(per_example.shape)}"
        raise StreamError(f"{message}: it is one number an example")
    return (per_example * weights).sum() / weights.sum()
