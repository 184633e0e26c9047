"""`emrun config`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from emrun.yaml_tree import Node


@click.command(short_help="Print a config as emrun reads it.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
@click.option("--resolved", is_flag=True, help="With ${...} replaced; what comes from the environment stays as it is.")
@click.option("--origins", is_flag=True, help="A line for each value, with the file and line or override it is from.")
def show_config(config: Path, overrides: tuple[str, ...], resolved: bool, origins: bool) -> int:
    """Print CONFIG, a file or a directory that holds config.yaml, merged with what it extends and the overrides.

    It is read, but not checked against the classes that it names.
    """
    from tabulate import tabulate

    from emrun.config import interpolate, read_config
    from emrun.yaml_tree import dump, node_of

    merged = read_config(config, overrides)
    if resolved:
        merged = interpolate(merged)
    if origins:
        rows = [(key, repr(node.shown()), str(node.position)) for key, node in _leaves(merged)]
        click.echo(tabulate(rows, tablefmt="plain", disable_numparse=True))
    else:
        click.echo(dump(node_of(merged.shown(), merged.position)), nl=False)
    return 0


def _leaves(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the values that hold no others, with their keys as overrides write them."""
    if node.value and isinstance(node.value, dict | list):
        children = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for name, child in children:
            yield from _leaves(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, node
