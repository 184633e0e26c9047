"""Runs a program on batches in a process of its own, in which emrun cannot be imported: `python -I outside.py FOLDER`.

FOLDER has `cases.json`, with the program, its format and the names of its inputs and outputs, and a file `case-N.npz`
for each batch, with `iK` for the K-th input. For each, `found-N.npz` is written, with `oK` for the K-th output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def onnx(path: str) -> Run:
    """Return a function that runs an ONNX program."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    known = {each.name for each in session.get_inputs()}
    return lambda inputs: dict(
        zip(names, session.run(names, {name: each for name, each in inputs.items() if name in known}), strict=True)
    )


def torch_export(path: str) -> Run:
    """Return a function that runs a program of `torch.export`."""
    import torch

    program = torch.export.load(path).module()

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        with torch.no_grad():
            found = program({name: torch.from_numpy(each) for name, each in inputs.items()})
        return {name: each.numpy() for name, each in found.items()}

    return run


def main(folder: Path) -> None:
    """Run the program on each batch."""
    sys.modules["emrun"] = None  # type: ignore[assignment]  # from now on, its import fails
    asked = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    run = {"onnx": onnx, "torch-export": torch_export}[asked["format"]](asked["program"])
    for number in range(asked["cases"]):
        with np.load(folder / f"case-{number}.npz") as case:
            inputs = {name: case[f"i{index}"] for index, name in enumerate(asked["inputs"])}
        found = run(inputs)
        np.savez(
            folder / f"found-{number}.npz",
            **{f"o{index}": found[name] for index, name in enumerate(asked["outputs"])},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
