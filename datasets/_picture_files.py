"""Streams of pictures in files: one file, or one for each of several sources, is an example."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError
from emrun.base.sources import NEW
from emrun.base.types import Batch, Json, Policy, Strings, Values
from emrun.base.wording import counted, listed
from emrun.datasets._division import Readable
from emrun.datasets._examples import ExampleReader, printable, with_names
from emrun.datasets._images import check_pillow
from emrun.datasets._paths import files_of, first_of, what_is_in
from emrun.datasets._picture_batches import Encoded, Example, PictureBatch, ReadsPictures
from emrun.datasets._splits import Part
from emrun.stream_context import Array, Rows, StreamContext

_LOG = logging.getLogger(__name__)
ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
"""The endings of the names of pictures."""
_FORMATS = ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]  # no others: Pillow runs Ghostscript on EPS


class PictureFiles(ReadsPictures):
    """Streams of pictures in files.

    Args:
        files: `train`, and perhaps `valid` and `test` -> its files; None for no such stream.
        example: reads the pictures of an example; the first source is the picture.
        classes: the names of the classes, as far as they are known.
        on_bad_example: see `ExampleReader`.
        prepared: the other arguments of `Prepared`.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    _label_source: str
    """The source with classes."""

    def __init__(
        self, files: Values, example: Example, classes: Iterable[str], on_bad_example: Policy, *prepared: Any
    ) -> None:
        self.classes = [*classes]
        """The names of the classes; a class is an index into this list."""
        self._example = example
        self._reader = ExampleReader(on_bad_example)
        check_pillow(type(self).__name__)
        self._size = next(iter(example.images.values())).size
        super().__init__(files, *prepared)

    def _sized(self, files: PairedFiles) -> tuple[int, int]:
        """Return the height and width of all pictures: by default, those of the first of train that can be read."""
        if self._size is None:
            self._size = self._first_size(files)
        return self._size

    def _first_size(self, files: PairedFiles) -> tuple[int, int]:
        (source, (root, names)), *_ = files.items()
        for name in names:
            try:
                with Encoded(root / name, _FORMATS).opened() as image:
                    height, width, _ = self._example.images[source].read(image).shape
                    return height, width
            except Exception as error:
                if not self._reader.skips:
                    raise ArgumentError("train", f"{root / name}: {error}") from error
        raise ArgumentError("train", f"no image in {root} can be read")

    def classes_instead(self, source: str) -> str | None:
        """Return what a loss of classes reads instead of a picture; None for other sources."""
        return f"read {self._label_source!r} instead" if source == "image" else None

    def _read_new(self, path: Path) -> PictureRows:
        found = {next(iter(self._example.images)): unlabelled(path)}
        return PictureRows(found, self._sized(found), self._example, self._reader)

    def _learnt(self) -> Json:
        return {"classes": self.classes, "size": list(self._size or ())}

    def _use(self, learnt: Json) -> None:
        self.classes = self.classes or list(learnt["classes"])
        height, width = learnt["size"]
        self._size = height, width

    @property
    def num_classes(self) -> int:
        """The number of classes, as far as they are known."""
        return len(self.classes)


PairedFiles = Mapping[str, tuple[Path, list[str]]]
"""Source -> a folder, and the paths of its files below the folder, in the order of the examples."""


class PictureRows(Readable, Part):
    """The pictures of one stream.

    Args:
        files: the files.
        size: height and width.
        example: reads the files of an example.
        reader: reads the examples of a batch.
    """

    def __init__(self, files: PairedFiles, size: tuple[int, int], example: Example, reader: ExampleReader) -> None:
        self._files = files
        self._source = next(iter(files))
        self._root, self.ids = files[self._source]
        self.count = len(self.ids)
        self.place = str(self._root)
        self._size = size
        self._example = example
        self._reader = reader

    ids: list[str]
    """The paths below the folder."""

    def restrict(self, rows: Rows) -> None:
        """Keep only these examples."""
        super().restrict(rows)
        own = rows.tolist()
        self._files = {source: (root, [names[row] for row in own]) for source, (root, names) in self._files.items()}

    def files(self) -> Strings:
        """Return the paths below the folder."""
        return self.ids

    def where(self, row: int) -> str:
        """Return the path of a picture."""
        return str(self._root / printable(self.ids[row]))

    def beside(self, rows: Rows) -> Batch:
        """Return the sources of these rows that are not pictures."""
        return {}

    def pictures(self, row: int) -> dict[str, Encoded]:
        """Return source -> the encoded picture of an example; messages name those that are not the first."""
        paths = {source: root / names[row] for source, (root, names) in self._files.items()}
        return {
            source: Encoded(path, _FORMATS, "" if source == self._source else str(path))
            for source, path in paths.items()
        }

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows."""
        trains = self.trains and ctx.epoch > 0
        batch = PictureBatch(self._example, self._files, len(rows), self._size, ctx, trains=trains)

        def read_one(row: int, place: int) -> tuple[int, dict[str, Array]]:
            return place, batch.read(self.pictures(row), row, place)

        with batch.reading():
            found = self._reader.read(rows, ctx, read_one, self._named, alone=batch.alone)
        rows = rows[[place for place, _ in found]]
        own = {source: batch.together(source, found, self.where, rows) for source in self._files}
        return with_names({**own, **self.beside(rows)}, rows.tolist(), self.ids)

    def _named(self, row: int) -> tuple[str, str]:
        return self.ids[row], str(self._root / self.ids[row])


def unlabelled(path: Path) -> tuple[Path, list[str]]:
    """Return a folder and the paths of all images below, or of one file, or of those that match a pattern."""
    if not path.is_dir():
        found = files_of(NEW, str(path))
        root = Path(os.path.commonpath([file.parent for file in found]))
        return root, [str(file.relative_to(root)) for file in found]
    others: list[str] = []
    files = [name.removeprefix("./") for name in below(NEW, path, ".", others)]
    tell_others(NEW, path, others)
    return path, files


def below(argument: str, root: Path, folder: str, others: list[str]) -> list[str]:
    """Return the paths of the images below a folder, sorted; add other files to `others`."""
    own: list[str] = []
    try:
        _sort(root, folder, own, others)
    except OSError as error:
        raise ArgumentError(argument, f"folder {error.filename} cannot be read: {error.strerror}") from error
    if not own:
        endings = listed(sorted(ENDINGS))
        raise ArgumentError(argument, f"{root / folder} has no images ({endings}){what_is_in(root / folder)}")
    return sorted(own)


def tell_others(argument: str, root: Path, others: Strings) -> None:
    """Log the names that were left out."""
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
                is_image = os.path.splitext(each.name)[1].lower() in ENDINGS  # noqa: PTH122 - many files
                (images if is_image else others).append(path)
