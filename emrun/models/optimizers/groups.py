"""The parameter groups of an optimizer: which parameters it trains, and with which arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter

from emrun.base.errors import ArgumentError
from emrun.base.patterns import check_matches, patterns
from emrun.base.types import Values
from emrun.base.wording import few

_BIASES_AND_NORMS = "biases_and_norms"
_BIAS = re.compile(r"(^|_)bias(_|$)")  # also `in_proj_bias` and `bias_hh_l0`

Named = dict[str, Parameter]

Group = dict[str, Any]
"""A parameter group of an optimizer, as torch has it."""


def parameter_groups(module: Module, options: Values, key: str) -> list[Group]:
    """Return the parameter groups of an optimizer, none of them empty.

    The first group has the parameters without arguments of their own, if there are any. The groups of `groups` follow
    in their order, and then the parts of all these groups that get no weight decay.

    Args:
        module: the module to train.
        options: `match`, patterns that select the parameters to train. `groups`, a list of `{match: REGEX, argument:
            value}`, or a callable that gets the module and returns groups as torch has them. `no_decay`.
        key: the key of the optimizer in the model's section, for messages.

    Raises:
        ArgumentError: an option has a value that is not allowed, a pattern matches nothing, a parameter is in two
            groups, or there is nothing to train.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))  # a tied weight has several names
    if not parameters:
        raise ArgumentError(key, f"module {type(module).__name__} has no parameters to train")
    if options.get("match") is not None:
        parameters = _matching(parameters, options["match"], f"{key}.match")
    groups = options.get("groups") or []
    place = f"{key}.groups"
    found = _returned(module, groups, place) if callable(groups) else _configured(parameters, groups, place)
    _check_apart(found, parameters, place)
    held = {id(each) for group in found for each in group["params"]}
    rest = [each for each in _once(parameters) if id(each) not in held]
    found = [{"params": rest}, *found] if rest else found
    kind = options.get("no_decay")
    return found if kind is None else _split(found, _without_decay(module, kind, f"{key}.no_decay"), key)


def _matching(parameters: Named, match: object, argument: str) -> Named:
    """Return the parameters of which a name matches, under all their names; each pattern must match one."""
    expressions = patterns(argument, match)
    check_matches(argument, expressions, parameters, "the parameters")
    held = {id(each) for name, each in parameters.items() if any(regex.search(name) for regex in expressions)}
    return {name: each for name, each in parameters.items() if id(each) in held}


def _once(parameters: Named) -> list[Parameter]:
    return list({id(each): each for each in parameters.values()}.values())


def _configured(parameters: Named, groups: object, key: str) -> list[Group]:
    """Return the groups that a config lists."""
    if not isinstance(groups, list) or not all(isinstance(each, Mapping) and "match" in each for each in groups):
        either = "neither a list of {match: REGEX, argument: value} nor a callable that returns groups"
        raise ArgumentError(key, f"{groups!r} is {either}")
    found: list[Group] = []
    for index, group in enumerate(groups):
        own = _matching(parameters, group["match"], f"{key}[{index}].match")
        found.append({"params": _once(own), **{k: v for k, v in group.items() if k != "match"}})
    return found


def _returned(module: Module, make: Any, key: str) -> list[Group]:
    """Return the groups that a callable makes of a module, with lists of parameters."""
    made = make(module)
    groups = made if isinstance(made, Iterable) else [made]
    found: list[Group] = []
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            form = "{'params': [...], 'argument': value}"
            raise ArgumentError(key, f"returned {_kind(group)} as a group, which is not {form}")
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else members
        own = [each[-1] if isinstance(each, tuple) else each for each in members]  # of named_parameters()
        found.append({**group, "params": own})
    return found


def _check_apart(groups: list[Group], parameters: Named, key: str) -> None:
    """Check that each group has parameters, all of them selected, and in no other group."""
    names = {id(each): name for name, each in parameters.items()}
    owners: dict[int, int] = {}
    for index, group in enumerate(groups):
        where = f"{key}[{index}]"
        if not group["params"]:
            raise ArgumentError(where, "has no parameters")
        for each in group["params"]:
            if id(each) not in names:
                allowed = few(parameters)
                raise ArgumentError(where, f"has {_kind(each)}, which is not one of the parameters to train: {allowed}")
            if owners.setdefault(id(each), index) != index:
                message = f"has parameter {names[id(each)]!r}, as group {owners[id(each)]} has; it can be in one group"
                raise ArgumentError(where, message)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"


def _without_decay(module: Module, kind: object, argument: str) -> set[int]:
    """Return the ids of the parameters that `no_decay` names."""
    if kind != _BIASES_AND_NORMS:
        raise ArgumentError(argument, f"{kind!r} is not {_BIASES_AND_NORMS}; for other parameters, use groups")
    found = set()
    for each in module.modules():
        is_norm = any("Norm" in base.__name__ for base in type(each).__mro__)
        own = each.named_parameters(recurse=False)
        found |= {id(parameter) for name, parameter in own if is_norm or _BIAS.search(name)}
    return found


def _split(groups: list[Group], ids: set[int], key: str) -> list[Group]:
    """Return groups, then the parts of these that get no weight decay; a group keeps a `weight_decay` of its own."""
    if not any(id(each) in ids for group in groups for each in group["params"]):
        raise ArgumentError(f"{key}.no_decay", "matches nothing: there are neither biases nor layers of normalisation")

    decayed, others = [], []
    for group in groups:
        within = set() if "weight_decay" in group else ids
        decayed.append({**group, "params": [each for each in group["params"] if id(each) not in within]})
        plain = [each for each in group["params"] if id(each) in within]
        others.append({**group, "params": plain, "weight_decay": 0.0})
    return [each for each in (*decayed, *others) if each["params"]]
