"""What hooks show beside numbers: pictures, texts and histograms, for the page of the run and for trackers."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        png: the bytes of a PNG file.
        has_file: whether the run directory already has a file of the picture; then it is not stored a second time.
    """

    png: bytes
    has_file: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.png, bytes) or not self.png.startswith(b"\x89PNG\r\n\x1a\n") or len(self.png) < 24:
            raise ValueError("a Picture needs the bytes of a PNG file")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return int.from_bytes(self.png[16:20], "big"), int.from_bytes(self.png[20:24], "big")

    def image(self) -> Any:
        """Return the picture as an image of Pillow."""
        from PIL import Image

        return Image.open(io.BytesIO(self.png))


@dataclass(frozen=True)
class Text:
    """A text, as Markdown."""

    text: str


@dataclass(frozen=True, eq=False)
class Histogram:
    """Values of which the distribution is shown.

    Args:
        values: a tensor or an array of numbers; it must not change afterwards.
    """

    values: Any

    def finite(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the values that are finite, as an array of shape (N,) of float64; this waits for the device."""
        import numpy as np

        values = self.values.detach().double().cpu().numpy() if hasattr(self.values, "detach") else self.values
        flat = np.asarray(values, dtype=np.float64).ravel()
        return flat[np.isfinite(flat)]

    def counts(self, bins: int = 64) -> Counts | None:
        """Return how many values are in each of some bins of equal width; None if no value is finite."""
        import numpy as np

        values = self.finite()
        if not values.size:
            return None
        counts, edges = np.histogram(values, bins=bins)
        return Counts(edges.tolist(), counts.tolist(), float(values.sum()), float(values @ values))


@dataclass(frozen=True)
class Counts:
    """A histogram, as sinks get it.

    Args:
        edges: the edges of the bins, one more than there are bins.
        counts: the number of values in each bin.
        total: the sum of the values.
        squares: the sum of their squares.
    """

    edges: list[float]
    counts: list[int]
    total: float
    squares: float


Shown = Picture | Text | Histogram
Written = Picture | Text | Counts
