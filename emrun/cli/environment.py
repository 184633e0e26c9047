"""What `emrun check` shows without a config: the environment and the devices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from emrun.cli.as_json import print_json
from emrun.cli.failures import print_error
from emrun.cli.signals import import_torch, unwound_by_sigterm
from emrun.cli.tables import table


def check_environment(as_json: bool) -> int:
    """Print the environment and what is wrong with it; return the exit status."""
    with unwound_by_sigterm():
        try:
            import_torch()
            from emrun.diagnosis.environment import inspect_environment
        except (ImportError, OSError) as error:  # also a shared library that torch does not find
            raise click.ClickException(f"{error}; install emrun and PyTorch again") from error
        found = inspect_environment(Path.cwd())
    if as_json:
        problems = [
            {"file": None, "line": None, "column": None, "key": None, "message": each} for each in found.problems
        ]
        print_json({**asdict(found), "problems": problems})
    else:
        click.echo(table(list(found.facts.items())))
        click.echo("\n" + table([list(row.values()) for row in found.devices], list(found.devices[0])) + "\n")
        for message in found.warnings:
            click.echo(f"warning: {message}", err=True)
        for message in found.problems:
            print_error(f"{click.style('error:', fg='red', bold=True)} {message}")
        counts = f"{len(found.problems)} errors, {len(found.warnings)} warnings"
        click.echo(counts if found.problems or found.warnings else "nothing is wrong")
    return 1 if found.problems else 0
