"""`emrun predict`."""

from __future__ import annotations

from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.wording import counted, progress
from emrun.cli.console import GivenPath, complete_streams, is_follower, run_argument
from emrun.cli.failures import import_torch, unwound_by_sigterm, users_code
from emrun.cli.output import print_json
from emrun.cli.ranks import end_interrupted, evaluates_run, run_ranks, starts_ranks
from emrun.config.config import read_over
from emrun.config.overrides import check_streams_of_eval
from emrun.config.plan import check_statically
from emrun.loop.interrupts import Interrupted
from emrun.ranks.group import leave
from emrun.training.directories import check_run


@click.command()
@run_argument
@click.argument("stream", shell_complete=complete_streams)
@click.argument("overrides", nargs=-1)
@click.option(
    "-o", "--output", metavar="FILE", required=True, type=GivenPath(path_type=Path),
    help="The file to write: .parquet, .csv or .jsonl.",
)  # fmt: skip
@click.option("--variables", metavar="NAME,...", help="The outputs and sources to write; by default all outputs.")
@click.option("--classes", is_flag=True, help="Add the number and the name of the predicted class.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@evaluates_run
def predict(
    directory: Path,
    stream: str,
    overrides: tuple[str, ...],
    output: Path,
    variables: str | None,
    classes: bool,
    config: Path | None,
    checkpoint: str | None,
    overwrite: bool,
    nproc: int,
    as_json: bool,
) -> int:
    """Write the outputs of the run in DIRECTORY for every example of STREAM to a file.

    A row has the source id, or the position of the example in the stream. The stream may lack the labels: losses and
    metrics without their sources are left out. Nothing is written into DIRECTORY.
    """
    # what can be refused before torch is imported
    check_run(expanded(directory))
    check_streams_of_eval(overrides, [stream])
    check_statically(read_over(expanded(directory), config).overlaid(stream, overrides))
    if starts_ranks(nproc):
        return run_ranks(nproc)
    import_torch()
    from emrun.training.predict import predict as predict_stream

    # the outputs
    names = None if variables is None else [name.strip() for name in variables.split(",")]
    try:
        with unwound_by_sigterm(), users_code():
            predictions = predict_stream(
                directory, stream, output, overrides, config, checkpoint, names, classes=classes, overwrite=overwrite
            )  # fmt: skip
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
            }
        )
    else:
        rows = counted(predictions.rows, "row")
        click.echo(f"{expanded(output)}: {rows} of stream {stream}: {', '.join(predictions.columns)}")
        if predictions.checkpoint is not None:
            click.echo(
                f"by checkpoint {predictions.checkpoint.name}: {progress(predictions.epoch, predictions.iteration)}"
            )
    return 0
