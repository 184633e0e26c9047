"""What the commands have in common: the log on the terminal, errors, tables, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from emrun.errors import ConfigError, exit_status


class _TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if "tqdm" not in sys.modules:
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


@contextmanager
def terminal_log(verbose: bool, quiet: bool) -> Iterator[None]:
    """Show the log on standard error."""
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


def fail(error: BaseException) -> int:
    """Tell of an error on standard error and return the exit status: a traceback for status 1 only."""
    status = exit_status(error)
    if status == 1:
        traceback.print_exception(error)
    elif isinstance(error, ConfigError):
        click.echo(str(error), err=True)
        if len(error.problems) > 1:
            click.echo(f"{len(error.problems)} errors", err=True)
    else:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        click.echo(f"error: {error}{notes}", err=True)
    return status


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that whoever waits for it, such as a shell's loop, stops too."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)  # the signal is blocked


def summary(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of a training's statistics: last, lowest and highest value with their epochs.

    Args:
        metrics: the lines of `metrics.jsonl`.
    """
    from tabulate import tabulate

    series: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for line in metrics:
        for stream, variables in line["streams"].items():
            for name, value in _flat(variables):
                series.setdefault((stream, name), []).append((line["epoch"], value))
    rows = []
    for (stream, name), values in series.items():
        numbers = [(value, epoch) for epoch, value in values if not isinstance(value, str)]
        low, high = (min(numbers, key=lambda v: v[0]), max(numbers, key=lambda v: v[0])) if numbers else (None, None)
        extremes = [f"{_short(each[0])} ({each[1]})" if each else "" for each in (low, high)]
        rows.append([stream, name, _short(values[-1][1]), *extremes])
    headers = ["stream", "variable", "last", "lowest (epoch)", "highest (epoch)"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def results(epoch_data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of an evaluation's statistics."""
    from tabulate import tabulate

    rows = [
        [stream, name, _short(value)] for stream, variables in epoch_data.items() for name, value in _flat(variables)
    ]
    return tabulate(rows, headers=["stream", "variable", "value"], disable_numparse=True)


def _flat(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in variables.items():
        if isinstance(value, Mapping):
            yield from ((name if key == "mean" else f"{name}/{key}", entry) for key, entry in value.items())
        else:
            yield name, value


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
