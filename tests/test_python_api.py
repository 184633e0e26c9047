"""emrun from Python: what a script or a notebook writes, with files and with mappings."""

import asyncio
import io
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign import thinned

import emrun
from emrun.base.errors import ArgumentError, ConfigError, UsageError
from emrun.cli.console import _TerminalHandler, terminal_log

SAMPLE = Path(__file__).parent.parent / "sample_configs" / "digits_mlp.yaml"
ONE_EPOCH = ["hooks.StopAfter.epochs=1"]
SHORT = [*ONE_EPOCH, "main_loop.fixed_epoch_size=6", "main_loop.report=false"]


def files_below(directory):
    return {path: path.lstat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run of one epoch, which no test changes."""
    training = emrun.create_training(SAMPLE, tmp_path_factory.mktemp("log"), overrides=ONE_EPOCH)
    training.main_loop.run_training()
    return training.output_dir


@pytest.fixture
def run(tmp_path, finished):
    """The directory of a finished run of one epoch."""
    return shutil.copytree(finished, tmp_path / "log" / finished.name, symlinks=True)


def test_a_loaded_config_is_a_mapping_of_plain_values():
    config = emrun.load_config(SAMPLE, ["model.optimizer.lr=0.5"])
    assert config["model"]["optimizer"]["lr"] == 0.5
    assert list(config)[:2] == ["seed", "name"]
    assert len(config) == len(list(config))
    assert "lr: 0.5" in repr(config)
    changed = emrun.load_config(config, ["model.optimizer.lr=0.25"])
    assert (changed["model"]["optimizer"]["lr"], config["model"]["optimizer"]["lr"]) == (0.25, 0.5)


def test_a_loaded_config_shows_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("EMRUN_TEST_TOKEN", "hunter2")
    (tmp_path / "c.yaml").write_text("dataset: {class: D, token: '${env:EMRUN_TEST_TOKEN}'}")
    config = emrun.load_config(tmp_path / "c.yaml")
    assert config["dataset"]["token"] == "hunter2"
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize("loaded", [False, True], ids=["file", "config"])
def test_a_run_from_a_file_keeps_its_comments_and_its_name(tmp_path, loaded):
    source = emrun.load_config(SAMPLE) if loaded else SAMPLE
    training = emrun.create_training(source, tmp_path)
    try:
        assert training.output_dir.name.startswith("digits_mlp_")
        text = (training.output_dir / "config.yaml").read_text()
        assert text.startswith("# Handwritten digits")
    finally:
        training.main_loop.run.release()


def test_dataset_model_and_hooks_are_built_alone_and_fit_together():
    config = emrun.load_config(SAMPLE)
    dataset = emrun.create_dataset(config)
    model = emrun.create_model(config)
    hooks = emrun.create_hooks({"hooks": [{"ComputeStats": {"variables": ["loss", "accuracy"]}}]})
    with emrun.MainLoop(model, dataset, hooks) as loop:
        first = loop.epoch(train_streams=["train"], eval_streams=["valid"])
        batches = [{"image": np.zeros((3, 64), "float32"), "label": np.zeros(3, int)}]
        second = loop.epoch(["train"], [loop.get_stream("valid"), batches])
    assert second["train"]["loss"]["mean"] < first["train"]["loss"]["mean"]
    assert second["valid"]["accuracy"]["mean"] > 0.5
    assert set(second) == {"train", "valid", "unnamed_eval_1"}
    assert loop.training_epochs_done == 2


def test_a_main_loop_works_in_a_notebook_which_has_an_event_loop_of_its_own():
    async def cell():
        config = emrun.load_config(SAMPLE)
        hooks = emrun.create_hooks(config, ["hooks=[{ComputeStats: {variables: [loss]}}, ShowProgress]"])
        with emrun.MainLoop(emrun.create_model(config), emrun.create_dataset(config), hooks, buffer=2) as loop:
            return loop.epoch(["train"])

    assert asyncio.run(cell())["train"]["loss"]["mean"] < 2.2


def test_a_model_needs_only_its_section_and_gets_the_dataset_it_takes(tmp_path, monkeypatch):
    (tmp_path / "sized.py").write_text(
        "import torch\n"
        "class Sized(torch.nn.Module):\n"
        "    def __init__(self, dataset):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(dataset.num_batches['valid']))\n"
        "    def forward(self, image):\n"
        "        return {'loss': image.mean()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    section = {"module": {"class": "sized.Sized"}}
    model = emrun.create_model({"dataset": {"class": "Digits", "batch_size": 60}, "model": section})
    assert model.module.weight.shape == (3,)
    given = emrun.create_dataset({"dataset": {"class": "Digits", "batch_size": 90}})
    assert emrun.create_model({"model": section}, dataset=given).module.weight.shape == (2,)
    with pytest.raises(ConfigError, match="missing section 'dataset'"):
        emrun.create_model({"model": section})


def test_the_same_seed_builds_the_same_model():
    one, other = emrun.create_model(SAMPLE), emrun.create_model(SAMPLE)
    for a, b in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
    another = emrun.create_model(SAMPLE, ["seed=43"])
    assert not torch.equal(next(one.module.parameters()), next(another.module.parameters()))


@pytest.mark.parametrize(
    "create, config, message",
    [
        (emrun.create_model, {"model": {"module": {"class": "torch.nn.Linear", "in_feature": 1}}}, "in_features"),
        (emrun.create_model, {}, "missing section 'model'"),
        (emrun.create_model, {"model": 3}, "model: 3 is not a mapping"),
        (emrun.create_hooks, {"hooks": [{"StopAfter": {"epoch": 1}}]}, "did you mean 'epochs'"),
        (emrun.create_hooks, {"hooks": [{"A": 1, "B": 2}]}, "is not a hook"),
        (emrun.create_hooks, {"hooks": {"StopAfter": {}}}, "is not a list"),
        (emrun.create_dataset, {"dataset": {"class": "Digit"}}, "did you mean 'Digits'"),
    ],
)
def test_a_mistake_in_a_section_is_reported(create, config, message):
    with pytest.raises(ConfigError, match=message):
        create(config)


def test_a_loaded_run_has_its_weights_and_stays_as_it_is(run):
    before = files_below(run)
    loaded = emrun.load_run(run, "latest")
    assert loaded.main_loop.training_epochs_done == 1
    assert loaded.hooks == ()
    assert not any(each.training for each in loaded.model.module.modules())
    batch = next(iter(loaded.main_loop.get_stream("test")))
    outputs = loaded.model.run(batch, False, "test")
    assert outputs["accuracy"].double().mean() > 0.5
    assert loaded.main_loop.run_evaluation("valid") == {"valid": {}}
    assert files_below(run) == before
    fresh = emrun.create_model(run)
    assert not np.allclose(fresh.run(batch, False, "test")["logits"], outputs["logits"])


def test_a_run_that_is_not_there_cannot_be_loaded(tmp_path, run):
    with pytest.raises(UsageError, match="is not a run directory"):
        emrun.load_run(tmp_path)
    with pytest.raises(UsageError, match="nope"):
        emrun.load_run(run, "nope")


def test_a_wrong_argument_of_the_main_loop_is_an_error():
    with pytest.raises(ArgumentError, match="buffer"):
        emrun.MainLoop(emrun.create_model(SAMPLE), emrun.create_dataset(SAMPLE), buffer=-1)


FAILS = """
from emrun import AbstractHook

class Fail(AbstractHook):
    def after_batch(self):
        if self.main_loop.iterations_done == 3:
            raise RuntimeError("it broke")
"""


def log_lines(directory):
    """Return the lines of a run's log without their times: level, module, message."""
    lines = (directory / "train.log").read_text(encoding="utf-8").splitlines()
    return [line.partition(": ")[2] for line in lines]


def test_the_log_of_a_run_from_python_has_its_construction_its_epochs_and_its_end(tmp_path):
    training = emrun.create_training(SAMPLE, tmp_path, overrides=SHORT)
    training.main_loop.run_training()
    text = "\n".join(log_lines(training.output_dir))
    assert text.count("run directory: ") == 1
    assert text.count("epoch 1  train  loss ") == 1
    assert text.count("finished: 1 epoch done (StopAfter epochs: 1)") == 1


def test_the_log_of_a_run_that_fails_from_python_has_the_traceback_once(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["hooks=[failing.Fail, {StopAfter: {epochs: 1}}]"]
    training = emrun.create_training(SAMPLE, output_dir=tmp_path / "run", overrides=overrides)
    with pytest.raises(RuntimeError, match="it broke"):
        training.main_loop.run_training()
    text = (tmp_path / "run" / "train.log").read_text()
    assert text.count("Traceback (most recent call last)") == 1
    assert 'raise RuntimeError("it broke")' in text


def test_the_log_of_a_run_by_hand_has_what_happens_inside_of_the_block(tmp_path):
    training = emrun.create_training(SAMPLE, output_dir=tmp_path / "run")
    with training.main_loop as loop:
        loop.epoch(["train"], ["valid"])
        logging.getLogger("notebook").info("looked at the weights")
    logging.getLogger("notebook").warning("after the block")
    text = "\n".join(log_lines(tmp_path / "run"))
    assert "epoch 1  valid  loss " in text
    assert text.count("looked at the weights") == 1
    assert "after the block" not in text
    assert text.endswith("finished")


def test_the_log_of_a_resume_from_python_has_its_epochs(run):
    resumed = emrun.resume_training(run, ["hooks.StopAfter.epochs=2", "main_loop.report=false"])
    resumed.main_loop.run_training()
    text = "\n".join(log_lines(run))
    assert text.count("epoch 1  train  loss ") == text.count("epoch 2  train  loss ") == 1
    assert text.endswith("finished: 2 epochs done (StopAfter epochs: 2)")


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_the_log_of_a_run_leaves_the_users_own_logging_as_it_is(tmp_path, level):
    root, shown = logging.getLogger(), io.StringIO()
    handler, before = logging.StreamHandler(shown), root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        emrun.create_training(SAMPLE, tmp_path, overrides=SHORT).main_loop.run_training()
        assert root.level == level
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    assert shown.getvalue().count("epoch 1  train  loss ") == (level == logging.INFO)


@pytest.fixture
def python(tmp_path, warm):
    """Run a script in a process that has not imported emrun yet; return the finished process."""

    def run(script):
        (tmp_path / "script.py").write_text(script)
        done = warm.run([str(tmp_path / "script.py")], tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_warnings_are_shown_where_no_logging_is_configured(python):
    script = (
        "import emrun\n"
        f"training = emrun.create_training({str(SAMPLE.with_name('majority.yaml'))!r}, 'log')\n"
        "import logging\n"
        "with training.main_loop:\n"
        "    logging.getLogger('mine').warning('look here')\n"
    )
    assert python(script).stderr == "look here\n"


@pytest.mark.parametrize("package", ["emrun", "emrun.hooks", "emrun.datasets"])
def test_a_package_lists_its_public_names_and_nothing_else_before_and_after_they_are_imported(python, package):
    script = (
        f"import importlib, json; package = importlib.import_module({package!r})\n"
        "names = lambda: [name for name in dir(package) if not name.startswith('_')]\n"
        "before = names()\n"
        "found = [getattr(package, name).__name__ for name in before]\n"
        "assert names() == before\n"
        "print(json.dumps([before, found]))"
    )
    before, found = json.loads(python(script).stdout)
    named = [name for name in before if name != "Factory"]
    assert [name for name in found if name in named] == named
    assert {"emrun": "MainLoop", "emrun.hooks": "StopAfter", "emrun.datasets": "Digits"}[package] in before


# Two trainings in one process


class Meanwhile(emrun.AbstractHook):
    """Calls a function once, in the given event."""

    changes_batches = False

    def __init__(self, call, event="after_batch"):
        super().__init__()
        self.call, self.raised = call, None
        setattr(self, event, self.once)

    def once(self, **arguments):
        call, self.call = self.call, lambda: None
        try:
            call()
        except UsageError as error:
            self.raised = str(error)


def in_thread(call):
    """Return a function that calls another one in a thread, and raises its error."""

    def called():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()

    return called


def trained_with(directory, *hooks):
    training = emrun.create_training(SAMPLE, output_dir=directory, overrides=SHORT)
    training.main_loop.change_hooks([*training.hooks, *hooks])
    training.main_loop.run_training()
    return (directory / "steps.jsonl").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The steps of the training of `trained_with` when nothing happens meanwhile."""
    return trained_with(tmp_path_factory.mktemp("alone") / "run")


def by_hand(loop):
    with loop:
        loop.epoch(["train"])


AT_THE_SAME_TIME = {
    "create_training": lambda run, new, built: emrun.create_training(SAMPLE, output_dir=new),
    "run_training": lambda run, new, built: built.main_loop.run_training(),
    "epoch by epoch": lambda run, new, built: by_hand(built.main_loop),
    "resume_training": lambda run, new, built: emrun.resume_training(run, ["hooks.StopAfter.epochs=2"]),
    "evaluate": lambda run, new, built: emrun.evaluate(run, "valid"),
    "predict": lambda run, new, built: emrun.predict(run, "valid"),
    "load_run": lambda run, new, built: emrun.load_run(run),
    "create_model": lambda run, new, built: emrun.create_model(SAMPLE),
    "create_dataset": lambda run, new, built: emrun.create_dataset(SAMPLE),
    "asyncio": lambda run, new, built: asyncio.run(asyncio.to_thread(emrun.evaluate, run, "valid")),
}


@pytest.mark.parametrize("name", thinned(AT_THE_SAME_TIME, ["run_training", "evaluate"]))
def test_a_second_training_at_the_same_time_is_an_error_and_the_first_goes_on_as_alone(tmp_path, run, alone, name):
    built = emrun.create_training(SAMPLE, output_dir=tmp_path / "built", overrides=SHORT)
    begin = partial(AT_THE_SAME_TIME[name], run, tmp_path / "new", built)
    other = Meanwhile(in_thread(begin))
    assert trained_with(tmp_path / "first", other) == alone
    assert "another thread of this process trains or evaluates" in other.raised
    assert not (tmp_path / "new").exists()
    begin()


WITHIN = ["evaluate", "predict", "load_run", "create_model", "create_dataset"]


@pytest.mark.parametrize("event", thinned(["after_batch", "after_epoch", "after_checkpoint"], ["after_checkpoint"]))
def test_an_evaluation_in_a_hook_changes_nothing_in_the_training(tmp_path, run, event):
    hooks = [Meanwhile(partial(AT_THE_SAME_TIME[name], run, None, None), event) for name in WITHIN]
    random = []
    for directory, more in ((tmp_path / "first", hooks), (tmp_path / "alone", [])):
        training = emrun.create_training(SAMPLE, output_dir=directory, overrides=SHORT)
        training.main_loop.change_hooks(
            [*training.hooks, *more, Meanwhile(lambda: random.append(np.random.rand()), event)]
        )
        training.main_loop.run_training()
    assert random[0] == random[1]
    assert [each.raised for each in hooks] == [None] * len(hooks)


def test_a_training_in_a_hook_of_another_one_is_an_error_until_all_of_that_is_saved(tmp_path):
    nested = Meanwhile(lambda: trained_with(tmp_path / "nested"))
    later = Meanwhile(lambda: trained_with(tmp_path / "later"), "after_training")
    found = trained_with(tmp_path / "first", nested, later)
    assert nested.raised == "this training begins within a training, as in a hook; begin it afterwards"
    assert later.raised is None
    assert found == (tmp_path / "later/steps.jsonl").read_bytes()


def test_trainings_one_after_the_other_in_threads_are_equal(tmp_path):
    for name in ("a", "b"):
        in_thread(lambda name=name: trained_with(tmp_path / name))()
    assert (tmp_path / "a/steps.jsonl").read_bytes() == (tmp_path / "b/steps.jsonl").read_bytes()


def test_a_training_that_failed_lets_the_next_one_begin(tmp_path):
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        trained_with(tmp_path / "failed", Meanwhile(fail))
    in_thread(lambda: trained_with(tmp_path / "next"))()


def test_tasks_of_asyncio_that_train_epoch_by_epoch_at_the_same_time_are_an_error(tmp_path):
    loops = [emrun.create_training(SAMPLE, tmp_path / name, overrides=SHORT).main_loop for name in ("a", "b")]

    async def epochs(loop):
        with loop:
            await asyncio.sleep(0)
            loop.epoch(["train"])

    async def both():
        return await asyncio.gather(*map(epochs, loops), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert "begins within a training" in str(second)


# Logging that other code configures

STOP = {"StopAfter": {"epochs": 2}}
CONFIGURED = {
    "dictConfig": "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR', 'handlers': []}})",
    "basicConfig": "logging.basicConfig(force=True, level=logging.ERROR, stream=io.StringIO())",
    "disable": "logging.disable(logging.CRITICAL)",
    "handlers": "logging.getLogger().handlers.clear()",
    "level": "logging.getLogger().setLevel(logging.ERROR)",
    "own": "for each in logging.root.manager.loggerDict.values(): each.disabled = True",
}
LOUD = """
import io
import logging.config

import torch

import emrun

LINE = {line!r}


class Data:
    def __init__(self):
        if {at!r} == "built":
            exec(LINE)

    def train_stream(self):
        if {at!r} == "read":
            exec(LINE)
        yield {{"features": [[0.0] * 64] * 2, "extra": [1, 2]}}


class Loud(emrun.AbstractHook):
    reads = ()

    def before_training(self):
        if {at!r} == "before_training":
            exec(LINE)

    def after_epoch(self, epoch_id):
        if {at!r} == "after_epoch" and epoch_id == 1:
            exec(LINE)


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 1)

    def forward(self, features):
        if {at!r} == "forward":
            exec(LINE)
        return {{"loss": super().forward(features)[:, 0] ** 2}}
"""


EVENTS = ("built", "before_training", "read", "forward", "after_epoch")
FEW = [*zip(CONFIGURED, (*EVENTS, "read"), strict=True)]
"""Each way once, and each event at least once."""


@pytest.mark.parametrize(("how", "at"), thinned(product(CONFIGURED, EVENTS), FEW))
def test_logging_that_other_code_configures_takes_no_line_from_the_log(tmp_path, monkeypatch, how, at):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"loud_{how}_{at}"
    (tmp_path / f"{name}.py").write_text(LOUD.format(line=CONFIGURED[how], at=at))
    config = {
        "seed": 1,
        "dataset": {"class": f"{name}.Data"},
        "model": {"module": {"class": f"{name}.Net"}, "optimizer": {"class": "SGD", "lr": 0.1}},
        "main_loop": {"skip_zeroth_epoch": True, "report": False},
        "hooks": [f"{name}.Loud", {"ComputeStats": {"variables": ["loss"]}}, "LogVariables", STOP],
    }
    root, told = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    try:
        with terminal_log(), monkeypatch.context() as patch:
            patch.setattr(next(each for each in root.handlers if isinstance(each, _TerminalHandler)), "stream", told)
            emrun.create_training(config, output_dir=tmp_path / "run").main_loop.run_training()
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:], root.level = before
        for each in root.manager.loggerDict.values():
            each.disabled = False
    for text in (told.getvalue(), (tmp_path / "run/train.log").read_text()):
        assert [line in text for line in ("extra", "epoch 1", "epoch 2", "finished: 2 epochs")] == [True] * 4, text
