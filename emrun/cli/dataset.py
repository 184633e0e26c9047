"""`emrun dataset`."""

from __future__ import annotations

from pathlib import Path

import click

from emrun.base.errors import exit_status
from emrun.base.wording import meant_of
from emrun.cli.console import config_arguments, terminal_log, with_tracebacks
from emrun.cli.failures import import_torch, print_error, users_code
from emrun.cli.output import print_json, table, with_json


@click.command()
@click.argument("method")
@config_arguments
@with_json
@with_tracebacks
def dataset(method: str, config: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Build the dataset of CONFIG, call its METHOD without arguments and print the result.

    Every dataset has the method stream_info, which shows the sources of its streams; when a stream fails, the exit
    status is 1.
    """
    with terminal_log():
        import_torch()
        from emrun.dataset import SOURCE_COLUMNS, AbstractDataset, describe_sources
        from emrun.training.create import create_dataset

        with users_code():
            built = create_dataset(config, overrides)
        public = [name for name in dir(built) if not name.startswith("_")]
        methods = [name for name in public if callable(getattr(type(built), name, None))]  # evaluates no property
        standard = AbstractDataset.stream_info
        if method == "stream_info" and getattr(type(built), method, standard) is standard:
            with users_code():
                rows, broken = describe_sources(built)
            if as_json:
                streams = [dict(zip(SOURCE_COLUMNS, row, strict=True)) for row in rows]
                print_json({"streams": streams, "failures": [line for line, _ in broken]})
            else:
                click.echo(table(rows, SOURCE_COLUMNS))
            for line, _ in broken:
                print_error(f"{click.style('error:', fg='red', bold=True)} {line}")
            statuses = {exit_status(error) for _, error in broken} or {0}
            return statuses.pop() if len(statuses) == 1 else 1
        if method not in methods:
            kind = type(built).__name__
            raise click.UsageError(f"dataset {kind} has no method {method!r}{meant_of(method, methods)}")
        with users_code():
            result = getattr(built, method)()
        if as_json:
            print_json({"result": result})
        elif result is not None:
            click.echo(result)
        return 0
