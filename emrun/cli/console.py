"""What the commands have in common: arguments and options, the log on the terminal, errors, signals."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from emrun.errors import ConfigError, Problem, exit_status, has_inputs


class _TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to standard error, above a progress bar if there is one; those marked `once` not again."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "once", False):
            if record.getMessage() in self._told:
                return
            self._told.add(record.getMessage())
        tqdm = sys.modules.get("tqdm")  # nobody shows a bar without it
        with tqdm.tqdm.external_write_mode(file=self.stream) if tqdm else nullcontext():
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno <= logging.INFO:
            return text
        word = f"{record.levelname.lower()}:"
        if has_colours(self.stream):
            word = click.style(word, fg="yellow" if record.levelno == logging.WARNING else "red", bold=True)
        return f"{word} {text}"


def has_colours(stream: Any) -> bool:
    """Tell whether a stream is a terminal that is to show colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def config_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments `config` and `overrides`."""
    overrides = click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
    return click.argument("config", type=click.Path(path_type=Path))(overrides(command))


def with_terminal_log(command: Callable[..., int]) -> Callable[..., int]:
    """Show the log while a command runs, as much of it as the options say that this adds."""

    @click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
    @click.option("-q", "--quiet", is_flag=True, help="Show warnings and errors only, and no bars.")
    @click.option("--no-progress", "progress", flag_value=False, default=True, help="Show no bars.")
    @wraps(command)
    def run(*, verbose: bool, quiet: bool, progress: bool, **parameters: Any) -> int:
        with terminal_log(verbose=verbose, quiet=quiet, progress=progress):
            return command(**parameters)

    return run


@contextmanager
def terminal_log(*, verbose: bool = False, quiet: bool = False, progress: bool = True) -> Iterator[None]:
    """Show the log on standard error; without `progress`, tqdm shows no bars, whoever asks for one."""
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet exclude each other")
    if quiet or not progress:
        os.environ["TQDM_DISABLE"] = "1"
    root = logging.getLogger()
    handler = _TerminalHandler(sys.stderr)
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def ignore_early_requests() -> None:
    """Ignore SIGUSR1, which asks for a checkpoint, until there is a training to save; by default it would kill."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class UsersCodeFailed(Exception):
    """What code of a user raised, and click would take for its own.

    Args:
        error: what was raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(error)


@contextmanager
def users_code() -> Iterator[None]:
    """Let no exception out of the block that click ends the process with, without a word: in it, it is a failure.

    Raises:
        UsersCodeFailed: with such an exception.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, EOFError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and error.errno != errno.EPIPE:
            raise
        raise UsersCodeFailed(error) from None  # outside of the block EPIPE is one of emrun's own output


def fail(error: BaseException, *, has_log: bool = True) -> int:
    """Report an error on standard error and return the exit status: a traceback for status 1 only.

    Args:
        error: the error.
        has_log: whether the log stays that has the traceback; otherwise the whole of it is printed.
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
    """Print what is noted of an error, its message, and the last line of the user's code that led to it."""
    found = traceback.TracebackException.from_exception(error)
    found.__notes__ = []
    for line in (*error.__notes__, *found.format_exception_only()):
        print_error(line.rstrip("\n"))
    frame = _own_frame(error)
    if frame is not None:
        print_error("".join(traceback.format_list([frame])).rstrip())
    print_error(f"the whole traceback is in {log}")


def _own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return where the user's code was last, or else that of a library other than torch and emrun."""
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
    """Print a line on standard error, with its colours only where they are shown."""
    click.echo(text, err=True, color=has_colours(sys.stderr))


def _coloured(problem: Problem) -> str:
    """Return the block of a problem with its position bold and its caret red."""
    head, *quoted = problem.block().split("\n")
    where = str(problem.position or "")
    lines = [click.style(where, bold=True) + head[len(where) :]]
    if quoted:
        lines += [*quoted[:-1], click.style(quoted[-1], fg="red", bold=True)]
    return "\n".join(lines)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """End the process by SIGTERM only when the block has cleaned up behind it."""

    class Terminated(KeyboardInterrupt):  # which is nobody's failure
        pass

    def unwind(number: int, frame: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning short
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except Terminated:
        end_by_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that whoever waits for it, such as a shell's loop, stops too."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
