"""How hooks are called: which hooks listen to an event, in which order they are called, and which one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.errors import HookError, has_exit_status
from emrun.base.randomness import preserved_randomness
from emrun.base.types import Batch
from emrun.events import check_events, listener, may_change_batches
from emrun.hook import EVENTS, AbstractHook, Loop, TrainingTerminated, UpdateSkipped
from emrun.loop.endings import Endings
from emrun.loop.profiling import HookTimes
from emrun.loop.rank_events import RankEvents
from emrun.model import AbstractModel
from emrun.ranks.shares import like
from emrun.storage.draws import Draws

_LOG = logging.getLogger(__name__)


class Events:
    """Calls the events of the hooks, in their order, and then of the model.

    Args:
        model: the model, which may define events too.
        endings: gets the terminations that hooks raise.
        draws: records the random states before each hook that may change a batch; None if failures are not saved.
    """

    def __init__(self, model: AbstractModel, endings: Endings, draws: Draws | None) -> None:
        self.hooks: list[AbstractHook] = []
        """The hooks. This list is changed in place, so that other objects can share it."""
        self.changers: list[str] = []
        """Class names of the hooks, and of the model, that may change a batch before the model runs on it."""
        self.offered: Batch | None = None
        """The batch that the last called hook of `changers` got."""
        self.changed: tuple[str, Batch] | None = None
        """The last batch that hooks may have changed, with all their changes, and the name of its stream."""
        self.keep_step: Callable[[UpdateSkipped], None] = lambda error: None
        """Called when a hook skips an update and asks to keep the step; `failed_call` then has the hook."""
        self.listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        """Event -> the methods to call: those of the hooks that override the event, in order, then of the model."""
        self.of_ranks: RankEvents | None = None
        """What each of several ranks calls; None for one."""
        self.times: HookTimes | None = None
        """The times of the hooks; None if no hook listens to `after_epoch_profile`."""
        self._model, self._endings, self._draws = model, endings, draws
        self._failed: tuple[str, int] | None = None  # the event, and the index of its listener

    def change_hooks(self, hooks: Iterable[AbstractHook], main_loop: Loop) -> None:
        """Replace the hooks; check and register those that are new.

        Raises:
            HookError: a method of a hook does not fit the events, or a hook is already registered in a main loop.
        """
        before, self.hooks[:] = self.hooks.copy(), hooks
        for hook in self.hooks:
            if not any(hook is other for other in before):
                check_events(type(hook))
                if "main_loop" in getattr(hook, "__dict__", ()):
                    raise HookError(f"hook {type(hook).__name__} already belongs to a main loop; build a new hook")
                hook.register_mainloop(main_loop=main_loop)
        self.changers = [type(each).__name__ for each in (*self.hooks, self._model) if may_change_batches(each)]
        is_profiled = any(listener(each, "after_epoch_profile") is not None for each in self.hooks)
        self.times = HookTimes() if is_profiled else None
        for event in EVENTS:
            hooks_called = [] if event == "register_mainloop" else [(e, self._listener(e, event)) for e in self.hooks]
            if self.of_ranks is not None:
                called = self.of_ranks.called(event, hooks_called)
            else:
                called = [call for _, call in hooks_called if call is not None]
            of_model = listener(self._model, event, AbstractModel)
            self.listeners[event] = called if of_model is None else [*called, of_model]
        if self.changers:
            self.listeners["before_batch"] = [partial(self._offer, call) for call in self.listeners["before_batch"]]

    def _listener(self, hook: AbstractHook, event: str) -> Callable[..., Any] | None:
        """Return the method of a hook to call for an event, timed if a hook asks for times; None if there is none."""
        call = listener(hook, event)
        return call if call is None or self.times is None else self.times.timed(call, hook, event)

    @contextmanager
    def without_model(self, event: str) -> Iterator[None]:
        """Call an event of the hooks only in this block."""
        before = self.listeners[event]
        self.listeners[event] = before[:-1] if listener(self._model, event, AbstractModel) is not None else before
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
                    self._failed = event, self.listeners[event].index(call)
                    raise self._misplaced(event) from error
                skipped.append(error)
                if error.keep is not None:
                    self._failed = event, self.listeners[event].index(call)
                    self.keep_step(error)
                    self._failed = None
            except BaseException as error:
                self._failed = event, self.listeners[event].index(call)
                self._name_hook(error, arguments)
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

    def begin_stream(self) -> tuple[Callable[..., Batch | None] | None, Callable[..., None] | None]:
        """Return the functions to call before and after each batch of a stream; None for an event without listeners.

        The first function returns the batch for the model if hooks may have changed the batch, else None.
        """
        self._failed = None
        before: Callable[..., Batch | None] | None = None
        if self.listens("before_batch"):
            before = self._let_change if self.changers else partial(self.notify, "before_batch")
        return before, partial(self.notify, "after_batch") if self.listens("after_batch") else None

    def failed_call(self) -> tuple[str | None, AbstractHook | None]:
        """Return the event in which a hook or the model failed in this stream, and the hook; None if not known."""
        event, index = self._failed or (None, 0)
        listening = [hook for hook in self.hooks if event is not None and listener(hook, event) is not None]
        return event, listening[index] if index < len(listening) else None

    def _misplaced(self, event: str) -> HookError:
        """Return the error for an update that is skipped in an event of no update."""
        hook = self.failed_call()[1]
        name = type(self._model if hook is None else hook).__name__
        return HookError(f"{name} raised UpdateSkipped in {event}; an update can only be skipped in before_update")

    def _name_hook(self, error: BaseException, arguments: Mapping[str, Any]) -> None:
        """Add notes to an exception of a hook or the model that is not emrun's: who raised it, in which event."""
        if has_exit_status(error) or not isinstance(error, Exception):
            return
        event, hook = self.failed_call()
        who = f"model {type(self._model).__name__}" if hook is None else f"hook {type(hook).__name__}"
        epoch, stream = arguments.get("epoch_id"), arguments.get("stream_name")
        where = f" of epoch {epoch}" if epoch is not None else f" of stream {stream!r}" if stream is not None else ""
        error.add_note(f"in {who}, {event}{where}")
        if self._endings.evaluating:
            error.add_note(
                "an evaluation calls the hooks of the training with epoch_id 0 and one stream; they are new, without "
                "the state of the training; to use other hooks, set eval.STREAM.hooks in the config"
            )

    def _let_change(self, stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch after `before_batch` of all hooks, which may have changed the copy."""
        changed = dict(batch) if self.of_ranks is None else like(batch)
        self.notify("before_batch", stream_name=stream_name, batch=changed)
        if self._draws is not None:
            self._draws.before_model()
        self.changed = stream_name, changed
        return changed

    def _offer(self, call: Callable[..., Any], stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook, and store what a replay of the call needs."""
        self.offered = dict(batch)
        if self._draws is not None:
            self._draws.before_hook()
        call(stream_name=stream_name, batch=batch)
