"""The table of `emrun check --numerics`: a row for each way in which a model can be run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from emrun.base.errors import EmrunError, reason_of
from emrun.base.temporary import temporary_folder
from emrun.base.types import Batch
from emrun.config.config import Config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import escaped
from emrun.config.plan import Plan
from emrun.config.yaml_text import dump
from emrun.diagnosis.numerics.fresh import WHAT as FRESH, in_fresh_process
from emrun.diagnosis.numerics.gradients import Step
from emrun.diagnosis.numerics.halves import WHAT, halves
from emrun.diagnosis.numerics.on_ranks import WHAT as RANKS, on_ranks
from emrun.diagnosis.numerics.passes import AGAIN, LOADED, saved_and_loaded, second_pass
from emrun.diagnosis.numerics.rows import DEPENDS, DIFFERS, LEFT_OUT, RANDOM, NotApplicableError, RandomError, Row
from emrun.diagnosis.numerics.ways import WAYS, way
from emrun.diagnosis.round_trip import RoundTrip
from emrun.diagnosis.run_verification import without_frames
from emrun.diagnosis.tryout import Tryout, apart, call_event
from emrun.loop.determinism import DeterministicKernels
from emrun.storage.run import CONFIG, Run
from emrun.training.build import assemble

_OF_GRADIENTS = (WHAT, *WAYS.values(), RANKS)
_OF_PARTS = (RANKS, WAYS["micro_batch_size"])


def prove(config: Config, ranks: int = 1, only: Collection[str] = ()) -> list[dict[str, Any]]:
    """Compare what a model calculates in several ways, on the first two batches of each stream.

    The model is built once, and makes a step with the first batch of the train stream before it is compared. All files
    are temporary, and random states are restored.

    Args:
        config: the config.
        ranks: how many ranks are compared with one; 1 for no such row.
        only: the rows to make, by `what`; empty for all.

    Returns:
        The rows, each with `what`, `result`, `text`, `name` and `by`; see `Row`.

    Raises:
        ConfigError: the config cannot be used.
        StreamError: a stream breaks its contract.
        BaseException: an error of the dataset, the model or a hook while it is built.
    """
    config = config.with_defaults({"seed": 0, "code_directory": escaped(str(Path.cwd()))})
    plan = Plan.of(config, Imported())
    with apart(), temporary_folder("numerics") as place, ExitStack() as stack:
        # the model, built once
        (place / CONFIG).write_text(dump(config.root), encoding="utf-8")
        training = assemble(plan, place, Run(place), is_new=True)
        model = training.model
        loop = training.main_loop
        if plan.get("deterministic", False):
            stack.callback(partial((kernels := DeterministicKernels()).after_training, success=True))
            kernels.before_training()
        step = Step.of(training)
        tryout = Tryout(training, model, RoundTrip(model, model), [])
        stack.callback(partial(call_event, model, "after_training", success=True))
        stack.enter_context(tryout.hooks_called())

        # the first batches of its streams
        trained = loop.train_stream_name
        read = {name: [batch for _, batch, _ in tryout.usable(name)] for name in loop.streams.sources}
        first = read[trained][0]
        each_first = {name: batches[0] for name, batches in read.items() if batches}
        evaluated = {name: loop.streams.source_of(name) for name in loop.streams.extra}

        # the rows
        of_halves = cache(partial(_halves, step, first))
        makers: dict[str, Callable[[], Row]] = {
            WHAT: of_halves,
            **{what: partial(way, step, key, first) for key, what in WAYS.items()},
            RANKS: partial(on_ranks, step, first, place, ranks),
            FRESH: partial(in_fresh_process, config, tryout.lengths, evaluated, place),
            LOADED: partial(saved_and_loaded, model, each_first, place / "checkpoint", partial(step.train, first)),
            AGAIN: partial(second_pass, model, tryout.usable, trained, evaluated),
        }
        wanted = [what for what in only or makers if ranks > 1 or what != RANKS]
        obstacle = cache(partial(_obstacle, step, first))
        return [asdict(_row(what, makers[what], obstacle, of_halves)) for what in wanted]


def _obstacle(step: Step, batch: Batch) -> NotApplicableError | RandomError | None:
    """Make a step with a batch; return why its gradients cannot be compared, None if they can."""
    model: Any = step.model
    try:
        if not hasattr(model, "ways"):
            return NotApplicableError(f"{type(model).__name__} is not a TorchModel")
        step.train(batch)
        with model.ways.without(WAYS):
            step.check_repeats(batch)
    except (NotApplicableError, RandomError) as error:
        return error
    except Exception as error:  # of the user's code, or of torch
        return NotApplicableError(_text(error))
    return None


def _halves(step: Step, batch: Batch) -> Row:
    with step.model.ways.without(WAYS):
        return halves(step.measure, batch, step.model.module, step.model.losses)


def _row(
    what: str,
    make: Callable[[], Row],
    obstacle: Callable[[], NotApplicableError | RandomError | None],
    of_halves: Callable[[], Row],
) -> Row:
    """Make a row: a comparison that fails is left out, and the row says why."""
    try:
        why = obstacle() if what in _OF_GRADIENTS else None
        if why is not None and not (what == WAYS["recompute"] and isinstance(why, RandomError)):  # it draws noise again
            raise why
        row = make()
        if what in _OF_PARTS and row.result == DIFFERS and of_halves().result == DEPENDS:
            return replace(of_halves(), what=what)
        return row
    except RandomError as error:
        return Row(what, RANDOM, str(error))
    except Exception as error:  # also of another process
        return Row(what, LEFT_OUT, str(error) if isinstance(error, NotApplicableError) else _text(error))


def _text(error: Exception) -> str:
    return without_frames(error) if isinstance(error, EmrunError) else f"{type(error).__name__}: {reason_of(error)}"
