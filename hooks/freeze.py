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
from emrun.hooks._parts.parameters import check_matches, module_of

_LOG = logging.getLogger(__name__)


class Freeze(AbstractHook):
    """Freezes parameters: they are not trained, always or at the beginning of the run.

        hooks:
          - Freeze: {match: bias, until: 20 updates}

    A frozen parameter has `requires_grad` False and no gradient, so the optimizer skips it: it does not change, neither
    by weight decay nor by momentum, and its state in the optimizer is kept. BatchNorm whose parameters are all frozen
    runs in evaluation mode, so that its statistics do not change; BatchNorm without parameters, if the names of its
    buffers match. Dropout still drops.

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
        self._is_frozen = False  # since the last train batch, perhaps one of an earlier process
        self._is_set = False  # whether there was a train batch in this process
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
        loop, until = self.main_loop, self._until
        self._is_set = False
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
            how_long = f"for the first {until}" if until is not None else "always"
            _LOG.info("Freeze: %s frozen %s", counted(len(self._parameters), "parameter"), how_long)
        if self._is_frozen or (self._is_due() and not loop.model.is_accumulating):
            for each in self._parameters:
                each.requires_grad = False  # checkpoints before the first batch have the files of later ones

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Freeze the parameters, or end that; only between updates, so that no update has half of the gradients."""
        loop = self.main_loop
        if not loop.training or loop.model.is_accumulating:
            return
        is_frozen = self._is_due()
        if is_frozen is not self._is_frozen or not self._is_set:
            self._set(is_frozen)
        if is_frozen and self._modules:
            module: torch.nn.Module = loop.model.module  # type: ignore[attr-defined]
            if not module.training:
                module.train()  # before its parts, else the model would do it
            for part in self._modules:
                if part.training:
                    part.eval()

    def state_dict(self) -> dict[str, Any]:
        """Return whether the parameters are frozen, so that modules are in evaluation mode."""
        return {"frozen": self._is_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._is_frozen, self._is_set = state["frozen"], False

    def _is_due(self) -> bool:
        if self._until is None:
            return True
        if self._updates is not None:
            return self.main_loop.updates_done < self._updates
        return self.main_loop.training_epochs_done < self._until.count

    def _set(self, is_frozen: bool) -> None:
        module = module_of("Freeze", self.main_loop.model)
        others = [each for each in self.main_loop.hooks if isinstance(each, Freeze) and each is not self]
        kept = {id(part) for each in others if each._is_due() for part in (*each._parameters, *each._modules)}
        for parameter in self._parameters:
            parameter.requires_grad = not is_frozen and id(parameter) not in kept
            parameter.grad = None
        if self._is_frozen and not is_frozen:
            module.train(module.training)  # which may keep some parts in evaluation mode
            for part in (part for each in others if each._is_due() for part in each._modules):
                part.eval()
            _LOG.info("Freeze: %s trained from now on", counted(len(self._parameters), "parameter"))
        self._is_frozen, self._is_set = is_frozen, True

    def _find(self, model: Any) -> None:
        """Find the parameters, and the parts with running statistics whose parameters, or else buffers, all match.

        Raises:
            ArgumentError: see the class.
        """

        def is_meant(name: str) -> bool:
            return any(regex.search(name) for regex in self._match)

        module = module_of("Freeze", model)
        check_matches("match", self._match, module)
        named = module.named_parameters(remove_duplicate=False)
        matched = {id(each): each for name, each in named if is_meant(name)}
        if not any(each.requires_grad and id(each) not in matched for each in module.parameters()):
            raise ArgumentError("match", f"all {len(matched)} parameters match; nothing is left to train")
        self._parameters = [each for each in matched.values() if each.requires_grad]
        self._modules = []
        for name, part in module.named_modules():
            if isinstance(part, _NormBase) and part.track_running_stats:
                own = list(part.parameters(recurse=False))
                buffers = [f"{name}.{each}".lstrip(".") for each, _ in part.named_buffers(recurse=False)]
                if all(id(each) in matched for each in own) if own else all(map(is_meant, buffers)):
                    self._modules.append(part)
