"""Traces a program by `torch.export`, and says which line of which part cannot be traced."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, RNNBase

from emrun.base.errors import ExportError
from emrun.base.wording import from_here, in_one_line, listed
from emrun.config.names import INSTALLED
from emrun.exports.comparison import Tensors
from emrun.exports.program import Program

_FIXED = re.compile(r"(?:\['([^']+)'\]\.size\(\)\[(\d+)\].*?)?specialized it to be a constant \((\d+)\)", re.DOTALL)
_LINE_OF_STACK = re.compile(r'File "(.+)", line (\d+)')
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


class Trace:
    """A traced program.

    Args:
        program: the program.
        inputs: a batch of more than one example.
        dynamic: input -> its dimensions that may have any length.

    Raises:
        ExportError: it cannot be traced, or a dimension cannot have any length.
    """

    def __init__(self, program: Program, inputs: Tensors, dynamic: Mapping[str, set[int]]) -> None:
        shapes = {name: dict.fromkeys(sorted(dynamic[name]), torch.export.Dim.DYNAMIC) for name in inputs}
        try:
            with quiet(), torch.no_grad():
                self.exported = torch.export.export(program, (dict(inputs),), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            raise _not_traceable(error, program.module) from error
        graph = self.exported.graph
        for node in list(graph.nodes):
            if "_assert_tensor_metadata" in str(node.target):  # of each conversion
                graph.erase_node(node)
        graph.eliminate_dead_code()  # such as a loss, which the program does not return
        nodes = {node.name: node for node in graph.nodes}
        signature = self.exported.graph_signature
        self._inputs = {name: nodes[each] for name, each in zip(inputs, signature.user_inputs, strict=True)}
        self._outputs = [nodes[str(each)].meta["val"] for each in signature.user_outputs]
        self.lengths: dict[str, str] = {}
        """Symbol of the trace -> the name of this length, such as `batch` or `tokens_1`."""
        for name in inputs:
            for number in sorted(dynamic[name]):
                symbol = str(self._inputs[name].meta["val"].shape[number])
                self.lengths.setdefault(symbol, f"{name}_{number}" if number else "batch")

    @property
    def unused(self) -> list[str]:
        """The inputs whose values change no output; their lengths may be asked for."""
        return [
            name for name, node in self._inputs.items() if all("sym_size" in str(user.target) for user in node.users)
        ]

    def shapes(self, outputs: Sequence[str]) -> tuple[dict[str, list[int | str]], dict[str, list[int | str]]]:
        """Return the shapes of the inputs and of the outputs, with the names of lengths."""

        def named(value: Any) -> list[int | str]:
            return [size if isinstance(size, int) else self.lengths.get(str(size), str(size)) for size in value.shape]

        inputs = {name: named(node.meta["val"]) for name, node in self._inputs.items()}
        return inputs, dict(zip(outputs, map(named, self._outputs), strict=True))

    @property
    def most(self) -> dict[str, int | None]:
        """Name of a length -> the largest one that the trace allows; None for no limit."""
        bounds = {
            self.lengths.get(str(name), str(name)): each.upper for name, each in self.exported.range_constraints.items()
        }
        return {
            name: int(upper) if str(upper).isdecimal() and upper < 2**60 else None for name, upper in bounds.items()
        }

    def save(self, file: Path) -> None:
        """Write a program of `torch.export`."""
        with quiet():
            torch.export.save(self.exported, file)

    def save_onnx(self, file: Path, outputs: Sequence[str]) -> int:
        """Write the program as ONNX, and return the version of its operators.

        Raises:
            ExportError: ONNX has no such operator.
        """
        try:
            with quiet():
                written: Any = torch.onnx.export(
                    self.exported,
                    dynamo=True,
                    verbose=False,
                    input_names=list(self._inputs),
                    output_names=list(outputs),
                )
        except Exception as error:
            raise self._no_onnx(error) from error
        graph = written.model.graph
        for value in (*graph.inputs, *graph.outputs):
            for number, length in enumerate(value.shape):
                if name := self.lengths.get(str(getattr(length, "value", length))):
                    value.shape[number] = name
        with quiet():
            written.save(str(file))
        return int(written.model.opset_imports[""])

    def _no_onnx(self, error: BaseException) -> ExportError:
        operators = _OPERATOR.findall("\n".join(map(str, _causes(error))))
        if not operators:
            return ExportError(f"the trace cannot be written as ONNX: {in_one_line(str(error).strip())}")
        nodes = [node for node in self.exported.graph.nodes if str(node.target) == operators[0]]
        files = _LINE_OF_STACK.findall("".join(str(node.meta.get("stack_trace")) for node in nodes[:1]))
        lines = [f" ({from_here(Path(file))}:{number})" for file, number in files if not _is_installed(Path(file))]
        advice = "write it by others, or export to torch-export; nothing is written"
        return ExportError(f"ONNX has no operator {operators[0]}{''.join(lines[-1:])}: {advice}")


def _not_traceable(error: Exception, module: Module) -> ExportError:
    text = str(error)
    place = _place(error, module)
    if fixed := _FIXED.search(text):
        name, number, length = fixed.groups()
        what = f"dimension {number} of input {name!r}" if name else "a dimension that may have any length"
        recurrent = [
            f"{key} ({type(each).__name__})" for key, each in module.named_modules() if isinstance(each, RNNBase)
        ]
        advice = "leave out --dynamic for it, or write forward for any length"
        if number == "0":
            advice = "write forward for any number of examples, with x.shape[0] instead of len(x)"
        elif recurrent:
            advice = f"torch exports {listed(recurrent)} for one length of time only; leave out --dynamic for it"
        return ExportError(f"the trace fixes {what} to {length}{place}: {advice}; nothing is written")
    if "data-dependent" in text:
        return ExportError(
            f"forward decides by the values of a tensor{place}, and a program has no such branch: write torch.where, "
            "or another operation on tensors, instead of an if, a loop or .item(); nothing is written"
        )
    reason = in_one_line(text.strip().partition("\n")[0])
    return ExportError(f"the model cannot be traced{place}: {type(error).__name__}: {reason}; nothing is written")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what has caused it, the cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _place(error: BaseException, module: Module) -> str:
    """Return which part of a module, and which line of the user's code, an error came from, for messages."""
    names = {id(each): name for name, each in module.named_modules()}
    part = line = ""
    for cause in _causes(error):
        for frame, number in traceback.walk_tb(cause.__traceback__):
            owner = id(frame.f_locals.get("self"))
            if owner in names:
                part = f"{names[owner] or 'module'} ({type(frame.f_locals['self']).__name__})"
                file = Path(frame.f_code.co_filename)
                if file.is_file() and not _is_installed(file):
                    text = traceback.FrameSummary(str(file), number, "").line
                    line = f", {from_here(file)}:{number}: {text}"
    return f" in {part}{line}" if part else ""


def _is_installed(file: Path) -> bool:
    return any(file.is_relative_to(home) for home in INSTALLED) or "emrun" in file.parts[-4:-1]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch and ONNX print and log about a trace out of the output of the command."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
