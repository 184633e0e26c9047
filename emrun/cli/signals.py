"""What the commands do about signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from emrun.base.signals import handled, is_main_thread, unless_ignored
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.terminal import leave_closed_terminal
from emrun.ranks.group import misses_others, number_of_ranks


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
    process = os.getpid()

    def unwind(number: int, frame: Any) -> None:
        if os.getpid() != process:  # forked by the user's code
            end_by_signal(number)
        if misses_others():
            return  # it ends anyway, and the launcher would wait for the words that it is about to leave
        leave_closed_terminal()
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
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


def import_torch() -> None:
    """Import PyTorch; a slow import is logged.

    Meanwhile a signal ends the process at once: PyTorch's extension does not survive a Python exception, or loses it.
    """
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [each for each in ending if callable(signal.getsignal(each))]  # not one that is ignored

    def end(number: int, frame: Any) -> None:
        end_by_signal(number) if number_of_ranks() > 1 else report_and_end_by_signal(number)

    with handled(dict.fromkeys(numbers, end)), NamedWhenSlow("importing PyTorch"):
        import torch  # noqa: F401 - here, so that --help does not wait for it


def report_and_end_by_signal(number: int) -> NoReturn:
    """Say on standard error which signal interrupted the command, and end the process by it."""
    click.echo(f"interrupted by {signal.Signals(number).name}", err=True)
    end_by_signal(number)


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that its parent, such as a loop in a shell, stops too."""
    with suppress(OSError, ValueError):  # the terminal is closed
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
