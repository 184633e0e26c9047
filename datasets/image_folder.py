"""Images in folders, one folder per class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_flag, expanded
from emrun.base.errors import ArgumentError
from emrun.base.sources import ID
from emrun.base.types import Batch, Json, Policy, Strings
from emrun.base.wording import listed
from emrun.datasets._division import SplitForm, Texts
from emrun.datasets._images import CropForm, Dtype, Images, Interpolation, Mode
from emrun.datasets._paths import what_is_in
from emrun.datasets._picture_batches import Example
from emrun.datasets._picture_files import PictureFiles, PictureRows, below, tell_others
from emrun.datasets._transforms import TransformForm, transforms_of
from emrun.stream_context import Array, Rows

_LOG = logging.getLogger(__name__)


class ImageFolder(PictureFiles):
    """Images from files, in one folder per class.

        dataset:
          class: ImageFolder
          train: pictures/train
          valid: pictures/valid
          size: [8, 8]
          mode: L
          flip: true

    In this example, `pictures/train/cat/0.png` is an image of the class `cat`. The files of a class may be in
    subfolders of its folder, and links to folders are followed. A file is an image if its name ends in png, jpg, jpeg,
    webp, gif, bmp, tif, tiff, ppm or pgm. Other files, and files and folders whose names begin with a dot, are left
    out, and counted in the log.

    With `split`, the images of one folder are divided:

        dataset:
          class: ImageFolder
          train: pictures
          split: {valid: 0.2, by: label}
          size: 64

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources:

    - `image`, of shape (B, C, H, W), float32 in [0, 1] or uint8. The pixels are used as they are stored, unless
      `orient` is true.
    - `label`, int64 of shape (B,), the index of the class among the sorted names of the folders in `train`.
    - `id`, a list of the paths below the folder, such as `cat/0.png`.
    - `position`, int64 of shape (B,), the numbers of the files in the order of evaluations.

    Needs Pillow (`pip install 'emrun[data]'`).

    Args:
        train: the folder with one folder per class. Relative paths start from the current directory.
        valid: a folder with the same classes, to evaluate on during the training.
        test: a folder with the same classes, to evaluate on at the end.
        batch_size: the number of examples in a batch.
        size: the size that images are resized to: [height, width], or one number for a square. If it is null, all
            images must have the size of the first image.
        mode: the mode that images are converted to: `RGB` (C is 3) or `L`, grey (C is 1).
        flip: mirror half of the training images left to right, drawn anew in every pass.
        dtype: `float32`, or `uint8` for bytes from 0 to 255, which take a quarter of the memory until the device: then
            write `inputs: {x: {source: image, scale: 255}}` in the model, where `x` is the parameter of `forward`.
        crop: `random` resizes a random part of each image in training passes, whose area is 0.08 to 1 of that of the
            image and whose ratio of width to height is 3/4 to 4/3, as torchvision's `RandomResizedCrop` does.
            Evaluations, and training passes with `centre`, use the centre of the image, whose side is 0.875 of the
            short side. `{area: [0.2, 1], ratio: [0.75, 1.33], side: 0.9}` and `{kind: centre, side: 1}` set other
            values. Needs `size`. A JPEG is decoded at a lower resolution if the part still has 3 times the `size` then.
        interpolation: the filter with which images are resized.
        orient: whether to turn images upright, as the orientation in their EXIF data says.
        on_bad_example: what `main_loop.on_bad_example` says, which emrun supplies: a bad example is a file that is not
            an image, or has over 67 million pixels.
        split: divides the images of `train`, see `Table`. Columns are `label`, the class, and `id`. The `files` are
            patterns for the path below the folder or the name: `{files: {valid: '*0.jpg'}}`.
        balance: the column of the classes of which training passes draw the same number of rows, see `Table`.
        transform: transforms of torchvision by name, such as `[Grayscale: {num_output_channels: 3}]`, or callables, for
            all streams. They get the image after `flip`, as `tv_tensors.Image`, uint8 of shape (C, H, W), and return
            uint8 or, for `dtype: float32`, floats; all images of a stream must have one shape then. Random numbers that
            a transform draws are those of the example: the same in every thread, worker process and rank, and after a
            resume. Needs torchvision (`pip install 'emrun[vision]'`).
        augment: more transforms, after those of `transform`, for training passes only, such as
            `[ColorJitter: {brightness: 0.3}, RandomRotation: {degrees: 10}]`.
        preparation: what the run keeps, which emrun supplies: the division, the classes and the size.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a folder does not exist, has no classes or other
            classes than `train`; or a class has no images.
        StreamError: an image cannot be read, or has another size than the first image; a transform fails, or returns
            something else than an image.
    """

    _label = "label"
    _label_source = "label"
    train_only = ("train", "batch_size", "balance", "flip", "augment")

    def __init__(
        self,
        train: str | Path,
        valid: str | Path | None = None,
        test: str | Path | None = None,
        batch_size: int = 32,
        size: Sequence[int] | int | None = None,
        mode: Mode = "RGB",
        flip: bool = False,
        dtype: Dtype = "float32",
        crop: CropForm | None = None,
        interpolation: Interpolation = "bilinear",
        orient: bool = False,
        on_bad_example: Policy = "error",
        split: SplitForm | None = None,
        balance: str | None = None,
        transform: TransformForm = None,
        augment: TransformForm = None,
        preparation: Json | None = None,
    ) -> None:
        check_flag("flip", flip)
        images = {"image": Images(mode, dtype, size, crop, interpolation, orient)}
        example = Example(images, transforms_of(transform, augment), flips=flip)
        files = {"train": train, "valid": valid, "test": test}
        super().__init__(files, example, [], on_bad_example, batch_size, split, preparation, balance)

    def _read(self, name: str, files: str | Path) -> dict[str, _Labelled]:
        root = expanded(files)
        self.classes = self.classes or _folders("train", root)
        paths, labels = _files(name, root, self.classes)
        found = {"image": (root, paths)}
        return {name: _Labelled(labels, self.classes, found, self._sized(found), self._example, self._reader)}

    def classes_names(self) -> list[str]:
        """Return the names of the classes, as `classes`."""
        return self.classes


class _Labelled(PictureRows):
    """The images of one stream, with labels."""

    label = "label"

    def __init__(self, labels: Array, classes: Strings, *pictures: Any) -> None:
        self._labels = labels
        self._classes = classes
        super().__init__(*pictures)

    def restrict(self, rows: Rows) -> None:
        """Keep only these images."""
        super().restrict(rows)
        self._labels = self._labels[rows]

    def texts(self, argument: str, name: str) -> Texts:
        """Return the classes or the paths."""
        if name not in ("label", ID):
            raise ArgumentError(argument, f"images have no column {name!r}; the columns are label and id")
        return [self._classes[label] for label in self._labels.tolist()] if name == "label" else self.ids

    def beside(self, rows: Rows) -> Batch:
        """Return the labels."""
        return {"label": self._labels[rows]}


def _folders(argument: str, root: Path) -> list[str]:
    if not root.is_dir():
        raise ArgumentError(argument, f"there is no folder {root} (the current directory is {Path.cwd()})")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        there = what_is_in(root)
        raise ArgumentError(argument, f"{root} has no folders; put the images of each class into a folder{there}")
    return names


def _files(argument: str, root: Path, classes: list[str]) -> tuple[list[str], Array]:
    """Return the paths of the images relative to the folder, sorted by class and name, and their labels."""
    there = _folders(argument, root)
    if there != classes:
        less = sorted({*classes}.difference(there))
        more = sorted({*there}.difference(classes))
        what = f"{root} must have the classes of train; missing: {listed(less)}; not in train: {listed(more)}"
        raise ArgumentError(argument, what)
    files: list[str] = []
    labels: list[int] = []
    others = [each.name for each in root.iterdir() if not each.is_dir() or each.name.startswith(".")]
    for label, name in enumerate(classes):
        own = below(argument, root, name, others)
        files += own
        labels += [label] * len(own)
    tell_others(argument, root, others)
    return files, np.array(labels, np.int64)
