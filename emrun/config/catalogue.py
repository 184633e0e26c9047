"""What a config can name: hooks, datasets, models, optimizers, schedules and metrics, with their docstrings.

Docstrings of emrun are read from sources and nothing is imported, so that a listing does not wait for torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from emrun.base.errors import OF_BASE
from emrun.base.wording import normalised
from emrun.config.names import bases, built_ins, plugins
from emrun.config.planner import METRICS
from emrun.config.source_finder import Unimported
from emrun.config.source_modules import SourceModules

PLACES = {
    "bases": "extends",
    "hooks": "entries of hooks",
    "datasets": "dataset.class",
    "models": "model.class",
    "optimizers": "model.optimizer.class",
    "schedules": "model.scheduler.class",
    "metrics": "model.metrics.NAME.import",
}
"""Kind -> the key of a config that names it."""

_OF_NAMES = {"hooks": "hook", "datasets": "dataset", "models": "model"}  # as `names` calls them
_BASE = "DownloadableDataset"  # has no streams: only classes derived from it can be trained on
_PACKAGES = {
    "optimizers": ("torch.optim",),
    "schedules": ("emrun.models.schedules.built_in", "torch.optim.lr_scheduler"),
}
_NOT_USABLE = {"Optimizer", "LRScheduler", "LBFGS"}  # the bases of the others, and an optimizer that needs a closure
_OF_TORCH = "{0} is a class of PyTorch for {1}: https://docs.pytorch.org/docs/stable/generated/{0}.html"
_sources = cache(Unimported)


def listing(kind: str) -> list[tuple[str, str]]:
    """Return what there is of a kind: the name as a config writes it, and the first line of its docstring, if any.

    Args:
        kind: a key of `PLACES`.
    """
    if kind == "bases":
        return [(name, file.read_text(encoding="utf-8").partition("\n")[0][2:]) for name, file in bases().items()]
    named = {name: _sources().find(path).__doc__ or "" for name, path in _named(kind).items() if name != _BASE}
    rows = [(name, text.partition("\n")[0]) for name, text in named.items()]
    one = _OF_NAMES.get(kind, "")
    for plugin, paths in plugins(one).items():
        is_hidden = normalised(plugin) in map(normalised, built_ins(one)) or len(paths) > 1
        text = " or ".join(paths)
        if is_hidden:
            text += ", by its dotted path only"
        rows.append((plugin, text))
    return rows


def explanation(name: str) -> str | None:
    """Return the docstring of something that emrun has, or where torch explains its own; None for an unknown name.

    Of a base it is the text.

    Args:
        name: as a listing has it, without regard to case and underscores; of a metric also its last part.
    """
    for base, file in bases().items():
        if name in (base, base.removeprefix(OF_BASE)):
            return file.read_text(encoding="utf-8").rstrip()
    for kind, place in PLACES.items():
        for config_name, path in _named(kind).items():
            spellings = (config_name, path, config_name.rpartition(".")[2])
            if normalised(name) in map(normalised, spellings):
                is_of_torch = path.startswith("torch.")
                return _OF_TORCH.format(path, place) if is_of_torch else explained(path, _sources().find(path))
    return None


def explained(path: str, target: Any) -> str:
    """Return the docstring of what a dotted path names."""
    return inspect.cleandoc(target.__doc__ or f"{path} has no docstring")


def _named(kind: str) -> Mapping[str, str]:
    """Return what emrun and torch have of a kind: the name as a config writes it -> the dotted path."""
    if kind in _OF_NAMES:
        return built_ins(_OF_NAMES[kind])
    if kind == "metrics":
        module = SourceModules().read(METRICS)
        bound = module.bound.items() if module is not None else ()
        functions = [name for name, (first, *_) in bound if isinstance(first, ast.FunctionDef) and name[0] != "_"]
        return {f"{METRICS}.{name}": f"{METRICS}.{name}" for name in functions}
    homes = {name: package for package in _PACKAGES.get(kind, ()) for name in _sources().classes(package) or ()}
    return {name: f"{package}.{name}" for name, package in homes.items() if name not in _NOT_USABLE}


def argument_texts(source: Any) -> Mapping[str, str]:
    """Return name -> description of the arguments in the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    classes = inspect.getmro(source) if inspect.isclass(source) else ()
    for ancestor in classes:
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(ancestor.__doc__ or ""), re.MULTILINE)
        entries = re.split(r"^ {4}(\w+)(?: \(.*\))?:", section[1] if section else "", flags=re.MULTILINE)
        for name, text in zip(entries[1::2], entries[2::2], strict=True):
            texts.setdefault(name, " ".join(text.split()))
    return texts
