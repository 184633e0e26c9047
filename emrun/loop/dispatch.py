"""How hooks are called: which hooks listen to an event, in which order they are called, and which one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from emrun.base.errors import HookError, has_exit_status
from emrun.base.randomness import preserved_randomness
from emrun.base.terminal import restore_logging
from emrun.base.types import EpochData
from emrun.epoch_data import check_numbers
from emrun.events import check_constructed, check_events, listener, may_change_batches, owner
from emrun.hook import EVENTS, AbstractHook, Loop, TrainingTerminated, UpdateSkipped
from emrun.loop.batch_calls import Calls, ChangedBatches, Intake
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.endings import Endings
from emrun.loop.profiling import Profiling
from emrun.loop.rank_events import RankEvents
from emrun.model import AbstractModel
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


def _checked(call: Callable[..., Any], epoch_id: int, epoch_data: EpochData) -> None:
    """Call `after_epoch` of a hook or the model, and check the numbers that it has added."""
    call(epoch_id=epoch_id, epoch_data=epoch_data)
    restore_logging()
    check_numbers(epoch_data, type(owner(call)).__name__)


class Events:
    """Calls the events of the hooks, in their order, and then of the model.

    Args:
        loop: has the hooks, and the model, which may define events too.
        endings: gets the terminations that hooks raise.
        checks: checks the batches.
        randomness: records the random states before each hook that may change a batch; None if failures are not saved.
    """

    def __init__(self, loop: Loop, endings: Endings, checks: BatchChecks, randomness: StepRandomness | None) -> None:
        self.changes = ChangedBatches(randomness)
        """The batches that hooks may change before the model runs on them."""
        self.keep_step: Callable[[UpdateSkipped], None] = lambda error: None
        """Called when a hook skips an update and asks to keep the step; `failed_call` then has the hook."""
        self.before_saving: Callable[[], None] = lambda: None
        """Called before checkpoints are saved, in the thread of the loop."""
        self.listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        """Event -> the methods to call: those of the hooks that override the event, in order, then of the model."""
        self.of_ranks: RankEvents | None = None
        """What each of several ranks calls; None for one."""
        self.profiling: Profiling | None = None
        """Times an epoch; None if no hook listens to `after_epoch_profile`."""
        self.last: list[Any] = []
        """What listens like hooks, after them: the rows of means between epochs."""
        self.parts: list[Any] = []
        """Parts of the loop, which listen to events on every rank, after the hooks and before the model; to batches, if
        they have `begin_batches`; and to the end of an epoch, with the names of its train streams, as `end_epoch`."""
        self.reached: Callable[[], TrainingTerminated | None]
        """Returns the end of the training if a limit is reached."""
        self.checks = checks
        self._loop, self._endings = loop, endings
        self._failed: tuple[str, Any] | None = None  # the event, and the hook or the model

    def change_hooks(self, hooks: Iterable[AbstractHook]) -> None:
        """Replace the hooks; check and register those that are new.

        Raises:
            HookError: a method of a hook does not fit the events, its constructor has not called that of its base, or
                it is already registered in a main loop.
        """
        loop = self._loop
        before, loop.hooks = loop.hooks, tuple(hooks)
        check_events(type(loop.model))
        for index, hook in enumerate(loop.hooks):
            if not any(hook is other for other in before):
                check_events(type(hook))
                check_constructed(hook, index)
                if "main_loop" in getattr(hook, "__dict__", ()):
                    raise HookError(f"hook {type(hook).__name__} already belongs to a main loop; build a new hook")
                hook.register_mainloop(main_loop=loop)
        self.changes.by = [
            type(each).__name__ for each in (*self._loop.hooks, self._loop.model) if may_change_batches(each)
        ]
        is_profiled = any(listener(each, "after_epoch_profile") is not None for each in self._loop.hooks)
        self.profiling = Profiling(loop, self.examples) if is_profiled else None
        for event in EVENTS:
            all_hooks = [] if event == "register_mainloop" else [*self._loop.hooks, *self.last]
            listening = ((each, self._listener(each, event)) for each in all_hooks)
            hooks_called = [(each, call) for each, call in listening if call is not None]
            called = (
                [call for _, call in hooks_called]
                if self.of_ranks is None
                else self.of_ranks.called(event, hooks_called)
            )
            called += filter(None, [listener(each, event, object) for each in self.parts])
            of_model = listener(self._loop.model, event, AbstractModel)
            self.listeners[event] = called if of_model is None else [*called, of_model]
        self.listeners["after_epoch"] = [
            update_wrapper(partial(_checked, call), call) for call in self.listeners["after_epoch"]
        ]
        if self.changes.by:
            self.listeners["before_batch"] = [
                update_wrapper(partial(self.changes.offer, call), call) for call in self.listeners["before_batch"]
            ]

    def _listener(self, hook: AbstractHook, event: str) -> Callable[..., Any] | None:
        """Return the method of a hook to call for an event, timed if a hook asks for times; None if there is none."""
        call = listener(hook, event)
        return call if call is None or self.profiling is None else self.profiling.timed(call, hook, event)

    @contextmanager
    def without_model(self, event: str) -> Iterator[None]:
        """Call an event of the hooks only in this block."""
        before = self.listeners[event]
        self.listeners[event] = before[:-1] if listener(self._loop.model, event, AbstractModel) is not None else before
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
                if event != "before_update":
                    self._failed = event, owner(call)
                    raise self._misplaced(event) from error
                skipped.append(error)
                if error.keep is not None:
                    self._failed = event, owner(call)
                    self.keep_step(error)
                    self._failed = None
            except BaseException as error:
                self._failed = event, owner(call)
                self._name_failed(error, arguments)
                raise
        if ended:
            self._endings.take(event, ended)
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
                if first is not None or event == "on_error":
                    _LOG.exception("a hook failed in %s", event)
                first = first or error
        return first if event != "on_error" else None

    def tell_of_checkpoint(self, name: str, directory: Path) -> None:
        """Call `after_checkpoint`, under random states that are restored afterwards."""
        if self.listens("after_checkpoint"):
            with preserved_randomness():
                self.notify("after_checkpoint", name=name, directory=directory)

    def begin_batches(self, stream: StreamWrapper, *, train: bool) -> Calls:
        """Return what is called for the batches of a stream."""
        self._failed = None
        report = partial(self.notify, "after_batch") if self.listens("after_batch") else None
        calls = Calls(stream, self.begin_looking(stream.name), self._loop.model.run, report, self.end_training)
        restore_logging()
        calls.first.append(lambda outputs: restore_logging())
        calls.first.append(self.checks.check_outputs)
        calls.handled.failed.append(self.checks.name_batch)
        if train:
            calls.first.append(self.checks.check_step_values)
        for each in (self.profiling, *self.parts, self.of_ranks):
            if hasattr(each, "begin_batches"):
                each.begin_batches(stream, train, calls)
        calls.report_last = partial(self.end_training, calls.report)
        return calls

    def begin_looking(self, stream: str) -> Intake:
        """Return what the batches of a stream go through before the model gets them."""
        check, announce = self.checks.begin(stream, ", ".join(self.changes.by)), None
        if self.listens("before_batch"):
            announce = (
                partial(self.changes.announce, self.notify) if self.changes.by else partial(self.notify, "before_batch")
            )
        check_changed = self.checks.check_changed
        return Intake(check, announce, lambda batch: batch if check_changed(batch) else None)

    def end_training(self, report: Callable[..., None] | None = None, **arguments: Any) -> None:
        """Call `after_batch` for a batch with which the training may reach a limit, and end the training if so."""
        ended: list[TrainingTerminated] = []
        try:
            if report is not None:
                report(**arguments)
        except TrainingTerminated as error:
            ended.append(error)
        ended += filter(None, [self.reached()])
        if ended:
            self._endings.take("after_batch", ended)

    def examples(self) -> int:
        """Return the number of examples in the current batch, on all ranks."""
        return self._loop.batch_length if self.of_ranks is None else self.of_ranks.share[1]

    def end_epoch(self, epoch_id: int, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Tell the parts of the loop that an epoch has ended, after the hooks."""
        for each in self.parts:
            if hasattr(each, "end_epoch"):
                each.end_epoch(epoch_id, epoch_data, trained)

    def failed_call(self) -> tuple[str | None, AbstractHook | None]:
        """Return the event in which a hook or the model failed in this stream, and the hook; None if not known."""
        event, failed = self._failed or (None, None)
        return event, next((hook for hook in self._loop.hooks if hook is failed), None)

    def _misplaced(self, event: str) -> HookError:
        """Return the error for an update that is skipped in an event of no update."""
        hook = self.failed_call()[1]
        name = type(self._loop.model if hook is None else hook).__name__
        return HookError(f"{name} raised UpdateSkipped in {event}; an update can only be skipped in before_update")

    def _name_failed(self, error: BaseException, arguments: Mapping[str, Any]) -> None:
        """Add notes to an exception of a hook or the model that is not emrun's: who raised it, in which event."""
        if has_exit_status(error) or not isinstance(error, Exception):
            return
        event, failed = self._failed or (None, None)
        if failed is not self._loop.model and self.failed_call()[1] is None:
            return  # a part of the loop
        who = f"{'model' if failed is self._loop.model else 'hook'} {type(failed).__name__}"
        epoch, stream = arguments.get("epoch_id"), arguments.get("stream_name")
        where = f" of epoch {epoch}" if epoch is not None else f" of stream {stream!r}" if stream is not None else ""
        error.add_note(f"in {who}, {event}{where}")
        if self._loop.evaluating:
            error.add_note(
                "an evaluation calls the hooks of the training with epoch_id 0 and one stream; they are new, without "
                "the state of the training; to use other hooks, set eval.STREAM.hooks in the config"
            )
