"""TorchModel: trains and evaluates any `torch.nn.Module`, whose inputs, outputs, loss and metrics a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from emrun.arguments import check_names
from emrun.encoding import random_state, set_random_state
from emrun.errors import ArgumentError, StateError, StreamError, add_inputs
from emrun.fields import (
    ANOTHER_CHECKPOINT,
    ANYTHING,
    FLAG,
    TEXT,
    mapping_of,
    optional,
    reading,
    record,
    sequence_of,
)
from emrun.hook import Loop
from emrun.model import AbstractModel
from emrun.models.built_apart import BuiltApart
from emrun.models.inputs import InputNames, Inputs, describe
from emrun.models.laziness import end_laziness, uninitialised
from emrun.models.optimizer import build_optimizer, configured_arguments, load_optimizer_state, optimizer_state
from emrun.models.prefetching import Prefetcher, can_prefetch
from emrun.models.schedule import Scheduler, build_scheduler
from emrun.models.structure import Structure, differences, extra_state, structure, what_cannot_be_held
from emrun.models.updates import Traces, all_parameters, clear_gradients, has_optimizer, parameters_beside
from emrun.models.weights import collect_weights, load_weights, own_memory
from emrun.randomness import preserved_randomness
from emrun.storage.state_file import FILE, load_state
from emrun.storage.weights import write_weights
from emrun.types import Batch, EpochData, Factory, Form, Prefetch
from emrun.wording import did_you_mean, listed

LossForm = Annotated[Factory, Form(keys=("inputs", "scale"))]
MetricForm = Annotated[Factory, Form(keys=("inputs",))]
OptimizerForm = Annotated[Factory, Form(keys=("groups",), package="torch.optim", supplied=1)]
SchedulerForm = Annotated[
    Factory,
    Form(keys=("step_on", "metric"), package="torch.optim.lr_scheduler", supplied=1, shared="optimizer"),
]

_NO_OPTIMIZER = ArgumentError("optimizer", "a model that is trained needs one, e.g. {class: AdamW, lr: 1.0e-3}")

_CLASS_AND_STATE = {"class": TEXT, "configured": ANYTHING, "state": ANYTHING}
_STATE = {
    "optimizer": optional(record(_CLASS_AND_STATE)),
    "scheduler": optional(record(_CLASS_AND_STATE)),
    "extra": mapping_of(ANYTHING),
    "trained": FLAG,
    "modes": record({"training": FLAG, "others": sequence_of(TEXT)}),
}
"""What `TorchModel.state_dict` returns; `optimization` looks at the states of optimizer and scheduler."""


class TorchModel(AbstractModel):
    """Trains and evaluates a `torch.nn.Module`.

        model:
          module: {class: my_models.ConvNet, channels: 32}
          inputs: [image]
          outputs: [logits]
          loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
          metrics:
            accuracy: {import: emrun.metrics.accuracy, inputs: [logits, label]}
          optimizer: {class: AdamW, lr: 1.0e-3}
          scheduler: {class: CosineAnnealingLR, T_max: 20}

    Inputs become tensors on the model's device: floating point in the module's dtype, integers int64, booleans bool.
    Outputs are detached and stay on the device; nothing is copied to the host or synchronised.

    The loss that is minimised is the mean over the examples of the batch. An output `example_weight` of shape (B,)
    weights them, e.g. with token counts.

    Args:
        module: its `forward` returns a mapping of outputs, or values that `outputs` names. A lazy one, such as
            `torch.nn.LazyLinear`, gets its shapes from the first batch of an evaluation pass, or from a checkpoint. It
            gets the batch as hooks change it, before `before_training`, or after that where a hook's `before_batch`
            needs its `before_training`. The stream must not return one iterator for all passes, unless that has a
            state.
        inputs: the sources that `forward` gets. A list is passed by name when all its names are parameters of
            `forward`, else by position; a mapping `{parameter: source}` by name. For another dtype than stated above,
            `{parameter: {source: image, dtype: uint8}}` names a dtype of torch, or `keep` for the one that the source
            has; `source` may be left out when it is called like the parameter. Default: the parameters of `forward`;
            those with a default value are passed when a batch has them.
        outputs: the names of what `forward` returns, one value or as many as the tuple has; of a mapping, the keys
            that are kept, by default all.
        loss: an object or function called with `inputs`, named outputs and sources; its result is the output `loss`,
            a scalar or of shape (B, ...). Several by name: `{NAME: {class, inputs, scale}}`, each an output, whose
            scaled sum is `loss`. Default: `forward` returns an output `loss`.
        metrics: name -> an object or function called with `inputs`, without gradients; its result is an output.
        optimizer: a class from torch.optim or a dotted path, and its arguments. `groups: [{match: REGEX, lr: 0.01}]`
            gives the parameters whose names the regular expression matches (`re.search`) arguments of their own; what
            matches no group gets the defaults. Without an optimizer the model can only be evaluated.
        scheduler: a class from torch.optim.lr_scheduler or a dotted path, and its arguments. It steps after each
            training epoch, or, with `step_on: update`, after each update. `metric: valid/loss/mean` hands it that
            statistic of the epoch; epochs that do not evaluate its stream are passed over. Schedulers of schedulers
            are written the same way at every depth: `{class: SequentialLR, schedulers: [{class: LinearLR}, {class:
            CosineAnnealingLR, T_max: 20}], milestones: [5]}`.
        device: `auto` takes CUDA or MPS when there is one, else the CPU; or any torch device.

    Attributes:
        module: the `torch.nn.Module`, on `device`.
        optimizer: the `torch.optim.Optimizer`, None without one, and while the module is lazy and has seen no batch.
        scheduler: what steps torch's scheduler, which is `scheduler.scheduler`; None without one.
        device: the `torch.device` of the module and of the tensors that it gets.
        step_outputs: output name -> value of the batch whose update is made, with gradients, in `before_update` and
            `after_update`; None at other times, and in a `train_step` of one's own that does not set it.

    Raises:
        ArgumentError: an argument does not fit the module.
        StreamError: a batch does not fit, found before any update.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[str] | Mapping[str, str | Mapping[str, str | torch.dtype]] | None = None,
        outputs: Sequence[str] | None = None,
        loss: LossForm | Mapping[str, LossForm] | None = None,
        metrics: Mapping[str, MetricForm] | None = None,
        optimizer: OptimizerForm | None = None,
        scheduler: SchedulerForm | None = None,
        device: str = "auto",
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                "module", f"{type(module).__name__} is no torch.nn.Module; write module: {{class: ...}}"
            )
        self.device = _find_device(device)
        lazy = uninitialised(module)
        self._random_of_lazy = random_state() if lazy else None  # with which the first batch initialises it
        self.module = module.to(self.device)
        own_memory(module)
        self._outputs = _check_outputs(outputs)
        self._only_output = self._outputs[0] if self._outputs is not None and len(self._outputs) == 1 else None
        self._sums_terms = not callable(loss) and bool(loss)
        self._terms = _calculations("loss", loss, self.device)
        self._metrics = _calculations("metrics", metrics, self.device)
        self._is_complete = not (
            self._terms or self._metrics or self._outputs
        )  # nothing is added to what forward returns
        self._inputs = Inputs(module, InputNames.read(module, inputs), self._calculation_sources(), self.device)
        self._tensors: Callable[[Batch], dict[str, Tensor]] = self._first_tensors if lazy else self._inputs.tensors
        self._prefetcher: Prefetcher | None = None
        self._forms = optimizer, scheduler
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Scheduler | None = None
        self._configured: list[dict[str, Any]] = []
        if not lazy:
            self._build_optimizer()
        self._main_loop: Loop | None = None
        self._notify_before: Callable[..., None] | None = None
        self._notify_after: Callable[..., None] | None = None
        self._stream: str | None = None  # the stream of the step before, None at the beginning of an epoch
        self._check_pending = False
        self._is_schedule_pending = False  # whether a schedule was loaded that may be over
        self._trained = False
        self._updated = False
        own = type(self)
        self._is_own_scheme = own.train_step is not TorchModel.train_step or own.update is not TorchModel.update
        self._is_own_saving = own.save is not TorchModel.save or own.load is not TorchModel.load
        self._as_built = structure(module) if own.__init__ is TorchModel.__init__ else None
        self._registered: Structure = {}  # what a checkpoint would be loaded into
        self._before_update: Structure | None = None  # until the first update is checked
        self._traces = Traces()
        self._parameters: list[torch.nn.Parameter] = []  # of the module, at the beginning of the stream
        self._others: list[torch.nn.Parameter] = []  # what has gradients to be cleared beside those of the optimizer
        self._minimised: Tensor | None = None
        self.step_outputs: Mapping[str, Any] | None = None

    @classmethod
    def build_apart(cls, builds: Mapping[str, Callable[[], Any]]) -> BuiltApart | None:
        """Begin to build the module once more, unless a subclass changes what it is given."""
        is_compared = "module" in builds and cls.__init__ is TorchModel.__init__
        return BuiltApart.begin(builds["module"]) if is_compared else None

    @property
    def input_names(self) -> Sequence[str]:
        """Names of the sources that every batch must have."""
        return self._inputs.required

    @property
    def optional_input_names(self) -> Sequence[str]:  # type: ignore[override]
        """Sources that are used when a batch has them."""
        return self._inputs.optional

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the outputs, as far as they are known before the first batch."""
        total = ["loss"] if self._sums_terms else []
        return [*(self._outputs or ()), *self._terms, *total, *self._metrics]

    @property
    def losses(self) -> Mapping[str, Any]:
        """The objects that calculate losses: their keys in the model's section -> object. No checkpoint has them."""
        return {term.key: term.function for term in self._terms.values()}

    @property
    def has_updated(self) -> bool | None:  # type: ignore[override]
        """Whether the last `run` with `train` has made an update, or begun one.

        None for a subclass that trains in its own way, when no update was seen and none of its attributes is an
        optimizer of torch.
        """
        if self._updated or not self._is_own_scheme:
            return self._updated
        return True if self._traces.has_updated() else False if has_optimizer(self) else None

    def register_mainloop(self, main_loop: Loop) -> None:
        """Take note of the loop whose hooks listen to the updates."""
        self._main_loop = main_loop
        self._registered = structure(self.module)
        self._notify_before, self._notify_after = (
            partial(main_loop.notify, event, model=self) if main_loop.listens(event) else None
            for event in ("before_update", "after_update")
        )

    @property
    def monitors(self) -> Sequence[str]:
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        metric = getattr(self._forms[1], "options", {}).get("metric")
        return () if metric is None else (metric,)

    def before_training(self) -> None:
        """Check that there is an optimizer, unless a subclass trains in its own way, and that the weights can be saved.

        Raises:
            ArgumentError: there is none, or what would be saved could not be loaded.
        """
        if self._evaluates:
            return
        if self._forms[0] is None and self.optimizer is None and type(self).train_step is TorchModel.train_step:
            raise _NO_OPTIMIZER
        if self._main_loop is not None and self._main_loop.saves and not self._is_own_saving:
            self._check_saving()
        self.built_apart = None  # its process ends

    @property
    def is_lazy(self) -> bool:  # type: ignore[override]
        """Whether parts of the module have no shapes yet."""
        return self._random_of_lazy is not None

    def materialise(self, batch: Batch) -> None:
        """Give the lazy parts of the module their shapes and first values, then build the optimizer.

        The values are drawn as if the parts had been initialised when the module was built. The module runs on the
        batch in evaluation mode, without gradients; its other buffers and all random states are put back afterwards.

        Raises:
            ArgumentError: `forward` does not use a lazy part in an evaluation.
            StreamError: the batch does not fit the module.
        """
        if self._random_of_lazy is None:
            return
        inputs = self._inputs.tensors(batch)
        module, modes = self.module, self._modes()
        missing = set(uninitialised(module))
        buffers = {name: each.clone() for name, each in module.named_buffers() if name not in missing}
        module.eval()
        try:
            with preserved_randomness(), torch.no_grad():
                set_random_state(self._random_of_lazy)
                self._inputs.call(module, inputs)
        except Exception as error:
            kind = type(module).__name__
            add_inputs(error, f"forward of {kind}, which is lazy,", self._inputs.passed(inputs))
            raise
        finally:
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])
            self._set_modes(modes["training"], frozenset(modes["others"]))
        missing = set(uninitialised(module))
        if missing:
            message = f"{listed(sorted(missing))}: lazy, but forward does not use it in an evaluation; give its size"
            raise ArgumentError("module", message)
        self._end_laziness()

    def run(self, batch: Batch, train: bool, stream: str) -> Mapping[str, Any]:
        """Run the module on a batch and, when `train` is true, make an update.

        Returns:
            Output name -> detached tensor on the model's device.

        Raises:
            StreamError: the batch does not fit the module.
        """
        module = self.module
        if module.training is not train:
            module.train(train)
        self._updated = False
        inputs = self._tensors(batch)
        if not train:
            with torch.no_grad():
                return self.forward(inputs)
        if stream is not self._stream:
            self._stream, self._check_pending, self._trained = stream, True, True
            self._parameters = all_parameters(module)
            self._others = parameters_beside(self._parameters, self.optimizer)
            self._check_schedule()
        if self._is_own_scheme:
            self._traces.begin(self._parameters, self._check_first_update if self._before_update is not None else None)
            self._minimised = None  # it may call `backward` of the loss itself
        clear_gradients(self.optimizer, self._others)
        outputs = self.train_step(inputs)
        detached = {}
        for name, value in outputs.items():
            detached[name] = value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        if self._minimised is not None:  # as a rule it is an output, whose detached tensor is there already
            self._minimised = detached["loss"] if self._minimised is outputs.get("loss") else self._minimised.detach()
        elif isinstance(loss := detached.get("loss"), Tensor) and not loss.dim():
            self._minimised = loss
        return detached

    def step_values(self) -> Mapping[str, Any]:
        """Return the scalar `loss` that was minimised last, on its device, and the `learning_rate` of each group."""
        values: dict[str, Any] = {}
        if self._minimised is not None:
            values["loss"] = self._minimised
        if self.optimizer is not None:
            values["learning_rate"] = [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]
        return values

    def prefetcher(self) -> Prefetch | None:
        """Return what pins the sources of a batch and copies them to the device ahead; None on CPU and MPS."""
        if type(self).run is not TorchModel.run or self.is_lazy or not can_prefetch(self.device):
            return None
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._inputs, self.device)
            self._tensors = self._prefetcher.tensors
        return self._prefetcher.pin

    def train_step(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Run the module forward and backward and make an update; override it for other schemes of training.

        The gradients of all parameters of the module are None when it is called, also of those that only an optimizer
        of a subclass trains.

        Args:
            inputs: source name -> tensor on the model's device, those of `loss` and `metrics` included.

        Returns:
            Output name -> value.
        """
        outputs = self.forward(inputs)
        if self._check_pending:
            self._check_pending = False
            if self._main_loop is not None:
                self._main_loop.check_outputs(outputs)
            self._check_first_update()
        loss = outputs.get("loss")
        if type(loss) is not Tensor or loss.dim():
            loss = _mean_loss(outputs)
        self.backward(loss)
        self.step_outputs = outputs
        self.update(self.optimizer)
        self.step_outputs = None  # they hold the graph, whose memory the next step needs
        return outputs

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run the module and calculate losses and metrics.

        Args:
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled.
        """
        try:
            returned = self._inputs.call(self.module, inputs)
        except Exception as error:
            add_inputs(error, f"forward of {type(self.module).__name__}", self._inputs.passed(inputs))
            raise
        if type(returned) is dict and self._is_complete:
            return returned
        if type(returned) is Tensor and self._only_output is not None:
            outputs = {self._only_output: returned}
        else:
            outputs = self._named_outputs(returned)
        if self._terms:
            if "loss" in outputs:
                raise ArgumentError("loss", "forward returns an output 'loss' already; remove one of them")
            _add(outputs, self._terms, inputs, "loss")
            if self._sums_terms:
                weights = outputs.get("example_weight")
                outputs["loss"] = sum(term.scale * _mean(outputs[name], weights) for name, term in self._terms.items())
        if self._metrics:
            with_gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)  # half as dear as no_grad
            try:
                _add(outputs, self._metrics, inputs, "metrics")
            finally:
                torch.set_grad_enabled(with_gradients)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss.

        Raises:
            ArgumentError: the loss does not depend on any parameter that is trained.
        """
        self._minimised = loss
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if loss.requires_grad:
                raise
            message = "the loss depends on no parameter with requires_grad; there is nothing to train"
            raise ArgumentError("loss", message) from error

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Make an update with the gradients that are there; hooks are told before and after."""
        if optimizer is None:
            raise _NO_OPTIMIZER
        if self._notify_before is not None:
            self._notify_before()
        self._updated = True
        optimizer.step()
        if self._notify_after is not None:
            self._notify_after()
        if self.scheduler is not None and self.scheduler.on_update and optimizer is self.optimizer:
            self.scheduler.step(None)

    def before_epoch(self, epoch_id: int) -> None:
        """Forget what an epoch that did not come to its end has left."""
        if not self._evaluates:
            self._trained, self._stream = False, None

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Step the scheduler, after a training epoch only; after the zeroth, check what its checkpoint would keep.

        Raises:
            ArgumentError: it could not be loaded.
        """
        if self._before_update is not None:
            self._check_loadable(self._before_update)
        if self._trained and not self._evaluates and self.scheduler is not None and not self.scheduler.on_update:
            self.scheduler.step(epoch_data)

    def after_training(self, success: bool) -> None:
        """Let go of the batches that were copied ahead."""
        if self._prefetcher is not None:
            self._prefetcher.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer and scheduler, and what the module keeps beside its tensors."""
        return {
            "optimizer": optimizer_state(self.optimizer, self._configured) if self.optimizer is not None else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "extra": extra_state(self.module),
            "trained": self._trained,
            "modes": self._modes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; learning rates and other arguments that the config changed win.

        Raises:
            StateError: the config has another optimizer or scheduler, or a field has a value that it cannot have.
        """
        record(_STATE, may_lack=("modes",)).check(state)
        if self.optimizer is not None and state["optimizer"] is not None:
            load_optimizer_state(self.optimizer, state["optimizer"], self._configured)
        if (self.optimizer is None) is not (state["optimizer"] is None):
            raise StateError("the checkpoint was saved with an optimizer or without one, the config says otherwise")
        if (self.scheduler is None) is not (state["scheduler"] is None):
            raise StateError("model.scheduler was added or removed; a resume cannot change that")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self._is_schedule_pending = True
        self._trained = state["trained"]
        if "modes" in state:
            self._set_modes(state["modes"]["training"], frozenset(state["modes"]["others"]))

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StorageError: they cannot be written.
        """
        write_weights(collect_weights(self.module), directory)

    def stage(self) -> Callable[[Path], None] | None:
        """Copy the weights; return what writes them in any thread, None when a subclass saves in its own way."""
        if getattr(self.save, "__func__", None) is not TorchModel.save:
            return None
        return partial(write_weights, collect_weights(self.module, copied=True))

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and what the module keeps beside them from `state.pt`.

        Raises:
            StorageError: they cannot be read, or are not those of this module.
        """
        load_weights(self.module, directory)
        self.built_apart = None  # it fits
        if self.is_lazy:
            self._end_laziness()
        if extra_state(self.module):
            state = load_state(directory)
            with reading(f"{directory / FILE}", ANOTHER_CHECKPOINT):
                record({"model": record({"extra": _STATE["extra"]})}).check(state)
            extra = state["model"]["extra"]
            self.module.load_state_dict({**self.module.state_dict(), **extra})

    def _build_optimizer(self) -> None:
        """Build optimizer and scheduler from their forms, when all parameters have shapes."""
        optimizer, scheduler = self._forms
        self.optimizer = build_optimizer(self.module, optimizer) if optimizer is not None else None
        self.scheduler = build_scheduler(self.optimizer, scheduler) if scheduler is not None else None
        self._configured = configured_arguments(self.module, self.optimizer) if self.optimizer is not None else []

    def _first_tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of a batch, by which a lazy module gets its shapes, where no loop has done that before."""
        self.materialise(batch)
        return self._tensors(batch)

    def _end_laziness(self) -> None:
        """Take note that the module has all shapes."""
        self._random_of_lazy = None
        self._tensors = self._inputs.tensors
        end_laziness(self.module)
        own_memory(self.module)
        self._build_optimizer()

    def _check_saving(self) -> None:
        """Check before the first batch that a checkpoint could be saved, and loaded by a resume.

        Raises:
            ArgumentError: it could not.
        """
        self._check_that_weights_can_be_held()
        now = structure(self.module)
        kind = type(self.module).__name__
        changed = differences(self._registered, now, of_dtypes=False)
        if changed:
            raise ArgumentError(
                "module",
                f"no checkpoint of {kind} could be loaded: in before_training, which comes after the loading, a hook "
                f"or the model changes which parameters or buffers there are: {listed(changed)}; do that where the "
                "hook or the model is built",
            )
        anew = self.built_apart() if self.built_apart is not None else None
        changed = differences(anew, self._as_built) if anew is not None and self._as_built is not None else []
        if changed:
            raise ArgumentError(
                "module",
                f"no checkpoint of {kind} could be loaded: built from the same config once more, it has other "
                f"parameters or buffers: {listed(changed)}; they must depend on nothing but the config",
            )
        self._before_update = now

    def _check_first_update(self) -> None:
        """Check once, between the first forward of a training step and its update, what `_check_loadable` does."""
        if self._before_update is not None:
            self._check_loadable(self._before_update)
            self._before_update = None

    def _check_loadable(self, before: Structure) -> None:
        """Check that running the module has made no parameters or buffers of other kinds.

        Raises:
            ArgumentError: a resume could not load them.
        """
        changed = differences(before, structure(self.module))
        if changed:
            raise ArgumentError(
                "module",
                f"no checkpoint of {type(self.module).__name__} could be loaded: forward changes which parameters or "
                f"buffers there are: {listed(changed)}; create them in __init__, or use torch.nn.LazyLinear and its "
                "kind; the optimizer would not train parameters that are created later",
            )
        self._check_that_weights_can_be_held()

    def _check_that_weights_can_be_held(self) -> None:
        found = what_cannot_be_held(self.module)
        if found:
            raise ArgumentError(
                "module",
                f"the weights cannot be saved: {listed(found)}, which safetensors cannot hold; use another dtype or "
                "layout, such as torch.view_as_real of complex numbers, or a buffer with persistent=False beside "
                "get_extra_state()",
            )

    def _modes(self) -> dict[str, Any]:
        """Return the mode of the module, and the names of its parts that have another one."""
        training = self.module.training
        return {
            "training": training,
            "others": [name for name, part in self.module.named_modules() if part.training is not training],
        }

    def _set_modes(self, training: bool, others: frozenset[str]) -> None:
        self.module.train(training)
        for name, part in self.module.named_modules():
            if name in others:
                part.training = not training

    def _check_schedule(self) -> None:
        """Look, at the first batch of a resume, whether its schedule is over; the replay of a step is not a resume."""
        if self._is_schedule_pending and self._main_loop is not None and self._main_loop.has_run:
            self._is_schedule_pending = False
            assert self.scheduler is not None  # it was loaded
            self.scheduler.check_end()

    @property
    def _evaluates(self) -> bool:
        return self._main_loop is not None and self._main_loop.evaluating

    def _named_outputs(self, returned: Any) -> dict[str, Any]:
        names = self._outputs
        if isinstance(returned, Mapping):
            if names is None:
                return dict(returned)
            missing = [name for name in names if name not in returned]
            if missing:
                there = list(returned)
                hint = "".join(did_you_mean(name, there) for name in missing)
                raise ArgumentError(
                    "outputs", f"forward returns no {listed(missing)}{hint} (it returns {listed(there)})"
                )
            return {name: returned[name] for name in names}
        if names is None:
            kind = type(returned).__name__
            raise ArgumentError(
                "outputs", f"forward returns {kind}, not a mapping; name what it returns, e.g. [logits]"
            )
        values = returned if isinstance(returned, tuple | list) else (returned,)
        if len(values) != len(names):
            raise ArgumentError(
                "outputs", f"{list(names)} names {len(names)} values, but forward returns {len(values)}"
            )
        return dict(zip(names, values, strict=True))

    def _calculation_sources(self) -> tuple[list[str], list[str]]:
        """Return the sources that losses and metrics need, and the names that may be sources or outputs."""
        calculations = [*self._terms.values(), *self._metrics.values()]
        names = list(dict.fromkeys(name for each in calculations for name in each.inputs))
        if self._outputs is None:
            return [], names
        made = {*self._outputs, *self._terms, *self._metrics, "loss"}
        return [name for name in names if name not in made], []


class _Calculation:
    """A loss or metric with the names of its inputs."""

    def __init__(self, key: str, form: Any, device: torch.device) -> None:
        if not callable(form):
            raise ArgumentError(
                key.partition(".")[0], f"{key}: {form!r} is no form; write {{class: ..., inputs: [...]}}"
            )
        options: Mapping[str, Any] = getattr(form, "options", {})
        self.key = key
        self.inputs: Sequence[str] = options.get("inputs", ())
        self.scale = options.get("scale", 1.0)
        if not isinstance(self.inputs, list | tuple) or not self.inputs:
            message = f"{key}: 'inputs' lists the outputs and sources it is called with, e.g. [logits, label]"
            raise ArgumentError(key.partition(".")[0], message)
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float):
            raise ArgumentError(key.partition(".")[0], f"{key}: scale {self.scale!r} is no number")
        function = form()
        if isinstance(function, torch.nn.Module):
            function = function.to(device)
            if any(parameter.requires_grad for parameter in function.parameters()):
                message = f"{key}: it has parameters, which nothing would train or save; make it part of the module"
                raise ArgumentError(key.partition(".")[0], message)
        if not callable(function):
            raise ArgumentError(key.partition(".")[0], f"{key}: {type(function).__name__} cannot be called")
        self.function = function

    def __call__(self, outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Any:
        arguments = []
        try:
            for name in self.inputs:
                arguments.append(outputs[name] if name in outputs else inputs[name])  # noqa: PERF401 - no slower call
        except KeyError as error:
            there = [*outputs, *inputs]
            message = f"model.{self.key} needs {error.args[0]!r}, which is neither an output nor a source"
            hint = did_you_mean(str(error.args[0]), there)
            raise StreamError(f"{message}{hint} (there is {listed(there)})", first_batch=True) from None
        try:
            return self.function(*arguments)
        except Exception as error:
            add_inputs(error, f"model.{self.key}", map(describe, self.inputs, arguments))
            raise


def _calculations(key: str, forms: Any, device: torch.device) -> dict[str, _Calculation]:
    if forms is None:
        return {}
    if key == "loss" and callable(forms):
        return {"loss": _Calculation("loss", forms, device)}
    if not isinstance(forms, Mapping):
        raise ArgumentError(key, f"{forms!r} is no form; write {{class: ..., inputs: [...]}}")
    if "loss" in forms:
        raise ArgumentError(key, "'loss' is the name of what is minimised; choose another name")
    return {name: _Calculation(f"{key}.{name}", form, device) for name, form in forms.items()}


def _check_outputs(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    check_names("outputs", outputs)
    if len(set(outputs)) < len(outputs):
        raise ArgumentError("outputs", f"{list(outputs)} has a name twice")
    return tuple(outputs)


def _add(
    outputs: dict[str, Any], calculations: Mapping[str, _Calculation], inputs: Mapping[str, Tensor], key: str
) -> None:
    """Add what losses or metrics make of outputs and sources to the outputs."""
    made = {}
    for name, calculation in calculations.items():
        made[name] = calculation(outputs, inputs)
        if name in outputs:
            twice = listed([each for each in calculations if each in outputs])
            raise ArgumentError(key, f"there is an output {twice} already; give one of them another name")
    outputs.update(made)


def _mean_loss(outputs: Mapping[str, Any]) -> Tensor:
    loss = outputs.get("loss")
    if "loss" in outputs and not isinstance(loss, Tensor):
        kind = "NumPy array" if isinstance(loss, np.ndarray) else type(loss).__name__
        shown = "None" if loss is None else f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
        message = f"the output 'loss' is {shown}, not a tensor: forward must return a tensor with gradients"
        raise StreamError(f"{message}, without .item(), float() or .numpy()", first_batch=True)
    if not isinstance(loss, Tensor):
        there = listed(list(outputs))
        message = f"the outputs have no tensor 'loss', but {there}; return one from forward, or set model.loss"
        raise StreamError(message, first_batch=True)
    return _mean(loss, outputs.get("example_weight"))


def _mean(loss: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over the examples, weighted if there are weights; a scalar is the mean already."""
    if loss.dim() == 0:
        return loss
    if weights is None:
        return loss.mean()
    per_example = loss.flatten(1).mean(dim=1) if loss.dim() > 1 else loss
    if weights.shape != per_example.shape:
        message = f"output 'example_weight' has shape {tuple(weights.shape)}, not {tuple(per_example.shape)}"
        raise StreamError(f"{message}: it is one number an example")
    return (per_example * weights).sum() / weights.sum()


def _find_device(name: str) -> torch.device:
    if name == "auto":
        kinds = (("cuda", torch.cuda.is_available), ("mps", torch.backends.mps.is_available))
        return torch.device(next((kind for kind, available in kinds if available()), "cpu"))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ArgumentError("device", f"{name!r} cannot be used here: {reason}") from error
    return device
