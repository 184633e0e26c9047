"""Images in folders, one folder per class."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emrun.base.arguments import check_choice, check_flag, expanded
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.wording import counted, listed
from emrun.datasets._examples import ExampleReader, NamedSplits, OnBadExample, with_names
from emrun.datasets._images import check_pillow, check_size, read_image, write_floats
from emrun.datasets._paths import first_of, what_is_in
from emrun.stream_context import Rows, StreamContext

_LOG = logging.getLogger(__name__)
_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_FORMATS = ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]  # no others: Pillow runs Ghostscript on EPS
_CHANNELS = {"RGB": 3, "L": 1}


class ImageFolder(NamedSplits):
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

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources: `image`,
    float32 in [0, 1] of shape (B, C, H, W); `label`, int64 of shape (B,), the index of the class among the sorted names
    of the folders in `train`; `id`, a list of the paths below the folder, such as `cat/0.png`; `position`, int64 of
    shape (B,), the numbers of the files in the order of evaluations. The pixels are used as they are stored; the
    orientation that a camera noted in the file is ignored.

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
        on_bad_example: `error` ends the training at a file that is not an image, or has over 67 million pixels. `skip`
            leaves such files out of their batches, which get shorter, and logs how many were left out. If a whole
            batch may be bad, which is likely only for small batches, also set `main_loop.on_empty_batch` to `warn` or
            `ignore`.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a folder does not exist, has no classes or other
            classes than `train`; or a class has no images.
        StreamError: an image cannot be read, or has another size than the first image.
    """

    fresh_batches = True

    def __init__(
        self,
        train: str | Path,
        valid: str | Path | None = None,
        test: str | Path | None = None,
        batch_size: int = 32,
        size: Sequence[int] | int | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        flip: bool = False,
        on_bad_example: Literal["error", "skip"] = "error",
    ) -> None:
        check_choice("mode", mode, Literal["RGB", "L"])
        check_flag("flip", flip)
        sides = check_size("size", size)
        reader = ExampleReader(on_bad_example)
        check_pillow("ImageFolder")
        self.classes = _folders("train", expanded(train))
        """The names of the classes; a label is an index into this list."""
        folders = {"train": train, "valid": valid, "test": test}
        found = {name: _files(name, expanded(path), self.classes) for name, path in folders.items() if path is not None}
        shape = sides or _first_size(*found["train"], mode, on_bad_example)
        parts = {
            name: _Pictures(*files, shape, sides is not None, mode, flip and name == "train", reader)
            for name, files in found.items()
        }
        super().__init__(reader, parts, batch_size)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def classes_names(self) -> list[str]:
        """Return the names of the classes, as `classes`."""
        return self.classes


class _Pictures:
    """The images of one stream."""

    blocks: Sequence[int] | None = None

    def __init__(
        self,
        root: Path,
        files: list[str],
        labels: np.ndarray[Any, Any],
        size: tuple[int, int],
        resizes: bool,
        mode: Literal["RGB", "L"],
        flips: bool,
        reader: ExampleReader,
    ) -> None:
        self._root = root
        self._files = files
        self._labels = labels
        self._size = size
        self._resizes = resizes
        self._mode: Literal["RGB", "L"] = mode
        self._flips = flips
        self._reader = reader

    def __len__(self) -> int:
        return len(self._files)

    def read(self, rows: Rows, ctx: StreamContext) -> dict[str, Any]:
        """Return the batch of these rows."""
        flips = self._flips and ctx.epoch > 0

        def read_one(row: int) -> tuple[int, np.ndarray[Any, Any]]:
            pixels = self._pixels(row)
            return row, pixels[:, ::-1] if flips and ctx.rng_for(row).random() < 0.5 else pixels

        found = self._reader.read(rows, ctx, read_one, lambda row: str(self._root / self._files[row]))
        images = np.empty((len(found), _CHANNELS[self._mode], *self._size), np.float32)
        for image, (_, pixels) in zip(images, found, strict=True):
            write_floats(pixels, image)
        read = [row for row, _ in found]
        return with_names({"image": images, "label": self._labels[np.array(read, np.int64)]}, read, self._files)

    def _pixels(self, row: int) -> np.ndarray[Any, Any]:
        """Return an image as bytes of shape (H, W, C)."""
        path = self._root / self._files[row]
        pixels = read_image(path, self._mode, self._size if self._resizes else None, formats=_FORMATS)
        if pixels.shape[:2] != self._size:
            found, first = (f"{height} x {width}" for height, width in (pixels.shape[:2], self._size))
            raise StreamError(
                f"{path} has {found} pixels (height x width), but the first image of train has {first}; set `size`"
            )
        return pixels


def _first_size(
    root: Path, files: list[str], labels: Any, mode: Literal["RGB", "L"], policy: OnBadExample
) -> tuple[int, int]:
    """Return height and width of the first image that can be read."""
    for file in files:
        try:
            height, width, _ = read_image(root / file, mode, formats=_FORMATS).shape
        except Exception as error:
            if policy == "error":
                raise ArgumentError("train", f"{root / file}: {error}") from error
        else:
            return height, width
    raise ArgumentError("train", f"no image in {root} can be read")


def _folders(argument: str, root: Path) -> list[str]:
    if not root.is_dir():
        raise ArgumentError(argument, f"there is no folder {root} (the current directory is {Path.cwd()})")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        there = what_is_in(root)
        raise ArgumentError(argument, f"{root} has no folders; put the images of each class into a folder{there}")
    return names


def _files(argument: str, root: Path, classes: list[str]) -> tuple[Path, list[str], np.ndarray[Any, Any]]:
    """Return the folder, the paths of its images relative to the folder, sorted by class and name, and their labels."""
    there = _folders(argument, root)
    if there != classes:
        more = [name for name in there if name not in classes]
        less = [name for name in classes if name not in there]
        raise ArgumentError(
            argument,
            f"{root} does not have all classes of train; missing: {listed(less)}"
            if less
            else f"{root} has classes that train does not have: {listed(more)}",
        )
    files: list[str] = []
    labels: list[int] = []
    others = [each.name for each in root.iterdir() if not each.is_dir() or each.name.startswith(".")]
    for label, name in enumerate(classes):
        own: list[str] = []
        try:
            _sort(root, name, own, others)
        except OSError as error:
            raise ArgumentError(argument, f"folder {error.filename} cannot be read: {error.strerror}") from error
        if not own:
            endings = listed(sorted(_ENDINGS))
            raise ArgumentError(argument, f"{root / name} has no images ({endings}){what_is_in(root / name)}")
        files += sorted(own)
        labels += [label] * len(own)
    if others:
        found = argument, counted(len(others), "name"), root, first_of(others)
        _LOG.warning("%s: left out %s of %s: %s", *found, extra={"names": others})
    return root, files, np.array(labels, np.int64)


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
