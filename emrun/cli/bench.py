"""`emrun bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from emrun.base.types import Json
from emrun.base.wording import listed
from emrun.cli.console import config_arguments, terminal_log, with_tracebacks
from emrun.cli.failures import import_torch, users_code
from emrun.cli.output import print_json, table, with_json

if TYPE_CHECKING:
    from emrun.diagnosis.stream_bench import Bench, Speed, StreamBench


@click.command()
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
) -> None:
    """Measure how fast the streams of CONFIG are read, and recommend how to read them.

    Each stream is read without read-ahead, by a thread (main_loop.buffer) and by worker processes (main_loop.workers).
    Images as bytes (dataset.dtype) are tried too, and more threads if EMRUN_THREADS is less than the number of cores.
    A step of the model is measured too. The recommendation is the simplest setting with which training waits hardly
    longer for its batches than with the best setting.
    """
    with terminal_log():
        import_torch()
        from emrun.diagnosis.stream_bench import bench as measure

        step = None if step_ms is None else step_ms / 1000
        with users_code():
            measured = measure(config, overrides, seconds=seconds, step=step, all_streams=all_streams)
        if as_json:
            print_json(_in_json(measured))
        else:
            click.echo(_shown(measured))


def _in_json(measured: Bench) -> Json:
    step = measured.step
    better = None if step is None else measured.streams[0].change(measured.present, step)[1]
    return {
        "step_seconds": step,
        "why_no_step": measured.no_step,
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
            for stream in measured.streams
        ],
        "recommended": None if step is None else _setting(measured.streams[0].chosen(step)),
        "change": None if step is None or better is None else _setting(better),
    }


def _setting(reading: Speed) -> Json:
    setting = reading.setting
    others = {"threads": setting.threads, "dtype": setting.dtype}
    named = {key: value for key, value in others.items() if value is not None}
    return {"buffer": setting.buffer or 0, "workers": setting.workers, **named}


def _shown(measured: Bench) -> str:
    """Return the measurements as a table, notes on them, and the recommended setting."""
    rows = [
        [stream.name, str(reading.setting), *_cells(stream, reading, measured.step)]
        for stream in measured.streams
        for reading in stream.readings
    ]
    headers = ["stream", "read", "batches/s", "first batch", "training waits"]
    notes = [
        f"stream {stream.name!r} does not get its rows from ctx.batches: one worker reads the whole stream, "
        "more workers do not help"
        for stream in measured.streams
        if not stream.shares_rows and len(stream.readings) > 1
    ]
    notes += [
        f"stream {stream.name!r} draws from the global random numbers of {listed(stream.draws)}: with another `buffer` "
        "or `workers`, its batches are other ones; let it draw from ctx.rng"
        for stream in measured.streams
        if stream.draws
    ]
    return "\n".join([table(rows, headers, ("left", "left", "right", "right", "right")), "", *notes, _choice(measured)])


def _cells(stream: StreamBench, reading: Speed, step: float | None) -> list[str]:
    if reading.first is None:
        return ["no batches", "", ""]
    rate = 1 / reading.seconds_per_batch if reading.seconds_per_batch else None
    return [
        "" if rate is None else _rate(rate),
        f"{reading.first:.3f} s",
        "" if step is None or not stream.trains else f"{stream.waiting(reading, step):.0%}",
    ]


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _choice(measured: Bench) -> str:
    """Return the line that recommends a setting and says why."""
    step = measured.step
    if step is None:
        return f"no setting is recommended, because the time of a step is not known: {measured.no_step}"
    stream = measured.streams[0]
    first = stream.readings[0]
    best = stream.chosen(step)
    waits = f"{stream.waiting(best, step):.0%} of its time for stream {stream.name!r}"
    why = f"with a step of {step * 1000:.3g} ms, training waits {waits}"
    change = _change(measured, stream, step)
    if not best.setting.ahead:
        return f"choose neither `buffer` nor `workers`: {why}, and read-ahead does not help\n{change}"
    given = str(best.setting).replace(", ", " main_loop.").replace(": ", "=")
    slower = f", with {first.setting} {stream.waiting(first, step):.0%}; simpler settings are slower"
    return f"choose `{best.setting}` (main_loop.{given}): {why}{'' if best is first else slower}\n{change}"


def _change(measured: Bench, stream: StreamBench, step: float) -> str:
    """Return the line that says how far the stream is from feeding the step, and which one change helps most."""
    now, better = stream.change(measured.present, step)
    says = f"as the config is ({measured.present}), the stream cannot be read"
    if now is not None:
        rate = f"{_rate(1 / now.seconds_per_batch)} batches" if now.seconds_per_batch else "one batch"
        says = (
            f"as the config is ({now.setting}), the stream gives {rate}/s, the model takes "
            f"{_rate(1 / step)}: training waits {stream.waiting(now, step):.0%} of its time"
        )
    if better is None:
        return f"{says}, and no other setting that was tried waits less"
    scaled = "" if better.setting.dtype is None else "; the model then needs `scale: 255` in `inputs`"
    return f"{says}; what helps most is `{better.setting}`: {stream.waiting(better, step):.0%}{scaled}"
