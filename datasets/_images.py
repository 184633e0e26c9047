"""Encoded images as arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from emrun.base.arguments import check_choice, check_count, check_flag
from emrun.base.errors import ArgumentError, StreamError, needing
from emrun.base.types import Named
from emrun.base.wording import did_you_mean
from emrun.datasets._transforms import array_of, mask_of, picture_of
from emrun.stream_context import Array

_EIGHT_BITS = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
_EXACT = ("BMP", "GIF", "PNG", "TIFF")  # formats that keep numbers; Pillow stretches those of a PGM
_NUMBERS = ("1", "L", "P", "I;16", "I;16B", "I")
_ORIENTATION, _LAST_UPRIGHT = 0x0112, 4  # the tag of EXIF, and its last value that leaves width and height as they are
_TIMES = 3  # a part of a JPEG is decoded at a lower resolution if it still has so many times the size
_TRIES = 10
_GREY = 'Image.open(file).convert("L").save("mask.png") does if it is grey'
Mode = Literal["RGB", "L"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Dtype = Literal["float32", "uint8"]
"""The dtype of images: float32 in [0, 1], or uint8 from 0 to 255."""
CropForm = Literal["random", "centre"] | Mapping[str, Any]
"""The argument `crop` in a config, see `Crop.read`."""
FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG"}
"""Extension -> Pillow's name of the format."""


def check_size(argument: str, size: object) -> tuple[int, int] | None:
    """Return height and width for an argument that is a whole number, a list of two whole numbers, or None.

    Raises:
        ArgumentError: the argument has another value.
    """
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        raise ArgumentError(argument, f"{size!r} is neither a number of pixels nor [height, width]")
    for side in sides:
        check_count(argument, side, minimum=1)
    return sides[0], sides[1]


def check_pillow(what: str) -> None:
    """Raise `MissingExtra` unless Pillow is installed."""
    with needing(what, "Pillow", "data"):
        import PIL  # noqa: F401  # the package, without its heavy parts


class Images:
    """Reads images of one mode and size.

    Args:
        mode: the mode that images are converted to: `RGB` (3 channels) or `L`, grey (1 channel).
        dtype: the dtype of the arrays.
        size: see `check_size`; None keeps the size of an image.
        crop: see `Crop.read`.
        interpolation: the filter with which images are resized.
        orient: whether to turn images upright, as the orientation in their EXIF data says.

    Raises:
        ArgumentError: an argument has another value.
    """

    def __init__(
        self, mode: Mode, dtype: Dtype, size: object, crop: object, interpolation: object, orient: bool
    ) -> None:
        check_choice("mode", mode, Mode)
        check_choice("dtype", dtype, Dtype)
        check_choice("interpolation", interpolation, Interpolation)
        check_flag("orient", orient)
        self.size = check_size("size", size)
        self.channels = 3 if mode == "RGB" else 1
        self.dtype: str = dtype
        if self.size is None and interpolation != "bilinear":
            raise ArgumentError("interpolation", "needs `size`, to which images are resized")
        self._crop = Crop.read(crop, self.size)
        self._mode = mode
        self._filter = str(interpolation).upper()
        self._orients = orient

    @property
    def crops(self) -> bool:
        """Whether only a part of each image is used."""
        return self._crop is not None

    def shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of an example of this height and width."""
        return self.channels, *size

    def size_of(self, image: Any) -> tuple[int, int]:
        """Return height and width of an opened image, upright with `orient`."""
        width, height = image.size
        is_turned = self._orients and image.getexif().get(_ORIENTATION, 1) > _LAST_UPRIGHT
        return (width, height) if is_turned else (height, width)

    def read(self, image: Any, rng: Generator | None = None) -> Array:
        """Return an opened image as an array of shape (H, W, C), of bytes unless it is a mask.

        Args:
            image: the image.
            rng: draws a random crop; None for the crop of evaluations.

        Raises:
            ValueError: the image has more than 8 bits per channel, which a conversion would cut off.
            OSError: the image is damaged; the error has no `errno`.
        """
        from PIL import Image, ImageOps

        height, width = self.size_of(image)
        box = None
        if self._crop is not None and self.size is not None:
            box = self._crop.box(width, height, self.size, rng)
            share = max(_TIMES * self.size[1] / (box[2] - box[0]), _TIMES * self.size[0] / (box[3] - box[1]))
            image.draft(image.mode, (math.ceil(image.width * share), math.ceil(image.height * share)))
        converted: Image.Image = self._converted(image)
        converted = ImageOps.exif_transpose(converted) if self._orients else converted
        if box is not None:
            along = (converted.width / width, converted.height / height)  # less than 1 after a draft
            box = (box[0] * along[0], box[1] * along[1], box[2] * along[0], box[3] * along[1])
        if self.size is not None and (box is not None or self.size != (converted.height, converted.width)):
            converted = converted.resize(self.size[::-1], Image.Resampling[self._filter], box)
        return np.asarray(converted).reshape(converted.height, converted.width, -1)

    def _converted(self, image: Any) -> Any:
        """Return an image in the mode of all images."""
        deep = re.search(r";16|;32", str(image.tile)) or (
            image.format == "PPM" and any(isinstance(tile[3], tuple) and tile[3][-1] > 255 for tile in image.tile)
        )
        if image.mode not in _EIGHT_BITS or deep:  # Pillow cuts colours of 16 bits off without a word
            raise ValueError(f"an image of mode {image.mode} has more than 8 bits per channel; convert the image first")
        is_transparent = image.mode == "P" and "transparency" in image.info
        via = "RGBA" if is_transparent else "RGB" if image.mode == "LAB" else image.mode  # not from LAB to grey
        converted = image.convert(via) if via != image.mode else image
        return converted if converted.mode == self._mode else converted.convert(self._mode)

    def tensor(self, pixels: Array) -> Any:
        """Return pixels as transforms get them."""
        return picture_of(pixels)

    def array(self, found: Any) -> Array:
        """Return an example as transforms have made it."""
        return array_of(found, self.dtype)

    def write(self, pixels: Array, out: Array) -> None:
        """Write pixels into an array of the shape of an example: as they are, or as float32 in [0, 1]."""
        if out.dtype == np.uint8:
            out[...] = pixels.transpose(2, 0, 1)
        else:
            np.divide(pixels.transpose(2, 0, 1), np.float32(255), out=out)


class Masks(Images):
    """Reads masks, whose pixels are the numbers of classes: int64 of shape (H, W), resized to the nearest pixel.

    Args:
        size: see `Images`.
        crop: see `Images`.
        orient: see `Images`.
        ignore: the number of the pixels that have no class.
        classes: the number of classes; None if it is not known.
        values: the values of the classes 0, 1, ... in the files; None if they are the numbers of the classes.

    Raises:
        ArgumentError: an argument has another value.
    """

    def __init__(
        self,
        size: object,
        crop: object,
        orient: bool,
        ignore: int,
        classes: int | None = None,
        values: Sequence[int] | None = None,
    ) -> None:
        super().__init__("L", "uint8", size, crop, "bilinear", orient)
        check_count("ignore", ignore)
        if values is not None and (not isinstance(values, list | tuple) or len({*values}) < max(len(values), 1)):
            raise ArgumentError("values", f"{values!r} is not a list of different numbers such as [0, 255]")
        for value in values or ():
            check_count("values", value)
        self._values = values
        self.dtype = "int64"
        self._filter = "NEAREST"
        self._ignore = ignore
        self._classes = classes

    def shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of an example of this height and width."""
        return size

    def read(self, image: Any, rng: Generator | None = None) -> Array:
        """Return an opened mask as an array of shape (H, W, 1).

        Raises:
            ValueError: the picture is not a mask, or has a class too many.
        """
        pixels = super().read(image, rng)
        if self._values is not None:
            if (other := pixels[~np.isin(pixels, (*self._values, self._ignore))]).size:
                raise ValueError(f"a pixel has {other.max()}, which is not one of values: {self._values}")
            numbers = np.full(pixels.shape, self._ignore, np.int64)
            for number, value in enumerate(self._values):
                numbers[pixels == value] = number
            pixels = numbers
        if self._classes is not None and (wrong := pixels[(pixels >= self._classes) & (pixels != self._ignore)]).size:
            last = self._classes - 1
            raise ValueError(
                f"a pixel has class {wrong.max()}; the classes are 0 to {last}, and {self._ignore} for none"
            )
        return pixels

    def _converted(self, image: Any) -> Any:
        """Return a mask as it is stored: of a palette, the numbers."""
        if image.format not in _EXACT or image.mode not in _NUMBERS or image.info.get("compression") == "jpeg":
            what = f"a {image.format} of mode {image.mode} is not a mask, whose pixels are the numbers of classes"
            raise ValueError(f"{what}; save them as a PNG of mode L or P, as {_GREY}")
        return image

    def tensor(self, pixels: Array) -> Any:
        """Return the pixels of a mask as transforms get them: of shape (H, W)."""
        return mask_of(pixels)

    def array(self, found: Any) -> Array:
        """Return a mask as transforms have made it.

        Raises:
            StreamError: it is not a mask.
        """
        if found.ndim != 2 or found.is_floating_point():
            kind = str(found.dtype).removeprefix("torch.")
            raise StreamError(
                f"the transforms returned a mask of shape {by(found.shape)} and dtype {kind}, not whole "
                "numbers of shape (H, W)"
            )
        return np.asarray(found.detach().numpy(), np.int64)

    def write(self, pixels: Array, out: Array) -> None:
        """Write pixels into an array of shape (H, W)."""
        out[...] = pixels[..., 0]


@dataclass(frozen=True, slots=True)
class Crop:
    """Which part of an image is used: the centre, or in training a random part if `is_random`.

    Args:
        is_random: whether training uses random parts.
        area: the smallest and largest share of the area of a random part.
        ratio: the smallest and largest ratio of width to height of a random part.
        side: the share of the short side of the image that is the side of the centre.
    """

    is_random: bool
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    side: float = 0.875

    @classmethod
    def read(cls, form: object, size: tuple[int, int] | None) -> Crop | None:
        """Read `random`, `centre`, or a mapping `{kind, area, ratio, side}`; None is no crop.

        Raises:
            ArgumentError: the value has another form, or `size` is not given.
        """
        if form is None:
            return None
        given: Named = {"kind": "random", **form} if isinstance(form, Mapping) else {"kind": form}
        check_choice("crop", given["kind"], Literal["random", "centre"])
        is_random = given.pop("kind") == "random"
        allowed = ("area", "ratio", "side") if is_random else ("side",)
        for key, value in given.items():
            if key not in allowed:
                raise ArgumentError("crop", f"unknown key {key!r}{did_you_mean(str(key), allowed)}")
            ends = [value] if key == "side" else list(value) if isinstance(value, Sequence) else []
            is_right = len(ends) == (1 if key == "side" else 2) and all(type(each) in (int, float) for each in ends)
            if not is_right or not 0 < ends[0] <= ends[-1] < math.inf or (key != "ratio" and ends[-1] > 1):
                what = "a number" if key == "side" else "[low, high]"
                limit = "" if key == "ratio" else " and at most 1"
                raise ArgumentError("crop", f"{key}: {value!r} is not {what} above 0{limit}")
        if size is None:
            raise ArgumentError("crop", "needs `size`, to which the part of an image is resized")
        return cls(is_random, **given)

    def box(
        self, width: int, height: int, size: tuple[int, int], rng: Generator | None
    ) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of the part of an image of this width and height, in pixels."""
        if not self.is_random or rng is None:
            each = self.side * min(width / size[1], height / size[0])
            left, right = _centre(width, size[1], each)
            top, bottom = _centre(height, size[0], each)
            return left, top, right, bottom
        for _ in range(_TRIES):  # as torchvision's RandomResizedCrop
            area = width * height * rng.uniform(*self.area)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            wide = round(math.sqrt(area * ratio))
            high = round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left = int(rng.integers(width - wide + 1))
                top = int(rng.integers(height - high + 1))
                return left, top, left + wide, top + high
        half = min(width, height * self.ratio[1]) / 2, min(height, width / self.ratio[0]) / 2
        return width / 2 - half[0], height / 2 - half[1], width / 2 + half[0], height / 2 + half[1]


def _centre(side: int, part: int, each: float) -> tuple[float, float]:
    """Return where `part` pixels in the middle of a side begin and end, if `each` pixels become one."""
    whole = max(part, int(side / each))  # rounded as torchvision's Resize and CenterCrop
    first = round((whole - part) / 2)
    return first * (side / whole), (first + part) * (side / whole)


def by(size: Sequence[int]) -> str:
    """Return height and width for messages, as in 3 x 4."""
    return " x ".join(map(str, size))
