"""What a config can name, explained: hooks, datasets, models, optimizers, ..., and classes of a user.

An explanation says what a class does, with YAML to paste and its arguments with their defaults. Docstrings of emrun and
torch are read from sources and nothing is imported, so that a listing does not wait for torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

from emrun.base.wording import normalised
from emrun.config.import_finder import Imported
from emrun.config.names import SUPPLIED, built_ins, plugins
from emrun.config.source_finder import Unimported
from emrun.config.source_modules import SourceModules
from emrun.config.yaml_tree import read_scalar
from emrun.hook import AbstractHook
from emrun.model import AbstractModel

PLACES = {
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
_METRICS = "emrun.metrics"
_PACKAGES = {
    "optimizers": ("torch.optim",),
    "schedules": ("emrun.models.schedules.built_in", "torch.optim.lr_scheduler"),
}
_NOT_USABLE = {"Optimizer", "LRScheduler", "LBFGS"}  # the bases of the others, and an optimizer that needs a closure
_EXAMPLES = {
    "LambdaLR": "lr_lambda: {import: my_module.factor}",
    "MultiplicativeLR": "lr_lambda: {import: my_module.factor}",
    "StepLR": "step_size: 30, gamma: 0.1",
    "MultiStepLR": "milestones: [30, 80], gamma: 0.1",
    "ConstantLR": "factor: 0.5, total_iters: 5",
    "LinearLR": "start_factor: 0.1, total_iters: 5",
    "ExponentialLR": "gamma: 0.95",
    "SequentialLR": "schedulers: [{class: LinearLR}, {class: CosineAnnealingLR, T_max: 20}], milestones: [5]",
    "PolynomialLR": "total_iters: 20, power: 2.0",
    "CosineAnnealingLR": "T_max: 20",
    "ChainedScheduler": "schedulers: [{class: ConstantLR}, {class: ExponentialLR, gamma: 0.95}]",
    "ReduceLROnPlateau": "metric: valid/loss/mean, patience: 5",
    "CyclicLR": "base_lr: 1.0e-4, max_lr: 1.0e-2, step_size_up: 500, step_on: update",
    "CosineAnnealingWarmRestarts": "T_0: 10",
    "OneCycleLR": "max_lr: 0.01, total_steps: 1000, step_on: update",
}
"""Scheduler of torch -> arguments to paste."""
_OPTIONS = {
    "groups": "`[{match: REGEX, lr: 0.01}]`, other arguments for the parameters whose names match.",
    "no_decay": "`biases_and_norms`: no weight decay for biases and layers of normalisation.",
    "match": "a regular expression, or a list of them; the parameters to train. All by default.",
    "step_on": "`epoch`, the default, or `update`: when the scheduler steps.",
    "metric": "the statistic that is watched, stream/variable/aggregation.",
}
"""Keys of `model.optimizer` and `model.scheduler` that are not arguments of torch's class."""
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_RAISES = re.compile(r"\n*^Raises:\n(?:[ ]+.*(?:\n|\Z)|\n)*", re.MULTILINE)
_YAML = {
    "hook": "hooks:\n  - {path}: {{{arguments}}}",
    "model": "model: {{class: {path}, {arguments}}}",
    "dataset": "dataset: {{class: {path}, {arguments}}}",
    "module": "model:\n  module: {{class: {path}, {arguments}}}",
}
"""Kind of a class -> the YAML that names it."""


def listing(kind: str) -> list[tuple[str, str]]:
    """Return what there is of a kind: the name as a config writes it, and one line about it.

    Args:
        kind: a key of `PLACES`.
    """
    rows = [(name, _first_line(_source(path))) for name, path in _named(kind).items() if name != _BASE]
    one = _OF_NAMES.get(kind, "")
    for each, paths in plugins(one).items():
        is_hidden = normalised(each) in map(normalised, built_ins(one)) or len(paths) > 1
        rows.append((each, f"{' or '.join(paths)}{', by its dotted path only' * is_hidden}"))
    return rows


def explanation(name: str) -> str | None:
    """Return what something that emrun or torch has does, with YAML to paste; None when they have nothing of that name.

    Args:
        name: as a listing has it, without regard to case and underscores; of a metric also its last part.
    """
    for kind in PLACES:
        for own, path in _named(kind).items():
            if normalised(name) in {normalised(each) for each in (own, path, own.rpartition(".")[2])}:
                found = _source(path)
                if kind != "metrics" and not path.startswith("torch."):
                    return explained(path, found, _OF_NAMES.get(kind, "schedule"))
                yaml, rest = _of_metric(path, found) if kind == "metrics" else _of_torch(kind, own, found)
                return "\n\n".join([_first_line(found), textwrap.indent(yaml, " " * 4), rest.strip()]).rstrip()
    return None


def _named(kind: str) -> Mapping[str, str]:
    """Return what emrun and torch have of a kind: the name as a config writes it -> the dotted path."""
    if kind in _OF_NAMES:
        return built_ins(_OF_NAMES[kind])
    if kind == "metrics":
        module = SourceModules().read(_METRICS)
        bound = module.bound.items() if module is not None else ()
        functions = [name for name, (first, *_) in bound if isinstance(first, ast.FunctionDef) and name[0] != "_"]
        return {f"{_METRICS}.{name}": f"{_METRICS}.{name}" for name in functions}
    homes = {each: package for package in _PACKAGES[kind] for each in _sources().classes(package) or ()}
    return {each: f"{package}.{each}" for each, package in homes.items() if each not in _NOT_USABLE}


def _of_metric(path: str, found: Any) -> tuple[str, str]:
    """Return YAML to paste for a function of `emrun.metrics`, and the rest of its docstring."""
    needed = [name for name, p in inspect.signature(found).parameters.items() if p.default is p.empty]
    yaml = f"model:\n  metrics:\n    {found.__name__}: {{import: {path}, inputs: [{', '.join(needed)}]}}"
    return yaml, (inspect.getdoc(found) or "").partition("\n\n")[2]


def _of_torch(kind: str, name: str, found: Any) -> tuple[str, str]:
    """Return YAML to paste for a class of torch, and the section of its arguments."""
    known = _sources().parameters(found)
    taken = [each for each in (known.named if known else ()) if each not in ("optimizer", "params")]
    key, example, options = "optimizer", "lr: 0.001", ["groups", *["no_decay"] * ("weight_decay" in taken), "match"]
    if kind == "schedules":
        key, example = "scheduler", _EXAMPLES.get(name, "argument: value")
        options = ["metric" if name == "ReduceLROnPlateau" else "step_on"]
    texts = {**argument_texts(found), **_OPTIONS}
    arguments = [f"{each}: {texts[each]}" for each in (*taken, *options) if each in texts]
    lines = [textwrap.fill(text, 80, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in arguments]
    return f"model:\n  {key}: {{class: {name}, {example}}}", "\n".join(["Args:", *lines])


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").partition("\n")[0]


_sources = cache(Unimported)


def _source(path: str) -> Any:
    """Return what a path names as its source has it; of torch with the docstring that follows a class in its file."""
    found = _sources().find(path)
    module = SourceModules().read(found.__module__) if path.startswith("torch.") else None
    text = module.file.read_text(encoding="utf-8") if module is not None and module.file is not None else ""
    given = re.search(rf'^{found.__name__}\.__doc__ = .*?"""(.*?)(?=^\S|\Z)', text, re.MULTILINE | re.DOTALL)
    if given is not None:
        found.__doc__ = re.sub(r"\{_\w+\}", "", given[1])  # texts that torch inserts
    return found


def with_defaults(text: str, parameters: Mapping[str, inspect.Parameter], inherited: Mapping[str, str] = {}) -> str:
    """Return a docstring without its section `Raises`, and with the default of each argument; null is left out.

    Args:
        text: the docstring.
        parameters: the parameters of the class, of which those without a description are added.
        inherited: name -> description in the docstring of a base class.
    """
    before, _, described = ("\n" + _RAISES.sub("\n\n", text)).partition("\nArgs:\n")
    for name, parameter in parameters.items():
        default = _written(parameter.default) if parameter.default is not None else ""
        note = f" (default {default})" if default else ""
        found = re.search(rf"^( {{4}}{name})(?: \(.*?\))?:(?P<text>.*)", described, re.MULTILINE)
        if found is None:
            required = " (required)" if parameter.default is parameter.empty else note
            added = f"{name}{required}: {inherited.get(name, '')}".rstrip(": ")
            added = textwrap.fill(added, 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
            described = f"{described.rstrip()}\n{added}"
        elif "default:" not in found["text"].lower():
            described = f"{described[: found.end(1)]}{note}{described[found.end(1) :]}"
    described = described.strip("\n")
    return f"{before.strip()}\n\nArgs:\n{described}".strip() if described else before.strip()


def explained(path: str, found: Any, kind: str | None = None) -> str:
    """Return what a class or function does, with YAML to paste if it is known what the class is for.

    Args:
        path: the dotted path.
        found: what the path names.
        kind: what a config uses a built-in class for, whose docstring has its YAML; by default judged by its bases.
    """
    text = inspect.cleandoc(found.__doc__ or "") if inspect.isclass(found) else inspect.getdoc(found) or ""
    kind, is_complete = kind or _kind_of(found), kind is not None
    if kind is None:
        return text or f"{path} has no docstring"
    known = Imported().parameters(found)
    supplied = SUPPLIED.get(kind, ("optimizer",))
    own = {name: each for name, each in known.named.items() if name not in supplied} if known else {}
    explained = with_defaults(text, own, argument_texts(found) if is_complete else {})
    if is_complete or re.search(rf"^ +.*\b{found.__name__}\b", text, re.MULTILINE):  # the docstring has its YAML
        return explained
    values = {name: "VALUE" if each.default is each.empty else _written(each.default) for name, each in own.items()}
    arguments = ", ".join(f"{name}: {value}" for name, value in values.items() if value)
    yaml = _YAML[kind].format(path=path, arguments=arguments).replace(": {}", "").replace(", }", "}")
    first, _, rest = explained.partition("\n\n")
    first, rest = ("", explained) if first.startswith("Args:\n") else (first, rest)
    return "\n\n".join(filter(None, (first or f"{path} has no docstring", textwrap.indent(yaml, " " * 4), rest)))


def _kind_of(found: Any) -> str | None:
    """Return what a config uses a class for; None if that is not known."""
    bases = found.__mro__ if inspect.isclass(found) else ()
    if AbstractHook in bases or AbstractModel in bases:
        return "hook" if AbstractHook in bases else "model"
    if "torch.nn.modules.module.Module" in [f"{base.__module__}.{base.__qualname__}" for base in bases]:
        return "module"
    return "dataset" if bases and any(name.endswith("_stream") for name in dir(found)) else None


def _written(value: Any) -> str:
    """Return a value as YAML, an empty string if YAML cannot write it."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and read_scalar(value) == value:
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return ""


def argument_texts(source: Any) -> Mapping[str, str]:
    """Return name -> description of the arguments in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in inspect.getmro(source) if inspect.isclass(source) else ():
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(each.__doc__ or ""), re.MULTILINE)
        entries = re.split(r"^ {4}(\w+)(?: \(.*\))?:", section[1] if section else "", flags=re.MULTILINE)
        for name, text in zip(entries[1::2], entries[2::2], strict=True):
            found.setdefault(name, " ".join(text.split()))
    return found
