"""Write the statistics of each epoch to the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

from emrun.arguments import check_choice, check_names
from emrun.epoch_data import is_rate, statistics
from emrun.errors import HookError
from emrun.hook import AbstractHook
from emrun.types import EpochData, EpochVariable
from emrun.wording import did_you_mean

_LOG = logging.getLogger(__name__)

UnknownType = Literal["error", "warn", "str", "ignore"]


class LogVariables(AbstractHook):
    """Logs one line per stream after every epoch: `epoch 3  valid  loss 0.1240  accuracy 0.9611`.

    A mean is logged under the name of its variable, any other aggregation as `variable/aggregation`. The line of the
    train stream ends with the learning rate of the last update (several, if the parameter groups have different ones)
    and the seconds of the epoch, evaluations included: `epoch 3  train  loss 0.1173  lr 0.001  12.3 s`.

        hooks:
          - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}
          - LogVariables: {variables: [loss]}

    Args:
        variables: which variables of the epoch are logged; by default all.
        on_unknown_type: what to do if a value is not a number: `error`, `warn`, `str` (log the value as a string) or
            `ignore`.

    Raises:
        ArgumentError: `variables` is not a list of names, or `on_unknown_type` has another value.
        HookError: a value is not a number and `on_unknown_type` is `error`, or no stream has a listed variable.
    """

    def __init__(
        self, variables: Sequence[EpochVariable] | None = None, on_unknown_type: UnknownType = "ignore"
    ) -> None:
        super().__init__()
        check_choice("on_unknown_type", on_unknown_type, UnknownType)
        if variables is not None:
            check_names("variables", variables)
        self._variables = variables
        self._on_unknown_type = on_unknown_type

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Log one line per stream."""
        found = [name for variables in epoch_data.values() for name in variables]
        for name in self._variables or ():
            if name not in found:
                raise HookError(f"LogVariables: no earlier hook wrote {name!r}{did_you_mean(name, found)}")
        width = max((len(stream) for stream in epoch_data), default=0)
        for stream, variables in epoch_data.items():
            parts = [
                part
                for name, value in variables.items()
                if (not is_rate(name) if self._variables is None else name in self._variables)
                for part in self._format(stream, name, value)
            ]
            if stream == self.main_loop.train_stream_name and not self.main_loop.evaluating:
                parts += self._pace(variables if epoch_id > 0 else {})
            if parts:
                _LOG.info(
                    "epoch %d  %s  %s", self.main_loop.training_epochs_done, stream.ljust(width), "  ".join(parts)
                )

    def _pace(self, variables: Mapping[str, Any]) -> list[str]:
        """Return the learning rates among the variables of the epoch, and the seconds of the epoch."""
        rates = [value for name, value in variables.items() if is_rate(name) and isinstance(value, Real)]
        shown = list(dict.fromkeys(f"{float(rate):g}" for rate in rates))
        return [*([f"lr {' '.join(shown)}"] if shown else []), f"{self.main_loop.epoch_seconds:.1f} s"]

    def _format(self, stream: str, name: str, value: Any) -> list[str]:
        parts = []
        for label, entry in statistics({name: value}):
            if isinstance(entry, Real):
                parts.append(f"{label} {_readable(int(entry) if isinstance(entry, Integral) else float(entry))}")
            elif self._on_unknown_type == "str":
                parts.append(f"{label} {entry}")
            elif self._on_unknown_type != "ignore":
                message = f"LogVariables: {stream}/{label} is {type(entry).__name__}, not a number"
                if self._on_unknown_type == "error":
                    raise HookError(f"{message}; to allow such values, set on_unknown_type to warn, str or ignore")
                _LOG.warning("%s", message)
        return parts


def _readable(value: float) -> str:
    """Format a number so that its width stays the same from epoch to epoch for the usual magnitudes."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"
