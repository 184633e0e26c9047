"""`strategy: {shard: REGEX}`: each rank has some rows of each weight, and gets the others while a part needs them.

torch's `fully_shard` does the work.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Required, TypedDict

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from emrun.base.arguments import check_keys
from emrun.base.errors import ArgumentError
from emrun.base.patterns import Match
from emrun.base.wording import counted
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.recomputation import matching_parts
from emrun.models.weights.over_ranks import broadcast
from emrun.models.weights.saving import tensors_of
from emrun.ranks.group import Ranks
from emrun.ranks.pieces import is_in_pieces

_LOG = logging.getLogger(__name__)

KEY = "strategy.shard"
_OF_MATRICES = ("Adafactor", "Muon")  # optimizers of torch that calculate with whole weights


class StrategyForm(TypedDict, total=False):
    """How several ranks share the work: `shard` is required."""

    shard: Required[Match]


class Sharding:
    """Divides the weights of a module among the ranks, by rows. In one process, the module stays whole.

    The weights of each part that matches are together: all ranks exchange them before its forward and its backward
    pass, and free them afterwards. The rest of the module is another such part. Gradients are added up over the ranks
    in each backward pass.

    Args:
        module: the module, on its device.
        value: the argument `strategy`.
        ranks: the ranks. Their weights become those of rank 0 first.
        is_alone: returns whether a hook is called on this rank only.

    Raises:
        ArgumentError: the argument is wrong, or the module cannot be divided in this way.
    """

    def __init__(
        self, module: Module, value: object, ranks: Ranks, is_alone: Callable[[], bool] = lambda: False
    ) -> None:
        self.given: set[str] = set()
        """The names of the parameters for which this rank has calculated a gradient; the step clears them."""
        self._is_alone = is_alone
        self._noted: dict[int, Parameter] = {}
        if not isinstance(value, Mapping) or not value:
            raise ArgumentError("strategy", f"{value!r} is not a mapping such as {{shard: '^blocks\\.\\d+$'}}")
        check_keys("strategy", value, ["shard"])
        parts: dict[int, tuple[str, Module]] = {}
        for name, part in matching_parts(module, KEY, value["shard"]).items():
            parts.setdefault(id(part), (name, part))  # a part may have several names
        self._check(module, {key: name for key, (name, _) in parts.items()})
        self._module = module
        self._parts = [name for name, _ in parts.values()]
        if ranks.several:
            _LOG.info(
                "strategy: %s of %s, and the rest of it, are sharded over %d ranks",
                counted(len(parts), "part"),
                type(module).__name__,
                ranks.size,
            )
            self._divide(module, [*reversed(parts.values()), ("", module)], ranks)
        else:  # `emrun check --nproc` calls hooks as several ranks do
            module.register_forward_pre_hook(self._refuse_alone)

    def __deepcopy__(self, memo: object) -> Sharding:
        """Return this object, for a copy of the module, of whose hooks it is."""
        return self

    def _check(self, module: Module, parts: Mapping[int, str]) -> None:
        """Check that each parameter is of one part, and that torch can divide it.

        Args:
            module: the module.
            parts: id of a part -> its name.
        """
        owners: dict[int, tuple[str, str]] = {}  # id of a parameter -> the part that it is of, its name
        dtypes: dict[str, tuple[torch.dtype, str]] = {}
        inside: dict[str, str] = {}  # path -> the part that it is of
        for path, part in module.named_modules(remove_duplicate=False):
            owner = inside[path] = parts.get(id(part), inside.get(path.rpartition(".")[0], ""))
            for name, parameter in part.named_parameters(path, recurse=False, remove_duplicate=False):
                before, first = owners.setdefault(id(parameter), (owner, name))
                if before != owner:
                    where = [f"in {each!r}" if each else "in no part that matches" for each in (before, owner)]
                    raise ArgumentError(
                        KEY,
                        f"{first!r} ({where[0]}) and {name!r} ({where[1]}) are one parameter, which cannot be in two "
                        "shards; match a part that has both, or neither",
                    )
                if not parameter.ndim or not parameter.is_contiguous():
                    what = "not contiguous" if parameter.ndim else "a scalar; give it the shape (1,)"
                    raise ArgumentError(KEY, f"{name!r} cannot be sharded: it is {what}")
                dtype, other = dtypes.setdefault(owner, (parameter.dtype, name))
                if dtype != parameter.dtype:
                    raise ArgumentError(
                        KEY,
                        f"{other!r} is {dtype}, but {name!r} is {parameter.dtype}"
                        ": a shard has parameters of one dtype; match a part with one only",
                    )
        if not owners:
            raise ArgumentError(KEY, f"{type(module).__name__} has no parameters to shard; remove strategy")

    def _divide(self, module: Module, parts: Sequence[tuple[str, Module]], ranks: Ranks) -> None:
        """Divide the parts, each after those within it."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ArgumentError(
                KEY, f"torch {torch.__version__} cannot sum the gradients of shards; install a newer torch"
            )
        broadcast(tensors_of(module), ranks)
        mesh = init_device_mesh(next(module.parameters()).device.type, (ranks.size,))
        for name, part in parts:
            shard: Any = fully_shard(part, mesh=mesh, reshard_after_forward=True)
            shard.set_force_sum_reduction_for_comms(True)  # the losses are weighted, and a mean would divide them
            shard.set_gradient_divide_factor(1.0)
            part.register_forward_pre_hook(self._refuse_alone, prepend=True)
            part.register_forward_pre_hook(partial(self._note, name))
            part.register_forward_hook(partial(self._check_kept, name), prepend=True)
        module.register_forward_pre_hook(_check_divided, prepend=True)
        root = f"FSDP2-wrapped module .{type(module).__name__}. returned a view"  # nothing changes outputs in place
        warnings.filterwarnings("ignore", message=root)
        shard.set_reduce_scatter_unused_params(True)  # a rank may have no gradient of a parameter

    def memory_of_rank(self, count: int, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
        """Return what rank 0 of several needs, which has most rows: what -> bytes; the module is whole and trained.

        Args:
            count: the number of ranks, among which the rows of each weight are divided.
            optimizers: those of the module.
        """
        parameters = dict(self._module.named_parameters())
        states = [(each, value) for one in optimizers for each, state in one.state.items() for value in state.values()]
        own = dict.fromkeys(["", *self._parts], 0)  # bytes of the parameters of a part which are in no part within it
        for name, each in parameters.items():
            own[max((part for part in own if not part or name.startswith(f"{part}.")), key=len)] += each.nbytes
        together = [
            sum(size for outer, size in own.items() if not outer or f"{part}.".startswith(f"{outer}.")) for part in own
        ]

        def rows_of(tensor: Tensor) -> int:
            return tensor.nbytes // len(tensor) * -(-len(tensor) // count) if tensor.numel() else 0

        return {
            "weights": sum(map(rows_of, parameters.values())),
            "buffers": sum(each.nbytes for each in self._module.buffers()),
            "gradients": sum(rows_of(each.grad) for each in parameters.values() if each.grad is not None),
            "optimizer": sum(
                rows_of(value) if value.shape == each.shape else value.nbytes
                for each, value in states
                if isinstance(value, Tensor)
            ),
            "weights of a part and of the rest, whole": max(together),
        }

    def _refuse_alone(self, *_: Any) -> None:
        """Refuse a forward pass that the other ranks do not make.

        Raises:
            RuntimeError: a hook that only this rank calls runs the module.
        """
        if self._is_alone():
            raise RuntimeError(
                "a hook of rank 0 runs the model, whose weights are sharded over all ranks (model.strategy): give the "
                "hook `every_rank = True`, so that all ranks run the model together"
            )

    def _new(self, path: str, part: Module) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of a part, whole now and with a gradient, that are not noted yet: name, itself."""
        if not torch.is_grad_enabled():
            return
        for name, each in part.named_parameters(path):
            if each.requires_grad and id(each) not in self._noted and not is_in_pieces(each):
                yield name, each

    def _note(self, path: str, part: Module, *_: Any) -> None:
        """Note from now on which parameters of a part get a gradient."""
        for name, each in self._new(path, part):
            self._noted[id(each)] = each
            each.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: self.given.add(name)
            )

    def _check_kept(self, path: str, part: Module, *_: Any) -> None:
        """Check that a part has the parameters with which its forward pass has begun."""
        if (found := next(self._new(path, part), None)) is not None:
            raise _is_new(found[0])


def _check_divided(module: Module, *_: Any) -> None:
    """Check that all parameters of a module are divided, before it runs."""
    for name, each in module.named_parameters():
        if not is_in_pieces(each):
            raise _is_new(name)


def _is_new(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name!r} is a new parameter, which the module or a hook has added or put in place of another since "
        "model.strategy has divided the weights: make all parameters in __init__, and change their values in place"
    )


def check_by_rows(members: Sequence[ScheduledOptimizer]) -> None:
    """Check that the optimizers of a sharded model can update some rows of a weight without the others.

    Raises:
        ArgumentError: one of them cannot, or has other weights for evaluations.
    """
    for each in members:
        kind = type(each.optimizer).__name__
        has = "needs whole weights" if kind in _OF_MATRICES else "has other weights for evaluations"
        if kind in _OF_MATRICES or each.has_modes:
            raise ArgumentError("strategy", f"cannot be used with {kind}, which {has}, yet; take another optimizer")
