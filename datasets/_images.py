"""Encoded images as arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, MissingExtra

_MAX_PIXELS = 2**26  # 0.8 GB as three float32 channels; an image that claims to be larger is damaged or malicious
_EIGHT_BITS = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
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
    try:
        import PIL  # noqa: F401  # the package, without its heavy parts
    except ImportError as error:
        raise MissingExtra(what, "Pillow", "data") from error


def read_image(
    source: Path | IO[bytes],
    mode: Literal["RGB", "L"],
    size: tuple[int, int] | None = None,
    *,
    formats: list[str],
) -> np.ndarray[Any, Any]:
    """Return an image as bytes of shape (H, W, C).

    Args:
        source: the encoded image.
        mode: the mode that the image is converted to: `RGB` (C is 3) or `L`, grey (C is 1).
        size: the height and width that the image is resized to; None keeps its size.
        formats: Pillow's names of the formats that are allowed.

    Raises:
        ValueError: the image is larger than 67 million pixels, or has more than 8 bits per channel, which a conversion
            would cut off.
        OSError: the source is not an image, or is damaged; the error has no `errno`.
    """
    from PIL import Image

    with Image.open(source, formats=formats) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"an image of {image.width} x {image.height} pixels is too large")
        deep = re.search(r";16|;32", str(image.tile)) or (image.format == "PPM" and _is_deep(image.tile))
        if image.mode not in _EIGHT_BITS or deep:  # Pillow cuts colours of 16 bits off without a word
            raise ValueError(f"an image of mode {image.mode} has more than 8 bits per channel; convert the image first")
        is_transparent = image.mode == "P" and "transparency" in image.info
        converted = (image.convert("RGBA") if is_transparent else image).convert(mode)
    if size is not None and size != (converted.height, converted.width):
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(converted).reshape(converted.height, converted.width, -1)


def _is_deep(tiles: list[Any]) -> bool:
    return any(isinstance(tile[3], tuple) and tile[3][-1] > 255 for tile in tiles)  # the largest value of a channel


def write_floats(pixels: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Write bytes of shape (H, W, C) as float32 in [0, 1] into an array of shape (C, H, W)."""
    np.divide(pixels.transpose(2, 0, 1), np.float32(255), out=out)
