"""Outputs and sources in the unit of the data, for metrics and hooks, where the dataset has scaled a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.base.types import Json, Values
from emrun.base.wording import listed


class Units:
    """Gives outputs the unit that a source has in the data.

    Args:
        given: output -> the source whose unit it has.
        dataset: the dataset, whose `scale_of` returns how a source was scaled.

    Raises:
        ArgumentError: a source was not scaled.
    """

    def __init__(self, given: Mapping[str, str], dataset: Any) -> None:
        scale_of = getattr(dataset, "scale_of", lambda source: None)
        self._scales: dict[str, tuple[str, Json]] = {}
        for output, source in given.items():
            scale = scale_of(source)
            if scale is None:
                raise ArgumentError(
                    f"units.{output}",
                    f"the dataset has not scaled {source!r}; add it to dataset.normalize, or leave {output!r} out",
                )
            self._scales[output] = source, scale

    def apply(self, outputs: dict[str, Any], inputs: Values) -> None:
        """Change outputs, after losses, to the unit of the data, and add the sources in this unit."""
        for output, (source, scale) in self._scales.items():
            if output not in outputs:
                raise ArgumentError(f"units.{output}", f"there is no output {output!r} (there is {listed([*outputs])})")
            outputs[output] = _unscaled(outputs[output], scale)
            if source in inputs:
                outputs[source] = _unscaled(inputs[source], scale)


def _unscaled(values: Tensor, scale: Json) -> Tensor:
    """Return values before they were scaled; several columns are on the last axis."""
    if scale["by"] == "log":
        return values.exp()
    shift = scale["shift"]
    by = scale["scale"]
    if len(shift) == 1:
        return values.mul(by[0]).add(shift[0])
    return values.mul(values.new_tensor(by)).add(values.new_tensor(shift))
