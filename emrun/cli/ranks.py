"""The option `--nproc`: the command starts itself in several processes, which train together."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from emrun.base.errors import RankFailed, RunInUse, reason_of
from emrun.base.terminal import leave_closed_terminal
from emrun.base.wording import from_here
from emrun.cli.console import GivenPath, is_follower, with_terminal_log, without_slash
from emrun.cli.failures import end_by_signal, fail, print_error
from emrun.cli.output import print_json, run_as_json, wants_json, with_json
from emrun.cli.problems import problems_of
from emrun.ranks.group import cannot_meet, leave, meeting_place, number_of_ranks, rank_of

if TYPE_CHECKING:
    from emrun.launch.ranks import Ended

with_ranks: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--nproc", type=click.IntRange(min=1), default=1, metavar="N",
    help="Run in N processes on this machine, which share each batch; one for each GPU, if it has some.",
)  # fmt: skip
"""Adds the option `--nproc` to a command."""


def evaluates_run(command: Callable[..., int]) -> Callable[..., int]:
    """Add what commands share that evaluate a run: another config, a checkpoint, ranks, JSON and the log."""
    config = click.option(
        "-c", "--config", type=GivenPath(path_type=Path, dir_okay=False),
        help="Use another config; one without dataset or model is merged over that of the run.",
    )  # fmt: skip
    checkpoint = click.option("--checkpoint", metavar="NAME", type=without_slash, help="Default: best, else latest.")
    decorated: Callable[..., int] = config(checkpoint(with_ranks(with_json(with_terminal_log(command)))))
    return decorated


with_restarts: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N",
    help="With several processes: resume up to N times if one of them fails or is killed.",
)  # fmt: skip
"""Adds the option `--max-restarts` to a command that trains."""


def starts_ranks(nproc: int, max_restarts: int = 0) -> bool:
    """Return whether this process has to start others that train, rather than train itself."""
    if max_restarts and nproc == 1:
        raise click.UsageError("--max-restarts is for several processes; add --nproc")
    started = number_of_ranks()
    if nproc > 1 and started not in (1, nproc):
        raise click.UsageError(f"--nproc {nproc}: a launcher has started {started} processes; leave out --nproc")
    return nproc > 1 and started == 1


def run_ranks(nproc: int, max_restarts: int = 0, *, removes: bool = False) -> int:
    """Run this command in several processes, and resume its run if they fail; return the exit status.

    Args:
        nproc: the number of processes.
        max_restarts: how often to resume.
        removes: whether to delete the run directory at the end.
    """
    from emrun.launch.ranks import launch

    ended = launch(nproc, sys.argv[1:])
    leave_closed_terminal()
    _print(ended)
    for number in range(1, max_restarts + 1):
        if not ended.is_failure or ended.directory is None:
            break
        print_error(f"restart {number} of {max_restarts}: resuming {ended.directory}")
        ended = launch(nproc, ["resume", ended.directory, "--nproc", str(nproc), *_log_options()])
        _print(ended)
    if ended.status and wants_json():
        run = {} if ended.directory is None else run_as_json(Path(ended.directory))
        status = ended.status if ended.status > 0 else 128 - ended.status
        print_json({"status": "failed", **run, "exit_status": status, "problems": ended.problems})
    if removes and ended.directory is not None:
        remove(Path(ended.directory), ended.status)
    if -ended.status in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        end_by_signal(-ended.status)
    return ended.status if ended.status >= 0 else 128 - ended.status


def remove(directory: Path, status: int | None) -> None:
    """Delete a run directory, as --rm says, if the run was of this command, which ended with an exit status.

    The command that has started several ranks does this, when all have ended; of other ranks, the first.
    """
    if status != RunInUse.exit_status and meeting_place() is None and not is_follower():
        from emrun.runs.run_files import others_shown, remove_run

        others = remove_run(directory)
        if others:
            print_error(f"{from_here(directory)} stays: it {others_shown(directory, others)}")
        elif not click.get_current_context().params["quiet"]:
            print_error(f"deleted {from_here(directory)} (--rm)")


def _print(ended: Ended) -> None:
    for line in ended.lines:
        print_error(line)


def _log_options() -> list[str]:
    """Return the options of this command that say how much of the log is shown, and `--json`."""
    given = click.get_current_context().params
    options = {
        "--verbose": given["verbose"],
        "--quiet": given["quiet"],
        "--no-progress": not given["progress"],
        "--json": wants_json(),
    }
    return [name for name, is_given in options.items() if is_given]


def tell_directory(directory: Path) -> None:
    """Tell the command that started the ranks in which directory they run."""
    from emrun.launch.ranks import DIRECTORY

    place = meeting_place()
    if place is not None and not is_follower():
        try:
            (place / DIRECTORY).write_text(str(directory.absolute()), encoding="utf-8")
        except OSError as error:
            raise cannot_meet(place, reason_of(error)) from error


@contextmanager
def last_words(error: BaseException) -> Iterator[Callable[[], object]]:
    """Print what a block prints about an error of this process, if it is the one to speak.

    A rank that `emrun --nproc` has started leaves the text to that process, which prints the cause first. Other ranks
    print their own errors, with their number; that another rank has ended is said by rank 0 alone.

    The block calls its value between what it prints about the cause and what it prints about the rest.
    """
    if number_of_ranks() == 1:
        yield lambda: None
        return
    texts = [io.StringIO(), io.StringIO()]
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(texts[0]))
        yield lambda: stack.enter_context(redirect_stderr(texts[1]))
    leave(waits=False)
    cause = texts[0].getvalue().rstrip("\n")
    survived = texts[1].getvalue().rstrip("\n")
    if isinstance(error, RankFailed) and not error.is_cause and (meeting_place() or is_follower()):
        cause = ""
    if leave_words(cause, survived, problems_of(error) if cause else ()):
        return
    if cause:
        print_error(f"rank {rank_of()}: {cause}" if is_follower() else cause)
    if survived and not is_follower():
        print_error(survived)


def leave_words(cause: str = "", survived: str = "", problems: Sequence[Any] = ()) -> bool:
    """Leave last words to the command that started the ranks; return False if there is none, or no space for them.

    Args:
        cause: what to print about an error of this rank; empty if it ends for another reason.
        survived: what to print about the run.
        problems: the error for programs.
    """
    place = meeting_place()
    if place is not None:
        words = place / f"{rank_of()}.json"
        with suppress(OSError):
            words.with_suffix(".part").write_text(
                json.dumps({"cause": cause, "survived": survived, "problems": problems, "time": time()}),
                encoding="utf-8",
            )
            words.with_suffix(".part").rename(words)  # this rank may be killed while it writes
            return True
    return False


def end_interrupted(what: str, number: int) -> NoReturn:
    """Say what is not complete, if this process is the one to speak, and end it by a signal."""
    if not is_follower():
        print_error(what)
    leave()
    end_by_signal(number)


def tell_failure(error: BaseException) -> int:
    """Report an error that ends the command, if this process is the one to speak; return the exit status."""
    with last_words(error):
        return fail(error)
