"""Images in folders, one folder per class."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from emrun.base.arguments import check_flag, expanded
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.sources import ID, NEW
from emrun.base.types import Batch, Json, Policy, Strings
from emrun.base.wording import counted, listed
from emrun.datasets._division import Readable, SplitForm, Texts
from emrun.datasets._examples import ExampleReader, NamedSplits, printable, with_names
from emrun.datasets._images import CropForm, Dtype, Images, Interpolation, Mode, check_pillow, write_image
from emrun.datasets._paths import files_of, first_of, what_is_in
from emrun.datasets._prepared import Prepared
from emrun.datasets._splits import Part
from emrun.stream_context import Array, Rows, StreamContext

_LOG = logging.getLogger(__name__)
_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_FORMATS = ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]  # no others: Pillow runs Ghostscript on EPS


class ImageFolder(Prepared, NamedSplits):
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

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources: `image`,
    of shape (B, C, H, W), float32 in [0, 1] or uint8; `label`, int64 of shape (B,), the index of the class among the
    sorted names of the folders in `train`; `id`, a list of the paths below the folder, such as `cat/0.png`; `position`,
    int64 of shape (B,), the numbers of the files in the order of evaluations. The pixels are used as they are stored,
    unless `orient` is true.

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
        preparation: what the run keeps, which emrun supplies: the division, the classes and the size.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a folder does not exist, has no classes or other
            classes than `train`; or a class has no images.
        StreamError: an image cannot be read, or has another size than the first image.
    """

    fresh_batches = True
    read_ahead = 4

    _label = "label"
    train_only = ("train", "batch_size", "balance", "flip")

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
        preparation: Json | None = None,
    ) -> None:
        check_flag("flip", flip)
        self._images = Images(mode, dtype, size, crop, interpolation, orient)
        self._reader = ExampleReader(on_bad_example)
        check_pillow("ImageFolder")
        self._flips = flip
        self._size = self._images.size
        self.classes: list[str] = []
        """The names of the classes; a label is an index into this list."""
        super().__init__({"train": train, "valid": valid, "test": test}, batch_size, split, preparation, balance)

    def _read(self, name: str, files: str | Path) -> dict[str, _Pictures]:
        root = expanded(files)
        self.classes = self.classes or _folders("train", root)
        found = _files(name, root, self.classes)
        self._size = self._size or _first_size(*found, self._images, self._reader)
        return {name: _Pictures(found, self._size, self.classes, self._images, self._reader, self._flips)}

    def _read_new(self, path: Path) -> _Pictures:
        return _Pictures(_unlabelled(path), self._size or (), self.classes, self._images, self._reader, flips=False)

    def _learnt(self) -> Json:
        return {"classes": self.classes, "size": list(self._size or ())}

    def _use(self, learnt: Json) -> None:
        self.classes = list(learnt["classes"])
        height, width = learnt["size"]
        self._size = self._size or (height, width)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def classes_names(self) -> list[str]:
        """Return the names of the classes, as `classes`."""
        return self.classes


class _Pictures(Readable, Part):
    """The images of one stream."""

    def __init__(
        self,
        files: tuple[Path, list[str], Array | None],
        size: Sequence[int],
        classes: Strings,
        images: Images,
        reader: ExampleReader,
        flips: bool,
    ) -> None:
        self._root, self.ids, self._labels = files
        self.count = len(self.ids)
        self._size = size
        self._classes = classes
        self._images = images
        self._reader = reader
        self._flips = flips
        self.place = str(self._root)

    ids: list[str]
    """The paths below the folder."""
    label = "label"

    def restrict(self, rows: Rows) -> None:
        """Keep only these images."""
        super().restrict(rows)
        self._labels = None if self._labels is None else self._labels[rows]

    def files(self) -> Strings:
        """Return the paths below the folder."""
        return self.ids

    def texts(self, argument: str, name: str) -> Texts:
        """Return the classes or the paths."""
        if name not in ("label", ID):
            raise ArgumentError(argument, f"images have no column {name!r}; the columns are label and id")
        labels = () if self._labels is None else self._labels.tolist()
        return [self._classes[label] for label in labels] if name == "label" else self.ids

    def where(self, row: int) -> str:
        """Return the path of an image."""
        return str(self._root / printable(self.ids[row]))

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows."""
        images = ctx.empty((len(rows), self._images.channels, *self._size), self._images.dtype)

        def read_one(row: int, place: int) -> int:
            rng = ctx.rng_for(row) if self.trains and ctx.epoch > 0 else None
            is_flipped = self._flips and rng is not None and rng.random() < 0.5
            pixels = self._pixels(row, rng)
            write_image(pixels[:, ::-1] if is_flipped else pixels, images[place])
            return place

        places = self._reader.read(rows, ctx, read_one, self._named)
        if len(places) < len(rows):
            images = images[places]
            rows = rows[places]
        labels = {} if self._labels is None else {"label": self._labels[rows]}
        return with_names({"image": images, **labels}, rows.tolist(), self.ids)

    def _named(self, row: int) -> tuple[str, str]:
        return self.ids[row], str(self._root / self.ids[row])

    def _pixels(self, row: int, rng: Generator | None) -> Array:
        """Return an image as bytes of shape (H, W, C)."""
        path = self._root / self.ids[row]
        pixels = self._images.read(path, _FORMATS, rng)
        if pixels.shape[:2] != tuple(self._size):
            found = " x ".join(map(str, pixels.shape[:2]))
            first = " x ".join(map(str, self._size))
            raise StreamError(
                f"{path} has {found} pixels (height x width), but the first image of train has {first}; set `size`"
            )
        return pixels


def _first_size(root: Path, files: list[str], labels: Any, images: Images, reader: ExampleReader) -> tuple[int, int]:
    """Return height and width of the first image that can be read."""
    for file in files:
        try:
            height, width, _ = images.read(root / file, _FORMATS).shape
            return height, width
        except Exception as error:
            if not reader.skips:
                raise ArgumentError("train", f"{root / file}: {error}") from error
    raise ArgumentError("train", f"no image in {root} can be read")


def _folders(argument: str, root: Path) -> list[str]:
    if not root.is_dir():
        raise ArgumentError(argument, f"there is no folder {root} (the current directory is {Path.cwd()})")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        there = what_is_in(root)
        raise ArgumentError(argument, f"{root} has no folders; put the images of each class into a folder{there}")
    return names


def _files(argument: str, root: Path, classes: list[str]) -> tuple[Path, list[str], Array]:
    """Return the folder, the paths of its images relative to the folder, sorted by class and name, and their labels."""
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
        own = _below(argument, root, name, others)
        files += own
        labels += [label] * len(own)
    _tell(argument, root, others)
    return root, files, np.array(labels, np.int64)


def _unlabelled(path: Path) -> tuple[Path, list[str], None]:
    """Return a folder and the paths of all images below, or of one file, or of those that match a pattern."""
    if not path.is_dir():
        found = files_of(NEW, str(path))
        root = Path(os.path.commonpath([file.parent for file in found]))
        return root, [str(file.relative_to(root)) for file in found], None
    others: list[str] = []
    files = [name.removeprefix("./") for name in _below(NEW, path, ".", others)]
    _tell(NEW, path, others)
    return path, files, None


def _below(argument: str, root: Path, folder: str, others: list[str]) -> list[str]:
    """Return the paths of the images below a folder, sorted; add other files to `others`."""
    own: list[str] = []
    try:
        _sort(root, folder, own, others)
    except OSError as error:
        raise ArgumentError(argument, f"folder {error.filename} cannot be read: {error.strerror}") from error
    if not own:
        endings = listed(sorted(_ENDINGS))
        raise ArgumentError(argument, f"{root / folder} has no images ({endings}){what_is_in(root / folder)}")
    return sorted(own)


def _tell(argument: str, root: Path, others: Strings) -> None:
    if others:
        names = counted(len(others), "name")
        _LOG.warning("%s: left out %s of %s: %s", argument, names, root, first_of(others), extra={"names": others})


def _sort(root: Path, folder: str, images: list[str], others: list[str], above: tuple[str, ...] = ()) -> None:
    """Add the files below a folder to the images or, with hidden folders, to the others; links are followed.

    Raises:
        OSError: a folder cannot be read, or is a link to a folder that it is in.
    """
    place = os.path.realpath(root / folder)
    if place in above:
        raise OSError(errno.ELOOP, "it is a link to a folder above", str(root / folder))
    with os.scandir(root / folder) as entries:
        for each in entries:
            path = f"{folder}/{each.name}"
            if each.name.startswith("."):
                others.append(path)
            elif each.is_dir():
                _sort(root, path, images, others, (*above, place))
            else:
                is_image = os.path.splitext(each.name)[1].lower() in _ENDINGS  # noqa: PTH122 - many files
                (images if is_image else others).append(path)
