"""`emrun predict`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.sources import NEW
from emrun.base.wording import counted, few, progress
from emrun.cli.console import GivenPath, complete_streams, is_follower, run_argument
from emrun.cli.failures import import_torch, unwound_by_sigterm, users_code
from emrun.cli.output import print_json
from emrun.cli.ranks import end_interrupted, evaluates_run, run_ranks, starts_ranks
from emrun.config.config import read_over
from emrun.config.override_keys import check_has_stream
from emrun.config.overrides import check_streams_of_eval
from emrun.config.plan import check_statically
from emrun.loop.interrupts import Interrupted
from emrun.ranks.group import leave
from emrun.training.directories import check_run

_BY_LOSS = "loss"
"""The value of `--probabilities` without a value."""
_MOST_SHOWN = 20  # columns


@click.command()
@run_argument
@click.argument("arguments", metavar="[STREAM] [OVERRIDE...]", nargs=-1, shell_complete=complete_streams)
@click.option(
    "--data", metavar="PATH", type=GivenPath(),
    help="Predict data that the run has not seen, instead of STREAM: a folder, a file of rows or a picture.",
)  # fmt: skip
@click.option(
    "-o", "--output", metavar="FILE", required=True, type=GivenPath(),
    help="The file to write: .parquet, .csv or .jsonl; or FOLDER/, for a mask of each picture.",
)  # fmt: skip
@click.option("--variables", metavar="NAME,...", help="The outputs and sources to write; by default all outputs.")
@click.option("--classes", is_flag=True, help="Add the number and the name of the predicted class.")
@click.option(
    "--probabilities", metavar="[softmax|sigmoid]", is_flag=False, flag_value=_BY_LOSS,
    help="Write the classes with their probabilities instead of the outputs; by default, the loss tells the function.",
)  # fmt: skip
@click.option(
    "--generate", metavar="N", type=int,
    help="Write answers instead, of the first N chats: each before its last answer, that answer, the generated one.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@evaluates_run
def predict(
    directory: Path,
    arguments: tuple[str, ...],
    data: str | None,
    output: str,
    variables: str | None,
    classes: bool,
    probabilities: str | None,
    generate: int | None,
    config: Path | None,
    checkpoint: str | None,
    overwrite: bool,
    nproc: int,
    as_json: bool,
) -> int:
    """Write the outputs of the run in DIRECTORY for every example of STREAM, or of new data, to a file.

    A row has the source id, or the position of the example in the stream. The stream may lack the labels: losses and
    metrics without their sources are left out. New data are read as the run has read its own, which need not be there.
    An argument with = or a leading ~ is an override. Nothing is written into DIRECTORY.
    """
    # what can be refused before torch is imported
    if probabilities not in (None, _BY_LOSS, "softmax", "sigmoid"):
        raise click.UsageError(
            f"--probabilities: {probabilities!r} is neither softmax nor sigmoid; write overrides before --probabilities"
        )
    overrides = [word for word in arguments if "=" in word or word.startswith("~")]
    streams = [word for word in arguments if word not in overrides]
    if data is None and not streams:
        raise click.UsageError("Missing argument 'STREAM'; for data that the run has not seen, write --data PATH")
    if data is not None and streams:
        raise click.UsageError(f"{streams[0]}: with --data there is no STREAM, and an override has the form KEY=VALUE")
    stream = streams[0] if streams else NEW
    overrides += streams[1:]  # each is an error that says what an override is
    check_run(expanded(directory))
    check_streams_of_eval(overrides, [stream])
    predicted = read_over(expanded(directory), config).overlaid(stream, overrides)
    check_statically(predicted)
    if data is None:
        advice = f"; for new data, write --data {shlex.quote(stream)}" if expanded(stream).exists() else ""
        check_has_stream(predicted, stream, advice)
    if starts_ranks(nproc):
        return run_ranks(nproc)
    import_torch(predicted)
    from emrun.training.predict import predict as predict_stream

    # the outputs
    names = None if variables is None else [name.strip() for name in variables.split(",")]
    try:
        with unwound_by_sigterm(), users_code():
            predictions = predict_stream(
                directory,
                None if data is not None else stream,
                output,
                overrides,
                config,
                checkpoint,
                names,
                data=data,
                classes=classes,
                probabilities=probabilities == _BY_LOSS or probabilities or False,
                overwrite=overwrite,
                generate=generate,
            )
    except Interrupted as error:
        end_interrupted(f"{error.reason}; {output} is not written", error.signal)

    # the summary, by one rank
    leave()
    if is_follower():
        return 0
    if as_json:
        print_json(
            {
                "file": expanded(output),
                "rows": predictions.rows,
                "columns": predictions.columns,
                "checkpoint": {
                    "directory": predictions.checkpoint,
                    "epoch": predictions.epoch,
                    "iteration": predictions.iteration,
                },
                "order": predictions.order,
                "left_out": predictions.left_out,
            }
        )
    else:
        rows = counted(predictions.rows, "row")
        of = f"stream {stream}" if data is None else data
        columns = ", ".join(predictions.columns[:_MOST_SHOWN])
        if (more := len(predictions.columns) - _MOST_SHOWN) > 0:
            columns += f" and {more} more; for masks of pictures, write -o masks/"
        click.echo(f"{expanded(output)}: {rows} of {of}: {columns}")
        if predictions.left_out:
            count = counted(len(predictions.left_out), "bad example")
            click.echo(f"without {count}: {few(list(predictions.left_out))}")
        if predictions.checkpoint is not None:
            click.echo(
                f"by checkpoint {predictions.checkpoint.name}: {progress(predictions.epoch, predictions.iteration)}"
            )
    return 0
