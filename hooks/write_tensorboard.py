"""Write statistics, values of steps, pictures, texts, histograms and the config for TensorBoard."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emrun.base.arguments import check_choice
from emrun.base.errors import HookError, needing
from emrun.base.types import Policy
from emrun.record.facts import Facts
from emrun.record.metrics_log import MetricsLog
from emrun.record.rows import Row
from emrun.record.sinks import FileSink
from emrun.shown import Counts, Picture, Written
from emrun.storage.files import append

_LOG = logging.getLogger(__name__)

_SECTIONS = ("model", "dataset", "main_loop", "seed", "hooks")  # in the order of the page HParams
_NOT_SHOWN = ("eval.", "sweep.", "code_directory")
_FILE = "events.out.tfevents.{}.emrun"


def _rank(key: str) -> int:
    section = key.partition(".")[0]
    return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)


class WriteTensorBoard(FileSink):
    """Writes the run for TensorBoard, to the directory `tensorboard` of the run directory.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteTensorBoard: {every: 50 updates}

    `tensorboard --logdir log` shows all runs in `log`. The x axis is the number of updates. They have:

    - after each epoch, the statistics as `STREAM/VARIABLE` for means and plain numbers, and
      `STREAM/VARIABLE/AGGREGATION` for others;
    - with `every`, the means since the last such point, of learning rates the last values, as `steps/loss`,
      `steps/learning_rate` and so on;
    - the pictures, texts and histograms that hooks show, see `main_loop.show`;
    - the values of the config and, as metrics, the statistics: the page HParams compares runs by them.

    A resume makes the event file again, with the points up to the checkpoint: no point is there twice and none is
    missing, and what others have added to the file is lost. TensorBoard may be open meanwhile. TensorBoard shows
    numbers in single precision. This hook needs `pip install 'emrun[tensorboard]'`.

    Args:
        every: how often means are written: `50 updates`, `500 iterations` or `1 minutes`; by default never.
        on_unknown_type: what to do with a statistic that is not a number: `error`, `warn` or `ignore`. It is left out.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: a statistic is not a number, with `error`; or there is a directory `tensorboard` that the run has not
            written.
        MissingExtra: tensorboard is not installed.
    """

    def __init__(
        self,
        every: str | None = None,
        on_unknown_type: Policy = "warn",
        output_dir: str | Path | None = None,
    ) -> None:
        check_choice("on_unknown_type", on_unknown_type, Policy)
        with needing("WriteTensorBoard", "tensorboard", "tensorboard"):
            import tensorboard.summary.writer.record_writer  # noqa: F401 - takes a second
        super().__init__("tensorboard/", every, output_dir)
        self._policy = on_unknown_type
        self._waiting = io.BytesIO()  # what is not written yet
        self._facts: Facts | None = None  # until the config is written
        self._reported: set[tuple[str, str]] = set()

    def make(self, record: MetricsLog) -> None:
        """Make a file under a new name, and remove the old one: TensorBoard remembers how far it has read a name."""
        old = list(self.path.glob(_FILE.format("*")))
        number = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in old)])
        self.place = self.path / _FILE.format(f"{number:010d}")
        super().make(record)
        for path in old:
            path.unlink()

    def begin(self, facts: Facts) -> None:
        """Begin with the version of the format."""
        self._waiting = io.BytesIO()
        self._facts = facts if facts.config else None
        self._add(file_version="brain.Event:2", wall_time=time.time())

    def flush(self) -> None:
        """Append the points that are waiting."""
        append(self.file, self._waiting.getvalue())
        self._waiting = io.BytesIO()

    def write(self, row: Row) -> None:
        """Add the means, or the statistics of an epoch and what hooks show, to what is waiting.

        Raises:
            HookError: a statistic is not a number, and the policy is `error`.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        if row.is_new:
            for place, kind in row.unknown.items():
                self._complain(place, kind)
        values = row.values
        if row.every is None and self._facts is not None:
            self._write_config(self._facts, values, row.time)
            self._facts = None
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        if row.updates is None:
            return  # the record has lost what was known of this epoch
        self._add_values(row.updates, row.time, scalars + [_value_of(name, shown) for name, shown in row.shown.items()])

    def _complain(self, place: tuple[str, str], kind: str) -> None:
        message = f"WriteTensorBoard: {'/'.join(place)} is {kind}, not a number"
        if self._policy == "error":
            raise HookError(f"{message}; to leave it out, set on_unknown_type: ignore")
        if self._policy == "warn" and place not in self._reported:
            _LOG.warning("%s; it is left out", message)
        self._reported.add(place)

    def _write_config(self, facts: Facts, metrics: Mapping[str, float], time: float) -> None:
        """Write the values of the config, with the names of the statistics as metrics."""
        from torch.utils.tensorboard.summary import hparams, text

        keys = sorted((key for key in facts.config if not key.startswith(_NOT_SHOWN)), key=_rank)
        values = {key: "null" if facts.config[key] is None else facts.config[key] for key in keys}
        start, session, _ = hparams(values, dict.fromkeys(metrics, 0.0))
        about = {"command": facts.command, "git commit": facts.git_commit, "host": facts.host, "seed": facts.seed}
        lines = [f"- {name}: `{value}`" for name, value in about.items() if value not in (None, "")]
        summaries = start, session, text("run", "\n".join(lines))
        self._add_values(0, time, [value for summary in summaries for value in summary.value])

    def _add_values(self, step: int, time: float, values: list[Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._add(step=step, wall_time=time, summary=Summary(value=values))

    def _add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._waiting).write(Event(**event).SerializeToString())


def _value_of(name: str, shown: Written) -> Any:
    """Return something that a hook shows as the value of a summary."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import summary

    if isinstance(shown, Picture):
        width, height = shown.size
        return Summary.Value(
            tag=name, image=Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=shown.png)
        )
    if isinstance(shown, Counts):
        made = summary.histogram_raw(
            name,
            min=shown.edges[0],
            max=shown.edges[-1],
            num=sum(shown.counts),
            sum=shown.total,
            sum_squares=shown.squares,
            bucket_limits=shown.edges[1:],
            bucket_counts=shown.counts,
        )
        return made.value[0]
    return summary.text(name, shown.text).value[0]
