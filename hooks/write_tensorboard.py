"""Write statistics, values of steps, pictures, texts, histograms and the config for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData, Policy, Profile
from emrun.epoch_data import statistics
from emrun.hook import AbstractHook
from emrun.hooks._event_file import EventFile, check_tensorboard, summary_of
from emrun.hooks._step_points import StepPoint, StepPoints
from emrun.storage.facts import facts_of
from emrun.storage.metrics import numbers

_LOG = logging.getLogger(__name__)

Axis = Literal["updates", "examples", "epochs"]

_SECTIONS = ("model", "dataset", "main_loop", "seed", "hooks")  # in the order of the page HParams
_NOT_SHOWN = ("eval.", "sweep.", "code_directory")


def _rank(key: str) -> int:
    section = key.partition(".")[0]
    return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)


class WriteTensorBoard(AbstractHook):
    """Writes the run for TensorBoard, to the directory `tensorboard` of the run directory.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteTensorBoard: {every: 50 updates}

    `tensorboard --logdir log` shows all runs in `log`. They have:

    - after each epoch, the statistics as `STREAM/VARIABLE` for means and plain numbers, and
      `STREAM/VARIABLE/AGGREGATION` for others;
    - with `every`, the values of that step in the step record, as `steps/loss`, `steps/learning_rate` and so on;
    - the pictures, texts and histograms that hooks show, see `main_loop.show`;
    - the values of the config and, as metrics, the statistics: the page HParams compares runs by them.

    A resume takes the curves back to the checkpoint: no point is there twice and none is missing. TensorBoard may be
    open meanwhile. TensorBoard shows numbers in single precision. This hook needs `pip install 'emrun[tensorboard]'`.

    Args:
        every: how often values of steps are written: `50 updates`, `500 iterations` or `1 minutes`; by default never.
        axis: the x axis: `updates`, `examples` that the model was trained on, or `epochs`, without values of steps.
        on_unknown_type: what to do with a statistic that is not a number: `error`, `warn` or `ignore`. It is left out.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: there is no step record for `every`; a statistic is not a number, with `error`; or the directory has
            an event file that this hook did not write.
        MissingExtra: tensorboard is not installed.
        StorageError: the file cannot be written.
    """

    def __init__(
        self,
        every: str | None = None,
        axis: Axis = "updates",
        on_unknown_type: Policy = "warn",
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(output_dir=output_dir)
        check_choice("axis", axis, Axis)
        check_choice("on_unknown_type", on_unknown_type, Policy)
        if axis == "epochs" and every is not None:
            raise ArgumentError("every", "values of steps have no place on the axis `epochs`; use `updates`")
        check_tensorboard("WriteTensorBoard")
        self._points = StepPoints("WriteTensorBoard", every, counts_examples=axis == "examples")
        self._axis = axis
        self._policy = on_unknown_type
        self._file = EventFile(Path(output_dir or ".") / "tensorboard")
        self._length = 0
        self._has_config = False
        self._reported: set[str] = set()
        self._epoch_data: EpochData = {}
        if not self._points.listens:  # these would do nothing
            self.after_batch = self.after_stream = None  # type: ignore[method-assign, assignment]

    def before_training(self) -> None:
        """Begin the file, or take it back to the checkpoint.

        Raises:
            HookError: there is no step record for `every`, or an event file that this hook did not write.
        """
        self._points.start(self.main_loop)
        if not self._file.begin(self._length):
            _LOG.warning("WriteTensorBoard: the file in %s has lost points since the checkpoint", self._file.directory)
        self._length = self._file.length

    def after_batch(self, stream_name: str) -> None:  # type: ignore[override]
        """Write the values of the step before, if they are due."""
        self._write_point(self._points.after_batch(self.main_loop, stream_name))

    def after_stream(self, stream_name: str) -> None:
        """Write the values of the last step, if they are due."""
        self._write_point(self._points.after_stream(self.main_loop, stream_name))

    def _write_point(self, point: StepPoint | None) -> None:
        if point is None:
            return
        from torch.utils.tensorboard.summary import scalar

        step = point.examples if self._axis == "examples" else point.updates
        self._file.add(step, *(scalar(f"steps/{name}", value) for name, value in point.values.items()))

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Note the data of the epoch, to which later hooks may add statistics."""
        self._epoch_data = epoch_data

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Write the statistics of the epoch, and what hooks show.

        Raises:
            HookError: a statistic is not a number, and the policy is `error`.
        """
        from torch.utils.tensorboard.summary import scalar

        loop = self.main_loop
        values = self._statistics()
        if not self._has_config and not loop.evaluating and self.output_dir is not None:
            self._write_config(values)
        epochs = epoch_id if loop.at_end else loop.training_epochs_done
        step = {"updates": loop.updates_done, "examples": self._points.examples, "epochs": epochs}[self._axis]
        found = [summary_of(name, shown) for name, shown in loop.shown.items()]
        summaries = [*(scalar(name, value) for name, value in values.items()), *found]
        self._file.add(step, *(each for each in summaries if each is not None))

    def _statistics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for stream, variables in self._epoch_data.items():
            for name, value in statistics(variables):
                number = numbers(value)
                if isinstance(number, Mapping) or number is None:
                    self._complain(f"{stream}/{name}", value)
                else:
                    values[f"{stream}/{name}"] = float(number)
        return values

    def _complain(self, name: str, value: Any) -> None:
        message = f"WriteTensorBoard: {name} is {type(value).__name__}, not a number"
        if self._policy == "error":
            raise HookError(f"{message}; to leave it out, set on_unknown_type: ignore")
        if self._policy == "warn" and name not in self._reported:
            _LOG.warning("%s; it is left out", message)
        self._reported.add(name)

    def _write_config(self, metrics: Mapping[str, float]) -> None:
        """Write the values of the config, with the names of the statistics as metrics."""
        from torch.utils.tensorboard.summary import hparams, text

        facts = facts_of(Path(self.output_dir))
        keys = sorted((key for key in facts.config if not key.startswith(_NOT_SHOWN)), key=_rank)
        values = {key: "null" if facts.config[key] is None else facts.config[key] for key in keys}
        start, session, _ = hparams(values, dict.fromkeys(metrics, 0.0))
        about = {"command": facts.command, "git commit": facts.git_commit, "host": facts.host, "seed": facts.seed}
        lines = [f"- {name}: `{value}`" for name, value in about.items() if value not in (None, "")]
        self._file.add(0, start, session, text("run", "\n".join(lines)))
        self._has_config = True

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file in bytes, and what the next points need."""
        points = self._points.state_dict(self.main_loop)
        return {"length": self._file.length or self._length, "has_config": self._has_config, "points": points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; `before_training` takes the file back."""
        self._length, self._has_config = state["length"], state["has_config"]
        self._points.load_state_dict(state["points"])
