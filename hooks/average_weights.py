"""AverageWeights: evaluates averages of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from emrun import AbstractHook
from emrun.base.arguments import check_choice, check_number
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import Interval, Units
from emrun.ranks.group import ranks
from emrun.ranks.pieces import is_in_pieces

_LOG = logging.getLogger(__name__)
_NO_BATCH_NORM = "the module has no BatchNorm"

Kind = Literal["ema", "swa"]
BatchNorm = Literal["average", "recompute"]


class AverageWeights(AbstractHook):
    """Averages the weights over the updates; evaluations use the averages instead of the weights.

        hooks:
          - AverageWeights: {half_life: 500 updates}

    An average often has a better loss than the last weights. The training itself does not change. `best`, `emrun eval`
    and `init_from` use the averages, without this hook: `model.safetensors` of a checkpoint has them. The weights that
    are trained are in `training.safetensors`, which a resume reads.

    An exponential average (`ema`) of each parameter follows `average += (1 - decay) * (weight - average)` after each
    update; after the half-life, older weights count half. The first average is the first weights that are averaged.
    `kind: swa` is the mean of all weights (https://arxiv.org/abs/1803.05407); to average only those of the last epochs,
    train without this hook, and resume with it. The functions are those of `torch.optim.swa_utils`. Floating-point
    buffers, such as the statistics of BatchNorm, are averaged in the same way; other buffers are copied. With several
    optimizers, the weights are averaged after the update of the last one in the config.

    Averages of the statistics of BatchNorm are not the statistics of the averaged module. With `kind: swa`, whose
    weights lie further apart, they are therefore calculated anew before the evaluations of each epoch, as
    `torch.optim.swa_utils.update_bn` does. The averaged module runs in training mode on a pass of the train stream, or
    on `fixed_epoch_size` batches of it. This takes the time of a pass without gradients; a module without BatchNorm
    needs none. Checkpoints between two evaluations have the statistics of the first one, averaged since.

    Args:
        half_life: of an exponential average: `500 updates`.
        decay: the same as a factor: 0.999; `half_life: H updates` is `decay: 0.5 ** (n / H)` with `every: n updates`.
        kind: `ema`, or `swa` for the mean with equal weights.
        every: how often the weights are averaged: `1 updates`, or `1 epochs`, after the train stream of an epoch.
        batch_norm: whether to `average` the statistics of BatchNorm, or to `recompute` them before evaluations; by
            default the latter with `kind: swa`, except on several ranks, as a warning says.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or arguments exclude each other.
        HookError: the model is not a `TorchModel`, or its optimizer averages the weights itself; or statistics of
            BatchNorm cannot be recomputed, because the module or the dataset does not fit.
    """

    reads = ()

    def __init__(
        self,
        half_life: Annotated[int | str, Units(("updates",))] | None = None,
        decay: float | None = None,
        kind: Kind = "ema",
        every: Annotated[int | str, Units(("updates", "epochs"))] = "1 updates",
        batch_norm: BatchNorm | None = None,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, Kind)
        if batch_norm is not None:
            check_choice("batch_norm", batch_norm, BatchNorm)
        self._batch_norm = batch_norm
        self._recomputes = batch_norm == "recompute" or (batch_norm is None and kind == "swa")
        self._is_recomputed = False  # whether the statistics are those of the averages
        self._every = Interval.parse("every", every, ("updates", "epochs"))
        self._average = self._function(half_life, decay, kind)
        self._averaged = 0
        self._last_update = 0
        self._pairs: list[tuple[Tensor, Tensor]] = []  # average and weight
        self._others: list[tuple[Tensor, Tensor]] = []  # buffers that are copied, such as counters

    def _function(self, half_life: object, decay: float | None, kind: Kind) -> Callable[..., Any]:
        given = [name for name, value in (("half_life", half_life), ("decay", decay)) if value is not None]
        removes = "an override removes an argument, ~hooks.AverageWeights.decay"
        if kind == "swa" and given:
            raise ArgumentError(given[0], f"kind: swa weights all averaged weights equally; remove it; {removes}")
        if kind == "swa":
            return get_swa_multi_avg_fn()  # type: ignore[no-any-return, no-untyped-call]
        if len(given) != 1:
            raise ArgumentError(
                "half_life",
                f"give one of half_life and decay, e.g. half_life: 500 updates: half_life is {half_life}, "
                f"and decay {decay}; {removes}",
            )
        if half_life is not None:
            if self._every.unit != "updates":
                raise ArgumentError("half_life", f"is in updates, but every: {self._every}; give decay instead")
            decay = 0.5 ** (self._every.count / Interval.parse("half_life", half_life, ("updates",)).count)
        check_number(given[0], decay, "a decay between 0 and 1, e.g. 0.999", above=0, below=1)
        return get_ema_multi_avg_fn(float(decay or 0))  # type: ignore[no-any-return, no-untyped-call]

    def _why_not(self) -> str | None:
        """Return why statistics of BatchNorm cannot be recomputed; None if they can."""
        loop: Any = self.main_loop
        if not any(isinstance(part, _BatchNorm) for part in loop.model.module.modules()):
            return _NO_BATCH_NORM
        if ranks().several:
            return "each rank reads only its rows of the train stream"
        has_stream = callable(getattr(loop.dataset, f"{loop.train_stream_name}_stream", None))
        return None if has_stream else f"the dataset has no stream {loop.train_stream_name!r}"

    def before_training(self) -> None:
        """Check that the model has weights to average, and an optimizer that does not average them."""
        model: Any = self.main_loop.model
        if not hasattr(model, "evaluation_weights"):
            raise HookError(f"AverageWeights needs a TorchModel, not {type(model).__name__}")
        for optimizer in getattr(model, "optimizers", {}).values():
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                raise HookError(f"{type(optimizer).__name__} averages the weights itself; remove AverageWeights")
        reason = self._why_not() if self._recomputes and not self.main_loop.evaluating else None
        if reason is None:
            return
        if self._batch_norm is not None:
            raise HookError(f"AverageWeights: batch_norm: recompute: {reason}; remove batch_norm")
        if reason != _NO_BATCH_NORM:
            _LOG.warning("AverageWeights: the statistics of BatchNorm are averaged, not recomputed: %s", reason)
        self._recomputes = False

    def after_update(self, model: Any, optimizer: Any) -> None:
        """Average the weights, if it is time."""
        optimizers = list(model.optimizers.values())
        if self._every.unit == "updates" and (not optimizers or optimizer is optimizers[-1]):
            done = self.main_loop.updates_done + 1  # this update is counted after the batch
            if done % self._every.count == 0 and done != self._last_update:
                self._last_update = done
                self._add(model)

    def after_stream(self, stream_name: str) -> None:
        """Average the weights after the train stream of an epoch, if it is time."""
        loop = self.main_loop
        if self._every.unit == "epochs" and stream_name == loop.train_stream_name and not loop.evaluating:
            done = loop.training_epochs_done + 1
            if loop.iterations_done and done % self._every.count == 0:
                self._add(loop.model)

    def before_evaluation(self) -> None:
        """Calculate the statistics of BatchNorm anew, if the averages have changed."""
        loop = self.main_loop
        if not self._recomputes or not self._pairs or self._is_recomputed or loop.evaluating:
            return
        with closing(loop.evaluation_pass(loop.train_stream_name)) as batches:  # type: ignore[type-var]
            loop.model.recompute_batch_norm(batches)  # type: ignore[attr-defined]
        self._is_recomputed = True

    def state_dict(self) -> dict[str, Any]:
        """Return how often the weights were averaged; the averages are in the weights of the checkpoint."""
        return {"averaged": self._averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the averages that the model has loaded."""
        self._averaged = state["averaged"]
        self._pairs = []
        self._is_recomputed = False
        if self.main_loop.evaluating or not self._averaged:
            return
        model: Any = self.main_loop.model
        restored = model.restored_weights
        model.restored_weights = None
        if restored is None:
            _LOG.warning("AverageWeights: the checkpoint has no averages; they begin anew")
            self._averaged = 0
            return
        self._begin(model, restored)

    def _begin(self, model: Any, values: dict[str, Tensor] | None = None) -> None:
        """Give the model tensors for evaluations, with these values, or those that are trained."""
        saved = model.module.state_dict().keys()
        named = (*model.module.named_parameters(), *model.module.named_buffers())
        kept = {name: tensor for name, tensor in named if name in saved}
        model.evaluation_weights = {name: (kept if values is None else values)[name].detach().clone() for name in kept}
        self._pairs = []
        self._others = []
        for name, tensor in kept.items():
            is_averaged = tensor.is_floating_point() or tensor.is_complex()
            pairs = self._pairs if is_averaged else self._others
            pairs.append((model.evaluation_weights[name], tensor))

    def _add(self, model: Any) -> None:
        """Add the current weights to the averages."""
        self._is_recomputed = False
        with torch.no_grad():
            if not self._pairs:
                self._begin(model)
            else:
                for pairs in _by_kind(self._pairs):
                    self._average(*map(list, zip(*pairs, strict=True)), self._averaged)
                for other, tensor in self._others:
                    other.copy_(tensor)
        self._averaged += 1


def _by_kind(pairs: list[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """Return pairs in groups of one device, dtype and kind, as the functions of torch need them."""
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for average, weight in pairs:
        groups.setdefault((average.device, average.dtype, is_in_pieces(average)), []).append((average, weight))
    return groups.values()
