"""Who listens to which event, and whether a class fits the events."""

import copy
import re

import pytest
import torch
from doubles import LossOfOne, Numbers, run_numbers, with_method

from emrun import AbstractHook, AbstractModel, Factory, MainLoop, TorchModel
from emrun.base.errors import HookError
from emrun.events import (
    check_events,
    listener,
    may_change_batches,
    may_read_anything,
    reads_batches,
    runs_on_every_rank,
)
from emrun.hook import EVENTS

# --- who listens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_events_that_are_not_overridden_are_not_listened_to(event):
    assert listener(AbstractHook(), event) is None
    assert listener(with_method(event)(), event) is not None


def test_an_event_inherited_from_another_hook_is_listened_to():
    class Child(with_method("after_epoch")):
        pass

    assert listener(Child(), "after_epoch") is not None


def test_a_model_without_an_event_is_not_called_for_it():
    assert all(listener(LossOfOne(), event, AbstractModel) is None for event in EVENTS)


def test_an_event_that_a_hook_has_set_to_none_is_not_listened_to():
    class Hook(AbstractHook):
        def __init__(self, listens):
            super().__init__()
            if not listens:
                self.after_batch = None

        def after_batch(self, batch_data):
            """Listen."""

    assert listener(Hook(True), "after_batch") is not None
    assert listener(Hook(False), "after_batch") is None


class Muted(AbstractHook):
    """Mutes events in its constructor, before or after that of its base."""

    def __init__(self, *events, early=False):
        if early:
            self.mute(*events)
        super().__init__()
        if not early:
            self.mute(*events)
        self.called = []

    def before_batch(self, stream_name, batch):
        self.called.append("before_batch")

    def before_update(self):
        self.called.append("before_update")

    def after_batch(self, batch_data):
        self.called.append("after_batch")

    def after_epoch(self, epoch_id):
        self.called.append("after_epoch")

    def after_epoch_profile(self, profile):
        self.called.append("after_epoch_profile")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "events", [(), ("after_batch",), ("before_batch", "after_epoch"), ("after_epoch_profile", "after_batch")], ids=str
)
def test_muted_events_are_not_called(events, early):
    hook = Muted(*events, early=early)
    run_numbers(hook)
    called = {"before_batch", "after_batch", "after_epoch", "after_epoch_profile"}
    assert set(hook.called) == called - set(events)


def test_a_copy_of_a_hook_mutes_the_same_events_and_other_hooks_of_its_class_none():
    hook = Muted("after_batch")
    assert listener(copy.deepcopy(hook), "after_batch") is None
    assert listener(Muted(), "after_batch") is not None


def test_a_derived_hook_that_overrides_an_event_mutes_it_too():
    class Derived(Muted):
        def __init__(self):
            super().__init__("after_batch")

        def after_batch(self, batch_data):
            super().after_batch(batch_data)

    assert listener(Derived(), "after_batch") is None


def test_what_a_hook_asks_for_does_not_count_when_the_event_is_muted():
    def asks(*muted):
        hook = Muted(*muted)
        return may_change_batches(hook), reads_batches(hook), may_read_anything(hook), runs_on_every_rank(hook)

    assert asks() == (True, True, True, True)
    assert asks("before_batch") == (False, True, True, True)
    assert asks("before_batch", "before_update") == (False, True, True, False)
    assert asks("before_batch", "before_update", "after_batch") == (False, False, False, False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("after_bach", "did you mean 'after_batch'? "), ("register_mainloop", ""), ("merge", ""), (["after_batch"], "")],
    ids=str,
)
def test_only_events_can_be_muted(name, hint):
    with pytest.raises(HookError) as caught:
        Muted(name)
    assert str(caught.value).startswith(f"Muted.mute: {name!r} is not an event")
    assert hint in str(caught.value)
    assert "(it has before_training, before_epoch, " in str(caught.value)


@pytest.mark.parametrize("event", ["register_mainloop", "before_training", "before_epoch", "after_batch"])
def test_no_event_is_muted_once_the_hook_is_registered(event):
    class Late(AbstractHook):
        def after_stream(self, stream_name):
            pass

    def mute(self, **arguments):
        if event == "register_mainloop":
            AbstractHook.register_mainloop(self, **arguments)
        self.mute("after_stream")

    setattr(Late, event, mute)
    message = (
        "Late.mute: the hook is already registered with a main loop, which calls its after_stream; mute after_stream "
        "in __init__, or let it return early"
    )
    with pytest.raises(HookError, match=re.escape(message)):
        run_numbers(Late())


def test_an_attribute_with_the_name_of_an_event_is_an_error():
    hook = AbstractHook()
    hook.after_batch = True
    with pytest.raises(
        HookError, match=r"AbstractHook.after_batch has the name of an event, so it must be a method, not bool; rename"
    ):
        MainLoop(LossOfOne(), Numbers(), [hook])


# --- check_events -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("after_bach", "after_batch"),  # a letter left out
        ("afterbatch", "after_batch"),
        ("fter_epoch", "after_epoch"),
        ("after_stream_", "after_stream"),  # a letter too many
        ("before_epochs", "before_epoch"),
        ("register_main_loop", "register_mainloop"),
        ("on_errors", "on_error"),
        ("before_patch", "before_batch"),  # a letter for another
        ("After_batch", "after_batch"),
        ("after_traininG", "after_training"),
        ("after_bacth", "after_batch"),  # two letters in the wrong order
        ("fater_epoch", "after_epoch"),
        ("before_updaet", "before_update"),
    ],
)
@pytest.mark.parametrize("check", [check_events, lambda cls: MainLoop(LossOfOne(), Numbers(), [cls()])])
def test_a_method_one_edit_away_from_an_event_is_an_error(name, event, check):
    with pytest.raises(HookError, match=rf"MyHook.{name} is not an event of the main loop; did you mean '{event}'\?"):
        check(with_method(name))


@pytest.mark.parametrize("event", EVENTS)
def test_every_misspelt_event_is_recognised(event):
    for index in range(1, len(event)):  # private methods begin with an underscore
        for changed in (event[:index] + event[index + 1 :], event[:index] + "x" + event[index:]):
            if changed not in EVENTS:
                with pytest.raises(HookError, match=rf"MyHook.{changed} is not an event"):
                    check_events(with_method(changed))


@pytest.mark.parametrize(
    "name",
    ["_after_batch", "_on_error", "_after_bach", "__after_batch", "after_batches", "afterbach", "batch", "compute",
     "epoch", "on", "state", "begin", "after", "save", "before_", "after_epoch_profiled_by", "hctab_retfa"],
)  # fmt: skip
def test_helpers_and_unrelated_methods_are_fine(name):
    check_events(with_method(name))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trainstep", "a method that emrun calls; did you mean 'train_step'"),
        ("foward", "a method that emrun calls; did you mean 'forward'"),
        ("load_statedict", "a method that emrun calls; did you mean 'load_state_dict'"),
        ("after_epochs", "an event of the main loop; did you mean 'after_epoch'"),
        ("on_epoch_end", "an event of the main loop; did you mean 'after_epoch'"),
        (
            "training_step",
            "a method that emrun calls; write train_step(self, inputs), which returns the outputs (to keep it for your "
            "own use, name it _training_step)",
        ),
        ("validation_step", "a method that emrun calls; evaluations call forward"),
        ("configure_optimizers", "a method that emrun calls; write model.optimizer: {class: AdamW, lr: 0.001}"),
    ],
)
def test_a_method_of_a_model_that_nobody_calls_is_an_error(name, hint):
    model = type("Mine", (TorchModel,), {name: lambda self, inputs: None})
    message = re.escape(f"Mine.{name} is not {hint}")
    with pytest.raises(HookError, match=message):
        check_events(model)
    with pytest.raises(HookError, match=message):
        MainLoop(model(torch.nn.Linear(2, 1)), Numbers())


@pytest.mark.parametrize("name", ["train_step", "updates", "forward_twice", "_training_step", "sample", "before_batch"])
def test_other_methods_of_a_model_are_fine(name):
    check_events(type("Mine", (TorchModel,), {name: lambda self, batch=None: None}))


def test_the_events_of_a_module_are_not_called_which_a_warning_says_before_the_training(caplog):
    class Net(torch.nn.Linear):
        def before_epoch(self, epoch_id):
            """Do something."""

        def after_epoch(self):
            """Help."""

        def forward(self, x):
            return {"loss": super().forward(x), "calls": self.after_epoch()}

    TorchModel(Net(2, 1), device="cpu", optimizer=Factory(torch.optim.SGD, lr=0.1)).before_training()
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert message.startswith("emrun does not call before_epoch of the module Net: events are for hooks")


class Helps(AbstractHook):
    def after_batch(self):
        return [self.on_step_end() for _ in range(2)]

    def on_step_end(self):
        """Help."""


class Steps(TorchModel):
    def train_step(self, inputs):
        return self.validation_step(inputs)

    def validation_step(self, inputs):
        return inputs


class Inherits(Steps):
    """Overrides the helper of its base."""

    def validation_step(self, inputs):
        return {}


@pytest.mark.parametrize("checked", [Helps, Steps, Inherits])
def test_a_helper_that_the_class_calls_may_have_the_name_of_a_method_of_other_tools(checked):
    check_events(checked)


def test_a_method_of_other_tools_that_only_calls_that_of_its_base_is_an_error():
    class Asks(with_method("on_epoch_end")):
        def on_epoch_end(self):
            super().on_epoch_end()

    with pytest.raises(HookError, match=r"Asks.on_epoch_end is not an event of the main loop; did you mean"):
        check_events(Asks)


def test_a_hook_whose_state_has_another_name_is_an_error():
    with pytest.raises(HookError, match="is not a method that emrun calls; did you mean 'state_dict'"):
        check_events(with_method("statedict"))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_by_its_exact_name_is_fine(event):
    check_events(with_method(event))


def test_a_value_one_edit_away_from_an_event_is_not_a_method():
    check_events(type("MyHook", (AbstractHook,), {"after_bach": 3}))


@pytest.mark.parametrize(
    ("event", "function", "message"),
    [
        ("after_batch", lambda self, stream, batch_data: None, r"requires 'stream', .* \(its arguments: stream_name,"),
        ("before_training", lambda self, epoch_id: None, r"requires 'epoch_id', .* \(its arguments: none\)"),
        ("after_epoch", lambda self, epoch_id, *, data: None, "requires 'data', which is not an argument of"),
        ("after_training", lambda self, error: None, r"requires 'error', .* \(its arguments: success\)"),
    ],
)  # fmt: skip
def test_a_parameter_that_nothing_supplies_is_an_error(event, function, message):
    with pytest.raises(HookError, match=rf"MyHook.{event} {message}"):
        check_events(with_method(event, function))


@pytest.mark.parametrize(
    "function",
    [lambda self: None, lambda self, **_: None, lambda self, *_: None, lambda self, batch_data, limit=3: None],
)
def test_fewer_parameters_and_ones_with_defaults_are_fine(function):
    check_events(with_method("after_batch", function))
