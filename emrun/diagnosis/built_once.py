"""Modules of a model that are built once, for the models that `check` tries one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from emrun.base.encoding import random_state, set_random_state
from emrun.config.recipe import Recipe


@dataclass(frozen=True)
class BuiltOnce(Recipe):
    """Builds a module, writes it to a file, and reads the file for each further module, which is as this one was then.

    A file takes no memory beside the models that are tried, and does not share functions that hold on to the first
    module. What cannot be written, or holds on to what emrun supplies, such as the dataset, is built anew each time.

    Args:
        file: the file, which is not there yet.
        after: the random state after the module was written; empty until then.
    """

    file: Path = Path()
    after: dict[str, Any] = field(default_factory=dict)

    def build(self, supplied: Mapping[str, Any]) -> Any:
        """Build or read the module; the random numbers that follow are the same."""
        if self.after:
            set_random_state(self.after)
            return torch.load(self.file, weights_only=False)  # that this process has written, in a folder of its own
        made = super().build(supplied)
        if isinstance(made, torch.nn.Module):
            with suppress(Exception):  # of torch, or of the user's classes
                torch.save(made, self.file, pickle_module=_pickling(supplied))
                self.after.update(random_state())
        return made


def with_modules_built_once(model: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a model whose modules are built once and kept in a folder."""
    kwargs = dict(model.kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Recipe) and not (value.is_import or value.form):
            own = {each.name: getattr(value, each.name) for each in fields(value)}
            kwargs[name] = BuiltOnce(**own, file=folder / name)
    return replace(model, kwargs=kwargs)


def _pickling(supplied: Mapping[str, Any]) -> Any:
    """Return a module of pickle that refuses what emrun supplies."""

    class Pickling:
        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                if any(value is each for each in supplied.values()):
                    raise pickle.PicklingError("it is not a part of the module")
                return NotImplemented

    return Pickling
