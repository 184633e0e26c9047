"""`emrun show`."""

from __future__ import annotations

import inspect
import shutil
import sys

import click

from emrun.cli.console import with_tracebacks
from emrun.cli.failures import users_code


@click.command(short_help="List hooks, datasets, models, ..., or explain one of them.")
@click.argument("name", required=False, metavar="[hooks|datasets|models|schedules|metrics|NAME]")
@with_tracebacks
def show(name: str | None) -> int:
    """List what a config can name: hooks, datasets, models, schedules and metrics; with NAME, explain one of them.

    Listed are those of emrun, of installed packages and, for schedules, of PyTorch. NAME is a name from the lists, or a
    dotted path, such as my_hooks.Mine, that is found in the current directory.
    """
    from emrun.config.catalogue import PLACES, explanation, listing
    from emrun.config.import_finder import locate
    from emrun.config.names import NotThere, dotted_path
    from emrun.user_modules import find_user_modules
    from emrun.wording import did_you_mean

    formatter = click.HelpFormatter(width=_width())
    if name is None:
        for kind, place in PLACES.items():
            with formatter.section(f"{kind.capitalize()} ({place})"):
                formatter.write_dl(listing(kind))
        click.echo(formatter.getvalue().strip())
        return 0
    if name in PLACES:
        formatter.write_dl(listing(name))
        click.echo(formatter.getvalue(), nl=False)
        return 0
    text = explanation(name)
    if text is None:
        find_user_modules()
        try:
            paths = [name] if "." in name else [dotted_path(name, kind) for kind in ("hook", "dataset", "model")]
            path = next(filter(None, paths), None)
            if path is None:
                known = [*PLACES, *(each.rpartition(".")[2] for kind in PLACES for each, _ in listing(kind))]
                what = "not a hook, dataset, model, schedule or metric"
                raise click.UsageError(f"{name!r} is {what}{did_you_mean(name, known)} (`emrun show` lists them)")
            with users_code():
                found = locate(path)
        except NotThere as error:
            raise click.UsageError(str(error)) from error
        text = inspect.getdoc(found) or f"{name} has no docstring"
    click.echo(text)
    return 0


def _width() -> int:
    """Return how long lines may be: in a pipe, each name has one line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
