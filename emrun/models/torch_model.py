"""TorchModel: trains and evaluates any `torch.nn.Module`; a config names its inputs, outputs, loss and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, StateError
from emrun.base.patterns import Match
from emrun.base.sources import changed, examples_of
from emrun.base.types import AtLeast, Batch, EpochData, Factory, Form, Json, Prefetch, State, Strings, Values
from emrun.base.wording import NO_OPTIMIZER
from emrun.events import warn_of_unused
from emrun.hook import Loop
from emrun.models.device import find_device, put
from emrun.models.forward_pass import ForwardPass
from emrun.models.frozen_parts import FrozenParts
from emrun.models.inputs import InputsForm
from emrun.models.memory_format import MemoryFormat
from emrun.models.modes import Tensors
from emrun.models.module_model import ModuleModel
from emrun.models.optimizers.named import Optimizers
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.outputs import Outputs
from emrun.models.precision import TF32, Autocast, Precision
from emrun.models.recomputation import recompute as make_recompute
from emrun.models.schedules.stepping import Schedule
from emrun.models.sharding import Sharding, StrategyForm, check_by_rows
from emrun.models.step.accumulated import AccumulatedStep
from emrun.models.step.choice import choose_step
from emrun.models.step.halves import compare_halves
from emrun.models.step.loss_scale import LossScale
from emrun.models.step.manual import FirstWindow, Manual, Run
from emrun.models.step.micro_batches import MicroBatches
from emrun.models.step.packs import check_packs
from emrun.models.step.sharded import ShardedSums
from emrun.models.step.size_search import advise
from emrun.models.step.skipped_updates import NAME as SKIPPED, SkippedUpdates
from emrun.models.step.summed import RankSums, SummedBatchStep, SummedStep
from emrun.models.step.training_step import Calls
from emrun.models.step.updater import Updater
from emrun.models.sync_batch_norm import SynchronisedBatchNorm, batch_norms, warn_of_batch_norm
from emrun.models.ways import Ways
from emrun.models.weights.init_from import InitFrom, InitFromForm
from emrun.models.weights.loadable import Loadable
from emrun.models.weights.module_weights import Weights, begin_with
from emrun.models.weights.over_ranks import broadcast, check_equal_on_ranks
from emrun.ranks.gather import prepare as prepare_to_gather
from emrun.ranks.group import ranks
from emrun.ranks.parts import detached as of_no_graph
from emrun.ranks.shares import rows_in
from emrun.schedule_plan import SchedulePlan

_detach = Tensor.detach

LossForm = Annotated[Factory, Form(keys=("inputs", "scale"))]
LossForms = LossForm | Mapping[str, LossForm]
MetricForms = Mapping[str, Annotated[Factory, Form(keys=("inputs", "streams"))]]
Begin = str | os.PathLike[str] | InitFromForm
OptimizerForm = Annotated[Factory, Form(keys=("groups", "no_decay", "match"), package="torch.optim", supplied=1)]
SchedulerForm = Annotated[
    Factory,
    Form(
        keys=("step_on", "metric", "warmup"),
        package="torch.optim.lr_scheduler",
        built_in="emrun.models.schedules.built_in",
        supplied=1,
        shared="optimizer",
    ),
]


class TorchModel(ModuleModel):
    """Trains and evaluates a `torch.nn.Module`.

        model:
          module: {class: my_models.ConvNet, channels: 32}
          inputs: [image]
          outputs: [logits]
          loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
          metrics:
            accuracy: {import: emrun.metrics.accuracy, inputs: [logits, label]}
          optimizer: {class: AdamW, lr: 1.0e-3}
          scheduler: {class: Cosine, warmup: 5%, final: 0.1}

    Inputs become tensors on the model's device: floating-point sources get the module's dtype, integers int64, booleans
    bool. Outputs are detached and stay on the device; nothing is copied to the host, and nothing waits for the device.

    The loss that is minimised is the mean over the examples of the batch. If there is an output `example_weight` of
    shape (B,), e.g. the number of tokens, the mean is weighted, and so are the statistics of hooks. An output
    `loss_weight` of shape (B,) weights the loss that is minimised instead, and no statistic of an example.

    Args:
        module: its `forward` returns a mapping of outputs, or values that `outputs` names. It has all shapes when it is
            built: a lazy module, such as `torch.nn.LazyLinear`, is an error.
        inputs: the sources that `forward` gets. A list is passed by name if all its names are parameters of `forward`,
            or `forward` takes `**kwargs` and the list has all that it needs, else by position; a mapping `{parameter:
            source}` is passed by name. `{parameter: {source: image, dtype:
            uint8}}` sets another dtype than stated above: a dtype of torch, or `keep` for the dtype of the source;
            `source` may be left out if it has the name of the parameter. `{source: image, scale: 255, mean: [0.485,
            0.456, 0.406], std: [0.229, 0.224, 0.225]}` divides the source by `scale`, subtracts `mean` and divides by
            `std`, on the device and in float32; `mean` and `std` are numbers, or lists with one for each entry of the
            second axis. Losses and metrics get the result, hooks the source as it is in the batch. `{boxes: {stack:
            false}}` passes a list with one entry for each example, such as pictures of several sizes, dicts of boxes,
            graphs or strings: arrays and tensors inside become tensors on the device, with their dtypes. The name may
            also be that of a source that only losses and metrics read; these get a source of strings as a list in any
            case. Default: the parameters of `forward`; those with a default value are passed if a batch has them.
        outputs: the names of the values that `forward` returns, a single value or a tuple. If `forward` returns a
            mapping: the keys to use, by default all.
        loss: an object or function that is called with `inputs`, which names outputs and sources; its result is the
            output `loss`, a scalar or of shape (B, ...). Several losses have names: `{NAME: {class, inputs, scale}}`.
            Each is an output, and `loss` is their scaled sum. `weight: [1.0, 2.0]` of a loss of torch becomes a tensor;
            `weight: balanced` makes up for classes of different sizes, with the counts of the train rows that `split`
            of the dataset keeps; their source is the second of the `inputs`. A loss with a parameter `module`, such as
            a penalty for weights, gets the module by that name, after its `inputs`, if any. Default: `forward` returns
            an output `loss`.
        metrics: name -> an object or function that is called with `inputs`, without gradients; its result is an output.
            An object with the methods `update`, `compute` and `reset`, such as those of torchmetrics, is a metric of
            the whole stream: `update` is called with the `inputs` of each batch, `compute` at the end of the stream.
            The result, a number or a mapping from names to numbers, is added to the data of the epoch. `streams:
            [valid]` calculates the metric in these streams only; others need not have its sources.
        optimizer: a class from torch.optim or a dotted path, and its arguments. `groups: [{match: REGEX, lr: 0.01}]`
            sets arguments for the parameters whose names match a regular expression, or one of a list (`re.search`);
            `groups: {import: my_models.groups}` is a function that gets the module and returns groups as torch has
            them. Parameters without a group get the defaults. `no_decay: biases_and_norms` sets `weight_decay: 0` for
            biases and layers of normalisation, except in groups with a `weight_decay`. `match: REGEX` selects the
            parameters that are trained. Several optimizers have names: `{NAME: {class, match, lr}}`. Without an
            optimizer, the model can only be evaluated.
        scheduler: a schedule of emrun and its arguments, such as `{class: Cosine, warmup: 5%, final: 0.1}`, which
            follows the length of the run. Or a class from torch.optim.lr_scheduler or a dotted path, and its arguments:
            it steps after each training epoch, or, with `step_on: update`, after each update. With `metric:
            valid/loss/mean`, each step gets that statistic of the epoch; epochs that do not evaluate its stream are
            skipped. With `warmup: 500 updates`, the rate rises first; the scheduler steps after that. Schedulers that
            contain schedulers are written in the same way: `{class: SequentialLR, schedulers: [{class: LinearLR},
            {class: CosineAnnealingLR, T_max: 20}], milestones: [5]}`. It is the schedule of every
            optimizer; with names of optimizers, each has its own: `{NAME: {class, ...}}`.
        accumulate: the number of batches of an update, its window; the last window of an epoch may be shorter. The
            update minimises the mean loss over the examples of the window, weighted by `example_weight` if there is
            that output: `accumulate: 4` with batches of 8 examples is as one batch of 32. Limits, schedules and
            intervals in updates count windows. Checkpoints, signals and the end of the run wait for the end of the
            window.
        micro_batch_size: the largest number of examples that a train step runs on at once. A larger batch is split; its
            parts make one update with the gradients of the whole batch. `auto` halves the size as long as the first
            batches do not fit into the memory, and writes it into the config of the run.
        precision: `bf16` and `fp16` run forward in bfloat16 or float16, by `torch.autocast`; the weights, the outputs,
            losses and metrics are float32. fp16 scales the loss and skips updates with gradients that are not finite.
            `tf32` lets a GPU multiply matrices in TF32. By default, 32, the settings of torch apply.
        device: a torch device; `auto` means CUDA or MPS if available, else the CPU.
        init_from: weights to begin with: a run directory (its checkpoint `best`, otherwise `latest`), a checkpoint, a
            directory with `model.safetensors`, such as transformers writes, or a file: safetensors, an index of them,
            or a state dict.
            `{path: PATH, match: REGEX, rename: {REGEX: REPLACEMENT}, on_mismatch: skip}` loads the parameters and
            buffers whose names match a regular expression, or one of a list (`re.search`), after renaming those of the
            file (`re.sub`), and skips what does not fit, which is an error by default. With a list of replacements, a
            tensor is loaded to several places. A list of paths or mappings loads from several files; none may load
            what another has loaded. A new run loads them when it begins, before the hooks are built; a resume and an
            evaluation load their checkpoint only. A model that is built in Python loads them when it is given to a
            `MainLoop`.
        compile: true, or arguments of torch.compile, such as `{dynamic: true}`: the module is compiled, in place.
        recompute: a regular expression for names of parts of the module, a list of them (`re.search`), or `{match:
            ...}`: their activations are computed again for the gradients instead of kept, which saves memory.
        memory_format: `channels_last` or `channels_last_3d`, for weights and inputs of 4 or 5 dimensions.
        sync_batch_norm: on several ranks, BatchNorm normalises with the statistics of the whole batch, not with those
            of the rows of its rank.
        strategy: `{shard: REGEX}` makes several ranks share the weights, their gradients and the states of optimizers:
            each has some rows of them. A regular expression, or a list of them (`re.search`), for names of parts of
            the module: the weights of such a part are together while it runs. One process has all.
        units: output -> the source whose unit it has, if the dataset scales the source (`normalize`). Losses get both
            as they are; metrics, hooks and predictions get both in the unit of the data.

    Attributes:
        module: the `torch.nn.Module`, on `device`.
        optimizer: the `torch.optim.Optimizer`; None without an optimizer, or if there are several.
        optimizers: name -> optimizer; an optimizer without a name is called `optimizer`.
        scheduler: the schedule of emrun, or a wrapper of torch's scheduler, which is `scheduler.scheduler`; None
            without a scheduler, or if there are several optimizers.
        schedulers: name of an optimizer -> its schedule.
        device: the `torch.device` of the module and of the tensors that it gets.
        step_outputs: output name -> value of the current batch, with gradients, in `before_update` and `after_update`;
            detached if the batch was split; None at other times, and if the `train_step` of a subclass does not set it.

    Raises:
        ArgumentError: an argument does not fit the module.
        StreamError: a batch does not fit the module; this is found before any update.
    """

    def __init__(
        self,
        module: Module,
        inputs: InputsForm | None = None,
        outputs: Strings | None = None,
        loss: LossForms | None = None,
        metrics: MetricForms | None = None,
        optimizer: OptimizerForm | Mapping[str, OptimizerForm] | None = None,
        scheduler: SchedulerForm | Mapping[str, SchedulerForm] | None = None,
        accumulate: Annotated[int, AtLeast(1)] = 1,
        micro_batch_size: Annotated[int | Literal["auto"] | None, AtLeast(1)] = None,
        precision: Precision = 32,
        device: str = "auto",
        init_from: Begin | Sequence[Begin] | None = None,
        compile: bool | Values | None = None,
        recompute: Match | Mapping[str, Match] | None = None,
        memory_format: Literal["channels_last", "channels_last_3d"] | None = None,
        sync_batch_norm: bool = False,
        strategy: StrategyForm | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        # the module
        self._check_together(micro_batch_size, sync_batch_norm, strategy)
        check_count("accumulate", accumulate, minimum=1)
        place = find_device(device)
        put(module, place)
        self.frozen_parts = FrozenParts(module)
        module.train()  # also the parts that an evaluation before the first batch would set to training mode
        self._synchronised = SynchronisedBatchNorm(module) if sync_batch_norm else None
        if not sync_batch_norm and ranks().several and batch_norms(module):
            self.least_rows = 2
        if recompute is not None:
            make_recompute(module, recompute)
        # the forward pass
        layout = None if memory_format is None else MemoryFormat(memory_format)
        if layout is not None:
            layout.apply(module)
        self.precision = precision
        autocast = Autocast.of(precision, module, place)
        if precision == "fp16" and ranks().several:
            raise ArgumentError("precision", "fp16 does not work with several ranks yet; use bf16")
        super().__init__(
            ForwardPass(module, place, inputs, Outputs(outputs, loss, metrics, place, module), autocast, layout)
        )
        self.in_units = dict(units or {})
        if compile is not None and compile is not False:
            self._forward_pass.compile(compile)
        self._tf32 = TF32(place) if precision == "tf32" else None
        self._sharding = None if strategy is None else self._sharded(strategy)
        # the optimizers and the weights
        self._skipped = SkippedUpdates(LossScale(place) if precision == "fp16" else None)
        self._optimizers = Optimizers(module, optimizer, scheduler)
        if strategy is not None:
            check_by_rows(self._optimizers.members)
        self._weights = Weights(self._forward_pass, self._optimizers)
        own = getattr(module, "weights_to_begin_with", None)
        self._loadable = Loadable(self, begins_with=init_from is not None or own is not None)
        if init_from is not None:
            self.load_initial = partial(self._begin_with, InitFrom.read_all(init_from))
        elif own is not None:
            self.load_initial = partial(self._begin_with_own, own)
        # the step
        self.iterations_per_update = accumulate
        self._stream: str | None = None  # the stream of the previous step, None at the beginning of an epoch
        self._has_trained = False  # whether this epoch has trained
        self._is_packed = False  # whether parts of an example must not see each other, and this is to be checked
        self._is_compared = False  # whether the first batch was compared with its halves
        self._forward: Run = self._forward_pass.run
        if self._overrides("forward"):
            self._forward = self.forward if autocast is None else partial(autocast.call, self.forward)
        updater = Updater(self, self._optimizers, self._skipped)
        is_single = accumulate == 1 and micro_batch_size is None
        self._step = choose_step(
            self._calls(),
            updater,
            accumulate,
            is_single=is_single,
            sums=self._sums(is_single=is_single, sends=micro_batch_size != "auto"),
        )
        self._micro_batches: MicroBatches | None = None
        if micro_batch_size is not None and isinstance(self._step, AccumulatedStep):
            self._micro_batches = MicroBatches(self._step, micro_batch_size, self._forward_pass, self._note_size)
        self._runner = self._micro_batches or self._step
        updater.list_optimizers()
        self._list_stages()

    # what the parts are built of

    def _check_together(self, micro_batch_size: object, sync_batch_norm: bool, strategy: object) -> None:
        """Refuse arguments that do not work together, or with what a subclass overrides.

        Raises:
            ArgumentError: there are such arguments.
        """
        kind = type(self).__name__
        if micro_batch_size is not None and (sync_batch_norm or strategy is not None):
            raise ArgumentError(
                "sync_batch_norm" if sync_batch_norm else "strategy",
                "cannot be used with micro_batch_size, which runs each rank on another number of parts",
            )
        if strategy is None:
            return
        if self.trains_itself:
            raise ArgumentError("strategy", f"cannot be used with a train_step or an update of {kind} yet")
        if self._overrides("save", "stage", "load"):
            raise ArgumentError("strategy", f"cannot be used with a save or a load of {kind} yet; remove one of them")

    def _sharded(self, strategy: object) -> Sharding:
        """Divide the module among the ranks.

        Raises:
            ArgumentError: something else is asked for that does not work with `strategy` yet; see also `Sharding`.
        """
        if self._synchronised is None and (norm := next(iter(batch_norms(self.module)), None)) is not None:
            raise ArgumentError(
                "strategy",
                f"{norm or 'the module'} (BatchNorm) needs the statistics of all ranks; set model.sync_batch_norm",
            )
        forward_pass = self._forward_pass
        with_module = next((term.key for term in forward_pass.outputs.terms.values() if term.takes_module), None)
        refused = {
            "compile": forward_pass.compilation,
            "memory_format": forward_pass.memory_format,
            f"a loss that gets the module ({with_module})": with_module,
        }
        for name, given in refused.items():
            if given is not None:
                raise ArgumentError("strategy", f"cannot be used with {name} yet; remove one of them")
        return Sharding(self.module, strategy, ranks(), self._is_alone)

    def _is_alone(self) -> bool:
        """Return whether a hook is called on this rank only."""
        return self._main_loop is not None and self._main_loop.is_alone

    def _calls(self) -> Calls:
        """Return what a step calls: methods of a subclass, as far as it overrides them."""
        manual = None
        if self.trains_itself:
            first_window = None
            if self._overrides("train_step"):
                first_window = FirstWindow(self, self._loadable.check, sees_updates=not self._overrides("update"))
            manual = Manual(self.train_step, self._forward_pass.autocast, first_window)
        if manual is None and not self._overrides("backward"):
            return Calls(self._forward)
        return Calls(self._forward, manual, self.backward, self._update_member)

    def _update_member(self, member: ScheduledOptimizer, loss: Tensor) -> None:
        """Make the update of an optimizer by the `update` of a subclass."""
        self.update(member.optimizer)

    def _sums(self, *, is_single: bool, sends: bool) -> RankSums | None:
        """Return what several ranks exchange in a step; None in one process.

        Args:
            is_single: whether an update has a single part, so that its sums also have the loss.
            sends: whether gradients may be sent during the backward pass; what is sent cannot be calculated again.
        """
        if not ranks().several:
            return None
        if self._sharding is not None:
            return ShardedSums(self._forward_pass, ranks(), self._sharding, carries_loss=is_single)
        return RankSums(
            self._forward_pass,
            ranks(),
            carries_loss=is_single,
            sends=sends and not self.trains_itself,
            exchanges=self._synchronised is not None,
        )

    def _begin_with(self, init_from: Sequence[InitFrom]) -> Json:
        """Load other weights to begin with; see `AbstractModel.load_initial`."""
        self.load_initial = None
        return begin_with(self.module, init_from)

    def _begin_with_own(self, find: Callable[[], Values]) -> Json:
        """Load the weights that the module names; an error about its argument is one about `module`."""
        try:
            found = find()
        except ArgumentError as error:
            raise ArgumentError(f"module.{error.argument}", error.message) from error
        return self._begin_with(InitFrom.read_all(found))

    def _note_size(self, size: int) -> None:
        """Write a `micro_batch_size` that was found to the config of the run."""
        if self.write_setting is not None:
            self.write_setting("micro_batch_size", size)

    def _list_stages(self) -> None:
        """Note whether there is something to do before and after a batch; called when something is added or removed."""
        self._prepares = (
            self._optimizers.has_modes
            or self._synchronised is not None
            or self._weights.averages is not None
            or bool(self._forward_pass.outputs.only_in)
        )
        takes_mean = self._summed is not None and not isinstance(self._summed, SummedBatchStep)
        self._finishes = takes_mean or self._stream_metrics is not None

    def _overrides(self, *names: str) -> bool:
        """Return whether a subclass has one of these methods of its own."""
        return any(getattr(type(self), name) is not getattr(TorchModel, name) for name in names)

    # what the model tells

    @property
    def trains_itself(self) -> bool:
        """Whether a subclass has a `train_step` or an `update` of its own."""
        return self._overrides("train_step", "update")

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether this rank has only some rows of each weight."""
        return self._sharding is not None and ranks().several

    @property
    def _summed(self) -> SummedStep | None:
        return self._step if isinstance(self._step, SummedStep) else None

    @property
    def _evaluates(self) -> bool:
        return self._main_loop is not None and self._main_loop.evaluating

    @property
    def optimizer(self) -> Optimizer | None:
        """See the class."""
        return None if self._optimizers.only is None else self._optimizers.only.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizers.replace(optimizer)
        self._step.updater.list_optimizers()
        self._list_stages()

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """See the class."""
        return self._optimizers.optimizers

    @property
    def own_optimizers(self) -> Mapping[str, Optimizer]:
        """Name -> optimizer, also those that are attributes of a subclass."""
        return {
            **{name: value for name, value in vars(self).items() if isinstance(value, Optimizer)},
            **self.optimizers,
        }

    @property
    def scheduler(self) -> Schedule | None:
        """See the class."""
        return self.schedulers.get("optimizer") if self.optimizer is not None else None

    @property
    def schedulers(self) -> Mapping[str, Schedule]:
        """See the class."""
        return self._optimizers.schedulers

    @property
    def step_outputs(self) -> Values | None:
        """See the class."""
        return self._step.outputs

    @step_outputs.setter
    def step_outputs(self, outputs: Values | None) -> None:
        self._step.show(outputs)

    @property
    def is_accumulating(self) -> bool:  # type: ignore[override]
        """Whether a window has begun that the last train batch did not end."""
        return self._step.is_open

    @property
    def splits_batches(self) -> bool:
        """Whether a batch may be run in parts, see `micro_batch_size`."""
        return self._micro_batches is not None

    @property
    def is_skipping(self) -> bool:
        """Whether the current update is skipped because its gradients in float16 are not finite; in `before_update`."""
        return self._step.is_skipping

    @property
    def skipped_updates(self) -> int:  # type: ignore[override]
        """Number of updates of the run that were skipped."""
        return self._skipped.total

    @property
    def has_updated(self) -> bool | None:  # type: ignore[override]
        """Whether the last `run` with `train` has made an update, or begun one.

        None if it is not known: a subclass trains without any optimizer, or has an `update` of its own.
        """
        has_updated = self._step.updater.has_updated
        if type(self).update is TorchModel.update and (self.own_optimizers or not self.trains_itself):
            return has_updated
        return has_updated or None

    @property
    def writes(self) -> Strings:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are computed once for each stream; fp16 adds a count."""
        return [*super().writes, *([SKIPPED] if self._skipped.scale is not None else [])]

    def stream_values(self, stream: str) -> Values:
        """Return the metrics of a whole stream, and of a train stream the number of `skipped_updates`."""
        return {**super().stream_values(stream), **self._skipped.values(stream)}

    @property
    def monitors(self) -> Strings:
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        return list(dict.fromkeys(member.metric for member in self._optimizers.members if member.metric is not None))

    def step_values(self) -> Values:
        """Return the last minimised `loss`, a scalar on its device, and the `learning_rate` of each parameter group.

        The learning rates are those of the last update, or of the first one as long as there is none; in a window,
        those with which it has begun.
        """
        loss = self._step.minimised
        only = self._optimizers.only
        if loss is not None and only is not None and only.rates is not None:  # the usual case
            return {"loss": loss, "learning_rate": only.rates}
        values = {
            "loss": loss,
            "learning_rate": self._optimizers.rates(self._main_loop, of_next=self._step.is_open),
        }
        return {name: value for name, value in values.items() if value is not None}

    def schedule_plan(self) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; `run` logs what becomes known later.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        return self._optimizers.plan(self._main_loop)

    def prefetcher(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        return None if self._overrides("run") else self._forward_pass.prefetcher()

    def memory_of_rank(self, count: int) -> dict[str, int]:
        """Return what the first of several ranks needs, which has most, for a model with `strategy` in one process.

        Args:
            count: the number of ranks.

        Returns:
            What needs memory -> bytes, after an update.
        """
        assert self._sharding is not None
        return self._sharding.memory_of_rank(count, self.optimizers.values())

    @property
    def ways(self) -> Ways:
        """What changes how a step is calculated, and not what it calculates; to compare the two."""
        return Ways(self._forward_pass, self._micro_batches)

    # a batch

    def run(self, batch: Batch, train: bool, stream: str) -> Values:
        """Run the module on a batch and, when `train` is true, make an update.

        Returns:
            Output name -> detached tensor on the model's device.

        Raises:
            StreamError: the batch does not fit the module.
        """
        # the tensors
        if self._forward_pass.module.training is not train:
            self._forward_pass.module.train(train)
        try:
            if self._prepares:
                self._prepare(batch, train, stream)
            inputs = self._forward_pass.tensors(batch)
        except Exception:
            self._step.updater.forget()
            raise
        if not train:
            return self._evaluate(inputs, stream, batch)
        # the step
        if stream is not self._stream:
            self._begin_stream(stream, inputs, batch)
        try:
            outputs = self._runner.run(inputs, batch)
        except Exception as error:
            self._explain(error, batch)
            raise
        # the outputs
        try:
            detached = dict(zip(outputs, map(_detach, outputs.values())))  # noqa: B905 - keys and values of one mapping
        except TypeError:  # a value is not a tensor
            detached = changed(outputs, of_no_graph)
        if self._finishes:
            self._finish(detached, inputs, stream, batch)
        return detached

    def _prepare(self, batch: Batch, train: bool, stream: str) -> None:
        """Prepare the module and its outputs for a batch."""
        self._optimizers.set_mode(train=train)
        if self._synchronised is not None:
            self._synchronised.begin(rows_in(batch))
        if self._weights.averages is not None:
            self._weights.averages.use(not train)
        self._forward_pass.outputs.prepare(stream)

    def _evaluate(self, inputs: Tensors, stream: str, batch: Batch) -> Values:
        """Return the outputs of a batch that is not trained on."""
        if self._summed is not None:
            prepare_to_gather(batch)
        with torch.no_grad():
            outputs = self._forward(inputs)
        if self._stream_metrics is not None:
            self._measure(outputs, inputs, False, stream, batch)
        if self._main_loop is not None and self._main_loop.training:
            self._weights.use_trained()  # a hook has run the model between two train batches
        return outputs

    def _begin_stream(self, stream: str, inputs: Tensors, batch: Batch) -> None:
        """Prepare for the batches of a train stream, of which the first one has come."""
        self._stream = stream
        self._has_trained = True
        self._step.updater.forget()
        self._step.updater.begin_stream(stream)
        self.frozen_parts.warn()
        self._step.begin_stream(self._check_first)
        if "train_step" in vars(self):
            self._step.replace(self.train_step)
        if self._is_packed:
            self._is_packed = False
            check_packs(self.module, self._forward, inputs, self.precision)
        if not self._is_compared and self._summed is not None:
            self._is_compared = True
            prepare_to_gather(batch)
            self._summed.exchange_if(
                compare_halves(
                    self.module,
                    self._forward,
                    inputs,
                    examples_of(batch),
                    precision=self.precision,
                    micro_batches=self._micro_batches,
                )
            )

    def _check_first(self, outputs: Values) -> bool:
        """Check the first batch of a train stream before its update; return whether later outputs may have weights."""
        if self._main_loop is not None:
            self._main_loop.check_outputs(outputs)
        self._loadable.check()
        return self._overrides("forward") or self._forward_pass.outputs.may_have_weights

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Add advice to an error of a train step, and free its outputs."""
        self._step.show(None)
        advise(error, None if self._micro_batches is None else self._micro_batches.size, examples_of(batch))
        if self._forward_pass.compilation is not None:
            self._forward_pass.compilation.advise(error)

    def _finish(self, outputs: Values, inputs: Tensors, stream: str, batch: Batch) -> None:
        """Take the mean loss of all ranks, and add the batch to the metrics of its stream."""
        if self._summed is not None and not isinstance(self._summed, SummedBatchStep):
            self._summed.take_mean()
        if self._stream_metrics is not None:
            self._measure(outputs, inputs, True, stream, batch)

    # what a subclass may override

    def forward(self, inputs: Tensors) -> dict[str, Any]:
        """Run the module and calculate losses and metrics.

        Args:
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled. Values of 16 bits become float32.
        """
        return self._forward_pass.run(inputs)

    def train_step(self, inputs: Tensors) -> Values:
        """Run the module forward and backward and make an update; a subclass may override it to train in another way.

        It makes its updates by `self.update`, unless the model has no optimizer.
        When it is called, the gradients of all parameters of the module are None, also of those that only an optimizer
        of a subclass trains.

        Args:
            inputs: source name -> tensor on the model's device, those of `loss` and `metrics` included.

        Returns:
            Output name -> value.
        """
        return self._step.train(inputs)

    def backward(self, loss: Tensor, optimizer: Optimizer | str | None = None) -> None:
        """Calculate the gradients of a scalar loss and add them to those of the parameters.

        Args:
            loss: the loss, which the step record gets as `loss`; that of the last call if there are several.
            optimizer: an optimizer or its name: only its parameters get gradients. Default: all parameters. With a
                name, the step record also gets the loss as `loss_NAME`, unless a batch has several parts
                (`micro_batch_size`) or ranks.

        Raises:
            ArgumentError: the loss does not depend on any parameter with `requires_grad`, or no optimizer has the name.
        """
        if optimizer is None:
            self._step.backward(loss)
            return
        trained = [each for each in parameters_of(self._optimizers.named(optimizer)) if each.requires_grad]
        self._step.backward(loss, trained)
        loop = self._main_loop
        if (
            isinstance(optimizer, str)
            and trained
            and self._micro_batches is None
            and self._summed is None
            and loop is not None
            and loop.training
        ):
            loop.record(f"loss_{optimizer}", loss.detach())

    def update(self, optimizer: Optimizer | str | None, closure: Callable[[], Tensor] | None = None) -> None:
        """Make an update with the current gradients; hooks are called before and after.

        With `accumulate`, the update is made at the end of the window.

        Args:
            optimizer: an optimizer or its name.
            closure: for an optimizer that calculates the loss several times for an update, such as LBFGS: a function
                that runs forward, calls `backward` and returns the loss. Its gradients are cleared before each call.
                The first call is made before the hooks get the update, so that they see, and may clip, its gradients.

        Raises:
            ArgumentError: there is no such optimizer; or a closure is given with `accumulate`, `micro_batch_size`,
                `precision: fp16` or several ranks.
        """
        self._step.update(optimizer, closure)

    # the events of the loop

    def register_mainloop(self, main_loop: Loop) -> None:
        """Store the loop, whose hooks may listen to the updates; forget the weights for evaluations of another loop."""
        if not self._optimizers.has_modes:
            self.evaluation_weights = None
        if self.load_initial is not None:
            self.load_initial()
        self._main_loop = main_loop
        if main_loop.dataset is not None:
            self.use_dataset(main_loop.dataset)
        self._is_packed = getattr(main_loop.dataset, "is_packed", False)
        self._stream = None
        self._step.updater.register(main_loop)
        self._weights.register()
        self._loadable.register()
        for member in self._optimizers.members:
            member.register()

    def other_classes(self, outputs: Values, dataset: Any) -> Iterable[str]:
        """Return what `check` says of logits of another number of classes than the dataset has names."""
        return self._forward_pass.outputs.other_classes(outputs, dataset)

    def before_training(self) -> None:
        """Check that there is an optimizer, unless a subclass trains in its own way, and that the weights can be saved.

        Raises:
            ArgumentError: there is no optimizer, or a resume could not load the weights.
        """
        if self._tf32 is not None:
            self._tf32.begin()
        if self._evaluates:
            return
        self._weights.drop_restored()
        # what will be trained
        warn_of_unused(self.module)
        if ranks().several and self._synchronised is None:
            warn_of_batch_norm(self.module)
        if not self.optimizers and not self._overrides("train_step"):
            raise ArgumentError("optimizer", NO_OPTIMIZER)
        if not self.trains_itself:
            self._optimizers.check_steps_alone()
        for member in self._optimizers.members:
            member.before_training(self._main_loop)
        # what will be saved
        if self._main_loop is not None and self._main_loop.has_run:
            saves_more = self._overrides("state_dict")
            if not self._overrides("save", "load"):
                self._loadable.check_saving(saves_more=saves_more)
            elif not saves_more:
                self._loadable.check_own([self, self._weights, self._forward_pass])
            for member in self._optimizers.members:
                member.check_loadable()
            if self._stream_metrics is not None:
                self._stream_metrics.check()

    def before_epoch(self, epoch_id: int) -> None:
        """Reset what an incomplete epoch has left."""
        self._weights.use_trained()
        if self._stream_metrics is not None:
            self._stream_metrics.clear()
        if not self._evaluates:
            self._has_trained = False
            self._stream = None
            self._step.forget()
            self._skipped.begin_epoch()

    def finish_update(self) -> None:
        """Make the update of a window that has fewer batches than `accumulate`."""
        step = self._step
        if isinstance(step, AccumulatedStep) and step.is_open:
            self._weights.use_trained()
            self._optimizers.set_mode(train=True)
            step.finish()

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream; after a train stream, all ranks get the buffers of rank 0.

        Raises:
            DifferentRanks: a parameter differs between the ranks.
        """
        if (
            self._summed is not None
            and self._main_loop is not None
            and stream_name == self._main_loop.train_stream_name
            and self.module.training
        ):
            buffers = dict(self.module.named_buffers())
            averages = {name: each for name, each in (self.evaluation_weights or {}).items() if name in buffers}
            broadcast(buffers, ranks())
            broadcast(averages, ranks())
            if not self.is_sharded:
                check_equal_on_ranks(dict(self.module.named_parameters()), ranks())
        super().after_stream(stream_name)
        self._weights.use_trained()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Step the scheduler after a training epoch, and check that a resume can load the checkpoint.

        Raises:
            ArgumentError: a resume could not load the checkpoint.
        """
        self._loadable.check()
        if self._has_trained and not self._evaluates:
            self._step.updater.end_epoch(epoch_data)

    def after_training(self, success: bool) -> None:
        """Drop the batches that were copied ahead of time, and restore the setting of torch."""
        self._forward_pass.clear()
        if self._tf32 is not None:
            self._tf32.end()

    # checkpoints

    @property
    def evaluation_weights(self) -> Tensors | None:
        """Name of a parameter or buffer -> the tensor that evaluations use instead; None without such weights.

        A hook sets this, for example to averages, and changes the tensors after updates. `model.safetensors` in a
        checkpoint has these weights, `training.safetensors` those that are trained.
        """
        return None if self._weights.averages is None else self._weights.averages.others

    @evaluation_weights.setter
    def evaluation_weights(self, weights: Tensors | None) -> None:
        self._weights.replace_averages(weights)
        self._list_stages()

    @property
    def restored_weights(self) -> Tensors | None:
        """After the load of a checkpoint: the weights that evaluations used, if they are not those being trained."""
        return self._weights.restored

    @restored_weights.setter
    def restored_weights(self, weights: Tensors | None) -> None:
        self._weights.take_restored(weights)

    def recompute_batch_norm(self, batches: Iterable[Batch]) -> None:
        """Calculate the running statistics of BatchNorm anew, for the weights of evaluations.

        This is `torch.optim.swa_utils.update_bn`: the module runs on the batches in training mode, without gradients,
        and the statistics become the means over the batches. Nothing else changes. After an error, and if there is no
        batch, the statistics stay as they are. The statistics of the training stay in any case.
        """
        self._weights.recompute_batch_norm(batches, self._forward)

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StateError: the weights lie on several ranks, of which each writes its own; see `stage`.
            StorageError: the file cannot be written.
        """
        if self.is_sharded:
            raise StateError("the weights lie on several ranks (model.strategy), and are in the checkpoints only")
        self._loadable.check()
        self._weights.save(directory)

    def stage(self) -> Callable[[Path], Any] | None:
        """Copy the weights; return a function that writes them in any thread, None if a subclass overrides `save`."""
        if getattr(self.save, "__func__", None) is not TorchModel.save:
            return None
        self._loadable.check()
        return self._weights.stage(is_sharded=self.is_sharded)

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and the module's extra state from `state.pt`.

        Raises:
            StorageError: a file cannot be read, or does not fit this module.
        """
        self._weights.load(directory)
        self._list_stages()

    def state_dict(self) -> State:
        """Return the states of optimizers and schedulers, and the module's extra state and modes."""
        scale = self._skipped.scale
        return {
            **self._optimizers.state_dict(),
            "loss_scale": None if scale is None else scale.state_dict(),
            "skipped_updates": self._skipped.state_dict(),
            "trained": self._has_trained,
            **super().state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has another optimizer or scheduler.
        """
        self._optimizers.load_state_dict(state, self._main_loop)
        self._skipped.load_state_dict(state["skipped_updates"], state["loss_scale"])
        self._has_trained = state["trained"]
        self._weights.load_trained()
        super().load_state_dict(state)
