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
from emrun.base.wording import in_one_line
from emrun.exports import outside

Tensors = Mapping[str, torch.Tensor]
_SHARE_OF_LARGEST = {False: 1e-4, True: 2e-2}
"""Whether it is calculated in 16 bits -> how much of its largest absolute value an output may differ."""

_FROZEN = (
    "so that the trace has probably frozen a branch or a number of forward: write torch.where, or another operation on "
    "tensors, instead of an if, and keep no state between calls"
)


class Case(NamedTuple):
    """A batch: the inputs of a program, the outputs of the model, and what the batch is, for messages."""

    inputs: Tensors
    outputs: Tensors
    what: str


class Difference(NamedTuple):
    """How much an output differs at most, how much is allowed, and its largest absolute value."""

    largest: float
    tolerance: float
    largest_value: float


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two arrays; infinity if they have other shapes, or one has NaN alone."""
    first = np.asarray(one)
    second = np.asarray(other)
    if first.shape != second.shape:
        return np.inf
    kind = np.complex128 if np.iscomplexobj(first) else np.float64
    is_same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        found = np.where(is_same, 0.0, np.abs(first.astype(kind) - second.astype(kind)))
    return float(np.nan_to_num(found, nan=np.inf, posinf=np.inf).max(initial=0.0))


def tolerances(cases: Sequence[Case], given: float | None, *, is_16_bits: bool) -> dict[str, tuple[float, float]]:
    """Return output -> the largest difference that is allowed, and the largest absolute value of the output."""
    found = {}
    for name in cases[0].outputs:
        values = torch.cat([case.outputs[name].flatten() for case in cases])
        largest = float(np.abs(np.nan_to_num(values.numpy(), posinf=0, neginf=0)).max(initial=0))
        found[name] = largest * _SHARE_OF_LARGEST[is_16_bits] if given is None else given, largest
    return found


def run_outside(program: Path, to: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the outputs of a program for each case, from a process in which emrun cannot be imported.

    Raises:
        ExportError: the program failed.
    """
    names = list(cases[0].outputs)
    with temporary_folder("export") as folder:
        inputs = [list(case.inputs) for case in cases]
        asked = {"format": to, "program": str(program), "inputs": inputs, "outputs": names}
        (folder / "cases.json").write_text(json.dumps(asked), encoding="utf-8")
        np.savez(folder / "inputs.npz", *(each.numpy() for case in cases for each in case.inputs.values()))
        command = [sys.executable, "-I", "-W", "ignore", outside.__file__, str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            text = done.stderr.strip() or f"it ended with status {done.returncode}"
            reason = in_one_line(text.splitlines()[-1], 600)
            raise ExportError(f"the program fails outside of emrun: {reason}; nothing is written")
        with np.load(folder / "outputs.npz") as found:
            arrays = iter(found.values())
            return [{name: next(arrays) for name in names} for _ in cases]


def compare(
    cases: Sequence[Case], found: Sequence[Mapping[str, Any]], allowed: Mapping[str, tuple[float, float]]
) -> dict[str, Difference]:
    """Return output -> its largest difference in all cases.

    Raises:
        ExportError: an output differs by more than is allowed; the message says what is likely.
    """
    differences = {}
    for name, (tolerance, largest_value) in allowed.items():
        by_case = [difference(case.outputs[name], each[name]) for case, each in zip(cases, found, strict=True)]
        worst = max(by_case)
        differences[name] = Difference(worst, tolerance, largest_value)
        if worst > tolerance:
            advice = "forward calculates something else when it is traced"
            if same := [case.what for case, each in zip(cases, by_case, strict=True) if each <= tolerance]:
                advice = f"on {same[0]} it is the same, {_FROZEN}"
            place = cases[by_case.index(worst)].what
            raise ExportError(
                f"output {name!r} of the program is not that of the model: on {place} it differs by {worst:.3g}, and "
                f"{tolerance:.3g} is allowed; {advice}; nothing is written"
            )
    return differences
