"""The outputs of a model for a batch: the named values that forward returns, with losses and metrics."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Module, NLLLoss
from torch.nn.functional import cross_entropy, nll_loss
from torch.overrides import TorchFunctionMode

from emrun.base.arguments import check_names, check_number
from emrun.base.errors import ArgumentError, StreamError, add_inputs
from emrun.base.preparations import named_classes
from emrun.base.types import BALANCED, Factory, Strings, Values, parameters_of
from emrun.base.wording import counted, did_you_mean, few, listed
from emrun.dataset import classes_of
from emrun.losses import EXAMPLE_WEIGHTS
from emrun.model import Target
from emrun.models.inputs import describe, values_of
from emrun.models.modes import Tensors
from emrun.models.units import Units
from emrun.ranks.parts import loss_weights, weighted

_LOG = logging.getLogger(__name__)
_OF_CLASSES = (cross_entropy, nll_loss)
_ACTIVATIONS = {
    **dict.fromkeys(("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"), "softmax"),
    **dict.fromkeys(("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), "sigmoid"),
    **dict.fromkeys(("BCELoss", "binary_cross_entropy"), "identity"),
}
"""Loss of torch -> how the output that it gets becomes probabilities."""
_WEIGHT = "example_weight"


class Outputs:
    """Names the values that forward returns, and adds losses and metrics.

    Args:
        names: the names of the values that forward returns; None for all keys of a mapping.
        loss: one form, or name -> form.
        metrics: name -> form.
        device: the device of losses that are modules.
        module: what a loss with a parameter `module` gets.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        names: Strings | None,
        loss: Any,
        metrics: Any,
        device: torch.device,
        module: Module | None = None,
    ) -> None:
        if names is not None:
            check_names("outputs", names)
            if len(set(names)) < len(names):
                raise ArgumentError("outputs", f"{list(names)} names an output twice")
        self._named = tuple(names) if names is not None else None
        self._only = names[0] if names is not None and len(names) == 1 else None
        self.terms = calculations("loss", loss, device, module)
        """The losses by their names; a single one is called `loss`."""
        self.targets = [each.target for each in self.terms.values() if each.inputs]
        """What the losses compare."""
        self._loss = self.terms.get("loss")
        """The only loss, if it has no name."""
        self._sums_terms = "loss" not in self.terms and bool(self.terms)
        self._weights = _weights_of(self.terms)
        if self._weights is not None:  # which come with it
            self._loss = None
        measured = calculations("metrics", metrics, device)
        self.only_in = {name: each.streams for name, each in measured.items() if each.streams is not None}
        """The metrics that are not calculated in all streams, with their streams."""
        self.of_batches = {name: each for name, each in measured.items() if each.metric is None}
        """The metrics that are outputs."""
        self.of_streams = {name: each for name, each in measured.items() if each.metric is not None}
        """The metrics that are computed once for each stream; calling one updates it."""
        self._metrics: Calculations = {}
        self.prepare("")
        self._units: Units | None = None
        self._left_out: set[str] | None = None  # keys of losses and metrics, after `leave_out_missing`
        self._is_complete = not (self.terms or self.of_batches or names)  # nothing is added to what forward returns

    def use_units(self, units: Units) -> None:
        """Change outputs to the unit of the data, after the losses and before the metrics."""
        self._units = units
        self._is_complete = False

    def use_dataset(self, dataset: Any) -> None:
        """Give losses with `weight: balanced` the counts of the classes that a dataset has, and check what losses read.

        Raises:
            ArgumentError: the dataset has no counts of them, or a cross entropy reads a picture as classes.
        """
        for each in self.terms.values():
            each.check_classes(dataset)
            each.balance(dataset)

    def other_classes(self, outputs: Values, dataset: Any) -> Iterator[str]:
        """Yield what is said of logits of a batch with another number of classes than a dataset has names.

        A list of names is that of `label`, or of the only source of classes.
        """
        terms = [each for each in self.terms.values() if each.reads_classes and len(each.inputs) > 1]
        is_only = len({each.inputs[1] for each in terms}) == 1
        for term in terms:
            name, source, *_ = term.inputs
            is_meant = is_only or source == "label" or isinstance(named_classes(dataset), Mapping)
            names = classes_of(dataset, source) if is_meant else None
            shape: Sequence[int] = getattr(outputs.get(name), "shape", ())
            most = len(names or ()) + getattr(dataset, "unnamed_classes", 0)
            if names is not None and len(shape) > 1 and not len(names) <= shape[1] <= most:
                known = f"the dataset has {counted(len(names), 'name')} of classes of {source!r} ({few(names)})"
                yield f"model.{term.key}: {name!r} has {shape[1]} classes, but {known}"

    @property
    def names(self) -> list[str]:
        """The names of the outputs, as far as they are known before the first batch."""
        weights = [_WEIGHT] if self._weights is not None else []
        loss = ["loss"] if self._sums_terms else []
        return [*(self._named or ()), *self.terms, *loss, *weights, *self.of_batches]

    @property
    def may_have_weights(self) -> bool:
        """Whether the examples of a batch may have weights: whether forward may return some."""
        return self._named is None or not {"example_weight", "loss_weight"}.isdisjoint(self.names)

    def sources(self) -> tuple[list[str], list[str]]:
        """Return the sources that losses and metrics need, and the names that may be sources or outputs."""
        made = {*self.names, "loss"} if self._named is not None else set[str]()
        wanted = [(name, each) for each in self._all() for name in each.inputs if name not in made]
        needed = {name: None for name, each in wanted if self._named is not None and each.streams is None}
        return list(needed), list(dict.fromkeys(name for name, _ in wanted if name not in needed))

    def prepare(self, stream: str) -> None:
        """Prepare for a batch of a stream: choose the metrics that are calculated there."""
        self._metrics = {name: each for name, each in self.of_batches.items() if each.is_of(stream)}

    def leave_out_missing(self) -> None:
        """From now on, leave out losses and metrics that need what is not there; drop the metrics of streams."""
        self._left_out = set()
        self._loss = None
        self.of_streams = {}

    def leave_out_all(self) -> None:
        """From now on, there are no losses and no metrics."""
        self.terms = self.of_batches = self.of_streams = self._metrics = {}
        self.only_in = {}
        self._loss = None
        self._sums_terms = False

    def part_with(self, source: str) -> str | None:
        """Return the key of the first loss or metric that names a source, None if none does."""
        if self._left_out is not None:  # then they need nothing
            return None
        return next((f"model.{each.key}" for each in self._all() if source in each.inputs), None)

    def _all(self) -> list[Calculation]:
        return [*self.terms.values(), *self.of_batches.values(), *self.of_streams.values()]

    def of(self, returned: Any, inputs: Tensors) -> dict[str, Any]:
        """Return the outputs of a batch.

        Args:
            returned: what forward returned.
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled.

        Raises:
            ArgumentError: forward returns other values than the names say, or an output exists twice.
            StreamError: a loss or metric needs a name that is neither an output nor a source.
        """
        if returned.__class__ is Tensor and self._only is not None:
            outputs = {self._only: returned}
        elif self._is_complete and type(returned) is dict:
            return returned
        else:
            outputs = self._by_name(returned)
        if self._loss is not None and "loss" not in outputs:
            outputs["loss"] = self._loss(outputs, inputs)
        elif self.terms:
            if "loss" in outputs:
                raise ArgumentError("loss", "forward returns an output 'loss' already; remove one of them")
            self._add(outputs, self.terms, inputs, "loss")
            if self._weights is not None and _WEIGHT not in outputs:
                source, weigh = self._weights
                labels = outputs.get(source, inputs.get(source))
                if labels is not None:
                    outputs[_WEIGHT] = weigh(labels)
            if self._sums_terms and all(name in outputs for name in self.terms):
                weights = loss_weights(outputs)
                outputs["loss"] = sum(each.scale * mean(outputs[name], weights) for name, each in self.terms.items())
        if self._units is not None:
            self._units.apply(outputs, inputs)
        if self._metrics:
            with_gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)  # costs half as much as no_grad
            try:
                self._add(outputs, self._metrics, inputs, "metrics")
            finally:
                torch.set_grad_enabled(with_gradients)
        return outputs

    def _add(self, outputs: dict[str, Any], calculations: Calculations, inputs: Tensors, argument: str) -> None:
        """Calculate losses or metrics from outputs and sources, and add them to the outputs."""
        made = {}
        for name, calculation in calculations.items():
            if self._left_out is not None and self._lacks(calculation, {**inputs, **outputs}):
                continue
            made[name] = calculation(outputs, inputs)
            if name in outputs:
                raise ArgumentError(
                    argument,
                    f"there is an output {listed([each for each in calculations if each in outputs])} already; "
                    "rename one of the two",
                )
        outputs.update(made)

    def _lacks(self, calculation: Calculation, there: Values) -> bool:
        """Return whether a loss or metric needs what is not there; log this once."""
        missing = [name for name in calculation.inputs if name not in there]
        if missing and self._left_out is not None and calculation.key not in self._left_out:
            self._left_out.add(calculation.key)
            _LOG.info("model.%s is left out: the batch has no %r", calculation.key, missing[0])
        return bool(missing)

    def _by_name(self, returned: Any) -> dict[str, Any]:
        names = self._named
        if isinstance(returned, Mapping):
            if names is None:
                return dict(returned)
            missing = [name for name in names if name not in returned]
            if missing:
                hint = "".join(did_you_mean(name, returned) for name in missing)
                raise ArgumentError(
                    "outputs", f"forward returns no {listed(missing)}{hint} (it returns {listed(list(returned))})"
                )
            return {name: returned[name] for name in names}
        if names is None:
            raise ArgumentError(
                "outputs", f"forward returns {type(returned).__name__}, not a mapping; name its values, e.g. [logits]"
            )
        values = returned if isinstance(returned, tuple | list) else (returned,)
        if len(values) != len(names):
            raise ArgumentError(
                "outputs", f"{list(names)} names {len(names)} values, but forward returns {len(values)}"
            )
        return dict(zip(names, values, strict=True))


class Calculation:
    """A loss or metric with the names of its inputs.

    A metric with the methods `update`, `compute` and `reset` is of a whole stream: a call updates it.

    Args:
        key: the key in the model's section.
        form: returns the object or function; its options are `inputs`, for a loss `scale`, for a metric `streams`.
        device: the device of a loss that is a module.
        module: what the loss gets if it has a parameter `module`, as a penalty for weights has; None for a metric.

    Raises:
        ArgumentError: the loss or metric cannot be calculated.
    """

    def __init__(self, key: str, form: Any, device: torch.device, module: Module | None = None) -> None:
        self.key = key
        if not callable(form):
            raise ArgumentError(key, f"{form!r} is not a class or function; write {{class: ..., inputs: [...]}}")
        options: Values = getattr(form, "options", {})
        self.inputs: Strings = options.get("inputs", ())
        self.scale = options.get("scale", 1.0)
        self.streams: Strings | None = options.get("streams")
        """The streams in which it is calculated; None for all."""
        check_names(f"{key}.inputs", self.inputs)
        check_number(f"{key}.scale", self.scale)
        if self.streams is not None:
            check_names(f"{key}.streams", self.streams)
            if not self.streams:
                raise ArgumentError(f"{key}.streams", "the list is empty; leave it out for all streams")
        is_loss = key.startswith("loss")
        self._is_balanced = is_loss and _is_balanced(form)
        self._counts: Sequence[int] | None = None
        self._advice = ""  # what to write if the module has too few classes
        self._form = _with_weight(form, None) if self._is_balanced else form
        self._device = device
        function = self._form()
        self.metric: Any = None if is_loss or not is_of_streams(function) else function
        """The object, if it is a metric of whole streams."""
        if self.metric is not None:
            if isinstance(function, type):
                raise ArgumentError(key, f"{function.__name__} is a class; write class instead of import")
            if callable(getattr(function, "to", None)):
                function.to(device)
            function = function.update
        elif isinstance(function, Module):
            function = function.to(device)
            if any(parameter.requires_grad for parameter in function.parameters()):
                raise ArgumentError(
                    key, "it has parameters, which would not be trained or saved; make it part of the module"
                )
        if not callable(function):
            advice = "" if is_loss else ", and does not have the methods update, compute and reset"
            raise ArgumentError(key, f"{type(function).__name__} cannot be called{advice}")
        self.function = function
        self._values = values_of(self.inputs)
        place = _place_of_module(function) if module is not None else None
        self.takes_module = place is not None
        self._module = module if self.takes_module else None
        self._call = self._bound(function)
        if self._is_balanced:
            self._call = self._begin_balanced
        elif is_loss:
            self._call = partial(self._check_first, self._call)
        if place is not None and place < len(self.inputs):
            raise ArgumentError(key, "its parameter 'module' must come after those of its 'inputs'")
        if not self.inputs and place is None:
            raise ArgumentError(
                key, "set 'inputs' to the outputs and sources that it is called with, e.g. [logits, label]"
            )

    def _check_first(self, call: Any, *arguments: Any) -> Any:
        """Calculate a loss for the first time; its first two inputs may not be compared each with each as they are.

        Raises:
            ArgumentError: a function of torch gets both, or what was calculated of them in the same shapes, and would
                repeat both, as (B, 1) and (B,) to (B, B).
        """
        self._call = call
        tensors = [each for each in arguments[:2] if isinstance(each, Tensor) and not each.is_nested]
        if len(tensors) < 2:
            return call(*arguments)
        try:
            whole = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
        except RuntimeError:  # they cannot be compared number by number
            return call(*arguments)
        with _Together(tensors) as together:
            found = call(*arguments)
        if together.is_found and all(each.shape != whole for each in tensors):
            raise ArgumentError(
                self.key,
                f"{self.inputs[0]!r} is {tuple(tensors[0].shape)} and {self.inputs[1]!r} is "
                f"{tuple(tensors[1].shape)}: the loss would compare each with "
                f"each, {tuple(whole)}; give both one shape, as by .squeeze(1) in forward; if each with each is meant, "
                "make such shapes from inputs of one shape in a loss of your own",
            )
        return found

    def check_classes(self, dataset: Any) -> None:
        """Check that what a cross entropy reads as classes is no picture, which it would take for probabilities.

        Raises:
            ArgumentError: it is a picture.
        """
        source = self.inputs[1] if len(self.inputs) > 1 else ""
        instead = getattr(dataset, "classes_instead", lambda source: None)(source)
        if instead is not None and self.reads_classes:
            what = f"{source!r} is a picture, whose values the loss would take for probabilities of classes"
            raise ArgumentError(f"{self.key}.inputs", f"{what}; {instead}")
        names = named_classes(dataset) if self.reads_classes else None
        number = "classes"
        if isinstance(names, Mapping):
            names = names.get(source)
            number = f"classes.{source}"
        if names:
            self._advice = f"the data have {len(names)} classes ({few(names)}); write ${{data:{number}}}"

    @property
    def reads_classes(self) -> bool:
        """Whether its inputs are the logits of classes, or logarithms of their probabilities, and the classes."""
        return self.function in _OF_CLASSES or isinstance(self.function, CrossEntropyLoss | NLLLoss)

    def balance(self, dataset: Any) -> None:
        """With `weight: balanced`, take from a dataset how many train rows each class of the second input has.

        Raises:
            ArgumentError: the dataset does not know this.
        """
        if not self._is_balanced:
            return
        source = self.inputs[1] if len(self.inputs) > 1 else None
        self._counts = getattr(dataset, "class_counts", lambda source: None)(source)
        if self._counts is None:
            what = f"the run keeps no counts of the classes of {source!r}, its second input; write "
            if "split" in inspect.signature(type(dataset)).parameters:
                what += f"split: {{valid: 0.2, by: {source}}} in the dataset, or "
            raise ArgumentError(f"{self.key}.weight", f"{what}a list with the weight of each class")

    def _begin_balanced(self, *arguments: Any) -> Any:
        """Calculate a balanced loss for the first time, when its first input tells the number of classes.

        The weights are those of scikit-learn; a class without train rows, such as that of unknown categories, has 1.
        """
        if self._counts is None:
            raise ArgumentError(f"{self.key}.weight", "only a run has the counts of classes; write a list of weights")
        counts = torch.tensor(self._counts, dtype=torch.float64)
        shape = tuple(arguments[0].shape)
        if len(shape) < 2 or shape[1] < len(counts):
            what = f"{self.inputs[0]!r} is {shape}, but there are {len(counts)} classes; balanced needs (B, classes)"
            raise ArgumentError(f"{self.key}.weight", what)
        weight = torch.ones(shape[1], dtype=torch.float64)
        weight[: len(counts)] = torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 1.0)
        self.function = _with_weight(self._form, weight.to(torch.get_default_dtype()))()
        if isinstance(self.function, Module):
            self.function.to(self._device)
        return self._check_first(self._bound(self.function), *arguments)

    @property
    def target(self) -> Target:
        """What a loss compares, by its first two inputs."""
        kinds = type(self.function).__mro__ if isinstance(self.function, Module) else [self.function]
        names = [kind.__name__ for kind in kinds if getattr(kind, "__module__", "").startswith("torch.")]
        activation = next((_ACTIVATIONS[name] for name in names if name in _ACTIVATIONS), None)
        name = getattr(kinds[0], "__name__", self.key)
        source = self.inputs[1] if len(self.inputs) > 1 else None
        return Target(name, self.inputs[0], source, activation)

    def _bound(self, function: Any) -> Any:
        return function if self._module is None else partial(function, module=self._module)

    def is_of(self, stream: str) -> bool:
        """Return whether it is calculated in a stream."""
        return self.streams is None or stream in self.streams

    def __call__(self, outputs: Values, inputs: Tensors) -> Any:
        """Return the loss or metric; an error in it gets a note with its inputs."""
        try:
            arguments = self._values({**inputs, **outputs})
        except KeyError as error:
            there = [*outputs, *inputs]
            raise StreamError(
                f"model.{self.key} needs {error.args[0]!r}, which is neither an output nor a source"
                f"{did_you_mean(str(error.args[0]), there)} (there is {listed(there)})",
                first_batch=True,
            ) from None
        try:
            return self._call(*arguments)
        except Exception as error:
            add_inputs(error, f"model.{self.key}", map(describe, self.inputs, arguments))
            if self._advice and str(error).startswith("Target "):
                error.add_note(f"{self._advice} as the number of classes of the module")
            raise


def _with_weight(form: Factory, weight: Tensor | None) -> Factory:
    found = copy.copy(form)
    found.kwargs = {**form.kwargs, "weight": weight}
    return found


def _is_balanced(form: Any) -> bool:
    """Return whether a loss has `weight: balanced`, for a parameter that takes a tensor."""
    if getattr(form, "kwargs", {}).get("weight") != BALANCED:
        return False
    parameter = parameters_of(form.target).get("weight")
    return parameter is not None and "Tensor" in str(parameter.annotation)


class _Together(TorchFunctionMode):
    """Finds whether a function of torch is called with tensors, or with others of their shapes that are no views.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._ids = set(map(id, tensors))
        self._shapes = {each.shape for each in tensors}
        self.is_found = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        self.is_found |= self._shapes <= {each.shape for each in given if id(each) in self._ids or not each._is_view()}
        return function(*args, **(kwargs or {}))


def _place_of_module(function: Any) -> int | None:
    """Return the index of the parameter `module` of a loss; None if it has no such parameter."""
    called = function.forward if isinstance(function, Module) else function
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # some functions of torch have no signature
        return None
    return names.index("module") if "module" in names else None


def is_of_streams(metric: Any) -> bool:
    """Return whether a metric is of a whole stream, rather than a function of a batch."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _weights_of(terms: Mapping[str, Calculation]) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Return what the examples are weighted by, if a loss weights them: an output or source, and a function of it.

    Raises:
        ArgumentError: two losses weight them by different sources.
    """
    found = [
        (each, weigh)
        for each in terms.values()
        for loss, weigh in EXAMPLE_WEIGHTS.items()
        if each.function is loss and len(each.inputs) > 1
    ]
    for each, _ in found[1:]:
        if each.inputs[1] != found[0][0].inputs[1]:
            what = f"the examples have one weight, which {found[0][0].key} takes from {found[0][0].inputs[1]!r}"
            raise ArgumentError(each.key, f"{what}, and this loss from {each.inputs[1]!r}; give both the same labels")
    return (found[0][0].inputs[1], found[0][1]) if found else None


Calculations = Mapping[str, Calculation]
"""The losses or metrics by their names."""


def calculations(key: str, forms: Any, device: torch.device, module: Module | None = None) -> Calculations:
    """Return the losses or metrics by their names.

    Args:
        key: `loss` or `metrics`.
        forms: a form, named `loss`, or name -> form.
        device: the model's device.
        module: what losses with a parameter `module` get.

    Raises:
        ArgumentError: a loss or metric cannot be calculated, or has a name that is not allowed.
    """
    if forms is None:
        return {}
    if key == "loss" and callable(forms):
        return {"loss": Calculation("loss", forms, device, module)}
    if not isinstance(forms, Mapping):
        raise ArgumentError(key, f"{forms!r} is not a class or function; write {{class: ..., inputs: [...]}}")
    if "loss" in forms:
        raise ArgumentError(key, "'loss' is the name of the minimised sum; choose another name")
    return {name: Calculation(f"{key}.{name}", form, device, module) for name, form in forms.items()}


def mean_loss(outputs: Values) -> Tensor:
    """Return the mean of the output `loss` over the examples.

    Raises:
        StreamError: there is no tensor `loss`, or the weights do not have one number per example.
    """
    loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        return mean(loss, loss_weights(outputs))
    if "loss" in outputs:
        raise StreamError(
            f"the output 'loss' is not a tensor, but {loss!r:.40}: forward must return a tensor with gradients"
            ", without .item(), float() or .numpy()",
            first_batch=True,
        )
    raise StreamError(
        f"there is no output 'loss' (there is {listed(list(outputs))}); return a tensor 'loss' from forward"
        ", or set model.loss",
        first_batch=True,
    )


def mean(loss: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over the examples, weighted if there are weights; a scalar is returned unchanged.

    If all weights are 0, the mean is NaN and its gradients are 0.

    Args:
        loss: of shape (B, ...), or a scalar.
        weights: of shape (B,).

    Raises:
        StreamError: the weights have another shape.
    """
    if loss.dim() == 0:
        return loss
    if weights is None:
        return loss.mean()
    per_example = loss.flatten(1).mean(dim=1) if loss.dim() > 1 else loss
    if weights.shape != per_example.shape:
        raise StreamError(
            f"output 'loss_weight' or 'example_weight' has shape {tuple(weights.shape)}, not {tuple(per_example.shape)}"
            ": it must have one number per example"
        )
    return weighted(per_example, weights).sum() / weights.sum()  # type: ignore[no-any-return]
