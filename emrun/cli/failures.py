"""Errors that end a command: how they are reported, and with which exit status."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from emrun.cli.console import has_colours
from emrun.errors import ConfigError, Problem, exit_status, has_inputs


class UsersCodeFailed(Exception):
    """An exception of the user's code that click would treat as its own.

    Args:
        error: the exception.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(error)


@contextmanager
def users_code() -> Iterator[None]:
    """Replace exceptions with which click ends the process silently: in this block they are failures.

    Raises:
        UsersCodeFailed: with such an exception.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, EOFError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and error.errno != errno.EPIPE:
            raise
        raise UsersCodeFailed(error) from None  # outside of the block, EPIPE is that of emrun's own output


def fail(error: BaseException, *, has_log: bool = True) -> int:
    """Report an error on standard error and return the exit status: a traceback for status 1 only.

    Args:
        error: the error.
        has_log: whether the log with the traceback is kept; otherwise the full traceback is printed.
    """
    status = exit_status(error)
    log = getattr(error, "kept_in", None)
    if status == 1 and has_log and log is not None and has_inputs(error):
        _print_short(error, log)
    elif status == 1:
        traceback.print_exception(error)
    elif isinstance(error, ConfigError):
        for problem in error.problems:
            print_error(_coloured(problem))
        if len(error.problems) > 1:
            print_error(f"{len(error.problems)} errors")
    else:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print_error(f"{click.style('error:', fg='red', bold=True)} {error}{notes}")
    if isinstance(error, SystemExit):
        print_error(
            "sys.exit() in a dataset, a model or a hook is a failure of that code; to end a run successfully, raise "
            "emrun.TrainingTerminated in a hook"
        )
    return status


def _print_short(error: BaseException, log: Path) -> None:
    """Print the notes and the message of an error, and the last line of the user's code that led to it."""
    found = traceback.TracebackException.from_exception(error)
    found.__notes__ = []
    for line in (*error.__notes__, *found.format_exception_only()):
        print_error(line.rstrip("\n"))
    frame = _own_frame(error)
    if frame is not None:
        print_error("".join(traceback.format_list([frame])).rstrip())
    print_error(f"the full traceback is in {log}")


def _own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of the user's code, or else of a library other than torch and emrun."""
    from emrun.config.names import INSTALLED

    last: dict[bool, traceback.FrameSummary] = {}  # whether it is installed -> where it was last
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "emrun"):
            code = frame.f_code
            file = Path(code.co_filename)
            is_installed = not file.is_file() or any(file.resolve().is_relative_to(home) for home in INSTALLED)
            last[is_installed] = traceback.FrameSummary(code.co_filename, line, code.co_name)
    return last.get(False) or last.get(True)


def print_error(text: str) -> None:
    """Print a line on standard error, with colours only where they can be shown."""
    click.echo(text, err=True, color=has_colours(sys.stderr))


def _coloured(problem: Problem) -> str:
    """Return the block of a problem with its position bold and its caret red."""
    head, *quoted = problem.block().split("\n")
    where = str(problem.position or "")
    lines = [click.style(where, bold=True) + head[len(where) :]]
    if quoted:
        lines += [*quoted[:-1], click.style(quoted[-1], fg="red", bold=True)]
    return "\n".join(lines)
