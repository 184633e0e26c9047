"""A model that runs a `torch.nn.Module` on batches: inputs, forward, outputs, and what is saved of the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Prefetch, State, Values
from emrun.hook import Loop
from emrun.model import AbstractModel
from emrun.models.compilation import Compilation
from emrun.models.frozen_parts import FrozenParts
from emrun.models.inputs import InputNames, Inputs, InputsForm
from emrun.models.memory_format import MemoryFormat
from emrun.models.modes import Tensors, modes, set_modes
from emrun.models.outputs import Outputs
from emrun.models.precision import Autocast, Precision, in_float32, use_tf32
from emrun.models.prefetching import Prefetcher, can_prefetch
from emrun.models.recomputation import recompute as make_recompute
from emrun.models.sharding import Sharding
from emrun.models.step.loss_scale import LossScale
from emrun.models.step.skipped_updates import NAME as SKIPPED, SkippedUpdates
from emrun.models.stream_metrics import StreamMetrics
from emrun.models.sync_batch_norm import SynchronisedBatchNorm, batch_norms
from emrun.models.weights.over_ranks import broadcast
from emrun.models.weights.saving import extra_state, own_memory, tensors_of
from emrun.ranks.group import ranks
from emrun.ranks.pieces import is_in_pieces
from emrun.ranks.shares import rows_in

Read = Callable[[Batch], dict[str, Any]]
"""Returns source -> tensor, or a mapping or list of them."""


class ModuleModel(AbstractModel):
    """Runs a `torch.nn.Module`; `TorchModel` explains the arguments, and trains it.

    Raises:
        ArgumentError: an argument does not fit the module.
    """

    shares_batches = True
    _set_by_init = "_sharding"

    def __init__(
        self,
        module: Module,
        inputs: InputsForm | None,
        outputs: Sequence[str] | None,
        loss: Any,
        metrics: Any,
        device: str,
        precision: Precision = 32,
        *,
        compile: Any = None,
        recompute: Any = None,
        memory_format: Any = None,
        sync_batch_norm: bool = False,
        strategy: Any = None,
    ) -> None:
        if not isinstance(module, Module):
            raise ArgumentError(
                "module", f"{type(module).__name__} is not a torch.nn.Module; write module: {{class: ...}}"
            )
        self.device = _find_device(device)
        _refuse_lazy(module)
        self.module = module.to(self.device)
        self.frozen_parts = FrozenParts(module)
        module.train()  # also the parts that an evaluation before the first batch would set to training mode
        own_memory(module)
        self._synchronised = SynchronisedBatchNorm(module) if sync_batch_norm else None
        if not sync_batch_norm and ranks().several and batch_norms(module):
            self.least_rows = 2
        if recompute is not None:
            make_recompute(module, recompute)
        self._memory_format = MemoryFormat(memory_format) if memory_format is not None else None
        if self._memory_format is not None:
            self._memory_format.apply(module)
        self.precision = precision
        self._autocast = Autocast.of(precision, module, self.device)
        if precision == "fp16" and ranks().several:
            raise ArgumentError("precision", "fp16 does not work with several ranks yet; use bf16")
        self._skipped = SkippedUpdates(LossScale(self.device) if precision == "fp16" else None)
        self._without_tf32: str | None = None  # the setting of torch, while another one is in use
        self._outputs = Outputs(outputs, loss, metrics, self.device, module)
        of_streams = self._outputs.of_streams
        self._main_loop: Loop | None = None
        self._stream_metrics = StreamMetrics(of_streams, self.device) if of_streams else None
        others = self._outputs.sources()
        names = InputNames.read(module, inputs, [*others[0], *others[1]])
        of_losses = {name for term in self._outputs.terms.values() for name in term.inputs}
        self._inputs = Inputs(module, names, others, self.device, of_losses)
        self._prefetcher: Prefetcher | None = None
        self._tensors = self._formatted(self._inputs.tensors)
        self._call: Callable[[Module, Tensors], Any] = self._inputs.passing.call
        self._compilation: Compilation | None = None
        if compile is not None and compile is not False:
            self._compilation = Compilation(compile, module, self.device)
            self._call = partial(self._compilation.call, self._inputs.passing.call)
        self._sharding = None if strategy is None else self._shard(strategy)

    def _shard(self, strategy: object) -> Sharding:
        """Divide the module among the ranks.

        Raises:
            ArgumentError: something else is asked for that does not work with `strategy` yet; see also `Sharding`.
        """
        if self._synchronised is None and (norm := next(iter(batch_norms(self.module)), None)) is not None:
            message = f"{norm or 'the module'} (BatchNorm) needs the statistics of all ranks; set model.sync_batch_norm"
            raise ArgumentError("strategy", message)
        taken = next((each.key for each in self._outputs.terms.values() if each.takes_module), None)
        refused = {
            "compile": self._compilation is not None,
            "memory_format": self._memory_format is not None,
            f"a loss that gets the module ({taken})": taken is not None,
        }
        if found := next((each for each, is_there in refused.items() if is_there), None):
            raise ArgumentError("strategy", f"cannot be used with {found} yet; remove one of them")
        return Sharding(self.module, strategy, ranks(), self._is_alone)

    def _is_alone(self) -> bool:
        """Return whether a hook is called on this rank only."""
        return self._main_loop is not None and self._main_loop.is_alone

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether this rank has only some rows of each weight."""
        return self._sharding is not None and ranks().several

    @property
    def input_names(self) -> Sequence[str]:
        """Names of the sources that every batch must have."""
        return self._inputs.required

    @property
    def optional_input_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the sources that are used if a batch has them."""
        return self._inputs.optional

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the outputs, as far as they are known before the first batch."""
        return self._outputs.names

    def part_with(self, source: str) -> str:
        """Return the key of the loss or metric that needs a source, or else `forward`, for messages."""
        return self._outputs.part_with(source) or f"forward of {type(self.module).__name__}"

    @property
    def metric_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are outputs."""
        return list(self._outputs.of_batches)

    @property
    def writes(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are computed once for each stream; fp16 adds a count."""
        return [*self._outputs.of_streams, *([SKIPPED] if self._skipped.scale is not None else [])]

    @property
    def only_in(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        """Entry of `model.metrics` -> its `streams`, if it has some."""
        return self._outputs.only_in

    def stream_values(self, stream: str) -> Values:
        """Return the metrics of a whole stream, and of a train stream the number of `skipped_updates`."""
        metrics = self._stream_metrics.values(stream) if self._stream_metrics is not None else {}
        return {**metrics, **self._skipped.values(stream)}

    def begin_alike(self) -> None:
        """Take the parameters and buffers of rank 0."""
        whole = {name: each for name, each in tensors_of(self.module).items() if not is_in_pieces(each)}
        broadcast(whole, ranks())

    def before_training(self) -> None:
        """Change the setting of torch, for TF32."""
        if self.precision == "tf32" and self._without_tf32 is None:
            self._without_tf32 = use_tf32(self.device)

    def after_training(self, success: bool) -> None:
        """Drop the batches that were copied ahead of time, and restore the setting of torch."""
        if self._prefetcher is not None:
            self._prefetcher.clear()
        if self._without_tf32 is not None:
            torch.set_float32_matmul_precision(self._without_tf32)
            self._without_tf32 = None

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream.

        Raises:
            ArgumentError: a metric is not a number.
        """
        if self._stream_metrics is not None:
            self._stream_metrics.end(stream_name)

    def predict_only(self) -> None:
        """Leave out what needs a source that a batch does not have, and metrics of whole streams; see `predict`."""
        required, optional = self._outputs.sources()
        self._outputs.leave_out_missing()
        self._stream_metrics = None
        self._inputs.predict_only(self.module, [*required, *optional])

    def without_measures(self) -> None:
        """Leave out losses and metrics, and the sources that only they need."""
        self._outputs.leave_out_all()
        self._stream_metrics = None
        self._inputs.predict_only(self.module, [])

    @property
    def losses(self) -> Values:
        """Key in the model's section -> the object that calculates a loss; checkpoints do not have these objects."""
        return {term.key: term.function for term in self._outputs.terms.values()}

    def forward(self, inputs: Tensors) -> dict[str, Any]:
        """Run the module and calculate losses and metrics.

        Args:
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled. Values of 16 bits become float32.
        """
        if (autocast := self._autocast) is None:
            return self._outputs.of(self._call(self.module, inputs), inputs)
        with autocast.on():
            returned = self._call(self.module, inputs)
        with autocast.off():  # the train_step of a subclass runs with autocast as a whole
            return self._outputs.of(in_float32(returned), inputs)

    @property
    def _in_precision(self) -> Callable[[Tensors], Values]:
        """`forward`; that of a subclass runs in 16 bits as a whole."""
        if self._autocast is None or type(self).forward is ModuleModel.forward:
            return self.forward
        return partial(self._autocast.call, self.forward)

    def state_dict(self) -> State:
        """Return the module's extra state, which is not in its tensors, the modes of its parts, and the metrics."""
        metrics = self._stream_metrics.state_dict() if self._stream_metrics is not None else None
        return {"extra": extra_state(self.module), "modes": modes(self.module), "stream_metrics": metrics}

    def of_rank(self, state: Values) -> State:
        """Return the states of the metrics of whole streams."""
        return {"stream_metrics": state["stream_metrics"]}

    def of_new_rank(self, states: Sequence[Values], *, is_first: bool) -> State:
        """Return merged states of the metrics of whole streams, or empty ones."""
        found = [each["stream_metrics"] for each in states if each["stream_metrics"] is not None]
        if self._stream_metrics is None or not found:
            return {}
        return {"stream_metrics": self._stream_metrics.merged(found if is_first else found[:1], empty=not is_first)}

    def load_state_dict(self, state: State) -> None:
        """Restore the modes of the module's parts, and the metrics."""
        set_modes(self.module, state["modes"])
        if self._stream_metrics is not None and state["stream_metrics"] is not None:
            self._stream_metrics.load_state_dict(state["stream_metrics"])

    def list_work(self) -> None:
        """Note what is done before and after a batch."""

    def _measure(self, outputs: Values, inputs: Tensors, train: bool, stream: str, batch: Batch) -> None:
        """Add a batch to the metrics of its stream, unless a hook runs the model on a batch of its own.

        Without rows, the batch has none of this rank, but its metrics are computed with those of the others.
        """
        loop = self._main_loop
        metrics = self._stream_metrics
        is_of_loop = loop is None or loop.stream_name is None or (loop.stream_name, loop.training) == (stream, train)
        if metrics is not None and is_of_loop:
            if rows_in(batch):
                metrics.add(stream, outputs, inputs)
            else:
                metrics.begin(stream)

    @property
    def _evaluates(self) -> bool:
        return self._main_loop is not None and self._main_loop.evaluating

    def _formatted(self, tensors: Read) -> Read:
        """Return a function that also changes the memory format of what a function makes of a batch."""
        return tensors if self._memory_format is None else partial(self._memory_format.tensors, tensors)

    def _prefetch(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        if not can_prefetch(self.device):
            return None
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._inputs, self.device)
            self._tensors = self._formatted(self._prefetcher.tensors)
        return self._prefetcher.pin


def _refuse_lazy(module: Module) -> None:
    """Refuse a module of which a part has no shapes before its first batch.

    Raises:
        ArgumentError: it has such a part.
    """
    for name, part in module.named_modules():
        tensors = *part.parameters(recurse=False), *part.buffers(recurse=False)
        if any(map(is_lazy, tensors)):
            kind = type(part).__name__
            raise ArgumentError(
                "module",
                f"{name or 'the module'} is a {kind}, which has no shapes before its first batch; in __init__, write "
                f"{kind.removeprefix('Lazy')} with its sizes, or run the module once on zeros of the shape of a batch",
            )


def _find_device(name: str) -> torch.device:
    if name == "auto":
        kinds = (("cuda", torch.cuda.is_available), ("mps", torch.backends.mps.is_available))
        return torch.device(next((kind for kind, available in kinds if available()), "cpu"))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):
            reason = "it is not a device; write auto, cpu, mps, or cuda, cuda:1 and so on"
        raise ArgumentError("device", f"{name!r} cannot be used here: {reason}") from error
    return device
