"""Write a program: trace the model of a run, compare the program with the model outside of emrun, describe it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from emrun.base.errors import ExportError, HookError, MissingExtra
from emrun.base.preparations import named_classes
from emrun.base.sources import examples_of
from emrun.base.types import Json
from emrun.base.wording import counted, listed
from emrun.config.import_finder import locate
from emrun.exports.card import card_of
from emrun.exports.comparison import (
    Case,
    Difference,
    Tensors,
    compare,
    difference,
    refuse,
    run_outside,
    tolerances,
)
from emrun.exports.folder import describe, names_in, new_folder
from emrun.exports.formats import Export, Options
from emrun.exports.identity import run_identity
from emrun.exports.measured import Measured, measure
from emrun.exports.program import (
    Program,
    check_examples_alone,
    check_repeatable,
    inputs_of,
    left_out,
    length_for_trace,
    of_rows,
    only_for_loss,
    rows,
    tensors_of,
)
from emrun.exports.tracing import dynamic_dimensions, quiet, save_onnx, symbols, trace, unused_inputs
from emrun.hook import AbstractHook
from emrun.model import AbstractModel, Target

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(options: Options) -> Export:
    """Write `model.onnx` with its description into a folder; see `emrun.export`."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("an export to onnx", package, "export")
    return _write(options, "model.onnx")


def write_torch_export(options: Options) -> Export:
    """Write `model.pt2`, a program of `torch.export`, with its description into a folder; see `emrun.export`."""
    return _write(options, "model.pt2")


def _write(options: Options, name: str) -> Export:
    # the model on the stream
    measured = measure(options)
    model: Any = measured.training.model
    _check_model(model)
    model.without_measures()
    module: Module = model.module
    module.eval()
    is_16_bits = getattr(model, "precision", 32) in ("bf16", "fp16")
    is_16_bits |= any(each.dtype in (torch.float16, torch.bfloat16) for each in module.parameters())

    # the program, as a module
    sources = [inputs_of(model.program_inputs(batch)) for batch in measured.batches]
    batches: list[dict[str, Any]] = [{key: tensor for key, (_, tensor) in each.items()} for each in sources]
    paths = {key: path for each in sources for key, (path, _) in each.items()}
    first = batches[0]
    if examples_of(first) < 2:
        alike = [each for each in batches if _trailing(each) == _trailing(first)]
        first = {key: torch.cat([each[key] for each in alike]) for key in first}
    with torch.no_grad():
        program = Program(model, measured.stream, paths, _target(options, model, first, measured))
        labels = {each.source for each in model.targets}
        optional = [key for key in first if paths[key][0] in model.optional_input_names]
        dropped = {key for key in optional if paths[key][0] in labels}
        dropped |= set(only_for_loss(program, first, [key for key in optional if key not in dropped]))
        batches = [{key: each for key, each in batch.items() if key not in dropped} for batch in batches]
        first = {key: each for key, each in first.items() if key not in dropped}
        if not first:
            raise ExportError("the model gets no source of the stream, so that there is nothing to run a program on")

        # what it calculates, and whether that is a function of each example
        dynamic = dynamic_dimensions(options.dynamic, first)
        _check_lengths(batches, dynamic)
        cases = [
            Case(
                each,
                program(each),
                f"batch {number} of stream {measured.stream!r} ({counted(examples_of(each), 'example')})",
            )
            for number, each in enumerate(batches)
        ]
        if not cases[0].outputs:
            raise ExportError("forward returns nothing but a loss; return the outputs, and name them in model.outputs")
        skipped = left_out(program.returned(first), examples_of(first))
        cases += _more_cases(program, first, dynamic)
        allowed = tolerances(cases, options.tolerance, is_16_bits=is_16_bits)
        check_repeatable(program, first, allowed)
        whole = Case(first, program(first), "")
        check_examples_alone([whole, cases[-1]], examples_of(first), allowed, module)
        _check_evaluated(measured, cases[0], allowed, dropped)

    with new_folder(options.place) as folder:
        # the trace
        example = of_rows(first, length_for_trace(first))
        traced = trace(program, example, dynamic)
        if unused := unused_inputs(traced, list(example)):
            program.absent = {key: example[key] for key in unused}
            cases = [case._replace(inputs=_without(case.inputs, unused)) for case in cases]
            example = _without(example, unused)
            dynamic = _without(dynamic, unused)
            if not example:
                raise ExportError("no output depends on any input of the model")
            traced = trace(program, example, dynamic)
        lengths = symbols(traced, dynamic)
        opset = None
        if options.to == "onnx":
            words = {symbol: length for symbol, (length, _, _) in lengths.items()}
            opset = save_onnx(traced, list(example), list(cases[0].outputs), folder / name, words)
        else:
            with quiet():
                torch.export.save(traced, folder / name)

        # the comparison
        found = run_outside(folder / name, options.to, cases)
        differences = compare(cases, found, allowed)
        refuse(differences, found, cases)

        # the description
        comparison = {
            "stream": measured.stream,
            "batches": [{"examples": examples_of(case.inputs), "what": case.what} for case in cases],
            "differences": {
                key: {"largest": each.largest, "tolerance": each.tolerance, "largest_value": each.of}
                for key, each in differences.items()
            },
        }
        facts: Json = {
            "format": 1,
            "kind": options.to,
            "program": name,
            "inputs": _described(cases[0].inputs, lengths, traced_dims(traced, dynamic), paths),
            "outputs": _outputs(cases),
            "lengths": {length: {"least": least, "most": most} for length, least, most in lengths.values()},
            "left_out": {"sources": sorted({*dropped, *program.absent}), "outputs": skipped},
            "classes": _classes(measured.training.dataset),
            "preparation": _preparation(measured),
            "versions": _versions(options.to, opset),
            "comparison": comparison,
            "run": run_identity(measured.run, measured.plan, measured.checkpoint, options.overrides),
        }
        describe(folder, facts, card_of(measured, options.license, facts))
        files = names_in(folder)
    return Export(
        options.place, files, {"comparison": comparison, "run": facts["run"]}, _lines(measured, differences, cases)
    )


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: each for key, each in values.items() if key not in names}


def _check_model(model: AbstractModel) -> None:
    kind = type(model).__name__
    if not isinstance(getattr(model, "module", None), Module) or not hasattr(model, "program_inputs"):
        raise ExportError(f"a model of class {kind} has no module to trace; a program is made of a TorchModel")
    device = getattr(model, "device", None)
    if device is not None and device.type != "cpu":
        raise ExportError(
            f"the model is on {device}, and programs are made on the CPU; set CUDA_VISIBLE_DEVICES= before emrun"
        )
    if model.is_sharded:
        raise ExportError("the weights lie on several ranks; an export is made in one process")


def _trailing(batch: Tensors) -> dict[str, Any]:
    return {name: each.shape[1:] for name, each in batch.items()}


def _target(options: Options, model: AbstractModel, inputs: Tensors, measured: Measured) -> Target | None:
    """Return which output becomes probabilities, and how."""
    if not options.probabilities:
        return None
    try:
        found: Target | None = locate("emrun.hooks._shared.probabilities.target_of")(
            model.targets, options.probabilities, None
        )
    except HookError as error:
        raise ExportError(str(error)) from error
    if found is not None:
        return found
    names = [name for name, _ in tensors_of(Program(model, measured.stream, {}, None).returned(inputs))]
    output = names[0] if len(names) == 1 else "logits"
    return Target("", output, None, str(options.probabilities))


def _check_lengths(batches: Sequence[Tensors], dynamic: Mapping[str, set[int]]) -> None:
    """Check that dimensions which are not dynamic have the same length in all batches."""
    for name, dimensions in dynamic.items():
        shapes = [each[name].shape for each in batches if name in each]
        for number in range(1, len(shapes[0])):
            found = sorted({shape[number] for shape in shapes if len(shape) == len(shapes[0])})
            if len(found) > 1 and number not in dimensions:
                raise ExportError(
                    f"input {name!r} has the lengths {listed(list(map(str, found)))} in dimension {number}, in batches "
                    f"of the stream, and a program has one length there; write --dynamic {name}:{number}"
                )


def _more_cases(program: Program, first: Tensors, dynamic: Mapping[str, set[int]]) -> list[Case]:
    """Return cases with another number of examples, other lengths of dynamic dimensions, and, last, one example."""
    count = examples_of(first)
    other = of_rows(first, count - 1 if count > 2 else count + 1)
    cases = [Case(other, program(other), counted(examples_of(other), "example"))]
    dimensions = {name: numbers - {0} for name, numbers in dynamic.items()}
    if any(dimensions.values()):
        shorter = _shortened(program, first, dimensions)
        cases.append(Case(shorter, program(shorter), "a batch with shorter dynamic dimensions"))
    alone = rows(first, [0])
    try:
        return [*cases, Case(alone, program(alone), "one example")]
    except Exception as error:
        raise ExportError(
            f"the model fails on one example: {error}; a program has to take any number of them"
        ) from error


def _shortened(program: Program, inputs: Tensors, dimensions: Mapping[str, set[int]]) -> Tensors:
    reason = ""
    for length_of in (lambda length: max(1, length - 1), lambda length: max(1, length // 2)):
        shorter = dict(inputs)
        for name, numbers in dimensions.items():
            for number in numbers:
                shorter[name] = shorter[name].narrow(number, 0, length_of(shorter[name].shape[number])).contiguous()
        try:
            program(shorter)
        except Exception as error:
            reason = reason or str(error).partition("\n")[0]
        else:
            return shorter
    raise ExportError(f"--dynamic: the model itself fails where these dimensions are shorter: {reason}")


def _check_evaluated(
    measured: Measured, case: Case, allowed: Mapping[str, tuple[float, float]], dropped: set[str]
) -> None:
    """Check that the model gives what it gave in the evaluation, where it also got the sources that are left out."""
    batch = dict(tensors_of(measured.batches[0]))
    for name, each in case.outputs.items():
        before = batch.get(name)
        if before is None:
            continue
        found = difference(each.numpy(), before.float().numpy() if before.dtype is torch.bfloat16 else before.numpy())
        if found > allowed[name][0]:
            without = f" without {listed(sorted(dropped))}" if dropped else ""
            raise ExportError(
                f"output {name!r} of the model{without} differs by {found:.3g} from that of the evaluation on "
                f"{case.what}; forward keeps a state, or depends on what a program does not get"
            )


def traced_dims(traced: torch.export.ExportedProgram, dynamic: Mapping[str, set[int]]) -> dict[tuple[str, int], str]:
    """Return (input, dimension) -> symbol of its length."""
    kept = [spec.arg.name for spec in traced.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    return {
        (name, number): str(nodes[argument].meta["val"].shape[number])
        for (name, dimensions), argument in zip(dynamic.items(), kept, strict=True)
        for number in dimensions
    }


def _described(
    inputs: Tensors,
    lengths: Mapping[str, tuple[str, int, int | None]],
    dims: Mapping[tuple[str, int], str],
    paths: Mapping[str, Sequence[str]],
) -> list[Json]:
    return [
        {
            "name": name,
            "source": paths[name][0],
            "dtype": str(each.dtype).removeprefix("torch."),
            "shape": [lengths[dims[name, i]][0] if (name, i) in dims else size for i, size in enumerate(each.shape)],
        }
        for name, each in inputs.items()
    ]


def _outputs(cases: Sequence[Case]) -> list[Json]:
    """Return the outputs; a length that differs between the cases is that of the batch, or null."""
    found = []
    counts = [examples_of(case.inputs) for case in cases]
    for name, first in cases[0].outputs.items():
        shapes = [case.outputs[name].shape for case in cases]
        shape: list[Any] = []
        for number, size in enumerate(first.shape):
            sizes = [each[number] for each in shapes]
            shape.append("batch" if sizes == counts else size if len(set(sizes)) == 1 else None)
        found.append({"name": name, "dtype": str(first.dtype).removeprefix("torch."), "shape": shape})
    return found


def _classes(dataset: Any) -> Any:
    names = named_classes(dataset)
    if isinstance(names, Mapping):
        return {str(source): list(map(str, each)) for source, each in names.items()}
    return None if names is None else list(map(str, names))


def _preparation(measured: Measured) -> Json:
    """Return what happens to the data before the program, and in it."""
    training = measured.training
    changers = [
        type(hook).__name__
        for hook in training.main_loop.hooks
        if type(hook).before_batch is not AbstractHook.before_batch
    ]
    model = measured.plan.config.plain()["model"]
    inputs = model.get("inputs") if isinstance(model, dict) else None
    inside = {name: each for name, each in inputs.items() if isinstance(each, dict)} if isinstance(inputs, dict) else {}
    return {"before": training.prepared.made, "hooks": changers, "inside": inside}


def _versions(to: str, opset: int | None) -> Json:
    found: Json = {"emrun": importlib.metadata.version("emrun"), "python": platform.python_version()}
    found["torch"] = torch.__version__
    if to == "onnx":
        found |= {package: importlib.metadata.version(package) for package in _PACKAGES}
        found["opset"] = opset
    return found


def _lines(measured: Measured, differences: Mapping[str, Difference], cases: Sequence[Case]) -> list[str]:
    of = f"{counted(len(cases), 'batch', 'es')} of stream {measured.stream!r}, outside of emrun"
    return [f"compared on {of}; the largest difference of each output:"] + [
        f"  {name}: {each.largest:.3g} of {each.of:.3g} ({each.tolerance:.3g} is allowed)"
        for name, each in differences.items()
    ]
