"""The table of `emrun check --numerics`: a row for each way in which a model can be run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.errors import EmrunError, reason_of
from emrun.base.temporary import TemporaryFolder
from emrun.base.types import Batch
from emrun.config.config import Config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import escaped
from emrun.config.plan import Plan
from emrun.config.yaml_text import dump
from emrun.diagnosis.numerics.fresh import WHAT as FRESH
from emrun.diagnosis.numerics.fresh import in_fresh_process
from emrun.diagnosis.numerics.gradients import Step
from emrun.diagnosis.numerics.halves import WHAT, halves
from emrun.diagnosis.numerics.on_ranks import WHAT as RANKS
from emrun.diagnosis.numerics.on_ranks import on_ranks
from emrun.diagnosis.numerics.passes import AGAIN, LOADED, saved_and_loaded, second_pass
from emrun.diagnosis.numerics.rows import DEPENDS, DIFFERS, LEFT_OUT, RANDOM, NotApplicableError, RandomError, Row
from emrun.diagnosis.numerics.ways import WAYS, way
from emrun.diagnosis.round_trip import RoundTrip
from emrun.diagnosis.run_verification import without_frames
from emrun.diagnosis.tryout import Tryout, apart, call_event
from emrun.events import may_change_batches
from emrun.loop.determinism import DeterministicKernels
from emrun.storage.run import CONFIG, Run
from emrun.training.build import assemble

_OF_GRADIENTS = (WHAT, *WAYS.values(), RANKS)


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
    with apart(), TemporaryFolder("numerics") as place, ExitStack() as stack:
        (place / CONFIG).write_text(dump(config.root), encoding="utf-8")
        training = assemble(plan, place, Run(place), is_new=True)
        model, loop = training.model, training.main_loop
        if plan.get("deterministic", False):
            stack.callback(partial((kernels := DeterministicKernels()).after_training, success=True))
            kernels.before_training()
        loop.first_batch.show(model, may_fail=any(map(may_change_batches, (*training.hooks, model))))
        step = Step.of(training)
        tryout = Tryout(training, model, RoundTrip(model, model), [])
        with tryout.hooks_called():
            read = {name: [batch for _, batch, _ in tryout.usable(name)] for name in loop.streams.sources}
            first = read[loop.train_stream_name][0]
            evaluated = {name: loop.streams.source_of(name) for name in loop.streams.extra}
            table = _Table(step, first, only)
            table.add(AGAIN, lambda: second_pass(model, tryout.usable, loop.train_stream_name, evaluated))
            table.add_gradients()
            if ranks > 1:
                table.add(RANKS, lambda: table.as_halves(on_ranks(step, first, place / CONFIG, place, ranks)))
            batches = {name: each[0] for name, each in read.items() if each}
            train = partial(_train, step, first)
            table.add(LOADED, lambda: saved_and_loaded(model, batches, place / "checkpoint", train))
        call_event(model, "after_training", success=True)
        table.add(FRESH, lambda: in_fresh_process(config, tryout.lengths, evaluated, place))
    order = [*_OF_GRADIENTS, FRESH, LOADED, AGAIN]
    return [asdict(each) for each in sorted(table.rows, key=lambda row: order.index(row.what))]


class _Table:
    """Makes the rows: a comparison that fails is left out, and the row says why."""

    def __init__(self, step: Step, batch: Batch, only: Collection[str]) -> None:
        self._step, self._batch, self._only = step, batch, only
        self.rows: list[Row] = []
        self._halves: Row | None = None
        self._why: NotApplicableError | RandomError | None = None  # why no gradients are compared

    def add(self, what: str, make: Callable[[], Row]) -> None:
        """Add a row."""
        if self._only and what not in self._only:
            return
        try:
            is_noise = what == WAYS["recompute"] and isinstance(self._why, RandomError)  # which is drawn again
            if what in _OF_GRADIENTS and self._why is not None and not is_noise:
                raise self._why
            row = make()
        except NotApplicableError as error:
            row = Row(what, LEFT_OUT, str(error))
        except RandomError as error:
            row = Row(what, RANDOM, str(error))
        except Exception as error:  # of the user's code, of torch, or of another process
            row = Row(what, LEFT_OUT, _text(error))
        self.rows.append(row)

    def add_gradients(self) -> None:
        """Add the rows that compare gradients in this process."""
        step, batch = self._step, self._batch
        model: Any = step.model
        try:
            if not hasattr(model, "plainly"):
                raise NotApplicableError(f"{type(model).__name__} is not a TorchModel")
            _train(step, batch)
            with model.plainly(WAYS):
                step.check_repeats(batch)
        except (NotApplicableError, RandomError) as error:
            self._why = error
        except Exception as error:
            self._why = NotApplicableError(_text(error))
        self.add(WHAT, self._compare_halves)
        for key, what in WAYS.items():
            self.add(what, lambda key=key: self.as_halves(way(step, key, batch)))  # type: ignore[misc]

    def _compare_halves(self) -> Row:
        model: Any = self._step.model
        if self._halves is None:
            with model.plainly(WAYS):
                self._halves = halves(self._step.measure, self._batch, model.module, model.losses)
        return self._halves

    def as_halves(self, row: Row) -> Row:
        """Return a row of parts of a batch; if it differs because halves do, with their reason."""
        if row.what not in (RANKS, WAYS["micro_batch_size"]) or row.result != DIFFERS:
            return row
        found = self._compare_halves()
        return replace(found, what=row.what) if found.result == DEPENDS else row


def _text(error: Exception) -> str:
    return without_frames(error) if isinstance(error, EmrunError) else f"{type(error).__name__}: {reason_of(error)}"


def _train(step: Step, batch: Batch) -> None:
    step.model.run(batch, True, step.stream)
    step.model.finish_update()
