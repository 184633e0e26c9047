"""TorchModel: trains and evaluates any `torch.nn.Module`; a config names its inputs, outputs, loss and metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.base.sources import examples_of
from emrun.base.types import AtLeast, Batch, EpochData, Factory, Form, Prefetch
from emrun.base.wording import NO_OPTIMIZER
from emrun.hook import Loop
from emrun.models.alike import check_alike, copy_from_first
from emrun.models.first_window import FirstWindow
from emrun.models.laziness import in_evaluation_mode
from emrun.models.micro_batches import MicroBatches
from emrun.models.module_model import ModuleModel
from emrun.models.optimization import Optimization
from emrun.models.optimizer import check_steps_alone
from emrun.models.outputs import mean_loss
from emrun.models.precision import Precision
from emrun.models.schedules.closed_form import ClosedForm
from emrun.models.schedules.stepping import Scheduler
from emrun.models.size_search import advise
from emrun.models.updates import Traces
from emrun.models.weights.init_from import InitFrom, InitFromForm
from emrun.models.weights.loadable import Loadable
from emrun.ranks.shares import rows_in
from emrun.schedule_plan import SchedulePlan

_LOG = logging.getLogger(__name__)

LossForm = Annotated[Factory, Form(keys=("inputs", "scale"))]
MetricForm = Annotated[Factory, Form(keys=("inputs",))]
OptimizerForm = Annotated[Factory, Form(keys=("groups", "no_decay", "match"), package="torch.optim", supplied=1)]
SchedulerForm = Annotated[
    Factory,
    Form(("step_on", "metric"), "torch.optim.lr_scheduler", "emrun.models.schedules.built_in", 1, shared="optimizer"),
]

"""Fields of `TorchModel.state_dict`; optimizers and schedulers judge theirs themselves."""


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
    shape (B,), e.g. the number of tokens, the mean is weighted.

    Args:
        module: its `forward` returns a mapping of outputs, or values that `outputs` names. A lazy module, such as
            `torch.nn.LazyLinear`, gets its shapes from a checkpoint, or from the first batch of an evaluation pass,
            after the `before_batch` of the hooks. This happens before `before_training`, or after it if a hook needs
            `before_training` for its `before_batch`. The stream must then return a new iterator for each pass, or one
            with a state.
        inputs: the sources that `forward` gets. A list is passed by name if all its names are parameters of `forward`,
            else by position; a mapping `{parameter: source}` is passed by name. `{parameter: {source: image, dtype:
            uint8}}` sets another dtype than stated above: a dtype of torch, or `keep` for the dtype of the source;
            `source` may be left out if it has the name of the parameter. Default: the parameters of `forward`; those
            with a default value are passed if a batch has them.
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
            The result, a number or a mapping from names to numbers, is added to the data of the epoch.
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
            parts make one update with the gradients of the whole batch. `auto` finds the size before the first update,
            and writes it into the config of the run.
        precision: `bf16` and `fp16` run forward in bfloat16 or float16, by `torch.autocast`; the weights, the outputs,
            losses and metrics are float32. fp16 scales the loss and skips updates with gradients that are not finite.
            `tf32` lets a GPU multiply matrices in TF32. By default, 32, the settings of torch apply.
        device: a torch device; `auto` means CUDA or MPS if available, else the CPU.
        init_from: weights to begin with: a run directory (its checkpoint `best`, otherwise `latest`), a checkpoint, a
            directory with `model.safetensors`, such as transformers writes, or a file: safetensors, an index of them,
            or a state dict.
            `{path: PATH, match: REGEX, rename: {REGEX: REPLACEMENT}, on_mismatch: skip}` loads the parameters and
            buffers whose names match a regular expression, or one of a list (`re.search`), after renaming those of the
            file (`re.sub`), and skips what does not fit, which is an error by default. A new run loads them when it
            begins, before the hooks are built; a resume and an evaluation load their checkpoint only. A model that is
            built in Python loads them when it is given to a `MainLoop`.
        compile: true, or arguments of torch.compile, such as `{dynamic: true}`: the module is compiled, in place.
        recompute: a regular expression for names of parts of the module, a list of them (`re.search`), or `{match:
            ...}`: their activations are computed again for the gradients instead of kept, which saves memory.
        memory_format: `channels_last` or `channels_last_3d`, for weights and inputs of 4 or 5 dimensions.
        sync_batch_norm: on several ranks, BatchNorm normalises with the statistics of the whole batch, not with those
            of the rows of its rank.

    Attributes:
        module: the `torch.nn.Module`, on `device`.
        optimizer: the `torch.optim.Optimizer`; None without an optimizer, as long as a lazy module has no shapes, or if
            there are several.
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
        inputs: Sequence[str] | Mapping[str, str | Mapping[str, str | torch.dtype]] | None = None,
        outputs: Sequence[str] | None = None,
        loss: LossForm | Mapping[str, LossForm] | None = None,
        metrics: Mapping[str, MetricForm] | None = None,
        optimizer: OptimizerForm | Mapping[str, OptimizerForm] | None = None,
        scheduler: SchedulerForm | Mapping[str, SchedulerForm] | None = None,
        accumulate: Annotated[int, AtLeast(1)] = 1,
        micro_batch_size: Annotated[int | Literal["auto"] | None, AtLeast(1)] = None,
        precision: Precision = 32,
        device: str = "auto",
        init_from: str | os.PathLike[str] | InitFromForm | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        recompute: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        memory_format: Literal["channels_last", "channels_last_3d"] | None = None,
        sync_batch_norm: bool = False,
    ) -> None:
        if sync_batch_norm and micro_batch_size is not None:
            message = "cannot be used with micro_batch_size, which runs each rank on another number of parts"
            raise ArgumentError("sync_batch_norm", message)
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
        )
        if init_from is not None:
            self.load_initial = partial(self._begin_with, InitFrom.read(init_from))
        self._micro_batches = MicroBatches(self, micro_batch_size) if micro_batch_size is not None else None
        has_parts = self._micro_batches is not None
        self._optimization = Optimization(self, optimizer, scheduler, accumulate, has_parts=has_parts)
        self.iterations_per_update = accumulate
        if not self.is_lazy:
            self._optimization.build()
        self._stream: str | None = None  # the stream of the previous step, None at the beginning of an epoch
        self._check_pending = False
        self._trained = False
        own = type(self)
        self._is_own_scheme = own.train_step is not TorchModel.train_step or own.update is not TorchModel.update
        self._optimization.is_own_scheme = self._is_own_scheme
        if self._is_own_scheme:
            self._optimization.autocast = self._autocast
            self.train_step = FirstWindow(self)  # type: ignore[method-assign]
        self._is_own_saving = own.save is not ModuleModel.save or own.load is not ModuleModel.load
        self._loadable = Loadable(self)
        self._traces: Traces | None = None  # of the last step, if a subclass trains in its own way
        self._minimised: Tensor | None = None
        self.step_outputs: Mapping[str, Any] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """See the class."""
        return self._optimization.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimization.optimizer = optimizer

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """See the class."""
        return self._optimization.optimizers

    @property
    def optimizer_names(self) -> Sequence[str]:
        """The names of several optimizers, also as long as a lazy module has none yet; else empty."""
        return [each.name for each in self._optimization.members if each.name]

    @property
    def scheduler(self) -> Scheduler | ClosedForm | None:
        """See the class."""
        return self.schedulers.get("optimizer") if self.optimizer is not None else None

    @property
    def schedulers(self) -> Mapping[str, Scheduler | ClosedForm]:
        """See the class."""
        return self._optimization.schedulers

    @property
    def is_accumulating(self) -> bool:  # type: ignore[override]
        """Whether a window has begun that the last train batch did not end."""
        return self._optimization.is_open

    @property
    def splits_batches(self) -> bool:
        """Whether a batch may be run in parts, see `micro_batch_size`."""
        return self._micro_batches is not None

    @property
    def is_skipping(self) -> bool:
        """Whether the current update is skipped because its gradients in float16 are not finite; in `before_update`."""
        return self._optimization.is_skipping

    @property
    def has_updated(self) -> bool | None:  # type: ignore[override]
        """Whether the last `run` with `train` has made an update, or begun one.

        None if it is not known: a subclass trains in its own way, no update was seen, and none of its attributes is an
        optimizer of torch.
        """
        if self._optimization.has_updated or not self._is_own_scheme:
            return self._optimization.has_updated
        if self._traces is not None and self._traces.has_updated():
            return True
        own = [*self.optimizers.values(), *vars(self).values()]
        return False if any(isinstance(each, torch.optim.Optimizer) for each in own) else None

    def register_mainloop(self, main_loop: Loop) -> None:
        """Store the loop, whose hooks may listen to the updates; forget the weights for evaluations of another loop."""
        if not self._has_modes:
            self.evaluation_weights = None
        if self.load_initial is not None:
            self.load_initial()
        self._main_loop, self._restores_averages = main_loop, True
        self._loadable.register()
        self._optimization.register()

    @property
    def monitors(self) -> Sequence[str]:
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        return self._optimization.monitors

    def before_training(self) -> None:
        """Check that there is an optimizer, unless a subclass trains in its own way, and that the weights can be saved.

        Raises:
            ArgumentError: there is no optimizer, or a resume could not load the weights.
        """
        super().before_training()
        if self._evaluates:
            return
        if not self._optimization.is_configured and type(self).train_step is TorchModel.train_step:
            raise ArgumentError("optimizer", NO_OPTIMIZER)
        if not self._is_own_scheme:
            for name, each in self.optimizers.items():
                check_steps_alone(each, "optimizer" if name == "optimizer" else f"optimizer.{name}")
        if self._main_loop is not None and self._main_loop.has_run:
            if not self._is_own_saving:
                self._loadable.check_saving()
            self._optimization.check_loadable()
            if self._stream_metrics is not None:
                self._stream_metrics.check()
        if self.restored_weights is not None:
            self.restored_weights, self._restores_averages = None, False  # nor after the second load
            _LOG.warning("the averages of the weights in the checkpoint are not used: no hook averages any more")

    def run(self, batch: Batch, train: bool, stream: str) -> Mapping[str, Any]:  # noqa: PLR0915 - calls cost time
        """Run the module on a batch and, when `train` is true, make an update.

        Returns:
            Output name -> detached tensor on the model's device.

        Raises:
            StreamError: the batch does not fit the module.
        """
        module, optimization = self.module, self._optimization
        if module.training is not train:
            module.train(train)
        optimization.has_updated = False
        if self._random_of_lazy is not None:  # if no loop has done so before
            self.materialise(batch)
        if optimization.has_modes:
            optimization.set_mode(train=train)
        inputs = self._tensors(batch)
        if self._synchronised is not None:
            self._synchronised.begin(rows_in(batch))
        if self._evaluation_weights is not None:
            self._evaluation_weights.use(not train)
        if not train:
            with torch.no_grad():
                forward = self.forward if self._cast is None else partial(self._cast.call, self.forward)
                outputs: Mapping[str, Any] = forward(inputs)
            if self._stream_metrics is not None:
                self._measure(outputs, inputs, train, stream, rows_in(batch))
            if self._evaluation_weights is not None and self._main_loop is not None and self._main_loop.training:
                self._evaluation_weights.use(False)  # a hook has run the model between two train batches
            return outputs
        if stream is not self._stream:
            self._stream, self._check_pending, self._trained = stream, True, True
            optimization.begin_stream(stream)
            if self._micro_batches is not None:
                self._find_size(self._micro_batches, inputs, batch)
        if self._is_own_scheme:
            self._traces = Traces(optimization.parameters, self._loadable.pending)
            self._minimised = None  # a subclass may call `backward` of the loss itself
        try:
            if optimization.is_plain:
                optimization.clear()
                outputs = self.train_step(inputs)
                if optimization.scheduled:
                    optimization.step_schedules()
            else:
                outputs = self._run_step(inputs, batch)
        except Exception as error:
            size = self._micro_batches.size if self._micro_batches is not None else None
            advise(error, size, examples_of(batch))
            raise
        detached = {}
        for name, value in outputs.items():
            detached[name] = value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        if self._minimised is not None:  # usually an output, which is detached already
            self._minimised = detached["loss"] if self._minimised is outputs.get("loss") else self._minimised.detach()
        elif isinstance(loss := detached.get("loss"), Tensor) and not loss.dim():
            self._minimised = loss
        if optimization.ranks.several:
            self._minimised = optimization.mean_of_ranks(self._minimised)
        if self._stream_metrics is not None:
            self._measure(detached, inputs, train, stream, rows_in(batch))
        return detached

    def step_values(self) -> Mapping[str, Any]:
        """Return the last minimised `loss`, a scalar on its device, and the `learning_rate` of each parameter group.

        The learning rates are those of the last update, or of the first one as long as there is none.
        """
        values: dict[str, Any] = {}
        if self._minimised is not None:
            values["loss"] = self._minimised
        rates = self._optimization.rates(of_next=self._optimization.is_open)
        if rates is not None:
            values["learning_rate"] = rates
        return values

    def schedule_plan(self) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; `run` logs what becomes known later.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        return self._optimization.plan()

    def prefetcher(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        return self._prefetch() if type(self).run is TorchModel.run else None

    def train_step(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Run the module forward and backward and make an update; a subclass may override it to train in another way.

        When it is called, the gradients of all parameters of the module are None, also of those that only an optimizer
        of a subclass trains.

        Args:
            inputs: source name -> tensor on the model's device, those of `loss` and `metrics` included.

        Returns:
            Output name -> value.
        """
        outputs = self.forward(inputs) if self._cast is None else self._cast.call(self.forward, inputs)
        if self._check_pending:
            self._check_pending = False
            if self._main_loop is not None:
                self._main_loop.check_outputs(outputs)
            self._loadable.check_first_update()
        loss = outputs.get("loss")
        if type(loss) is not Tensor or loss.dim():
            loss = mean_loss(outputs)
        seen: Mapping[str, Any] = outputs
        if self._optimization.has_windows:
            if isinstance(weights := outputs.get("example_weight"), Tensor) and self._optimization.weight:
                self._optimization.weight = weights.detach().sum()
            if self._micro_batches is not None:
                seen = self._micro_batches.seen(outputs)
        self.backward(loss)
        self.step_outputs = seen
        for each in self._optimization.members:
            self.update(each.optimizer)
        self.step_outputs = None  # frees the graph, whose memory the next step needs
        return outputs

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | str | None = None) -> None:
        """Calculate the gradients of a scalar loss and add them to those of the parameters.

        Args:
            loss: the loss, which the step record gets; that of the last call if there are several.
            optimizer: an optimizer or its name: only its parameters get gradients. Default: all parameters.

        Raises:
            ArgumentError: the loss does not depend on any parameter with `requires_grad`, or no optimizer has the name.
        """
        self._minimised = loss
        self._optimization.backward(loss, optimizer)

    def update(self, optimizer: torch.optim.Optimizer | str | None) -> None:
        """Make an update with the current gradients; hooks are called before and after.

        With `accumulate`, the update is made at the end of the window.

        Args:
            optimizer: an optimizer or its name.

        Raises:
            ArgumentError: there is no such optimizer.
        """
        self._optimization.update(optimizer)

    def finish_update(self) -> None:
        """Make the update of a window that has fewer batches than `accumulate`."""
        if self._optimization.is_open:
            if self._evaluation_weights is not None:
                self._evaluation_weights.use(False)
            self._optimization.set_mode(train=True)
        self._optimization.finish()

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream; after a train stream, all ranks get the buffers of rank 0.

        Raises:
            DifferentRanks: a parameter differs between the ranks.
        """
        is_trained = self._main_loop is not None and stream_name == self._main_loop.train_stream_name
        if self._optimization.ranks.several and is_trained and self.module.training:
            buffers = dict(self.module.named_buffers())
            averages = {name: each for name, each in (self.evaluation_weights or {}).items() if name in buffers}
            copy_from_first(buffers, self._optimization.ranks)
            copy_from_first(averages, self._optimization.ranks)
            check_alike(dict(self.module.named_parameters()), self._optimization.ranks)
        super().after_stream(stream_name)

    def before_epoch(self, epoch_id: int) -> None:
        """Reset what an incomplete epoch has left."""
        if self._evaluation_weights is not None:
            self._evaluation_weights.use(False)
        if self._stream_metrics is not None:
            self._stream_metrics.clear()
        if not self._evaluates:
            self._trained, self._stream = False, None
            self._optimization.begin_epoch()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Step the scheduler after a training epoch; after the zeroth, check that a resume could load its checkpoint.

        Raises:
            ArgumentError: a resume could not load the checkpoint.
        """
        self._loadable.check()
        if self._trained and not self._evaluates:
            self._optimization.end_epoch(epoch_data)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizers and schedulers, and the module's extra state and modes."""
        return {
            **self._optimization.state_dict(),
            "trained": self._trained,
            **super().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has another optimizer or scheduler.
        """
        self._optimization.load_state_dict(state)
        self._trained = state["trained"]
        super().load_state_dict(state)

    def _run_step(self, inputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Any]:
        """Run `train_step` on a batch, or on each of its parts."""
        optimization, step = self._optimization, self._step_function()
        if not optimization.has_windows:
            optimization.clear()
            outputs = step(inputs)
            if optimization.scale is not None:
                optimization.scale.end()
            optimization.step_schedules()
            return outputs
        examples = rows_in(batch)
        if not examples and self._synchronised is None and self.module.training:
            with in_evaluation_mode(self.module):  # no statistics of a row that counts nothing
                return self._run_step(inputs, batch)
        if self._micro_batches is not None:
            outputs = self._micro_batches.run(step, inputs, examples)
        else:
            optimization.begin_part(examples)
            outputs = step(inputs)
            optimization.end_part()
        if self._traces is not None and self._traces.has_updated() and not optimization.has_updated:
            key, parts = ("accumulate" if self.iterations_per_update > 1 else "micro_batch_size"), "parts"
            if optimization.ranks.several:
                key, parts = "class", "ranks"
            message = "train_step must call self.backward(loss) and self.update(optimizer), not optimizer.step()"
            raise ArgumentError(key, f"{message}: an update has the gradients of several {parts}")
        return outputs

    def _step_function(self) -> Callable[[Mapping[str, Tensor]], Mapping[str, Any]]:
        """Return `train_step`, or a function that calls it in the precision of the model."""
        return self.train_step if self._optimization.autocast is None else partial(self._optimization.run_own, self)

    def _find_size(self, micro_batches: MicroBatches, inputs: Mapping[str, Any], batch: Batch) -> None:
        found = micro_batches.prepare(inputs, examples_of(batch))
        if found is not None and self.write_setting is not None:
            self.write_setting("micro_batch_size", found)

    @property
    def _has_modes(self) -> bool:
        return self._optimization.has_modes

    def _mode_of_evaluations(self) -> AbstractContextManager[None]:
        return self._optimization.mode_of_evaluations()

    def _forget_training(self) -> None:
        self._optimization.forget_training()

    def _end_laziness(self) -> None:
        super()._end_laziness()
        self._optimization.build()
