"""`emrun replay`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emrun.base.censor import hidden
from emrun.base.errors import exit_status
from emrun.base.types import Json
from emrun.base.wording import counted
from emrun.cli.console import run_argument, terminal_log, with_tracebacks
from emrun.cli.failures import import_torch, print_failure, users_code
from emrun.cli.output import in_json, with_json
from emrun.hook import UpdateSkipped

if TYPE_CHECKING:
    from emrun.diagnosis.replay import Replay


@click.command()
@run_argument
@click.option("--device", metavar="NAME", help="The device of the model, e.g. cpu; by default that of the config.")
@click.option("--anomaly", is_flag=True, help="Also name the operation whose gradient is NaN (slow).")
@with_json
@with_tracebacks
def replay(directory: Path, device: str | None, anomaly: bool, as_json: bool) -> int:
    """Repeat the step that made the run in DIRECTORY fail, and name the examples of the batch that cause the failure.

    DIRECTORY is the run, or a capsule in its folder failures: the batch, the weights and the random states of a step.
    The model is built from the config of the run. Nothing is written into the run directory. A step whose update was
    skipped by SkipSpike is repeated in the same way.

    Exit status: 0 the step failed in the same way, 1 it did not, 2 wrong usage or config, 74 the capsule is damaged.
    """
    with terminal_log(quiet=True):
        import_torch()
        from emrun.diagnosis.replay import replay as do_again

        with users_code():
            repeated = do_again(directory, device, anomaly)

        if (
            repeated.error is not None
            and exit_status(repeated.error) == 1
            and not isinstance(repeated.error, UpdateSkipped)
        ):
            print_failure(repeated.error)
        click.echo(hidden(in_json(_in_json(repeated)) if as_json else report(repeated)))
    return 0 if repeated.reproduced else 1


def _in_json(repeated: Replay) -> Json:
    capsule = repeated.capsule
    step = capsule.step
    return {
        "reproduced": repeated.reproduced,
        "step": {name: getattr(step, name) for name in ("stream", "train", "batch", "epoch", "iteration")},
        "then": {"error": capsule.facts["error"], "message": capsule.facts["message"]},
        "now": repeated.message or None,
        "weights": capsule.facts["weights"],
        "random_states": capsule.facts["random_before_step"],
        "causes": repeated.causes,
        "every_example": repeated.is_every,
        "possibly_more": repeated.is_cut,
        "examples": repeated.known_as,
        "not_finite": repeated.not_finite,
        "anomaly": repeated.anomaly,
        "notes": repeated.notes,
    }  # fmt: skip


def report(repeated: Replay) -> str:
    """Return the report of a replay: where the step failed, what happens now, and the causes."""
    capsule = repeated.capsule
    step = repeated.capsule.step
    doing = "training" if step.train else "evaluation"
    exact = ", ".join(capsule.facts["random_before_step"])
    lines = [
        f"{doing} on stream {step.stream!r}, batch {step.batch} of the pass, after "
        f"{counted(step.epoch, 'epoch')} and {counted(step.iteration, 'iteration')}",
        f"then: {capsule.facts['error']}: {capsule.facts['message']}",
        f"now: {repeated.message or 'the step succeeds'}",
        f"weights: {capsule.facts['weights']}",
        f"random states before the step: {exact or 'none are used'}",
        *(f"note: {note}" for note in repeated.notes),
        "reproduced" if repeated.reproduced else "not reproduced",
        *_causes(repeated),
    ]
    if repeated.anomaly is not None:
        lines.append(f"anomaly: {repeated.anomaly}")
    parts = (part for line in lines for part in line.splitlines())
    return "\n".join("".join(char if char.isprintable() else " " for char in part) for part in parts)


def _causes(repeated: Replay) -> Iterator[str]:
    if repeated.is_every:
        tried = [index for group in repeated.causes for index in group]
        yield f"cause: each example that was tried fails alone ({_examples(tried)})"
    elif repeated.causes:
        single = [group[0] for group in repeated.causes if len(group) == 1]
        together = [group for group in repeated.causes if len(group) > 1]
        parts = [_examples(single)] if single else []
        parts += [f"{_examples(group)} together" for group in together]
        yield f"cause: {'; '.join(parts)}{', possibly more' if repeated.is_cut else ''}"
    for index, values in repeated.known_as.items():
        if values:
            yield f"example {index} has {', '.join(f'{name} {value!r:.60}' for name, value in values.items())}"
    for name, rows in repeated.not_finite.items():
        yield f"source {name!r} has values that are not finite in {_examples(rows)}"


def _examples(indices: Sequence[int]) -> str:
    """Return the indices as they are written in a message: `example 13`, `examples 3, 13`, `examples 0 to 31`."""
    if len(indices) > 3 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"examples {indices[0]} to {indices[-1]}"
    return f"example{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
