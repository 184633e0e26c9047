"""The contract of hooks: their events, what they may declare, and what they read and write."""

import copy
import importlib
import inspect
import pickle
import re
import sys
from textwrap import dedent

import pytest
import torch
from ruamel.yaml import YAML

import emrun
from emrun import AbstractHook, AbstractModel, MainLoop, TrainingAborted, TrainingTerminated, create_training
from emrun.errors import ConfigError, HookError, StreamError
from emrun.hook import EVENTS, check_events, check_monitors, listener, read_by
from emrun.hooks import ComputeStats, SaveBest, StopAfter
from emrun.types import EpochVariable


class Count(AbstractModel):
    """Counts examples; its loss is what it is told, or 1."""

    input_names = ("x",)
    output_names = ("loss",)

    def run(self, batch, train, stream):
        return {"loss": 1.0}

    def save(self, directory):
        (directory / "weights").write_text("none")

    def load(self, directory):
        pass


class Numbers:
    def train_stream(self):
        return iter([{"x": [1, 2]}, {"x": [3]}])

    def valid_stream(self):
        return iter([{"x": [4]}])


def run(*hooks, model=None, **arguments):
    loop = MainLoop(model or Count(), Numbers(), [*hooks, StopAfter(epochs=1)], **arguments)
    loop.run_training()
    return loop


def with_method(name, function=lambda self: None):
    return type("MyHook", (AbstractHook,), {name: function})


# --- the events -------------------------------------------------------------------------------------------------------


def test_the_base_class_has_every_event_with_the_arguments_that_are_supplied():
    for event, arguments in EVENTS.items():
        parameters = list(inspect.signature(getattr(AbstractHook, event)).parameters)
        assert tuple(parameters) == ("self", *arguments)


def test_every_event_of_a_training_reaches_a_hook_that_listens_with_its_arguments():
    seen = {}

    class Everything(AbstractHook):
        pass

    events = {
        event: {arguments} for event, arguments in EVENTS.items() if event not in ("register_mainloop", "on_error")
    }
    for event in (*events, "on_error"):

        def note(self, _event=event, **arguments):
            seen.setdefault(_event, set()).add(tuple(arguments))

        setattr(Everything, event, note)

    class Update(Count):
        def register_mainloop(self, main_loop):
            self.main_loop = main_loop

        def run(self, batch, train, stream):
            if train:
                self.main_loop.notify("before_update", model=self)
                self.main_loop.notify("after_update", model=self)
            return super().run(batch, train, stream)

    run(Everything(), model=Update(), extra_streams=["valid"])
    assert seen == events


def test_on_error_gets_what_made_the_training_fail():
    class Fail(AbstractHook):
        def after_batch(self):
            raise RuntimeError("broken")

        def on_error(self, error):
            self.error = error

    hook = Fail()
    with pytest.raises(RuntimeError, match=r"broken") as caught:
        run(hook)
    assert hook.error is caught.value


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("def after_batch(self): self.seen.append(())", ()),
        ("def after_batch(self, stream_name): self.seen.append((stream_name,))", ("train",)),
        ("def after_batch(self, batch_data): self.seen.append((sorted(batch_data),))", (["loss", "x"],)),
        ("def after_batch(self, batch_data, stream_name): self.seen.append((stream_name,))", ("train",)),
        ("def after_batch(self, stream_name, **_): self.seen.append((stream_name, *_))", ("train", "batch_data")),
        ("def after_batch(self, **_): self.seen.append(tuple(sorted(_)))", ("batch_data", "stream_name")),
        ("def after_batch(self, stream_name, limit=3): self.seen.append((stream_name, limit))", ("train", 3)),
        ("def after_batch(self, *, stream_name): self.seen.append((stream_name,))", ("train",)),
    ],
)
def test_a_method_declares_only_the_arguments_that_it_needs(declared, expected):
    methods = {}
    exec(declared, methods)
    hook = type("MyHook", (AbstractHook,), {"after_batch": methods["after_batch"]})()
    hook.seen = []
    run(hook)
    assert hook.seen[0] == expected


@pytest.mark.parametrize("event", EVENTS)
def test_events_that_are_not_overridden_are_not_listened_to(event):
    assert listener(AbstractHook(), event) is None
    assert listener(with_method(event)(), event) is not None


def test_an_event_inherited_from_another_hook_is_listened_to():
    class Child(with_method("after_epoch")):
        pass

    assert listener(Child(), "after_epoch") is not None


def test_a_model_without_an_event_is_not_called_for_it():
    assert all(listener(Count(), event, AbstractModel) is None for event in EVENTS)


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


def test_an_attribute_with_the_name_of_an_event_is_an_error():
    hook = AbstractHook()
    hook.after_batch = True
    with pytest.raises(
        HookError, match=r"AbstractHook.after_batch is bool, which hides the event of that name; rename"
    ):
        MainLoop(Count(), Numbers(), [hook])


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
@pytest.mark.parametrize("check", [check_events, lambda cls: MainLoop(Count(), Numbers(), [cls()])])
def test_a_method_one_edit_away_from_an_event_is_an_error(name, event, check):
    with pytest.raises(HookError, match=rf"MyHook.{name} is no event of a hook; did you mean '{event}'\?"):
        check(with_method(name))


@pytest.mark.parametrize("event", EVENTS)
def test_every_misspelt_event_is_recognised(event):
    for index in range(1, len(event)):  # private methods begin with an underscore
        for changed in (event[:index] + event[index + 1 :], event[:index] + "x" + event[index:]):
            if changed not in EVENTS:
                with pytest.raises(HookError, match=rf"MyHook.{changed} is no event"):
                    check_events(with_method(changed))


@pytest.mark.parametrize(
    "name",
    ["_after_batch", "_on_error", "_after_bach", "__after_batch", "after_batches", "afterbach", "batch", "compute",
     "epoch", "on", "state", "begin", "after", "save", "before_", "after_epoch_profiled_by", "hctab_retfa"],
)  # fmt: skip
def test_helpers_and_unrelated_methods_are_fine(name):
    check_events(with_method(name))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_by_its_exact_name_is_fine(event):
    check_events(with_method(event))


def test_a_value_one_edit_away_from_an_event_is_no_method():
    check_events(type("MyHook", (AbstractHook,), {"after_bach": 3}))


@pytest.mark.parametrize(
    ("event", "function", "message"),
    [
        ("after_batch", lambda self, stream, batch_data: None, "takes 'stream', .* the event offers stream_name"),
        ("before_training", lambda self, epoch_id: None, "takes 'epoch_id', .* offers no arguments"),
        ("after_epoch", lambda self, epoch_id, *, data: None, "takes 'data', which nothing supplies"),
        ("after_training", lambda self, error: None, "takes 'error', which nothing supplies; the event offers success"),
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


# --- registering ------------------------------------------------------------------------------------------------------


def test_the_main_loop_is_there_from_the_registration_on():
    hook = AbstractHook()
    loop = MainLoop(Count(), Numbers(), [hook])
    assert hook.main_loop is loop


def test_a_hook_that_is_registered_already_is_an_error():
    hook = ComputeStats(["loss"])
    MainLoop(Count(), Numbers(), [hook])
    with pytest.raises(HookError, match=r"hook ComputeStats is registered in a main loop already; build a new one"):
        MainLoop(Count(), Numbers(), [hook])


def test_a_hook_that_is_listed_twice_is_an_error():
    hook = ComputeStats(["loss"])
    with pytest.raises(HookError, match=r"hook ComputeStats is registered in a main loop already"):
        MainLoop(Count(), Numbers(), [hook, hook])


def test_a_hook_keeps_the_model_the_dataset_and_the_directory():
    class Limit(AbstractHook):
        def __init__(self, limit, **kwargs):
            super().__init__(**kwargs)
            self.limit = limit

    hook = Limit(3, model="m", dataset="d", output_dir="o")
    assert (hook.limit, hook.model, hook.dataset, hook.output_dir) == (3, "m", "d", "o")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'limits'"):
        Limit(3, limits=4)


# --- what hooks read and write ----------------------------------------------------------------------------------------


class Writes(AbstractHook):
    def __init__(self, *names):
        super().__init__()
        self.writes = names

    def after_epoch(self, epoch_data):
        for variables in epoch_data.values():
            variables.update({name.partition("/")[0]: 1.0 for name in self.writes})


class Monitors(AbstractHook):
    def __init__(self, *addresses):
        super().__init__()
        self.monitors = addresses


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("loss/mean", "valid/loss/mean"),
        ("loss", "valid/loss/mean"),  # a mapping whose aggregations are not known
        ("loss", "valid/loss"),
        ("a/b", "train/a/b"),
        ("loss", "loss"),  # in whatever stream
        ("loss/std", "loss"),
        ("a/b/mean", "a/b"),  # a variable with a slash in its name
    ],
)
def test_what_an_earlier_hook_writes_may_be_monitored(written, address):
    check_monitors([Writes("other"), Writes(written), Monitors(address)], ["train", "valid"])


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([Writes("loss/mean"), Monitors("valid/los/mean")], "but no hook writes 'los/mean'; did you mean 'loss/mean'?"),
        ([Writes("loss/mean"), Monitors("valid/loss/std")], "no hook writes 'loss/std'"),
        ([Writes("loss/mean"), Monitors("valid/loss")], "no hook writes 'loss'; did you mean 'loss/mean'?"),
        (
            [AbstractHook(), Monitors("valid/loss")],
            "(written are nothing); add it to ComputeStats. A hook of yours that",
        ),
        ([AbstractHook(), Monitors("loss")], "monitors loss, but no hook writes 'loss' (written are nothing)"),
        (
            [Writes("loss/mean"), Monitors("lsos")],
            "did you mean 'loss'? (written are loss); add it to ComputeStats. A hook",
        ),
        ([Writes("loss"), Monitors("lsos")], "A hook of yours that writes it declares `writes = ['lsos']`"),
        ([AbstractHook(), Monitors("loss"), Writes("loss/std")], "monitors loss: move it behind Writes"),
        ([Writes("loss"), Monitors("vaild/loss")], "stream 'vaild' is not run; did you mean 'valid'? (main_loop runs"),
        ([AbstractHook(), Monitors("valid/loss"), Writes("loss")], "move it behind Writes"),
    ],
)
def test_what_is_not_written_before_is_an_error(hooks, message):
    with pytest.raises(HookError, match=re.escape(message)) as caught:
        check_monitors(hooks, ["train", "valid"])
    assert caught.value.hook_index == 1
    assert str(caught.value).startswith("Monitors monitors ")


MODULE = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from emrun import AbstractHook
from emrun.types import Address, EpochVariable, VariableName

if TYPE_CHECKING:
    from nowhere import Nothing

class Reads(AbstractHook):
    def __init__(
        self, things: Sequence[VariableName] = (), *more: VariableName, epoch: EpochVariable | None = None,
        weights: Mapping[VariableName, float] | None = None, stop: Nothing | None = None,
        pair: tuple[Address, int] | Address | None = None, any: str = "loss",
    ):
        super().__init__()

class HandsOn(Reads):
    def __init__(self, own: EpochVariable, **options):
        super().__init__(**options)

class ByDefault(AbstractHook):
    def __init__(self, variable: EpochVariable = "loss"):
        super().__init__()

class Silent(Reads):
    __init__ = 3
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    """Return the module of hooks whose arguments name what they read."""
    (tmp_path / "named_hooks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "named_hooks", raising=False)
    yield importlib.import_module("named_hooks")
    sys.modules.pop("named_hooks", None)


def test_variables_of_a_batch_are_read_wherever_they_stand_in_the_arguments(named):
    assert read_by(named.Reads(["a", "b"])) == ("a", "b")
    assert read_by(named.Reads(("a",), "c", "d")) == ("a", "c", "d")
    assert read_by(named.Reads(things=["a"], weights={"b": 0.5, "a": 1})) == ("a", "b")
    assert read_by(named.Reads(any="x", epoch="y")) is None


def test_arguments_that_are_handed_on_to_a_base_count(named):
    assert read_by(named.HandsOn("y", things=["a"])) == ("a",)


def test_what_a_hook_sets_itself_counts_beside_its_arguments(named):
    hook = named.Reads(["a"])
    hook.reads = ["b", "a"]
    assert read_by(hook) == ("a", "b")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_of_a_hook_reads_the_same(named, duplicate):
    assert read_by(duplicate(named.Reads(["a"]))) == ("a",)


def test_a_hook_that_is_built_without_its_constructor_names_nothing(named):
    assert read_by(named.Reads.__new__(named.Reads)) is None
    assert read_by(object.__new__(named.Reads)) is None
    with pytest.raises(TypeError, match=r"not callable"):
        named.Silent()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epoch": "lsos"}, "Reads monitors lsos, but no hook writes 'lsos'; did you mean 'loss'?"),
        ({"pair": "valid/loss/std"}, "Reads monitors valid/loss/std, but no hook writes 'loss/std'"),
        ({"pair": ("vaild/loss/mean", 3)}, "Reads monitors vaild/loss/mean, but stream 'vaild' is not run"),
    ],
)
def test_a_statistic_that_an_argument_names_is_checked_before_the_training(named, arguments, message):
    hook = named.Reads(**arguments)
    with pytest.raises(HookError, match=re.escape(message)):
        run(ComputeStats(["loss"]), hook, extra_streams=["valid"])
    run(ComputeStats(["loss"]), named.Reads(epoch="loss", pair=["valid/loss/mean", 3]), extra_streams=["valid"])


def test_a_default_that_names_a_variable_counts(named):
    with pytest.raises(HookError, match=r"ByDefault monitors loss, but no hook writes 'loss'"):
        run(named.ByDefault())


def test_a_variable_that_an_argument_names_is_checked_with_the_first_batch(named):
    with pytest.raises(StreamError, match=r"hook HandsOn reads 'los', which is neither a source nor an output; did yo"):
        run(ComputeStats(["loss"]), named.HandsOn("loss", things=["los"]))


def test_names_in_a_config_are_checked_at_the_line_of_their_hook(named):
    config = config_with([{"ComputeStats": {"variables": ["loss"]}}, {"named_hooks.HandsOn": {"own": "lsos"}}])
    with pytest.raises(ConfigError, match=r"hooks\[1\].named_hooks.HandsOn: HandsOn monitors lsos, but no hook writes"):
        create_training(config)


def test_a_value_of_another_type_than_a_name_is_found_without_an_import(named):
    from emrun.config.config import load_config
    from emrun.config.plan import check_statically

    config = config_with([{"named_hooks.HandsOn": {"own": 3}}, {"StopOnNaN": {"variables": 7}}])
    with pytest.raises(ConfigError) as caught:
        check_statically(load_config(config).root)
    assert [problem.key for problem in caught.value.problems] == [
        "hooks[0].named_hooks.HandsOn.own",
        "hooks[1].StopOnNaN.variables",
    ]


@pytest.mark.parametrize("attribute", ["reads", "writes", "monitors"])
def test_a_text_instead_of_a_list_of_names_is_an_error(attribute):
    hook = AbstractHook()
    setattr(hook, attribute, "loss")
    with pytest.raises(HookError, match=rf"AbstractHook.{attribute} is 'loss', not a list of names, e.g. \['loss'\]"):
        run(hook)


class LogLoss(AbstractHook):
    def __init__(self, variable: EpochVariable):
        super().__init__()

    def before_training(self):
        raise AssertionError("it has begun")


def test_an_epoch_by_hand_begins_with_the_check():
    loop = MainLoop(Count(), Numbers(), [ComputeStats(["loss"]), LogLoss("lsos")])
    with pytest.raises(HookError, match=r"LogLoss monitors lsos"), loop:
        raise AssertionError("it has begun")
    with pytest.raises(HookError, match=r"LogLoss monitors lsos"):
        loop.run_evaluation("valid")


def test_an_evaluation_does_not_ask_for_streams_that_it_does_not_run():
    class Model(Count):
        monitors = ("train/other/mean",)

    loop = MainLoop(Model(), Numbers(), [ComputeStats(["loss"]), Monitors("train/loss/mean", "loss")])
    assert loop.run_evaluation("valid")["valid"]["loss"] == {"mean": 1.0}


def test_a_model_may_monitor_what_hooks_write():
    class Model(Count):
        monitors = ("train/loss/mean",)

    run(ComputeStats(["loss"]), model=Model())
    with pytest.raises(HookError, match=r"Model monitors train/loss/mean, but no hook writes"):
        run(model=Model())


def test_a_hook_of_ones_own_may_write_what_another_monitors(tmp_path, monkeypatch):
    (tmp_path / "score_hooks.py").write_text(
        dedent("""
            from emrun import AbstractHook

            class Score(AbstractHook):
                writes = ("score",)

                def after_epoch(self, epoch_id, epoch_data):
                    epoch_data["valid"]["score"] = float(epoch_id)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    best = {"SaveBest": {"variable": "score", "aggregation": None, "condition": "max"}}
    training = create_training(
        config_with([{"score_hooks.Score": None}, best, {"StopAfter": {"epochs": 2}}]), output_root=tmp_path / "log"
    )
    training.main_loop.run_training()
    checkpoints = training.output_dir / "checkpoints"
    assert (checkpoints / "best").resolve() == (checkpoints / "latest").resolve()


def config_with(hooks):
    """Return a small config with these hooks."""
    model = {
        "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["logit", "logit"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    }
    dataset = {"class": "Majority", "n": 50}
    return {"dataset": dataset, "model": model, "main_loop": {"extra_streams": ["valid"]}, "hooks": hooks}


def test_hooks_in_the_wrong_order_are_an_error_at_the_hooks_key(tmp_path):
    hooks = [
        {"SaveBest": {"variable": "loss"}},
        {"ComputeStats": {"variables": ["loss"]}},
        {"StopAfter": {"epochs": 1}},
    ]
    with pytest.raises(ConfigError, match=r"hooks\[0\].SaveBest: .*: move it behind ComputeStats"):
        create_training(config_with(hooks), output_root=tmp_path)


def test_a_misspelt_event_is_an_error_at_the_hooks_key(tmp_path, monkeypatch):
    (tmp_path / "misspelt_hooks.py").write_text(
        "from emrun import AbstractHook\nclass Bad(AbstractHook):\n    def after_bach(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"hooks\[0\].misspelt_hooks.Bad: Bad.after_bach is no event of a hook"):
        create_training(config_with([{"misspelt_hooks.Bad": None}]), output_root=tmp_path / "log")


def test_the_yaml_in_its_docstring_trains(tmp_path, monkeypatch):
    section = next(part for part in inspect.getdoc(AbstractHook).split("\n\n") if part.startswith("    "))
    (tmp_path / "my_hooks.py").write_text(
        dedent("""
            from emrun import AbstractHook

            class PrintLoss(AbstractHook):
                def __init__(self, every, **kwargs):
                    super().__init__(**kwargs)
                    self.every = every
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_hooks", raising=False)
    hooks = YAML(typ="safe").load(section)["hooks"]
    training = create_training(config_with([*hooks, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path / "log")
    assert training.main_loop.run_training().status == "finished"
    hook = training.hooks[0]
    assert (hook.every, hook.model, hook.dataset) == (10, training.model, training.dataset)
    assert hook.output_dir == training.output_dir


# --- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [TrainingTerminated, TrainingAborted])
def test_an_ending_has_a_reason(ending):
    assert (ending("enough").reason, str(ending("enough"))) == ("enough", "enough")
    assert ending().reason.startswith("a hook ")


def test_an_abortion_ends_the_training_as_failed_with_status_3():
    class Abort(AbstractHook):
        def after_batch(self):
            raise TrainingAborted("too bad")

        def after_training(self, success):
            self.success = success

    hook = Abort()
    loop = MainLoop(Count(), Numbers(), [hook])
    with pytest.raises(TrainingAborted):
        loop.run_training()
    assert hook.success is False
    assert (loop.outcome.status, loop.outcome.exit_status, loop.outcome.reason) == ("failed", 3, "too bad")


def test_a_hook_without_state_has_an_empty_one():
    hook = AbstractHook()
    assert hook.state_dict() == {}
    hook.load_state_dict({})


@pytest.mark.parametrize("name", ["AbstractHook", "TrainingTerminated", "TrainingAborted"])
def test_what_a_hook_needs_comes_from_emrun(name):
    assert getattr(emrun, name) is getattr(emrun.hook, name)


@pytest.mark.parametrize("hook", [SaveBest(), StopAfter(epochs=1)])
def test_the_states_of_built_in_hooks_are_plain_types(hook, tmp_path):
    torch.save(hook.state_dict(), tmp_path / "state.pt")
    hook.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_two_hooks_may_have_one_name_where_nothing_is_saved():
    class Saves(AbstractHook):
        saves = ("best",)

    loop = MainLoop(Count(), Numbers(), [Saves(), Saves()])
    loop.check_hooks(any_stream=True)
    with pytest.raises(HookError, match="save under the name 'best'"):
        loop.check_hooks()


@pytest.mark.parametrize("names", [0, True, "best", [1]])
def test_names_that_are_not_a_list_of_names_are_an_error(names):
    class MyHook(AbstractHook):
        saves = names

    with pytest.raises(HookError, match=re.escape(f"MyHook.saves is {names!r}, not a list of names")):
        MainLoop(Count(), Numbers(), [MyHook()]).check_hooks()
