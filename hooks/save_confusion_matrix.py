"""Save the confusion matrix of each epoch, as a picture and as CSV."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData, Interval, Units
from emrun.base.wording import did_you_mean
from emrun.hooks._shared.class_counts import ClassHook, Counted
from emrun.hooks._shared.columns import csv_of
from emrun.hooks._shared.figures import check_matplotlib, drawn, figure, png, shortened
from emrun.shown import Picture
from emrun.storage.files import write_atomically

_LOG = logging.getLogger(__name__)

_LONGEST = 28  # characters of a name in a picture
_TEXT = 20  # the most classes with numbers in their cells
_NAMED = 60  # the most with all their names


class SaveConfusionMatrix(ClassHook):
    """Saves how often each class was predicted as each other class, as a picture and as CSV, after each epoch.

        hooks:
          - SaveConfusionMatrix: {labels_name: label, predictions_name: logits}

    The files `confusion_matrix_epoch_1_valid.png` and `confusion_matrix_epoch_1_valid.csv` in the run directory belong
    to epoch 1 and stream `valid`. A row is a true class, a column a predicted one. The CSV file has the numbers of
    examples, with the names of the classes in its first line and its first column. Trackers such as `WriteTensorBoard`
    show the picture as `valid/confusion_matrix`.

    Predictions are class numbers of the same shape as the labels, or logits of shape (B, C, ...), of which the largest
    counts, with labels of shape (B, ...) or (B, 1, ...). Each place of a sequence counts as an example. Only the counts
    are kept. Without names, the number of classes is that of the logits, or else the classes from 0 to the largest that
    occurs.

    A picture takes about half a second: `every` and `streams` make fewer of them.

    Needs matplotlib (`pip install 'emrun[plots]'`).

    Args:
        labels_name: the source with the true classes.
        predictions_name: the output with the predictions.
        classes_names: the names of the classes, in the order of their numbers; by default those of the dataset.
        mask_name: a variable of the shape of the labels; where it is 0, such as in padding, nothing counts.
        normalize: color each row by its shares, so that rare classes can be seen; otherwise by numbers of examples.
        cmap: the name of a color map of matplotlib.
        figsize: width and height of the picture in inches of 100 pixels; by default as the classes need.
        every: how often files are written, such as `5 epochs`; a number means epochs.
        streams: the streams whose predictions are compared; by default all.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have one of `streams`, or its names are not a list of names.
        MissingExtra: matplotlib is not installed.
        StreamError: a batch lacks a variable, the shapes do not fit, the values are not class numbers, there is another
            number of classes than of names, or there are more than 2,000 classes.
        StorageError: a file cannot be written.
    """

    writes = ()
    files = ("confusion_matrix_epoch_*.png", "confusion_matrix_epoch_*.csv")

    def __init__(
        self,
        labels_name: str = "labels",
        predictions_name: str = "predictions",
        classes_names: Sequence[str] | None = None,
        mask_name: str | None = None,
        normalize: bool = True,
        cmap: str = "Blues",
        figsize: Sequence[float] | None = None,
        every: Annotated[int | str, Units(("epochs",))] = 1,
        streams: Sequence[str] | None = None,
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            predictions_name, labels_name, mask_name, classes_names, streams, dataset, output_dir=output_dir
        )
        check_matplotlib(type(self).__name__)
        _check_map(cmap)
        if figsize is not None:
            _check_size(figsize)
        self._normalize = normalize
        self._map = cmap
        self._size = None if figsize is None else (float(figsize[0]), float(figsize[1]))
        self._every = Interval.parse("every", every)
        self._directory = Path(output_dir or ".")
        self._is_due = True

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the counts of the previous epoch."""
        super().before_epoch(epoch_id)
        self._is_due = epoch_id % self._every.count == 0

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Count the predictions of a batch."""
        if self._is_due:
            super().after_batch(stream_name, batch_data)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Write the files of the epoch."""
        epoch = self.main_loop.training_epochs_done if self.main_loop.evaluating else epoch_id
        for stream, matrix in self.matrices():
            if not len(matrix):
                _LOG.warning("SaveConfusionMatrix: nothing counts in stream %r, by %s", stream, self._variables[-1])
                continue
            names = self._names or [str(number) for number in range(len(matrix))]
            pixels = draw_matrix(
                matrix,
                names,
                f"{stream}, epoch {epoch}",
                normalize=self._normalize,
                cmap=self._map,
                size=self._size,
            )
            file = self._directory / f"confusion_matrix_epoch_{epoch_id}_{stream}.png"
            picture = png(pixels)
            write_atomically(file, picture)
            counts = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
            write_atomically(file.with_suffix(".csv"), csv_of([["true class", *names], *counts]))
            self.main_loop.show(f"{stream}/confusion_matrix", Picture(picture, has_file=True))


def draw_matrix(
    matrix: Counted,
    names: Sequence[str],
    title: str,
    *,
    normalize: bool,
    cmap: str,
    size: tuple[float, float] | None,
) -> Counted:
    """Return a picture of a confusion matrix, uint8 of shape (H, W, 3).

    Args:
        matrix: how often each class (row) was predicted as each class (column), of shape (C, C).
        names: the names of the C classes.
        title: what is above the picture; the accuracy is added.
        normalize: color each row by its shares.
        cmap: the name of a color map.
        size: width and height in inches; None for a size that fits the classes.
    """
    from matplotlib.colors import PowerNorm

    n = len(names)
    total = int(matrix.sum())
    has_text = n <= _TEXT
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    shown = shares if normalize else matrix
    labels = [shortened(name, _LONGEST) for name in names]

    # the size: room for each class, and for the longest name on both axes
    longest = 0.085 * max(map(len, labels), default=0)
    side = float(np.clip((0.62 if has_text else 0.2) * n, 2.6, 12))
    with figure(*(size or (side + longest + 1.8, side + longest + 1.4))) as drawing:
        drawing.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        axes = drawing.subplots()
        norm = PowerNorm(0.5, 0, 1 if normalize else max(1, int(matrix.max(initial=0))))  # so that few errors are seen
        image = axes.imshow(shown, cmap=cmap, norm=norm)

        # the names of the classes, or of every second one, every third one, ...
        step = -(-n // _NAMED)
        rotation = 0 if longest <= side / max(n, 1) else 90
        axes.set_xticks(range(0, n, step), labels[::step], rotation=rotation, fontsize=8, parse_math=False)
        axes.set_yticks(range(0, n, step), labels[::step], fontsize=8, parse_math=False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        right = f"{matrix.trace() / total:.1%} of {total:,} right" if total else "no examples"
        axes.set_title(f"{title}\n{right}", fontsize=10, parse_math=False)

        # the share of each row and the number of examples
        cells = np.argwhere(matrix > 0).tolist() if has_text else ()
        for row, column in cells:
            axes.text(
                column,
                row,
                f"{shares[row, column]:.0%}\n{matrix[row, column]:,}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if norm(shown[row, column]) > 0.6 else "black",
            )
        bar = drawing.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=20)
        bar.set_label("share of the true class" if normalize else "examples")
        return drawn(drawing)


def _check_map(name: Any) -> None:
    import matplotlib as mpl

    if not isinstance(name, str) or name not in mpl.colormaps:
        near = did_you_mean(str(name), list(mpl.colormaps)) or ", such as Blues"
        raise ArgumentError("cmap", f"{name!r} is not the name of a color map of matplotlib{near}")


def _check_size(size: Any) -> None:
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise ArgumentError("figsize", f"{size!r} is not [width, height] in inches, such as [8, 6]")
    for length in size:
        check_number("figsize", length, "a size in inches, at least 1 and below 100", least=1, below=100)
