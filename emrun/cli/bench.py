"""`emrun bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emrun.cli.as_json import only_json, print_json, with_json
from emrun.cli.console import config_arguments, terminal_log, with_tracebacks
from emrun.cli.failures import users_code
from emrun.cli.signals import import_torch
from emrun.cli.tables import table

if TYPE_CHECKING:
    from emrun.diagnosis.stream_bench import Bench, Speed, StreamBench


@click.command(short_help="Measure how fast the streams of a config are read.")
@config_arguments
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True,
    help="Seconds for which each stream is read with each setting.",
)  # fmt: skip
@click.option(
    "--step-ms", type=click.FloatRange(0, min_open=True),
    help="Milliseconds that the model takes for a batch; by default they are measured.",
)  # fmt: skip
@click.option("--all", "all_streams", is_flag=True, help="Also read the streams that the config does not use.")
@with_json
@with_tracebacks
def bench(
    config: Path, overrides: tuple[str, ...], seconds: float, step_ms: float | None, all_streams: bool, as_json: bool
) -> int:
    """Measure how fast the streams of CONFIG are read, and recommend how to read them.

    Each stream is read without read-ahead, by a thread (main_loop.buffer) and by worker processes (main_loop.workers).
    A step of the model is measured too. The recommendation is the simplest setting with which training waits hardly
    longer for its batches than with the best setting.
    """
    with terminal_log():
        import_torch()
        from emrun.diagnosis.stream_bench import bench as measure

        step = None if step_ms is None else step_ms / 1000
        with only_json(as_json), users_code():
            found = measure(config, overrides, seconds=seconds, step=step, all_streams=all_streams)
        if as_json:
            print_json(_in_json(found))
        else:
            click.echo(_shown(found))
    return 0


def _in_json(found: Bench) -> dict[str, Any]:
    step = found.step
    return {
        "step_seconds": step,
        "why_no_step": found.no_step,
        "streams": [
            {
                "name": stream.name,
                "trains": stream.trains,
                "shares_rows": stream.shares_rows,
                "batches": stream.length,
                "readings": [
                    {
                        **_setting(reading),
                        "first_batch_seconds": reading.first,
                        "seconds_per_batch": reading.seconds_per_batch,
                        "waiting": None
                        if step is None or reading.first is None or not stream.trains
                        else stream.waiting(reading, step),
                    }
                    for reading in stream.readings
                ],
            }
            for stream in found.streams
        ],
        "recommended": None if step is None else _setting(found.streams[0].chosen(step)),
    }


def _setting(reading: Speed) -> dict[str, int]:
    return {"buffer": reading.setting.buffer, "workers": reading.setting.workers}


def _shown(found: Bench) -> str:
    """Return the measurements as a table, notes on them, and the recommended setting."""
    rows = [
        [stream.name, str(reading.setting), *_cells(stream, reading, found.step)]
        for stream in found.streams
        for reading in stream.readings
    ]
    headers = ["stream", "read", "batches/s", "first batch", "training waits"]
    notes = [
        f"stream {stream.name!r} does not get its rows from ctx.batches: one worker reads the whole stream, "
        "more workers do not help"
        for stream in found.streams
        if not stream.shares_rows
    ]
    return "\n".join([table(rows, headers, ("left", "left", "right", "right", "right")), "", *notes, _choice(found)])


def _cells(stream: StreamBench, reading: Speed, step: float | None) -> list[str]:
    if reading.first is None:
        return ["no batches", "", ""]
    rate = 1 / reading.seconds_per_batch if reading.seconds_per_batch else None
    return [
        "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{reading.first:.3f} s",
        "" if step is None or not stream.trains else f"{stream.waiting(reading, step):.0%}",
    ]


def _choice(found: Bench) -> str:
    """Return the line that recommends a setting and says why."""
    if found.step is None:
        return f"no setting is recommended, because the time of a step is not known: {found.no_step}"
    stream = found.streams[0]
    first, best = stream.readings[0], stream.chosen(found.step)
    waits = f"{stream.waiting(best, found.step):.0%} of its time for stream {stream.name!r}"
    why = f"with a step of {found.step * 1000:.3g} ms, training waits {waits}"
    if best is first:
        return f"choose neither `buffer` nor `workers`: {why}, and read-ahead does not help"
    given = str(best.setting).replace(", ", " main_loop.").replace(": ", "=")
    return (
        f"choose `{best.setting}` (main_loop.{given}): {why}, without read-ahead "
        f"{stream.waiting(first, found.step):.0%}; simpler settings are slower"
    )
