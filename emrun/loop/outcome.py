"""How a run ended, and whether any hook can end it."""

from __future__ import annotations

import inspect
import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from emrun.base.censor import hidden
from emrun.base.errors import exit_status, has_exit_status, reason_of
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.loop.interrupts import Interrupted

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and why.

    Args:
        status: `finished`, `interrupted` or `failed`.
        reason: the reason in one line; None for an evaluation, or if the `with` block simply ended.
        exit_status: the exit status of the command.
        signal_number: the number of the signal that interrupted the run, if the process is to end by this signal.
        warning: a problem that did not end the run, in one line; None for no problem.
    """

    status: str
    reason: str | None
    exit_status: int
    signal_number: int | None = None
    warning: str | None = None

    @classmethod
    def of(cls, error: BaseException | None, preempt_exit_code: int | None = None) -> Outcome:
        """Return the outcome of a run that ended with an error, a termination or None.

        Args:
            error: the error or the termination; None if the block simply ended.
            preempt_exit_code: the exit status after SIGTERM or SIGHUP; None to end the process by the signal.
        """
        if error is None:
            return cls("finished", None, 0)
        if isinstance(error, Interrupted) and error.signal != signal.SIGINT and preempt_exit_code is not None:
            return cls("interrupted", error.reason, preempt_exit_code)
        if isinstance(error, Interrupted):
            return cls("interrupted", error.reason, 128 + error.signal, error.signal)
        if isinstance(error, TrainingTerminated):
            return cls("finished", hidden(error.reason), 0)
        if isinstance(error, KeyboardInterrupt):
            number = signal.Signals(getattr(error, "signal_number", signal.SIGINT))
            return cls("interrupted", f"interrupted by {number.name}", 128 + number, number)
        name = "" if has_exit_status(error) else f"{type(error).__name__}: "
        first_line = (reason_of(error).strip().splitlines() or [""])[0]
        return cls("failed", hidden(f"{name}{first_line}"), exit_status(error))


def warn_of_no_end(hooks: Iterable[AbstractHook]) -> None:
    """Log a warning if no hook can end the training."""
    methods = [value for hook in hooks for cls in type(hook).__mro__ for value in vars(cls).values()]
    if not any("TrainingTerminated" in method.__code__.co_names for method in methods if inspect.isfunction(method)):
        _LOG.warning("no hook ends this run; Ctrl-C does, or add `StopAfter: {epochs: 20}`")
