"""What the commands share: arguments with what a shell completes them with, options, and the log on the terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from emrun.base.arguments import expanded
from emrun.base.tables import Table, folded_line, width
from emrun.base.terminal import OUTPUT, kept_on, outlived, restore_output
from emrun.ranks.group import rank_of

if TYPE_CHECKING:
    from emrun.config.config import Config

VERBOSE = "emrun.verbose"
"""Key of `click.Context.meta`: whether the option `--verbose` was given."""
DISPLAY = ("LogVariables", "ShowProgress")
"""The hooks that `emrun train` and `emrun resume` add to a config that does not list them."""

_Items = Callable[[click.Context, str], Iterable[CompletionItem]]


def quietly(items: _Items) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completer that finds nothing where something is wrong, for example with the config."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return list(items(context, incomplete))
        except Exception:  # also the user's code may fail; a message would stand in the typed line
            return []

    return complete


def named(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the items for those of some names that begin with what is typed."""
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _config_of(context: click.Context) -> Config:
    from emrun.config.config import read_config

    return read_config(context.params.get("config") or context.params["directory"])


def _overrides(context: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    from emrun.config.override_keys import keys_below

    if "=" in incomplete:
        return
    sign = "~" if incomplete.startswith("~") else ""  # the override deletes the key
    head, dot, tail = incomplete.removeprefix("~").rpartition(".")
    for name, is_deeper in keys_below(_config_of(context), head.split(".") if head else []).items():
        if name.startswith(tail):
            ending = "" if sign else "="
            if is_deeper:
                ending = "."
            kind = "partial" if ending else "plain"  # the shell writes no blank after a partial one
            yield CompletionItem(f"{sign}{head}{dot}{name}{ending}", type=kind)


def _streams_or_overrides(context: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    from emrun.config.override_keys import streams_of

    streams = [] if re.search(r"[.~=]", incomplete) else named(streams_of(_config_of(context)), incomplete)
    return streams or _overrides(context, incomplete)


def _at_hand(context: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    from emrun.config.names import bases, short_names

    kinds = (*bases(), "bases", "hooks", "datasets", "models", "optimizers", "schedules", "metrics", "losses")
    names = (name for kind in ("hook", "dataset") for name in short_names(kind, installed=False))
    return named((*kinds, *names), incomplete)


class GivenPath(click.Path):
    """A path; an empty text, as of a variable of the shell that is not set, is an error, not the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail(
                "the path is empty, perhaps because a variable is not set; write . for this directory", param, ctx
            )
        return super().convert(value, param, ctx)


complete_runs = quietly(lambda context, incomplete: [CompletionItem(incomplete, type="dir")])
"""Lets the shell complete a run: a directory."""
complete_overrides = quietly(_overrides)
"""Completes the key of an override, one part at a time, from the config and the signatures of its classes."""
complete_streams = quietly(_streams_or_overrides)
"""Completes a stream of the dataset, or else an override."""
complete_names = quietly(_at_hand)
"""Completes a name that `emrun show` explains."""
run_argument = click.argument("directory", type=GivenPath(path_type=Path), shell_complete=complete_runs)
"""Adds the argument `directory` of a run."""
overrides_argument = click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1, shell_complete=complete_overrides)
"""Adds the argument `overrides`."""


class _TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to standard error, above a progress bar if there is one; with equal `once`, the first."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if once := getattr(record, "once", None):
            key = record.getMessage() if once is True else once
            if key in self._told:
                return
            self._told.add(key)
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # None if tqdm is not imported: then no bar is shown
        with tqdm.external_write_mode(file=self.stream) if tqdm else nullcontext():
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        space = width(self.stream)
        args = record.args if isinstance(record.args, tuple) else ()
        folded = tuple(argument.folded(space) if isinstance(argument, Table) else argument for argument in args)
        text = str(record.msg) % folded if folded else record.getMessage()
        word = f"{record.levelname.lower()}:" if record.levelno > logging.INFO else ""
        text = f"{word} {text}" if word else text
        text = "\n".join(folded_line(line, space) for line in text.split("\n"))
        if word and has_colours(self.stream):
            colour = "yellow" if record.levelno == logging.WARNING else "red"
            text = click.style(word, fg=colour, bold=True) + text[len(word) :]
        return text


def has_colours(stream: Any) -> bool:
    """Return whether a stream is a terminal that shows colours (see https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Directory(GivenPath):
    """A path of a directory, with `~` replaced where the text begins with it: `./~` is a name."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def coerce_path_result(self, value: str | os.PathLike[str]) -> Any:
        """Return the path."""
        return expanded(value)


def without_slash(name: str) -> str:
    """Return the name of a checkpoint without the slash that shells add to names of directories."""
    return str(Path(name)) if name else name


def config_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments `config` and `overrides`."""
    return click.argument("config", type=GivenPath(path_type=Path))(overrides_argument(command))


def _note_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.meta[VERBOSE] = value
    return value


with_tracebacks = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, callback=_note_verbose, help="Show full tracebacks.",
)  # fmt: skip
"""Adds the option `--verbose` to a command that shows no log."""


def with_terminal_log(command: Callable[..., int]) -> Callable[..., int]:
    """Show the log while a command runs, and add the options that say how much of it."""

    @click.option(
        "-v", "--verbose", is_flag=True, callback=_note_verbose, help="Show debug messages and full tracebacks."
    )
    @click.option("-q", "--quiet", is_flag=True, help="Show only warnings and errors, and no progress bars.")
    @click.option("--no-progress", "progress", flag_value=False, default=True, help="Show no progress bars.")
    @wraps(command)
    def run(*, verbose: bool, quiet: bool, progress: bool, **parameters: Any) -> int:
        with terminal_log(verbose=verbose, quiet=quiet, progress=progress):
            return command(**parameters)

    return run


def is_follower() -> bool:
    """Return whether this process is one of several ranks, and not the one that speaks."""
    return rank_of() > 0


@contextmanager
def terminal_log(*, verbose: bool = False, quiet: bool = False, progress: bool = True) -> Iterator[None]:
    """Show the log on standard error; without `progress`, tqdm shows no bars in any code.

    From then on, the command outlives the reader of its output, as in `emrun train | head`.
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet cannot be used together")
    if quiet or not progress or is_follower():
        os.environ["TQDM_DISABLE"] = "1"
    sys.stdout = outlived(sys.stdout)
    OUTPUT.update(stdout=sys.stdout, stderr=sys.stderr)
    root = logging.getLogger()
    handler = _TerminalHandler(sys.stderr)
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    if is_follower():
        handler.setLevel(logging.CRITICAL)
    level = root.level
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        with kept_on(handler), _warnings_once():
            yield
    finally:
        root.setLevel(level)
        restore_output()
        OUTPUT.clear()  # what is not flushed is flushed when nothing refers to it


@contextmanager
def _warnings_once() -> Iterator[None]:
    """Show each warning of Python once, unless `-W` or PYTHONWARNINGS says how often.

    Python shows one again after any `warnings.catch_warnings`, such as those of libraries in each epoch.
    """
    show = warnings.showwarning
    shown: set[tuple[Any, ...]] = set()

    def once(*args: Any, **kwargs: Any) -> None:
        key = (str(args[0]), *args[1:4])  # the message, the category, the file and the line
        if key not in shown:
            shown.add(key)
            show(*args, **kwargs)

    if not sys.warnoptions:
        warnings.showwarning = once
    try:
        yield
    finally:
        warnings.showwarning = show
