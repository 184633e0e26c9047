"""`emrun export`."""

from __future__ import annotations

from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.wording import from_here
from emrun.cli.console import GivenPath, complete_streams, run_argument, with_terminal_log, without_slash
from emrun.cli.failures import import_torch, unwound_by_sigterm, users_code
from emrun.cli.output import print_json, with_json
from emrun.cli.ranks import end_interrupted
from emrun.config.config import read_config
from emrun.config.override_keys import check_has_stream
from emrun.config.overrides import check_streams_of_eval
from emrun.config.plan import check_statically
from emrun.exports.formats import FORMATS
from emrun.loop.interrupts import Interrupted
from emrun.training.directories import check_run

_BY_LOSS = "loss"
"""The value of `--probabilities` without a value."""


@click.command("export")
@run_argument
@click.argument("arguments", metavar="[STREAM] [OVERRIDE...]", nargs=-1, shell_complete=complete_streams)
@click.option("--to", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@click.option(
    "-o", "--output", metavar="PATH", type=GivenPath(path_type=Path),
    help="The folder or file to write, new or empty; by default NAME-FORMAT here, NAME that of the run directory.",
)  # fmt: skip
@click.option(
    "--dynamic", metavar="NAME:DIM", multiple=True,
    help="Let a dimension of an input of a program have any length, such as tokens:1; that of the batch always has.",
)  # fmt: skip
@click.option(
    "--probabilities", metavar="[softmax|sigmoid]", is_flag=False, flag_value=_BY_LOSS,
    help="Let a program return the probabilities of classes; by default, the loss tells the function.",
)  # fmt: skip
@click.option(
    "--tolerance", metavar="NUMBER", type=click.FloatRange(min=0),
    help="The largest difference from the run's model; by default 1e-4 of the largest value, 2e-2 in 16 bits.",
)  # fmt: skip
@click.option("--license", metavar="ID", help="The licence of the model, for its card, such as mit or apache-2.0.")
@click.option("--checkpoint", metavar="NAME", type=without_slash, help="Default: best, else latest.")
@with_json
@with_terminal_log
def export(
    directory: Path,
    arguments: tuple[str, ...],
    to: str,
    output: Path | None,
    dynamic: tuple[str, ...],
    probabilities: str | None,
    tolerance: float | None,
    license: str | None,
    checkpoint: str | None,
    as_json: bool,
) -> int:
    """Write the model of the run in DIRECTORY for other programs: a folder to publish, or a file.

    A program (onnx, torch-export) is compared with the run's model on batches of STREAM, in a process without emrun; if
    they differ, nothing is written. By default, STREAM is that of the best checkpoint. An argument with = or a leading
    ~ is an override. Nothing is written into DIRECTORY.
    """
    # what can be refused before torch is imported
    if probabilities not in (None, _BY_LOSS, "softmax", "sigmoid"):
        raise click.UsageError(
            f"--probabilities: {probabilities!r} is neither softmax nor sigmoid; write overrides before --probabilities"
        )
    overrides = [word for word in arguments if "=" in word or word.startswith("~")]
    streams = [word for word in arguments if word not in overrides]
    stream = streams[0] if streams else None
    overrides += streams[1:]  # each is an error that says what an override is
    check_run(expanded(directory))
    config = read_config(expanded(directory))
    check_streams_of_eval(overrides, [stream] if stream else [])
    exported = config.overlaid(stream, overrides) if stream else config.overridden(overrides)
    check_statically(exported)
    if stream:
        check_has_stream(exported, stream)
    import_torch()
    from emrun.exports.export import export as export_run

    # the export
    try:
        with unwound_by_sigterm(), users_code():
            written = export_run(
                directory,
                stream,
                to=to,
                output=output,
                overrides=overrides,
                checkpoint_name=checkpoint,
                dynamic=dynamic,
                probabilities=probabilities == _BY_LOSS or probabilities or False,
                tolerance=tolerance,
                license=license,
            )
    except Interrupted as error:
        end_interrupted(f"{error.reason}; nothing is written", error.signal)

    # the summary
    if as_json:
        print_json({"format": to, "place": written.place, "files": written.files, **written.facts})
    else:
        click.echo("\n".join([f"{from_here(written.place)}: {', '.join(written.files) or to}", *written.lines]))
    return 0
