"""`emrun check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from emrun.base.censor import hidden
from emrun.base.errors import UsageError
from emrun.base.tables import folded_line, width
from emrun.base.types import Json
from emrun.base.wording import IN_TABLE, few, in_one_line, size_of, span
from emrun.cli.console import GivenPath, overrides_argument, terminal_log, with_tracebacks
from emrun.cli.failures import import_torch, print_error, unwound_by_sigterm, users_code
from emrun.cli.output import MOST_ROWS, parameters_table, print_json, so_far, table, with_json
from emrun.config.config import Config, load_config
from emrun.config.interpolation import unread_vars
from emrun.config.plan import check_statically, with_statistics
from emrun.epoch_data import statistics


@click.command()
@click.argument("config", type=GivenPath(path_type=Path), required=False)
@overrides_argument
@click.option("--static", is_flag=True, help="Check only what can be known without importing anything (fast).")
@click.option("--data", is_flag=True, help="Also read all data once, and find leaks, duplicates, NaN, ...")
@click.option("--numerics", is_flag=True, help="Also prove on real batches that all ways to compute a step agree.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Also forecast the memory of each of N processes (model.strategy); with --numerics: compare them with one.",
)
@with_json
@with_tracebacks
def check(
    config: Path | None,
    overrides: tuple[str, ...],
    static: bool,
    data: bool,
    numerics: bool,
    nproc: int,
    as_json: bool,
) -> int:
    """Find what is wrong with CONFIG, without training, and show what its data and its model agree on.

    The config is checked against everything that it names. Then the first two batches of every stream are read, and a
    copy of the model makes a training step and evaluations with them, and is saved and loaded again. Then a training of
    one epoch, with two batches of each stream and all hooks except trackers, is interrupted and resumed. Its directory
    is temporary and is deleted.

    With --data, every stream is read once. The check finds examples that are in two streams or twice in one, and the
    same inputs with different labels. It finds sources that are constant or not finite, labels that only one stream
    has, and a train stream that is sorted by a label.

    With --numerics, the gradients of a batch are compared with those of its halves, and with those calculated in other
    ways, as far as the config has them: compiled, in 16 bits, in micro batches, recomputed, and on N ranks. Evaluated
    streams are read twice, the model is saved and loaded, and its statistics are compared with those of a fresh
    process.

    With --nproc N and `model.strategy`, the forecast has the memory that each of N processes needs, and a hook of one
    process that runs the model is an error; none is started.

    Without CONFIG, emrun shows versions and devices, and says why a GPU cannot be used.

    Exit status: 0 no error, 1 the dataset or the model failed, or something is wrong with the data, the
    numerics or the environment, 2 the config is wrong.
    """
    options = {"static": static, "data": data, "numerics": numerics, "nproc": nproc > 1}
    given = [name for name, is_given in options.items() if is_given]
    if config is None:
        if given:
            raise click.UsageError(f"--{given[0]} needs a CONFIG", click.get_current_context())
        return _check_environment(as_json)
    if static and given[1:]:
        raise click.UsageError(f"--static imports nothing, as --{given[1]} does; leave out one of the two")
    with terminal_log(quiet=True):
        sys.dont_write_bytecode = True
        so_far()["contract"] = None
        with unwound_by_sigterm(), users_code():
            loaded = load_config(config, overrides)
            contract = _check(loaded, static, 1 if numerics else nproc)
            data_report = _look(loaded, with_bar=not as_json) if data else None
            proofs = None
            if numerics:
                from emrun.diagnosis.numerics.proof import prove

                proofs = prove(with_statistics(loaded), nproc)
    is_wrong = any(proof["result"] == "differs" for proof in proofs or ())
    if data_report is not None and data_report["findings"]:
        is_wrong = True

    # what is printed
    if as_json:
        reports = {"data": data_report, "numerics": proofs}
        requested = {name: report for name, report in reports.items() if report is not None}
        print_json({"problems": [], "contract": contract, **requested})
    elif contract is None:
        click.echo(f"{config}: nothing is wrong, as far as can be checked without importing anything")
    else:
        blocks = list(_contract(contract))
        if data_report:
            blocks += _data(data_report)
        if proofs:
            blocks += _numerics(proofs)
        click.echo("\n".join(blocks))
        for note in contract["notes"]:
            print_error(f"warning: {note}")
        if not is_wrong:
            also = ", and read all data" if data else ""
            if numerics:
                also += ", and compared the ways to compute a step"
            verdict = "no error, but the warnings above" if contract["notes"] else "nothing is wrong"
            click.echo(f"\n{config}: {verdict}; tried a short epoch with all hooks, saving and loading{also}")
    return 1 if is_wrong else 0


def _check_environment(as_json: bool) -> int:
    """Print the environment and what is wrong with it; return the exit status."""
    with unwound_by_sigterm():
        try:
            import_torch()
            from emrun.diagnosis.environment import inspect_environment
        except (ImportError, OSError) as error:  # also a shared library that torch does not find
            raise click.ClickException(f"{error}; install emrun and PyTorch again") from error
        environment = inspect_environment()
    if as_json:
        nowhere = dict.fromkeys(("file", "line", "column", "key"))
        print_json(
            {**asdict(environment), "problems": [{**nowhere, "message": problem} for problem in environment.problems]}
        )
    else:
        click.echo(table(list(environment.facts.items())))
        click.echo(
            "\n" + table([list(row.values()) for row in environment.devices], list(environment.devices[0])) + "\n"
        )
        for message in environment.warnings:
            print_error(f"warning: {message}")
        for message in environment.problems:
            print_error(f"{click.style('error:', fg='red', bold=True)} {message}")
        counts = f"{len(environment.problems)} errors, {len(environment.warnings)} warnings"
        click.echo(counts if environment.problems or environment.warnings else "nothing is wrong")
    return 1 if environment.problems else 0


def _look(config: Config, *, with_bar: bool) -> Json:
    """Read all data, with a bar on a terminal for each stream."""
    from tqdm import tqdm

    from emrun.diagnosis.data_check import look_at_data

    @contextmanager
    def bar(stream: str, batches: int | None) -> Iterator[Callable[[], Any]]:
        is_shown = with_bar and width(sys.stderr) is not None
        with tqdm(
            total=batches, desc=in_one_line(stream, 40), unit=" batches", leave=False, disable=not is_shown
        ) as bar:
            yield bar.update

    return look_at_data(config, bar)


def _data(report: Json) -> Iterator[str]:
    """Yield how many examples and which labels the streams have, and what was found."""
    streams = report["streams"]
    rows = [
        [name, f"{stream['batches']:,}", f"{stream['examples']:,}{'' if stream['whole'] else ' (one epoch)'}"]
        for name, stream in streams.items()
    ]
    yield "\n" + table(rows, ["stream", "batches", "examples"], ("left", "right", "right"))
    for source in dict.fromkeys(source for stream in streams.values() for source in stream["labels"]):
        yield "\n" + _label_table(source, {name: stream["labels"].get(source) for name, stream in streams.items()})
    if report["findings"]:
        yield "\n" + "\n".join(f"found: {hidden(finding['message'])}" for finding in report["findings"])


def _numerics(rows: list[Json]) -> Iterator[str]:
    """Yield what was compared, and the results."""
    yield "\n" + table([[row["what"], row["result"], hidden(row["text"])] for row in rows], ["numerics", "result", ""])


def _label_table(source: str, labels: dict[str, dict[str, int] | None]) -> str:
    """Return the share of each label in each stream that has the source."""
    shares = {
        name: {value: count / sum(counts.values()) for value, count in counts.items()}
        for name, counts in labels.items()
        if counts
    }
    values = list(dict.fromkeys(value for stream_shares in shares.values() for value in stream_shares))
    values.sort(key=lambda value: -max(stream_shares.get(value, 0) for stream_shares in shares.values()))
    rows = [
        [value, *(f"{stream_shares.get(value, 0):.1%}" for stream_shares in shares.values())]
        for value in values[:MOST_ROWS]
    ]
    if len(values) > MOST_ROWS:
        rows.append([f"{len(values) - MOST_ROWS} more", *("(--json has all)" for _ in shares)])
    return table(rows, [in_one_line(source, 40), *shares], ("left", *("right" for _ in shares)))


def _check(config: Config, static: bool, ranks: int) -> Json | None:
    check_statically(config, evaluations=True)
    strategy = config.tree.get("model", "strategy")
    if ranks > 1 and (strategy is None or strategy.value is None):
        raise UsageError(
            "--nproc needs --numerics, or model.strategy: without them, each process needs the memory of one alone"
        )
    if not static:
        import_torch(config)
        from emrun.diagnosis.tryout import try_out

        return try_out(with_statistics(config), ranks)
    for note in (*config.notes, *unread_vars(config.root)):
        print_error(f"warning: {note}")
    return None


def _contract(contract: Json) -> Iterator[str]:
    """Yield what the dataset and the model agree on, as tables and lines."""
    # the streams
    rows = []
    for name, stream in contract["streams"].items():
        count = stream["batches"]
        head = [name, f"{stream['runs']}{f', {count} batches' if count is not None else ''}"]
        for source, info in stream["sources"].items():
            used_by = ", ".join(info["used_by"]) or ("nothing" if stream["runs"] != "not used in training" else "")
            rows.append([*head, source, info["dtype"], info["shape"], info["range"], used_by])
            head = ["", ""]
        if not stream["sources"]:
            rows.append([*head, "no batches", "", "", "", ""])
    yield table(rows, ["stream", "", "source", "dtype", "shape", "range", "used by"])
    if reading := ", ".join(f"{key}: {count}" for key, count in contract["reading"].items() if count):
        yield f"\nstreams are read ahead with {reading}"

    # the outputs and metrics of the model
    rows = [[name, info["dtype"], info["shape"], info["range"]] for name, info in contract["outputs"].items()]
    yield "\n" + table(rows, ["output", "dtype", "shape", "range"])
    for stream, values in contract["statistics"].items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in statistics(values))
        yield f"metrics of the stream {stream!r}, from its first batches: {shown}"

    # the parameters, and what updates them
    if contract["parameters"]:
        yield f"\n{parameters_table(contract['parameters'])}"
    if groups := contract["parameter_groups"]:
        headers = ["optimizer", "class", "group", "lr", "weight decay", "parameters", ""]
        align = ("left", "left", "right", "right", "right", "right", "left")
        yield "\n" + table(map(_group, groups), headers, align)
    if contract["precision"] not in (None, 32):
        yield f"\nprecision: {contract['precision']}"
    if initial := contract["initial_weights"]:
        rows = [[row["what"], f"{row['tensors']:,}", f"{row['values']:,}", row["which"]] for row in initial["rows"]]
        headers = [f"weights from {initial['source']}", "tensors", "values", ""]
        yield "\n" + table(rows, headers, ("left", "right", "right", "left"))
    if contract["schedule"] is not None:
        yield "\n" + "\n".join(folded_line(line, width(sys.stdout)) for line in contract["schedule"]["lines"])

    # what it costs
    memory = ", ".join(f"{what} {size_of(size)}" for what, size in contract["memory"].items() if size)
    yield f"\nmemory: {memory}"
    if seconds := contract["seconds_per_epoch"]:
        parts = ", ".join(f"{name} {value:.2g} s" for name, value in seconds.items())
        yield f"an epoch takes about {sum(seconds.values()):.2g} s, estimated from the first batches: {parts}"
    rows = [
        [what, size_of(forecast["bytes"]) if "bytes" in forecast else span(forecast["seconds"]), forecast["how"]]
        for what, forecast in contract["forecast"].items()
    ]
    yield "\n" + table(rows, ["forecast", "", "how it is known"])


def _group(group: Json) -> list[str]:
    """Return the row of a group of parameters."""
    numbers = ["" if group[key] is None else f"{group[key]:g}" for key in ("lr", "weight_decay")]
    names = few(group["parameters"], IN_TABLE)
    return [group["optimizer"], group["class"], str(group["group"]), *numbers, f"{group['count']:,}", names]
