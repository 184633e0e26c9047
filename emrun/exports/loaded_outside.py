"""Loads weights in a process of its own, in which emrun cannot be imported: `python -I loaded_outside.py FOLDER`.

FOLDER has `asked.pt`: a module without these weights, the file of the weights or the folder of an adapter, and the
arguments of forward; `places.pt` has the directories of the modules. The outputs go to `found.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path


def loaded(module: Any, place: str) -> Any:
    """Return a module in evaluation mode with weights: of a file, strictly, or of the folder of an adapter."""
    if Path(place).is_dir():
        from peft import PeftModel

        return PeftModel.from_pretrained(module, place).eval()
    from safetensors.torch import load_file

    module.load_state_dict(load_file(place), strict=True)
    return module.eval()


@torch.no_grad()
def run(module: Any, inputs: Any) -> dict[str, Any]:
    """Return the tensors that a module returns, by their places in what it returns; as float32."""
    args, kwargs = inputs
    leaves, _ = tree_flatten_with_path(module(*args, **kwargs))
    tensors = {keystr(path) or "output": each for path, each in leaves if isinstance(each, torch.Tensor)}
    return {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}


def main(folder: Path) -> None:
    """Load the weights, and run the module."""
    sys.modules["emrun"] = None  # type: ignore[assignment]  # from now on, its import fails
    sys.path[:0] = torch.load(folder / "places.pt")
    module, place, inputs = torch.load(folder / "asked.pt", weights_only=False)  # that the export has written
    torch.save(run(loaded(module, place), inputs), folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
