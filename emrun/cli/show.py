"""`emrun show`."""

from __future__ import annotations

import sys

import click

from emrun.base.tables import width
from emrun.base.user_modules import find_user_modules
from emrun.base.wording import did_you_mean
from emrun.cli.console import complete_names, terminal_log, with_tracebacks
from emrun.cli.failures import users_code
from emrun.cli.output import print_json, with_json
from emrun.config.catalogue import PLACES, explained, explanation, listing
from emrun.config.import_finder import locate
from emrun.config.names import NotThere, dotted_path


@click.command()
@click.argument(
    "name", required=False, metavar="[bases|hooks|datasets|models|optimizers|schedules|metrics|losses|NAME]",
    shell_complete=complete_names,
)  # fmt: skip
@with_json
@with_tracebacks
def show(name: str | None, as_json: bool) -> None:
    """List what a config can name: bases, hooks, datasets, models, metrics, losses, ...; with NAME, explain it.

    The lists have the names of emrun, of installed packages and, for optimizers and schedules, of PyTorch. NAME is one
    of these names, or a dotted path, such as my_hooks.Mine, that is found in the current directory. What is printed is
    its docstring, or the text of a base.
    """
    if name is None or name in PLACES:
        listed = {kind: listing(kind) for kind in PLACES if name in (None, kind)}
        if as_json:
            print_json(
                {
                    kind: [{"name": known_name, "summary": text} for known_name, text in rows]
                    for kind, rows in listed.items()
                }
            )
            return
        formatter = click.HelpFormatter(width=width(sys.stdout) or 10_000)  # in a pipe, each name has one line
        for kind, rows in listed.items():
            with formatter.section(f"{kind.capitalize()} ({PLACES[kind]})"):
                formatter.write_dl(rows)
        click.echo(formatter.getvalue().strip())
        return
    text = explanation(name)
    if text is None:
        find_user_modules()
        try:
            paths = [name] if "." in name else [dotted_path(name, kind) for kind in ("hook", "dataset", "model")]
            paths = [path for path in paths if path]
            if not paths:
                known = list(PLACES)
                for kind in PLACES:
                    known += [dotted.rpartition(".")[2] for dotted, _ in listing(kind)]
                raise click.UsageError(
                    f"{name!r} is not a base, hook, dataset, model, optimizer, schedule or "
                    f"metric{did_you_mean(name, known)} (`emrun show` lists them)"
                )
            with terminal_log(quiet=True), users_code():
                text = explained(paths[0], locate(paths[0]))
        except NotThere as error:
            raise click.UsageError(str(error)) from error
    if as_json:
        print_json({"name": name, "text": text})
    else:
        click.echo(text)
