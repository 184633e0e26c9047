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
        self._is_frozen: bool | None = None  # None until the first train batch of this process
        self._was_held = False  # whether they were frozen before that
        self._parameters: list[torch.nn.Parameter] = []
        self._modules: list[torch.nn.Module] = []
        if model is not None:
            self._check(model)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Find the parameters; check the names, if the hook was built without the model."""
        super().register_mainloop(main_loop)
        if self.model is None:
            self._check(main_loop.model)
        module = module_of("Freeze", main_loop.model)
        self._parameters = [each for each in self._matched(module).values() if each.requires_grad]
        self._modules = self._held(module)

    def before_training(self) -> None:
        """Find out when the parameters begin to be trained."""
        loop, until = self.main_loop, self._until
        if self._is_frozen is not None:
            self._was_held = self._is_frozen
        self._is_frozen = None
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
        if self._was_held or (self._is_due() and not loop.model.is_accumulating):
            for each in self._parameters:
                each.requires_grad = False  # checkpoints before the first batch have the files of later ones

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Freeze the parameters, or end that; only between updates, so that no update has half of the gradients."""
        loop = self.main_loop
        if not loop.training or loop.model.is_accumulating:
            return
        is_frozen = self._is_due()
        if is_frozen is not self._is_frozen:
            self._set(is_frozen)
        if is_frozen and self._modules:
            self._hold_modes()

    def state_dict(self) -> dict[str, Any]:
        """Return whether the parameters are frozen, so that modules are in evaluation mode."""
        return {"frozen": self._was_held if self._is_frozen is None else self._is_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._was_held, self._is_frozen = state["frozen"], None

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
            parameter.requires_grad = not is_frozen and id(parameter) not in kept  # also of one without a shape yet
            parameter.grad = None
        if not is_frozen and (self._was_held if self._is_frozen is None else self._is_frozen):
            module.train(module.training)  # which may keep some parts in evaluation mode
            for part in (part for each in others if each._is_due() for part in each._modules):
                part.eval()
            _LOG.info("Freeze: %s trained from now on", counted(len(self._parameters), "parameter"))
        self._is_frozen = is_frozen

    def _hold_modes(self) -> None:
        """Set BatchNorm to evaluation mode; the module is set to train mode before, else the model would do it."""
        module: torch.nn.Module = self.main_loop.model.module  # type: ignore[attr-defined]
        if not module.training:
            module.train()
        for part in self._modules:
            if part.training:
                part.eval()

    def _check(self, model: Any) -> None:
        """Check that each expression matches, and that something is left to train.

        Raises:
            ArgumentError: see the class.
        """
        module = module_of("Freeze", model)
        check_matches("match", self._match, module)
        frozen = {id(each) for each in self._matched(module).values()}
        if not any(each.requires_grad and id(each) not in frozen for each in module.parameters()):
            raise ArgumentError("match", f"all {len(frozen)} parameters match; nothing is left to train")

    def _matched(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        named = module.named_parameters(remove_duplicate=False)
        return {name: each for name, each in named if any(regex.search(name) for regex in self._match)}

    def _held(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the parts with running statistics whose parameters, or else buffers, all match."""
        frozen = {id(each) for each in self._matched(module).values()}
        held: list[torch.nn.Module] = []
        for name, part in module.named_modules():
            if not isinstance(part, _NormBase) or not part.track_running_stats:
                continue
            own = list(part.parameters(recurse=False))
            names = [f"{name}.{buffer}" if name else buffer for buffer, _ in part.named_buffers(recurse=False)]
            by_name = all(any(regex.search(each) for regex in self._match) for each in names)
            if all(id(each) in frozen for each in own) if own else by_name:
                held.append(part)
        return held
