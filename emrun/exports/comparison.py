"""Compares a program, in a process without emrun, with the model that it was made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from emrun.base.errors import ExportError
from emrun.base.temporary import temporary_folder
from emrun.base.types import Json
from emrun.base.wording import in_one_line, listed
from emrun.exports import outside

Tensors = Mapping[str, torch.Tensor]
_SHARE_OF_LARGEST = {False: 1e-4, True: 2e-2}
"""Whether it is calculated in 16 bits -> how much of its largest absolute value an output may differ."""


class Case(NamedTuple):
    """A batch: the inputs of a program, the outputs of the model, and what the batch is, for messages."""

    inputs: Tensors
    outputs: Tensors
    what: str


class Difference(NamedTuple):
    """How an output differs at most, how much is allowed, its largest absolute value, and the number of the batch."""

    largest: float
    tolerance: float
    largest_value: float
    case: int


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two arrays; infinity if they have other shapes, or one has NaN alone."""
    first, second = (np.asarray(each) for each in (one, other))
    if first.shape != second.shape:
        return np.inf
    with np.errstate(invalid="ignore"):
        found = np.abs(first - second) if np.iscomplexobj(first) else np.abs(first.astype(float) - second.astype(float))
    found[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
    return float(np.nan_to_num(found, nan=np.inf, posinf=np.inf).max(initial=0.0))


def tolerances(cases: Sequence[Case], given: float | None, *, is_16_bits: bool) -> dict[str, tuple[float, float]]:
    """Return output -> the largest difference that is allowed, and the largest absolute value of the output."""
    found = {}
    for name in cases[0].outputs:
        values = np.concatenate([np.abs(case.outputs[name].numpy().astype(float)).ravel() for case in cases])
        largest = float(values.max(initial=0.0, where=np.isfinite(values)))
        found[name] = largest * _SHARE_OF_LARGEST[is_16_bits] if given is None else given, largest
    return found


def run_outside(program: Path, to: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the outputs of a program for each case, from a process in which emrun cannot be imported.

    Raises:
        ExportError: the program failed.
    """
    inputs = list(cases[0].inputs)
    outputs = list(cases[0].outputs)
    found = []
    with temporary_folder("export") as folder:
        for number, case in enumerate(cases):
            np.savez(folder / f"case-{number}.npz", *(case.inputs[name].numpy() for name in inputs))
        asked: Json = {"format": to, "program": str(program), "cases": len(cases), "inputs": inputs, "outputs": outputs}
        (folder / "cases.json").write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-I", "-W", "ignore", outside.__file__, str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        for number, case in enumerate(cases):
            path = folder / f"found-{number}.npz"
            if not path.exists():
                lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
                reason = in_one_line(lines[-1], 600)
                raise ExportError(f"outside of emrun, the program fails on {case.what}: {reason}; nothing is written")
            with np.load(path) as arrays:
                found.append({name: arrays[f"arr_{index}"] for index, name in enumerate(outputs)})
    return found


def compare(
    cases: Sequence[Case], found: Sequence[Mapping[str, Any]], allowed: Mapping[str, tuple[float, float]]
) -> dict[str, Difference]:
    """Return output -> its largest difference in all cases.

    Raises:
        ExportError: an output differs by more than is allowed; the message says what is likely.
    """
    differences = {}
    wrong = []
    for name, (tolerance, largest_value) in allowed.items():
        by_case = [difference(case.outputs[name].numpy(), each[name]) for case, each in zip(cases, found, strict=True)]
        largest = max(by_case)
        differences[name] = Difference(largest, tolerance, largest_value, by_case.index(largest))
        if largest > tolerance:
            same = [case.what for case, each in zip(cases, by_case, strict=True) if each <= tolerance]
            wrong.append((name, same))
    if not wrong:
        return differences
    name, same = wrong[0]
    worst = differences[name]
    advice = "forward calculates something else when it is traced"
    if same:
        advice = (
            f"on {same[0]} it is the same, so that the trace has probably frozen a branch or a number of forward: "
            "write torch.where, or another operation on tensors, instead of an if, and keep no state between calls"
        )
    raise ExportError(
        f"{listed([each for each, _ in wrong])} of the program is not that of the model: {name!r} differs on "
        f"{cases[worst.case].what} by {worst.largest:.3g}, and {worst.tolerance:.3g} is allowed; {advice}; nothing is "
        "written"
    )
