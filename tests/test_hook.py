"""The contract of hooks: their events, how they are registered, and how they end a training."""

import inspect
import re
import sys
from textwrap import dedent

import pytest
import torch
from doubles import LossOfOne, Numbers, run_numbers as run
from projects import linear_with
from ruamel.yaml import YAML

import emrun
from emrun import AbstractHook, MainLoop, TrainingAborted, TrainingTerminated, create_training
from emrun.base.errors import ConfigError, HookError
from emrun.hook import EVENTS
from emrun.hooks import AbstractTracker, ComputeStats, SaveBest, SaveEvery, StopAfter

# --- the events -------------------------------------------------------------------------------------------------------


def test_the_events_are_those_of_the_loop_with_the_arguments_that_are_supplied():
    assert list(EVENTS.items()) == [
        ("register_mainloop", ("main_loop",)),
        ("before_training", ()),
        ("before_epoch", ("epoch_id",)),
        ("before_evaluation", ()),
        ("before_stream", ("stream_name",)),
        ("before_batch", ("stream_name", "batch")),
        ("before_update", ("model", "optimizer")),
        ("after_update", ("model", "optimizer")),
        ("after_batch", ("stream_name", "batch_data")),
        ("after_stream", ("stream_name",)),
        ("after_epoch", ("epoch_id", "epoch_data")),
        ("after_epoch_profile", ("epoch_id", "profile", "streams")),
        ("after_checkpoint", ("name", "directory")),
        ("on_error", ("error",)),
        ("after_training", ("success",)),
    ]


def test_every_event_of_a_run_reaches_a_hook_that_listens_with_its_arguments():
    seen = {}

    class Everything(AbstractHook):
        pass

    events = {
        event: {arguments}
        for event, arguments in EVENTS.items()
        if event not in ("register_mainloop", "after_checkpoint", "on_error")  # the loop has no run directory
    }
    for event in (*events, "on_error"):

        def note(self, _event=event, **arguments):
            seen.setdefault(_event, set()).add(tuple(arguments))

        setattr(Everything, event, note)

    class Update(LossOfOne):
        def register_mainloop(self, main_loop):
            self.main_loop = main_loop

        def run(self, batch, train, stream):
            if train:
                self.main_loop.notify("before_update", model=self, optimizer=None)
                self.main_loop.notify("after_update", model=self, optimizer=None)
            return super().run(batch, train, stream)

    run(Everything(), model=Update(), extra_streams=["valid"])
    assert seen == events


def test_on_error_gets_the_error_that_ends_the_run():
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


# --- registering ------------------------------------------------------------------------------------------------------


def test_the_main_loop_is_there_from_the_registration_on():
    hook = AbstractHook()
    loop = MainLoop(LossOfOne(), Numbers(), [hook])
    assert hook.main_loop is loop


def test_a_hook_that_is_registered_already_is_an_error():
    hook = ComputeStats(["loss"])
    MainLoop(LossOfOne(), Numbers(), [hook])
    with pytest.raises(HookError, match=r"hook ComputeStats already belongs to a main loop; build a new hook"):
        MainLoop(LossOfOne(), Numbers(), [hook])


def test_a_hook_that_is_listed_twice_is_an_error():
    hook = ComputeStats(["loss"])
    with pytest.raises(HookError, match=r"hook ComputeStats already belongs to a main loop"):
        MainLoop(LossOfOne(), Numbers(), [hook, hook])


@pytest.mark.parametrize("base", [AbstractTracker, ComputeStats, SaveEvery, StopAfter])
def test_a_hook_that_does_not_call_the_constructor_of_its_base_is_an_error(base):
    methods = dict.fromkeys(("__init__", "begin", "newest", "write"), lambda self: None)
    message = rf"Mine.__init__ does not call super\(\).__init__\(\), which sets what {base.__name__} needs; call"
    with pytest.raises(HookError, match=message) as caught:
        MainLoop(LossOfOne(), Numbers(), [AbstractHook(), type("Mine", (base,), methods)()])
    assert caught.value.hook_index == 1


def test_a_hook_of_no_other_base_need_not_call_the_constructor():
    hook = type("Mine", (AbstractHook,), {"__init__": lambda self: None})()
    assert MainLoop(LossOfOne(), Numbers(), [hook]).hooks == (hook,)


def test_a_hook_that_registers_in_its_own_way_is_checked_all_the_same():
    class Own(AbstractHook):
        def register_mainloop(self, main_loop):
            self.loop = main_loop

        def after_bach(self):
            pass

    with pytest.raises(
        HookError, match=r"Own.after_bach is not an event of the main loop; did you mean 'after_batch'\?"
    ):
        MainLoop(LossOfOne(), Numbers(), [Own()])


def test_a_hook_keeps_the_model_the_dataset_and_the_directory():
    class Limit(AbstractHook):
        def __init__(self, limit, **kwargs):
            super().__init__(**kwargs)
            self.limit = limit

    hook = Limit(3, model="m", dataset="d", output_dir="o")
    assert (hook.limit, hook.model, hook.dataset, hook.output_dir) == (3, "m", "d", "o")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'limits'"):
        Limit(3, limits=4)


def test_hooks_in_the_wrong_order_are_an_error_at_the_hooks_key(tmp_path):
    hooks = [
        {"SaveBest": {"variable": "loss"}},
        {"ComputeStats": {"variables": ["loss"]}},
        {"StopAfter": {"epochs": 1}},
    ]
    with pytest.raises(ConfigError, match=r"hooks\[0\].SaveBest: .*; move this hook after ComputeStats"):
        create_training(linear_with(hooks), output_root=tmp_path)


def test_a_misspelt_event_is_an_error_at_the_hooks_key(tmp_path, monkeypatch):
    (tmp_path / "misspelt_hooks.py").write_text(
        "from emrun import AbstractHook\nclass Bad(AbstractHook):\n    def after_bach(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"hooks\[0\].misspelt_hooks.Bad: Bad.after_bach is not an event of the main loop"
    ):
        create_training(linear_with([{"misspelt_hooks.Bad": None}]), output_root=tmp_path / "log")


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
    training = create_training(linear_with([*hooks, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path / "log")
    assert training.main_loop.run_training().status == "finished"
    hook = training.hooks[0]
    assert (hook.every, hook.model, hook.dataset) == (10, training.model, training.dataset)
    assert hook.output_dir == training.output_dir


# --- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [TrainingTerminated, TrainingAborted])
def test_an_ending_has_a_reason(ending):
    assert (ending("enough").reason, str(ending("enough"))) == ("enough", "enough")
    assert ending().reason.startswith("a hook ")


def test_an_abort_ends_the_run_as_failed_with_status_3():
    class Abort(AbstractHook):
        def after_batch(self):
            raise TrainingAborted("too bad")

        def after_training(self, success):
            self.success = success

    hook = Abort()
    loop = MainLoop(LossOfOne(), Numbers(), [hook])
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

    loop = MainLoop(LossOfOne(), Numbers(), [Saves(), Saves()])
    loop.check_hooks(any_stream=True)
    with pytest.raises(HookError, match="of the same name: 'best'"):
        loop.check_hooks()


@pytest.mark.parametrize("names", [0, True, "best", [1]])
def test_names_that_are_not_a_list_of_names_are_an_error(names):
    class MyHook(AbstractHook):
        saves = names

    message = f"MyHook.saves must be a list of names such as ['loss'], not {names!r}"
    with pytest.raises(HookError, match=re.escape(message)):
        MainLoop(LossOfOne(), Numbers(), [MyHook()]).check_hooks()
