"""Save the masks of new data in a folder, for `emrun predict -o FOLDER/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError, HookError
from emrun.base.wording import from_here, listed
from emrun.hook import Loop
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.probabilities import target_of
from emrun.hooks.save_masks import SaveMasks
from emrun.model import Target

_ABOVE = {"sigmoid": 0.0, "identity": 0.5}  # an output of one class: where the pixel is of the class


class PredictedMasks(SaveMasks):
    """Saves a mask for each example of a stream in a folder; that of the picture `0.jpg` is `0.png`.

    Args:
        stream: the stream.
        place: the folder, which is replaced if it has nothing but masks.
        variables: the output with the masks; by default that of the losses, or the only one of the shape of masks.

    Attributes:
        rows: the number of masks.
        columns: those of `masks.csv`.
        has_numbers: see `SavePredictions`.
    """

    columns = ("id", "file")
    has_numbers = False
    is_alone = False

    def __init__(self, stream: str, place: Path, variables: Sequence[str] | None = None) -> None:
        if variables is not None and len(variables) != 1:
            raise ArgumentError("variables", f"a folder has the masks of one output, not of {listed(variables)}")
        if not place.parent.is_dir():
            raise ArgumentError("file", f"there is no directory {from_here(place.parent)}; create it first")
        kept = sorted(str(each.relative_to(place)) for each in place.rglob("*") if not each.is_dir())
        if others := [name for name in kept if name != "masks.csv" and not name.endswith(".png")]:
            what = f"{from_here(place)} has {others[0]}, which is not a mask"
            raise ArgumentError("file", f"{what}; choose another folder, as this is replaced as a whole")
        name = variables[0] if variables else ""
        super().__init__(name, streams=[stream], root_dir=place.name, output_dir=place.parent)
        self.rows = 0
        self._variables = variables
        self._target: Target | None = None

    def register_mainloop(self, main_loop: Loop) -> None:
        """Find the output that a loss compares with masks."""
        super().register_mainloop(main_loop)
        try:
            self._target = target_of(main_loop.model.targets, True, self._variables)
        except HookError:  # then the shape tells
            self._target = None

    def before_batch(self, stream_name: str, batch: Mapping[str, Any]) -> None:
        """Note which names are sources."""
        self._sources = frozenset(batch)

    def masks_of(self, examples: Examples) -> Sequence[Any]:
        """Return the numbers of the classes of pixels or, with one class, whether a pixel is of the class."""
        target = self._target
        if not self._mask and target is not None:
            self._mask = target.output
        if not self._mask:
            outputs = {name: each for name, each in examples.batch.items() if name not in self._sources}
            wide = [name for name, each in outputs.items() if getattr(each, "ndim", 0) in (3, 4)]
            if len(wide) != 1:
                what = f"no output, or more than one, has the shape of masks ({listed(wide)})"
                raise examples.error(f"{what}; choose one by `variables`, as in --variables logits")
            self._mask = wide[0]
        masks = super().masks_of(examples)
        least = None if target is None else _ABOVE.get(target.activation or "")
        return masks if least is None else [mask > least for mask in masks]

    def after_stream(self, stream_name: str) -> None:
        """Complete the folder, and count the masks."""
        self.rows = len(self._files)
        super().after_stream(stream_name)

    def folder_of(self, stream: str) -> str:
        """Return the folder of the stream: that of the masks itself."""
        return ""
