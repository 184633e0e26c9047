"""A resume in the middle of an epoch: what hooks set up before the epoch, and in which order states are loaded."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, ended, interrupted, once, result, resumed, train_with

from emrun import AbstractHook, TrainingTerminated, create_training, resume_training
from emrun.training.create import train


class SetsUp(AbstractHook):
    """Sets something up in `before_epoch` that no state holds, and changes there what the states hold."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def before_epoch(self, epoch_id):
        self.count += 1
        model = self.main_loop.model
        for parameter in model.module.layers[0].parameters():
            parameter.requires_grad_(epoch_id >= 2)
        model.module.layers[1].eval()
        model.optimizer.param_groups[0]["lr"] *= 0.9
        for state in model.optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        self.drawn = torch.rand(2) * random.random() + np.random.rand()
        self.first = self.main_loop.iterations_done
        with torch.no_grad():
            model.module.layers[3].bias.add_(self.drawn)

    def after_epoch(self, epoch_id):
        with torch.no_grad():
            self.main_loop.model.module.layers[3].bias.add_(self.drawn * (self.first + 1))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.fixture
def hooked(project):
    """Return a config whose hooks set something up before an epoch; of other settings of the main loop."""
    (project / "sets_up.py").write_text("from tests_of_resuming import SetsUp  # noqa: F401\n")

    def config(**main_loop):
        found = config_of(hooks=FEW_HOOKS, **main_loop)
        return {**found, "hooks": ["sets_up.SetsUp", *found["hooks"]]}

    sys.modules["tests_of_resuming"] = sys.modules[__name__]
    yield config
    del sys.modules["tests_of_resuming"]


EVERYWHERE = pytest.param((0, 1, 2, 3, 4, 5), marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    "main_loop",
    thinned([{}, {"skip_zeroth_epoch": True, "extra_streams": []}], [{}]),
    ids=["evaluated", "only trained"],
)
@pytest.mark.parametrize("places", [(1,), EVERYWHERE], ids=["few", "all"])
def test_what_a_hook_sets_up_before_an_epoch_is_in_force_wherever_the_epoch_is_resumed(
    project, hooked, main_loop, places
):
    """It fails without any of these: `before_epoch`, its random states, its iterations, the second load, the modes."""
    config = hooked(**main_loop)
    config["hooks"] = [hook for hook in config["hooks"] if main_loop == {} or "SaveBest" not in hook]
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight", bool(not main_loop))
    first, last = ([events.index(f"{event} {epoch}") for epoch in (1, 2)] for event in ("before_epoch", "after_epoch"))
    events_at = (first[0], first[0] + 5, last[0], first[1] + 1, first[1] + 5, last[1] - 2)
    for at in [events_at[place] for place in places]:
        interrupted(config, project / "run", at + 1)
        resumed(project / "run")
        assert result(project / "run", bool(not main_loop)) == expected, events[at]
        shutil.rmtree(project / "run")


class Events(AbstractHook):
    """Lists its events, and calls a function in `before_epoch`."""

    def __init__(self, act=lambda hook: None):
        super().__init__()
        self.act = act
        self.events = []

    def before_training(self):
        self.events.append("before_training")

    def before_epoch(self, epoch_id):
        self.events.append(f"before_epoch {epoch_id}")
        self.act(self)

    def before_batch(self, stream_name):
        self.events.append(f"{stream_name} at {self.main_loop.iterations_done}")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.events.append("load_state_dict")


def stopped_in_an_epoch(project, iterations=7, **main_loop):
    directory = project / "run"
    config = {**config_of(**main_loop), "hooks": [{"StopAfter": {"iterations": iterations}}]}
    once(lambda: train_with(create_training(config, output_dir=directory), Events()), directory, config)
    return directory


def resumed_with(directory, hook):
    """Resume until the tenth iteration with an additional hook that also loads its state; return the training."""
    training = resume_training(directory, ["hooks.StopAfter.iterations=10"])
    loop = training.main_loop
    loop.change_hooks([*loop.hooks, hook])
    loop.restore(directory / "checkpoints" / "latest")
    return training


def test_the_order_of_a_resume_in_the_middle_of_an_epoch(project):
    hook = Events()
    train(resumed_with(stopped_in_an_epoch(project), hook))
    assert hook.events[:5] == [
        "load_state_dict", "before_training", "before_epoch 2", "load_state_dict", "train at 7",
    ]  # fmt: skip
    assert hook.events.count("before_epoch 2") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("iterations", thinned([0, 5], [5]))
def test_nothing_is_loaded_twice_between_epochs(project, iterations):
    hook = Events()
    config = config_of(hooks=[{"StopAfter": {"epochs": iterations // 5}}])
    train_with(create_training(config, output_dir=project / "run"), Events())
    training = resume_training(project / "run", ["hooks.StopAfter.epochs=2"])
    training.main_loop.change_hooks([*training.main_loop.hooks, hook])
    training.main_loop.restore(project / "run" / "checkpoints" / "latest")
    train(training)
    epoch = iterations // 5 + 1
    assert hook.events[:4] == [
        "load_state_dict", "before_training", f"before_epoch {epoch}", f"train at {iterations}",
    ]  # fmt: skip


def terminate(hook):
    raise TrainingTerminated("enough")


def request(hook):
    hook.main_loop.request_checkpoint("begun")


@pytest.mark.parametrize("act", thinned([terminate, request], [terminate]))
def test_terminations_and_requests_have_no_effect_while_an_epoch_begins_again(project, act):
    """In the `before_epoch` of the resume, a termination or a request for a checkpoint has no effect."""
    directory = stopped_in_an_epoch(project)
    hook = Events(lambda hook: act(hook) if len(hook.events) < 4 else None)
    training = resumed_with(directory, hook)
    train(training)
    assert training.main_loop.iterations_done == 10
    assert not (directory / "checkpoints" / "begun").exists()


@pytest.mark.campaign
def test_an_error_in_before_epoch_of_a_resume_leaves_the_checkpoints(project):
    directory = stopped_in_an_epoch(project)
    before = {path: path.read_bytes() for path in (directory / "checkpoints").rglob("*") if path.is_file()}

    def fail(hook):
        raise RuntimeError("no")

    training = resumed_with(directory, Events(fail))
    with pytest.raises(RuntimeError, match="no"):
        train(training)
    assert training.main_loop.iterations_done == 7
    assert {path: path.read_bytes() for path in before} == before
    resumed(directory)


def test_a_limit_that_is_reached_ends_a_resume_in_the_middle_of_an_epoch_without_a_batch(project):
    directory = stopped_in_an_epoch(project)
    hook = Events()
    training = resume_training(directory, ["model.optimizer.lr=0.1"])
    training.main_loop.change_hooks([*training.main_loop.hooks, hook])
    train(training)
    assert {each for each in hook.events if " at " in each} == {"valid at 7"}
    assert training.main_loop.outcome.reason == "7 iterations done (StopAfter iterations: 7)"


def test_an_epoch_by_hand_is_resumed_in_its_middle(project, hooked):
    """Restoring neither random states nor what hooks set up makes this fail."""
    events = interrupted(hooked(), project / "straight", None)
    interrupted(hooked(), project / "run", events.index("before_epoch 2") + 6)
    loop = resume_training(project / "run").main_loop
    assert loop.iterations_done > 5
    with loop:
        loop.epoch(["train"], ["valid"])
    assert result(project / "run")["weights"] == result(project / "straight")["weights"]
    assert result(project / "run")["metrics"] == result(project / "straight")["metrics"]


@pytest.mark.campaign
def test_a_warning_of_loading_is_logged_once(project, caplog):
    ended(project, config_of(hooks=FEW_HOOKS), "hooks.StopAfter.iterations=7")
    other = ["hooks.SaveBest={variable: loss, condition: min}", "hooks.StopAfter.iterations=99"]
    train(resume_training(project / "run", other))
    assert caplog.text.count("now watches another statistic") == 1


@pytest.mark.campaign
def test_a_smaller_epoch_ends_at_once_when_it_is_full(project):
    ended(project, config_of("context", FEW_HOOKS, fixed_epoch_size=4), "hooks.StopAfter.iterations=3")
    other = ["main_loop.fixed_epoch_size=2", "hooks.StopAfter.iterations=99"]
    training = resume_training(project / "run", other)
    assert training.main_loop.iterations_done == 3
    train(training)
    lines = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 3, 5]
