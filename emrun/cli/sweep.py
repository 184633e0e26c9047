"""`emrun sweep`."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emrun.base.arguments import expanded
from emrun.base.cores import share_of
from emrun.base.errors import ArgumentError, ConfigError, Position, Problem, UsageError, needing
from emrun.base.tables import folded_command, width
from emrun.base.wording import counted, from_here, last_parts, listed
from emrun.cli.console import Directory, config_arguments, with_terminal_log
from emrun.cli.failures import end_by_signal, import_torch, print_error, tell_json, users_code
from emrun.cli.output import only_json, print_json, so_far, table, with_json
from emrun.cli.trial import COMMAND, arguments, check_objective, main
from emrun.config.config import Config, load_config
from emrun.config.plan import Plan, check_statically, with_statistics
from emrun.launch.jobs import THREADS, Jobs, threads_per_job
from emrun.launch.pairs import condition_of
from emrun.launch.parameters import read_parameters
from emrun.launch.results import DONE, Ranked, Result, as_dict, ranked, result_of, summary_of
from emrun.launch.settings import Sweep
from emrun.launch.sweep import Ending, SweepLoop, planned
from emrun.launch.trials import Trial, Trials
from emrun.training.user_code import keep_sources

if TYPE_CHECKING:
    from emrun.launch.search import Search

_MOST_RUNS = 100_000  # of a grid, which is listed before the first trial
_NOT_COMPARED = (
    "nothing was compared: the sweep has no objective; repeat the command with --status and "
    "sweep.objective=valid/loss/mean, and sweep.condition=max if larger values are better"
)


@click.command()
@config_arguments
@click.option(
    "-p", "--parameter", "given", multiple=True, metavar="KEY=VALUES",
    help="What to try: 'model.optimizer.lr=[1.0e-4, 3.0e-4]', or a range {low: 1.0e-5, high: 1.0e-2, log: true}.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), help="Train each combination with this many seeds.")
@click.option("--jobs", type=click.IntRange(1), help="How many trials run at the same time.")
@click.option(
    "-o", "--output-root", default="log", show_default=True, type=Directory(),
    help="Create the directory of the sweep, NAME_sweep, in this directory.",
)  # fmt: skip
@click.option("--output-dir", type=Directory(), help="The directory of the sweep itself.")
@click.option("--status", "shows_status", is_flag=True, help="Only show how the trials stand, the best first.")
@click.option("--dry-run", is_flag=True, help="Only print the commands that train the trials.")
@with_json
@with_terminal_log
def sweep(
    config: Path,
    overrides: tuple[str, ...],
    given: tuple[str, ...],
    repeats: int | None,
    jobs: int | None,
    output_root: Path,
    output_dir: Path | None,
    shows_status: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train CONFIG with many combinations of values, those of its section sweep and of -p.

    Each trial is a run in the directory of the sweep. The same command continues a sweep: trials that are finished are
    not trained again, those that were interrupted or killed are resumed. Several processes, also on several machines
    that share the directory, divide the trials. An OVERRIDE is as for `emrun train`; sweep.KEY=VALUE sets how the sweep
    is run, such as sweep.objective=valid/loss/mean.

    Exit status: 0 all trials are finished or pruned, 1 a trial failed, 2 wrong usage or config, 74 the disk is full,
    130 or 143 interrupted.
    """
    if shows_status and dry_run:
        raise click.UsageError("use one of --status, --dry-run")
    if expanded(config).is_dir() and not (expanded(config) / "config.yaml").exists():
        how = "emrun sweep CONFIG --status --output-dir {0}, with the config of the sweep; its runs: emrun ls {0}"
        raise UsageError(f"{config} has no config.yaml; if it is a sweep: {how.format(shlex.quote(str(config)))}")
    counts = {"repeats": repeats, "jobs": jobs}
    more = [f"sweep.{key}={value}" for key, value in counts.items() if value is not None]
    loaded = load_config(config, (*overrides, *more))
    if not expanded(config).is_file() and not expanded(config).is_dir():
        raise UsageError(f"{config} can be read only once, but each trial reads the config; give a file")
    directory = output_dir or output_root / f"{loaded.get('name') or loaded.name}_sweep"
    try:
        settings = _settings(loaded)
        trials = Trials(loaded, _parameters(loaded, given, settings), settings, directory)
        trials.check()
        search = _search(trials)
    except ArgumentError as error:
        raise ConfigError(Problem(_place(loaded, error.argument), f"sweep.{error.argument}", error.message)) from error
    command = [
        "train",
        str(config),
        *(override for override in overrides if not override.lstrip("~").startswith("sweep")),
    ]
    place = str(Problem(_place(loaded, "objective"), "sweep.objective", ""))
    if dry_run:
        return _print_commands(trials, search, command, place, as_json=as_json)

    # the trials
    ending = None
    if not shows_status:
        with only_json():
            ending = _run(trials, search, command, place)
        if ending.exit_status == 2:  # nothing was trained
            print_error(ending.text.strip())
            tell_json(UsageError(ending.text.strip()), 2)
            return 2

    # their results
    experiments = _known(trials, search)
    if ending is not None:
        so_far()["exit_status"] = ending.exit_status
    _print(experiments, trials, as_json=as_json)
    return 0 if ending is None else _end(ending, experiments)


def _settings(loaded: Config) -> Sweep:
    """Return the section `sweep`."""
    section = loaded.tree.get("sweep")
    if section is not None and not isinstance(section.value, dict | None):
        check_statically(loaded)
    try:
        values = (None if section is None else section.plain()) or {}
        settings = Sweep(**values)
        if settings.objective is not None and "condition" not in values:
            settings.condition = condition_of(loaded, settings.objective) or "min"
        return settings
    except TypeError:  # unknown keys
        check_statically(loaded)
        raise


def _place(loaded: Config, argument: str) -> Position | None:
    """Return where an argument of the section `sweep` stands, or else the section."""
    node = loaded.root.get("sweep", argument) or loaded.root.get("sweep")
    return None if node is None else node.position


def _parameters(loaded: Config, given: Sequence[str], settings: Sweep) -> list[Any]:
    parameters = read_parameters(loaded.root, given)
    if not parameters and settings.runs_per_experiment == 1:
        raise UsageError("nothing to try: give -p 'KEY=[VALUE, ...]', sweep.parameters in the config, or --repeats")
    if settings.is_grid:
        for parameter in parameters:
            if parameter.span is not None and parameter.span.step is None:
                place = parameter.positions[0][parameter.name]
                message = "a grid needs a list, or a range with step; for other ranges set sweep.method: random or tpe"
                raise ConfigError(Problem(place, parameter.name, message))
        counts = [
            len(parameter.choices) if parameter.span is None else parameter.span.count for parameter in parameters
        ]
        if (runs := math.prod(counts) * settings.runs_per_experiment) > _MOST_RUNS:
            raise UsageError(
                f"the grid has {runs:,} runs, repeats and folds included; at most {_MOST_RUNS:,} are tried; "
                "use fewer values, larger steps, or sweep.method: random or tpe"
            )
    return parameters


def _search(trials: Trials) -> Search | None:
    """Return what proposes and prunes, if the sweep has a method or a pruner of Optuna."""
    settings = trials.settings
    if settings.is_grid and not settings.pruner:
        return None
    what = f"sweep.pruner: {settings.pruner}" if settings.is_grid else f"sweep.method: {settings.method}"
    with needing(what, "optuna", "sweep"):
        from emrun.launch.search import Search
    return Search(trials.parameters, settings, trials.seed)


def command_of(command: Sequence[str], trial: Trial) -> list[str]:
    return [*command, *trial.overrides, "--output-dir", str(trial.directory), "--auto-resume"]


def _print_commands(trials: Trials, search: Search | None, command: Sequence[str], place: str, *, as_json: bool) -> int:
    """Print the commands of the trials that are not finished; an objective must be one that the first of them has."""
    settings = trials.settings
    if settings.method not in ("grid", "random"):
        raise UsageError(f"--dry-run: {settings.method} chooses by the results, so there are no commands yet")
    threads = threads_per_job(settings.jobs)
    before = "" if threads is None else f"{THREADS}={threads} "
    planned_trials = (trial for experiment in planned(trials, settings, search) for trial in experiment.trials)
    missing = [trial for trial in planned_trials if result_of(trial, settings).status not in DONE]
    if settings.objective is not None and missing:
        import_torch()
        from emrun.diagnosis.tryout import build_apart

        with users_code():
            training = build_apart(with_statistics(trials.config_of(missing[0])))
        check_objective(training, settings.objective, place)
    left = [command_of(command, replace(trial, directory=from_here(trial.directory))) for trial in missing]
    if as_json:
        print_json({"commands": [["emrun", *words] for words in left]})
        return 0
    for words in left:
        click.echo(f"{before}emrun {shlex.join(words)}")
    return 0


def _run(trials: Trials, search: Search | None, command: Sequence[str], place: str) -> Ending:
    first = {
        parameter.name: parameter.values[0] if parameter.span is None else parameter.span.low
        for parameter in trials.parameters
    }
    jobs, threads = prepared(trials.settings, trials.config_of(trials.experiment(first).trials[0]))

    def started_with(trial: Trial, ends_sweep: Path) -> list[str]:
        return arguments(
            command_of(command, trial),
            directory=trial.directory,
            objective=trials.settings.objective,
            place=place,
            ends_sweep=ends_sweep,
            records=True,
        )

    return SweepLoop(trials, trials.settings, jobs, started_with, threads, search).run()


def prepared(settings: Sweep, *configs: Config) -> tuple[Jobs, int | None]:
    """Import PyTorch and the classes that configs name, so that trials do not; find what only imports can find.

    Returns:
        What starts the processes of trials, and their number of threads, None for that of PyTorch.
    """
    threads = threads_per_job(settings.jobs)
    if threads is not None:
        os.environ[THREADS] = str(threads)  # before PyTorch is imported
    import_torch(configs[0])
    import emrun.training.create
    import emrun.training.resume  # noqa: F401 - here, so that the trials do not

    for config in configs:
        Plan.with_evaluations(config)
    keep_sources()  # those that the trials have, whatever happens to the files
    return Jobs(main, COMMAND, settings.devices, share=share_of(settings.jobs)), threads


def _known(trials: Trials, search: Search | None) -> list[Ranked]:
    """Return the experiments of the sweep, best first, with the results of their trials."""
    is_planned = trials.settings.method in ("grid", "random")
    fresh = None if search is None or not is_planned else type(search)(trials.parameters, trials.settings, trials.seed)
    experiments = planned(trials, trials.settings, fresh) if is_planned else trials.known()
    results = [
        (experiment, [result_of(trial, trials.settings, trials.code) for trial in experiment.trials])
        for experiment in experiments
    ]
    return ranked(results, trials.settings)


def _print(experiments: Sequence[Ranked], trials: Trials, *, as_json: bool) -> None:
    settings = trials.settings
    changed = [result for _, results in experiments for result in results if result.changed]
    if changed:
        print_error(
            f"warning: {counted(len(changed), 'trial')} of other code than there is now (changed: "
            f"{listed(_changed(changed))}); delete their directories to train them again"
        )
    finished = [result for _, results in experiments for result in results if result.status == "finished"]
    if settings.objective is not None and finished and all(result.value is None for result in finished):
        print_error(f"warning: no finished trial has a value of {settings.objective}")
    if as_json:
        rows = [as_dict(*experiment, trials.parameters) for experiment in experiments]
        whole = {
            "directory": str(from_here(trials.directory)),
            "objective": settings.objective,
            "condition": settings.condition,
        }
        print_json({**so_far(), **whole, "experiments": rows})
        return

    # a table with a row for each experiment
    names = last_parts([parameter.name for parameter in trials.parameters])
    several = settings.runs_per_experiment > 1
    lines = []
    for experiment, results in experiments:
        shown = [parameter.shown(experiment.values[parameter.name]) for parameter in trials.parameters]
        row = [*zip(names, shown, strict=True), ("status", _standing(results))]
        totals = summary_of(result.value for result in results)
        if settings.objective is not None:
            row.append((settings.objective, _short(totals["mean"])))
        if settings.objective is not None and several:
            interval = f"± {_short(totals['interval'])}" if totals["interval"] else ""  # equal values do not tell it
            count = f"{totals['count']} of {len(results)}"
            row += [("std", _short(totals["deviation"])), ("95 % interval", interval), ("runs", count)]
        if changed:
            row.append(("changed code", ", ".join(_changed(results))))
        if not several:
            row.append((f"trial in {from_here(trials.directory)}", experiment.trials[0].directory.name))
        lines.append(row)
    headers = [name for name, _ in lines[0]] if lines else names
    click.echo(table([[cell for _, cell in row] for row in lines], headers))
    if settings.objective is None:
        click.echo(_NOT_COMPARED)


def _changed(results: Sequence[Result]) -> list[str]:
    """Return the modules whose code has changed since one of the trials was trained."""
    return list(dict.fromkeys(name for result in results for name in result.changed or ()))


def _standing(results: Sequence[Result]) -> str:
    """Return how the trials of an experiment stand: `finished`, or `finished 2, failed 1`."""
    counts = Counter(result.status for result in results)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{status} {count}" for status, count in counts.items())


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _end(ending: Ending, experiments: Sequence[Ranked]) -> int:
    """Say how to continue a sweep that is not done, and return the exit status."""
    if ending.text:
        print_error(ending.text.strip())
    every_result = [result for _, results in experiments for result in results]
    left = [result for result in every_result if result.status not in DONE]
    if left:
        command = folded_command("continue with", ["emrun", *sys.argv[1:]], width(sys.stderr))
        print_error(f"{len(every_result) - len(left)} of {len(every_result)} trials done\n{command}")
    if ending.signal_number is not None:
        end_by_signal(ending.signal_number)
    return ending.exit_status
