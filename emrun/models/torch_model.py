"""TorchModel: trains and evaluates any `torch.nn.Module`; a config names its inputs, outputs, loss and metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError
from emrun.base.sources import changed, examples_of
from emrun.base.types import AtLeast, Batch, EpochData, Factory, Form, Prefetch, State, Values
from emrun.base.wording import NO_OPTIMIZER
from emrun.events import warn_of_unused
from emrun.hook import Loop
from emrun.models.alike import check_alike, copy_from_first
from emrun.models.inputs import InputsForm
from emrun.models.modes import Tensors
from emrun.models.optimizer import check_steps_alone, parameters_of
from emrun.models.optimizers import Optimizers
from emrun.models.outputs import mean_loss
from emrun.models.precision import Precision
from emrun.models.saved_model import SavedModel
from emrun.models.schedules.closed_form import ClosedForm
from emrun.models.schedules.stepping import Scheduler
from emrun.models.sharding import StrategyForm, check_by_rows
from emrun.models.step.halves import compare_halves
from emrun.models.step.micro_batches import MicroBatches
from emrun.models.step.own import FirstWindow, InAutocast, Own
from emrun.models.step.plain import Plain
from emrun.models.step.scaled import Scaled, ScaledWindows
from emrun.models.step.sharded import ShardedWindows
from emrun.models.step.size_search import advise
from emrun.models.step.summed import SummedBatches, SummedWindows
from emrun.models.step.windows import Windows
from emrun.models.sync_batch_norm import warn_of_batch_norm
from emrun.models.units import Units
from emrun.models.ways import Ways
from emrun.models.weights.init_from import InitFrom, InitFromForm
from emrun.models.weights.loadable import Loadable
from emrun.ranks.gather import prepare as prepare_to_gather
from emrun.ranks.group import ranks
from emrun.ranks.parts import detached as of_no_graph
from emrun.schedule_plan import SchedulePlan

_LOG = logging.getLogger(__name__)
_detach = Tensor.detach

LossForm = Annotated[Factory, Form(keys=("inputs", "scale"))]
LossForms = LossForm | Mapping[str, LossForm]
Look = Callable[[Values], None]
MetricForms = Mapping[str, Annotated[Factory, Form(keys=("inputs", "streams"))]]
Begin = str | os.PathLike[str] | InitFromForm
OptimizerForm = Annotated[Factory, Form(keys=("groups", "no_decay", "match"), package="torch.optim", supplied=1)]
SchedulerForm = Annotated[
    Factory,
    Form(("step_on", "metric"), "torch.optim.lr_scheduler", "emrun.models.schedules.built_in", 1, shared="optimizer"),
]


class TorchModel(SavedModel):
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
            Each is an output, and `loss` is their scaled sum. A loss with a parameter `module`, such as a penalty for
            weights, gets the module by that name, after its `inputs`, if any. Default: `forward` returns an output
            `loss`.
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
            skipped. Schedulers that contain schedulers are written in the same way: `{class: SequentialLR, schedulers:
            [{class: LinearLR}, {class: CosineAnnealingLR, T_max: 20}], milestones: [5]}`. It is the schedule of every
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
        module: torch.nn.Module,
        inputs: InputsForm | None = None,
        outputs: Sequence[str] | None = None,
        loss: LossForms | None = None,
        metrics: MetricForms | None = None,
        optimizer: OptimizerForm | Mapping[str, OptimizerForm] | None = None,
        scheduler: SchedulerForm | Mapping[str, SchedulerForm] | None = None,
        accumulate: Annotated[int, AtLeast(1)] = 1,
        micro_batch_size: Annotated[int | Literal["auto"] | None, AtLeast(1)] = None,
        precision: Precision = 32,
        device: str = "auto",
        init_from: Begin | Sequence[Begin] | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        recompute: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        memory_format: Literal["channels_last", "channels_last_3d"] | None = None,
        sync_batch_norm: bool = False,
        strategy: StrategyForm | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        if micro_batch_size is not None and (sync_batch_norm or strategy is not None):
            message = "cannot be used with micro_batch_size, which runs each rank on another number of parts"
            raise ArgumentError("sync_batch_norm" if sync_batch_norm else "strategy", message)
        super().__init__(
            module,
            inputs,
            outputs,
            loss,
            metrics,
            device,
            precision,
            compile=compile,
            recompute=recompute,
            memory_format=memory_format,
            sync_batch_norm=sync_batch_norm,
            strategy=strategy,
        )
        self.in_units = dict(units or {})
        self._begins_with = init_from is not None
        if init_from is not None:
            self.load_initial = partial(self._begin_with, InitFrom.read_all(init_from))
        self._optimizers = Optimizers(self, optimizer, scheduler)
        self.iterations_per_update = accumulate
        self._stream: str | None = None  # the stream of the previous step, None at the beginning of an epoch
        self._trained = False
        self._is_compared = False  # whether the first batch was compared with its halves
        self._minimised: Tensor | None = None
        self.step_outputs: Values | None = None
        if self.trains_itself and strategy is not None:
            message = f"cannot be used with a train_step or an update of {type(self).__name__} yet"
            raise ArgumentError("strategy", message)
        self._choose_step(accumulate, micro_batch_size)
        self._updates.list_optimizers()
        if strategy is not None:
            check_by_rows(self._optimizers.members)
        self._loadable = Loadable(self)
        self.list_work()

    def _choose_step(self, accumulate: int, micro_batch_size: int | Literal["auto"] | None) -> None:
        """Choose what is done with a train batch, for the whole run."""
        check_count("accumulate", accumulate, minimum=1)
        optimizers = self._optimizers
        skipped = self._skipped
        scale = skipped.scale
        is_one = accumulate == 1 and micro_batch_size is None
        # what makes the updates
        if ranks().several and self._sharding is not None:
            self._updates: Plain = ShardedWindows(
                self,
                optimizers,
                skipped,
                accumulate=accumulate,
                ranks=ranks(),
                carries_loss=is_one,
                sharding=self._sharding,
            )
        elif ranks().several:
            is_usual = not self.trains_itself
            is_single = is_one and is_usual and optimizers.only is not None
            kind = SummedBatches if is_single else SummedWindows
            self._updates = kind(
                self,
                optimizers,
                skipped,
                accumulate=accumulate,
                ranks=ranks(),
                carries_loss=is_one,
                sends=is_usual and micro_batch_size != "auto",  # what is sent cannot be calculated again
                exchanges=self._synchronised is not None,
            )
        elif is_one and scale is None:
            self._updates = Plain(self, optimizers, skipped)
        elif scale is None:
            self._updates = Windows(self, optimizers, skipped, accumulate=accumulate)
        elif is_one:
            self._updates = Scaled(self, optimizers, skipped, scale=scale)
        else:
            self._updates = ScaledWindows(self, optimizers, skipped, accumulate=accumulate, scale=scale)
        # the step around them
        self._parts: MicroBatches | None = None
        self._step: Plain | MicroBatches | Own | InAutocast = self._updates
        self._weighs: list[Look] = []
        make = cast("Callable[..., None]", self._updates.update)
        if isinstance(self._updates, Windows):
            self._weighs = [self._updates.look]
            make = self._updates.note
            if micro_batch_size is not None:
                self._step = self._parts = MicroBatches(self, self._updates, micro_batch_size)
                self._weighs.append(self._parts.look)
        if self.trains_itself:
            if self._autocast is not None:
                self._step = InAutocast(self._step, self._autocast)
            self._step = Own(self, self._step)
            if type(self).train_step is not TorchModel.train_step:
                self.train_step = FirstWindow(self)  # type: ignore[method-assign]
        # what a step calls
        is_usual = not self.trains_itself and type(self).backward is TorchModel.backward
        self._backward: Callable[..., None] = self._updates.backward if is_usual else self.backward
        self._update: Callable[..., None] = make if is_usual else self.update
        self._looks: Sequence[Look] = self._weighs  # what looks at outputs

    @property
    def trains_itself(self) -> bool:
        """Whether a subclass has a `train_step` or an `update` of its own."""
        own = type(self)
        return own.train_step is not TorchModel.train_step or own.update is not TorchModel.update

    @property
    def _summed(self) -> SummedWindows | None:
        return self._updates if isinstance(self._updates, SummedWindows) else None

    def list_work(self) -> None:
        """Note what is done before and after a batch; called when something is added or removed."""
        before: list[Callable[[Batch, bool, str], None]] = []
        if self._optimizers.has_modes:
            before.append(self._optimizers.prepare)
        if self._synchronised is not None:
            before.append(self._synchronised.prepare)
        if self._evaluation_weights is not None:
            before.append(self._evaluation_weights.prepare)
        if self._outputs.only_in:
            before.append(self._outputs.prepare)
        self._before = before
        after: list[Callable[..., None]] = []
        if self._summed is not None and not isinstance(self._summed, SummedBatches):
            after.append(self._summed.take_mean)
        self._after = after if self._stream_metrics is None else [*after, self._measure]
        self._forward = self._in_precision

    @property
    def optimizer(self) -> Optimizer | None:
        """See the class."""
        return None if self._optimizers.only is None else self._optimizers.only.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizers.replace(optimizer)
        self._updates.list_optimizers()
        self.list_work()

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """See the class."""
        return self._optimizers.optimizers

    @property
    def own_optimizers(self) -> Mapping[str, Optimizer]:
        """Name -> optimizer, also those that are attributes of a subclass."""
        attributes = {name: each for name, each in vars(self).items() if isinstance(each, Optimizer)}
        return {**attributes, **self.optimizers}

    @property
    def scheduler(self) -> Scheduler | ClosedForm | None:
        """See the class."""
        return self.schedulers.get("optimizer") if self.optimizer is not None else None

    @property
    def schedulers(self) -> Mapping[str, Scheduler | ClosedForm]:
        """See the class."""
        return self._optimizers.schedulers

    @property
    def is_accumulating(self) -> bool:  # type: ignore[override]
        """Whether a window has begun that the last train batch did not end."""
        return self._updates.is_open

    @property
    def splits_batches(self) -> bool:
        """Whether a batch may be run in parts, see `micro_batch_size`."""
        return self._parts is not None

    @property
    def is_skipping(self) -> bool:
        """Whether the current update is skipped because its gradients in float16 are not finite; in `before_update`."""
        return self._updates.is_skipping

    @property
    def skipped_updates(self) -> int:  # type: ignore[override]
        """Number of updates of the run that were skipped."""
        return self._skipped.total

    @property
    def has_updated(self) -> bool | None:  # type: ignore[override]
        """Whether the last `run` with `train` has made an update, or begun one.

        None if it is not known: a subclass trains without any optimizer, or has an `update` of its own.
        """
        if type(self).update is TorchModel.update and (self.own_optimizers or not self.trains_itself):
            return self._updates.has_updated
        return self._updates.has_updated or None

    def register_mainloop(self, main_loop: Loop) -> None:
        """Store the loop, whose hooks may listen to the updates; forget the weights for evaluations of another loop."""
        super().register_mainloop(main_loop)
        if self.in_units and main_loop.dataset is not None:
            self._outputs.use_units(Units(self.in_units, main_loop.dataset))
        self._stream = None
        self._loadable.register()
        for each in self._optimizers.members:
            each.register()

    @property
    def monitors(self) -> Sequence[str]:
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        return list(dict.fromkeys(each.metric for each in self._optimizers.members if each.metric is not None))

    def before_training(self) -> None:
        """Check that there is an optimizer, unless a subclass trains in its own way, and that the weights can be saved.

        Raises:
            ArgumentError: there is no optimizer, or a resume could not load the weights.
        """
        super().before_training()
        if self._evaluates:
            return
        warn_of_unused(self.module)
        if ranks().several and self._synchronised is None:
            warn_of_batch_norm(self.module)
        if not self.optimizers and type(self).train_step is TorchModel.train_step:
            raise ArgumentError("optimizer", NO_OPTIMIZER)
        if not self.trains_itself:
            for name, each in self.optimizers.items():
                check_steps_alone(each, "optimizer" if name == "optimizer" else f"optimizer.{name}")
        if self._main_loop is not None and self._main_loop.has_run:
            own = type(self)
            saves_more = own.state_dict is not TorchModel.state_dict
            if own.save is SavedModel.save and own.load is SavedModel.load:
                self._loadable.check_saving(saves_more=saves_more)
            elif not saves_more:
                self._loadable.check_own(begins_with=self._begins_with)
            for member in self._optimizers.members:
                member.check_loadable()
            if self._stream_metrics is not None:
                self._stream_metrics.check()

    def run(self, batch: Batch, train: bool, stream: str) -> Values:
        """Run the module on a batch and, when `train` is true, make an update.

        Returns:
            Output name -> detached tensor on the model's device.

        Raises:
            StreamError: the batch does not fit the module.
        """
        self._updates.has_updated = False
        if self.module.training is not train:
            self.module.train(train)
        if self._before:
            for prepare in self._before:
                prepare(batch, train, stream)
        inputs = self._tensors(batch)
        if not train:
            return self._evaluate(inputs, train, stream, batch)
        if stream is not self._stream:
            self._begin_stream(stream, inputs, batch)
        try:
            outputs = self._step.run(self.train_step, inputs, batch)
        except Exception as error:
            self.step_outputs = None
            advise(error, self._parts.size if self._parts is not None else None, examples_of(batch))
            if self._compilation is not None:
                self._compilation.advise(error)
            raise
        try:
            detached = dict(zip(outputs, map(_detach, outputs.values())))  # noqa: B905 - keys and values of one mapping
        except TypeError:  # a value is not a tensor
            detached = changed(outputs, of_no_graph)
        if self._after:
            for finish in self._after:
                finish(detached, inputs, train, stream, batch)
        return detached

    def _evaluate(self, inputs: Tensors, train: bool, stream: str, batch: Batch) -> Values:
        if self._summed is not None:
            prepare_to_gather(batch)
        with torch.no_grad():
            outputs = self._forward(inputs)
        if self._stream_metrics is not None:
            self._measure(outputs, inputs, train, stream, batch)
        if self._evaluation_weights is not None and self._main_loop is not None and self._main_loop.training:
            self._evaluation_weights.use(False)  # a hook has run the model between two train batches
        return outputs

    def _begin_stream(self, stream: str, inputs: Tensors, batch: Batch) -> None:
        """Prepare for the batches of a train stream."""
        self._stream = stream
        self._trained = True
        self._looks = [self._check_first]
        self._updates.begin_stream(stream)
        if not self._is_compared and self._summed is not None:
            self._is_compared = True
            prepare_to_gather(batch)
            self._summed.exchanges |= compare_halves(self, inputs, examples_of(batch))

    def step_values(self) -> Values:
        """Return the last minimised `loss`, a scalar on its device, and the `learning_rate` of each parameter group.

        The learning rates are those of the last update, or of the first one as long as there is none; in a window,
        those with which it has begun.
        """
        loss = self._minimised
        only = self._optimizers.only
        if loss is not None and only is not None and only.rates is not None:  # the usual case
            return {"loss": loss, "learning_rate": only.rates}
        values = {"loss": loss, "learning_rate": self._optimizers.rates(of_next=self._updates.is_open)}
        return {name: value for name, value in values.items() if value is not None}

    def schedule_plan(self) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; `run` logs what becomes known later.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        return self._optimizers.plan()

    def prefetcher(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        return self._prefetch() if type(self).run is TorchModel.run else None

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
        outputs = self._forward(inputs)
        self.step_outputs = outputs
        for look in self._looks:
            look(outputs)
        loss = outputs.get("loss")
        if loss.__class__ is not Tensor or loss.ndim:
            loss = mean_loss(outputs)
        self._minimised = loss.detach()
        self._backward(loss)
        for each in self._optimizers.members:
            self._update(each.optimizer)
        self.step_outputs = None  # frees the graph, whose memory the next step needs
        return outputs

    def _check_first(self, outputs: Values) -> None:
        """Check the first batch of a train stream, before its update."""
        if isinstance(self._updates, Windows) and "loss_weight" in outputs:
            self._weighs[0] = self._updates.look_at_loss
        is_known = type(self).forward is TorchModel.forward and not self._outputs.may_have_weights
        self._looks = self._weighs[1:] if is_known else self._weighs
        if self._main_loop is not None:
            self._main_loop.check_outputs(outputs)
        self._loadable.check()
        for look in self._looks:
            look(outputs)

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
        self._minimised = loss.detach()
        if optimizer is None:
            self._step.backward(loss)
        elif of := [each for each in parameters_of(self._optimizers.named(optimizer)) if each.requires_grad]:
            self._step.backward(loss, of)
            loop = self._main_loop
            if isinstance(optimizer, str) and loop is not None and loop.training and not (self._parts or self._summed):
                loop.record(f"loss_{optimizer}", self._minimised)

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

    def finish_update(self) -> None:
        """Make the update of a window that has fewer batches than `accumulate`."""
        if isinstance(self._updates, Windows) and self._updates.is_open:
            self._use_trained()
            self._optimizers.set_mode(train=True)
            self._updates.finish()

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream; after a train stream, all ranks get the buffers of rank 0.

        Raises:
            DifferentRanks: a parameter differs between the ranks.
        """
        is_trained = self._main_loop is not None and stream_name == self._main_loop.train_stream_name
        if self._summed is not None and is_trained and self.module.training:
            buffers = dict(self.module.named_buffers())
            averages = {name: each for name, each in (self.evaluation_weights or {}).items() if name in buffers}
            copy_from_first(buffers, ranks())
            copy_from_first(averages, ranks())
            if not self.is_sharded:
                check_alike(dict(self.module.named_parameters()), ranks())
        super().after_stream(stream_name)

    def before_epoch(self, epoch_id: int) -> None:
        """Reset what an incomplete epoch has left."""
        self._use_trained()
        if self._stream_metrics is not None:
            self._stream_metrics.clear()
        if not self._evaluates:
            self._trained = False
            self._stream = None
            self._updates.forget()
            self._skipped.begin_epoch()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Step the scheduler after a training epoch, and check that a resume can load the checkpoint.

        Raises:
            ArgumentError: a resume could not load the checkpoint.
        """
        self._loadable.check()
        if self._trained and not self._evaluates:
            self._updates.end_epoch(epoch_data)

    def memory_of_rank(self, count: int) -> dict[str, int]:
        """Return what the first of several ranks needs, which has most, for a model with `strategy` in one process.

        Args:
            count: the number of ranks.

        Returns:
            What needs memory -> bytes, after an update.
        """
        assert self._sharding is not None
        return self._sharding.memory_of_rank(
            count, [each.optimizer for each in self._optimizers.members if each.optimizer]
        )

    @property
    def ways(self) -> Ways:
        """What changes how a step is calculated, and not what it calculates; to compare the two."""
        return Ways(self)

    def state_dict(self) -> State:
        """Return the states of optimizers and schedulers, and the module's extra state and modes."""
        return {
            **self._optimizers.state_dict(),
            "loss_scale": scale.state_dict() if (scale := self._skipped.scale) is not None else None,
            "skipped_updates": self._skipped.state_dict(),
            "trained": self._trained,
            **super().state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has another optimizer or scheduler.
        """
        self._optimizers.load_state_dict(state)
        self._skipped.load_state_dict(state["skipped_updates"])
        if (scale := self._skipped.scale) is not None and state["loss_scale"] is not None:
            scale.load_state_dict(state["loss_scale"])
        elif scale is not None:
            _LOG.warning("the checkpoint has no scale of the loss, which fp16 needs: the scale begins anew")
        self._trained = state["trained"]
        super().load_state_dict(state)
