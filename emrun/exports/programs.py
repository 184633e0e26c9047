"""Write a program: trace the model of a run, compare the program with the model outside of emrun, describe it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from emrun import __version__
from emrun.base.errors import ExportError, HookError, MissingExtra, UsageError
from emrun.base.preparations import named_classes
from emrun.base.types import Json
from emrun.base.wording import counted, meant_of
from emrun.config.import_finder import locate
from emrun.exports.card import card_of
from emrun.exports.comparison import Case, Tensors, compare, run_outside, tolerances
from emrun.exports.folder import describe, names_in, new_folder
from emrun.exports.formats import Export, Options
from emrun.exports.identity import run_identity
from emrun.exports.measured import Measured, measure
from emrun.exports.program import Program, check_alone, check_repeatable, in_training, inputs_of
from emrun.exports.tracing import Trace
from emrun.hook import AbstractHook
from emrun.model import AbstractModel, Target

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LENGTHS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def write_onnx(options: Options) -> Export:
    """Write `model.onnx` with its description into a folder; see `emrun.export`."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("an export to onnx", package, "export")
    return _write(options, "model.onnx")


def write_torch_export(options: Options) -> Export:
    """Write `model.pt2`, a program of `torch.export`, with its description into a folder; see `emrun.export`."""
    return _write(options, "model.pt2")


@torch.no_grad()
def _write(options: Options, name: str) -> Export:
    # the model on the stream
    measured = measure(options)
    model = measured.training.model
    module = _module_of(model)
    is_16_bits = getattr(model, "precision", 32) in ("bf16", "fp16")
    is_16_bits |= any(each.dtype in (torch.float16, torch.bfloat16) for each in module.parameters())
    model.without_measures()
    if options.to == "onnx" and is_16_bits:
        model.without_autocast()  # type: ignore[attr-defined]  # onnxruntime has no such operators on the CPU
    module.eval()

    # the inputs, and the program as a module
    batches = [inputs_of(model.program_inputs(batch)) for batch in measured.batches]  # type: ignore[attr-defined]
    first = batches[0]
    if not first:
        raise ExportError("the model gets no source of the stream, so that a program has no input")
    if _count(first) == 1:
        alike = [each for each in batches if all(each[key].shape == first[key].shape for key in first)]
        first = {key: torch.cat([each[key] for each in alike]) for key in first}
    dynamic = _dynamic(options.dynamic, batches)
    program = Program(model, measured.stream, _target(options, model))

    # the cases: what the evaluation gave for batches of the stream, and what the model gives for other lengths
    returned = program.returned(first)
    cases = []
    for number, (batch, inputs) in enumerate(zip(measured.batches, batches, strict=True)):
        outputs = program.chosen({key: batch[key] for key in returned if key in batch})
        cases.append(Case(inputs, outputs, f"batch {number} of stream {measured.stream!r}"))
    if not cases[0].outputs:
        raise ExportError("forward returns nothing but a loss; return what the loss is calculated of, too")
    cases += _other_lengths(program, first, dynamic)
    allowed = tolerances(cases, options.tolerance, is_16_bits=is_16_bits)
    check_repeatable(program, first, allowed)

    with new_folder(options.place) as folder:
        # the trace, without inputs that change nothing, such as labels of which forward calculates a loss
        length = next(each for each in _LENGTHS if all(each not in tensor.shape[1:] for tensor in first.values()))
        example = _rows(first, length)
        trace = Trace(program, example, dynamic)
        if unused := trace.unused:
            program.absent = {key: example[key] for key in unused}
            cases = [case._replace(inputs=_without(case.inputs, unused)) for case in cases]
            example = _without(example, unused)
            if not example:
                raise ExportError("no output depends on an input of the model")
            trace = Trace(program, example, dynamic)
        check_alone(program, first, allowed)
        names = list(cases[0].outputs)
        versions: Json = {"emrun": __version__, "torch": importlib.metadata.version("torch")}
        versions["python"] = platform.python_version()
        if options.to == "onnx":
            versions |= {each: importlib.metadata.version(each) for each in _PACKAGES}
            versions["opset"] = trace.save_onnx(folder / name, names)
        else:
            trace.save(folder / name)

        # the comparison
        differences = compare(cases, run_outside(folder / name, options.to, cases), allowed)

        # the description
        shapes = trace.shapes(names)
        comparison: Json = {
            "stream": measured.stream,
            "batches": [{"examples": _count(case.inputs), "what": case.what} for case in cases],
            "differences": {key: each._asdict() for key, each in differences.items()},
        }
        run = run_identity(measured.run, measured.checkpoint, options.overrides)
        facts: Json = {
            "format": 1,
            "kind": options.to,
            "program": name,
            "inputs": [{"name": key, "dtype": _dtype(each), "shape": shapes[0][key]} for key, each in example.items()],
            "outputs": [
                {"name": key, "dtype": _dtype(each), "shape": shapes[1][key]} for key, each in cases[0].outputs.items()
            ],
            "longest": trace.most,
            "not_needed": unused,
            **described_data(measured),
            "versions": versions,
            "comparison": comparison,
            "run": run,
        }
        describe(folder, facts, card_of(measured, options.license, facts))
        files = names_in(folder)
    what = f"{counted(len(cases), 'batch', 'es')} of stream {measured.stream!r}"
    lines = [f"outside of emrun, on {what}, the outputs differ from those of the model at most by:"]
    lines += [
        f"  {key}: {each.largest:.3g} of {each.largest_value:.3g}, the largest value ({each.tolerance:.3g} is allowed)"
        for key, each in differences.items()
    ]
    return Export(options.place, files, {"comparison": comparison, "run": run}, lines)


def _module_of(model: AbstractModel) -> Module:
    kind = type(model).__name__
    module = getattr(model, "module", None)
    if not isinstance(module, Module) or not hasattr(model, "program_inputs"):
        raise ExportError(f"a model of class {kind} has no module to trace: a program is made of a TorchModel")
    if (device := getattr(model, "device", torch.device("cpu"))).type != "cpu":
        raise ExportError(f"the model is on {device}, and programs are made on the CPU: set CUDA_VISIBLE_DEVICES=")
    return module


def _dynamic(given: Sequence[str], batches: Sequence[Tensors]) -> dict[str, set[int]]:
    """Return input -> its dimensions of any length: that of the batch, and those that `--dynamic` names.

    Raises:
        UsageError: there is no such input or dimension.
        ExportError: another dimension has several lengths in the batches.
    """
    first = batches[0]
    found = {name: {0} for name in first}
    for each in given:
        name, _, dimension = each.rpartition(":")
        if name not in first:
            what = f"there is no input {name!r}{meant_of(name, first)}; write NAME:DIMENSION"
            raise UsageError(f"--dynamic: {each!r}: {what}")
        if dimension not in map(str, range(1, first[name].dim())):
            shape = tuple(first[name].shape)
            raise UsageError(f"--dynamic: {each!r}: {name!r} has the shape {shape}; dimension 0 is that of the batch")
        found[name].add(int(dimension))
    for name, dimensions in found.items():
        for number in set(range(1, first[name].dim())) - dimensions:
            lengths = sorted({each[name].shape[number] for each in batches if each[name].dim() == first[name].dim()})
            if len(lengths) > 1:
                raise ExportError(
                    f"input {name!r} has lengths from {lengths[0]} to {lengths[-1]} in dimension {number}, and a "
                    f"program takes one; write --dynamic {name}:{number}"
                )
    return found


def _target(options: Options, model: AbstractModel) -> Target | None:
    """Return which output becomes probabilities, and how."""
    if not options.probabilities:
        return None
    try:
        found = locate("emrun.hooks._shared.probabilities.target_of")(model.targets, options.probabilities, None)
    except HookError as error:
        raise ExportError(str(error)) from error
    return found or Target("", "logits", None, str(options.probabilities))


def _other_lengths(program: Program, first: Tensors, dynamic: Mapping[str, set[int]]) -> list[Case]:
    """Return cases with another number of examples, with one, and with other lengths of dynamic dimensions.

    Raises:
        ExportError: the model itself fails on them.
    """
    count = _count(first)
    found = {
        f"{(other := count - 1 if count > 2 else count + 1)} examples": _rows(first, other),
        "one example": _rows(first, 1),
    }
    shorter = dict(first)
    for name, dimensions in dynamic.items():
        for number in dimensions - {0}:
            shorter[name] = shorter[name].narrow(number, 0, (first[name].shape[number] + 1) // 2).contiguous()
            found["shorter inputs"] = shorter
    cases = []
    for what, inputs in found.items():
        try:
            cases.append(Case(inputs, program(inputs), what))
        except Exception as error:
            parts = in_training(program.module)
            raise ExportError(f"the model fails on {what}, which a program must take{parts}: {error}") from error
    return cases


def _rows(inputs: Tensors, count: int) -> dict[str, torch.Tensor]:
    """Return a batch of so many examples, which are repeated as often as needed."""
    return {name: each[[row % len(each) for row in range(count)]] for name, each in inputs.items()}


def _count(inputs: Tensors) -> int:
    return len(next(iter(inputs.values())))


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: each for key, each in values.items() if key not in names}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def described_data(measured: Measured) -> Json:
    """Return the names of the classes, and what happens to the data before a program and in it."""
    training = measured.training
    names = named_classes(training.dataset) or {}
    classes = {str(key): list(map(str, each)) for key, each in names.items()} if isinstance(names, Mapping) else None
    hooks = [type(each) for each in training.main_loop.hooks]
    return {
        "classes": list(map(str, names)) if classes is None else classes,
        "preparation": {
            "before": training.prepared.made,
            "hooks": [each.__name__ for each in hooks if each.before_batch is not AbstractHook.before_batch],
            "inputs": measured.in_config("model", "inputs"),
        },
    }
