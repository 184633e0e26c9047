"""The model of a run as the module that is traced: sources in, with scale, mean and std inside, and named outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ExportError
from emrun.base.types import Values
from emrun.base.wording import listed
from emrun.exports.comparison import Tensors, difference
from emrun.model import Target

_NOT_EXPORTED = ("loss", "example_weight", "loss_weight")
_IN_16_BITS = (torch.float16, torch.bfloat16)
PROBABILITY = "probability"
"""The output that has probabilities, instead of the output that the loss compares."""


class Program(Module):
    """Runs a model on the tensors of its sources, and returns its outputs without losses, none of them in 16 bits.

    Args:
        model: the model, without losses and metrics.
        stream: the name of a stream, for a model that asks.
        target: the output that becomes probabilities, and by which function; None for none.
    """

    def __init__(self, model: Any, stream: str, target: Target | None) -> None:
        super().__init__()
        self.module = model.module
        self._run = model.run
        self._stream = stream
        self._target = target
        self.absent: Mapping[str, Tensor] = {}
        """Inputs that change no output, which the program does not have: the model gets zeros of their kind."""

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs."""
        return self.chosen(self.returned(inputs))

    def returned(self, inputs: Tensors) -> Values:
        """Return all outputs of the model."""
        count = next(iter(inputs.values())).shape[0]
        absent = {name: torch.zeros((count, *each.shape[1:]), dtype=each.dtype) for name, each in self.absent.items()}
        outputs: Values = self._run({**inputs, **absent}, False, self._stream)
        return outputs

    def chosen(self, outputs: Values) -> dict[str, Tensor]:
        """Return those of the outputs of the model that the program returns.

        Raises:
            ExportError: an output is not a tensor.
        """
        found = {}
        for name, value in outputs.items():
            if isinstance(value, Tensor) and name not in _NOT_EXPORTED:
                found[name] = value.float() if value.dtype in _IN_16_BITS else value
            elif value is not None and name not in _NOT_EXPORTED:
                raise ExportError(
                    f"output {name!r} is a {type(value).__name__}, and a program returns tensors: return a tensor with "
                    "a row for each example from forward, or choose other outputs: model.outputs=[...]"
                )
        if self._target is not None:
            found[PROBABILITY] = _probability(found, self._target)
            del found[self._target.output]
        return found


def inputs_of(sources: Values) -> dict[str, Tensor]:
    """Return the sources of a batch as the inputs of a program, none of them in 16 bits.

    Raises:
        ExportError: a source is not a tensor.
    """
    found = {}
    for name, value in sources.items():
        if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
            raise ExportError(
                f"source {name!r} is a {type(value).__name__} that is not dense, and a program gets dense tensors; if "
                "only the loss needs the source, give its parameter of forward a default, such as None, and list the "
                "others: model.inputs=[...]"
            )
        found[name] = value.float() if value.dtype in _IN_16_BITS else value
    return found


def _probability(outputs: Mapping[str, Tensor], target: Target) -> Tensor:
    if target.output not in outputs:
        raise ExportError(f"--probabilities: there is no output {target.output!r} (there is {listed([*outputs])})")
    values = outputs[target.output].float()
    if target.activation == "sigmoid":
        return values.sigmoid()
    if target.activation == "softmax" and not (values.dim() > 1 and values.shape[1] > 1):
        what = f"softmax needs a number for each class, (B, C, ...), but {target.output!r} is {tuple(values.shape)}"
        raise ExportError(f"--probabilities: {what}; write --probabilities sigmoid, or leave it out")
    return values.softmax(1) if target.activation == "softmax" else values


def check_repeatable(program: Program, inputs: Tensors, allowed: Mapping[str, tuple[float, float]]) -> None:
    """Check that two runs on the same batch give the same outputs, and draw no random numbers.

    Raises:
        ExportError: they do not.
    """
    before = torch.get_rng_state()
    first = program(inputs)
    draws = not torch.equal(before, torch.get_rng_state())
    second = program(inputs)
    for name, (tolerance, _) in allowed.items():
        found = difference(first[name], second[name])
        if draws or found > tolerance:
            does = "draws random numbers" if draws else "keeps a state between calls"
            raise ExportError(
                f"forward {does} in evaluation{in_training(program.module)}: output {name!r} of two runs on one batch "
                f"differs by {found:.3g}; a program is a function of its inputs alone"
            )


def check_alone(program: Program, inputs: Tensors, allowed: Mapping[str, tuple[float, float]]) -> None:
    """Check that the outputs of an example do not depend on the other examples of its batch.

    Raises:
        ExportError: they do.
    """
    whole = program(inputs)
    alone = program({name: each[:1] for name, each in inputs.items()})
    count = len(next(iter(inputs.values())))
    for name, (tolerance, _) in allowed.items():
        if whole[name].shape[:1] == (count,) and alone[name].shape[:1] == (1,):
            found = difference(whole[name][:1], alone[name])
            if found > tolerance:
                raise ExportError(
                    f"forward calculates a statistic of the batch in evaluation{in_training(program.module)}: output "
                    f"{name!r} of an example alone differs by {found:.3g} from that in a batch, and {tolerance:.3g} is "
                    "allowed; use running statistics, as BatchNorm does, or those of the example"
                )


def in_training(module: Module) -> str:
    """Return which parts of a module behave in evaluation as in training, for messages."""
    names = [
        f"{name} ({type(each).__name__})"
        for name, each in module.named_modules()
        if name and (each.training or getattr(each, "track_running_stats", None) is False)
    ]
    return f" (as in training: {listed(names[:4])})" if names else ""
