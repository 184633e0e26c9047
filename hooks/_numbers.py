"""Numbers of a module, its optimizers and its losses, by paths such as `module.dropout.p`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from emrun.base.errors import ArgumentError
from emrun.base.wording import did_you_mean, listed

_ROOTS = ("module", "optimizer", "loss")
_RATES = ("lr", "initial_lr")
_MOST = 12  # names in a message


@dataclass(frozen=True, slots=True)
class Number:
    """A place with a number.

    Args:
        path: the path, for messages.
        owner: the object with the attribute, or the mapping with the key.
        key: the name of the attribute, or the key.
        index: the place in a tuple or list that `owner` has there; None if it has the number itself.
        is_of_training: whether evaluations do not read the number, or get it from the checkpoint.
    """

    path: str
    owner: Any
    key: str
    index: int | None
    is_of_training: bool

    @property
    def place(self) -> tuple[int, str, int | None]:
        """Identifies the place."""
        return id(self.owner), self.key, self.index

    def read(self) -> float:
        """Return the number."""
        value = _entry(self.owner, self.key)
        return float(value if self.index is None else value[self.index])

    def write(self, number: float) -> None:
        """Set the number; a tensor is filled in place."""
        value = _entry(self.owner, self.key)
        present = value if self.index is None else value[self.index]
        if isinstance(present, torch.Tensor):
            with torch.no_grad():
                present.fill_(number)
            return
        new: Any = number
        if self.index is not None:
            new = type(value)(number if index == self.index else each for index, each in enumerate(value))
        if isinstance(self.owner, dict):
            self.owner[self.key] = new
        else:
            setattr(self.owner, self.key, new)


def find_numbers(argument: str, path: str, model: Any) -> list[Number]:
    """Return the places of a path; `*` in a path stands for all names that lead to a number.

    Args:
        argument: the name of the argument with the path, for messages.
        path: begins with `module`, `optimizer` or `loss`; with several optimizers or losses, their name follows. All
            parameter groups of an optimizer are meant.
        model: a `TorchModel`; one that is not lazy, for a path of an optimizer.

    Raises:
        ArgumentError: there is no such place, it has no number, or the number is a learning rate.
    """

    def wrong(message: str) -> ArgumentError:
        return ArgumentError(argument, f"{path!r}: {message}")

    root, *parts = path.split(".")
    if root not in _ROOTS or not all(parts) or not parts:
        hint = did_you_mean(root, _ROOTS) if root not in _ROOTS else ""
        raise wrong(f"write a path of names below {listed(list(_ROOTS))}, such as optimizer.weight_decay{hint}")
    if root == "module":
        return _below(model.module, parts, root, wrong)
    named: dict[str, Any] = dict(model.optimizers if root == "optimizer" else model.loss_terms)
    if not named:
        raise wrong(f"there is no {root}" + " in model.loss; forward calculates it" * (root == "loss"))
    is_one = list(named) == [root]
    names = list(named) if is_one or parts[0] == "*" else parts[:1]
    if not is_one:
        root, parts = f"{root}.{parts[0]}", parts[1:]
    found: list[Number] = []
    for name in names:
        if name not in named:
            raise wrong(
                f"there is no {path.partition('.')[0]} {name!r}{did_you_mean(name, named)}{_there(list(named))}"
            )
        if not parts:
            raise wrong(f"add the name of a number, such as {root}.{'weight_decay' if path[0] == 'o' else 'scale'}")
        if path.startswith("optimizer"):
            if parts[0] in _RATES:
                raise wrong("model.scheduler sets the learning rate, e.g. scheduler: {class: Cosine, warmup: 5%}")
            for group in named[name].param_groups:
                own = {key: value for key, value in group.items() if key not in ("params", *_RATES)}
                below = _below(own, parts, root, wrong)  # in a copy of the group
                found += [replace(each, owner=group, is_of_training=True) for each in below]
        elif parts == ["scale"] and not is_one:
            found.append(Number(f"{root}.scale", named[name], "scale", None, False))
        else:
            found += _below(named[name].function, parts, root, wrong)
    return found


def _below(owner: Any, parts: list[str], above: str, wrong: Callable[[str], ArgumentError]) -> list[Number]:
    """Return the numbers at a path below an object."""
    part, rest = parts[0], parts[1:]
    if part == "*":
        found: list[Number] = []
        for name in _names(owner):
            try:
                found += _below(owner, [name, *rest], above, wrong)
            except ArgumentError:
                continue
        if not found:
            raise wrong(f"nothing below {above} has a number {'.'.join(rest) or part}")
        return list({each.place: each for each in found}.values())
    try:
        value = _entry(owner, part)
    except (AttributeError, KeyError) as error:
        names = _names(owner)
        raise wrong(f"{above} has no {part!r}{did_you_mean(part, names)}{_there(names)}") from error
    here = f"{above}.{part}"
    if isinstance(value, tuple | list) and len(rest) == 1:
        if not rest[0].isdecimal() or int(rest[0]) >= len(value):
            raise wrong(f"{here} has the indices 0 to {len(value) - 1}, not {rest[0]!r}")
        _check(value[int(rest[0])], f"{here}.{rest[0]}", wrong)
        return [Number(f"{here}.{rest[0]}", owner, part, int(rest[0]), False)]
    if rest:
        return _below(value, rest, here, wrong)
    _check(value, here, wrong)
    number = Number(here, owner, part, None, isinstance(value, torch.Tensor))
    try:
        number.write(number.read())
    except AttributeError as error:
        raise wrong(f"{here} cannot be set: {error}") from error
    return [number]


def _check(value: Any, path: str, wrong: Callable[[str], ArgumentError]) -> None:
    """Check that a value is a number that may be set."""
    if isinstance(value, torch.nn.Parameter):
        raise wrong(f"{path} is a parameter, which the optimizer trains; make it a buffer or an attribute")
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or torch.nn.parameter.is_lazy(value) or value.numel() != 1:
            raise wrong(f"{path} is a tensor of {value.dtype}; only a floating-point tensor of one number can be set")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = f"a {type(value).__name__}"
        below = _there(_names(value)) if isinstance(value, torch.nn.Module) else ""
        shown = repr(value) if isinstance(value, str | bool | None) else kind
        raise wrong(f"{path} is {shown}, not a number{below}")
    if not math.isfinite(value):
        raise wrong(f"{path} is {value}, which is not a finite number")


def _entry(owner: Any, key: str) -> Any:
    return owner[key] if isinstance(owner, dict) else getattr(owner, key)


def _names(owner: Any) -> list[str]:
    """Return the names that a path may have below an object: the parts of a module before its attributes."""
    if isinstance(owner, dict):
        return [each for each in owner if isinstance(each, str)]
    names = [*getattr(owner, "_modules", ()), *getattr(owner, "_buffers", ()), *getattr(owner, "__dict__", ())]
    return [each for each in names if not each.startswith("_") and each != "training"]


def _there(names: list[str]) -> str:
    return f"; there is {listed(names[:_MOST])}{', ...' * (len(names) > _MOST)}" if names else ""
