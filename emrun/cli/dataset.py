"""`emrun dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from emrun.cli.console import print_error, terminal_log, users_code

if TYPE_CHECKING:
    from emrun.diagnosis.stream_bench import Bench, Reading, StreamBench


@click.command(short_help="Call a method of a config's dataset, or measure how fast it is read.")
@click.argument("method")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="With bench: how long a stream is read in each setting; 3 by default.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    help="With bench: milliseconds that the model takes for a batch, instead of trying it here.",
)
@click.option("--all", "all_streams", is_flag=True, help="With bench: read the streams that no training reads, too.")
def dataset(
    method: str,
    config: Path,
    overrides: tuple[str, ...],
    seconds: float | None,
    step_ms: float | None,
    all_streams: bool,
) -> int:
    """Build the dataset of CONFIG, call its METHOD without arguments and print what it returns.

    Every dataset has stream_info: a table of its streams' sources; when a stream fails, the exit status is 1.

    The METHOD bench is a word of emrun, also for a dataset that has a method of this name: it measures how fast the
    streams are read with nobody ahead, by a thread (buffer) and by worker processes, and says which of them a training
    has to wait for least.
    """
    with terminal_log():
        if method == "bench":
            from emrun.diagnosis.stream_bench import bench

            step = None if step_ms is None else step_ms / 1000
            with users_code():
                found = bench(config, overrides, seconds=seconds or 3.0, step=step, all_streams=all_streams)
            click.echo(_shown(found))
            return 0
        if seconds is not None or step_ms is not None or all_streams:
            raise click.UsageError("--seconds, --step-ms and --all go with bench")
        return _call(method, config, overrides)


def _call(method: str, config: Path, overrides: tuple[str, ...]) -> int:
    """Call a method of the dataset of a config."""
    from emrun.dataset import AbstractDataset, describe_streams
    from emrun.errors import exit_status
    from emrun.training.create import create_dataset
    from emrun.wording import meant_of

    with users_code():
        built = create_dataset(config, overrides)
    public = [name for name in dir(built) if not name.startswith("_")]
    methods = [name for name in public if callable(getattr(type(built), name, None))]  # properties are not asked
    standard = AbstractDataset.stream_info
    if method == "stream_info" and getattr(type(built), method, standard) is standard:
        with users_code():
            table, broken = describe_streams(built)
        click.echo(table)
        for line, _ in broken:
            print_error(f"{click.style('error:', fg='red', bold=True)} {line}")
        statuses = {exit_status(error) for _, error in broken}
        return (statuses.pop() if len(statuses) == 1 else 1) if broken else 0
    if method not in methods:
        kind = type(built).__name__
        raise click.UsageError(f"dataset {kind} has no method {method!r}{meant_of(method, methods)}")
    with users_code():
        found = getattr(built, method)()
    if found is not None:
        click.echo(found)
    return 0


def _shown(found: Bench) -> str:
    """Return what was measured as a table, what is to be said about it, and the setting to choose."""
    from tabulate import tabulate

    rows = [
        [stream.name, str(reading.setting), *_cells(stream, reading, found.step)]
        for stream in found.streams
        for reading in stream.readings
    ]
    headers = ["stream", "read", "batches/s", "first batch", "training waits"]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "left", "right", "right", "right"))
    notes = [
        f"stream {stream.name!r} does not get its rows from ctx.batches: one worker reads all of it, others have "
        "nothing to do"
        for stream in found.streams
        if not stream.shares_rows
    ]
    return "\n".join([table, "", *notes, _choice(found)])


def _cells(stream: StreamBench, reading: Reading, step: float | None) -> list[str]:
    if reading.first is None:
        return ["no batches", "", ""]
    rate = 1 / reading.seconds_per_batch if reading.seconds_per_batch else None
    return [
        "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{reading.first:.3f} s",
        "" if step is None or not stream.trains else f"{stream.waiting(reading, step):.0%}",
    ]


def _choice(found: Bench) -> str:
    """Return the line that says which setting to choose, and why."""
    if found.step is None:
        return f"what to choose depends on how long a step takes, which is not known: {found.no_step}"
    stream = found.streams[0]
    nobody, best = stream.readings[0], stream.chosen(found.step)
    waits = f"{stream.waiting(best, found.step):.0%} of its time for stream {stream.name!r}"
    why = f"with a step of {found.step * 1000:.3g} ms a training waits {waits}"
    if best is nobody:
        return f"choose neither `buffer` nor `workers`: {why}, and nothing gains on that"
    return (
        f"choose `{best.setting}`: {why}, with nobody ahead {stream.waiting(nobody, found.step):.0%}; "
        "nothing simpler comes near"
    )
