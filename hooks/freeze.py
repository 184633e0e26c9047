"""Freeze: keeps parameters as they are, always or at the beginning of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from emrun import AbstractHook
from emrun.base.errors import ArgumentError
from emrun.base.patterns import patterns
from emrun.base.types import Batch, Interval, Units
from emrun.base.wording import counted
from emrun.hook import Loop
from emrun.hooks._shared.parameters import check_matches, module_of

_LOG = logging.getLogger(__name__)


class Freeze(AbstractHook):
    """Freezes parameters, such as the first layers: they are not trained, always or at the beginning of the run.

        hooks:
          - Freeze: {match: bias, until: 20 updates}

    A frozen parameter has `requires_grad` False and no gradient, so the optimizer skips it: it does not change, neither
    by weight decay nor by momentum, and its state in the optimizer is kept. BatchNorm whose parameters are all frozen
    runs in evaluation mode, so that its statistics do not change; BatchNorm without parameters is not frozen. Dropout
    still drops.

    Parameters that do not require gradients when the run begins are never trained. What several of these hooks match is
    frozen until the last of them ends. The run begins with the weights of the module or of `model.init_from`. A resume
    at any time continues with the same parameters frozen. A warning names a part that the module itself has frozen and
    set to evaluation mode, if the training sets it to training mode.

    Args:
        match: a regular expression for the names of the parameters (`re.search`), or a list of them.
        until: when the parameters begin to be trained: after `500 updates`, `2 epochs` or `1 passes` of the train
            stream; a bare number means epochs. By default they are always frozen.

    Raises:
        ArgumentError: an expression matches no parameter, or nothing is left to train; or the length of a pass is not
            known.
        HookError: the model is not a `TorchModel`.
    """

    reads = ()
    changes_batches = False
    every_rank = True

    def __init__(
        self,
        match: str | Sequence[str],
        until: Annotated[int | str, Units(("updates", "epochs", "passes"))] | None = None,
        model: Any = None,
    ) -> None:
        super().__init__(model=model)
        self._match = patterns("match", match)
        if not self._match:
            raise ArgumentError("match", "give a regular expression for the names of the parameters")
        self._until = None if until is None else Interval.parse("until", until, ("updates", "epochs", "passes"))
        self._updates: int | None = None  # the limit in updates, if it is not in epochs
        self._is_frozen = False
        self._parameters: list[torch.nn.Parameter] = []
        self._modules: list[torch.nn.Module] = []
        if model is not None:
            self._find(model)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Find the parameters.

        Raises:
            ArgumentError: an expression matches none, or nothing is left to train.
        """
        super().register_mainloop(main_loop)
        self._find(main_loop.model)

    def before_training(self) -> None:
        """Find out when the parameters begin to be trained."""
        loop = self.main_loop
        until = self._until
        if loop.evaluating:
            return
        if until is not None:
            self._updates = int(until.count) if until.unit == "updates" else None
            if until.unit == "passes" and loop.fixed_epoch_size is not None:
                of_pass = loop.horizon.updates_per_pass
                if of_pass is None:
                    raise ArgumentError("until", f"{until}: the length of a pass is not known; give updates or epochs")
                self._updates = int(until.count) * of_pass
        if self._is_due():
            self._is_frozen = True
            how_long = f"for the first {until}" if until is not None else "always"
            _LOG.info("Freeze: %s frozen %s", counted(len(self._parameters), "parameter"), how_long)
        if self._is_frozen:
            self._hold()

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Keep BatchNorm in evaluation mode, or end the freezing; only between updates, which have whole gradients."""
        loop = self.main_loop
        if not (self._is_frozen and loop.training) or loop.model.is_accumulating:
            return
        module = module_of("Freeze", loop.model)
        if not self._is_due():
            self._end(module)
        elif self._modules:
            if not module.training:
                module.train()  # before its parts, else the model would do it
            for part in self._modules:
                part.eval()

    def state_dict(self) -> dict[str, Any]:
        """Return whether the parameters are frozen; the checkpoint has the modes of modules too."""
        return {"frozen": self._is_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._is_frozen = state["frozen"]

    def _is_due(self) -> bool:
        if self._until is None:
            return True
        if self._updates is not None:
            return self.main_loop.updates_done < self._updates
        return self.main_loop.training_epochs_done < self._until.count

    def _hold(self) -> None:
        for parameter in self._parameters:
            parameter.requires_grad = False
            parameter.grad = None
        for part in self._modules:
            part.eval()

    def _end(self, module: torch.nn.Module) -> None:
        self._is_frozen = False
        for parameter in self._parameters:
            parameter.requires_grad = True
        module.train()  # which may keep some parts in evaluation mode
        for other in self.main_loop.hooks:
            if isinstance(other, Freeze) and other._is_frozen:
                other._hold()
        _LOG.info("Freeze: %s trained from now on", counted(len(self._parameters), "parameter"))

    def _find(self, model: Any) -> None:
        """Find the parameters, and the parts with running statistics whose parameters all match.

        Raises:
            ArgumentError: see the class.
        """
        module = module_of("Freeze", model)
        check_matches("match", self._match, module)
        named = module.named_parameters(remove_duplicate=False)
        matched = {
            id(parameter): parameter for name, parameter in named if any(regex.search(name) for regex in self._match)
        }
        if not any(parameter.requires_grad and id(parameter) not in matched for parameter in module.parameters()):
            raise ArgumentError("match", f"all {len(matched)} parameters match; nothing is left to train")
        self._parameters = [parameter for parameter in matched.values() if parameter.requires_grad]
        norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]
        self._modules = [norm for norm in norms if norm.affine and matched.keys() >= set(map(id, norm.parameters()))]
