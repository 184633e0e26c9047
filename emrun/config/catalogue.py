"""What a config can name without a line of a user's code, explained: hooks, datasets, models, optimizers, ...

Docstrings are read from sources and nothing is imported, so that a listing does not wait for torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from emrun.base.wording import normalised
from emrun.config.docstrings import with_defaults
from emrun.config.json_schema import argument_texts
from emrun.config.names import built_ins, documentation, dotted_path, plugins, short_names
from emrun.config.sections import SUPPLIED
from emrun.config.source_finder import Sources
from emrun.config.source_modules import SourceModules

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
_OPTIMIZERS, _SCHEDULERS, _METRICS = "torch.optim", "torch.optim.lr_scheduler", "emrun.metrics"
_SCHEDULES = "emrun.models.schedules.built_in"
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


def listing(kind: str) -> list[tuple[str, str]]:
    """Return what there is of a kind: the name as a config writes it, and one line about it.

    Args:
        kind: a key of `PLACES`.
    """
    if kind in ("optimizers", "schedules"):
        package = _OPTIMIZERS if kind == "optimizers" else _SCHEDULERS
        own = _classes(_SCHEDULES) if kind == "schedules" else []
        rows = [(name, _first_line(_source(f"{_SCHEDULES}.{name}"))) for name in own]
        return rows + [(name, _first_line(_of_torch(f"{package}.{name}"))) for name in _classes(package)]
    if kind == "metrics":
        return [(name, _first_line(_source(name))) for name in _metrics()]
    one = _OF_NAMES[kind]
    names = [each for each in short_names(one, installed=False) if each != _BASE]
    rows = [(each, documentation(each, one).partition("\n")[0]) for each in names]
    for each, paths in plugins(one).items():
        is_hidden = normalised(each) in built_ins(one) or len(paths) > 1
        rows.append((each, f"{' or '.join(paths)}{', by its dotted path only' * is_hidden}"))
    return rows


def explanation(name: str) -> str | None:
    """Return what something that emrun or torch has does, with YAML to paste; None when they have nothing of that name.

    Args:
        name: as a listing has it, without regard to case and underscores; of a metric also its last part.
    """
    wanted = normalised(name)
    for kind in _OF_NAMES.values():
        if wanted in built_ins(kind):
            known = Sources().parameters(_source(dotted_path(name, kind) or ""))
            own = {each: p for each, p in known.named.items() if each not in SUPPLIED[kind]} if known else {}
            return with_defaults(documentation(name, kind), own)
    for each in _metrics():
        if wanted in (normalised(each), normalised(each.rpartition(".")[2])):
            metric = _source(each)
            needed = [name for name, p in inspect.signature(metric).parameters.items() if p.default is p.empty]
            short = each.rpartition(".")[2]
            yaml = f"model:\n  metrics:\n    {short}: {{import: {each}, inputs: [{', '.join(needed)}]}}"
            return _explained(metric, yaml, (inspect.getdoc(metric) or "").partition("\n\n")[2])
    for each in _classes(_SCHEDULES):
        if wanted in (normalised(each), normalised(f"{_SCHEDULES}.{each}")):
            schedule = _source(f"{_SCHEDULES}.{each}")
            known = Sources().parameters(schedule)
            own = {each: p for each, p in known.named.items() if each != "optimizer"} if known else {}
            return with_defaults(inspect.getdoc(schedule) or "", own, argument_texts(schedule))
    for package in (_OPTIMIZERS, _SCHEDULERS):
        for each in _classes(package):
            if wanted in (normalised(each), normalised(f"{package}.{each}")):
                return _explanation_of_torch(package, each)
    return None


def _explanation_of_torch(package: str, name: str) -> str:
    found = _of_torch(f"{package}.{name}")
    key = package.rpartition(".")[2].removeprefix("lr_") if package == _SCHEDULERS else "optimizer"
    plateau = "metric" if name == "ReduceLROnPlateau" else "step_on"
    known = Sources().parameters(found)
    taken = {each: p for each, p in known.named.items() if each not in ("optimizer", "params")} if known else {}
    of_optimizer = ["groups", *["no_decay"] * ("weight_decay" in taken), "match"]
    options = [plateau] if package == _SCHEDULERS else of_optimizer
    texts = {**argument_texts(found), **{option: _OPTIONS[option] for option in options}}
    arguments = [f"{each}: {texts[each]}" for each in (*taken, *options) if each in texts]
    lines = [textwrap.fill(text, 80, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in arguments]
    example = _EXAMPLES.get(name, "lr: 0.001" if key == "optimizer" else "argument: value")
    return _explained(found, f"model:\n  {key}: {{class: {name}, {example}}}", "\n".join(["Args:", *lines]))


def _explained(source: Callable[..., Any], yaml: str, rest: str) -> str:
    """Return an explanation in the order of emrun's docstrings: what it does, the YAML, the rest."""
    return "\n\n".join([_first_line(source), textwrap.indent(yaml, " " * 4), rest.strip()]).rstrip()


def _first_line(source: Callable[..., Any]) -> str:
    return (inspect.getdoc(source) or "").partition("\n")[0]


def _source(path: str) -> Any:
    return Sources().find(path)


def _of_torch(path: str) -> Any:
    """Return a class of torch as its source has it, with the docstring that stands after the class in its file."""
    found = _source(path)
    module = SourceModules().read(found.__module__)
    text = module.file.read_text(encoding="utf-8") if module is not None and module.file is not None else ""
    given = re.search(rf'^{found.__name__}\.__doc__ = .*?"""(.*?)(?=^\S|\Z)', text, re.MULTILINE | re.DOTALL)
    if given is not None:
        found.__doc__ = re.sub(r"\{_\w+\}", "", given[1])  # texts that torch inserts
    return found


def _classes(package: str) -> list[str]:
    return [name for name in Sources().classes(package) or () if name not in _NOT_USABLE]


def _metrics() -> list[str]:
    module = SourceModules().read(_METRICS)
    bound = module.bound if module is not None else {}
    functions = [name for name, (first, *_) in bound.items() if isinstance(first, ast.FunctionDef)]
    return [f"{_METRICS}.{name}" for name in functions if not name.startswith("_")]
