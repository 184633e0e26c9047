"""The outputs of a model for a batch: what forward returns, under its names, with losses and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emrun.arguments import check_names
from emrun.errors import ArgumentError
from emrun.models.losses import Calculations, calculations, mean
from emrun.wording import did_you_mean, listed


class Outputs:
    """Names what forward returns, and adds losses and metrics.

    Args:
        names: of what forward returns, None for all of a mapping.
        loss: one form, or name -> form.
        metrics: name -> form.
        device: where losses that are modules go.

    Raises:
        ArgumentError: an argument cannot be used.
    """

    def __init__(self, names: Sequence[str] | None, loss: Any, metrics: Any, device: torch.device) -> None:
        if names is not None:
            check_names("outputs", names)
            if len(set(names)) < len(names):
                raise ArgumentError("outputs", f"{list(names)} has a name twice")
        self._named = tuple(names) if names is not None else None
        self._only = self._named[0] if self._named is not None and len(self._named) == 1 else None
        self._terms = calculations("loss", loss, device)
        self._sums_terms = "loss" not in self._terms and bool(self._terms)
        self._metrics = calculations("metrics", metrics, device)
        self._is_complete = not (self._terms or self._metrics or names)  # nothing is added to what forward returns

    @property
    def names(self) -> list[str]:
        """The names of the outputs, as far as they are known before the first batch."""
        total = ["loss"] if self._sums_terms else []
        return [*(self._named or ()), *self._terms, *total, *self._metrics]

    @property
    def losses(self) -> dict[str, Any]:
        """The objects that calculate losses: their keys in the model's section -> object."""
        return {term.key: term.function for term in self._terms.values()}

    def sources(self) -> tuple[list[str], list[str]]:
        """Return the sources that losses and metrics need, and the names that may be sources or outputs."""
        used = [*self._terms.values(), *self._metrics.values()]
        names = list(dict.fromkeys(name for each in used for name in each.inputs))
        if self._named is None:
            return [], names
        made = {*self.names, "loss"}
        return [name for name in names if name not in made], []

    def of(self, returned: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the outputs of a batch.

        Args:
            returned: what forward returned.
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled.

        Raises:
            ArgumentError: forward returns something else than the names say, or an output twice.
            StreamError: a loss or metric needs what is not there.
        """
        if type(returned) is dict and self._is_complete:
            return returned
        outputs = {self._only: returned} if type(returned) is Tensor and self._only else self._by_name(returned)
        if self._terms:
            if "loss" in outputs:
                raise ArgumentError("loss", "forward returns an output 'loss' already; remove one of them")
            _add(outputs, self._terms, inputs, "loss")
            if self._sums_terms:
                weights = outputs.get("example_weight")
                outputs["loss"] = sum(term.scale * mean(outputs[name], weights) for name, term in self._terms.items())
        if self._metrics:
            with_gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)  # half as dear as no_grad
            try:
                _add(outputs, self._metrics, inputs, "metrics")
            finally:
                torch.set_grad_enabled(with_gradients)
        return outputs

    def _by_name(self, returned: Any) -> dict[str, Any]:
        names = self._named
        if isinstance(returned, Mapping):
            if names is None:
                return dict(returned)
            missing = [name for name in names if name not in returned]
            if missing:
                hint = "".join(did_you_mean(name, returned) for name in missing)
                message = f"forward returns no {listed(missing)}{hint} (it returns {listed(list(returned))})"
                raise ArgumentError("outputs", message)
            return {name: returned[name] for name in names}
        if names is None:
            message = f"forward returns {type(returned).__name__}, not a mapping; name what it returns, e.g. [logits]"
            raise ArgumentError("outputs", message)
        values = returned if isinstance(returned, tuple | list) else (returned,)
        if len(values) != len(names):
            message = f"{list(names)} names {len(names)} values, but forward returns {len(values)}"
            raise ArgumentError("outputs", message)
        return dict(zip(names, values, strict=True))


def _add(outputs: dict[str, Any], calculations: Calculations, inputs: Mapping[str, Tensor], argument: str) -> None:
    """Add what losses or metrics make of outputs and sources to the outputs."""
    made = {}
    for name, calculation in calculations.items():
        made[name] = calculation(outputs, inputs)
        if name in outputs:
            twice = listed([each for each in calculations if each in outputs])
            raise ArgumentError(argument, f"there is an output {twice} already; give one of them another name")
    outputs.update(made)
