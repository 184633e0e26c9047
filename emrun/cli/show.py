"""`emrun show`."""

from __future__ import annotations

import inspect

import click

from emrun.cli.failures import users_code
from emrun.cli.tables import table


@click.command(short_help="List the hooks at hand, or explain one.")
@click.argument("name", default="hooks", metavar="[hooks|NAME]")
def show(name: str) -> int:
    """List the hooks of emrun and of installed packages; with NAME, tell what it does and the YAML to paste.

    NAME is one of them, or a dotted path such as my_hooks.Mine, found in the current directory.
    """
    from emrun.config.names import NotThere, built_ins, documentation, dotted_path, plugins, short_names
    from emrun.user_modules import find_user_modules
    from emrun.wording import did_you_mean, listed, normalised

    if name == "hooks":
        rows = [(each, documentation(each).partition("\n")[0]) for each in short_names("hook", installed=False)]
        for each, paths in plugins("hook").items():
            is_hidden = normalised(each) in built_ins("hook")
            rows.append((each, f"{' or '.join(paths)}{', by its dotted path only' * (is_hidden or len(paths) > 1)}"))
        click.echo(table(rows))
        return 0
    if normalised(name) in built_ins("hook"):
        click.echo(documentation(name))
        return 0
    from emrun.config.import_finder import locate

    find_user_modules()
    try:
        path = name if "." in name else dotted_path(name, "hook")
        if path is None:
            known = short_names("hook")
            raise click.UsageError(f"there is no hook {name!r}{did_you_mean(name, known)} (there is {listed(known)})")
        with users_code():
            found = locate(path)
    except NotThere as error:
        raise click.UsageError(str(error)) from error
    click.echo(inspect.getdoc(found) or f"{name} has no docstring")
    return 0
