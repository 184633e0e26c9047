"""Options and commands of other tools: the error says what to write instead."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import click

from emrun.config.names import instead

_VALUE = "VALUE"  # in a command, for a value that is missing


def answer(error: click.ClickException) -> None:
    """Add the command to write to the error about an option or a command that does not exist, if it is known elsewhere.

    Args:
        error: the error, which is changed. It never proposes an option that deletes something.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if context is None:
        return
    if option is not None:
        error.possibilities = [each for each in error.possibilities or () if each != "--rm"]  # type: ignore[attr-defined]
        written, known = None, {name for each in context.command.params for name in each.opts}
        while option is not None and (better := _with_option(option, context.command, written or sys.argv[1:])):
            written = better
            options = (each.partition("=")[0] for each in written if each.startswith("-"))
            option = next((each for each in options if each not in known), None)
    elif isinstance(context.command, click.Group) and (wanted := sys.argv[1:2]):
        if advice := instead(wanted[0], "no_command"):
            error.possibilities = []  # type: ignore[attr-defined]
            error.message += f" {advice}"  # type: ignore[misc]
        command = instead(wanted[0].replace("-", "_"), "command")
        written = (
            None if command is None else [*sys.argv[2:], command] if command == "--help" else [command, *sys.argv[2:]]
        )
    else:
        return
    if written is not None:
        error.possibilities = []  # type: ignore[attr-defined]
        line, is_whole = shlex.join(["emrun", *written]), not any(each.endswith(_VALUE) for each in written)
        error.fix = f"command {line}" * is_whole  # type: ignore[attr-defined]
        error.message += f" {'Write' if is_whole else 'It needs a value'}: {line}"  # type: ignore[misc]


def _with_option(option: str, command: click.Command, given: Sequence[str]) -> list[str] | None:
    """Return the arguments with what stands for an option, `VALUE` for a missing one; None if it is not known."""
    form = instead(option.lstrip("-").replace("-", "_"), "option")
    place = next((place for place, each in enumerate(given) if each.partition("=")[0] == option), None)
    if form is None or place is None:
        return None
    _, has_value, value = given[place].partition("=")
    takes = "{}" in form
    after = place + 1
    if takes and not has_value:
        is_missing = after == len(given) or given[after].startswith("-")
        value, after = (_VALUE, after) if is_missing else (given[after], after + 1)
    name, *others = [*given[:place], *given[after:]] or [""]
    first, *rest = form.format(value).split(" ", 1)
    if first in ("resume", "check"):
        return [first, *rest, *([] if takes else others)] if name == "train" else None
    known = [each.opts for each in command.params]
    if first.startswith("-"):
        return [name, *others, first, *rest] if any(first in each for each in known) else None
    if not any(each.name in ("overrides", "arguments") for each in command.params):
        return None
    return [name, value, *others] if form == "{}" and "=" not in value else [name, *others, form.format(value)]
