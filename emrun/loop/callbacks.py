"""How hooks are called: which hooks listen to an event, in which order they are called, and which one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError, HookError, UsageError, has_exit_status
from emrun.base.randomness import preserved_randomness
from emrun.base.terminal import restore_logging
from emrun.base.types import Batch, EpochData
from emrun.epoch_data import check_numbers
from emrun.events import changers_of, check_constructed, check_events, listener, owner
from emrun.hook import EVENTS, AbstractHook, Loop, TrainingTerminated, UpdateSkipped
from emrun.loop.failures import Failures, StepAtWork
from emrun.loop.profiling import Profiling
from emrun.loop.progress import Progress
from emrun.loop.ranks.callbacks import RankCallbacks
from emrun.loop.requests import Requests
from emrun.loop.run_length import RunLength
from emrun.model import AbstractModel
from emrun.record.interval_rows import IntervalRows

_LOG = logging.getLogger(__name__)
Call = Callable[..., Any]


@dataclass(eq=False)
class Callbacks:
    """Calls the events of the hooks, in their order, then of the loop's own listeners, and then of the model.

    Args:
        model: may define events too.
        hooks: the hooks; `change_hooks` replaces what the list contains.
        progress: where the training is.
        requests: gets the terminations that hooks raise.
        at_work: gets what a replay of the step has to know.
        failures: keeps a step whose update a hook skips, if the hook wants this.
        length: ends the training at limits, after the hooks.
        intervals: makes rows of means between epochs; listens as a hook, after the others.
        examples: returns the number of examples in the current batch, on all ranks.
        of_ranks: says what each of several ranks calls; None for one rank.
    """

    model: AbstractModel
    hooks: list[AbstractHook]
    progress: Progress
    requests: Requests
    at_work: StepAtWork
    failures: Failures
    length: RunLength
    intervals: IntervalRows
    examples: Callable[[], int]
    of_ranks: RankCallbacks | None
    changers: list[str] = field(default_factory=list, init=False)
    """Class names of the hooks, and of the model, that may change a batch."""
    listeners: dict[str, list[Call]] = field(default_factory=lambda: {event: [] for event in EVENTS}, init=False)
    """Event -> the methods to call: those of the hooks that override the event, in order, then of the model."""
    profiling: Profiling | None = field(default=None, init=False)
    """Times an epoch; None if no hook listens to `after_epoch_profile`."""

    def change_hooks(self, hooks: Iterable[AbstractHook], main_loop: Loop) -> None:
        """Replace the hooks; check and register those that are new.

        Raises:
            HookError: a method of a hook does not fit the events, its constructor has not called that of its base, or
                it is already registered in a main loop.
        """
        self.intervals.register_mainloop(main_loop)
        before = list(self.hooks)
        self.hooks[:] = hooks
        check_events(type(self.model))
        for index, hook in enumerate(self.hooks):
            if not any(hook is other for other in before):
                check_events(type(hook))
                check_constructed(hook, index)
                if "main_loop" in getattr(hook, "__dict__", ()):
                    raise HookError(f"hook {type(hook).__name__} already belongs to a main loop; build a new hook")
                try:
                    hook.register_mainloop(main_loop=main_loop)
                except HookError as error:
                    raise HookError(str(error), index, error.about, error.code, error.fix) from error
        self.changers = changers_of(self.hooks, self.model)
        is_profiled = any(listener(hook, "after_epoch_profile") is not None for hook in self.hooks)
        self.profiling = Profiling(self.examples) if is_profiled else None
        for event in EVENTS:
            self.listeners[event] = self._calls_of(event)

    def _calls_of(self, event: str) -> list[Call]:
        """Return what to call at an event."""
        # the hooks, on the ranks that call them
        listening: list[Any] = [] if event == "register_mainloop" else [*self.hooks, self.intervals]
        methods = [(hook, self._method_of(hook, event)) for hook in listening]
        listeners = [(hook, method) for hook, method in methods if method is not None]
        calls = (
            [method for _, method in listeners] if self.of_ranks is None else self.of_ranks.calls_of(event, listeners)
        )

        # the loop itself, and the model
        for other, base in ((self.length, object), (self.model, AbstractModel)):
            method = listener(other, event, base)
            if method is not None:
                calls.append(method)

        # what is done around each call
        if event == "after_epoch":
            return [update_wrapper(partial(_checked, call), call) for call in calls]
        if event == "before_batch" and self.changers:
            return [update_wrapper(partial(self._offer, call), call) for call in calls]
        return calls

    def _method_of(self, hook: AbstractHook, event: str) -> Call | None:
        """Return the method of a hook to call for an event, timed if a hook asks for times; None if there is none."""
        method = listener(hook, event)
        if method is None or self.profiling is None:
            return method
        return self.profiling.timed(method, hook, event)

    def _offer(self, call: Call, stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook when hooks may change the batch."""
        self.at_work.offer(batch)
        call(stream_name=stream_name, batch=batch)

    @contextmanager
    def without_model(self, event: str) -> Iterator[None]:
        """Call an event of the hooks only in this block."""
        before = self.listeners[event]
        has_model = listener(self.model, event, AbstractModel) is not None
        self.listeners[event] = before[:-1] if has_model else before
        try:
            yield
        finally:
            self.listeners[event] = before

    def listens(self, event: str) -> bool:
        """Return whether any hook or the model listens to an event."""
        return bool(self.listeners[event])

    def notify(self, event: str, **arguments: Any) -> None:
        """Call an event of all hooks that listen to it, then of the model; see `Loop.notify`.

        Raises:
            TrainingTerminated: at least one hook ended the training. All hooks have got the event.
            UpdateSkipped: at least one hook skips the update. All hooks have got the event.
            HookError: a hook skips an update in another event than `before_update`.
        """
        ended: list[TrainingTerminated] = []
        skipped: list[UpdateSkipped] = []
        for call in self.listeners[event]:
            try:
                call(**arguments)
            except TrainingTerminated as error:
                ended.append(error)
            except UpdateSkipped as error:
                self.at_work.fail(event, owner(call))
                if event != "before_update":
                    raise HookError(
                        f"{type(owner(call)).__name__} raised UpdateSkipped in {event}; an update can only be skipped "
                        "in before_update"
                    ) from error
                skipped.append(error)
                if error.keep is not None:
                    self.failures.keep_skipped(error)
                self.at_work.forget_failure()
            except BaseException as error:
                self.at_work.fail(event, owner(call))
                self._name_failed(error, event, owner(call), arguments)
                raise
        if ended:
            self.requests.end(event, ended)
        if skipped:
            raise skipped[0] if len(skipped) == 1 else UpdateSkipped("; ".join(each.reason for each in skipped))

    def notify_all(self, event: str, **arguments: Any) -> BaseException | None:
        """Call an event of all hooks and the model, also after an error; return the first error, log the others."""
        first: BaseException | None = None
        for call in self.listeners[event]:
            try:
                call(**arguments)
            except TrainingTerminated:
                _LOG.debug("a termination in %s has no effect", event)
            except BaseException as error:
                self._name_failed(error, event, owner(call), arguments)
                if first is not None or event == "on_error":
                    _LOG.exception("a hook failed in %s", event)
                first = first or error
        return first if event != "on_error" else None

    def termination_of(self, event: str, **arguments: Any) -> list[TrainingTerminated]:
        """Call an event; return the termination with which hooks end the training, if they do."""
        try:
            self.notify(event, **arguments)
        except TrainingTerminated as error:
            return [error]
        return []

    def report_checkpoint(self, name: str, directory: Path) -> None:
        """Call `after_checkpoint`, under random states that are restored afterwards."""
        if self.listens("after_checkpoint"):
            with preserved_randomness():
                self.notify("after_checkpoint", name=name, directory=directory)

    def end_training(self, report: Call | None = None, **arguments: Any) -> None:
        """Call `after_batch` for a batch with which the training may reach a limit, and end the training if so."""
        ended: list[TrainingTerminated] = []
        try:
            if report is not None:
                report(**arguments)
        except TrainingTerminated as error:
            ended.append(error)
        limit = self.length.reached()
        if limit is not None:
            ended.append(limit)
        if ended:
            self.requests.end("after_batch", ended)

    def merge(self) -> None:
        """Give rank 0 what the hooks of other ranks have collected in the epoch."""
        if self.of_ranks is not None:
            self.of_ranks.merge(self.hooks)

    def _name_failed(self, error: BaseException, event: str, failed: object, arguments: Mapping[str, Any]) -> None:
        """Add notes to an exception: which hook or model raised it, in which event.

        An error of emrun is a reason that a hook gives, and names the hook if this is needed; but not one of what a
        hook did with the main loop.
        """
        name = type(failed).__name__
        who = "model" if failed is self.model else "hook"
        is_known = any(failed is each for each in (*self.hooks, self.model))  # and not the loop itself
        is_misuse = isinstance(error, HookError | ArgumentError | UsageError) and name not in str(error)
        if not (is_known and isinstance(error, Exception)) or (has_exit_status(error) and not is_misuse):
            return
        where = ""
        if "epoch_id" in arguments:
            where = f" of epoch {arguments['epoch_id']}"
        elif arguments.get("stream_name"):
            where = f" of stream {arguments['stream_name']!r}"
        error.add_note(f"in {who} {name}, {event}{where}")
        if self.progress.evaluating:
            error.add_note(
                "an evaluation calls the hooks of the training with epoch_id 0 and one stream; they are new, without "
                "the state of the training; to use other hooks, set eval.STREAM.hooks in the config"
            )


def _checked(call: Call, epoch_id: int, epoch_data: EpochData) -> None:
    """Call `after_epoch` of a hook or the model, and check the numbers that it has added."""
    call(epoch_id=epoch_id, epoch_data=epoch_data)
    restore_logging()
    check_numbers(epoch_data, type(owner(call)).__name__)
