"""Save the masks of a segmentation as pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from emrun.base.arguments import check_number
from emrun.base.errors import needing
from emrun.base.types import Units
from emrun.base.wording import counted, from_here
from emrun.hooks._shared.aside import Aside
from emrun.hooks._shared.columns import csv_of
from emrun.hooks._shared.evaluations import SavesExamples, needed
from emrun.hooks._shared.examples import Examples, file_stem
from emrun.hooks._shared.figures import png
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)


class SaveMasks(SavesExamples):
    """Saves a mask for each example of a stream as a PNG file, at each evaluation of the stream.

        hooks:
          - SaveMasks: {mask_variable: mask, streams: [valid]}

    The folder `masks/valid` in the run directory has a picture for each example, such as `17.png` for the id 17, and
    `town/7.png` for `town/7.jpg`, the id of a file. The list `masks.csv` has ids and files: letters of an id that the
    name of a file may not have are replaced. The folder appears at the end of the stream, in place of that of the
    evaluation before. If `Pictures`, `ImageFolder` or `TarShards` have resized the whole pictures, without `crop` and
    `transform`, the masks have the sizes of the files again: those of classes by the nearest pixel.

    - Whole numbers are classes: the picture has a palette of colors, and its pixels are the numbers, from 0 to 255.
    - Floats of shape (B, C, H, W) with C > 1 are logits: the class with the largest one counts.
    - Booleans become 0 and 255; other floats must be from 0 to 1, and become 0 to 255.
    - With `factor`, the values are multiplied by it, and the picture is gray.

    Batches that the model is trained on are left out; to save masks of the train stream, evaluate it: `extra_streams:
    [train]` makes a stream `train_eval`.

    Needs Pillow (`pip install 'emrun[data]'`).

    Args:
        mask_variable: the output of shape (B, H, W), (B, 1, H, W) or, for logits, (B, C, H, W).
        id_variable: the source with the ids, all different; by default `id`, or else the position in the stream.
        factor: what the values are multiplied by; the products are limited to 0 to 255.
        streams: the streams; by default all that are evaluated, but the train stream in the zeroth epoch.
        every: how often masks are saved, such as `5 epochs`; a number means epochs.
        root_dir: the folder, in the run directory.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have one of `streams`, or two hooks write to one folder.
        MissingExtra: Pillow is not installed.
        StreamError: a batch lacks a variable, two examples have the same id, or the values are not masks.
        StorageError: a file cannot be written.
    """

    def __init__(
        self,
        mask_variable: str,
        id_variable: str | None = None,
        factor: float | None = None,
        streams: Sequence[str] | None = None,
        every: Annotated[int | str, Units(("epochs",))] = 1,
        root_dir: str = "masks",
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(streams, every, needed(mask_variable, id_variable), root_dir, dataset, output_dir)
        if factor is not None:
            check_number("factor", factor, "a number above 0", above=0)
        with needing(type(self).__name__, "pillow", "data"):
            import PIL  # noqa: F401 - the package, without its heavy parts
        self._mask = mask_variable
        self._id = id_variable
        self._factor = factor
        self._folder: Aside | None = None
        self._files: dict[str, str] = {}  # id -> file
        self._taken: set[str] = set()  # these files, without the ending

    def before_epoch(self, epoch_id: int) -> None:
        """Drop what an evaluation that was interrupted has left."""
        super().before_epoch(epoch_id)
        self._drop()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Write the masks of a batch.

        Raises:
            StorageError: a file cannot be written.
        """
        if not self.looks_at(stream_name):
            return
        examples = self.next_batch(batch_data)
        ids = examples.ids(self._id)
        masks = self.masks_of(examples)
        rows = examples.numbers()
        sizes: Sequence[tuple[int, int] | None] = [None] * len(ids)
        if rows is not None and self._has_files:
            sizes = [self.main_loop.dataset.stored_size(stream_name, row) for row in rows.tolist()]
        if self._folder is None:
            self._folder = Aside(self.root / self.folder_of(stream_name), is_folder=True)
            self._path = self._folder.begin(by_one_process=self.is_alone)
        for name, mask, size in zip(ids, masks, sizes, strict=True):
            if name in self._files:
                raise examples.error(f"two examples have the id {name!r:.80}; ids name the files, so they must differ")
            self._files[name] = file = self._file_of(name)
            try:
                content = mask_png(mask, self._factor, size)
            except ValueError as error:
                raise examples.error(f"{self._mask!r} of {name!r:.80} is not a mask: {error}") from error
            with storing(self._folder.place, "write"):
                (self._path / file).parent.mkdir(parents=True, exist_ok=True)
                (self._path / file).write_bytes(content)

    is_alone = True
    """Whether no other process writes the same folder."""

    def masks_of(self, examples: Examples) -> Sequence[Any]:
        """Return the mask of each example."""
        return list(examples.column(self._mask))

    def folder_of(self, stream: str) -> str:
        """Return the folder of a stream in that of all streams."""
        return stream

    @property
    def _has_files(self) -> bool:
        """Whether ids are names of files."""
        return hasattr(self.main_loop.dataset, "stored_size")

    def _file_of(self, name: str) -> str:
        """Return the file for an id, in a subfolder if the id is the path of a picture."""
        file = file_stem(name)
        if self._has_files:
            own = "/".join(map(file_stem, Path(name).with_suffix("").parts))
            file = file if own in self._taken else own  # of a picture with another ending
        self._taken.add(file)
        return f"{file}.png"

    def after_stream(self, stream_name: str) -> None:
        """Complete the folder.

        Raises:
            StorageError: a file cannot be written.
        """
        if not self.looks_at(stream_name) or self._folder is None:
            return
        folder = self._folder
        files = self._files
        try:
            with storing(folder.place, "write"):
                (self._path / "masks.csv").write_bytes(csv_of([("id", "file"), *files.items()]))
            folder.finish()
        finally:
            self._drop()
        masks = counted(len(files), "mask")
        once = {"once": str(folder.place)}
        _LOG.info("saved %s of stream %r in %s", masks, stream_name, from_here(folder.place), extra=once)

    def after_training(self, success: bool) -> None:
        """Drop an incomplete folder."""
        self._drop()

    def _drop(self) -> None:
        folder = self._folder
        self._folder = None
        self._files = {}
        self._taken = set()
        if folder is not None:
            folder.drop()


def mask_png(mask: Any, factor: float | None, size: tuple[int, int] | None = None) -> bytes:
    """Return a mask as a PNG file: with a palette if its values are classes, otherwise gray.

    Args:
        mask: an array of shape (H, W), (1, H, W), or (C, H, W) for logits.
        factor: what the values are multiplied by; None if they are classes, booleans, logits, or from 0 to 1.
        size: height and width of the picture; None for those of the mask.

    Raises:
        ValueError: the array has another shape, or values that are not allowed.
    """
    if not isinstance(mask, np.ndarray) or mask.ndim not in (2, 3) or 0 in mask.shape:
        shape = f"shape {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise ValueError(f"{shape}, but a mask has the shape (H, W), (1, H, W), or (C, H, W) for logits")
    if mask.ndim == 3 and mask.shape[0] > 1:
        if factor is not None or mask.dtype.kind != "f":
            raise ValueError(f"shape {mask.shape}: only logits, which are floats, have several channels, and no factor")
        mask = mask.argmax(0)
    values = mask.reshape(mask.shape[-2:])
    is_classes = factor is None and values.dtype.kind in "iu"
    if factor is not None:
        values = np.clip(np.nan_to_num(values.astype(np.float64) * factor), 0, 255)
    elif not is_classes:
        values = values * 255.0
    if not ((values >= 0) & (values <= 255)).all():
        raise ValueError(
            f"{mask.dtype} from {mask.min():g} to {mask.max():g}, but classes must be from 0 to 255, and "
            "floats from 0 to 1; or set factor"
        )
    found = np.rint(values).astype(np.uint8)
    if size is not None and size != found.shape:
        from PIL import Image

        way = Image.Resampling.NEAREST if is_classes else Image.Resampling.BILINEAR
        found = np.asarray(Image.fromarray(found).resize(size[::-1], way))
    return png(found, PALETTE if is_classes else None)


def _palette() -> bytes:
    """Return 256 colors: that of a class is made from the bits of its number, as in the PASCAL VOC data set."""
    colors = np.zeros((256, 3), np.uint8)
    for number in range(256):
        for bit in range(8):
            colors[number, bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
    return colors.tobytes()


PALETTE = _palette()
"""Red, green and blue of the colors of 256 classes, one byte each; class 0 is black."""
