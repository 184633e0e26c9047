"""`emrun eval`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.wording import listed
from emrun.cli.console import Directory, complete_streams, is_follower, run_argument
from emrun.cli.failures import import_torch, unwound_by_sigterm, users_code
from emrun.cli.output import print_json, results, so_far
from emrun.cli.ranks import end_interrupted, evaluates_run, run_ranks, starts_ranks
from emrun.config.config import read_over
from emrun.config.override_keys import streams_of
from emrun.config.overrides import check_streams_of_eval
from emrun.config.plan import check_statically
from emrun.loop.interrupts import Interrupted
from emrun.ranks.group import leave
from emrun.training.directories import check_run


@click.command("eval")
@run_argument
@click.argument(
    "arguments", metavar="STREAM... [OVERRIDE...]", nargs=-1,
    shell_complete=complete_streams,
)  # fmt: skip
@click.option(
    "--output-dir", metavar="DIR", type=Directory(),
    help="Save the results in DIR/STREAM-N and write nothing into the run directory.",
)  # fmt: skip
@evaluates_run
def evaluate(
    directory: Path,
    arguments: tuple[str, ...],
    config: Path | None,
    checkpoint: str | None,
    output_dir: Path | None,
    nproc: int,
    as_json: bool,
) -> int:
    """Evaluate a checkpoint of the run in DIRECTORY on streams of its dataset.

    For each STREAM, the section eval.STREAM is merged over the config; then the overrides are applied: key.path=value,
    or ~key.path to delete a key. The results are printed and saved in DIRECTORY/eval/STREAM-N.
    """
    overrides = [word for word in arguments if "=" in word or word.startswith("~")]
    streams = [word for word in arguments if word not in overrides]

    # what can be refused before torch is imported
    check_run(expanded(directory))
    if not streams:
        known = streams_of(read_over(expanded(directory), config))
        raise click.UsageError(f"name a stream to evaluate: {listed(known) if known else 'such as valid'}")
    check_streams_of_eval(overrides, streams)
    for stream in streams:
        check_statically(read_over(expanded(directory), config).overlaid(stream, overrides))
    if starts_ranks(nproc):
        return run_ranks(nproc)
    import_torch()
    from emrun.training.evaluate import evaluate as evaluate_stream

    # the streams, and the results of those that were evaluated
    statistics = {}
    try:
        for stream in streams:
            with unwound_by_sigterm(), users_code():
                statistics.update(
                    evaluate_stream(directory, stream, overrides, config, checkpoint, sys.argv, output_dir)
                )
    except Interrupted as error:
        end_interrupted(f"{error.reason}; the evaluation is not complete", error.signal)
    finally:
        if is_follower():
            statistics.clear()
        if statistics:
            so_far()["streams"] = statistics
            click.echo(results(statistics), err=as_json)
    leave()
    if as_json and statistics:
        print_json({"status": "finished", "exit_status": 0, **so_far()})
    return 0
