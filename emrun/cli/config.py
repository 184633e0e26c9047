"""`emrun config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from emrun.cli.console import GivenPath, overrides_argument
from emrun.cli.failures import print_error
from emrun.cli.output import print_json, table, with_json
from emrun.config.config import read_config
from emrun.config.json_schema import config_schema
from emrun.config.plan import defaults_of
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of


@click.command("config")
@click.argument("config", type=GivenPath(path_type=Path), required=False)
@overrides_argument
@click.option("--resolved", is_flag=True, help="Replace ${...}, except where values come from the environment.")
@click.option("--origins", is_flag=True, help="Print where each value comes from: file and line, override or default.")
@with_json
@click.option("--schema", is_flag=True, help="Print a JSON schema of configs, for editors, instead of a config.")
def show_config(
    config: Path | None, overrides: tuple[str, ...], resolved: bool, origins: bool, as_json: bool, schema: bool
) -> None:
    """Print CONFIG, a file or a directory with a config.yaml, merged with the files that it extends and the overrides.

    The config is not checked against the classes that it names; --origins reads their defaults from their sources.
    """
    if schema:
        if config is not None or resolved or origins or as_json:
            raise click.UsageError(
                "--schema describes all configs; remove CONFIG and the other options", click.get_current_context()
            )

        print_json(config_schema())
        return
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'.", click.get_current_context())

    # the values and where they are from
    read = read_config(config, overrides)
    for note in read.notes:
        print_error(f"warning: {note}")
    tree = read.tree if resolved else read.root
    rows: list[tuple[str, Any, str]] = []
    if origins:
        rows += [
            (".".join(map(str, path)), node.shown(), str(node.position))  # as overrides write the key
            for path, node, _ in (((), tree, None), *tree.places())
            if not (node.value and isinstance(node.value, dict | list))
        ]
        for key, value, kind in defaults_of(read):
            rows.insert(_place(key, rows), (key, value, f"default of {kind}"))
    if as_json:
        listed = [dict(zip(("key", "value", "origin"), row, strict=True)) for row in rows] if origins else None
        print_json({"config": tree.shown(), "origins": listed})
    elif origins:
        click.echo(table([(key, repr(value), origin) for key, value, origin in rows]))
    else:
        click.echo(dump(node_of(tree.shown(), tree.position)), nl=False)


def _place(key: str, rows: list[tuple[str, Any, str]]) -> int:
    """Return the index at which a key belongs among the rows: after the last row of its mapping."""
    while "." in key:
        key = key.rpartition(".")[0]
        below = [index for index, row in enumerate(rows) if f"{row[0]}.".startswith(f"{key}.")]
        if below:
            return below[-1] + 1
    return len(rows)
