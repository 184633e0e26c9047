"""`emrun eval`."""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.errors import StorageError
from emrun.base.types import Json
from emrun.base.wording import counted, listed
from emrun.cli.console import Directory, complete_streams, is_follower, run_argument
from emrun.cli.failures import import_torch, unwound_by_sigterm, users_code
from emrun.cli.output import cell, plain, print_json, results, so_far, table
from emrun.cli.ranks import end_interrupted, evaluates_run, run_ranks, starts_ranks
from emrun.config.config import read_over
from emrun.config.override_keys import check_has_stream, streams_of
from emrun.config.overrides import check_streams_of_eval
from emrun.config.plan import check_statically
from emrun.epoch_data import brief_statistics, named
from emrun.loop.interrupts import Interrupted
from emrun.ranks.group import leave
from emrun.runs.looks import looks_of
from emrun.runs.stored_run import StoredRun, statistic
from emrun.runs.summaries import Summaries
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
@click.option(
    "--all-checkpoints", is_flag=True,
    help="Evaluate each checkpoint that the run has kept, and mark the best; each counts as a look at STREAM.",
)  # fmt: skip
@evaluates_run
def evaluate(
    directory: Path,
    arguments: tuple[str, ...],
    config: Path | None,
    checkpoint: str | None,
    output_dir: Path | None,
    all_checkpoints: bool,
    nproc: int,
    as_json: bool,
) -> int:
    """Evaluate a checkpoint of the run in DIRECTORY on streams of its dataset.

    For each STREAM, the section eval.STREAM is merged over the config; then the overrides are applied: key.path=value,
    or ~key.path to delete a key. The results are printed and saved in DIRECTORY/eval/STREAM-N.
    """
    if all_checkpoints and checkpoint is not None:
        raise click.UsageError("--all-checkpoints evaluates each checkpoint; leave out --checkpoint")
    overrides = [word for word in arguments if "=" in word or word.startswith("~")]
    streams = [word for word in arguments if word not in overrides]

    # what can be refused before torch is imported
    check_run(expanded(directory))
    if not streams:
        known = streams_of(read_over(expanded(directory), config))
        raise click.UsageError(f"name a stream to evaluate: {listed(known) if known else 'such as valid'}")
    check_streams_of_eval(overrides, streams)
    for stream in streams:
        evaluated = read_over(expanded(directory), config).overlaid(stream, overrides)
        check_statically(evaluated)
        check_has_stream(evaluated, stream)
    if starts_ranks(nproc):
        return run_ranks(nproc)
    import_torch(evaluated)
    from emrun.training.evaluate import evaluate as evaluate_stream, is_kept, kept_checkpoints

    # the checkpoints, and the results of those that were evaluated
    checkpoints: list[Json] = [{"directory": checkpoint, "damage": None}]
    if all_checkpoints:
        checkpoints = kept_checkpoints(directory)
    found: list[Json] = []
    interrupted = None
    try:
        for each in checkpoints:
            if all_checkpoints and not is_kept(directory, each):
                continue
            statistics: Json = {}
            found.append({**each, "streams": statistics})
            if each["damage"] is not None:
                continue
            for stream in streams:
                with unwound_by_sigterm(), users_code():
                    statistics.update(
                        evaluate_stream(directory, stream, overrides, config, each["directory"], sys.argv, output_dir)
                    )
    except Interrupted as error:
        interrupted = error
    finally:
        if any(each["streams"] for each in found) and not is_follower():
            result: Json = {"streams": found[0]["streams"]}
            shown = results(found[0]["streams"])
            if all_checkpoints:
                result, shown = _compared(StoredRun(expanded(directory)), found, streams)
            so_far().update(result)
            click.echo(shown, err=as_json)
    if interrupted is not None:
        end_interrupted(f"{interrupted.reason}; the evaluation is not complete", interrupted.signal)

    # what is damaged, by one rank
    leave()
    damages = [each["damage"] for each in found if each["damage"] is not None]
    if damages and not is_follower():
        raise StorageError(errno.EIO, "\n  ".join(damages))
    if as_json and not is_follower():
        print_json({"status": "finished", "exit_status": 0, **so_far()})
    return 0


def _compared(run: StoredRun, found: Sequence[Json], streams: Sequence[str]) -> tuple[Json, str]:
    """Return what checkpoints of a run have given, for programs and as a table for each stream, with the best marked.

    The best has the lowest or highest value of the statistic by which `SaveBest` of the run chooses, but of the stream.
    """
    rows = [{**each, "streams": plain(each["streams"])} for each in found]
    address, which = Summaries(run).watched
    looks = looks_of(run)
    best: Json = {}
    tables = []
    for stream in dict.fromkeys(streams):
        watched = f"{stream}/{named(address)[1]}"
        values = {row["directory"]: statistic(row, watched) for row in rows}
        numbers = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
        note = f"none is the best: there is no {watched}"
        if numbers:
            best[stream] = (min if which == "min" else max)(numbers, key=numbers.__getitem__)
            note = f"* {'lowest' if which == 'min' else 'highest'} {watched}"
        if looks[stream]:
            note = f"{note}; the run was evaluated on {stream} {counted(looks[stream], 'time')}"

        # the table
        cells = [dict(brief_statistics(row["streams"].get(stream, {}))) for row in rows]
        variables = list(dict.fromkeys(name for each in cells for name in each))
        lines = []
        for row, shown in zip(rows, cells, strict=True):
            mark = ["*"] if row["directory"] == best.get(stream) else []
            label = " ".join([row["directory"], *row["names"], *mark])
            epoch = "damaged" if row["damage"] else str(row["epoch"])
            lines.append([label, epoch, *(cell(shown.get(name, "")) for name in variables)])
        tables.append(table(lines, [f"checkpoint on {stream}", "epoch", *variables], ["left"]))
        tables.append(f"{note}\n")
    return {"checkpoints": rows, "best": best}, "\n".join(tables).rstrip("\n")
