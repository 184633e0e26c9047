"""`init_from` of a run: loaded when the run begins, and neither by a resume nor by an evaluation."""

import json
import re
import shutil

import pytest
import torch
from training.resuming import trained

from emrun import AbstractHook, MainLoop, create_model, create_training, evaluate, load_run, resume_training
from emrun.base.errors import ConfigError
from emrun.diagnosis.replay import replay
from emrun.storage.checkpoints.weights import read_weights

LINEAR = {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1}
CONFIG = {
    "seed": 3,
    "dataset": {"class": "Majority", "n": 100},
    "model": {
        "module": {"class": "torch.nn.Sequential", "args": [LINEAR, {"class": "torch.nn.Flatten", "start_dim": 0}]},
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.BCEWithLogitsLoss", "inputs": ["logit", "y"]},
        "optimizer": {"class": "SGD", "lr": 0.5, "momentum": 0.9},
    },
    "main_loop": {"extra_streams": ["valid"], "report": False},
    "hooks": ["ComputeStats", "SaveBest", {"StopAfter": {"epochs": 2}}],
}
FROM_FIRST = "model.init_from=first"


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The weights of the best checkpoint of a finished run, whose directory is `first`."""
    monkeypatch.chdir(tmp_path)
    trained(CONFIG, tmp_path / "first")
    return read_weights(tmp_path / "first" / "checkpoints" / "best")


def weights(training):
    return {name: each.clone() for name, each in training.model.module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Watch(AbstractHook):
    """Keeps the weights that the model has when the hook is built."""

    def __init__(self, model):
        super().__init__()
        self.weights = {name: each.clone() for name, each in model.module.state_dict().items()}


def test_a_run_begins_with_the_best_weights_of_another_run(first, tmp_path):
    training = create_training(CONFIG, output_dir="second", overrides=[FROM_FIRST, "model.optimizer.lr=0.0"])
    assert same(weights(training), first)
    training.main_loop.run_training()
    assert same(read_weights(tmp_path / "second" / "checkpoints" / "latest"), first)
    log = (tmp_path / "second" / "train.log").read_text()
    assert log.count("weights from first (best: it-") == 1
    assert "loaded        2      12  0.weight, 0.bias" in log
    watched = create_training({**CONFIG, "hooks": [f"{__name__}.Watch"]}, output_dir="third", overrides=[FROM_FIRST])
    assert same(next(each for each in watched.hooks if isinstance(each, Watch)).weights, first)


def test_a_run_without_a_best_checkpoint_gives_its_latest(first, tmp_path):
    (tmp_path / "first" / "checkpoints" / "best").unlink()
    latest = read_weights(tmp_path / "first" / "checkpoints" / "latest")
    assert not same(latest, first)
    created = create_training(CONFIG, output_dir="second", overrides=[FROM_FIRST])
    assert same(weights(created), latest)
    created.main_loop.run.release()
    assert "weights from first (the run has no best; latest: it-" in (tmp_path / "second" / "train.log").read_text()


def test_a_resume_and_an_evaluation_need_no_other_weights(first, tmp_path):
    straight = trained(CONFIG, tmp_path / "straight", FROM_FIRST)
    stopped = create_training(CONFIG, output_dir="second", overrides=[FROM_FIRST, "hooks.StopAfter.epochs=1"])
    stopped.main_loop.run_training()
    shutil.rmtree("first")
    resumed = resume_training("second", ["hooks.StopAfter.epochs=2"])
    resumed.main_loop.run_training()
    assert same(weights(resumed), read_weights(straight / "checkpoints" / "latest"))
    assert not same(weights(resumed), first)
    evaluate("second", "valid")
    assert same(weights(load_run("second", "latest")), weights(resumed))


class Fail(AbstractHook):
    """Makes the third update fail."""

    def before_update(self, model):
        if self.main_loop.iterations_done == 2:
            raise ValueError("the third update")


@pytest.mark.campaign
def test_a_replay_needs_no_other_weights(first):
    hooks = [f"{__name__}.Fail", {"StopAfter": {"epochs": 1}}]
    training = create_training({**CONFIG, "hooks": hooks}, output_dir="second", overrides=[FROM_FIRST])
    with pytest.raises(ValueError, match="the third update"):
        training.main_loop.run_training()
    shutil.rmtree("first")
    assert replay("second").error is not None


def test_a_resume_without_a_checkpoint_begins_again_with_the_weights(first):
    create_training(CONFIG, output_dir="second", overrides=[FROM_FIRST]).main_loop.run.release()
    assert same(weights(resume_training("second")), first)


def test_a_resume_that_changes_init_from_warns_that_it_is_not_read(first, caplog):
    caplog.clear()
    resume_training("first", ["hooks.StopAfter.epochs=3", FROM_FIRST]).main_loop.run.release()
    assert "model.init_from is read when a run begins; a resume has the weights of its checkpoint" in caplog.text


def test_weights_that_do_not_fit_leave_no_run(first, tmp_path):
    with pytest.raises(ConfigError, match=r"model.init_from.match: '\^head' matches none of the names"):
        create_training(CONFIG, output_dir="second", overrides=["model.init_from={path: first, match: ^head}"])
    assert not (tmp_path / "second").exists()


def test_a_list_in_a_config_is_loaded_by_a_new_run_and_by_nothing_else(first, tmp_path, caplog):
    entries = [{"path": "first", "match": "weight"}, {"path": "first", "match": "bias"}]
    config = {**CONFIG, "model": {**CONFIG["model"], "init_from": entries}}
    training = create_training(config, output_dir="second")
    assert same(weights(training), first)
    training.main_loop.run_training()
    shutil.rmtree("first")
    assert not same(weights(resume_training("second", ["hooks.StopAfter.epochs=3"])), first)
    evaluate("second", "valid")
    (tmp_path / "c.yaml").write_text(json.dumps(config, indent=1))
    with pytest.raises(ConfigError) as caught:
        create_training("c.yaml", output_dir="third", overrides=["model.init_from.1.on_mismatch=warn"])
    assert "model.init_from" in str(caught.value)
    with pytest.raises(ConfigError, match=r"c.yaml:\d+:\d+: model.init_from\[0\].path: .*first"):
        create_training("c.yaml", output_dir="third")


def test_a_model_of_python_has_them_when_it_is_in_a_loop(first):
    model = create_model(CONFIG, [FROM_FIRST])
    assert not same(model.module.state_dict(), first)
    MainLoop(model, None)
    assert same(model.module.state_dict(), first)


def test_a_check_loads_into_its_copy_and_shows_the_table(first, tmp_path, emrun_here):
    (tmp_path / "config.yaml").write_text(str(CONFIG))
    done = emrun_here("check", "config.yaml", FROM_FIRST)
    assert done.returncode == 0
    assert "weights from first (best: it-" in done.stdout
    assert re.search(r"^loaded +2 +12  0.weight, 0.bias$", done.stdout, re.MULTILINE)
    assert done.stderr == ""
    done = emrun_here("check", "config.yaml", "model.init_from=frist")
    assert done.returncode == 2
    assert (
        "model.init_from: frist does not exist; write the path of a run, a checkpoint or a file on this machine"
        in done.stderr
    )


@pytest.mark.campaign
def test_a_resume_is_exact_at_every_point(first, tmp_path, emrun):
    (tmp_path / "config.yaml").write_text(str(CONFIG))
    done = emrun("verify-resume", "-q", "config.yaml", FROM_FIRST)
    assert done.returncode == 0, done.stdout + done.stderr
