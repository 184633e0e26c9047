"""Figures of matplotlib as pixels and as PNG files, apart from what the user's code does with matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from emrun.base.errors import needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
"""Pixels per inch."""


def check_matplotlib(what: str) -> None:
    """Raise `MissingExtra` unless matplotlib is installed.

    Args:
        what: the class that needs it.
    """
    with needing(what, "matplotlib", "plots"):
        import matplotlib.figure  # noqa: F401 - takes a quarter of a second, and most runs have no figures


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Let the block draw on a new figure, which no window shows and which `pyplot` does not know.

    In the block, the settings of matplotlib are those of the user's `matplotlibrc`, whatever the process has changed
    since; afterwards they are as before. Give text from data with `parse_math=False`, as it may have dollar signs.
    Letters that no font has are drawn as boxes, without a warning.

    Args:
        width: the width in inches of `DPI` pixels.
        height: the height in inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rc_file_defaults()
        mpl.rcParams["text.usetex"] = False
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from")
        drawn_on = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(drawn_on)
        yield drawn_on


def drawn(figure: Figure) -> np.ndarray[Any, Any]:
    """Return the pixels of a figure, uint8 of shape (H, W, 3); call this in the block of `figure`."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.array(np.asarray(canvas.buffer_rgba())[..., :3])


def shortened(text: str, longest: int) -> str:
    """Return a text for a figure, of at most so many characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def png(pixels: np.ndarray[Any, Any], palette: bytes | None = None) -> bytes:
    """Return pixels, uint8 of shape (H, W, 3) or (H, W), as a PNG file: the same pixels give the same bytes.

    Args:
        pixels: the pixels.
        palette: red, green and blue of each value, one byte each, if the values are numbers of colors.
    """
    from PIL import Image  # matplotlib needs it too

    file = io.BytesIO()
    image = Image.fromarray(pixels)
    if palette is not None:
        image.putpalette(palette)
    image.save(file, "png")
    return file.getvalue()
