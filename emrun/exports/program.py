"""Programs: what `torch.export` and ONNX have of a run's model."""

from __future__ import annotations

from emrun.base.errors import UsageError
from emrun.exports.formats import Export, Options


def write_onnx(options: Options) -> Export:
    """Write an ONNX program."""
    raise UsageError("not yet")


def write_torch_export(options: Options) -> Export:
    """Write a program of `torch.export`."""
    raise UsageError("not yet")
