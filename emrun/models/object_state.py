"""The state of a metric of whole streams: what a checkpoint stores of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict
from torch.utils._pytree import tree_leaves, tree_map_only

from emrun.base.encoding import decode, encode
from emrun.base.types import State, Values


class ObjectState:
    """Takes and restores the state of a metric, exactly.

    The state of a metric of torchmetrics is `metric_state` and the number of updates, of the metric and of those inside
    of it. The state of another metric is what its `state_dict` returns and its `load_state_dict` takes.

    Args:
        key: the name of the metric in messages.
        thing: the metric, as it was built.
        device: the device of tensors that are not on the CPU.
    """

    def __init__(self, key: str, thing: Any, device: torch.device) -> None:
        self._key = key
        self._thing = thing
        self._device = device
        modules = thing.modules() if isinstance(thing, Module) else ()
        self._parts: list[Any] = [each for each in modules if hasattr(each, "_update_count")]  # of torchmetrics
        own = (getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None))
        self.is_kept = bool(self._parts) or all(map(callable, own))
        """Whether checkpoints have a state of the metric."""

    def take(self) -> State | None:
        """Return a copy of the state, in plain types and tensors; None if there is none.

        Raises:
            StateError: the state cannot be saved.
        """
        if not self.is_kept:
            return None
        if self._parts:
            for each in self._thing.modules():
                if isinstance(each, ModuleDict):
                    each.values()  # of a MetricCollection, which updates only one of several that have the same state
            values = [{**part.metric_state, "_update_count": part._update_count} for part in self._parts]
        else:
            values = self._thing.state_dict()
        return {
            "built": self._built(),
            "values": encode(values, f"{self._key}.state_dict()", copied=True),
            "of_cpu": [each.is_cpu for each in tree_leaves(values) if isinstance(each, Tensor)],
        }

    def fits(self, state: Values | None) -> bool:
        """Return whether there is a state, of a metric of this class with states of the same shapes."""
        return state is not None and state["built"] == self._built()

    def restore(self, state: Values) -> None:
        """Restore what `take` returned, if it fits."""
        of_cpu = iter(state["of_cpu"])
        values = tree_map_only(
            Tensor,
            lambda each: each if next(of_cpu) else each.to(self._device),
            decode(copy.deepcopy(state["values"])),
        )
        if not self._parts:
            self._thing.load_state_dict(values)
            return
        for part, kept in zip(self._parts, values, strict=True):
            vars(part).update(kept, _computed=None)

    def _built(self) -> list[Any]:
        """Return what must be equal for a state to fit."""
        kind = type(self._thing)
        defaults = [pair for part in self._parts for pair in part._defaults.items()]
        shapes = [[name, list(getattr(default, "shape", ()))] for name, default in defaults]
        return [f"{kind.__module__}.{kind.__qualname__}", *shapes]
