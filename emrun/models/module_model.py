"""A model that runs a `torch.nn.Module` on batches: inputs, forward, outputs, and what is saved of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from emrun.base.encoding import decode, random_state
from emrun.base.errors import ArgumentError, StateError
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.base.types import Batch, Prefetch
from emrun.base.wording import listed
from emrun.hook import Loop
from emrun.model import AbstractModel
from emrun.models.alike import copy_from_first
from emrun.models.compilation import Compilation
from emrun.models.frozen_parts import FrozenParts
from emrun.models.inputs import InputNames, Inputs, InputsForm
from emrun.models.laziness import end_laziness, give_shapes, modes, set_modes, uninitialised
from emrun.models.memory_format import MemoryFormat
from emrun.models.optimizers import Optimizers
from emrun.models.outputs import Outputs
from emrun.models.precision import TF32, Autocast, Precision, in_float32
from emrun.models.prefetching import Prefetcher, can_prefetch
from emrun.models.recomputation import recompute as make_recompute
from emrun.models.sharding import Sharding
from emrun.models.step.loss_scale import LossScale
from emrun.models.step.skipped_updates import NAME as SKIPPED, SkippedUpdates
from emrun.models.stream_metrics import StreamMetrics
from emrun.models.sync_batch_norm import SynchronisedBatchNorm, batch_norms, warn_of_batch_norm
from emrun.models.weights.averages import EvaluationWeights
from emrun.models.weights.batch_norm import calculated_anew
from emrun.models.weights.init_from import InitFrom
from emrun.models.weights.saving import collect_weights, extra_state, load_weights, own_memory
from emrun.ranks.group import ranks
from emrun.ranks.pieces import is_in_pieces
from emrun.ranks.shares import rows_in
from emrun.storage.checkpoints.manifest import TRAINED
from emrun.storage.checkpoints.shards import has_tensors, write_shard
from emrun.storage.checkpoints.state_file import FILE, load_state
from emrun.storage.checkpoints.weights import FILE as FILE_OF_WEIGHTS, Collected, write_apart, write_weights


class ModuleModel(AbstractModel):
    """Runs a `torch.nn.Module`, saves and loads its weights; `TorchModel` explains the arguments, and trains it.

    Raises:
        ArgumentError: an argument does not fit the module.
    """

    shares_batches = True
    _optimizers: Optimizers

    def __init__(
        self,
        module: torch.nn.Module,
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
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                "module", f"{type(module).__name__} is not a torch.nn.Module; write module: {{class: ...}}"
            )
        self.device = _find_device(device)
        self._random_of_lazy = random_state() if uninitialised(module) else None  # for its first values
        self.module = module.to(self.device)
        self.frozen_parts = FrozenParts(module)
        module.train()  # also the parts that an evaluation before the first batch would set to training mode
        own_memory(module)
        self._synchronised = SynchronisedBatchNorm(module) if sync_batch_norm else None
        if not sync_batch_norm and warn_of_batch_norm(module):
            self.least_rows = 2
        if recompute is not None:
            make_recompute(module, recompute)
        self._memory_format = MemoryFormat(memory_format) if memory_format is not None else None
        if self._memory_format is not None and self._random_of_lazy is None:
            self._memory_format.apply(module)
        self.precision = precision
        self._autocast = Autocast.of(precision, module, self.device)
        self._cast = self._autocast if type(self).forward is not ModuleModel.forward else None
        if precision == "fp16" and ranks().several:
            raise ArgumentError("precision", "fp16 does not work with several ranks yet; use bf16")
        self._scale = LossScale(self.device) if precision == "fp16" else None
        self._skipped = SkippedUpdates(self._scale)
        self._tf32 = TF32(self.device) if precision == "tf32" else None
        self._outputs = Outputs(outputs, loss, metrics, self.device, module)
        of_streams = self._outputs.of_streams
        self._main_loop: Loop | None = None
        self._evaluation_weights: EvaluationWeights | None = None
        self.restored_weights: Mapping[str, Tensor] | None = None
        """After the load of a checkpoint: the weights that evaluations used, if they are not those being trained."""
        self._restores_averages = True  # False once it is known that no hook takes them
        self._loaded_from: Path | None = None
        self._stream_metrics = StreamMetrics(of_streams, self.device) if of_streams else None
        others = self._outputs.sources()
        names = InputNames.read(module, inputs, [*others[0], *others[1]])
        self._inputs = Inputs(module, names, others, self.device, self._outputs.of_losses())
        self._prefetcher: Prefetcher | None = None
        self._tensors = self._formatted(self._inputs.tensors)
        self._call: Callable[[torch.nn.Module, Mapping[str, Tensor]], Any] = self._inputs.call
        self._compilation: Compilation | None = None
        if compile is not None and compile is not False:
            self._compilation = Compilation(compile, module, self.device)
            self._call = partial(self._compilation.call, self._inputs.call)
            self.clock = self._compilation.clock
            if self._random_of_lazy is None:
                self._compilation.begin(module)
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
            f"a lazy module ({type(self.module).__name__})": self.is_lazy,
            f"a loss that gets the module ({taken})": taken is not None,
            f"a save or a load of {type(self).__name__}": _has_own_files(self),
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
        return self._outputs.metrics

    @property
    def writes(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are computed once for each stream; fp16 adds a count."""
        return [*self._outputs.of_streams, *([SKIPPED] if self._scale is not None else [])]

    @property
    def only_in(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        """Entry of `model.metrics` -> its `streams`, if it has some."""
        return self._outputs.only_in

    def stream_values(self, stream: str) -> Mapping[str, Any]:
        """Return the metrics of a whole stream, and of a train stream the number of `skipped_updates`."""
        metrics = self._stream_metrics.values(stream) if self._stream_metrics is not None else {}
        return {**metrics, **self._skipped.values(stream)}

    def begin_alike(self) -> None:
        """Take the parameters and buffers of rank 0."""
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        whole = {name: each for name, each in tensors if not (is_lazy(each) or is_in_pieces(each))}
        copy_from_first(whole, ranks())

    def before_training(self) -> None:
        """Change the settings of torch, for TF32."""
        if self._tf32 is not None:
            self._tf32.begin()

    def after_training(self, success: bool) -> None:
        """Drop the batches that were copied ahead of time, and restore the settings of torch."""
        if self._prefetcher is not None:
            self._prefetcher.clear()
        if self._tf32 is not None:
            self._tf32.end()

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream; warn once if the module was not called compiled.

        Raises:
            ArgumentError: a metric is not a number.
        """
        if self._compilation is not None:
            self._compilation.check_use(self.module)
        if self._stream_metrics is not None:
            self._stream_metrics.end(stream_name)
        if self._evaluation_weights is not None:
            self._evaluation_weights.use(False)

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
    def losses(self) -> Mapping[str, Any]:
        """Key in the model's section -> the object that calculates a loss; checkpoints do not have these objects."""
        return self._outputs.losses

    @property
    def loss_terms(self) -> Mapping[str, Any]:
        """Name -> a loss, with its `function` and, in a sum of several, its `scale`; a single one is called `loss`."""
        return self._outputs.terms

    @property
    def is_lazy(self) -> bool:  # type: ignore[override]
        """Whether parts of the module have no shapes yet."""
        return self._random_of_lazy is not None

    def materialise(self, batch: Batch) -> None:
        """Give the lazy parts of the module their shapes and first values.

        The values are drawn as if the parts had been initialised when the module was built. The module runs on the
        batch in evaluation mode, without gradients; its other buffers and all random states are restored afterwards.

        Raises:
            ArgumentError: `forward` does not use a lazy part in an evaluation.
            StreamError: the batch does not fit the module.
        """
        if self._random_of_lazy is None:
            return
        inputs = self._inputs.tensors(batch)
        forward = partial(self._inputs.call, self.module, inputs, is_lazy=True)
        give_shapes(self.module, forward, self._random_of_lazy)
        self._end_laziness()
        self.begin_alike()

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the module's extra state, which is not in its tensors, the modes of its parts, and the metrics."""
        metrics = self._stream_metrics.state_dict() if self._stream_metrics is not None else None
        return {"extra": extra_state(self.module), "modes": modes(self.module), "stream_metrics": metrics}

    def of_rank(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the metrics of whole streams."""
        return {"stream_metrics": state["stream_metrics"]}

    def of_new_rank(self, states: Sequence[Mapping[str, Any]], *, is_first: bool) -> dict[str, Any]:
        """Return merged states of the metrics of whole streams, or empty ones."""
        found = [each["stream_metrics"] for each in states if each["stream_metrics"] is not None]
        if self._stream_metrics is None or not found:
            return {}
        return {"stream_metrics": self._stream_metrics.merged(found if is_first else found[:1], empty=not is_first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the weights that are trained, the modes of the module's parts, and the metrics."""
        if self._loaded_from is not None and has_tensors(self._loaded_from, TRAINED):
            if self._restores_averages:
                tensors = chain(self.module.named_parameters(), self.module.named_buffers())
                self.restored_weights = {name: tensor.detach().clone() for name, tensor in tensors}
            load_weights(self.module, self._loaded_from, TRAINED)
        set_modes(self.module, state["modes"])
        if self._stream_metrics is not None and state["stream_metrics"] is not None:
            self._stream_metrics.load_state_dict(state["stream_metrics"])

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StateError: the weights lie on several ranks, of which each writes its own; see `stage`.
            StorageError: the file cannot be written.
        """
        if self.is_sharded:
            raise StateError("the weights lie on several ranks (model.strategy), and are in the checkpoints only")
        with self._optimizers.mode_of_evaluations():
            for name, weights in self._collected(copied=False).items():
                write_weights(*weights, directory, name)

    def stage(self) -> Callable[[Path], Any] | None:
        """Copy the weights; return a function that writes them in any thread, None if a subclass overrides `save`.

        The function writes large frozen parameters to a file of their own; see `write_apart`. If the weights are
        sharded, it writes what this rank has of them, and returns what `write_shard` returns.
        """
        if getattr(self.save, "__func__", None) is not ModuleModel.save:
            return None
        with self._optimizers.mode_of_evaluations():
            found = self._collected(copied=True)
        if self.is_sharded:
            return partial(write_shard, found, ranks().rank)
        parameters = self.module.named_parameters(remove_duplicate=False)
        return partial(write_apart, found, [name for name, each in parameters if not each.requires_grad])

    def _collected(self, *, copied: bool) -> dict[str, Collected]:
        """Return file -> the weights of evaluations, and those of the training if they are others."""
        others, module = self._evaluation_weights, self.module
        if others is None:
            return {FILE_OF_WEIGHTS: collect_weights(module, copied=copied)}
        of_both = {
            FILE_OF_WEIGHTS: others.replaced(evaluation=True),
            TRAINED: others.replaced(evaluation=False),
        }
        return {name: collect_weights(module, copied=copied, replaced=replaced) for name, replaced in of_both.items()}

    @property
    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Name of a parameter or buffer -> the tensor that evaluations use instead; None without such weights.

        A hook sets this, for example to averages, and changes the tensors after updates. `model.safetensors` in a
        checkpoint has these weights, `training.safetensors` those that are trained.
        """
        return None if self._evaluation_weights is None else self._evaluation_weights.others

    @evaluation_weights.setter
    def evaluation_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        if weights is not None and self._optimizers.has_modes:
            message = "has other weights for evaluations already; nothing else can replace them, e.g. AverageWeights"
            raise ArgumentError("optimizer", message)
        if self._evaluation_weights is not None:
            self._evaluation_weights.use(False)
        self._evaluation_weights = None if weights is None else EvaluationWeights(self.module, weights)
        self.list_work()

    def list_work(self) -> None:
        """Note what is done before and after a batch."""

    def recompute_batch_norm(self, batches: Iterable[Batch]) -> None:
        """Calculate the running statistics of BatchNorm anew, for the weights of evaluations.

        This is `torch.optim.swa_utils.update_bn`: the module runs on the batches in training mode, without gradients,
        and the statistics become the means over the batches. Nothing else changes. After an error, and if there is no
        batch, the statistics stay as they are. The statistics of the training stay in any case.
        """
        others = self._evaluation_weights
        was_in_use = others is not None and others.in_use
        rest = iter(batches)
        first = list(islice(rest, 1))  # hooks that prepare for an evaluation have done so with the first batch
        if others is not None:
            others.use(True)
        try:
            forward = self.forward if self._cast is None else partial(self._cast.call, self.forward)
            with torch.no_grad(), calculated_anew(self.module):
                for batch in chain(first, rest):
                    forward(self._tensors(batch))
        finally:
            if others is not None:
                others.use(was_in_use)

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and the module's extra state from `state.pt`.

        Raises:
            StorageError: a file cannot be read, or does not fit this module.
        """
        for each in self._optimizers.members:
            each.forget_training()
        self.evaluation_weights = self.restored_weights = None
        self._loaded_from = directory
        load_weights(self.module, directory)
        if self.is_lazy:
            self._end_laziness()
        if extra_state(self.module):
            state = load_state(directory)
            with reading(f"{directory / FILE}", ANOTHER_CHECKPOINT):
                extra = dict(decode(state["model"]["extra"]))
            self.module.load_state_dict({**self.module.state_dict(), **extra})

    def _begin_with(self, init_from: Sequence[InitFrom]) -> dict[str, Any]:
        """Load other weights to begin with; lazy parts get their shapes from them.

        Returns:
            Where they are from, and what was loaded and what was not; see `InitFrom.load`.

        Raises:
            ArgumentError: they cannot be read, or do not fit the module.
        """
        self.load_initial = None
        loaded: dict[str, str] = {}
        found = [each.load(self.module, loaded) for each in init_from]
        if self.is_lazy and not uninitialised(self.module):
            self._end_laziness()
        if len(found) == 1:
            return found[0]
        rows = [{**row, "what": f"{i}: {row['what']}"} for i, each in enumerate(found, 1) for row in each["rows"]]
        return {"source": listed([f"{i}: {each['source']}" for i, each in enumerate(found, 1)]), "rows": rows}

    def _measure(
        self, outputs: Mapping[str, Any], inputs: Mapping[str, Tensor], train: bool, stream: str, batch: Batch
    ) -> None:
        """Add a batch to the metrics of its stream, unless a hook runs the model on a batch of its own.

        Without rows, the batch has none of this rank, but its metrics are computed with those of the others.
        """
        loop, metrics = self._main_loop, self._stream_metrics
        is_of_loop = loop is None or loop.stream_name is None or (loop.stream_name, loop.training) == (stream, train)
        if metrics is not None and is_of_loop:
            if rows_in(batch):
                metrics.add(stream, outputs, inputs)
            else:
                metrics.begin(stream)

    @property
    def _evaluates(self) -> bool:
        return self._main_loop is not None and self._main_loop.evaluating

    def _end_laziness(self) -> None:
        """Finish the initialisation of the lazy parts once the module has all shapes."""
        self._random_of_lazy = None
        end_laziness(self.module)
        own_memory(self.module)
        if self._memory_format is not None:
            self._memory_format.apply(self.module)
        if self._compilation is not None:
            self._compilation.begin(self.module)
        self._build_optimizers()
        self.list_work()

    def _build_optimizers(self) -> None:
        """Build the optimizers once all parameters have shapes."""

    def _formatted(self, tensors: Callable[[Batch], dict[str, Any]]) -> Callable[[Batch], dict[str, Any]]:
        """Return a function that also changes the memory format of what a function makes of a batch."""
        return tensors if self._memory_format is None else partial(self._memory_format.tensors, tensors)

    def _prefetch(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        if self.is_lazy or not can_prefetch(self.device):
            return None
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._inputs, self.device)
            self._tensors = self._formatted(self._prefetcher.tensors)
        return self._prefetcher.pin


def _has_own_files(model: ModuleModel) -> bool:
    """Return whether a subclass saves or loads the weights in its own way."""
    return any(getattr(type(model), name) is not getattr(ModuleModel, name) for name in ("save", "stage", "load"))


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
