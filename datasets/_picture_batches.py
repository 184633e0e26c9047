"""The pictures of a batch: encoded pictures of each example, read together, transformed, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.random import Generator

from emrun.base.errors import StreamError
from emrun.base.wording import listed
from emrun.datasets._examples import NamedSplits
from emrun.datasets._images import Images, Masks, by
from emrun.datasets._prepared import Prepared
from emrun.datasets._transforms import Transforms
from emrun.stream_context import Array, Rows, StreamContext

_MAX_PIXELS = 2**26  # 0.8 GB as three float32 channels; an image that claims to be larger is damaged or malicious


class Encoded(NamedTuple):
    """An encoded picture, the formats that are allowed by their names of Pillow, and where it is, for messages."""

    source: Path | IO[bytes]
    formats: list[str]
    where: str = ""

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Read the header of the image.

        Raises:
            ValueError: the image is larger than 67 million pixels; or the block, or the image, is at fault.
            OSError: the source is not an image, or is damaged; the error has no `errno`.
        """
        from PIL import Image

        try:
            with Image.open(self.source, formats=self.formats) as image:
                width, height = image.size
                if width * height > _MAX_PIXELS:
                    raise ValueError(f"an image of {width} x {height} pixels is too large")
                yield image
        except (ValueError, OSError, OverflowError, RecursionError) as error:
            if not self.where or getattr(error, "errno", None) is not None:
                raise
            raise ValueError(f"{self.where}: {str(error) or type(error).__name__}") from error


class Example:
    """Reads the pictures of an example: the same part of each, all of them mirrored or none, and transforms them.

    Args:
        images: source -> what reads it. Masks must have the size of the first image that is not a mask.
        transforms: those of evaluations, and those of training passes.
        flips: whether half of the training examples are mirrored.
    """

    def __init__(
        self, images: Mapping[str, Images], transforms: tuple[Transforms, Transforms], *, flips: bool = False
    ) -> None:
        self.images = dict(sorted(images.items(), key=lambda each: isinstance(each[1], Masks)))
        self.transforms = transforms
        self._flips = flips

    def check_sizes(self, pictures: Mapping[str, Encoded]) -> None:
        """Check the sizes of masks.

        Raises:
            ValueError: a mask has another size than the picture.
        """
        size: tuple[int, int] | None = None
        for images, encoded in self._read_by(pictures).values():
            with encoded.opened() as image:
                size = _checked(images, image, size)

    def stored_size(self, pictures: Mapping[str, Encoded]) -> tuple[int, int] | None:
        """Return height and width of the first picture as it is stored, if only `size` has changed them; or None."""
        for images, encoded in self._read_by(pictures).values():
            if images.size is None or images.crops or self.transforms[False]:
                return None
            with encoded.opened() as image:
                return images.size_of(image)
        return None

    def _read_by(self, pictures: Mapping[str, Encoded]) -> dict[str, tuple[Images, Encoded]]:
        return {source: (images, pictures[source]) for source, images in self.images.items() if source in pictures}

    def pixels(self, pictures: Mapping[str, Encoded], draw: Callable[[], Generator] | None) -> dict[str, Array]:
        """Return source -> pixels of shape (H, W, C).

        Args:
            pictures: source -> the encoded picture.
            draw: returns a generator, which draws the same numbers each time; None in evaluations.

        Raises:
            ValueError: a picture cannot be used; see `Encoded`, `Images` and `Masks`.
            OSError: a picture is damaged; the error has no `errno`.
        """
        found = {}
        size: tuple[int, int] | None = None
        for source, (images, encoded) in self._read_by(pictures).items():
            rng = None if draw is None else draw()
            with encoded.opened() as image:
                size = _checked(images, image, size)
                is_flipped = self._flips and rng is not None and rng.random() < 0.5
                pixels = images.read(image, rng)
            found[source] = pixels[:, ::-1] if is_flipped else pixels
        return found


class ReadsPictures(Prepared, NamedSplits):
    """Streams with pictures of an `Example`; the parts have a method `pictures`."""

    fresh_batches = True
    read_ahead = 4

    _example: Example

    def stored_size(self, stream: str, row: int) -> tuple[int, int] | None:
        """Return height and width of a picture as it is stored, if only `size` has changed them; otherwise None.

        Args:
            stream: the stream, or `train_eval`.
            row: the `position` of the picture.
        """
        part: Any = self._part(stream.removesuffix("_eval"))
        return self._example.stored_size(part.pictures(row))


class PictureBatch:
    """The pictures of a batch, while they are read.

    Args:
        example: reads the pictures of an example.
        sources: the sources.
        count: the number of examples.
        size: the height and width that all pictures must have; None if any will do that all have.
        ctx: the context of the pass.
        trains: whether the model is trained on the batch.
    """

    def __init__(
        self,
        example: Example,
        sources: Iterable[str],
        count: int,
        size: tuple[int, int] | None,
        ctx: StreamContext,
        *,
        trains: bool,
    ) -> None:
        self._example = example
        self._ctx = ctx
        self._trains = trains
        self._size = size
        self._transforms = example.transforms[trains]
        self._images = {source: example.images[source] for source in sources}
        self.alone = self._transforms.alone(ctx)
        """Whether one thread must read all examples."""
        self._rooms: dict[str, Array] = {}  # arrays for the batch, if the shape is known
        if size is not None and not self._transforms:
            self._rooms = {
                source: ctx.empty((count, *each.shape(size)), each.dtype) for source, each in self._images.items()
            }

    def reading(self) -> AbstractContextManager[None]:
        """Return the block in which examples are read."""
        return self._transforms.reading(self._ctx)

    def read(self, pictures: Mapping[str, Encoded], row: int, place: int) -> dict[str, Array]:
        """Return source -> the array of an example.

        Args:
            pictures: source -> the encoded picture.
            row: the row of the example in the data.
            place: its index in the batch.

        Raises:
            StreamError: a picture has another size than all must have, or a transform fails.
        """
        found = self._example.pixels(pictures, partial(self._ctx.rng_for, row) if self._trains else None)
        for source, pixels in found.items():
            if self._size is not None and self._size != pixels.shape[:2]:
                own = f"{pictures[source].source} has {by(pixels.shape[:2])} pixels (height x width)"
                raise StreamError(f"{own}, but the first image of train has {by(self._size)}; set `size`")
        if self._transforms:
            values = {source: self._images[source].tensor(pixels) for source, pixels in found.items()}
            values = self._transforms.apply(values, self._ctx, row)
            turned = {source: self._images[source].array(value) for source, value in values.items()}
            size = next(iter(turned.values())).shape[-2:]
            for source, array in turned.items():
                if isinstance(self._images[source], Masks) and array.shape[-2:] != size:
                    what = f"{source!r} of {by(array.shape[-2:])} pixels, but a picture of {by(size)}"
                    raise StreamError(f"the transforms returned {what}; let them change both alike")
            return turned
        arrays = {}
        for source, pixels in found.items():
            images = self._images[source]
            room = self._rooms.get(source)
            arrays[source] = np.empty(images.shape(pixels.shape[:2]), images.dtype) if room is None else room[place]
            images.write(pixels, arrays[source])
        return arrays

    def together(
        self, source: str, found: Sequence[tuple[int, Mapping[str, Any]]], where: Callable[[int], str], rows: Rows
    ) -> Any:
        """Return a source of the batch.

        Args:
            source: the source.
            found: the index in the batch and the arrays of each example, which may be fewer than there are rows.
            where: returns where the example of a row is found, for messages.
            rows: the row of each example.

        Raises:
            StreamError: the pictures have different shapes.
        """
        arrays = [each[source] for _, each in found]
        room = self._rooms.get(source)
        if room is not None:
            return room if len(found) == len(room) else room[[place for place, _ in found]]
        images = self._images[source]
        if self._transforms:
            shape = images.shape(self._size or (0, 0))
            places = [where(row) for row in rows.tolist()]
            return self._transforms.together(source, arrays, places, self._ctx, shape)
        if len(shapes := {str(array.shape) for array in arrays}) > 1:
            what = f"{source!r} has images of shapes {listed(sorted(shapes))}; set 'size'"
            raise StreamError(f"stream {self._ctx.stream_name!r}: {what}")
        if not arrays:
            return arrays
        return np.stack(arrays, out=self._ctx.empty((len(arrays), *arrays[0].shape), images.dtype))


def _checked(images: Images, image: Any, size: tuple[int, int] | None) -> tuple[int, int]:
    """Return the size of the first picture, which a mask must have; `size` is None at the first."""
    own = images.size_of(image)
    if isinstance(images, Masks) and size is not None and size != own:
        turn = "; set orient: true" if size == own[::-1] else ""
        raise ValueError(f"the mask has {by(own)} pixels (height x width), but its picture has {by(size)}{turn}")
    return size or own
