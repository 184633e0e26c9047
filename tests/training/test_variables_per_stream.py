"""Streams with different variables: metrics and statistics of some streams, and of the batches that have a variable."""

import csv
import json
import signal

import numpy as np
import pytest
from campaign import thinned
from in_ranks import in_ranks

from emrun import AbstractHook, create_training, resume_training
from emrun.base.errors import ConfigError, HookError, StreamError
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

PARTS = '''
import numpy as np
import torch


class Data:
    """Some batches of `train` have a depth; only `valid` has the truth."""

    def batch(self, number, **more):
        x = np.random.default_rng(number).normal(size=(4, 3)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1), **{name: x[:, 0] * factor for name, factor in more.items()}}

    def train_stream(self):
        return (self.batch(number, **({"depth": 2.0} if number % 3 == 1 else {})) for number in range(8))

    def valid_stream(self):
        return (self.batch(number, truth=1.0) for number in range(20, 23))

    def test_stream(self):
        return iter([self.batch(30)])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, y, depth=None):
        score = self.layer(x)[:, 0]
        more = {} if depth is None else {"depth_error": (score - depth).abs()}
        return {"score": score, "loss": (score - y) ** 2, **more}


def off(score, truth):
    return (score - truth).abs()


class Gap:
    """A metric of a whole stream."""

    def __init__(self):
        self.reset()

    def update(self, score, truth):
        self.found.append((score - truth).square().mean())

    def compute(self):
        return torch.stack(self.found).mean()

    def reset(self):
        self.found = []
'''
OFF = {"import": "parts_of_streams.off", "inputs": ["score", "truth"], "streams": ["valid"]}
GAP = {"class": "torchmetrics.MeanSquaredError", "inputs": ["score", "truth"], "streams": ["valid"]}
OWN_GAP = {**GAP, "class": "parts_of_streams.Gap"}
DEPTH = {"variables": ["depth_error"], "streams": ["train"], "on_missing_variable": "skip"}


def config_of(*hooks, **metrics):
    model = {"module": {"class": "parts_of_streams.Net"}, "optimizer": {"class": "Adam", "lr": 0.1}, "device": "cpu"}
    return {
        "seed": 1,
        "dataset": {"class": "parts_of_streams.Data"},
        "model": {**model, "metrics": metrics},
        "main_loop": {"extra_streams": ["valid"], "report": False},
        "hooks": [*hooks, {"StopAfter": {"epochs": 2}}],
    }


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "parts_of_streams.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Keep(AbstractHook):
    """Keeps the values of a variable of the last epoch, of the batches that have it."""

    every_rank = True

    def before_epoch(self):
        self.values = []

    def after_batch(self, stream_name, batch_data):
        if stream_name == "train" and "depth_error" in batch_data:
            self.values.append(batch_data["depth_error"])


class Stops(AbstractHook):
    """Interrupts the run after some iterations."""

    def after_batch(self):
        if self.main_loop.iterations_done == 12:
            signal.raise_signal(signal.SIGTERM)


def trained(config, place, *hooks, overrides=()):
    training = create_training(config, output_dir=place, overrides=overrides)
    training.main_loop.change_hooks([*training.hooks, *hooks])
    training.main_loop.run_training()
    return streams_of(place)


def streams_of(place):
    return [json.loads(line)["streams"] for line in (place / "metrics.jsonl").read_text().splitlines()]


def names_of(epoch):
    return {stream: [name for name in found if name != "learning_rate"] for stream, found in epoch.items()}


def test_each_stream_has_its_own_metrics_and_statistics(project):
    config = config_of("ComputeStats", {"ComputeStats": DEPTH}, off=OFF, gap=OWN_GAP)
    epochs = trained(config, project / "run", keep := Keep())
    for epoch in epochs:
        assert names_of(epoch) == {"train": ["loss", "depth_error"], "valid": ["gap", "loss", "off"]}
    expected = np.concatenate([each.numpy() for each in keep.values])
    assert len(expected) == 3 * 4
    assert epochs[-1]["train"]["depth_error"]["mean"] == pytest.approx(expected.mean(), rel=1e-6)
    assert evaluate("run", "valid", checkpoint_name="latest")["valid"] == epochs[-1]["valid"]
    assert names_of(evaluate("run", "test")) == {"test": ["loss"]}
    assert predict("run", "test", "test.csv").columns == ("position", "score", "loss")
    assert predict("run", "valid", "valid.csv").columns == ("position", "score", "loss", "off")


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", thinned([1, 2], [1]))
def test_a_resume_in_the_middle_of_an_epoch_and_two_ranks_have_the_same_statistics(project, ranks):
    pytest.importorskip("torchmetrics")
    hooks = [
        {"ComputeStats": {**DEPTH, "streams": ["valid", "train"]}},
        {"ComputeStats": {"variables": ["loss", "off"]}},
    ]
    config = config_of(*hooks, off=OFF, gap=GAP)
    expected = trained(config, project / "straight")
    assert names_of(expected[-1]) == {"train": ["depth_error", "loss"], "valid": ["gap", "loss", "off"]}
    if ranks == 2:
        in_ranks(2, trained, config, project / "two")
        for found, epoch in zip(streams_of(project / "two"), expected, strict=True):
            assert names_of(found) == names_of(epoch)
            for stream, name in (("train", "depth_error"), ("valid", "off")):
                assert found[stream][name]["mean"] == pytest.approx(epoch[stream][name]["mean"], rel=1e-5)
            assert found["valid"]["gap"] == pytest.approx(epoch["valid"]["gap"], rel=1e-5)
        return
    trained(config, project / "stopped", Stops())
    assert len(streams_of(project / "stopped")) == 2
    resume_training("stopped").main_loop.run_training()
    assert streams_of(project / "stopped") == expected


def test_rows_between_epochs_are_means_over_the_batches_that_have_a_variable(project):
    config = config_of("ComputeStats", {"ComputeStats": DEPTH}, {"WriteCSV": {"every": "2 updates"}}, off=OFF)
    config["main_loop"]["skip_zeroth_epoch"] = True
    trained(config, project / "run")
    text = (project / "run/training.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert list(rows[0]) == [
        *("epoch_id", "iteration", "train_loss", "train_depth_error", "train_learning_rate"),
        *("valid_loss", "valid_off"),
    ]
    assert [bool(row["train_depth_error"]) for row in rows[:5]] == [True, False, True, True, True]  # batches 1, 4, 7
    assert "nan" not in text


def test_a_variable_that_no_batch_has_is_a_warning_and_no_number(project, caplog):
    skip = {"ComputeStats": {"variables": ["depth_eror"], "on_missing_variable": "skip"}}
    (*_, last) = trained(config_of("ComputeStats", skip), project / "run")
    assert names_of(last) == {"train": ["loss"], "valid": ["loss"]}
    told = [record.getMessage() for record in caplog.records if "no batch of stream" in record.getMessage()]
    assert told == [
        "ComputeStats: no batch of stream 'train' has a variable 'depth_eror'; there is no statistic of it (the first "
        "batch has x, y, score, loss)",
        "ComputeStats: no batch of stream 'valid' has a variable 'depth_eror'; there is no statistic of it (the first "
        "batch has x, y, truth, score, loss)",
    ]


@pytest.mark.parametrize(
    ("hook", "off", "line", "message"),
    [
        (
            {"ComputeStats": {**DEPTH, "streams": ["vaild"]}},
            OFF,
            '"vaild"',
            "ComputeStats reads stream 'vaild', which the dataset does not have; did you mean 'valid'? (its streams: "
            "test, train, valid)",
        ),
        (
            "ComputeStats",
            {**OFF, "streams": ["valid", "tests"]},
            '"tests"',
            "model: model.metrics names stream 'tests', which the dataset does not have; did you mean 'test'? (its "
            "streams: test, train, valid)",
        ),
        ("ComputeStats", {**OFF, "streams": "valid"}, '"streams": "valid"', "'valid' is not a list of names"),
        ("ComputeStats", {**OFF, "streams": []}, '"streams": []', "the list is empty; leave it out for all streams"),
        (
            {"ComputeStats": {"variables": ["off"], "streams": ["train"]}},
            OFF,
            '"off"',
            "ComputeStats: the model has 'off' only in valid (model.metrics)",
        ),
        (
            {"ComputeStats": {"variables": ["loss"], "on_missing_variable": "warn"}},
            OFF,
            '"on_missing_variable": "warn"',
            "'warn' is not one of error, skip",
        ),
    ],
)
def test_what_no_stream_can_have_is_an_error_at_its_line(project, hook, off, line, message):
    (project / "c.yaml").write_text(json.dumps(config_of(hook, off=off), indent=1))
    with pytest.raises(ConfigError) as caught:
        create_training("c.yaml", output_dir="run")
    (problem,) = caught.value.problems
    assert message in str(problem)
    assert problem.position.text.strip(" ,") == line


@pytest.mark.parametrize(
    ("hook", "address"),
    [
        ("ComputeStats", "train/off/mean"),
        ({"ComputeStats": {"variables": ["loss"], "streams": ["valid"]}}, "train/loss"),
    ],
)
def test_a_statistic_of_another_stream_cannot_be_monitored(project, hook, address):
    stream, variable, *_ = address.split("/")
    best = {"SaveBest": {"variable": variable, "condition": "min", "stream": stream}}
    with pytest.raises(
        ConfigError, match=rf"monitors {stream}/{variable}/mean, but '{variable}/mean' is only written for"
    ):
        create_training(config_of(hook, best, off=OFF), output_dir="run")
    create_training(config_of(hook, {"SaveBest": {**best["SaveBest"], "stream": "valid"}}, off=OFF), output_dir="run")


def test_a_metric_needs_its_sources_in_its_streams_only(project):
    config = config_of("ComputeStats", off={**OFF, "streams": ["valid", "test"]})
    trained(config, project / "run")
    message = "model.metrics.off needs 'truth', which is neither an output nor a source"
    with pytest.raises(StreamError, match=message) as error:
        evaluate("run", "test")
    assert error.value.__notes__[1:] == ["for a stream without labels there is `emrun predict`, not an evaluation"]


def test_without_skip_a_batch_without_the_variable_is_an_error(project):
    with pytest.raises(HookError, match="ComputeStats: stream 'train': a batch has no variable 'depth_error'"):
        trained(config_of({"ComputeStats": {**DEPTH, "on_missing_variable": "error"}}), project / "run")
