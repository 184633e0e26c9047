"""The state of an optimizer in a checkpoint: how it is made, checked and loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from emrun.base.encoding import digest
from emrun.base.errors import EmrunError, StateError
from emrun.base.fields import FieldError
from emrun.base.types import State, Values
from emrun.models.optimizers.bare_step import mark_as_stepped
from emrun.models.optimizers.groups import Groups
from emrun.models.optimizers.parameters import names_of, parameters_of
from emrun.ranks.pieces import in_pieces_like, is_in_pieces, rows_of
from emrun.storage.checkpoints.shards import Stored, whole_of
from emrun.storage.checkpoints.state_file import read_back


def configured_arguments(module: Module, optimizer: Optimizer) -> Groups:
    """Return the arguments of each parameter group as the config sets them, with the names of its parameters.

    Args:
        module: the module to train.
        optimizer: a new optimizer, whose scheduler is built already: some schedulers store arguments in the groups.
    """
    names = names_of(module)
    return [
        {key: [names.get(id(p)) for p in value] if key == "params" else _number(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """Return a copy of an argument; for a tensor with one number, such as a learning rate, return the number."""
    return value.item() if (isinstance(value, Tensor) and value.numel() == 1) else copy.deepcopy(value)


def optimizer_state(optimizer: Optimizer, configured: list[State]) -> State:
    """Return an optimizer's state with its class and configured arguments, which a resume compares with the config.

    Of tensors that lie on several ranks, it has the `Rows` of this one.
    """
    state = optimizer.state_dict()
    return {
        "class": type(optimizer).__name__,
        "configured": configured,
        "dtypes": _dtypes(optimizer),
        "state": tree_map(rows_of, state) if any(map(is_in_pieces, parameters_of(optimizer))) else state,
    }


def load_optimizer_state(optimizer: Optimizer, saved: Values, configured: Groups) -> None:
    """Load what `optimizer_state` returned; arguments that the config has changed since then replace the saved ones.

    A new learning rate scales the current rate, which a scheduler may have changed.

    Raises:
        StateError: the state belongs to another optimizer or to other parameter groups, or the optimizer refuses it.
    """
    check_class(saved, "optimizer", type(optimizer).__name__)
    if [group["params"] for group in saved["configured"]] != [group["params"] for group in configured]:
        raise StateError("model.optimizer.groups puts the parameters into other groups; a resume cannot change that")
    optimizer.state.clear()  # frees the old state first, as a GPU may not have memory for two states
    state = _sharded_as_parameters(optimizer, saved["state"])
    _load(optimizer, state)
    if saved["dtypes"] == _dtypes(optimizer):
        _undo_casts(optimizer, state)
    mark_as_stepped(optimizer)
    for group, old, new in zip(optimizer.param_groups, saved["configured"], configured, strict=False):
        for key in [key for key, value in new.items() if key in old and not equal(old[key], value)]:
            value = new[key]
            if key == "lr" and old.get("initial_lr"):  # the scheduler has changed it since
                value = _number(group["lr"]) * new["initial_lr"] / old["initial_lr"]
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _load(optimizer: Optimizer, state: Any) -> None:
    """Load a state into an optimizer; say what differs and what to do if the optimizer refuses it."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if isinstance(groups, list) and len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"the optimizer of the checkpoint has {len(groups)} parameter groups, but that of the config has "
            f"{len(optimizer.param_groups)}; a hook or model must add groups in its constructor, because "
            "before_training is called after the checkpoint is loaded"
        )
    with refusals("optimizer", optimizer):
        optimizer.load_state_dict(state)


def _sharded_as_parameters(optimizer: Optimizer, state: Any) -> Any:
    """Return a state in which the tensors of the shape of a sharded parameter are sharded as it is, others whole."""
    parameters = parameters_of(optimizer)
    if not any(map(is_in_pieces, parameters)):
        return tree_map(whole_of, state)
    by_index = dict(zip(_indices(state), parameters, strict=False))
    states = {
        index: tree_map_only((Tensor, Stored), partial(_like, by_index[index]), values)
        for index, values in state["state"].items()
    }
    return {**state, "state": states}


def _like(parameter: Tensor, tensor: Any) -> Any:
    """Return a tensor sharded as a parameter if it has the shape of the parameter, otherwise whole."""
    return in_pieces_like(tensor, parameter) if tensor.shape == parameter.shape else whole_of(tensor)


def _indices(state: Values) -> list[int]:
    """Return what the state of an optimizer has for its parameters, in their order."""
    return [index for group in state["param_groups"] for index in group["params"]]


def _dtypes(optimizer: Optimizer) -> list[str]:
    return [str(parameter.dtype) for parameter in parameters_of(optimizer)]


def _undo_casts(optimizer: Optimizer, state: Values) -> None:
    """Undo that torch has cast a loaded state to the dtypes of the parameters, which loses digits, and cast strings."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for index, parameter in zip(_indices(state), parameters_of(optimizer), strict=True):
        of_parameter = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(index, {}).items():
            with suppress(KeyError, ValueError):  # the optimizer has given it another structure
                of_parameter[name] = tree_map(_uncast, of_parameter[name], value)


def _uncast(cast: Any, value: Any) -> Any:
    if isinstance(cast, Tensor):
        return value.to(cast.device) if (isinstance(value, Tensor) and value.dtype != cast.dtype) else cast
    return value


@contextmanager
def refusals(key: str, loader: Any) -> Iterator[None]:
    """Say that an optimizer or a scheduler refuses a state, whatever error it raises."""
    try:
        yield
    except (EmrunError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise FieldError(
            key,
            f"is refused by {type(loader).__name__} ({type(error).__name__}: {error})",
            "the state of the same model, arguments and versions of packages",
        ) from error


def on_shapes(optimizer: Optimizer) -> Optimizer | None:
    """Return an optimizer with the same groups and no state, whose parameters have shapes but no memory.

    Returns:
        The optimizer; None if the class has a `load_state_dict` of its own, which may need more than the shapes.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return None
    empty: Optimizer = object.__new__(type(optimizer))
    groups = [{**group, "params": list(map(_shape_of, group["params"]))} for group in optimizer.param_groups]
    vars(empty).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    return empty


def check_loadable(optimizer: Optimizer, empty: Optimizer | None) -> None:
    """Check that the state can be saved and read back, and that the optimizer of a resume does not refuse it.

    Args:
        optimizer: the optimizer.
        empty: what `on_shapes` returned at the time when a resume would load the state.

    Raises:
        StateError: a resume could not load the state.
    """
    state = read_back(tree_map_only(Tensor, _shape_of, optimizer.state_dict()), "its state")
    if empty is not None:
        check_class({"class": type(optimizer).__name__}, "optimizer", type(empty).__name__)
        _load(empty, state)


def _shape_of(tensor: Tensor) -> Tensor:
    """Return zeros of the same shape and dtype, in the memory of a single number."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def check_class(saved: Values, key: str, kind: str) -> None:
    """Check that a saved optimizer or scheduler has the class that the config has now.

    Raises:
        StateError: the classes differ.
    """
    if saved["class"] != kind:
        raise StateError(f"model.{key} is {kind}, but was {saved['class']}; a resume cannot change it")


def equal(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal, which may be tensors or contain some."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # of tensors with several numbers
        return digest(one) == digest(other)
