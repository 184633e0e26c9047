"""`emrun train`."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emrun.base.arguments import resolved
from emrun.base.errors import ArgumentError, DataChanged, RunExists, UsageError
from emrun.base.tables import folded_command, width
from emrun.base.types import Json
from emrun.base.wording import from_here, progress
from emrun.cli.console import DISPLAY, VERBOSE, Directory, config_arguments, is_follower, with_terminal_log
from emrun.cli.failures import (
    end_by_signal,
    fail,
    ignore_early_requests,
    import_torch,
    print_error,
    unwound_by_sigterm,
    users_code,
    words_before_sigterm,
)
from emrun.cli.output import (
    only_json,
    parameters_table,
    print_json,
    results,
    run_as_json,
    so_far,
    summary,
    wants_json,
    with_json,
)
from emrun.cli.ranks import (
    last_words,
    leave_words,
    remove,
    run_ranks,
    starts_ranks,
    tell_directory,
    with_ranks,
    with_restarts,
)
from emrun.config.config import Config, load_config
from emrun.config.import_finder import locate
from emrun.config.override_keys import check_has_stream
from emrun.config.plan import check_statically, with_statistics
from emrun.ranks.group import join, leave, meeting_place
from emrun.training.directories import check_free, check_outside, is_begun

if TYPE_CHECKING:
    from emrun.training.build import Training


@click.command()
@config_arguments
@click.option(
    "-o", "--output-root", default="log", show_default=True, type=Directory(),
    help="Create the run directory in this directory.",
)  # fmt: skip
@click.option(
    "--output-dir", type=Directory(),
    help="The run directory itself; it must not contain a run.",
)  # fmt: skip
@click.option("--auto-resume", is_flag=True, help="Resume the run in --output-dir if there is one.")
@click.option(
    "--then-eval", "then_eval", multiple=True, metavar="STREAM",
    help="Evaluate the best checkpoint on STREAM when the run has finished; may be given several times.",
)  # fmt: skip
@click.option("--rm", "removes", is_flag=True, help="Delete the run directory at the end.")
@with_ranks
@with_restarts
@with_json
@with_terminal_log
def train(
    config: Path,
    overrides: tuple[str, ...],
    output_root: Path,
    output_dir: Path | None,
    auto_resume: bool,
    then_eval: tuple[str, ...],
    removes: bool,
    nproc: int,
    max_restarts: int,
    as_json: bool,
) -> int:
    """Train from CONFIG, a file or a directory with a config.yaml.

    An OVERRIDE is key.path=value, or ~key.path to delete a key: model.optimizer.lr=0.01 hooks.StopAfter.epochs=3
    'main_loop.extra_streams=[valid]'. Values are YAML; quote them for the shell.

    Exit status: 0 finished, 1 failed, 2 wrong usage or config, 3 ended by a guard, 74 a file could not be read or
    written, 75 the run is in use (try again), 130 or 143 interrupted (or what main_loop.preempt_exit_code says).
    """
    if removes and output_dir is not None and output_dir.exists():
        raise click.UsageError(f"--rm deletes the run directory, but {output_dir} exists already; remove --rm")
    if auto_resume and output_dir is None:
        raise click.UsageError("--auto-resume needs --output-dir, the run directory that the same command resumes")
    ignore_early_requests()

    # the config
    loaded = load_config(config, overrides)
    sweep = click.get_current_context().obj  # in the process of a trial, its `TrialChecks`
    if sweep is None:
        check_statically(loaded, evaluations=True)
    else:  # has done so
        sweep.check_config(loaded)
    loaded = loaded.without("sweep")
    for stream in then_eval:
        check_has_stream(loaded, stream)

    # the run directory
    output_dir = None if output_dir is None else resolved(output_dir)
    resumed = output_dir if auto_resume else None
    check_outside(output_dir or output_root / loaded.name)
    if output_dir is not None and resumed is None and not is_follower():
        check_free(output_dir)
    if starts_ranks(nproc, max_restarts):
        return run_ranks(nproc, max_restarts, removes=removes)
    import_torch(loaded)
    is_resumed = join().from_first("whether the run is resumed", resumed is not None and is_begun(resumed))
    from emrun.training.create import create_training

    if resumed is not None and is_resumed:
        return _go_on(resumed, loaded, then_eval)

    # the training
    if sweep is None and is_begun(config) and not is_follower() and not click.get_current_context().params["quiet"]:
        how = f"to resume it, use `emrun resume {shlex.quote(str(config))}`"
        print_error(f"{config} is a run; a new run begins with its config ({how})")
    try:
        with unwound_by_sigterm(), users_code(keeps_output=True):
            training = create_training(
                with_statistics(loaded),
                output_root,
                output_dir,
                command=sys.argv,
                remove_failed=removes,
                added_hooks=DISPLAY,
            )
        if sweep is not None:
            sweep.check_training(training)
        _show_parameters(training)
    except RunExists:
        if resumed is not None:  # another process has created it meanwhile, and has ended
            return _go_on(resumed, loaded, then_eval)
        raise
    status = None
    try:
        status = run(training, then_eval, keeps=not removes)
        return status
    finally:
        if removes:
            remove(training.output_dir, status)


def _show_parameters(training: Training) -> None:
    """Print a table of the parameters of the module, with --verbose."""
    from emrun.diagnosis.model_facts import parameters

    if click.get_current_context().meta.get(VERBOSE) and not is_follower():
        rows = list(parameters(training.model))
        if rows:
            print_error(parameters_table(rows))


def _go_on(output_dir: Path, loaded: Config, then_eval: Sequence[str]) -> int:
    """Resume the run that the same command started; return the exit status."""
    from emrun.training.resume import changes_to

    different = changes_to(output_dir, loaded)
    shown = from_here(output_dir)
    if different:
        raise UsageError(
            f"the run in {shown} was started with other values ({', '.join(different)}); to resume it with "
            f"changes, use `emrun resume {shown}` with overrides; otherwise use another --output-dir"
        )
    return resume_run(output_dir, then_eval=then_eval)


def resume_run(
    directory: Path, overrides: Sequence[str] = (), checkpoint: str | None = None, then_eval: Sequence[str] = ()
) -> int:
    """Resume a run, see `resume_training`; return the exit status. Of a finished run, print what is wanted as JSON."""
    from emrun.training.resume import resume_training

    with unwound_by_sigterm(), users_code(keeps_output=True):
        training = resume_training(directory, overrides, checkpoint, command=sys.argv, added_hooks=DISPLAY)
    if training is not None:
        return run(training, then_eval)
    evaluated = _evaluated(directory, then_eval) if then_eval else {}
    leave()
    if wants_json() and not is_follower():
        print_json({**run_as_json(directory), **evaluated, "exit_status": 0})
    return 0


@words_before_sigterm()
def run(training: Training, then_eval: Sequence[str] = (), *, keeps: bool = True) -> int:
    """Train, print its statistics (not with --quiet) and how to continue, and return the exit status.

    Args:
        training: the training.
        then_eval: the streams on which the best checkpoint is evaluated when the run has finished.
        keeps: whether the run directory is kept; otherwise no message names files in it.
    """
    shown = from_here(training.output_dir)
    tell_directory(training.output_dir)
    if wants_json():
        training.main_loop.time.count_examples()
    before = training.main_loop.iterations_done
    try:
        with only_json():
            outcome = training.main_loop.run_training()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may also have called sys.exit
        with last_words(error) as go_on_to_rest:
            if wants_json():
                so_far().update(run_as_json(training.output_dir, training))
            located = training.located(error)
            status = fail(located, has_log=keeps)
            sweep = click.get_current_context().obj
            if sweep is not None:
                sweep.note_failure(located)
            go_on_to_rest()
            if keeps:
                capsule = training.main_loop.capsule
                if capsule is not None:
                    kept = shown / capsule.relative_to(training.output_dir)
                    print_error(f"repeat the step that failed with: emrun replay {kept}")
                _tell_what_survived(training, shown, error)
        return status

    # what the run has reached
    kind = locate("emrun.hooks.LogVariables")
    logged = [hook.variables for hook in training.main_loop.hooks if isinstance(hook, kind)]
    variables = None
    if logged and None not in logged:
        variables = [name for names in logged for name in names]
    is_quiet = click.get_current_context().params["quiet"] or is_follower()
    statistics = summary(training.main_loop.metrics, variables)
    lines = [statistics] if statistics else []
    if outcome.status == "finished" and not is_quiet:
        from emrun.cli.closing_lines import closing_lines  # so that no start waits for the page of a run

        lines += closing_lines(training, str(outcome.reason), keeps=keeps)
    if lines and not is_quiet:
        click.echo("\n".join(lines), err=wants_json())
    is_due = outcome.status == "finished" and then_eval
    evaluated = _evaluated(training.output_dir, then_eval, training) if is_due else {}
    if wants_json() and not is_follower() and (meeting_place() is None or not outcome.exit_status):
        print_json({**run_as_json(training.output_dir, training), **evaluated, "exit_status": outcome.exit_status})

    # how it has ended
    if outcome.status == "finished" and before == training.main_loop.iterations_done > 0 and not is_follower():
        print_error(f"nothing was trained: {outcome.reason}")
    if outcome.warning is not None and not is_follower():
        print_error(f"warning: {outcome.warning}")
    if outcome.status == "interrupted":
        if is_quiet and not is_follower():  # otherwise the log has said it
            print_error(str(outcome.reason))
        if keeps and not is_follower():
            _tell_what_survived(training, shown)
        if outcome.signal_number is not None:
            leave()
            end_by_signal(outcome.signal_number)
    if outcome.exit_status:  # what `preempt_exit_code` says
        leave_words()
    leave()
    return outcome.exit_status


def _evaluated(directory: Path, streams: Sequence[str], training: Training | None = None) -> Json:
    """Evaluate the best checkpoint of a finished run on streams, print the results, and write its page again.

    Returns:
        The results for `--json`, as `evaluated`.
    """
    from emrun.runs.report.page import REPORT, write_at_end
    from emrun.training.evaluate import evaluate

    if wants_json():
        so_far().update(run_as_json(directory, training))  # the run has finished, also if an evaluation fails
    found: Json = {}
    with only_json(), users_code(keeps_output=True):
        for stream in streams:
            try:
                found.update(evaluate(directory, stream, command=sys.argv))
            except Exception:
                if not is_follower():
                    print_error(f"the run has finished; evaluate it with: emrun eval {from_here(directory)} {stream}")
                raise
    if is_follower():
        return {}
    if not click.get_current_context().params["quiet"]:
        click.echo(results(found), err=wants_json())
    if (directory / REPORT).is_file():
        write_at_end(directory)
    return {"evaluated": found}


def _tell_what_survived(training: Training, shown: Path, error: BaseException | None = None) -> None:
    loop = training.main_loop
    directory = training.output_dir
    done = progress(loop.training_epochs_done, loop.iterations_done)
    checkpoints = directory / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir() if path.is_symlink()) if checkpoints.is_dir() else []
    kept = f"saved checkpoints: {', '.join(names)}" if names else "no checkpoint was saved"
    is_refused = isinstance(error, ArgumentError) and error.argument == "module" and not loop.iterations_done
    if names and not is_refused:  # otherwise the checkpoints do not fit the module once it is fixed
        label = "resume with"
        words = ["resume", str(shown)]
        if isinstance(error, DataChanged):
            words.append(error.key)
    else:
        label = "start again with"
        words = _with_free_output_dir(sys.argv[1:], shown) if is_begun(directory) else sys.argv[1:]
        words = words if words[:1] == ["train"] else ["train", str(shown)]
    print_error(f"{done}; {kept}\n{folded_command(label, ['emrun', *words], width(sys.stderr))}")


def _with_free_output_dir(arguments: Sequence[str], directory: Path) -> list[str]:
    """Return arguments of the command with an --output-dir that does not exist yet, if they have this option."""
    others = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    free = str(next(path for path in others if not path.exists()))
    words = [f"--output-dir={free}" if word.startswith("--output-dir=") else word for word in arguments]
    if "--output-dir" in words:
        words[words.index("--output-dir") + 1] = free
    return words
