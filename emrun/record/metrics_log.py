"""The writer of a run's rows: epochs, steps, means between epochs, and what hooks show."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import Any

from emrun.base.types import EpochData, Json
from emrun.base.wording import few
from emrun.epoch_data import numbers
from emrun.hook import Loop
from emrun.record.interval_rows import IntervalRows
from emrun.record.metrics import is_before
from emrun.record.rows import Reader, Row, line_of, line_of_means, row_of_epoch
from emrun.record.steps import StepsFile
from emrun.shown import Histogram, Shown
from emrun.storage.lines import Lines
from emrun.storage.run import METRICS, ROWS, STEPS

_LOG = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds for which means are held back, because one write costs as much as many


class MetricsLog:
    """Writes what a run measures; a resume goes back to what a checkpoint counts on, to the byte.

    `metrics.jsonl` has a line for each epoch, `steps.jsonl` the steps, and `rows.jsonl` what only sinks need: the means
    between epochs that they ask for, what hooks show, and about each epoch what `metrics.jsonl` does not have. Means
    that come faster than once a second are written together, at most a second later; see `flush`.

    Args:
        directory: the run directory; None to write nothing. Sinks get the rows all the same.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.epochs: list[Json] = []
        """The lines of `metrics.jsonl` so far."""
        self.steps = StepsFile(directory / STEPS) if directory is not None else None
        """The step record; None without a directory."""
        self.intervals = IntervalRows(self._add_means, self.flush)
        """Makes the rows between epochs."""
        self.sinks: list[Callable[[Sequence[Row]], None]] = []
        """Called with new rows once they are written; hooks add themselves in `before_training`."""
        self.listeners: list[Callable[[Row], None]] = []
        """Called with each row of means at once, before it is written; hooks add themselves in `before_training`."""
        names = {"metrics": METRICS, "rows": ROWS} if directory is not None else {}
        self._files = {key: Lines(Path(directory or "", name)) for key, name in names.items()}
        self._held: list[Row] = []  # means that are not written yet
        self._written = -math.inf  # when rows were written last, in seconds of `monotonic`

    def begin_session(self) -> None:
        """Forget who gets the rows, of an earlier session."""
        self.sinks.clear()
        self.listeners.clear()

    def add_epoch(
        self,
        epoch: int,
        iteration: int,
        updates: int,
        seconds: float,
        epoch_data: EpochData,
        shown: Mapping[str, Shown] | None = None,
        *,
        at_end: bool = False,
    ) -> None:
        """Append an epoch, and give its row to the sinks.

        Args:
            epoch: the number of finished training epochs; 0 for the zeroth epoch.
            iteration: the number of batches of the train stream that were run.
            updates: the number of updates that were made.
            seconds: the duration of the epoch.
            epoch_data: numbers, or mappings of numbers; other values of hooks are not written.
            shown: what hooks have shown in the epoch; without sinks, only texts, and pictures that have no file.
            at_end: whether this is an evaluation at the end of the run, after a limit; `epoch` may be unfinished then.
        """
        # the line of `metrics.jsonl`
        self.flush()
        streams = {stream: numbers(variables) for stream, variables in epoch_data.items()}
        line = {"epoch": epoch, "iteration": iteration, "seconds": round(seconds, 6), "streams": streams}
        if at_end:
            line["at_end"] = True

        # those of `rows.jsonl` about the epoch
        about: Json = {"updates": updates, "time": round(time(), 3)}
        if unknown := list(_unknown(epoch_data)):
            about["unknown"] = unknown
            _LOG.info(
                "not a number, so not in %s: %s",
                METRICS,
                few(f"{stream}/{name} ({kind})" for stream, name, kind in unknown),
                extra={"once": True},
            )
        lines: list[Json] = [{"about": about}]
        for name, item in (shown or {}).items():
            if self.sinks or not (isinstance(item, Histogram) or getattr(item, "has_file", False)):
                written = item.counts() if isinstance(item, Histogram) else item
                if written is not None:
                    lines.append(line_of(name, written))

        # those of `metrics.jsonl` come last: see `Reader.rows`
        if self._files:
            self._files["metrics"].look()
        self._add_rows(lines)
        if self._files:
            self._files["metrics"].append(json.dumps(line, allow_nan=False))
            self.epochs.append(line)
        if self.sinks:
            self._tell([replace(row_of_epoch(line, lines), is_new=True)])

    def add_left_out(self, epoch: int, iteration: int, stream: str, left_out: Mapping[str, str]) -> None:
        """Append a row with the bad examples that were left out in an epoch of a stream.

        Args:
            epoch: the number of the epoch.
            iteration: the number of batches of the train stream that were run.
            stream: the name of the stream.
            left_out: name of an example -> why it cannot be read.
        """
        self.flush()
        self._add_rows([{"left_out": dict(left_out), "stream": stream, "epoch": epoch, "iteration": iteration}])

    def _add_means(self, every: str, means: dict[str, float], loop: Loop) -> None:
        """Add a row of means, and write it if no row was written in the last second."""
        row = Row(
            loop.iterations_done,
            loop.updates_done,
            loop.training_epochs_done + 1,
            every,
            loop.train_stream_name,
            round(time(), 3),
            means,
            is_new=True,
        )
        self._held.append(row)
        for listen in self.listeners:
            listen(row)
        if monotonic() - self._written > _PAUSE:
            self.flush()

    def flush(self) -> None:
        """Write the means that are held back, and give them to the sinks; called before anything counts on them."""
        held = self._held
        self._held = []
        if held:
            self._written = monotonic()
            self._add_rows(map(line_of_means, held))
            self._tell(held)

    def _add_rows(self, lines: Iterable[Mapping[str, Any]]) -> None:
        if self._files:
            epochs = self._files["metrics"].lines
            texts = (json.dumps({"epochs": epochs, **line}, allow_nan=False) for line in lines)
            self._files["rows"].append("\n".join(texts))

    def _tell(self, rows: Sequence[Row]) -> None:
        for sink in self.sinks:
            sink(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: lengths and digests of the files, and the values of rows to come."""
        self.flush()
        files = {name: [file.length, file.digest] for name, file in self._files.items()}
        first = self.epochs[0]["epoch"] if self.epochs else None
        return {**files, "first": first, "intervals": self.intervals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], epochs_done: int, iterations_done: int) -> None:
        """Cut the files down to their content at a checkpoint; log a warning if this content was changed or lost.

        Args:
            state: what `state_dict` returned.
            epochs_done: the epochs that were done at that time.
            iterations_done: the iterations that were done at that time.
        """
        self.intervals.load_state_dict(state["intervals"])
        first = state["first"]
        empty = [0, None]
        self._rewind(
            state.get("metrics", empty),
            state.get("rows", empty),
            range(1 if first is None else first, epochs_done + 1),
            iterations_done,
        )

    def read_epochs(self) -> None:
        """Read the lines of `metrics.jsonl`."""
        self.epochs = list(Reader(Path(str(self.directory))).epochs())

    def rewind_to_start(self) -> None:
        """Remove all rows, because no checkpoint counts on them."""
        self._rewind((0, None), (0, None), range(1), 0)
        if self.steps is not None:
            self.steps.rewind()

    def _rewind(self, metrics: Any, rows: Any, expected: range, iterations_done: int) -> None:
        self._held = []
        if self.directory is None:
            return
        path = self._files["metrics"].path
        is_whole = self._files["metrics"].go_back_to(*metrics, is_wanted=lambda line: is_before(line, expected.stop))
        file = self._files["rows"]
        if not file.go_back_to(*rows, is_wanted=lambda line: _is_row_before(line, iterations_done)):
            _LOG.warning("%s was changed since the checkpoint was saved; its complete lines are kept", file.path)
        self.read_epochs()
        known = {line["epoch"] for line in self.epochs}
        lost = (str(epoch) for epoch in expected if epoch not in known)
        missing = list(itertools.islice(lost, 1000))  # there may be any number
        if not is_whole and missing:
            _LOG.warning(
                "%s has lost lines since the checkpoint was saved; missing epochs: %s. The next epoch is written on "
                "a new line; the training itself is not affected",
                path,
                few(missing),
            )
        elif not is_whole:
            _LOG.warning("%s was changed since the checkpoint was saved; the run continues to append to it", path)


def _is_row_before(line: bytes, iterations_done: int) -> bool:
    """Return whether a line of `rows.jsonl` is complete and not of a later iteration."""
    try:
        iteration = json.loads(line).get("iteration", 0)
        return line.endswith(b"\n") and not iteration > iterations_done
    except (ValueError, TypeError, AttributeError, RecursionError):
        return line.endswith(b"\n")


def _unknown(epoch_data: EpochData) -> Iterator[list[str]]:
    """Yield stream, variable and type of the values that are not numbers."""
    for stream, variables in epoch_data.items():
        for name, value in variables.items():
            parts = value.values() if isinstance(value, Mapping) else [value]
            kinds = [type(each).__name__ for each in parts if not isinstance(numbers(each), int | float | str)]
            if kinds:
                yield [stream, name, kinds[-1]]
