"""Handwritten digits: 1,797 images of 8 x 8 pixels, which are part of scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_count, check_flag
from emrun.base.errors import needing
from emrun.base.types import Counts
from emrun.datasets._splits import ThreeStreams
from emrun.stream_context import Array, StreamContext

_TEST_EVERY = 5  # every fifth example is held out, half of them for `valid`, half for `test`
_Arrays = dict[str, Array]


class Digits(ThreeStreams):
    """Handwritten digits: 1,797 grey images of 8 x 8 pixels (the test set of UCI's Optical Recognition, 1998).

        dataset:
          class: Digits
          batch_size: 32
          shift: 1

    Streams: `train` (1,437 examples, shuffled in every pass), `valid` (180), `test` (180). Sources: `image`, float32
    in [0, 1] of shape (B, 1, 8, 8), or (B, 64) with `flat`; `label`, int64 of shape (B,), from 0 to 9.

    Needs scikit-learn (`pip install 'emrun[metrics]'`).

    Args:
        batch_size: the number of examples in a batch.
        flat: yield the images as vectors.
        shift: move each training image at random, by up to `shift` pixels in each direction. Evaluations use the images
            unchanged.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    train_only = ("batch_size", "shift")

    def __init__(self, batch_size: int = 32, flat: bool = False, shift: int = 0) -> None:
        check_count("batch_size", batch_size, minimum=1)
        check_count("shift", shift)
        check_flag("flat", flat)
        self._batch_size = batch_size
        self._flat = flat
        self._shift = shift
        images, labels = _load()
        held_out = np.arange(len(labels)) % _TEST_EVERY == 0
        parts = {
            "train": np.flatnonzero(~held_out),
            "valid": np.flatnonzero(held_out)[::2],
            "test": np.flatnonzero(held_out)[1::2],
        }
        self._parts: dict[str, _Arrays] = {
            name: {"image": images[rows], "label": labels[rows]} for name, rows in parts.items()
        }

    @property
    def num_batches(self) -> Counts:
        """Stream -> number of its batches."""
        return {name: -(-len(part["label"]) // self._batch_size) for name, part in self._parts.items()}

    def classes_names(self) -> list[str]:
        """Return the digits."""
        return [str(digit) for digit in range(10)]

    def _open(self, name: str, ctx: StreamContext) -> Iterator[_Arrays]:
        part = self._parts[name]
        for rows in ctx.batches(len(part["label"]), self._batch_size, shuffle=name == "train"):
            images = part["image"][rows]
            if name == "train" and self._shift and ctx.epoch:  # evaluations use the images unchanged
                images = _moved(images, self._shift, ctx.rng)
            yield {"image": images.reshape(len(images), -1) if self._flat else images, "label": part["label"][rows]}


def _load() -> tuple[Array, Array]:
    with needing("Digits", "scikit-learn", "metrics"):
        spec = find_spec("sklearn")  # to import it takes a second
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    table = np.loadtxt(Path(spec.origin).with_name("datasets") / "data/digits.csv.gz", delimiter=",")
    return (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32), table[:, -1].astype(np.int64)


def _moved(images: Any, shift: int, rng: np.random.Generator) -> Array:
    """Return images of shape (B, 1, H, W), each moved by up to `shift` pixels; the free pixels are 0."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    down, right = rng.integers(0, 2 * shift + 1, size=(2, len(images)))
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    moved: Array = padded[np.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
    return moved[:, None]
