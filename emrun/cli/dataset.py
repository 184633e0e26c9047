"""`emrun dataset`."""

from __future__ import annotations

from pathlib import Path

import click

from emrun.cli.console import terminal_log


@click.command(short_help="Call a method of a config's dataset.")
@click.argument("method")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
def dataset(method: str, config: Path, overrides: tuple[str, ...]) -> int:
    """Build the dataset of CONFIG, call its METHOD without arguments and print what it returns.

    Every dataset has stream_info: a table of its streams' sources.
    """
    with terminal_log():
        from emrun.dataset import AbstractDataset
        from emrun.errors import did_you_mean, listed
        from emrun.training import create_dataset

        built = create_dataset(config, overrides)
        public = [name for name in dir(built) if not name.startswith("_")]
        methods = [name for name in public if callable(getattr(type(built), name, None))]  # properties are not asked
        if method == "stream_info" and method not in methods:
            click.echo(AbstractDataset.stream_info(built))
            return 0
        if method not in methods:
            hint = did_you_mean(method, methods)
            kind = type(built).__name__
            raise click.UsageError(f"dataset {kind} has no method {method!r}{hint} (it has {listed(methods)})")
        found = getattr(built, method)()
        if found is not None:
            click.echo(found)
    return 0
