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
_SHARE = {"32": 1e-4, "16": 2e-2}  # of the largest absolute value of an output


class Case(NamedTuple):
    """A batch of a program: its inputs, what the model makes of them, and what the batch is, for messages."""

    inputs: Tensors
    outputs: Tensors
    what: str


class Difference(NamedTuple):
    """How an output differs at most: in which batch, and how much is allowed."""

    largest: float
    tolerance: float
    of: float
    what: str

    @property
    def is_too_large(self) -> bool:
        """Whether the output differs by more than is allowed; also if one of the values is not a number."""
        return not self.largest <= self.tolerance


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two arrays, infinity if they have other shapes or one has NaN alone."""
    first = np.asarray(one)
    second = np.asarray(other)
    if first.shape != second.shape:
        return float("inf")
    if not first.size:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(first) else np.float64
    with np.errstate(invalid="ignore"):
        found = np.abs(first.astype(wide) - second.astype(wide))
    found[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
    return float("inf") if np.isnan(found).any() else float(found.max())


def tolerances(cases: Sequence[Case], given: float | None, *, is_16_bits: bool) -> dict[str, tuple[float, float]]:
    """Return output -> the largest difference that is allowed, and the largest absolute value of the output."""
    found = {}
    for name in cases[0].outputs:
        values = [
            case.outputs[name].abs() if case.outputs[name].dtype != torch.bool else case.outputs[name] for case in cases
        ]
        finite = [each.double()[each.double().isfinite()] for each in values]
        largest = max((float(each.max()) for each in finite if each.numel()), default=0.0)
        found[name] = (largest * _SHARE["16" if is_16_bits else "32"] if given is None else given), largest
    return found


def run_outside(program: Path, to: str, cases: Sequence[Case]) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the outputs of a program for each case, from a process in which emrun cannot be imported.

    Raises:
        ExportError: the program failed.
    """
    inputs = list(cases[0].inputs)
    outputs = list(cases[0].outputs)
    with temporary_folder("export") as folder:
        for number, case in enumerate(cases):
            arrays = {f"i{index}": case.inputs[name].numpy() for index, name in enumerate(inputs)}
            np.savez(folder / f"case-{number}.npz", **arrays)  # type: ignore[arg-type]  # no flag is among the names
        asked: Json = {"format": to, "program": str(program), "cases": len(cases), "inputs": inputs, "outputs": outputs}
        (folder / "cases.json").write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-I", "-W", "ignore", outside.__file__, str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
            cwd=folder,
        )
        found = []
        for number, case in enumerate(cases):
            path = folder / f"found-{number}.npz"
            if not path.exists():
                lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
                reason = in_one_line(lines[-1], 600)
                raise ExportError(f"the program fails outside of emrun, on {case.what}: {reason}; nothing is written")
            with np.load(path) as arrays_found:
                found.append({name: arrays_found[f"o{index}"] for index, name in enumerate(outputs)})
    return found


def compare(
    cases: Sequence[Case],
    found: Sequence[Mapping[str, Any]],
    allowed: Mapping[str, tuple[float, float]],
) -> dict[str, Difference]:
    """Return output -> its largest difference in all cases."""
    differences = {}
    for name, (tolerance, largest) in allowed.items():
        by_case = [difference(case.outputs[name].numpy(), each[name]) for case, each in zip(cases, found, strict=True)]
        worst = max(range(len(cases)), key=by_case.__getitem__)
        differences[name] = Difference(by_case[worst], tolerance, largest, cases[worst].what)
    return differences


def refuse(differences: Mapping[str, Difference], found: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> None:
    """Check that no output differs too much.

    Raises:
        ExportError: an output differs; the message says what is likely.
    """
    wrong = {name: each for name, each in differences.items() if each.is_too_large}
    if not wrong:
        return
    name, worst = max(wrong.items(), key=lambda item: item[1].largest / (item[1].tolerance or 1e-30))
    shapes = [
        f"{tuple(case.outputs[name].shape)} of the model is {each[name].shape}"
        for case, each in zip(cases, found, strict=True)
        if case.what == worst.what and tuple(case.outputs[name].shape) != each[name].shape
    ]
    what = (
        f"by {worst.largest:.3g}, and {worst.tolerance:.3g} is allowed" if not shapes else f"in its shape: {shapes[0]}"
    )
    same = [
        case.what
        for case, each in zip(cases, found, strict=True)
        if difference(case.outputs[name].numpy(), each[name]) <= worst.tolerance
    ]
    advice = "a part of forward is not calculated in the program as in the model"
    if same:
        advice = (
            f"on {same[0]} it is the same, so that the trace has probably frozen a branch or a number of forward: "
            "write torch.where, or another operation on tensors, instead of an if, and keep no state between calls"
        )
    others = f" (and {listed([each for each in wrong if each != name])})" if len(wrong) > 1 else ""
    raise ExportError(
        f"output {name!r}{others} of the program differs on {worst.what} {what}; {advice}; nothing is written"
    )
