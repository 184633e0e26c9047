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

from emrun.base.errors import ExportError, UsageError
from emrun.base.wording import from_here, in_one_line, listed, meant_of
from emrun.config.names import INSTALLED
from emrun.exports.comparison import Tensors
from emrun.exports.program import Program

_LOG = logging.getLogger(__name__)
_CONSTANT = re.compile(r"\['([^']+)'\]\.size\(\)\[(\d+)\].*?constant \((\d+)\)", re.DOTALL)
_MARKED = re.compile(r"constant \((\d+)\)")
_NO_OPERATOR = re.compile(r"op(?:erator)?='?([\w:.]+)'?|OpOverload\(op='([\w.]+)'")
_NOISY = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "torch.fx",
    "torch._dynamo",
    "onnxscript",
    "onnx_ir",
    "onnxruntime",
)


def dynamic_dimensions(given: Sequence[str], inputs: Tensors) -> dict[str, set[int]]:
    """Return input -> its dimensions of any length: that of the batch, and what `--dynamic` names.

    Raises:
        UsageError: there is no such input or dimension.
    """
    found = {name: {0} for name in inputs}
    for each in given:
        name, colon, number = each.rpartition(":")
        if not colon or not number.isdecimal():
            raise UsageError(f"--dynamic: {each!r} is not NAME:DIMENSION, such as {next(iter(inputs))}:1")
        if name not in inputs:
            raise UsageError(f"--dynamic: the program has no input {name!r}{meant_of(name, inputs)}")
        most = inputs[name].dim() - 1
        if not 1 <= int(number) <= most:
            allowed = f"from 1 to {most}" if most > 1 else "1" if most else "none: it has only that of the batch"
            raise UsageError(
                f"--dynamic: {each!r}: input {name!r} has the dimensions {allowed}; 0 is that of the batch"
            )
        found[name].add(int(number))
    return found


def trace(program: Program, inputs: Tensors, dynamic: Mapping[str, set[int]]) -> torch.export.ExportedProgram:
    """Return a program of `torch.export`.

    Raises:
        ExportError: it cannot be traced, or a dimension cannot have any length.
    """
    shapes = {
        name: dict.fromkeys(sorted(dimensions), torch.export.Dim.DYNAMIC)
        for name, dimensions in dynamic.items()
        if name in inputs
    }
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(program, (dict(inputs),), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:
        raise _not_traceable(error, program.module, dynamic) from error


def _not_traceable(error: Exception, module: Module, dynamic: Mapping[str, set[int]]) -> ExportError:
    text = str(error)
    place = _place(error, module)
    recurrent = [
        f"{name} ({type(each).__name__})" for name, each in module.named_modules() if isinstance(each, RNNBase)
    ]
    if _MARKED.search(text):
        by_name = _CONSTANT.search(text)
        where = (
            f"dimension {by_name[2]} of input {by_name[1]!r}" if by_name else "a dimension that should have any length"
        )
        length = by_name[3] if by_name else _MARKED.findall(text)[0]
        is_batch = by_name is not None and by_name[2] == "0"
        advice = (
            "write forward for any number of examples"
            if is_batch
            else "leave out --dynamic for it, or write forward for any length"
        )
        if recurrent and not is_batch:
            advice = f"torch cannot export {listed(recurrent)} with any length of time; leave out --dynamic for it"
        return ExportError(f"the trace fixes {where} to {length}{place}: {advice}; nothing is written")
    if "data-dependent" in text or "data dependent" in text or "Dynamic control flow" in text:
        return ExportError(
            f"forward decides by the values of a tensor{place}, and a program has no such branch: write torch.where, "
            "or another operation on tensors, instead of an if, a loop or .item(); nothing is written"
        )
    reason = in_one_line(next(iter(text.strip().splitlines()), type(error).__name__))
    return ExportError(f"the model cannot be traced{place}: {type(error).__name__}: {reason}; nothing is written")


def _place(error: BaseException, module: Module) -> str:
    """Return where in the user's code, or in which part of the module, an error came from, for messages."""
    names = {id(each): name for name, each in module.named_modules()}
    part = line = ""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        for frame, number in traceback.walk_tb(cause.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, Module) and id(owner) in names and names[id(owner)]:
                part = f"part {names[id(owner)]!r} ({type(owner).__name__})"
            file = Path(frame.f_code.co_filename)
            if isinstance(owner, Module) and file.is_file() and not _is_installed(file):
                text = traceback.FrameSummary(str(file), number, frame.f_code.co_name).line
                line = f"{from_here(file)}:{number}: {text}"
                part = part or f"the module ({type(owner).__name__})"
        cause = cause.__cause__ or cause.__context__
    found = ", ".join(each for each in (part, line) if each)
    return f" ({found})" if found else ""


def _is_installed(file: Path) -> bool:
    return any(file.is_relative_to(home) for home in INSTALLED) or "emrun" in file.parts[-4:-1]


def unused_inputs(traced: torch.export.ExportedProgram, names: Sequence[str]) -> list[str]:
    """Return those inputs whose values change no output; their lengths may be asked for."""
    kept = [spec.arg.name for spec in traced.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    found = []
    for name, argument in zip(names, kept, strict=True):
        users = [user for user in nodes[argument].users if "sym_size" not in str(user.target)]
        if not users:
            found.append(name)
    return found


def symbols(
    traced: torch.export.ExportedProgram, dynamic: Mapping[str, set[int]]
) -> dict[str, tuple[str, int, int | None]]:
    """Return symbol of the trace -> the name of the length, and the least and the largest one that the trace allows."""
    kept = [spec.arg.name for spec in traced.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    ranges = {str(symbol): bounds for symbol, bounds in traced.range_constraints.items()}
    found: dict[str, tuple[str, int, int | None]] = {}
    for (name, dimensions), argument in zip(dynamic.items(), kept, strict=True):
        for number in sorted(dimensions):
            symbol = str(nodes[argument].meta["val"].shape[number])
            bounds = ranges.get(symbol)
            least, most = (0, None) if bounds is None else (int(bounds.lower), _finite(bounds.upper))
            found.setdefault(symbol, ("batch" if number == 0 else f"{name}_{number}", least, most))
    return found


def _finite(bound: Any) -> int | None:
    return int(bound) if str(bound).isdecimal() and int(bound) < 2**62 else None


def save_onnx(
    traced: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    file: Path,
    lengths: Mapping[str, str],
) -> int:
    """Write a traced program as ONNX, and return the version of its operators.

    Args:
        traced: the program.
        inputs: the names of the inputs.
        outputs: the names of the outputs.
        file: the file.
        lengths: symbol of the trace -> the name that the length gets.

    Raises:
        ExportError: ONNX has no such operator.
    """
    try:
        with quiet():
            written: Any = torch.onnx.export(
                traced, dynamo=True, verbose=False, input_names=list(inputs), output_names=list(outputs)
            )
    except Exception as error:
        raise _no_onnx(error, traced) from error
    graph = written.model.graph
    for value in (*graph.inputs, *graph.outputs):
        for number, length in enumerate(value.shape or ()):
            if name := lengths.get(str(getattr(length, "value", length))):
                value.shape[number] = name
    with quiet():
        written.save(str(file))
    return int(written.model.opset_imports.get("", 0))


def _no_onnx(error: Exception, traced: torch.export.ExportedProgram) -> ExportError:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    for node in traced.graph.nodes:
        operator = str(node.target)
        if node.op == "call_function" and any(operator in text and "No ONNX function" in text for text in texts):
            parts = [name for name, _ in dict(node.meta.get("nn_module_stack") or {}).values()]
            files = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
            own = [f"{from_here(Path(file))}:{line}" for file, line in files if not _is_installed(Path(file))]
            where = ", ".join([*parts[-1:], *own[-1:]])
            return ExportError(
                f"ONNX has no operator {operator}{f' ({where})' if where else ''}: write it by others, or export to "
                "torch-export; nothing is written"
            )
    reason = in_one_line(next(iter(texts[-1].strip().splitlines()), type(error).__name__))
    return ExportError(f"the trace cannot be written as ONNX: {reason}; nothing is written")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch and ONNX print and log about a trace out of the output of the command."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
