"""Runs a program on batches in a process of its own, in which emrun cannot be imported: `python -I outside.py FOLDER`.

FOLDER has `cases.json`, with the program, its format and the names of inputs and outputs, and `inputs.npz`, with the
inputs of all batches in their order. The outputs are written to `outputs.npz`, in their order.
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

    onnxruntime.set_default_logger_severity(3)  # errors
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True))


def torch_export(path: str) -> Run:
    """Return a function that runs a program of `torch.export`."""
    import torch

    program = torch.export.load(path).module()

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        with torch.no_grad():
            return program({name: torch.from_numpy(each) for name, each in inputs.items()})  # type: ignore[no-any-return]

    return run


def main(folder: Path) -> None:
    """Run the program on each batch."""
    sys.modules["emrun"] = None  # type: ignore[assignment]  # from now on, its import fails
    asked = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    run = {"onnx": onnx, "torch-export": torch_export}[asked["format"]](asked["program"])
    with np.load(folder / "inputs.npz") as inputs:
        arrays = iter(inputs.values())
        found = [run({name: next(arrays) for name in names}) for names in asked["inputs"]]
    np.savez(folder / "outputs.npz", *(each[name] for each in found for name in asked["outputs"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
