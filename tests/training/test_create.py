"""From a config to a run directory, in this process."""

import importlib
import json
import logging
import threading

import psutil
import pytest
import torch
from campaign import thinned
from ruamel.yaml import YAML
from training.tiny import CONFIG, finished, metrics, metrics_in, trace, trained, weights, weights_in

import emrun
from emrun.base.errors import ConfigError, StreamError, UsageError
from emrun.training.create import create_training, train

COUNTING = """
from itertools import count
from pathlib import Path

import torch

NUMBERS = count(1)
LAST = None

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        global LAST
        LAST = self
        with Path("built").open("a") as file:
            file.write("x")
        self.name = f"linear_{next(NUMBERS)}"
        self.add_module(self.name, torch.nn.Linear(11, 1))

    def forward(self, x):
        return getattr(self, self.name)(x)[:, 0]
"""


def test_a_module_is_built_once_for_a_training(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    training = trained(tmp_path, "model.module={class: counting.Counting}")
    assert training.model.module is importlib.import_module("counting").LAST
    assert training.model.module.name == "linear_1"
    assert (tmp_path / "built").read_text() == "x"


FORGETFUL = """
from emrun import TorchModel
from emrun.datasets import Table

class Model(TorchModel):
    def __init__(self, dataset):
        self.module = None

class Data(Table):
    def __init__(self):
        self.size = 5
"""


@pytest.mark.parametrize(("key", "name", "base"), [("model", "Model", "TorchModel"), ("dataset", "Data", "Table")])
def test_a_constructor_that_does_not_call_that_of_its_base_is_an_error_at_its_line(
    tmp_path, monkeypatch, key, name, base
):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps({**CONFIG, key: {"class": f"forgetful.{name}"}}, indent=1))
    message = (
        rf"config.yaml:\d+:\d+: {key}: {name}.__init__ does not call super\(\).__init__\(\), which sets what {base} "
    )
    with pytest.raises(ConfigError, match=message):
        create_training(tmp_path / "config.yaml", output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_training_from_a_mapping_has_all_its_parts(tmp_path):
    training = trained(tmp_path)
    assert training.output_dir.parent == tmp_path
    assert training.output_dir.name.startswith("tiny_")
    assert [type(hook).__name__ for hook in training.hooks] == ["ComputeStats", "SaveBest", "StopAfter", "SaveLatest"]
    assert training.main_loop.model is training.model
    assert training.main_loop.training_epochs_done == 2
    assert {path.name for path in training.output_dir.iterdir()} == {
        ".config.yaml.json",
        ".lock",
        ".trace.yaml.json",
        "config.yaml",
        "trace.yaml",
        "train.log",
        "metrics.jsonl",
        "report.html",
        "rows.jsonl",
        "steps.jsonl",
        "checkpoints",
        "code",
    }


def test_save_latest_is_added_only_when_it_is_not_listed(tmp_path):
    config = {**CONFIG, "hooks": [{"StopAfter": {"epochs": 0}}, {"SaveLatest": {"on_save_failure": "warn"}}]}
    names = [type(hook).__name__ for hook in create_training(config, tmp_path).hooks]
    assert names == ["StopAfter", "SaveLatest"]


def test_the_same_seed_gives_the_same_bits(tmp_path):
    first, second = finished(tmp_path), trained(tmp_path, "main_loop.buffer=3")
    assert weights_in(first) == weights(second)
    assert metrics_in(first) == metrics(second)


@pytest.mark.campaign
def test_another_seed_gives_other_bits(tmp_path):
    assert weights_in(finished(tmp_path)) != weights(trained(tmp_path, "seed=6"))


def test_an_additional_hook_does_not_change_the_training(tmp_path):
    assert weights_in(finished(tmp_path)) == weights(trained(tmp_path, "hooks.ShowProgress={}"))


def test_a_drawn_seed_is_written_to_the_config_and_repeats_the_run(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "seed"}
    first = trained(tmp_path, config=config)
    second = create_training(first.output_dir, tmp_path)
    train(second)
    assert weights(first) == weights(second)
    assert weights(first) != weights(trained(tmp_path, config=config))


def test_the_stored_config_keeps_comments_and_interpolations(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "# my experiment\n"
        "dataset: {class: Majority, n: '${env:EMRUN_TEST_N,50}'}\n"
        "model: {module: {class: torch.nn.Linear, in_features: 11, out_features: 1}, inputs: [x], outputs: [loss]}\n"
    )
    text = (create_training(path, tmp_path).output_dir / "config.yaml").read_text()
    assert text.startswith("# my experiment\n")
    assert "${env:EMRUN_TEST_N,50}" in text


def test_the_name_of_a_run_is_that_of_its_config_file(tmp_path):
    path = tmp_path / "my_config.yaml"
    YAML().dump({key: value for key, value in CONFIG.items() if key != "name"}, path)
    assert create_training(path, tmp_path / "log").output_dir.name.startswith("my_config_")


def test_deterministic_algorithms_are_on_during_the_training_only(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "emrun.hooks.save_best.SaveBest.before_epoch",
        lambda self, epoch_id: seen.append(torch.are_deterministic_algorithms_enabled()),
        raising=False,
    )
    trained(tmp_path, "deterministic=true")
    assert seen == [True, True, True]
    assert not torch.are_deterministic_algorithms_enabled()


def end(*_, **__):
    raise emrun.TrainingTerminated


def test_a_training_that_no_hook_ends_logs_a_warning(tmp_path, caplog):
    training = create_training({**CONFIG, "hooks": ["LogVariables"]}, tmp_path)
    vars(training.main_loop)["request_checkpoint"] = end  # which SaveLatest calls
    train(training)
    assert "no hook ends this run" in caplog.text
    assert "no hook ends this run" in (training.output_dir / "train.log").read_text()


# what goes wrong while it is created


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.optimizer.momentums=0.9"], "unknown argument 'momentums'; did you mean 'momentum'?"),
        (["dataset.btch_size=3"], "unknown argument 'btch_size'; did you mean 'batch_size'?"),
        (["dataset.batch_size=0"], "dataset.batch_size: 0 is not a whole number of at least 1"),
        (["main_loop.extra_streams=[vaild]"], "no stream 'vaild'; did you mean 'valid'?"),
        (["main_loop.buffer=-1"], "main_loop.buffer: -1 is not a whole number of at least 0"),
        (["hooks.SaveBest.variable=accuracy"], "add it to ComputeStats (variables: [loss, accuracy])"),
        (["hooks.SaveBest.aggregation=std"], "add it to ComputeStats (variables: [{loss: std}])"),
        (["hooks.SaveBest.stream=test"], "stream 'test' is not run"),
        (["hooks.SaveBest.condition=most"], "'most' is not one of min, max"),
        (["hooks.ComputeStats.variables=[{loss: [maen]}]"], "'maen' is not an aggregation; did you mean 'mean'?"),
        (["~model.module"], "missing argument 'module'"),
        (["model.optimizer.class=SDG"], "unknown class 'SDG'; did you mean 'SGD'?"),
        (["seed=-1"], "must be 0 or greater, not -1"),
    ],
)
def test_a_config_that_cannot_be_used_leaves_nothing_behind(tmp_path, caplog, overrides, message):
    caplog.set_level("INFO")
    with pytest.raises(ConfigError) as caught:
        create_training(CONFIG, tmp_path / "log", overrides=overrides)
    assert message in str(caught.value)
    assert not list(tmp_path.glob("log/*"))
    assert "run directory" not in caplog.text


def test_all_problems_are_reported_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        create_training(
            CONFIG, tmp_path, overrides=["dataset.a=1", "model.b=2", "main_loop.c=3", "hooks.StopAfter.d=4"]
        )
    assert len(caught.value.problems) == 4


def test_the_error_for_hooks_in_the_wrong_order_says_which_to_move(tmp_path):
    with pytest.raises(ConfigError, match="move this hook after ComputeStats"):
        create_training({**CONFIG, "hooks": CONFIG["hooks"][::-1]}, tmp_path)


def test_a_dataset_that_fails_is_recorded_in_trace_and_log(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    (tmp_path / "failing_data.py").write_text(
        "class Broken:\n    train_stream = None\n\n    def __init__(self):\n        1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        create_training({**CONFIG, "dataset": {"class": "failing_data.Broken"}, "main_loop": {}}, tmp_path / "log")
    assert any("while building dataset" in note for note in caught.value.__notes__)
    (directory,) = (tmp_path / "log").iterdir()
    assert f"run directory: {directory}" in caplog.messages
    assert trace(directory)["status"] == "failed"
    assert trace(directory)["reason"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in (directory / "train.log").read_text()


MADE_STREAMS = """
class Made:
    def __init__(self, name):
        setattr(self, name, self.batches)

    def batches(self):
        yield {"x": [[0.0] * 11] * 2, "y": [0.0, 1.0]}

class Inside(Made):
    def __init__(self, name):
        [setattr(self, each, self.batches) for each in [name]]

class Below(Made):
    def __init__(self, name):
        object.__setattr__(self, name, self.batches)

class Elsewhere(Made):
    def __init__(self, name):
        install(self, name)

def install(dataset, name):
    setattr(dataset, name, dataset.batches)
"""


@pytest.mark.parametrize("kind", thinned(["Made", "Inside", "Below", "Elsewhere"], ["Elsewhere"]))
def test_streams_that_a_constructor_makes_are_found_when_the_dataset_is_built(tmp_path, monkeypatch, kind):
    (tmp_path / "made_streams.py").write_text(MADE_STREAMS)
    monkeypatch.syspath_prepend(tmp_path)
    config = {**CONFIG, "main_loop": {}, "hooks": [{"StopAfter": {"epochs": 1}}]}
    good = {"class": f"made_streams.{kind}", "name": "train_stream"}
    assert trained(tmp_path / "log", config={**config, "dataset": good}).main_loop.training_epochs_done == 1
    with pytest.raises(ConfigError, match="no method 'train_stream'"):
        create_training({**config, "dataset": {**good, "name": "tarin_stream"}}, tmp_path / "wrong")
    assert not list(tmp_path.glob("wrong/*"))


def test_a_directory_that_holds_a_run_is_refused_and_untouched(tmp_path):
    directory = finished(tmp_path)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="already holds a run"):
        create_training(CONFIG, output_dir=directory)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_wrong_config_does_not_remove_a_directory_that_was_there(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError):
        create_training(CONFIG, output_dir=tmp_path / "mine", overrides=["hooks.SaveBest.condition=most"])
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


# what goes wrong while it runs

FAILING_STREAM = """
def batches(fail_at, total=20):
    for index in range(total + 1):
        if index == fail_at:
            raise OSError(f"cannot read row {index}")
        if index < total:
            yield {"x": [[0.0] * 11] * 2, "y": [0.0, 1.0]}

class Failing:
    def __init__(self, fail_at, stream):
        self.fail_at = {stream: fail_at}

    def train_stream(self):
        return batches(self.fail_at.get("train"))

    def valid_stream(self):
        return batches(self.fail_at.get("valid"))
"""


def test_a_failing_and_a_good_training_leave_nothing_behind_in_the_process(tmp_path, monkeypatch, patient):
    (tmp_path / "failing_twice.py").write_text(FAILING_STREAM)
    monkeypatch.syspath_prepend(tmp_path)
    trained(tmp_path / "warm")  # whatever torch opens when it is first used
    process, root = psutil.Process(), logging.getLogger()

    before, threads, files = (list(root.handlers), root.level), {*threading.enumerate()}, process.num_fds()
    failing = {"class": "failing_twice.Failing", "fail_at": 3, "stream": "train"}
    with pytest.raises(OSError, match="row 3"):
        trained(tmp_path, "main_loop.buffer=2", config={**CONFIG, "dataset": failing})
    trained(tmp_path, "main_loop.buffer=2")
    assert (list(root.handlers), root.level) == before
    assert {*threading.enumerate()} <= threads  # what other tests have begun may end
    assert process.num_fds() <= files


def test_a_variable_that_nothing_makes_is_found_before_any_update(tmp_path):
    training = create_training(
        CONFIG, tmp_path, overrides=["hooks.ComputeStats.variables=[loss, acuracy]", "main_loop.skip_zeroth_epoch=true"]
    )
    before = {name: value.clone() for name, value in training.model.module.state_dict().items()}
    with pytest.raises(StreamError, match="'acuracy', which is neither a source nor an output") as caught:
        train(training)
    assert caught.value.exit_status == 2
    assert all(torch.equal(before[name], value) for name, value in training.model.module.state_dict().items())


TAKERS = """
from pathlib import Path
import torch
from emrun import AbstractHook
from emrun.datasets import Majority

class Data(Majority):
    def __init__(self, output_dir: str | None = None):
        super().__init__(n=50)
        self.output_dir = output_dir

class Module(torch.nn.Module):
    def __init__(self, output_dir: str):
        super().__init__()
        self.output_dir = output_dir
        self.layer = torch.nn.Linear(11, 1)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}

class Hook(AbstractHook):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
"""


def test_the_output_dir_that_dataset_module_and_hook_get_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "takers.py").write_text(TAKERS)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"dataset": {"class": "takers.Data"}, "model": {"module": {"class": "takers.Module"}}}
    training = create_training({**config, "hooks": ["takers.Hook"]}, output_dir=tmp_path / "run")
    for taker in (training.dataset, training.model.module, training.hooks[0]):
        assert taker.output_dir == tmp_path / "run"


def test_a_training_that_does_not_begin_gives_the_lock_back_and_has_no_page(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no plan")

    with monkeypatch.context() as patch:
        patch.setattr("emrun.training.create.plan_schedule", fail)
        with pytest.raises(RuntimeError, match="no plan") as caught:
            create_training(CONFIG, output_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()
    create_training(CONFIG, output_dir=tmp_path / "run").main_loop.run_training()
    assert (tmp_path / "run" / "report.html").exists()
    assert caught.tb is not None  # the frames of the first one were alive
