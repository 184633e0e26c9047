"""The model of a run as the module that is traced: sources in, with scale, mean and std inside, and named outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ExportError
from emrun.base.sources import examples_of
from emrun.base.types import Json, Values
from emrun.base.wording import listed
from emrun.exports.comparison import Case, Tensors, difference
from emrun.model import Target

_NOT_EXPORTED = ("loss", "example_weight", "loss_weight")
PROBABILITY = "probability"
"""The output that has probabilities instead of what the loss compares."""


class Program(Module):
    """Runs a model on the tensors of its sources, and returns its outputs without losses.

    Args:
        model: the model, without losses and metrics.
        stream: the name of a stream, for a model that asks.
        paths: input -> the source, with the keys of a source that is a mapping.
        target: the output that becomes probabilities, and by which function; None for none.
    """

    def __init__(self, model: Any, stream: str, paths: Mapping[str, tuple[str, ...]], target: Target | None) -> None:
        super().__init__()
        self.module = model.module
        self._run = model.run
        self._stream = stream
        self._target = target
        self.paths = dict(paths)
        self.absent: dict[str, Tensor] = {}
        """Inputs that change no output, which the program does not have: the model gets zeros of this kind."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs.

        Args:
            inputs: input -> tensor.
        """
        found = dict(tensors_of(self.returned(inputs)))
        if self._target is not None:
            found = _with_probability(found, self._target)
        return {
            name: each.float() if each.dtype in (torch.float16, torch.bfloat16) else each
            for name, each in found.items()
        }

    def returned(self, inputs: Tensors) -> Values:
        """Return all that the model returns, with a loss."""
        count = next(iter(inputs.values())).shape[0]
        absent = {name: each.new_zeros((count, *each.shape[1:])) for name, each in self.absent.items()}
        batch: Json = {}
        for name, value in {**inputs, **absent}.items():
            *keys, last = self.paths[name]
            place = batch
            for key in keys:
                place = place.setdefault(key, {})
            place[last] = value
        returned: Values = self._run(batch, False, self._stream)
        return returned


def inputs_of(sources: Values) -> dict[str, tuple[tuple[str, ...], Tensor]]:
    """Return input -> the keys that lead to it and its tensor, of the sources of a batch.

    Raises:
        ExportError: a source is not a tensor.
    """
    found = {}
    for path, value in _leaves(sources, ()):
        name = ".".join(path)
        if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
            kind = "a nested or sparse tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ExportError(
                f"source {name!r} is {kind}, and a program gets dense tensors; if only the loss needs it, give its "
                "parameter of forward a default, such as None, and name the others in model.inputs=[...]"
            )
        found[name] = path, value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return found


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, (*path, str(key)))
    else:
        yield path, value


def tensors_of(outputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of outputs with its name, in mappings, lists and tuples by their keys and numbers, too."""
    entries = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    for key, value in entries:
        if not name and key in _NOT_EXPORTED:
            continue
        inner = f"{name}.{key}" if name else str(key)
        if isinstance(value, Tensor):
            yield inner, value
        elif isinstance(value, Mapping | list | tuple):
            yield from tensors_of(value, inner)


def left_out(outputs: Values, count: int) -> list[str]:
    """Return the names of outputs that are no tensors, and are not in a program.

    Raises:
        ExportError: an output is a list with an entry for each example.
    """
    found = []
    for name, value in outputs.items():
        if isinstance(value, list | tuple) and len(value) == count and not isinstance(value[0], Tensor):
            raise ExportError(
                f"output {name!r} is a list with an entry for each example, and a program returns tensors: return "
                "tensors with a row for each example from forward, or choose other outputs by model.outputs=[...]"
            )
        if not isinstance(value, Tensor | Mapping | list | tuple) and value is not None:
            found.append(name)
    return found


def _with_probability(outputs: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    values = outputs.get(target.output)
    if values is None:
        raise ExportError(f"--probabilities: there is no output {target.output!r} (there is {listed([*outputs])})")
    if target.activation == "softmax" and (values.dim() < 2 or values.shape[1] < 2):
        raise ExportError(
            f"--probabilities: softmax needs a number for each class, (B, C, ...), but {target.output!r} has the shape "
            f"{tuple(values.shape)}; write --probabilities sigmoid, or leave it out"
        )
    if target.activation == "softmax":
        values = values.float().softmax(1)
    elif target.activation == "sigmoid":
        values = values.float().sigmoid()
    return {PROBABILITY if name == target.output else name: each for name, each in outputs.items()} | {
        PROBABILITY: values
    }


def check_repeatable(program: Program, inputs: Tensors, tolerance: Mapping[str, tuple[float, float]]) -> None:
    """Check that two runs of the model on the same batch give the same outputs.

    Raises:
        ExportError: they differ.
    """
    before = torch.get_rng_state()
    first = program(dict(inputs))
    draws = not torch.equal(before, torch.get_rng_state())
    second = program(dict(inputs))
    for name, each in first.items():
        found = difference(each.numpy(), second[name].numpy())
        if found > (0.0 if draws else tolerance[name][0]):
            raise ExportError(
                f"output {name!r} differs between two runs on the same batch, by {found:.3g}: forward "
                f"{'draws random numbers' if draws else 'keeps a state'} in evaluation{_in_training(program.module)}; "
                "make it depend on its inputs alone"
            )


def check_examples_alone(
    cases: list[Case], count: int, tolerance: Mapping[str, tuple[float, float]], module: Module
) -> None:
    """Check that the output of the first example does not depend on the others of its batch.

    Args:
        cases: the whole batch, and the first example alone.
        count: the number of examples of the batch.
        tolerance: output -> what is allowed, and its largest value.
        module: the module, for the message.

    Raises:
        ExportError: it does.
    """
    whole, alone = cases
    for name, each in alone.outputs.items():
        if not each.dim() or each.shape[0] != 1 or whole.outputs[name].shape[0] != count or count < 2:
            continue
        found = difference(each.numpy(), whole.outputs[name][:1].numpy())
        if found > max(tolerance[name][0], tolerance[name][1] * 1e-4):
            raise ExportError(
                f"output {name!r} of an example depends on the others of its batch: alone it differs by {found:.3g}, "
                f"and {tolerance[name][0]:.3g} is allowed; a statistic of the batch is calculated in "
                f"evaluation{_in_training(module)}; use running statistics, as BatchNorm does, or those of the example"
            )


def _in_training(module: Module) -> str:
    """Return which parts of a module behave in evaluation as in training, for messages."""
    names = [
        f"{name} ({type(each).__name__})"
        for name, each in module.named_modules()
        if name and (each.training or getattr(each, "track_running_stats", True) is False)
    ]
    return f" (in {listed(names[:4])}, which are as in training)" if names else ""


def only_for_loss(program: Program, inputs: Tensors, optional: list[str]) -> list[str]:
    """Return those optional inputs, such as labels, without which the model returns the same but for a loss."""
    found = []
    for name in optional:
        fewer = {key: each for key, each in inputs.items() if key != name}
        try:
            with_all = program.returned(inputs)
            without = program.returned(fewer)
        except Exception:  # forward needs it after all
            continue
        outputs = dict(tensors_of(without))
        same = all(name in outputs and torch.equal(each, outputs[name]) for name, each in tensors_of(with_all))
        if same and with_all.get("loss") is not None and without.get("loss") is None:
            found.append(name)
    return found


def rows(inputs: Tensors, indices: list[int]) -> dict[str, Tensor]:
    """Return the rows of a batch with some indices, each as often as it is named."""
    return {name: each[indices] for name, each in inputs.items()}


def length_for_trace(inputs: Tensors) -> int:
    """Return a number of examples that is no other length of the inputs, so that no code takes one for the other."""
    taken = {size for each in inputs.values() for size in each.shape[1:]}
    return next(prime for prime in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if prime not in taken)


def of_rows(inputs: Tensors, count: int) -> dict[str, Tensor]:
    """Return a batch of so many examples, which are repeated as often as needed."""
    return rows(inputs, [row % examples_of(inputs) for row in range(count)])
