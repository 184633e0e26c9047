"""The parameter groups of an optimizer: which parameters it trains, and with which arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from emrun.base.errors import ArgumentError
from emrun.base.patterns import patterns
from emrun.base.wording import few

_BIASES_AND_NORMS = "biases_and_norms"
_BIAS = re.compile(r"(^|_)bias(_|$)")  # also `in_proj_bias` and `bias_hh_l0`

Named = dict[str, Parameter]


def parameter_groups(module: torch.nn.Module, options: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
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
    found = _returned(module, parameters, groups, key) if callable(groups) else _configured(parameters, groups, key)
    held = {id(each) for group in found for each in group["params"]}
    rest = [each for each in _once(parameters) if id(each) not in held]
    found = [{"params": rest}, *found] if rest else found
    kind = options.get("no_decay")
    return found if kind is None else _split(found, _without_decay(module, kind, f"{key}.no_decay"), key)


def _matching(parameters: Named, match: object, argument: str) -> Named:
    """Return the parameters of which a name matches, under all their names; each pattern must match one."""
    expressions = patterns(argument, match)
    for index, each in enumerate(expressions):
        if not any(map(each.search, parameters)):
            where = f"{argument}[{index}]" if isinstance(match, list | tuple) else argument
            raise ArgumentError(where, f"{each.pattern!r} matches none of the parameters {few(parameters)}")
    held = {id(each) for name, each in parameters.items() if any(regex.search(name) for regex in expressions)}
    return {name: each for name, each in parameters.items() if id(each) in held}


def _once(parameters: Named) -> list[Parameter]:
    return list({id(each): each for each in parameters.values()}.values())


def _configured(parameters: Named, groups: object, key: str) -> list[dict[str, Any]]:
    """Return the groups that a config lists."""
    fits = isinstance(groups, list) and all(isinstance(each, Mapping) and "match" in each for each in groups)
    if not fits or not isinstance(groups, list):
        either = "neither a list of {match: REGEX, argument: value} nor a callable that returns groups"
        raise ArgumentError(f"{key}.groups", f"{groups!r} is {either}")
    found: list[dict[str, Any]] = []
    owners: dict[int, Any] = {}
    for index, group in enumerate(groups):
        own = _matching(parameters, group["match"], f"{key}.groups[{index}].match")
        for name, each in own.items():
            if id(each) in owners:
                both = f"{owners[id(each)]!r} and {group['match']!r}"
                message = f"parameter {name!r} matches both {both}; it can be in one group"
                raise ArgumentError(f"{key}.groups[{index}].match", message)
        owners |= dict.fromkeys(map(id, own.values()), group["match"])
        found.append({"params": _once(own), **{k: v for k, v in group.items() if k != "match"}})
    return found


def _returned(module: torch.nn.Module, parameters: Named, make: Any, key: str) -> list[dict[str, Any]]:
    """Return the groups that a callable makes of a module, with lists of parameters."""
    key = f"{key}.groups"
    groups = make(module)
    if isinstance(groups, Mapping) or not isinstance(groups, Iterable):
        raise ArgumentError(key, f"returned {_kind(groups)}, not a list of {{'params': [...], 'argument': value}}")
    names = {id(each): name for name, each in module.named_parameters()}
    selected = {id(each) for each in parameters.values()}
    found: list[dict[str, Any]] = []
    owners: dict[int, int] = {}
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ArgumentError(key, f"group {index} is {_kind(group)}, not {{'params': [...], 'argument': value}}")
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else members
        own = [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in members]
        if not own:
            raise ArgumentError(key, f"group {index} has no parameters")
        for each in own:
            what = names.get(id(each))
            if not isinstance(each, torch.Tensor) or what is None:
                kind = f"a tensor of shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else _kind(each)
                message = f"group {index} has {kind}, which is not a parameter of {type(module).__name__}"
                raise ArgumentError(key, message)
            if id(each) not in selected:
                raise ArgumentError(key, f"group {index} has parameter {what!r}, which `match` does not select")
            if id(each) in owners:
                message = f"parameter {what!r} is in group {owners[id(each)]} and in group {index}"
                raise ArgumentError(key, message)
            owners[id(each)] = index
        found.append({**group, "params": own})
    return found


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__


def _without_decay(module: torch.nn.Module, kind: object, argument: str) -> set[int]:
    """Return the ids of the parameters that `no_decay` names."""
    if kind != _BIASES_AND_NORMS:
        raise ArgumentError(argument, f"{kind!r} is not {_BIASES_AND_NORMS}; for other parameters, use groups")
    found = set()
    for each in module.modules():
        is_norm = any("Norm" in base.__name__ for base in type(each).__mro__)
        own = each.named_parameters(recurse=False)
        found |= {id(parameter) for name, parameter in own if is_norm or _BIAS.search(name)}
    return found


def _split(groups: list[dict[str, Any]], ids: set[int], key: str) -> list[dict[str, Any]]:
    """Return groups, then the parts of these that get no weight decay; a group keeps a `weight_decay` of its own."""
    if not any(id(each) in ids for group in groups for each in group["params"]):
        raise ArgumentError(f"{key}.no_decay", "matches nothing: there are neither biases nor layers of normalisation")

    def part(group: dict[str, Any], *, is_in: bool) -> list[Parameter]:
        return [each for each in group["params"] if (id(each) in ids) is is_in]

    decayed = [each if "weight_decay" in each else {**each, "params": part(each, is_in=False)} for each in groups]
    plain = [each for each in groups if "weight_decay" not in each]
    others = [{**each, "params": part(each, is_in=True), "weight_decay": 0.0} for each in plain]
    return [each for each in (*decayed, *others) if each["params"]]
