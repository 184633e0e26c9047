"""Pictures in files, each with a mask of the classes of its pixels."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from emrun.base.arguments import check_flag, check_keys, check_names
from emrun.base.errors import ArgumentError
from emrun.base.sources import ID
from emrun.base.types import Json, Policy, Strings
from emrun.base.wording import counted
from emrun.datasets._division import SplitForm, Texts
from emrun.datasets._images import CropForm, Dtype, Images, Interpolation, Masks, Mode
from emrun.datasets._paths import first_of, named_files
from emrun.datasets._picture_batches import Example
from emrun.datasets._picture_files import ENDINGS, PictureFiles, PictureRows
from emrun.datasets._transforms import TransformForm, transforms_of

_LOG = logging.getLogger(__name__)
_LOOKED_AT = 20  # masks, in which a run that begins looks for classes


class FilesForm(TypedDict):
    """The files of a stream in a config."""

    image: str
    mask: NotRequired[str]


class Pictures(PictureFiles):
    """Pictures from files, each with a mask: a picture whose pixels are the numbers of classes.

        dataset:
          class: Pictures
          image: images/*.jpg
          mask: masks/*.png
          split: {valid: 0.2}
          size: 128
          flip: true

    A picture and its mask have the same name: what the wildcards stand for, without the ending. So `images/7.jpg` and
    `masks/7.png` are a pair, and with `mask: masks/*_mask.png`, `masks/7_mask.png`. A folder, such as `image: images`,
    means all pictures below the folder. The pixels of masks are used as they are stored, and of those with a palette,
    the numbers. Masks of more than one channel, or in a format such as JPEG, which changes numbers, are refused.

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources:

    - `image`, of shape (B, C, H, W), float32 in [0, 1] or uint8.
    - `mask`, int64 of shape (B, H, W), which is cropped, resized to the nearest pixel, and mirrored as its picture is.
    - `id`, a list of the paths of the pictures below the folder before the first wildcard, such as `7.jpg`.
    - `position`, int64 of shape (B,), the numbers of the pictures in the order of evaluations.

    Pixels that have no class have the number of `ignore`, which the loss needs too: `{class: torch.nn.CrossEntropyLoss,
    ignore_index: 255, inputs: [logits, mask]}`.

    Needs Pillow (`pip install 'emrun[data]'`).

    Args:
        image: the pictures to train on: a pattern such as `images/*.jpg`, or a folder. Relative paths start from the
            current directory.
        mask: their masks; null for pictures without masks.
        valid: the files to evaluate on during the training: `{image: valid/*.jpg, mask: valid/*.png}`.
        test: the files to evaluate on at the end; without `mask`, they have no masks, as for a prediction.
        batch_size: the number of examples in a batch.
        size: the size that pictures and masks are resized to: [height, width], or one number for a square. If it is
            null, all pictures must have the size of the first picture.
        mode: the mode that pictures are converted to: `RGB` (C is 3) or `L`, grey (C is 1).
        flip: mirror half of the training examples left to right, drawn anew in every pass.
        dtype: of pictures, see `ImageFolder`.
        crop: see `ImageFolder`; the part of a mask is that of its picture.
        interpolation: the filter with which pictures are resized.
        orient: whether to turn pictures upright, as the orientation in their EXIF data says.
        ignore: the number of the pixels of masks that have no class.
        values: the values of the classes 0, 1, ... in the masks, such as `[0, 255]`; by default 0, 1, ...
        classes: the names of the classes 0, 1, ...: a mask with a class too many is an error.
        on_bad_example: what `main_loop.on_bad_example` says, which emrun supplies: a bad example has a picture or a
            mask that cannot be read, no pair, a mask of another size, or a class too many.
        split: divides the pictures of `image`, see `Table`. Columns are `id` and `folder`, the folder in the `id`. The
            `files` are patterns for the `id`: `{files: {valid: '*0.jpg'}}`.
        balance: the column of which training passes draw the same number of rows of each value, see `Table`.
        transform: transforms of torchvision by name, or callables, for all streams, see `ImageFolder`. Picture and mask
            are turned together, as `tv_tensors.Image` and `Mask` in a mapping; pixels of a mask that a transform makes
            up have the number of `ignore`.
        augment: more transforms, for training passes only.
        preparation: what the run keeps, which emrun supplies: the division and the size.

    Raises:
        ArgumentError: an argument has a value that is not allowed, there are no such files, a picture or a mask has no
            pair, or a mask has another size than its picture.
        StreamError: a picture or a mask cannot be read, or has another size than the first picture.
    """

    _label_source = "mask"
    train_only = ("image", "mask", "batch_size", "balance", "flip", "augment")

    def __init__(
        self,
        image: str,
        mask: str | None = None,
        valid: FilesForm | None = None,
        test: FilesForm | None = None,
        batch_size: int = 32,
        size: Sequence[int] | int | None = None,
        mode: Mode = "RGB",
        flip: bool = False,
        dtype: Dtype = "float32",
        crop: CropForm | None = None,
        interpolation: Interpolation = "bilinear",
        orient: bool = False,
        ignore: int = 255,
        values: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        on_bad_example: Policy = "error",
        split: SplitForm | None = None,
        balance: str | None = None,
        transform: TransformForm = None,
        augment: TransformForm = None,
        preparation: Json | None = None,
    ) -> None:
        if classes is not None:
            check_names("classes", classes)
        for name, value in (("valid", valid), ("test", test)):
            if value is not None and not isinstance(value, Mapping):
                raise ArgumentError(name, f"{value!r} is not a mapping such as {{image: images/*.jpg}}")
            check_keys(name, value or (), ["image", "mask"])
        images = {
            "image": Images(mode, dtype, size, crop, interpolation, orient),
            "mask": Masks(size, crop, orient, ignore, len(classes or ()) or None, values),
        }
        check_flag("flip", flip)
        self._ignore = ignore
        transforms = transforms_of(transform, augment, ignore=None if mask is None else ignore)
        example = Example(images, transforms, flips=flip)
        files = {"train": {"image": image, "mask": mask}, "valid": valid, "test": test}
        super().__init__(files, example, classes or (), on_bad_example, batch_size, split, preparation, balance)

    def _read(self, name: str, files: Mapping[str, str | None]) -> dict[str, _Pairs]:
        place = "" if name == "train" else f"{name}."
        found = {"image": named_files(f"{place}image", files.get("image"), ENDINGS)}
        if files.get("mask") is not None:
            found["mask"] = named_files(f"{place}mask", files["mask"], ENDINGS)
            self._pair(f"{place}mask", found)
        paths = {source: (root, [own[each] for each in found["image"][1]]) for source, (root, own) in found.items()}
        rows = _Pairs(paths, self._sized(paths), self._example, self._reader)
        if "mask" in found and not self._kept and not self._reader.skips:
            rows.check_sizes(f"{place}mask")
            if rows.first_classes() == {0, self._ignore}:
                what = f"the first masks have no class but 0, and {self._ignore}, which is ignored"
                _LOG.warning("%smask: %s; if it is a class, write values: [0, %d]", place, what, self._ignore)
        return {name: rows}

    def _files_at(self, path: Path) -> FilesForm:
        return {"image": str(path)}

    def _pair(self, argument: str, found: Mapping[str, tuple[Path, dict[str, str]]]) -> None:
        """Leave out pictures without a mask and masks without a picture.

        Raises:
            ArgumentError: there are any, and no examples are left out; or there is no pair.
        """
        pairs = found["image"][1].keys() & found["mask"][1].keys()
        for source, other in (("image", "mask"), ("mask", "image")):
            root, own = found[source]
            single = [name for name in own if name not in pairs]
            if not single:
                continue
            files = first_of([str(root / own[name]) for name in single])
            what = f"{counted(len(single), source)} without {other}: {files}"
            if not self._reader.skips or not pairs:
                ways = "; main_loop.on_bad_example: warn leaves out what has no pair" if pairs else ""
                raise ArgumentError(
                    argument, f"{what} ({found[other][0]} has {first_of([*found[other][1].values()])}){ways}"
                )
            _LOG.warning("%s: left out %s", argument, what)
            for name in single:
                del own[name]

    def classes_names(self) -> Mapping[str, Strings]:
        """Return `mask` -> the names of its classes."""
        return {"mask": self.classes} if self.classes else {}


class _Pairs(PictureRows):
    """The pictures of one stream, with their masks."""

    def texts(self, argument: str, name: str) -> Texts:
        """Return the paths or their folders."""
        if name not in ("folder", ID):
            raise ArgumentError(argument, f"pictures have no column {name!r}; the columns are folder and id")
        return self.ids if name == ID else [os.path.dirname(each) or "." for each in self.ids]  # noqa: PTH120

    def first_classes(self) -> set[int]:
        """Return the numbers in the first masks, as far as these can be read."""
        found: set[int] = set()
        for row in range(min(_LOOKED_AT, len(self))):
            with suppress(ValueError, OSError):
                found.update(np.unique(self._example.pixels(self.pictures(row), None)["mask"]).tolist())
        return found

    def check_sizes(self, argument: str) -> None:
        """Check the sizes of all masks, of which only the headers are read.

        Raises:
            ArgumentError: a mask has another size than its picture, or a file is not a picture.
        """
        for row in range(len(self)):
            try:
                self._example.check_sizes(self.pictures(row))
            except (ValueError, OSError) as error:
                raise ArgumentError(argument, f"{self.where(row)}: {error}") from error
