"""LogNorms: records the norms of gradients and weights, and how large the updates are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from emrun import AbstractHook
from emrun.base.errors import ArgumentError
from emrun.base.patterns import patterns
from emrun.base.types import EpochData, Interval, Units
from emrun.hook import Loop
from emrun.hooks._shared.parameters import check_matches, module_of, norms_of, suffix_of

_VALUES = ("gradient_norm", "weight_norm", "update_ratio")


class LogNorms(AbstractHook):
    """Records the norms of gradients and weights, and the size of the updates.

        hooks:
          - LogNorms: {match: [weight, bias], every: 5 updates}

    These are columns of `steps.jsonl`, and their means over the measured updates of an epoch are in the data of the
    epoch, for the train stream:

    - `gradient_norm`: the 2-norm of all gradients of an update, as one vector. The place of this hook counts: before
      `ClipGradients`, the norm is that before clipping.
    - `weight_norm`: the 2-norm of the weights after the update.
    - `update_ratio`: the 2-norm of the change of the weights, divided by that of the weights before; 0 for weights that
      were all 0. Often, 0.001 is a good value, and much more or less is a sign of a learning rate that does not fit.

    For each expression of `match` there are three more, such as `gradient_norm(bias)`. With several optimizers, each
    has values of its own, `gradient_norm_NAME`, and those of the expressions that match its parameters. Nothing is
    copied from the device before the end of the epoch, except for the step record. An update that is measured needs
    memory for a copy of the weights. An update that is skipped does not count in the means. The zeroth epoch and epochs
    without a measured update have no means.

    Args:
        match: a regular expression for names of parameters (`re.search`), or a list of them; each is measured too.
        every: how often: `10 updates`.

    Raises:
        ArgumentError: an expression matches no parameter that an optimizer trains, or an argument has a value that is
            not allowed.
        HookError: the model is not a `TorchModel`.
    """

    reads = ()

    def __init__(
        self,
        match: str | Sequence[str] | None = None,
        every: Annotated[int | str, Units(("updates",))] = "1 updates",
        model: Any = None,
    ) -> None:
        super().__init__(model=model)
        self._match = patterns("match", match)
        self._every = int(Interval.parse("every", every, ("updates",)).count)
        self._parameters: dict[str, _MatchedParameters] = {}  # suffix of the optimizer -> its parameters
        self._gradients: Tensor | None = None  # the norms of the current update
        self._before: list[Tensor] = []  # the weights before it
        self._sums: dict[str, tuple[Tensor, int]] = {}  # suffix -> the sums of the values, number of updates
        if model is not None:
            check_matches("match", self._match, module_of("LogNorms", model))

    def register_mainloop(self, main_loop: Loop) -> None:
        """Declare what this hook writes, which depends on the optimizers of the model."""
        super().register_mainloop(main_loop)
        model = main_loop.model
        check_matches("match", self._match, module_of("LogNorms", model))
        optimizers = getattr(model, "optimizers", None) or {}
        matching = {
            suffix_of(model, optimizer): tuple(self._parameters_of(optimizer).match)
            for optimizer in optimizers.values()
        }
        matching = matching or {"": self._match}
        unused = [regex for regex in self._match if not any(regex in matched for matched in matching.values())]
        if unused:
            raise ArgumentError("match", f"{unused[0].pattern!r} matches only parameters that no optimizer trains")
        self.writes = [f"{name}/mean" for suffix, match in matching.items() for name in _names(suffix, match)]

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the sums of the previous epoch."""
        self._sums = {}
        self._parameters = {}

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Measure the gradients, and copy the weights, if it is time."""
        self._gradients = None
        if (self.main_loop.updates_done + 1) % self._every:  # this update is counted after the batch
            return
        suffix = suffix_of(model, optimizer)
        matched = self._parameters.get(suffix)
        if matched is None:
            matched = self._parameters[suffix] = self._parameters_of(optimizer)
        with torch.no_grad():
            self._gradients = matched.norms([parameter.grad for parameter in matched.parameters])
            self._before = [parameter.detach().clone() for parameter in matched.parameters]
        self._record(0, suffix, self._gradients)

    def after_update(self, model: Any, optimizer: Any) -> None:
        """Measure the weights and the update."""
        if self._gradients is None:
            return
        suffix = suffix_of(model, optimizer)
        matched = self._parameters[suffix]
        before = self._before
        with torch.no_grad():
            weights = [parameter.detach() for parameter in matched.parameters]
            now = matched.norms(weights)
            then = matched.norms(before)
            torch._foreach_sub_(before, weights)
            ratio = torch.where(then > 0, matched.norms(before) / then, torch.zeros_like(then))
            self._record(1, suffix, now)
            self._record(2, suffix, ratio)
            self._add(suffix, torch.cat([self._gradients, now, ratio]))
        self._gradients = None
        self._before = []

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Add the means to the data of the epoch."""
        model: Any = self.main_loop.model
        optimizers = model.optimizers.values() if self._sums else ()
        for optimizer in optimizers:
            suffix = suffix_of(model, optimizer)
            if suffix in self._sums:
                total, count = self._sums[suffix]
                names = _names(suffix, self._parameters_of(optimizer).match)
                values = epoch_data.setdefault(self.main_loop.train_stream_name, {})
                for name, mean in zip(names, (total / count).tolist(), strict=True):
                    values[name] = {"mean": mean}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the epoch so far."""
        sums = {suffix: {"total": total.cpu(), "count": count} for suffix, (total, count) in self._sums.items()}
        return {"patterns": [regex.pattern for regex in self._match], "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of an epoch that is resumed in its middle, unless other parameters are measured now."""
        self._sums = {}
        if list(state["patterns"]) == [regex.pattern for regex in self._match]:
            self._sums = {suffix: (saved["total"], saved["count"]) for suffix, saved in state["sums"].items()}

    def _parameters_of(self, optimizer: Any) -> _MatchedParameters:
        return _MatchedParameters(module_of("LogNorms", self.main_loop.model), optimizer, self._match)

    def _record(self, index: int, suffix: str, norms: Tensor) -> None:
        """Add the values of one kind to the step record."""
        count = len(norms)
        names = _names(suffix, self._parameters[suffix].match)[index * count : (index + 1) * count]
        for name, norm in zip(names, norms.unbind(), strict=True):
            self.main_loop.record(name, norm)

    def _add(self, suffix: str, values: Tensor) -> None:
        exact = values if values.device.type == "mps" else values.double()  # MPS has no doubles
        total, count = self._sums.get(suffix, (None, 0))
        self._sums[suffix] = (exact if total is None else total.to(exact.device) + exact, count + 1)


def _names(suffix: str, match: Sequence[re.Pattern[str]]) -> list[str]:
    """Return the names of the values of an optimizer."""
    ends = [suffix, *(f"{suffix}({regex.pattern})" for regex in match)]
    return [f"{value}{end}" for value in _VALUES for end in ends]


class _MatchedParameters:
    """The parameters of an optimizer, and which of them each expression matches, of those that match some."""

    def __init__(self, module: torch.nn.Module, optimizer: Any, match: Sequence[re.Pattern[str]]) -> None:
        self.parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        named = list(module.named_parameters(remove_duplicate=False))
        self._device = self.parameters[0].device
        self.match = []
        self._indices = []
        for regex in match:
            matched = {
                places[id(parameter)]: None
                for name, parameter in named
                if id(parameter) in places and regex.search(name)
            }
            if matched:
                self.match.append(regex)
                self._indices.append(torch.tensor(list(matched), device=self._device))

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the 2-norm of all tensors, and of those of each expression, on the device of the first parameter.

        Args:
            tensors: one for each parameter; None counts as 0.
        """
        single = [norm.to(self._device) for norm in norms_of(tensors)]
        if len({norm.dtype for norm in single}) > 1:
            single = [norm.double() for norm in single]
        several = torch.stack(single)
        return torch.stack(
            [torch.linalg.vector_norm(norms) for norms in (several, *(several[i] for i in self._indices))]
        )
