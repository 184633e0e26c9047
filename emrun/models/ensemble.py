"""Ensemble: the aggregated outputs of several runs; and the base of models that are made of runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import ModuleList

from emrun.base.arguments import check_choice, expanded
from emrun.base.errors import ArgumentError, StateError, UsageError
from emrun.base.types import Batch, Strings, Values
from emrun.base.wording import listed
from emrun.hook import Loop
from emrun.model import AbstractModel, Target
from emrun.models.device import find_device, put
from emrun.models.forward_pass import ForwardPass
from emrun.models.module_model import ModuleModel
from emrun.models.outputs import Outputs
from emrun.models.sync_batch_norm import batch_norms
from emrun.models.torch_model import LossForms, MetricForms
from emrun.ranks.group import ranks
from emrun.storage.trace import TRACE

Runs = str | Sequence[str | Mapping[str, str | Strings]]
LoadModel = Callable[..., AbstractModel]
"""Called with a run directory, the name of a checkpoint and overrides, returns the model of the run."""


class MadeOfRuns(ModuleModel):
    """Base class of models that are made of the models of runs; a derived class says what becomes of their outputs."""

    is_loaded = True

    def __init__(
        self,
        load_model: LoadModel,
        runs: Runs,
        outputs: Strings | None = None,
        loss: LossForms | None = None,
        metrics: MetricForms | None = None,
    ) -> None:
        self.members = [_loaded(place, load_model, entry) for place, entry in _entries(runs)]
        """The runs in their order, each with its model; a run may be there twice, with two checkpoints."""
        self.wanted = outputs
        models = [model for _, model in self.members]
        self.in_units = {
            output: source
            for each in models
            for output, source in each.in_units.items()
            if outputs is None or output in outputs
        }
        devices = {str(getattr(each, "device", "cpu")) for each in models}
        if len(devices) > 1:
            raise ArgumentError(
                "runs", f"they are on {listed(sorted(devices))}; add overrides: [model.device=...] to an entry"
            )
        modules = ModuleList([each.module for each in models if isinstance(each, ModuleModel)])
        device = find_device(devices.pop())
        put(modules, device)
        modules.train()  # so the first batch sets all parts to evaluation mode
        if ranks().several and batch_norms(modules):
            self.least_rows = 2
        super().__init__(ForwardPass(modules, device, [], Outputs(outputs, loss, metrics, device, modules)))

    @property
    def targets(self) -> Sequence[Target]:  # type: ignore[override]
        """What the losses compare, or else those of the last run."""
        return super().targets or self.members[-1][1].targets

    def part_with(self, source: str) -> str:
        """Return the run, the loss or the metric that needs a source, for messages."""
        return next(
            (f"run {run}" for run, each in self.members if source in each.input_names), None
        ) or super().part_with(source)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Take the units of the runs' outputs from the dataset."""
        if main_loop.dataset is not None:
            self.use_dataset(main_loop.dataset)

    @abstractmethod
    def returned(self, batch: Batch, stream: str) -> Values:
        """Return the outputs for a batch, before losses and metrics."""

    def run(self, batch: Batch, train: bool, stream: str) -> Values:
        """Run the members on a batch; calculate losses and metrics.

        Raises:
            UsageError: `train` is true.
            StateError: the runs do not fit each other or the batch.
        """
        if train:
            raise UsageError(f"{type(self).__name__} is made of finished runs and cannot be trained")
        forward_pass = self._forward_pass
        forward_pass.outputs.prepare(stream)
        with torch.no_grad():
            inputs = forward_pass.tensors(batch)
            outputs = forward_pass.outputs.of(self.returned(batch, stream), inputs)
            self._measure(outputs, inputs, train, stream, batch)
        return outputs

    def program_inputs(self, batch: Batch) -> Values:
        """Return the sources of a batch as a program of the model gets them; see `ModuleModel`."""
        models = [each for _, each in self.members if isinstance(each, ModuleModel)]
        return {name: value for each in models for name, value in each.program_inputs(batch).items()}

    def save(self, directory: Path) -> None:
        """Write nothing: the runs have the weights."""

    def load(self, directory: Path) -> None:
        """Read nothing: the weights are those of the runs."""


class Ensemble(MadeOfRuns):
    """Runs the models of finished runs on each batch and aggregates their outputs. It cannot be trained.

        model:
          class: Ensemble
          runs: [log/a, log/b, {run: log/c, checkpoint: latest}]
          outputs: [logits]
          metrics: {accuracy: {import: emrun.metrics.accuracy, inputs: [logits, label]}}

    With this as `config.yaml` of a directory, `emrun eval DIRECTORY valid` evaluates it and `emrun predict` writes its
    outputs. The losses and metrics of the runs are left out: `loss` and `metrics` are calculated of what is aggregated.
    What the runs have in `units` is given its unit after it was aggregated, as a `TorchModel` does after its losses.
    The runs are loaded when the model is built, with the dataset of this config.

    Args:
        runs: run directories, or the directory that has them, in the order of their names. `{run: DIR, checkpoint:
            NAME, overrides: [model.device=cpu]}` takes another checkpoint than `best` or else `latest`, and changes the
            config of the run. A directory may have a config of an `Ensemble` or a `Sequence` itself.
        outputs: the outputs that are aggregated; every run must return them. Default: all that the first run returns.
        loss: see `TorchModel`.
        metrics: see `TorchModel`.
        aggregation: `mean`, or `major_vote`: the value that most runs return, of several the one that comes first.
            Votes need whole numbers or booleans.

    Raises:
        ArgumentError: a run cannot be loaded, or does not have the outputs or the classes of the others.
        StateError: the runs return values of different shapes.
    """

    def __init__(
        self,
        load_model: LoadModel,
        runs: Runs,
        outputs: Strings | None = None,
        loss: LossForms | None = None,
        metrics: MetricForms | None = None,
        aggregation: Literal["mean", "major_vote"] = "mean",
    ) -> None:
        check_choice("aggregation", aggregation, Literal["mean", "major_vote"])
        super().__init__(load_model, runs, outputs, loss, metrics)
        self._votes = aggregation == "major_vote"
        for run, each in self.members:
            if message := _lacks(run, outputs or (), each.output_names or outputs or ()):  # none are known as yet
                raise ArgumentError("outputs", message)

    @property
    def input_names(self) -> Strings:
        """Names of the sources that any of the runs needs, and those of losses and metrics."""
        needed = [name for _, each in self.members for name in each.input_names]
        return list(dict.fromkeys([*needed, *super().input_names]))

    @property
    def optional_input_names(self) -> Strings:  # type: ignore[override]
        """Names of the sources that any of the runs, a loss or a metric uses if a batch has them."""
        used = [name for _, each in self.members for name in each.optional_input_names]
        return list(dict.fromkeys([*used, *super().optional_input_names]))

    def returned(self, batch: Batch, stream: str) -> Values:
        """Return the aggregated outputs."""
        found = [outputs_of(run, each, batch, stream) for run, each in self.members]
        wanted = list(found[0]) if self.wanted is None else self.wanted
        for (run, _), outputs in zip(self.members, found, strict=True):
            if message := _lacks(run, wanted, list(outputs)):
                raise StateError(message)
        return {name: self._aggregated(name, [outputs[name] for outputs in found]) for name in wanted}

    def _aggregated(self, name: str, values: list[Any]) -> Tensor:
        """Return the mean of an output, of whole numbers and booleans in float32, or what most runs return."""
        try:
            stacked = torch.stack([torch.as_tensor(each) for each in values])
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"output {name!r} of the runs: {error}; choose others: model.outputs=[...]") from None
        if not self._votes:
            return stacked.mean(0) if stacked.is_floating_point() else stacked.float().mean(0)
        if stacked.is_floating_point():
            raise StateError(f"output {name!r} has fractions, which cannot be voted on; use mean, or other outputs")
        votes = torch.stack([(stacked == each).sum(0) for each in stacked])
        order = torch.arange(len(stacked), device=stacked.device).view(-1, *[1] * (stacked.dim() - 1))
        first = (votes * len(stacked) - order).argmax(0, keepdim=True)  # no two of them are equal
        return stacked.gather(0, first)[0]


def outputs_of(run: str, model: AbstractModel, batch: Batch, stream: str) -> Values:
    """Return the outputs of the model of a run for a batch that are neither losses nor metrics.

    Raises:
        StateError: the batch lacks what the model needs.
    """
    missing = [each for each in model.input_names if each not in batch]
    if missing:
        raise StateError(f"run {run} needs {listed(missing)}; there is {listed(list(batch))}")
    outputs = model.run(batch, False, stream)
    return {name: value for name, value in outputs.items() if name not in {"loss", *model.metric_names}}


def _lacks(run: str, wanted: Strings, there: Strings) -> str | None:
    missing = [name for name in wanted if name not in there]
    return f"run {run} does not return {listed(missing)} (it returns {listed(there)})" if missing else None


def _entries(runs: Any) -> list[tuple[str, Any]]:
    """Return the runs, each with its place in the argument.

    Raises:
        ArgumentError: it has another form, or there is no run.
    """
    if isinstance(runs, str):
        found = sorted(str(each.parent) for each in expanded(runs).glob(f"*/{TRACE}"))
        if not found:
            raise ArgumentError("runs", f"there are no runs in {runs}; for a single run, write a list: [{runs}]")
        return [("runs", each) for each in found]
    if not isinstance(runs, list | tuple) or not runs:
        raise ArgumentError("runs", f"{runs!r} is neither a list of run directories nor a directory of runs")
    return [(f"runs[{index}]", each) for index, each in enumerate(runs)]


def _loaded(place: str, load_model: LoadModel, entry: Any) -> tuple[str, AbstractModel]:
    """Return a run and its model.

    Raises:
        ArgumentError: the entry has another form, or its run cannot be used.
    """
    given = {"run": entry} if isinstance(entry, str) else entry
    keys = ("run", "checkpoint", "overrides")
    if not isinstance(given, Mapping) or not isinstance(given.get("run"), str) or given.keys() - {*keys}:
        raise ArgumentError(place, f"{entry!r} is neither a run directory nor a mapping with {listed(keys)}")
    try:
        return given["run"], load_model(given["run"], given.get("checkpoint"), given.get("overrides") or ())
    except (UsageError, StateError) as error:
        raise ArgumentError(place, f"{given['run']}: {error}") from error
