"""`emrun hooks`."""

from __future__ import annotations

import click


@click.command(short_help="List the hooks at hand, or explain one.")
@click.argument("name", required=False)
def hooks(name: str | None) -> int:
    """List the hooks that come with emrun; with NAME, tell what it does, its arguments and the YAML to paste.

    NAME is one of them, or a dotted path such as my_hooks.Mine, found in the current directory.
    """
    import inspect
    import sys
    from pathlib import Path

    from tabulate import tabulate

    from emrun.errors import did_you_mean, listed
    from emrun.names import documentation, dotted_path, short_names

    if name is None:
        rows = [(each, documentation(each, "hook").partition("\n")[0]) for each in short_names("hook")]
        click.echo(tabulate(rows, tablefmt="plain"))
        return 0
    if dotted_path(name, "hook") is not None:
        click.echo(documentation(name, "hook"))
        return 0
    if "." not in name:
        known = short_names("hook")
        raise click.UsageError(f"emrun has no hook {name!r}{did_you_mean(name, known)}; it has {listed(known)}")
    from emrun.build import locate

    sys.path.append(str(Path.cwd()))
    try:
        found = locate(name)
    except LookupError as error:
        raise click.UsageError(str(error.args[0])) from error
    click.echo(inspect.getdoc(found) or f"{name} has no docstring")
    return 0
