"""`emrun compare`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import UsageError
from emrun.base.tables import folded_command, width
from emrun.base.types import Json
from emrun.base.wording import counted, few, from_here, listed, short
from emrun.cli.console import Directory, with_terminal_log
from emrun.cli.failures import end_by_signal, print_error, tell_json
from emrun.cli.output import only_json, print_json, with_json
from emrun.cli.sweep import command_of, prepared
from emrun.cli.trial import arguments
from emrun.config.config import Config, load_config
from emrun.config.plan import check_statically
from emrun.launch.pairs import (
    Pair,
    changed_examples,
    check_comparable,
    condition_of,
    finished_runs,
    has_value,
    judge,
    pairs_of,
    train_only,
    watched_by,
    whole,
    worst_for_missing,
)
from emrun.launch.results import Result, result_of
from emrun.launch.settings import Condition, Sweep
from emrun.launch.sweep import SweepLoop
from emrun.launch.trials import Trial, Trials, identity


def _range(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """Read a number of pairs: `12`, or from the first to the second, `3..12`."""
    match = re.fullmatch(r"(?:(\d{1,4})\.\.)?(\d{1,4})", value)
    low = int(match[1] or match[2]) if match else 0
    high = int(match[2]) if match else 0
    if not 2 <= low <= high:
        raise click.BadParameter(f"{value!r} is neither a number of pairs nor a range such as 3..12; the least is 2")
    return low, high


@click.command("compare")
@click.argument("given", metavar="A [B] [OVERRIDE...]", nargs=-1, required=True, type=click.Path())
@click.option("-b", "changes", multiple=True, metavar="OVERRIDE", help="What B has that A has not; without B, B is A.")
@click.option(
    "--metric", metavar="STATISTIC", help="Such as valid/accuracy; by default that of SaveBest, or valid/loss."
)
@click.option("--max/--min", "wants_max", default=None, help="Whether larger or smaller values are better.")
@click.option("--by", type=click.FloatRange(min=0), default=0.0, help="A difference up to this one does not matter.")
@click.option(
    "--pairs",
    metavar="PAIRS",
    callback=_range,
    default="3..12",
    show_default=True,
    help="How many pairs, at least and at most.",
)
@click.option("--jobs", type=click.IntRange(1), default=1, help="How many runs are trained at the same time.")
@click.option("--anyway", is_flag=True, help="Compare also if data, metrics or budget of the two differ.")
@click.option(
    "-o", "--output-root", default="log", show_default=True, type=Directory(),
    help="Create the directory of the runs, NAME_compare, in this directory.",
)  # fmt: skip
@click.option("--output-dir", type=Directory(), help="The directory of the runs itself.")
@with_json
@with_terminal_log
def compare(
    given: tuple[str, ...],
    changes: tuple[str, ...],
    metric: str | None,
    wants_max: bool | None,
    by: float,
    pairs: tuple[int, int],
    jobs: int,
    anyway: bool,
    output_root: Path,
    output_dir: Path | None,
    as_json: bool,
) -> int:
    """Find out whether config A or config B is better, or whether they differ only by the seed.

    A and B are configs or runs; B may also be A with the overrides of -b. An OVERRIDE without -b is for both. Both are
    trained on the same seeds, pair after pair. The two runs of a pair share the order of the data and, where the shapes
    allow, the initial weights. After each pair, a sequential t-test says which is better, or that no difference is
    larger than --by. At most 5 % of verdicts are wrong. The value of a run is that of its best epoch. A run that fails
    or diverges counts as worse than all others.

    The runs are in the directory of the comparison. The same command continues a comparison: finished runs are not
    trained again, and runs that were killed are resumed. A finished run elsewhere with the same config, seed and code,
    beside a run that is named or in the directory of -o, is used too. If the runs have files of SavePredictions with
    the metric of each example, 0 or 1, the examples that B fixes and breaks are counted.

    Exit status: 0 with or without a verdict, 2 wrong usage or config, 130 or 143 interrupted.
    """
    # the two configs
    began = time.monotonic()
    shared = [word for word in given if ("=" in word or word.startswith("~")) and not expanded(word).exists()]
    names = [word for word in given if word not in shared]
    if not 1 <= len(names) <= 2 or (len(names) == 1 and not changes):
        raise click.UsageError("give two configs or runs, or one and -b OVERRIDE")

    sources = names[0], names[-1]
    a = load_config(sources[0], shared).without("sweep")
    overrides = shared, [*shared, *changes, f"seed={a.get('seed') or 0}"]
    b = load_config(sources[1], overrides[1]).without("sweep")
    for config in (a, b):
        check_statically(config, evaluations=True)
    if len(names) == 1 and identity(a) == identity(b):
        raise UsageError("-b changes nothing: the two configs are the same")
    address, condition = _metric_of(a, metric, wants_max)
    stream, variable = address.split("/")[:2]
    looks = not anyway and check_comparable(a.tree, b.tree, variable, train_only(a, stream))

    # the runs, as those of two sweeps
    settings = Sweep(repeats=pairs[1], objective=address, condition=condition, jobs=jobs)
    directory = resolved(output_dir or output_root / f"{a.get('name') or a.name}_compare")
    sides = [Trials(config, (), settings, directory) for config in (a, b)]
    pairs_ = pairs_of(sides, finished_runs(sources, output_root))
    commands = [["train", source, *words] for source, words in zip(sources, overrides, strict=True)]
    with only_json():
        ending, pairs_, results, verdict = _train(sides, pairs_, commands, settings, pairs[0], by, looks=looks)
    if ending is not None:
        print_error(ending.text.strip())
        if ending.signal_number is not None:
            print_error(folded_command("continue with", ["emrun", *sys.argv[1:]], width(sys.stderr)))
            end_by_signal(ending.signal_number)
        tell_json(UsageError(ending.text.strip()), ending.exit_status)
        return int(ending.exit_status)

    # the verdict
    comparison = _as_dict(directory, pairs_, results, verdict, settings, by)
    comparison = {"status": "finished", "exit_status": 0, **comparison, "seconds": time.monotonic() - began}
    if as_json:
        print_json(comparison)
    else:
        _show(comparison)
    return 0


def _metric_of(config: Config, metric: str | None, wants_max: bool | None) -> tuple[str, Condition]:
    """Return the statistic by which runs are compared, and whether smaller or larger values are better.

    Raises:
        UsageError: the statistic is not an address, or nothing tells which values are better.
    """
    address = metric or watched_by(config)[0]
    address += "/mean" if address.count("/") == 1 else ""
    if address.count("/") < 2:
        raise UsageError(f"--metric {metric}: write STREAM/VARIABLE or STREAM/VARIABLE/AGGREGATION, as valid/accuracy")
    if wants_max is not None:
        return address, "max" if wants_max else "min"
    condition = condition_of(config, address)
    if condition is None:
        raise UsageError(f"nothing tells whether larger or smaller values of {address} are better; add --max or --min")
    return address, condition


def _train(
    sides: Sequence[Trials],
    planned_pairs: Sequence[Pair],
    commands: Sequence[list[str]],
    settings: Sweep,
    least: int,
    by: float,
    *,
    looks: bool,
) -> tuple[Any, list[Pair], list[list[Result]], Json | None]:
    """Train pair after pair until there is a verdict; PyTorch is imported for all of them here.

    With `looks`, the first pair tells whether both evaluate the same batches.

    Returns:
        How the runs have ended, if that ends the comparison, else None; the pairs; the results of A and B; the verdict.
    """
    # which runs are finished already
    before: set[Path] = set()
    for trial in (trial for pair in planned_pairs for trial in pair.trials):
        result = whole(result_of(trial, settings, sides[0].code), trial)
        change = f"code (changed: {listed(result.changed)})" if result.changed else "values, by a resume"
        if result.changed or result.status == "changed":
            raise UsageError(
                f"{from_here(trial.directory)} was trained with other {change}; remove it, or use another --output-dir"
            )
        if result.status == "finished":
            before.add(trial.directory)

    # the others, pair after pair
    first_pair = planned_pairs[0]
    configs = [side.config_of(trial) for side, trial in zip(sides, first_pair.trials, strict=True)]
    jobs, threads = prepared(settings, *configs)
    results: list[list[Result]] = [[], []]
    verdict = None
    of_pair = Sweep(repeats=2, objective=settings.objective, condition=settings.condition, jobs=settings.jobs)
    pairs = list(planned_pairs)
    while len(results[0]) < len(pairs):
        pair = pairs[len(results[0])]
        command_by_directory = {trial.directory: command for trial, command in zip(pair.trials, commands, strict=True)}

        def started_with(
            trial: Trial, ends: Path, command_by_directory: dict[Path, list[str]] = command_by_directory
        ) -> list[str]:
            return arguments(
                command_of(command_by_directory[trial.directory], trial),
                trial.directory,
                settings.objective,
                "--metric",
                ends,
                records=False,
            )

        ending = SweepLoop(pair, of_pair, jobs, started_with, threads, None).run()
        if ending.exit_status not in (0, 1):
            return ending, pairs, results, verdict
        repeated = pair.with_same_data(before)
        if repeated is not None:
            pairs[len(results[0])] = repeated
            continue
        if looks and pair is pairs[0]:
            pair.check_evaluated(str(settings.objective).split("/")[0])
        for side, trial in zip(results, pair.trials, strict=True):
            side.append(whole(result_of(trial, settings), trial))
        if len(results[0]) >= least:
            a, b = worst_for_missing([[result.value for result in side] for side in results], settings.condition)
            verdict = judge(a, b, settings.condition, by)
            if verdict["verdict"] != "undecided":
                break
    return None, pairs, results, verdict


def _as_dict(
    directory: Path,
    pairs: Sequence[Pair],
    results: Sequence[Sequence[Result]],
    verdict: Any,
    settings: Sweep,
    by: float,
) -> Json:
    runs = []
    for pair, of_pair in zip(pairs, zip(*results, strict=True), strict=False):
        run: Json = {"seed": pair.trials[0].seed}
        for name, trial, result in zip("ab", pair.trials, of_pair, strict=True):
            run[name] = {
                "directory": trial.directory,
                "value": result.value,
                "status": result.status,
                "reason": result.reason,
            }
        runs.append(run)
    places = [[trial.directory for trial in pair.trials] for pair in pairs[: len(runs)]]
    return {
        **verdict,
        "metric": settings.objective,
        "condition": settings.condition,
        "by": by,
        "pairs": len(runs),
        "examples": changed_examples(places, *str(settings.objective).split("/")[:2]),
        "directory": from_here(directory),
        "runs": runs,
    }


def _show(comparison: Json) -> None:
    """Print a comparison for people."""
    for which in "ab":
        if bad := sum(not has_value(run[which]["value"]) for run in comparison["runs"]):
            click.echo(
                f"warning: {counted(bad, 'run')} of {which.upper()} failed or diverged; such a run counts as "
                "worse than all others"
            )
    words = {
        "a": "A is better",
        "b": "B is better",
        "none": f"no difference larger than {short(comparison['by'])}" if comparison["by"] else "no difference",
        "undecided": "no verdict: the difference is too small for so few pairs, or there is none",
    }
    interval = " to ".join(map(short, comparison["interval"] or ()))
    click.echo(words[comparison["verdict"]])
    click.echo(f"{comparison['metric']}: A {comparison['means']['a']:.6g}, B {comparison['means']['b']:.6g}")
    click.echo(f"B minus A: {comparison['difference']:.4g}" + (f", 95 % interval {interval}" if interval else ""))
    noise = comparison["noise"]
    click.echo(f"noise between seeds: A {noise['a']:.3g}, B {noise['b']:.3g}")
    if examples := comparison["examples"]:
        changes = [f"{len(examples[key])} {key} ({few(examples[key])})" for key in ("fixed", "broken")]
        click.echo(
            f"examples of {examples['stream']} in most of {examples['pairs']} pairs: B has {' and '.join(changes)}"
        )
    click.echo(
        f"{counted(comparison['pairs'], 'pair')}, {comparison['seconds']:.1f} s; runs in {comparison['directory']}"
    )
