"""The optimizer of a `TorchModel`: how a config builds it, and how its state in a checkpoint is checked and loaded."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from emrun.errors import ArgumentError, StateError
from emrun.fields import ANYTHING, FLAG, TEXT, FieldError, Kind, mapping_of, optional, record, sequence_of, shown, whole
from emrun.models.parameter_groups import parameter_groups
from emrun.types import Factory
from emrun.wording import listed


def build_optimizer(module: torch.nn.Module, form: Callable[..., Any], key: str = "optimizer") -> torch.optim.Optimizer:
    """Build an optimizer of a module's parameters.

    Args:
        module: the module to train.
        form: called with the parameters; its options are those of `parameter_groups`.
        key: the key of the form in the model's section, for messages.

    Raises:
        ArgumentError: see `parameter_groups`; or torch refuses an argument.
    """
    options: Mapping[str, Any] = getattr(form, "options", {})
    groups = parameter_groups(module, options, key)
    try:
        optimizer = form(groups if len(groups) > 1 or len(groups[0]) > 1 else groups[0]["params"])
    except (ValueError, TypeError, RuntimeError) as error:
        if not is_raised_by_torch(error):
            raise
        given = form.kwargs.items() if isinstance(form, Factory) else ()
        text = str(error)
        is_meant = (name for name, value in given if text.endswith(f": {value}") or f"`{name}" in text)
        refused = next((f".{name}" for name in is_meant), "")
        raise ArgumentError(f"{key}{refused}", text) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(key, f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    kind, defaults = type(optimizer).__name__, getattr(optimizer, "defaults", {})
    if options.get("no_decay") is not None and "weight_decay" not in defaults:
        raise ArgumentError(f"{key}.no_decay", f"{kind} has no argument weight_decay; remove no_decay")
    unknown = [name for group in groups for name in group if name != "params" and name not in defaults]
    if unknown and defaults:
        allowed = listed(sorted(defaults))
        raise ArgumentError(f"{key}.groups", f"unknown argument {unknown[0]!r}; allowed: {allowed}")
    for group in optimizer.param_groups:
        if group.get("capturable") and any(each.device.type == "cpu" for each in group["params"]):
            raise ArgumentError(f"{key}.capturable", f"{kind} cannot capture parameters on the CPU; set model.device")
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in their order."""
    return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]


def configured_arguments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the arguments of each parameter group as the config sets them, with the names of its parameters.

    Args:
        module: the module to train.
        optimizer: a new optimizer, whose scheduler is built already: some schedulers store arguments in the groups.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {key: [names.get(id(p)) for p in value] if key == "params" else _number(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float | torch.Tensor]:
    """Return the learning rate of each parameter group: a number, or a copy of a tensor on another device."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    for index, rate in enumerate(rates):
        if rate.__class__ is not float:
            is_elsewhere = isinstance(rate, torch.Tensor) and not rate.is_cpu
            rates[index] = rate.detach().clone() if is_elsewhere else float(rate)
    return rates


def _number(value: Any) -> Any:
    """Return a copy of an argument; for a tensor with one number, such as a learning rate, return the number."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else copy.deepcopy(value)


def optimizer_state(optimizer: torch.optim.Optimizer, configured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state with its class and configured arguments, which a resume compares with the config."""
    return {"class": type(optimizer).__name__, "configured": configured, "state": optimizer.state_dict()}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], configured: list[dict[str, Any]]
) -> None:
    """Load what `optimizer_state` returned; arguments that the config has changed since then replace the saved ones.

    A new learning rate scales the current rate, which a scheduler may have changed.

    Raises:
        StateError: the state belongs to another optimizer or to other parameter groups, or a field has a value that is
            not allowed.
    """
    record({"configured": sequence_of(record({"params": sequence_of(optional(TEXT))}))}).check(saved, "optimizer")
    check_class(saved, "optimizer", type(optimizer).__name__)
    if [group["params"] for group in saved["configured"]] != [group["params"] for group in configured]:
        raise StateError("model.optimizer.groups puts the parameters into other groups; a resume cannot change that")
    _check_number_of_groups(optimizer, saved["state"])
    _check_optimizer_state(optimizer, saved, configured)
    optimizer.state.clear()  # frees the old state first, as a GPU may not have memory for two states
    try:
        optimizer.load_state_dict(saved["state"])
    except ValueError as error:
        raise StateError(f"model.optimizer: {error}") from error
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it has made updates; otherwise torch warns
    for group, old, new in zip(optimizer.param_groups, saved["configured"], configured, strict=False):
        for key in [key for key, value in new.items() if key in old and old[key] != value]:
            value = new[key]
            if key == "lr" and old.get("initial_lr"):  # the scheduler has changed it since
                value = _number(group["lr"]) * new["initial_lr"] / old["initial_lr"]
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _check_number_of_groups(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Check that an optimizer has as many parameter groups as a saved one, including groups that hooks added."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if isinstance(groups, list) and len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"the optimizer of the checkpoint has {len(groups)} parameter groups, but that of the config has "
            f"{len(optimizer.param_groups)}; a hook or model must add groups in its constructor, because "
            "before_training is called after the checkpoint is loaded"
        )


_OF_OTHER_SHAPES = ("Adafactor", "LBFGS", "Muon")
"""torch's optimizers whose state has tensors that have neither their parameter's shape nor a single number."""


def _check_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], configured: list[dict[str, Any]]
) -> None:
    """Check fields that torch loads unchecked and that would fail in the first update; only for torch's optimizers.

    Raises:
        FieldError: a field has a value that is not allowed.
    """
    if not is_of_torch(optimizer):
        return
    groups = [{key: value for key, value in each.items() if key != "params"} for each in configured]
    for index, group in enumerate(groups):
        like(group, may_lack=group).check(saved["configured"][index], f"optimizer.configured[{index}]")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = whole(most=len(parameters) - 1)
    of_parameters = mapping_of(mapping_of(ANYTHING), names=indices)
    in_groups = sequence_of(record({"params": sequence_of(indices)}))
    record({"state": of_parameters, "param_groups": in_groups}).check(saved["state"], "optimizer.state")
    for index, (group, found) in enumerate(zip(groups, saved["state"]["param_groups"], strict=False)):
        lacks = group.keys() - saved["configured"][index].keys()
        like(group, may_lack=lacks, same_length=True).check(found, f"optimizer.state.param_groups[{index}]")
        _check_options(optimizer, found, saved["configured"][index], f"optimizer.state.param_groups[{index}]")
    if type(optimizer).__name__ in _OF_OTHER_SHAPES:
        return
    step = Kind("a number of at least 0", lambda value: is_one_number(value) and value >= 0)
    first: Mapping[str, Any] = {}  # torch stores the same keys for every parameter
    for index, values in saved["state"]["state"].items():
        key, shape = f"optimizer.state.state.{index}", parameters[index].shape
        first = first or values
        if values and values.keys() != first.keys():
            raise FieldError(key, f"has {listed(sorted(values))}", f"like the others: {listed(sorted(first))}")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) is not isinstance(first[name], torch.Tensor):
                raise FieldError(f"{key}.{name}", f"is {shown(value)}", f"like the others: {shown(first[name])}")
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != shape:
                wanted = f"of the shape of its parameter, {tuple(shape)}"
                raise FieldError(f"{key}.{name}", f"is {shown(value)}", wanted)
            if name == "step":
                step.check(value, f"{key}.step")


def _check_options(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], configured: Mapping[str, Any], key: str
) -> None:
    """Check that an optimizer accepts the arguments of a saved group, and that its switches are as configured."""
    for name, value in configured.items():
        if (value is None or isinstance(value, bool)) and group[name] is not value:
            raise FieldError(f"{key}.{name}", f"is {shown(group[name])}", f"{value}, as configured")
    parameters = inspect.signature(type(optimizer)).parameters.keys() & group.keys() - {"params", "lr"}
    try:
        type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **{name: group[name] for name in parameters})
    except Exception as error:
        refused = f"has an argument that {type(optimizer).__name__} refuses ({error})"
        raise FieldError(key, refused, "a group of accepted arguments") from error


def check_class(saved: Mapping[str, Any], key: str, kind: str) -> None:
    """Check that a saved optimizer or scheduler has the class that the config has now.

    Raises:
        StateError: the classes differ.
    """
    if saved["class"] != kind:
        raise StateError(f"model.{key} is {kind}, but was {saved['class']}; a resume cannot change it")


def like(own: Any, may_lack: Collection[str] = (), *, same_length: bool = False) -> Kind:
    """Return the kind of values that a saved state may have in place of a value.

    Args:
        own: the value.
        may_lack: if the value is a mapping, the keys that may be missing.
        same_length: whether lists must have the same length.
    """
    if own is None:
        return ANYTHING
    if isinstance(own, bool):
        return optional(FLAG)
    if isinstance(own, int | float) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        return Kind("a number", is_one_number)
    if isinstance(own, torch.Tensor):
        return Kind("a tensor", lambda value: isinstance(value, torch.Tensor))
    if isinstance(own, str):
        return TEXT
    if isinstance(own, Mapping) and all(isinstance(name, str) for name in own):
        return record({name: like(each, same_length=same_length) for name, each in own.items()}, may_lack)
    if isinstance(own, list | tuple):
        parts = own[0] if own else None
        entries = sequence_of(mapping_of(ANYTHING) if isinstance(parts, Mapping) else like(parts))
        if not same_length:
            return entries
        allowed = f"a list of {len(own)} entries"
        return Kind(allowed, lambda value: entries.fits(value) and len(value) == len(own), entries.look_inside)
    return Kind(f"a {type(own).__name__}", lambda value: isinstance(value, type(own)))


def is_one_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor with one number."""
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_tensor or (type(value) is float or (type(value) is int and abs(value) < 2**63))


def is_of_torch(value: Any) -> bool:
    """Return whether the class of a value is one of torch's own."""
    return type(value).__module__.partition(".")[0] == "torch"


def is_raised_by_torch(error: BaseException) -> bool:
    """Return whether the code that raised an error is torch's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "torch"
