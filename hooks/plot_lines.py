"""Plot sequences of numbers: a picture for each example."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from emrun.base.arguments import check_choice, check_count, check_names, check_number
from emrun.base.errors import ArgumentError
from emrun.base.types import Units
from emrun.hooks._shared.evaluations import SavesExamples, needed
from emrun.hooks._shared.examples import Examples, file_stem
from emrun.hooks._shared.figures import check_matplotlib, drawn, figure, png, shortened
from emrun.shown import Picture
from emrun.storage.files import make_directory, storing, write_atomically

Format = Literal["png", "svg", "pdf"]

_MOST = 10  # lines of a variable that are told apart in the legend


class PlotLines(SavesExamples):
    """Plots variables that are sequences of numbers, one picture for each example, at each evaluation of a stream.

        hooks:
          - PlotLines: {variables: [target, output], streams: [valid]}

    The first four examples of the first batch are plotted, such as
    `visual/epoch_3/valid/17_batch_1_plot-target-vs-output.png` for the id 17. Trackers such as `WriteTensorBoard` get
    the first picture of each stream. A sequence of several numbers at each place has as many lines; a variable with a
    single number is a dashed line.

    Batches that the model is trained on are left out; to plot those of the train stream, evaluate it: `extra_streams:
    [train]` makes a stream `train_eval`.

    Needs matplotlib (`pip install 'emrun[plots]'`).

    Args:
        variables: the variables, of shape (B, T), (B, T, K) or (B,), or lists of sequences of different lengths.
        streams: the streams; by default all that are evaluated, but the train stream in the zeroth epoch.
        id_variable: the source with the ids, different within a batch; by default `id`, or else the position in the
            stream.
        pad_mask_variable: a source of shape (B, T) that is 0 or false where nothing is plotted; of shape (B,) for whole
            examples.
        out_format: `png`, `svg` or `pdf`.
        ymin: the lower end of the y axis.
        ymax: the upper end of the y axis.
        example_count: how many examples of each batch are plotted; None for all.
        batch_count: how many batches of each stream are plotted; None for all.
        every: how often plots are made, such as `5 epochs`; a number means epochs.
        root_dir: the folder, in the run directory.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have one of `streams`, or two hooks write the same files.
        MissingExtra: matplotlib is not installed.
        StreamError: a batch lacks a variable, a variable is not sequences of numbers, or ids are not different.
        StorageError: a file cannot be written.
    """

    def __init__(
        self,
        variables: Sequence[str],
        streams: Sequence[str] | None = None,
        id_variable: str | None = None,
        pad_mask_variable: str | None = None,
        out_format: Format = "png",
        ymin: float | None = None,
        ymax: float | None = None,
        example_count: int | None = 4,
        batch_count: int | None = 1,
        every: Annotated[int | str, Units(("epochs",))] = 1,
        root_dir: str = "visual",
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        check_names("variables", variables)
        if not variables:
            raise ArgumentError("variables", "name at least one variable")
        super().__init__(
            streams, every, needed(*variables, id_variable, pad_mask_variable), root_dir, dataset, output_dir
        )
        check_choice("out_format", out_format, Format)
        for name, value in (("example_count", example_count), ("batch_count", batch_count)):
            if value is not None:
                check_count(name, value, minimum=1)
        for name, limit in (("ymin", ymin), ("ymax", ymax)):
            if limit is not None:
                check_number(name, limit)
        if ymin is not None and ymax is not None and not ymin < ymax:
            raise ArgumentError("ymax", f"{ymax!r} is not above ymin, {ymin!r}")
        check_matplotlib(type(self).__name__)
        self._variables = needed(*variables)
        self._id = id_variable
        self._mask = pad_mask_variable
        self._format = out_format
        self._limits = ymin, ymax
        self._examples = example_count
        self._most_batches = batch_count
        self._suffix = file_stem("-vs-".join(self._variables))

    def writes_same(self, other: Any) -> bool:
        """Return whether another hook plots the same variables into the same folder."""
        return super().writes_same(other) and (self._suffix, self._format) == (other._suffix, other._format)

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Plot the examples of a batch.

        Raises:
            StorageError: a file cannot be written.
        """
        if not self.looks_at(stream_name) or self._batches == self._most_batches:
            return
        examples = self.next_batch(batch_data)
        rows = range(examples.count if self._examples is None else min(examples.count, self._examples))
        ids = examples.ids(self._id, rows)
        twice = next((name for index, name in enumerate(ids) if name in ids[:index]), None)
        if twice is not None:
            raise examples.error(f"two examples have the id {twice!r:.80}; ids name the files, so they must differ")
        columns = {name: examples.column(name, rows) for name in self._variables}
        masks = None if self._mask is None else examples.column(self._mask, rows)
        folder = self.root / f"epoch_{self._epoch}" / stream_name
        with storing(folder, "write"):
            make_directory(folder, exist_ok=True)
        for row, name in enumerate(ids):
            mask = None if masks is None else np.asarray(masks[row]) != 0
            lines = {variable: _line(examples, variable, column[row], mask) for variable, column in columns.items()}
            content, picture = self._drawn(lines, f"{stream_name}, epoch {self._epoch}: {name}")
            file = f"{file_stem(name)}_batch_{self._batches}_plot-{self._suffix}.{self._format}"
            write_atomically(folder / file, content)
            if self._batches == 1 and not row:
                self.main_loop.show(f"{stream_name}/{'-vs-'.join(self._variables)}", Picture(picture, has_file=True))

    def _drawn(self, lines: dict[str, np.ndarray[Any, Any]], title: str) -> tuple[bytes, bytes]:
        """Return the file of an example, and its picture as PNG."""
        import matplotlib as mpl
        from matplotlib.ticker import MaxNLocator

        with figure(6.4, 4) as drawing:
            drawing.set_layout_engine("constrained")
            axes = drawing.subplots()
            for index, (name, values) in enumerate(lines.items()):
                color = f"C{index}"
                if values.ndim == 0:
                    axes.axhline(float(values), label=name, color=color, linestyle="--", linewidth=1.2)
                    continue
                marker = "." if len(values) <= 40 else None
                is_alone = len(lines) == 1 and (values.ndim == 1 or values.shape[1] <= _MOST)
                line_color = None if is_alone else color  # each line of the only variable has a color of its own
                plotted = axes.plot(values, label=name, color=line_color, marker=marker, linewidth=1.4)
                for column, line in enumerate(plotted):
                    line.set_alpha(1 if is_alone else 1 - 0.75 * column / len(plotted))
                    if 1 < len(plotted) <= _MOST:
                        line.set_label(f"{name}.{column}")
                    elif column:
                        line.set_label("")  # of many lines, the first one is in the legend
            if not any(np.isfinite(values).any() for values in lines.values()):
                axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color="0.4")
            axes.set_ylim(*self._limits)
            axes.margins(x=0.02)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(shortened(title, 70), fontsize=10, loc="left", parse_math=False)
            handles, names = axes.get_legend_handles_labels()
            plain = [shortened(name, 24).replace("$", r"\$") for name in names]  # no formulas
            drawing.legend(handles, plain, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
            picture = png(drawn(drawing))
            if self._format == "png":
                return picture, picture
            mpl.rcParams["svg.hashsalt"] = "emrun"  # names in the file, which are drawn at random otherwise
            when = {"Date": None} if self._format == "svg" else {"CreationDate": None}
            file = io.BytesIO()
            drawing.savefig(file, format=self._format, metadata=when)
            return file.getvalue(), picture


def _line(examples: Examples, name: str, value: Any, mask: Any) -> np.ndarray[Any, Any]:
    """Return the values of an example as floats of shape (T,), (T, K) or (); NaN where nothing is plotted."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf" or value.ndim > 2:
        shape = f"the shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise examples.error(f"{name!r} is not a sequence of numbers for each example: an example has {shape}")
    values = np.array(value, np.float64)
    values[~np.isfinite(values)] = np.nan
    if mask is None or not values.ndim:
        return values
    if not mask.ndim:
        mask = np.broadcast_to(mask, values.shape[:1])
    if mask.shape != values.shape[:1]:
        raise examples.error(f"the padding mask of an example has the shape {mask.shape}, and {name!r} {values.shape}")
    values[~mask] = np.nan
    kept = np.flatnonzero(mask)
    return values[: kept[-1] + 1] if len(kept) else values[:0]
