"""Errors and signals that end a command: how they are reported, and with which exit status or signal."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import emrun
from emrun.base.errors import ConfigError, EmrunError, Problem, StorageError, exit_status, reason_of
from emrun.base.signals import handled, is_main_thread, unless_ignored
from emrun.base.slow_start import NamedWhenSlow, without_collections
from emrun.base.terminal import leave_closed_terminal, restore_output
from emrun.base.wording import from_here
from emrun.cli.console import VERBOSE, has_colours, is_follower
from emrun.cli.output import only_json, print_json, so_far, wants_json
from emrun.cli.problems import problems_of
from emrun.config.import_finder import instead_of
from emrun.ranks.group import meeting_place, misses_others, number_of_ranks

if TYPE_CHECKING:
    from emrun.config.config import Config

# packages whose frames say nothing about the mistake
_NOT_OWN = ("torch", "emrun", "click", "importlib", "contextlib", "PIL")
_SITES = {"site-packages", "dist-packages"}  # also the user's, which is not in `INSTALLED`
_MOST_FRAMES = 10
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .*\n?(?:    .*\n?)*', re.MULTILINE)


class UsersCodeFailed(Exception):
    """Wraps, as its only argument, an exception of the user's code that click would treat as its own."""


@contextmanager
def users_code(*, keeps_output: bool = False) -> Iterator[None]:
    """Replace exceptions with which click ends the process silently: in this block they are failures.

    What the block prints goes to standard error if the result is JSON; see `only_json`.

    Args:
        keeps_output: whether what the block has put in the place of standard output and error stays there.

    Raises:
        UsersCodeFailed: with such an exception.
    """
    try:
        with only_json(keeps_output=keeps_output):
            yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, EOFError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and error.errno != errno.EPIPE:
            raise
        raise UsersCodeFailed(error) from None  # outside of the block, EPIPE is that of emrun's own output


def fail(error: BaseException, *, has_log: bool = True) -> int:
    """Report an error on standard error and return the exit status: frames of the user's code for status 1 only.

    Args:
        error: the error.
        has_log: whether the log with the traceback is kept.
    """
    status = exit_status(error)
    if isinstance(error, ConfigError):
        for problem in error.problems:
            print_error(_coloured(problem))
        if len(error.problems) > 1:
            print_error(f"{len(error.problems)} errors")
    elif status == 1:
        print_failure(error, has_log=has_log)
    else:
        print_error(_in_one_line(error))
    if isinstance(error, SystemExit):
        print_error(
            "sys.exit() in a dataset, a model or a hook is a failure of that code; to end a run successfully, raise "
            "emrun.TrainingTerminated in a hook"
        )
    tell_json(error, status)
    return status


def tell_json(error: BaseException, status: int) -> None:
    """Print an error as the object that `--json` promises, unless the command that started the ranks does so."""
    if wants_json() and not is_follower() and meeting_place() is None:
        print_json({**so_far(), "status": "failed", "exit_status": status, "problems": problems_of(error)})


def print_failure(error: BaseException, *, has_log: bool = True) -> None:
    """Print a failure of the user's code: notes, message, the frames of that code, and where the full traceback is.

    With `--verbose`, the full traceback is printed instead.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(VERBOSE):
        traceback.print_exception(error)
        return
    notes = getattr(error, "__notes__", [])
    frames = "".join(traceback.format_list(_users_frames(error)))
    for note in notes:
        frames += "".join(frame[0] for frame in _FRAME.finditer(note) if _is_users(frame[1]))
    if isinstance(error, EmrunError):
        print_error(_in_one_line(error))
        if not frames:
            return
    else:
        exception = traceback.TracebackException.from_exception(error)
        exception.__notes__ = []
        for line in (*map(_without_frames, notes), *exception.format_exception_only()):
            print_error(line.rstrip("\n"))
    if frames:
        print_error(frames.rstrip())
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        print_error(f"{error.name!r} is {instead_of(error)}")
    log = getattr(error, "kept_in", None) if has_log else None
    kept = f"the full traceback is in {from_here(log)}" if log is not None and log.is_file() else None
    print_error(kept or "--verbose shows the full traceback")


def _in_one_line(error: BaseException) -> str:
    notes = "; ".join(_without_frames(note) for note in getattr(error, "__notes__", ()))
    return f"{click.style('error:', fg='red', bold=True)} {error}{f' ({notes})' if notes else ''}"


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the last frames of the user's code that led to an error, or else to its cause.

    If there are none, return the last frame of a library other than PyTorch.
    """
    cause: BaseException | None = error
    others = []
    while cause is not None:
        frames = [
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(cause.__traceback__)
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_OWN
        ]
        if users := [frame for frame in frames if _is_users(frame.filename)]:
            return users[-_MOST_FRAMES:]
        others += frames[-1:]
        cause = cause.__cause__
    return others[:1]


def of_storage(error: BaseException) -> BaseException:
    """Return an error; one of the operating system about a file, met by emrun's own code alone, as a `StorageError`."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    is_own = {str(name).partition(".")[0] for name in frames} <= {"emrun", "click", *sys.stdlib_module_names}
    is_raw = isinstance(error, OSError) and not isinstance(error, EmrunError) and error.filename is not None
    return StorageError(getattr(error, "errno", None), reason_of(error)) if is_own and is_raw else error


def _without_frames(note: str) -> str:
    """Return a note; of a note with the traceback of a worker process only the first line."""
    return note.partition("\n")[0].rstrip(":") if _FRAME.search(note) else note


def _is_users(path: str) -> bool:
    """Return whether a source file belongs to the user, and not to an installed package or to emrun."""
    from emrun.config.names import INSTALLED

    file = Path(path)
    homes = (*INSTALLED, Path(emrun.__file__).parent)
    is_installed = any(place.is_relative_to(home) for place in (file, file.resolve()) for home in homes)
    return file.is_file() and not is_installed and _SITES.isdisjoint(file.parts)


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


def ignore_early_requests() -> None:
    """Ignore SIGUSR1, which requests a checkpoint, and SIGUSR2, until there is a run; by default they end processes."""
    if is_main_thread():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """End the process by SIGTERM or SIGHUP only after the block has cleaned up; SIGHUP stays ignored if it is."""

    class Terminated(KeyboardInterrupt):  # not a failure of the user's code
        signal_number = signal.SIGTERM

    numbers = unless_ignored([signal.SIGTERM, signal.SIGHUP])

    def unwind(number: int, frame: Any) -> None:
        if misses_others():
            return  # it ends anyway, and the launcher would wait for the words that it is about to leave
        leave_closed_terminal()
        for ignored in numbers:
            signal.signal(ignored, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
        error = Terminated()
        error.signal_number = signal.Signals(number)
        raise error

    try:
        with handled(dict.fromkeys(numbers, unwind)):
            yield
    except Terminated as error:
        report_and_end_by_signal(error.signal_number)


@contextmanager
def words_before_sigterm() -> Iterator[None]:
    """Let a rank that misses others leave its words in this block, although the launcher ends it by SIGTERM."""

    def end(number: int, frame: Any) -> None:
        if not misses_others():
            end_by_signal(number)

    with handled({signal.SIGTERM: end} if number_of_ranks() > 1 else {}):
        yield


def import_torch(config: Config | None = None) -> None:
    """Import PyTorch; a slow import is logged.

    Meanwhile a signal ends the process at once: PyTorch's extension does not survive a Python exception, or loses it.
    Python looks for no garbage, which would take a fifth of the time, and later not among what the import has made.

    Args:
        config: the config that is about to be built. If it has an optimizer, import also what PyTorch imports for the
            first one.
    """
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ending if callable(signal.getsignal(number))]  # not one that is ignored

    def end(number: int, frame: Any) -> None:
        if number_of_ranks() > 1:
            end_by_signal(number)
        else:
            report_and_end_by_signal(number)

    with handled(dict.fromkeys(numbers, end)), NamedWhenSlow("importing PyTorch"), without_collections():
        import torch

        if config is not None and config.root.get("model", "optimizer") is not None:
            import torch._dynamo  # noqa: F401 - likewise
        gc.freeze()


def report_and_end_by_signal(number: int) -> NoReturn:
    """Say on standard error which signal interrupted the command, and end the process by it."""
    restore_output()
    print_error(f"interrupted by {signal.Signals(number).name}")
    end_by_signal(number)


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that its parent, such as a loop in a shell, stops too."""
    with suppress(OSError, ValueError, AttributeError):  # the terminal is closed
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
