"""How a hook is called: who listens to an event, in which order they are called, and who failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from emrun.errors import HookError
from emrun.events import check_events, listener, may_change_batches
from emrun.hook import EVENTS, AbstractHook, Loop, TrainingTerminated
from emrun.loop.endings import Endings
from emrun.model import AbstractModel
from emrun.storage.draws import Draws
from emrun.types import Batch

_LOG = logging.getLogger(__name__)


class Events:
    """Calls the events of hooks, in their order, and of the model after them.

    Args:
        model: it may define events too.
        endings: takes the terminations that are raised.
        draws: is to know the random states before each hook that may change a batch; None where no failure is kept.
    """

    def __init__(self, model: AbstractModel, endings: Endings, draws: Draws | None) -> None:
        self.hooks: list[AbstractHook] = []
        """The hooks; one list, which others may keep."""
        self.changers: list[str] = []
        """The classes of the hooks, and of the model, that may change batches before they are run."""
        self.offered: Batch | None = None
        """A batch as the hook got it that was the last that may have changed it."""
        self.listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        """Event -> what is called: the hooks that override it, in their order, then the model."""
        self._model, self._endings, self._draws = model, endings, draws
        self._failed: tuple[str, int] | None = None  # the event, and the index of its listener

    def change_hooks(self, hooks: Iterable[AbstractHook], main_loop: Loop) -> None:
        """Take these hooks instead of those before; those that are new are checked and told of their loop.

        Raises:
            HookError: a method is a misspelt event or takes what nothing supplies, or a hook is registered already.
        """
        before, self.hooks[:] = self.hooks.copy(), hooks
        for hook in self.hooks:
            if not any(hook is other for other in before):
                check_events(type(hook))
                if "main_loop" in getattr(hook, "__dict__", ()):
                    raise HookError(f"hook {type(hook).__name__} is registered in a main loop already; build a new one")
                hook.register_mainloop(main_loop=main_loop)
        self.changers = [type(each).__name__ for each in (*self.hooks, self._model) if may_change_batches(each)]
        for event in EVENTS:
            called = [] if event == "register_mainloop" else [listener(hook, event) for hook in self.hooks]
            called.append(listener(self._model, event, AbstractModel))
            self.listeners[event] = [call for call in called if call is not None]
        if self.changers:
            self.listeners["before_batch"] = [partial(self._offer, call) for call in self.listeners["before_batch"]]

    def listens(self, event: str) -> bool:
        """Tell whether anything listens to an event."""
        return bool(self.listeners[event])

    def notify(self, event: str, **arguments: Any) -> None:
        """Call an event of all hooks that listen to it, then of the model; models call it for their update events.

        Raises:
            TrainingTerminated: hooks ended the training; all of them got the event.
        """
        ended: list[TrainingTerminated] = []
        for call in self.listeners[event]:
            try:
                call(**arguments)
            except TrainingTerminated as error:
                ended.append(error)
            except BaseException:
                self._failed = event, self.listeners[event].index(call)
                raise
        if ended:
            self._endings.take(event, ended)

    def notify_all(self, event: str, **arguments: Any) -> BaseException | None:
        """Call an event of everyone, whatever the others do; return the first error, log the others."""
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

    def begin_stream(self) -> tuple[Callable[..., Batch | None] | None, Callable[..., None] | None]:
        """Return what to call before each batch of a stream and after it, None where nobody listens.

        The first returns the batch that the model is to get when somebody may have changed it, else None.
        """
        self._failed = None
        before: Callable[..., Batch | None] | None = None
        if self.listens("before_batch"):
            before = self._let_change if self.changers else partial(self.notify, "before_batch")
        return before, partial(self.notify, "after_batch") if self.listens("after_batch") else None

    def failed_call(self) -> tuple[str | None, AbstractHook | None]:
        """Return the event that raised an error in this stream, and the hook that raised it; None for what did not."""
        event, index = self._failed or (None, 0)
        listening = [hook for hook in self.hooks if event is not None and listener(hook, event) is not None]
        return event, listening[index] if index < len(listening) else None

    def _let_change(self, stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch on which all who may change it were called."""
        changed = dict(batch)
        self.notify("before_batch", stream_name=stream_name, batch=changed)
        if self._draws is not None:
            self._draws.before_model()
        return changed

    def _offer(self, call: Callable[..., Any], stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook, and keep what it takes to do that again."""
        self.offered = dict(batch)
        if self._draws is not None:
            self._draws.before_hook()
        call(stream_name=stream_name, batch=batch)
