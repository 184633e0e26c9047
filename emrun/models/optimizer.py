"""Optimizer and scheduler of a `TorchModel`, from their forms in a config."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, LinearLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from emrun.errors import ArgumentError, StateError
from emrun.fields import ANYTHING, FLAG, TEXT, FieldError, Kind, mapping_of, optional, record, sequence_of, shown, whole
from emrun.types import EpochData, Factory
from emrun.wording import listed

_LOG = logging.getLogger(__name__)

_PARTS = "_schedulers"  # where torch's schedulers keep those that they are made of, and their states


def build_optimizer(module: torch.nn.Module, form: Callable[..., Any]) -> torch.optim.Optimizer:
    """Build the optimizer of a module's parameters.

    Args:
        module: what is trained.
        form: called with the parameters; its option `groups` is a list of `{match: REGEX, ...}`.

    Raises:
        ArgumentError: a group matches nothing, a parameter matches two, or the module has no parameters.
    """
    groups = getattr(form, "options", {}).get("groups") or []
    if not isinstance(groups, list) or not all(
        isinstance(g, Mapping) and isinstance(g.get("match"), str) for g in groups
    ):
        raise ArgumentError("optimizer", f"groups: {groups!r} is no list of mappings {{match: REGEX, argument: value}}")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ArgumentError("optimizer", f"module {type(module).__name__} has no parameters to train")
    if not groups:
        optimizer = form(list(parameters.values()))
    else:
        owners: dict[str, list[str]] = {name: _matching(name, groups) for name in parameters}
        for name, matches in owners.items():
            if len(matches) > 1:
                raise ArgumentError("optimizer", f"groups: parameter {name!r} matches {' and '.join(matches)}")
        rest = [parameters[name] for name, matches in owners.items() if not matches]
        param_groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
        for group in groups:
            members = [parameters[name] for name, matches in owners.items() if matches == [group["match"]]]
            if not members:
                message = f"groups: {group['match']!r} matches none of the parameters {listed(list(parameters)[:20])}"
                raise ArgumentError("optimizer", message)
            param_groups.append({"params": members, **{k: v for k, v in group.items() if k != "match"}})
        optimizer = form(param_groups)
        defaults = getattr(optimizer, "defaults", {})
        unknown = [k for group in groups for k in group if k != "match" and k not in defaults]
        if unknown and defaults:
            allowed = listed(sorted(defaults))
            raise ArgumentError("optimizer", f"groups: unknown argument {unknown[0]!r}; allowed: {allowed}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError("optimizer", f"{type(optimizer).__name__} is no torch.optim.Optimizer")
    return optimizer


def clear_gradients(optimizer: torch.optim.Optimizer | None, others: Iterable[torch.nn.Parameter] = ()) -> None:
    """Set all gradients to None, in a fifth of the time that torch's own method takes for a small model.

    Args:
        optimizer: whose parameters are cleared. A `zero_grad` of its own decides what becomes of their gradients.
        others: parameters that are cleared beside them.
    """
    if optimizer is not None and getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()  # it is more than torch's
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        others = [parameter for parameter in others if id(parameter) not in own]
    elif optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    for parameter in others:
        parameter.grad = None


def all_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return what `module.parameters()` yields, in a third of the time; a shared parameter may be there twice."""
    parameters = []
    modules = [module]
    for each in modules:  # grows on the way
        parameters += [parameter for parameter in each._parameters.values() if parameter is not None]
        modules += [child for child in each._modules.values() if child is not None]
    return parameters


def parameters_beside(
    parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> list[torch.nn.Parameter]:
    """Return those of a module's parameters that its optimizer does not hold."""
    groups = optimizer.param_groups if optimizer is not None else []
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return [parameter for parameter in parameters if id(parameter) not in held]


class Traces:
    """Tells whether a step of training that makes its updates itself has made one.

    Optimizers of torch tell when they step, and operations count the versions of a parameter. What changes a parameter
    through `.data` alone leaves no trace.
    """

    _steps = 0
    _counts = False
    _first: Callable[[], None] | None = None  # called before a step

    def __init__(self) -> None:
        self._before: int | None = None
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._versions: list[int] = []

    def begin(self, parameters: Sequence[torch.nn.Parameter], first: Callable[[], None] | None = None) -> None:
        """Take note of the parameters before a step.

        Args:
            parameters: the parameters.
            first: called before the first update of an optimizer, of whichever parameters.
        """
        Traces._first = first
        if not Traces._counts:
            Traces._counts = True
            register_optimizer_step_pre_hook(Traces._count)
        self._before = Traces._steps
        self._parameters = parameters
        self._versions = [parameter._version for parameter in parameters]

    def has_updated(self) -> bool:
        """Tell whether an optimizer has stepped, or a parameter was changed, since then."""
        now = [parameter._version for parameter in self._parameters]
        return now != self._versions or self._before not in (None, Traces._steps)

    @staticmethod
    def _count(*_: Any) -> None:
        if Traces._first is not None:
            first, Traces._first = Traces._first, None
            first()
        Traces._steps += 1


def has_optimizer(model: object) -> bool:
    """Tell whether an attribute of a model is an optimizer of torch, whose steps leave traces."""
    return any(isinstance(each, torch.optim.Optimizer) for each in vars(model).values())


def _matching(name: str, groups: list[Mapping[str, Any]]) -> list[str]:
    try:
        return [group["match"] for group in groups if re.search(group["match"], name)]
    except re.error as error:
        raise ArgumentError("optimizer", f"groups: {error.pattern!r} is no regular expression: {error}") from error


def configured_arguments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the arguments of each group of parameters as the config gives them, and the names of its parameters.

    Args:
        module: what is trained.
        optimizer: a new one, whose scheduler is built already: some keep their own arguments in the groups.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {key: [names.get(id(p)) for p in value] if key == "params" else _number(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """Return a copy of an argument; of a tensor, such as a learning rate may be, its number."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else copy.deepcopy(value)


def optimizer_state(optimizer: torch.optim.Optimizer, configured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state with its class and configured arguments, which a resume compares with its own."""
    return {"class": type(optimizer).__name__, "configured": configured, "state": optimizer.state_dict()}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], configured: list[dict[str, Any]]
) -> None:
    """Load what `optimizer_state` returned; arguments that the config changed since then win over the saved ones.

    A new learning rate scales the current one, which a scheduler may have changed.

    Raises:
        StateError: it is the state of another optimizer, or of other groups of parameters, or a field has a value that
            it cannot have.
    """
    record({"configured": sequence_of(record({"params": sequence_of(optional(TEXT))}))}).check(saved, "optimizer")
    if saved["class"] != type(optimizer).__name__:
        raise StateError(
            f"model.optimizer was {saved['class']}, is {type(optimizer).__name__}; a resume cannot change it"
        )
    if [group["params"] for group in saved["configured"]] != [group["params"] for group in configured]:
        raise StateError("model.optimizer.groups puts the parameters into other groups; a resume cannot change that")
    _check_number_of_groups(optimizer, saved["state"])
    _check_optimizer_state(optimizer, saved, configured)
    optimizer.state.clear()  # it is replaced: two of them in memory, on a second load, may be too much for a GPU
    try:
        optimizer.load_state_dict(saved["state"])
    except ValueError as error:
        raise StateError(f"model.optimizer: {error}") from error
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it made updates: torch warns of schedulers otherwise
    for group, old, new in zip(optimizer.param_groups, saved["configured"], configured, strict=False):
        for key in [key for key, value in new.items() if key in old and old[key] != value]:
            value = new[key]
            if key == "lr" and old.get("initial_lr"):  # the scheduler has changed it since
                value = _number(group["lr"]) * new["initial_lr"] / old["initial_lr"]
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _check_number_of_groups(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Check that an optimizer has as many groups of parameters as a saved one, those that hooks added included."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if isinstance(groups, list) and len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"the optimizer of the checkpoint has {len(groups)} groups of parameters, that of the config has "
            f"{len(optimizer.param_groups)}; a hook or a model that adds groups must do so where it is built, as "
            "before_training comes after the loading"
        )


_OF_OTHER_SHAPES = ("Adafactor", "LBFGS", "Muon")
"""The optimizers of torch with tensors in their state that have neither their parameter's shape nor one number."""


def _check_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], configured: list[dict[str, Any]]
) -> None:
    """Check what torch takes without a look and what would fail in the first update; of torch's own optimizers.

    Raises:
        FieldError: a field has a value that it cannot have.
    """
    if not _is_of_torch(optimizer):
        return
    groups = [{key: value for key, value in each.items() if key != "params"} for each in configured]
    for index, group in enumerate(groups):
        _like(group, may_lack=group).check(saved["configured"][index], f"optimizer.configured[{index}]")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = whole(most=len(parameters) - 1)
    of_parameters = mapping_of(mapping_of(ANYTHING), names=indices)
    in_groups = sequence_of(record({"params": sequence_of(indices)}))
    record({"state": of_parameters, "param_groups": in_groups}).check(saved["state"], "optimizer.state")
    for index, (group, found) in enumerate(zip(groups, saved["state"]["param_groups"], strict=False)):
        lacks = group.keys() - saved["configured"][index].keys()
        _like(group, may_lack=lacks, same_length=True).check(found, f"optimizer.state.param_groups[{index}]")
        _check_options(optimizer, found, saved["configured"][index], f"optimizer.state.param_groups[{index}]")
    if type(optimizer).__name__ in _OF_OTHER_SHAPES:
        return
    step = Kind("a number from 0", lambda value: _is_one_number(value) and value >= 0)
    first: Mapping[str, Any] = {}  # which torch made alike, parameter by parameter
    for index, values in saved["state"]["state"].items():
        key, shape = f"optimizer.state.state.{index}", parameters[index].shape
        first = first or values
        if values and values.keys() != first.keys():
            raise FieldError(key, f"has {listed(sorted(values))}", f"like the others: {listed(sorted(first))}")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) is not isinstance(first[name], torch.Tensor):
                raise FieldError(f"{key}.{name}", f"is {shown(value)}", f"like the others: {shown(first[name])}")
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != shape:
                raise FieldError(
                    f"{key}.{name}", f"is {shown(value)}", f"of the shape of its parameter, {tuple(shape)}"
                )
            if name == "step":
                step.check(value, f"{key}.step")


def _check_options(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], configured: Mapping[str, Any], key: str
) -> None:
    """Check that an optimizer takes the arguments of a saved group, and that its switches are as configured."""
    for name, value in configured.items():
        if (value is None or isinstance(value, bool)) and group[name] is not value:
            raise FieldError(f"{key}.{name}", f"is {shown(group[name])}", f"{value}, as it was configured")
    parameters = inspect.signature(type(optimizer)).parameters.keys() & group.keys() - {"params", "lr"}
    try:
        type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **{name: group[name] for name in parameters})
    except Exception as error:
        raise FieldError(
            key, f"has an argument that {type(optimizer).__name__} refuses ({error})", "one it takes"
        ) from error


def _like(own: Any, may_lack: Collection[str] = (), *, same_length: bool = False) -> Kind:
    """Return the kind of what stands in the place of a value in a saved state.

    Args:
        own: the value.
        may_lack: where it is a mapping, the keys that may be missing.
        same_length: whether lists must have as many entries.
    """
    if own is None:
        return ANYTHING
    if isinstance(own, bool):
        return optional(FLAG)
    if isinstance(own, int | float) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        return Kind("a number", _is_one_number)
    if isinstance(own, torch.Tensor):
        return Kind("a tensor", lambda value: isinstance(value, torch.Tensor))
    if isinstance(own, str):
        return TEXT
    if isinstance(own, Mapping) and all(isinstance(name, str) for name in own):
        return record({name: _like(each, same_length=same_length) for name, each in own.items()}, may_lack)
    if isinstance(own, list | tuple):
        parts = own[0] if own else None
        entries = sequence_of(mapping_of(ANYTHING) if isinstance(parts, Mapping) else _like(parts))
        words = f"a list of {len(own)} entries" if same_length else entries.allowed
        return Kind(
            words,
            lambda value: isinstance(value, list | tuple) and (len(value) == len(own) or not same_length),
            entries.look_inside,
        )
    return Kind(f"a {type(own).__name__}", lambda value: isinstance(value, type(own)))


def _is_one_number(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_tensor or (type(value) is float or (type(value) is int and abs(value) < 2**63))


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


class Scheduler:
    """A learning rate scheduler and when it steps.

    Args:
        scheduler: one of torch's.
        on_update: step after each update instead of after each epoch.
        metric: the address `stream/variable/aggregation` of the statistic that it gets.
    """

    def __init__(self, scheduler: Any, on_update: bool, metric: str | None) -> None:
        self.scheduler = scheduler
        self.on_update = on_update
        self.metric = metric
        self._configured = _plain(scheduler.state_dict())
        self._ended: list[_End] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state with its class and configured arguments."""
        state = _plain(self.scheduler.state_dict())
        return {"class": _class_of(self.scheduler), "configured": self._configured, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; arguments that the config changed since then win over the saved ones.

        Raises:
            StateError: it is the state of another scheduler.
        """
        kind = _class_of(self.scheduler)
        if saved["class"] != kind:
            raise StateError(f"model.scheduler was {saved['class']}, is {kind}; a resume cannot change it")
        record(dict.fromkeys(("configured", "state"), mapping_of(ANYTHING))).check(saved, "scheduler")
        if _is_of_torch(self.scheduler):
            for part in ("configured", "state"):
                own = {**self._configured, **_plain(self.scheduler.state_dict())}
                lacks = own.keys() - saved["configured"].keys()
                _like(own, may_lack=lacks).check(saved[part], f"scheduler.{part}")
        self._ended = _ends(self.scheduler, saved["state"])
        old, new = saved["configured"], self._configured
        self.scheduler.load_state_dict(_updated(saved["state"], old, new))
        if old.get("_last_lr") != new.get("_last_lr"):
            for each in (self.scheduler, *_parts(self.scheduler)):
                each._last_lr = [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def step(self, epoch_data: EpochData | None) -> None:
        """Step; with a metric, only after an epoch that ran its stream.

        Raises:
            ArgumentError: the epoch's data do not have the metric, or it is not a number.
        """
        if self.metric is None:
            self.scheduler.step()
            return
        if epoch_data is not None and self.metric.partition("/")[0] not in epoch_data:
            return
        value: Any = epoch_data
        for part in self.metric.split("/"):
            if not isinstance(value, Mapping) or part not in value:
                there = listed(list(value)) if isinstance(value, Mapping) else "a number"
                raise ArgumentError(
                    "scheduler", f"metric {self.metric!r}: no {part!r} there, but {there}; see ComputeStats"
                )
            value = value[part]
        if not _is_number(value):
            shown = f"a mapping of {listed(list(value))}" if isinstance(value, Mapping) else f"{value!r:.80}"
            message = f"metric {self.metric!r} is {shown}, not a number; name one number: stream/variable/aggregation"
            raise ArgumentError("scheduler", message)
        self.scheduler.step(value)

    def check_end(self) -> None:
        """Warn when the training goes on though the schedule that was loaded is over, with the rates.

        Raises:
            ArgumentError: the scheduler cannot make another step.
        """
        ended = _ends(self.scheduler, self.scheduler.state_dict())
        found = ended or self._ended
        if not found:
            return
        made = "; ".join(f"{each.kind} has made {each.made} of its {each.end} steps ({each.key})" for each in found)
        last = [each for each in ended or [] if isinstance(each.scheduler, torch.optim.lr_scheduler.OneCycleLR)]
        if last:
            message = f"the schedule is over: {made}, and torch makes no more"
            raise ArgumentError("scheduler", f"{message}; resume with {last[0].key}=N, the new end, as an override")
        now, after = self._rates(), self._rates_after_a_step()
        rates = f"the learning rate is {now}" + (f", after the next step {after}" if after is not None else "")
        if ended:
            advice = f"; {ended[0].key}=N as an override makes the schedule longer"
        else:
            made, advice = made.replace(" has made ", " had made "), "; the longer schedule begins there"
        if ended or after == now:
            advice += (
                ". A rate that has come to its end, such as 0, stays there: resume from a checkpoint before the end "
                "(`--checkpoint NAME`) for other rates"
            )
        _LOG.warning("the run continues after the end of its schedule: %s; %s%s", made, rates, advice)

    def _rates(self) -> str:
        """Return the learning rates of the groups as they stand in a message."""
        rates = [f"{float(group['lr']):g}" for group in self.scheduler.optimizer.param_groups]
        return ", ".join(dict.fromkeys(rates))

    def _rates_after_a_step(self) -> str | None:
        """Return what the learning rates would be, None where a step of the scheduler may do anything else too."""
        whole = (self.scheduler, *_parts(self.scheduler))
        if not all(type(each).__module__ == torch.optim.lr_scheduler.__name__ for each in whole):
            return None
        groups = self.scheduler.optimizer.param_groups
        state = _plain(self.scheduler.state_dict())
        before = [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]
        self.scheduler.step()
        rates = self._rates()
        self.scheduler.load_state_dict(state)
        for group, values in zip(groups, before, strict=True):
            for key, value in values.items():
                if isinstance(group[key], torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        return rates


@dataclass(frozen=True, slots=True)
class _End:
    """A scheduler whose steps are all made, and the key that says how many these are."""

    scheduler: Any
    kind: str
    key: str
    made: int
    end: float


def _ends(scheduler: Any, state: Mapping[str, Any], key: str = "model.scheduler") -> list[_End] | None:
    """Return what has come to its end in a scheduler; None when the scheduler goes on, or has no end.

    A warm-up that is over is no end: the rate is what it led to.

    Args:
        scheduler: the scheduler.
        state: its state.
        key: its key in the config.
    """
    parts = getattr(scheduler, _PARTS, None)
    if parts:
        inside = [
            (part, its, f"{key}.schedulers.{index}")
            for index, (part, its) in enumerate(zip(parts, state[_PARTS], strict=True))
        ]
        if "_milestones" in state:
            is_in_last = all(state["last_epoch"] >= milestone for milestone in state["_milestones"])
            return _ends(*inside[-1]) if is_in_last else None
        found = [_ends(*each) for each in inside]
        return None if None in found else [end for ends in found for end in ends or ()]
    name = next(
        (each for each in ("T_max", "total_steps", "total_iters") if isinstance(state.get(each), int | float)), None
    )
    made = state.get("last_epoch")
    if name is None or not isinstance(made, int) or made < state[name]:
        return None
    first, last = state.get("start_factor", state.get("factor", 1.0)), state.get("end_factor", 1.0)
    if name == "total_iters" and last >= first and isinstance(scheduler, LinearLR | ConstantLR):
        return []
    return [_End(scheduler, type(scheduler).__name__, f"{key}.{name}", made, state[name])]


def build_scheduler(optimizer: torch.optim.Optimizer | None, form: Callable[..., Any]) -> Scheduler:
    """Build the scheduler of an optimizer.

    Args:
        optimizer: whose learning rates it sets.
        form: called with the optimizer; its options are `step_on` (`epoch` or `update`) and `metric`.

    Raises:
        ArgumentError: an option cannot be used, or the scheduler needs a metric.
    """
    options: Mapping[str, Any] = getattr(form, "options", {})
    step_on, metric = options.get("step_on", "epoch"), options.get("metric")
    if optimizer is None:
        raise ArgumentError("scheduler", "there is no optimizer whose learning rate it could set")
    if step_on not in ("epoch", "update"):
        raise ArgumentError("scheduler", f"step_on: {step_on!r} is neither epoch nor update")
    if metric is not None and (not isinstance(metric, str) or not 1 <= metric.count("/") <= 2):
        raise ArgumentError("scheduler", f"metric: {metric!r} is no address stream/variable/aggregation")
    if metric is not None and step_on == "update":
        raise ArgumentError("scheduler", "metric: statistics are there after an epoch; remove `step_on: update`")
    try:
        with warnings.catch_warnings():  # a chain that is the first part of a sequence steps while it is built
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            scheduler = form.share("optimizer", optimizer) if isinstance(form, Factory) else form(optimizer)
    except (ValueError, TypeError) as error:
        if not _is_raised_by_torch(error):
            raise
        raise ArgumentError("scheduler", str(error)) from error
    for each in (scheduler, *_parts(scheduler)):
        later = each._schedulers[1:] if isinstance(each, torch.optim.lr_scheduler.SequentialLR) else []
        for part in later:
            if type(part).get_lr is torch.optim.lr_scheduler.LRScheduler.get_lr:
                message = f"torch cannot begin {_class_of(part)} at a milestone of SequentialLR, only as its first part"
                raise ArgumentError("scheduler", message)
    needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if needs_metric and metric is None:
        raise ArgumentError("scheduler", "ReduceLROnPlateau needs `metric`, e.g. valid/loss/mean")
    if metric is not None and not needs_metric and "metrics" not in inspect.signature(scheduler.step).parameters:
        raise ArgumentError("scheduler", f"{type(scheduler).__name__} takes no metric")
    return Scheduler(scheduler, step_on == "update", metric)


def _is_number(value: Any) -> bool:
    """Tell whether a statistic is one number, as any library has them."""
    if isinstance(value, str | bytes | Mapping):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _updated(state: Any, old: Any, new: Any) -> Any:
    """Return a state with the new value wherever the old and the new configuration differ."""
    if isinstance(state, dict) and isinstance(old, dict) and isinstance(new, dict):
        known = {key for key in state if key in old and key in new}
        return {key: _updated(state[key], old[key], new[key]) if key in known else state[key] for key in state}
    if all(isinstance(each, list) for each in (state, old, new)) and len(state) == len(old) == len(new):
        return [_updated(*each) for each in zip(state, old, new, strict=True)]
    return state if old == new else new


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can be saved of a scheduler's state, and of the states of its parts; functions are in the config."""
    return {
        key: [_plain(part) for part in value] if key == _PARTS and isinstance(value, list) else copy.deepcopy(value)
        for key, value in state.items()
        if isinstance(value, bool | int | float | str | list | tuple | dict | type(None) | torch.Tensor)
    }


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield the schedulers that a scheduler is made of, at any depth."""
    for part in getattr(scheduler, _PARTS, ()):
        yield part
        yield from _parts(part)


def _class_of(scheduler: Any) -> str:
    """Return the name of a scheduler's class, with those of its parts: `SequentialLR(LinearLR, StepLR)`."""
    parts = ", ".join(map(_class_of, getattr(scheduler, _PARTS, ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def _is_raised_by_torch(error: BaseException) -> bool:
    """Tell whether the code that raised an error is torch's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "torch"
