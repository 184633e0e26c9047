"""The checks of every batch, and of the first batch of every stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from emrun.base.arguments import check_choice, check_count
from emrun.base.errors import StreamError
from emrun.base.sources import ID, POSITION, length as length_of, parts
from emrun.base.terminal import restore_logging
from emrun.base.types import Batch, Policy
from emrun.base.wording import did_you_mean, listed
from emrun.epoch_data import LEARNING_RATE, declared, read_by
from emrun.events import may_read_anything
from emrun.hook import AbstractHook
from emrun.loop.progress import Progress
from emrun.model import AbstractModel
from emrun.ranks.shares import total_in

_LOG = logging.getLogger(__name__)
_SIZED = frozenset((list, tuple, np.ndarray, str))  # their length costs 30 ns; that of a tensor a microsecond


class VariableChecks:
    """Compares the sources and outputs of a batch with what the model and the hooks read.

    Each check returns what is wrong, and an empty text if nothing is.

    Args:
        model: every batch must have its inputs.
        hooks: every batch must have the variables that they read.
        on_unused_sources: what to do about sources that neither the model nor a hook reads; a warning is logged once
            for each source. A hook that gets the batches and does not declare `reads` is assumed to read all sources.
    """

    def __init__(self, model: AbstractModel, hooks: list[AbstractHook], on_unused_sources: Policy = "warn") -> None:
        check_choice("on_unused_sources", on_unused_sources, Policy)
        self._model = model
        self._hooks = hooks
        self._on_unused_sources = on_unused_sources
        self._warned: set[str] = set()

    def of_sources(self, stream: str, batch: Batch) -> str:
        """Return what is wrong with the sources of a batch; log a warning of those that nobody reads."""
        # what the model lacks
        names = list(batch)
        missing = [name for name in self._model.input_names if name not in batch]
        if missing:
            parts: dict[str, list[str]] = {}
            for name in missing:
                parts.setdefault(self._model.part_with(name), []).append(name)
            needs = " and ".join(f"{part} needs {listed(needed)}" for part, needed in parts.items())
            is_calculated = all(part.startswith(("model.loss", "model.metrics")) for part in parts)
            known = [*names, *self._model.output_names] if is_calculated else names
            hints = "".join(did_you_mean(name, known) for name in missing)
            message = f"{needs}, which the batch does not have{hints} (it has {listed(names)})"
            if not hints and is_calculated:
                message += "; for a stream without labels there is `emrun predict`, not an evaluation"
            return message

        # what nobody reads
        used = {
            *self._model.input_names,
            *self._model.optional_input_names,
            *((ID, POSITION) if ID in batch else ()),
            *(name for hook in self._hooks for name in read_by(hook) or ()),
        }
        if any(map(may_read_anything, [*self._hooks, self._model])):
            return ""
        unused = [name for name in names if name not in used and name not in self._warned]
        if unused and self._on_unused_sources != "ignore":
            sources = "source" if len(unused) == 1 else "sources"
            message = (
                f"neither the model nor a hook reads the {sources} {listed(unused)}; if this is right, set "
                "main_loop.on_unused_sources: ignore"
            )
            if self._on_unused_sources == "error":
                return message
            self._warned.update(unused)
            restore_logging()  # the stream has just begun
            _LOG.warning("stream %r: %s", stream, message)
        return ""

    def of_outputs(self, sources: Sequence[str], outputs: Any) -> str:
        """Return whether an output has the name of a source, or a hook reads a variable that is neither of the two."""
        if not isinstance(outputs, Mapping):
            return f"model.run must return a mapping output name -> value, not {type(outputs).__name__}"
        in_units = self._model.in_units.values()  # sources that are added in the unit of the data
        overlap = [name for name in outputs if name in sources and name not in in_units]
        if overlap:
            return f"{listed(overlap)}: a source and an output have the same name; rename one (model.outputs)"
        variables = [*sources, *outputs]
        for hook in self._hooks:
            for name in read_by(hook) or ():
                if name not in variables:
                    adding = [type(other).__name__ for other in self._hooks if name in (declared(other, "adds") or ())]
                    why = f"; move the hook after {adding[0]}, which adds it" if adding else ""
                    return (
                        f"hook {type(hook).__name__} reads {name!r}, which is neither a source nor an output"
                        f"{why or did_you_mean(name, variables)} (available: {listed(variables)})"
                    )
            variables += declared(hook, "adds") or ()
        return ""

    def of_step_values(self) -> str:
        """Return whether what the model says about its first step is no mapping, or its rates are not numbers."""
        values: Any = self._model.step_values()
        if not isinstance(values, Mapping):
            return f"model.step_values must return a mapping name -> value, not {type(values).__name__}"
        rates = values.get(LEARNING_RATE)
        try:
            all_rates: Any = rates.values() if isinstance(rates, Mapping) else rates
            are_numbers = rates is None or all(isinstance(rate, Real | Tensor) for rate in all_rates)
        except TypeError:
            are_numbers = False
        if not are_numbers:
            return f"model.step_values: learning_rate is {rates!r:.80}, not a list with one number for each group"
        return ""


class BatchChecks:
    """Checks the length of every batch, and the variables of the first batch of every stream.

    Args:
        variables: the checks of the variables.
        progress: gets the length of each batch.
        on_empty_batch: what to do about a batch without sources or of length 0.
        on_empty_stream: what to do about a stream without any batch for the model.
        fixed_batch_size: skip batches of another length; None to skip none.
    """

    def __init__(
        self,
        variables: VariableChecks,
        progress: Progress,
        *,
        on_empty_batch: Policy = "error",
        on_empty_stream: Policy = "error",
        fixed_batch_size: int | None = None,
    ) -> None:
        check_choice("on_empty_batch", on_empty_batch, Policy)
        check_choice("on_empty_stream", on_empty_stream, Policy)
        if fixed_batch_size is not None:
            check_count("fixed_batch_size", fixed_batch_size, minimum=1)
        self.check_changed: Callable[[Batch], int] = len
        """Checks a batch for the second time, after hooks may have changed it."""
        self._variables = variables
        self._progress = progress
        self._on_empty_batch = on_empty_batch
        self._on_empty_stream = on_empty_stream
        self.fixed_batch_size = fixed_batch_size
        self._checked: set[str] = set()
        self._stream = ""
        self._changed_by = ""
        self._sources: list[str] = []

    @property
    def leaves_out(self) -> bool:
        """Whether some batches are left out."""
        return self._on_empty_batch != "error" or self.fixed_batch_size is not None

    def begin(self, stream: str, changed_by: str = "") -> Callable[[Batch], int]:
        """Return the function that checks the batches of a stream and returns their length, or 0 to skip a batch.

        Args:
            stream: the name of the stream.
            changed_by: the hooks that may change a batch before the model gets it. If there are any, the function only
                checks the lengths, and `check_changed` checks the sources and the lengths of the changed batch.
        """
        self._stream = stream
        self._changed_by = ""
        fixed_batch_size = self.fixed_batch_size
        progress = self._progress
        known: Any = None
        index = -1
        looks_at_sources = not changed_by

        def check_quickly(batch: Batch) -> int:
            """Check a batch of arrays as the one before; `check` says what is wrong with any other."""
            nonlocal index
            try:
                values = batch.values()
                if batch.keys() == known and _SIZED.issuperset(map(type, values)):
                    (length,) = set(map(len, values))
                    if length:
                        index += 1
                        progress.batch_length = length
                        return length
            except (AttributeError, TypeError, ValueError):
                pass
            return check(batch)

        def check(batch: Batch) -> int:
            nonlocal known, index
            index += 1
            self._stream = stream  # a hook may have looked at another one since
            try:
                names = batch.keys()
            except AttributeError:
                message = f"a batch must be a mapping source name -> values, not {type(batch).__name__}"
                if type(batch).__name__ == "str":  # the names of the sources, if the stream function returns a mapping
                    message += "; if the stream returns a batch, write `yield` instead of `return`"
                raise self._error(index, message) from None

            # the sources, of the first batch and if they change
            if names != known and batch and looks_at_sources:
                self._refuse(self._variables.of_sources(stream, batch), index)
                known = set(names)
                self._sources = list(batch)

            # the length, which all sources have
            length = -2  # before the first source; -1 stands for a source without a length
            for values in batch.values():
                try:
                    count = len(values) if type(values) in _SIZED else values.shape[0]
                except (AttributeError, IndexError, TypeError, RuntimeError):  # another type with a length, or none
                    count = length_of(values)
                if count != length:
                    if length >= 0 or count < 0:
                        raise self._unequal(batch, index)
                    length = count

            # a batch that is left out
            if length <= 0:
                self._report_empty(batch, index)
                return 0
            if fixed_batch_size is not None and not self._changed_by and total_in(batch) != fixed_batch_size:
                _LOG.debug("stream %r: dropped a batch of %d examples: %s", stream, length, ", ".join(batch))
                return 0
            progress.batch_length = length
            return length

        def check_changed(batch: Batch) -> int:
            nonlocal index, looks_at_sources
            index -= 1
            looks_at_sources = True
            self._changed_by = changed_by
            length = check(batch)
            looks_at_sources = False
            self._changed_by = ""
            return length

        def name_batch(error: BaseException) -> None:
            if isinstance(error, StreamError) and not str(error).startswith("stream "):
                error.name_batch(stream, index)

        self.check_changed = check_changed
        self.name_batch = name_batch
        """Adds the stream and the batch to an error of the model about its batch, unless the error has them."""
        return check if fixed_batch_size is not None else check_quickly

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream, once for each stream.

        Raises:
            StreamError: an output has the name of a source, or a hook reads a variable that is neither of the two.
        """
        if self._stream in self._checked:
            return
        self._refuse(self._variables.of_outputs(self._sources, outputs))
        self._checked.add(self._stream)

    def check_step_values(self) -> None:
        """Check what the model says about its first training step.

        Raises:
            StreamError: this is not a mapping, or its learning rates are not a list of numbers.
        """
        self._refuse(self._variables.of_step_values())

    def report_empty_stream(self, stream: str) -> None:
        """Raise or log, as `on_empty_stream` says, that a stream had no batch for the model.

        Raises:
            StreamError: `on_empty_stream` is `error`.
        """
        cause = "if its function returns the same iterator in each call, return a new one"
        message = f"stream {stream!r} has no batch for the model; {cause} (see main_loop.on_empty_stream)"
        if self._on_empty_stream == "error":
            raise StreamError(message, first_batch=True)
        if self._on_empty_stream == "warn":
            _LOG.warning("%s", message)

    def _report_empty(self, batch: Batch, index: int) -> None:
        what = f"has sources of length 0: {listed(list(batch))}" if batch else "has no sources"
        message = f"the batch {what} (see main_loop.on_empty_batch)"
        if self._on_empty_batch == "error":
            raise self._error(index, message)
        if self._on_empty_batch == "warn":
            _LOG.warning("stream %r, batch %d: %s", self._stream, index, message)

    def _unequal(self, batch: Batch, index: int) -> StreamError:
        sources = dict(parts(batch))
        lengths = {name: length_of(values) for name, values in sources.items()}
        empty = {name: values for name, values in batch.items() if isinstance(values, Mapping) and not values}
        without = [*empty, *(name for name, length in lengths.items() if length < 0)]
        if without:
            types = ", ".join(f"{name} ({type({**sources, **empty}[name]).__name__})" for name in without)
            return self._error(index, f"sources without a length: {types}; every source needs one entry per example")
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        return self._error(index, f"sources of unequal length: {counts}; every source needs one entry per example")

    def _refuse(self, message: str, index: int = 0) -> None:
        """Raise what is wrong with a batch, if anything is."""
        if message:
            raise self._error(index, message)

    def _error(self, index: int, message: str) -> StreamError:
        where = f"stream {self._stream!r}, batch {index} of the epoch"
        where += f", after before_batch of {self._changed_by}" if self._changed_by else ""
        return StreamError(f"{where}: {message}", first_batch=index == 0)
