"""The parameter groups of an optimizer: which parameters it trains, and with which arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
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

Groups = list[Group]


def parameter_groups(module: Module, options: Values, key: str) -> Groups:
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
    # the groups with arguments of their own
    option = options.get("groups") or []
    place = f"{key}.groups"
    groups = _returned(module, option, place) if callable(option) else _configured(parameters, option, place)
    _check_apart(groups, parameters, place)
    # the parameters without arguments of their own
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [parameter for parameter in _once(parameters) if id(parameter) not in grouped]
    if rest:
        groups = [{"params": rest}, *groups]
    # the parameters without weight decay
    no_decay = options.get("no_decay")
    return groups if no_decay is None else _split(groups, _without_decay(module, no_decay, f"{key}.no_decay"), key)


def _matching(parameters: Named, match: object, argument: str) -> Named:
    """Return the parameters of which a name matches, under all their names; each pattern must match one."""
    expressions = patterns(argument, match)
    check_matches(argument, expressions, parameters, "the parameters")
    ids = {id(parameters[name]) for name in parameters if any(regex.search(name) for regex in expressions)}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in ids}


def _once(parameters: Named) -> list[Parameter]:
    return list(dict.fromkeys(parameters.values()))


def _configured(parameters: Named, entries: object, key: str) -> Groups:
    """Return the groups that a config lists."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and "match" in entry for entry in entries):
        raise ArgumentError(
            key,
            f"{entries!r} is neither a list of {{match: REGEX, argument: value}} nor a callable that returns groups",
        )
    groups: Groups = []
    for index, entry in enumerate(entries):
        matching = _matching(parameters, entry["match"], f"{key}[{index}].match")
        groups.append({"params": _once(matching), **{name: value for name, value in entry.items() if name != "match"}})
    return groups


def _returned(module: Module, make: Any, key: str) -> Groups:
    """Return the groups that a callable makes of a module, with lists of parameters."""
    made = make(module)
    returned = made if isinstance(made, Iterable) else [made]
    groups: Groups = []
    for group in returned:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ArgumentError(
                key, f"returned {_described(group)} as a group, which is not {{'params': [...], 'argument': value}}"
            )
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else params
        # pairs are those of named_parameters()
        groups.append({**group, "params": [each[-1] if isinstance(each, tuple) else each for each in params]})
    return groups


def _check_apart(groups: Groups, parameters: Named, key: str) -> None:
    """Check that each group has parameters, all of them selected, and in no other group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: dict[int, int] = {}
    for index, group in enumerate(groups):
        where = f"{key}[{index}]"
        if not group["params"]:
            raise ArgumentError(where, "has no parameters")
        for parameter in group["params"]:
            place = id(parameter)
            if place not in names:
                raise ArgumentError(
                    where,
                    f"has {_described(parameter)}, which is not one of the parameters to train: {few(parameters)}",
                )
            if owners.setdefault(place, index) != index:
                raise ArgumentError(
                    where, f"has parameter {names[place]!r}, as group {owners[place]} has; it can be in one group"
                )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}"


def _without_decay(module: Module, value: object, argument: str) -> set[int]:
    """Return the ids of the parameters that `no_decay` names."""
    if value != _BIASES_AND_NORMS:
        raise ArgumentError(argument, f"{value!r} is not {_BIASES_AND_NORMS}; for other parameters, use groups")
    ids = set()
    for part in module.modules():
        is_norm = any("Norm" in base.__name__ for base in type(part).__mro__)
        ids |= {
            id(parameter) for name, parameter in part.named_parameters(recurse=False) if is_norm or _BIAS.search(name)
        }
    return ids


def _split(groups: Groups, ids: set[int], key: str) -> Groups:
    """Return groups, then the parts of these that get no weight decay; a group keeps a `weight_decay` of its own."""
    if not any(id(parameter) in ids for group in groups for parameter in group["params"]):
        raise ArgumentError(f"{key}.no_decay", "matches nothing: there are neither biases nor layers of normalisation")

    decayed = []
    others = []
    for group in groups:
        within = set() if "weight_decay" in group else ids
        decayed.append({**group, "params": [each for each in group["params"] if id(each) not in within]})
        others.append(
            {**group, "params": [each for each in group["params"] if id(each) in within], "weight_decay": 0.0}
        )
    return [group for group in (*decayed, *others) if group["params"]]
