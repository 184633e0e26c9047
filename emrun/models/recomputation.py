"""`recompute`: activations of parts of a module are computed again for the gradients, which saves memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from emrun.base.arguments import check_keys
from emrun.base.encoding import digest
from emrun.base.errors import ArgumentError
from emrun.base.patterns import check_matches, patterns

_KEY = "recompute"
_OF_INSTANCE = "_forward_before_recompute"  # the attribute of a part whose forward was set on the instance
_IS_CHECKED = "_keeps_buffers"  # the attribute of a part whose first forward has changed no buffer


def recompute(module: Module, value: object) -> list[str]:
    """Make the parts of a module that match compute their activations again, instead of keeping them for the gradients.

    This is `torch.utils.checkpoint`. Of parts within each other, only the outermost ones do so. Evaluations are not
    affected, and the names of the module's tensors stay.

    Args:
        module: the module.
        value: the argument: a regular expression or a list of them (`re.search`), or `{match: ...}`.

    Returns:
        The names of these parts.

    Raises:
        ArgumentError: the argument is wrong, or a pattern matches no part that has a forward.
    """
    argument = _KEY
    if isinstance(value, Mapping):
        check_keys(_KEY, value, ["match"])
        value = value.get("match")
        argument = f"{_KEY}.match"
    matching = matching_parts(module, argument, value)
    chosen = {
        name: part for name, part in matching.items() if not any(name.startswith(f"{outer}.") for outer in matching)
    }
    before = recomputed(module)  # by another model with the same module
    for part in [part for part in chosen.values() if part not in before]:
        part.__dict__[_OF_INSTANCE] = part.__dict__.get("forward")  # which the user has set
        _replace_forward(part, MethodType(_forward, part))  # which a deep copy binds to its copy
    return list(chosen)


def matching_parts(module: Module, argument: str, value: object) -> dict[str, Module]:
    """Return name -> part, of the parts of a module that have a forward and match; a part after those that it is in.

    Args:
        module: the module.
        argument: the name of the argument, for messages.
        value: a regular expression or a list of them (`re.search`).

    Raises:
        ArgumentError: the value is something else, or a pattern matches no such part.
    """
    expressions = patterns(argument, value)
    if not expressions:
        raise ArgumentError(argument, "a regular expression is missing that matches names of parts of the module")
    parts = {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if name and ("forward" in part.__dict__ or type(part).forward is not Module.forward)
    }
    check_matches(argument, expressions, parts, f"the parts of {type(module).__name__},")
    return {name: part for name, part in parts.items() if any(pattern.search(name) for pattern in expressions)}


def recomputed(module: Module) -> list[Module]:
    """Return the parts of a module that compute their activations again."""
    return [part for part in module.modules() if getattr(part.__dict__.get("forward"), "__func__", None) is _forward]


@contextmanager
def keeps_activations(module: Module) -> Iterator[None]:
    """Let these parts keep their activations in the block."""
    parts = recomputed(module)
    for part in parts:
        _replace_forward(part, _forward_before(part))
    try:
        yield
    finally:
        for part in parts:
            _replace_forward(part, MethodType(_forward, part))


def _replace_forward(part: Module, forward: Callable[..., Any]) -> None:
    part.forward = forward


def _forward(self: Module, *arguments: Any, **keywords: Any) -> Any:
    """Call the forward of a part; its activations are computed again for the gradients.

    Raises:
        ArgumentError: the first such forward has changed a buffer, which the second computation would change again.
    """
    forward = _forward_before(self)
    if not (self.training and torch.is_grad_enabled()):
        return forward(*arguments, **keywords)
    is_checked = torch.compiler.is_compiling() or _IS_CHECKED in self.__dict__  # what is compiled changes buffers once
    before = {} if is_checked else _buffers(self)
    outputs = checkpoint(forward, *arguments, use_reentrant=False, **keywords)
    if not is_checked:
        now = _buffers(self)
        for name in [name for name in now if now[name] != before.get(name)]:
            raise ArgumentError(
                _KEY,
                f"the forward of {type(self).__name__} changes its buffer {name!r}, and would change it once more"
                " when it is computed again; match parts without it",
            )
        self.__dict__[_IS_CHECKED] = True
    return outputs


def _forward_before(part: Module) -> Any:
    return part.__dict__[_OF_INSTANCE] or partial(type(part).forward, part)


def _buffers(part: Module) -> dict[str, str]:
    """Return name of a buffer -> a checksum; BatchNorm changes some without a new version of the tensor."""
    return {name: digest(buffer) for name, buffer in part.named_buffers()}
