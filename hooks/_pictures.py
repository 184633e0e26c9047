"""Arrays as pictures: images of examples, masks, and sheets of several examples."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emrun.hooks._parts.figures import drawn, figure

Pixels = np.ndarray[Any, Any]

_CHANNELS = (1, 3, 4)
_LONGEST = 26  # characters in a line of a caption, and of a text in a sheet
_TEXT_LINES = 12


def picture_of(image: Any) -> Pixels:
    """Return an image as pixels: uint8 of shape (H, W), (H, W, 3) or (H, W, 4).

    Args:
        image: an array of shape (H, W), (C, H, W) or (H, W, C), with 1, 3 or 4 channels. uint8 stays as it is. Other
            numbers are taken as 0 to 1 if they are floats in this range, and as 0 to 255 if they are whole numbers in
            that range; otherwise the smallest becomes black and the largest white. What is not finite becomes black.

    Raises:
        ValueError: the array is not an image.
    """
    if not isinstance(image, np.ndarray) or image.dtype.kind not in "biuf" or 0 in image.shape:
        raise ValueError("not an image")
    if image.ndim == 3 and image.shape[0] in _CHANNELS:
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim != 2 and not (image.ndim == 3 and image.shape[2] in _CHANNELS):
        raise ValueError(
            f"shape {image.shape}, but an image has the shape (H, W), (C, H, W) or (H, W, C), C of 1, 3, 4"
        )
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    is_whole = image.dtype.kind in "iu"
    values = image.astype(np.float64)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 1.0)
    if low >= 0 and high <= (255 if is_whole else 1):
        low, high = 0.0, 255.0 if is_whole else 1.0
    values = np.where(finite, values, low)
    return np.ascontiguousarray(np.rint((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8))


@dataclass(frozen=True)
class Cell:
    """An example in a sheet.

    Args:
        shown: its picture as pixels, or its text; None if only the caption is shown.
        caption: the lines below.
        is_wrong: whether the caption stands out.
    """

    shown: Pixels | str | None
    caption: Sequence[str]
    is_wrong: bool = False


def sheet(cells: Sequence[Cell], title: str) -> Pixels:
    """Return a picture of examples in rows, uint8 of shape (H, W, 3).

    Args:
        cells: at least one example.
        title: what is above.
    """
    columns = min(len(cells), 4 if len(cells) <= 16 else 8)
    rows = -(-len(cells) // columns)
    captions = [[_short(line) for line in cell.caption] for cell in cells]
    texts = [_wrapped(cell.shown) if isinstance(cell.shown, str) else [] for cell in cells]
    line = 0.155  # inches
    below = line * max(map(len, captions)) + 0.16
    has_pictures = any(isinstance(cell.shown, np.ndarray) for cell in cells)
    above = 1.68 if has_pictures else line * max(map(len, texts))
    width = 1.85
    left, top = 0.12, 0.42
    height = top + rows * (above + below) + 0.05
    total = max(columns * width + 2 * left, 2.6)
    with figure(total, height) as drawing:
        style: dict[str, Any] = {"va": "top", "parse_math": False, "linespacing": 1.25}
        drawing.text(left / total, 1 - 0.12 / height, _short(title, int(total * 11)), fontsize=10, **style)
        for index, (cell, lines, text) in enumerate(zip(cells, captions, texts, strict=True)):
            row, column = divmod(index, columns)
            x = left + column * width
            y = height - top - row * (above + below)  # of the upper edge
            if isinstance(cell.shown, np.ndarray):
                box = (x / total, (y - above) / height, (width - 0.15) / total, above / height)
                axes = drawing.add_axes(box, anchor="SW")
                how = "nearest" if max(cell.shown.shape[:2]) <= 64 else "antialiased"  # small ones keep their pixels
                axes.imshow(cell.shown, cmap="gray", vmin=0, vmax=255, interpolation=how)
                axes.set_xticks([])
                axes.set_yticks([])
                for spine in axes.spines.values():
                    spine.set(color="0.7", linewidth=0.5)
            elif text:
                drawing.text(x / total, y / height, "\n".join(text), fontsize=7.5, family="monospace", **style)
            lower = y - 0.05 - (line * len(text) if text else above)
            color = "#b00020" if cell.is_wrong else "0.25"
            drawing.text(x / total, lower / height, "\n".join(lines), fontsize=7.5, color=color, **style)
        return drawn(drawing)


def _short(line: str, longest: int = _LONGEST) -> str:
    """Return a line without its middle if it is long: the ends of paths and names tell more."""
    line = " ".join(line.split())
    half = (longest - 1) // 2
    return line if len(line) <= longest else f"{line[: longest - 1 - half]}…{line[-half:]}"


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(" ".join(text[:2000].split()), _LONGEST - 2) or [""]
    return lines if len(lines) <= _TEXT_LINES else [*lines[: _TEXT_LINES - 1], "…"]
