"""What a finished run says at its end: its best epoch, its page, and the command that comes next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from emrun.base.tables import folded_command, width
from emrun.base.wording import from_here
from emrun.epoch_data import named
from emrun.runs.report.page import REPORT, is_written
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import Summaries

if TYPE_CHECKING:
    from emrun.training.build import Training


def closing_lines(training: Training, reason: str, *, keeps: bool) -> Iterator[str]:
    """Yield the last lines of a finished run.

    Args:
        training: the training.
        reason: why it ended.
        keeps: whether the run directory is kept; otherwise no line names files in it.
    """
    summaries = Summaries(StoredRun(training.output_dir))
    shown = from_here(training.output_dir)
    if (best := summaries.best) is not None:
        which = "lowest" if summaries.watched[1] == "min" else "highest"
        yield f"best: epoch {best[1]}, {which} {'/'.join(named(summaries.watched[0]))} {best[0]:.4g}"
    if keeps and training.main_loop.report and is_written(training.output_dir):
        yield f"page: {shown / REPORT}"
    if keeps and (command := _next(training, reason)):
        yield folded_command("next", ["emrun", command[0], str(shown), command[1]], width(sys.stdout))


def _next(training: Training, reason: str) -> tuple[str, str] | None:
    """Return the command that comes next and what it gets besides the run; None if there is none.

    A stream that the run has not read is evaluated; without one, the run is trained twice as long, where it can be:
    schedules mostly have the length of the run.
    """
    from emrun.dataset import stream_names
    from emrun.training.resume import later_end

    loop = training.main_loop
    end = later_end(reason)
    read = loop.train_stream_name, *loop.extra_streams
    unread = [name for name in stream_names(training.dataset) if name not in read]
    if unread:
        return "eval", unread[0]
    is_scheduled = bool(getattr(loop.model, "schedulers", None))
    if end and not is_scheduled and sum(type(hook).__name__ == "StopAfter" for hook in loop.hooks) == 1:
        return "resume", end
    return ("eval", loop.extra_streams[0]) if loop.extra_streams else None
