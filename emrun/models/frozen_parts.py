"""Parts of a module that are frozen and in evaluation mode when the module is made."""

from __future__ import annotations

import logging
import re

from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

_LOG = logging.getLogger(__name__)


class FrozenParts:
    """Knows the outermost parts of a new module that are in evaluation mode and whose parameters are all frozen."""

    def __init__(self, module: Module) -> None:
        self._parts: dict[str, Module] = {}
        for name, part in module.named_modules():
            parameters = list(part.parameters())
            is_inside = any(name.startswith(f"{each}.") for each in self._parts)
            if name and parameters and not (part.training or is_inside or any(p.requires_grad for p in parameters)):
                self._parts[name] = part

    def warn(self) -> None:
        """Warn once of a part that is about to be run in training mode, if this makes a difference to it."""
        for name, part in self._parts.items():
            norms = _training(part, _NormBase)
            if not norms and not _training(part, _DropoutNd):
                continue
            what = "its BatchNorm changes with each batch" if norms else "its dropout drops"
            keys = f"`Freeze: {{match: '^{re.escape(name)}\\.'}}` keeps BatchNorm as it is; " if norms else ""
            _LOG.warning(
                "%s is frozen and was in evaluation mode, but is run in training mode: %s; %sa method `train` of the "
                "module that calls `self.%s.eval()` keeps the whole part in evaluation mode",
                name,
                what,
                keys,
                name,
            )
        self._parts = {}


def _training(part: Module, kind: type[Module]) -> list[Module]:
    return [
        each
        for each in part.modules()
        if isinstance(each, kind)
        and each.training
        and getattr(each, "track_running_stats", True)
        and getattr(each, "p", 1)
    ]
