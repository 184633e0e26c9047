"""Weights: a file of safetensors, or an adapter of peft, loaded into its class and compared with the run's model."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from emrun import __version__
from emrun.base.errors import ExportError
from emrun.base.preparations import PREPARATION
from emrun.base.temporary import temporary_folder
from emrun.base.types import Json
from emrun.base.wording import in_one_line
from emrun.config.plan import code_directories
from emrun.config.recipe import Recipe
from emrun.exports import loaded_outside
from emrun.exports.card import card_of
from emrun.exports.comparison import Case, difference, tolerances
from emrun.exports.folder import describe, names_in, new_folder
from emrun.exports.formats import Export, Options
from emrun.exports.identity import run_identity
from emrun.exports.measured import Measured, measure
from emrun.exports.programs import described_data
from emrun.storage.checkpoints.shards import read_tensors, whole_of
from emrun.storage.checkpoints.weights import FILE, write_weights


def write_weights_or_adapter(options: Options) -> Export:
    """Write `model.safetensors`, the weights that evaluations use, or what `PeftModel.from_pretrained` loads.

    Both are loaded into their class, in a process without emrun where that is possible, and compared; see
    `emrun.export`.
    """
    # the module, or the part of it with an adapter
    measured = measure(options)
    model = measured.training.model
    whole = getattr(model, "module", None)
    if not isinstance(whole, Module) or measured.checkpoint is None:
        raise ExportError(f"a model of class {type(model).__name__} has no weights of its own in a checkpoint")
    model.without_measures()
    whole.eval()
    module: Any = whole
    if options.to == "adapter":
        parts = [each for each in whole.modules() if hasattr(each, "peft_config") and hasattr(each, "unload")]
        if not parts:
            raise ExportError(f"{type(whole).__name__} has no adapter of peft; --to safetensors has all weights")
        module = parts[0]

    # what it gets and returns on a batch
    calls: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    with torch.no_grad():
        model.run(measured.batches[0], False, measured.stream)
    handle.remove()
    case = Case({}, loaded_outside.run(module, calls[0]), f"a batch of stream {measured.stream!r}")

    with new_folder(options.place) as folder:
        # the files, and a module that does not have the weights yet
        if options.to == "adapter":
            module.save_pretrained(str(folder))
            bare = copy.deepcopy(module).unload()
            place = folder
        else:
            stored = read_tensors(measured.checkpoint[0], FILE)
            write_weights({name: whole_of(each).clone() for name, each in stored.items()}, {}, folder)  # tied ones too
            bare = _built_anew(measured, whole)
            place = folder / FILE

        # the comparison
        is_16_bits = any(each.dtype in (torch.float16, torch.bfloat16) for each in whole.parameters())
        is_16_bits |= getattr(model, "precision", 32) in ("bf16", "fp16")
        found, where = _loaded(bare, place, calls[0], code_directories(measured.plan.config))
        differences: Json = {}
        for name, (tolerance, largest) in tolerances([case], options.tolerance, is_16_bits=is_16_bits).items():
            by = difference(case.outputs[name], found.get(name, ()))
            differences[name] = {"largest": by, "tolerance": tolerance, "largest_value": largest}
            if by > tolerance:
                raise ExportError(
                    f"output {name} of the module with the weights differs by {by:.3g} on {case.what}, and "
                    f"{tolerance:.3g} is allowed: forward draws random numbers, or uses what is neither a parameter "
                    "nor a buffer that is saved; nothing is written"
                )

        # the description
        run = run_identity(measured.run, measured.checkpoint, options.overrides)
        comparison: Json = {"stream": measured.stream, "batches": [{"what": case.what}], "where": where}
        comparison["differences"] = differences
        facts: Json = {"format": 1, "kind": options.to, "inputs": [], "outputs": [], "comparison": comparison}
        facts["program"] = FILE if options.to != "adapter" else "adapter_model.safetensors"
        facts["class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        facts["module"] = measured.in_config("model", "module")
        facts |= {**described_data(measured), "run": run}
        facts["versions"] = {
            "emrun": __version__,
            **{each: importlib.metadata.version(each) for each in ("torch", "safetensors")},
        }
        describe(folder, facts, card_of(measured, options.license, facts))
        files = names_in(folder)
    lines = [f"loaded strictly {where}; the outputs on {case.what} differ at most by:"]
    lines += [
        f"  {key}: {each['largest']:.3g} ({each['tolerance']:.3g} is allowed)" for key, each in differences.items()
    ]
    return Export(options.place, files, {"comparison": comparison, "run": run}, lines)


def _built_anew(measured: Measured, module: Module) -> Module:
    """Return a module as the config builds it; of a model that builds its own, a copy."""
    recipe = measured.plan.model.kwargs.get("module")
    if isinstance(recipe, Recipe):
        training = measured.training
        return recipe.build({"dataset": training.dataset, PREPARATION: training.prepared})  # type: ignore[no-any-return]
    return copy.deepcopy(module)


def _loaded(bare: Module, place: Path, inputs: Any, code: list[str]) -> tuple[Any, str]:
    """Return what a module returns once it has its weights, and in which process.

    Raises:
        ExportError: the module does not take the weights.
    """
    with temporary_folder("export") as folder:
        try:
            torch.save(code, folder / "places.pt")
            torch.save((bare, str(place), inputs), folder / "asked.pt")
            command = [sys.executable, "-I", "-W", "ignore", loaded_outside.__file__, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if (folder / "found.pt").exists():
                return torch.load(folder / "found.pt"), "in a process without emrun"
            error = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        except Exception:  # a module that cannot be pickled may raise anything
            error = "emrun"
    if "emrun" not in error:
        raise ExportError(f"outside of emrun, the weights cannot be loaded: {in_one_line(error, 600)}")
    where = "in this process, as the module needs emrun or cannot be pickled"
    return loaded_outside.run(loaded_outside.loaded(bare, str(place)), inputs), where
