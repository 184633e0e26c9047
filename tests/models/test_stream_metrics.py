"""Metrics that are computed once for each stream: own objects, and those of torchmetrics."""

import json
import logging
import signal

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, XY, Affine, Streams

from emrun import AbstractHook, Factory, MainLoop, TorchModel, create_training, resume_training
from emrun.base.errors import ArgumentError
from emrun.base.wording import short
from emrun.datasets import Digits
from emrun.hooks import ComputeStats, EarlyStopping, LogVariables, StopAfter


class Median:
    """The median of all errors, which is not the mean of the medians of the batches."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.reset()

    def update(self, predicted, y):
        self.errors.append((predicted - y).abs())

    def compute(self):
        return self.scale * torch.cat(self.errors).median()

    def reset(self):
        self.errors = []

    def state_dict(self):
        return {"errors": list(self.errors)}

    def load_state_dict(self, state):
        self.errors = state["errors"]


class Other(Median):
    """A metric of another class."""


class Gives(Median):
    """Returns what it is told to."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def compute(self):
        return self.result


THREE = [{"x": [1.0, 2.0, 4.0], "y": [3.0, 5.0, 0.0]}, {"x": [0.0], "y": [9.0]}, {"x": [-1.0], "y": [-1.0]}]


def form(build=Median, *args, inputs=("predicted", "y"), **kwargs):
    return Factory(build, *args, options={"inputs": list(inputs)}, **kwargs)


def model_with(optimizer=SGD, **metrics):
    return TorchModel(Affine(), optimizer=optimizer, metrics=metrics)


class Sees(AbstractHook):
    """Keeps the data of epochs as this hook gets them, and the outputs of batches."""

    def __init__(self):
        super().__init__()
        self.epochs, self.errors = [], {}

    def before_epoch(self):
        self.errors = {}

    def after_batch(self, stream_name, batch_data):
        errors = (batch_data["predicted"] - torch.as_tensor(batch_data["y"])).abs()
        self.errors.setdefault(stream_name, []).append(errors)

    def after_epoch(self, epoch_data):
        self.epochs.append({stream: dict(variables) for stream, variables in epoch_data.items()})


def test_the_value_of_the_whole_stream_is_in_the_data_of_the_epoch_before_the_hooks():
    sees = Sees()
    with MainLoop(model_with(error=form()), Streams(train=THREE, valid=XY), [sees]) as loop:
        for _ in range(2):
            data = loop.epoch(["train"], ["valid"])
            for stream, errors in sees.errors.items():
                assert data[stream]["error"] == sees.epochs[-1][stream]["error"] == torch.cat(errors).median().item()
    assert loop.run_evaluation("valid") == {"valid": {"error": data["valid"]["error"]}}


def test_the_zeroth_epoch_and_an_evaluation_of_the_train_stream_have_it_too():
    sees = Sees()
    model = model_with(error=form())
    hooks = [ComputeStats(), sees, EarlyStopping(variable="error", condition="min", stream="train_eval"), StopAfter(1)]
    loop = MainLoop(model, Streams(train=THREE), hooks, extra_streams=["train"], on_unused_sources="ignore")
    loop.run_training()
    zeroth, first = sees.epochs
    assert zeroth["train"]["error"] == zeroth["train_eval"]["error"]
    assert first["train"]["error"] != first["train_eval"]["error"]


def test_hooks_find_it_like_any_other_statistic(caplog):
    caplog.set_level(logging.INFO)
    plateau = Factory(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, options={"metric": "valid/error/mean"})
    model = TorchModel(Affine(), optimizer=SGD, scheduler=plateau, metrics={"error": form(), "same": form(Gives, 1)})
    hooks = [
        ComputeStats(["error", "loss"]),
        EarlyStopping(variable="error", condition="min", patience=1),
        LogVariables(["error", "loss"]),
        StopAfter(1),
    ]
    MainLoop(model, Streams(train=XY, valid=XY), hooks, extra_streams=["valid"]).run_training()
    assert hooks[0].writes == ("loss/mean",)
    assert "epoch 1  valid  error 0." in caplog.text


def test_a_mapping_is_several_numbers():
    values = {"a": torch.tensor(1.5), "b": np.float32(2), "c": np.array([3]), 4: True}
    with MainLoop(model_with(many=form(Gives, values)), Streams(train=XY), []) as loop:
        found = loop.epoch(["train"])["train"]["many"]
    assert found == {"a": 1.5, "b": 2.0, "c": 3, "4": 1}
    assert [type(each) for each in found.values()] == [float, float, int, int]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(3), "returns tensor([1., 1., 1.]), not a number"),
        (np.ones((2, 2)), "returns array([[1., 1.],"),
        (None, "returns None, not a number"),
        ("0.5", "returns '0.5', not a number"),
        ([0.5], "returns [0.5], not a number"),
        (1j, "returns 1j, not a number"),
        ({}, "returns {}, not a number"),
        ({"b": {"c": 1.0}}, "returns {'c': 1.0} for 'b', not a number"),
        ({"a": torch.ones(2)}, "returns tensor([1., 1.]) for 'a', not a number"),
    ],
)
def test_a_result_that_is_not_a_number_is_an_error(result, message):
    loop = MainLoop(model_with(bad=form(Gives, result)), Streams(train=XY), [])
    with pytest.raises(ArgumentError) as caught:
        loop.run_evaluation("train")
    assert f"metrics.bad: compute() of Gives {message}" in str(caught.value)


def test_an_error_in_a_metric_names_the_metric():
    def breaks(*_):
        raise RuntimeError("broken")

    metric = Median()
    metric.compute = breaks
    with pytest.raises(RuntimeError) as caught:
        MainLoop(model_with(m=form(lambda: metric)), Streams(train=XY), []).run_evaluation("train")
    assert "in compute() of model.metrics.m for stream 'train'" in caught.value.__notes__
    metric.update = breaks
    with pytest.raises(RuntimeError) as caught:
        MainLoop(model_with(m=form(lambda: metric)), Streams(train=XY), []).run_evaluation("train")
    assert "model.metrics.m got predicted: float32 (2,), y: float32 (2,)" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"predicted": form()}, "there is an output predicted already"),
        ({"y": form()}, "there is a source y already"),
        ({"learning_rate": form()}, "'learning_rate' is the name of a learning rate"),
        ({"m": Factory(Median, is_import=True, options={"inputs": ["y"]})}, "Median is a class; write class"),
        ({"m": form(object)}, "object cannot be called, and does not have the methods update, compute and reset"),
    ],
)
def test_a_wrong_metric_is_an_error_before_any_update(metrics, message):
    with pytest.raises(ArgumentError, match=f"metrics.*{message}"):
        MainLoop(TorchModel(Affine(), metrics=metrics), Streams(train=XY), []).run_evaluation("train")


def test_the_names_of_hooks_are_checked_against_the_metrics():
    hooks = [EarlyStopping(variable="eror", condition="min"), StopAfter(1)]
    loop = MainLoop(model_with(error=form()), Streams(train=XY, valid=XY), hooks, extra_streams=["valid"])
    with pytest.raises(
        ValueError, match=r"no hook writes 'eror/mean'; did you mean 'error/mean'\? \(hooks write error"
    ):
        loop.run_training()


def test_a_stream_without_batches_has_no_value():
    loop = MainLoop(model_with(error=form()), Streams(train=XY, none=[]), [], on_empty_stream="ignore")
    with loop:
        data = loop.epoch(["train"], ["none"])
    assert "error" in data["train"]
    assert data["none"] == {}


def test_a_hook_that_runs_the_model_itself_changes_no_metric():
    class Looks(AbstractHook):
        def after_batch(self, stream_name):
            self.main_loop.model.run(THREE[1], False, "own")
            if self.main_loop.training:
                self.main_loop.model.run(THREE[1], False, stream_name)

    found = []
    for hooks in ([], [Looks()]):
        with MainLoop(model_with(error=form()), Streams(train=XY), hooks) as loop:
            found.append(loop.epoch(["train"])["train"]["error"])
    assert found[0] == found[1]


def test_metrics_see_detached_outputs_and_sources_of_the_device_without_gradients():
    class Looks(Median):
        def update(self, predicted, y):
            assert not (predicted.requires_grad or torch.is_grad_enabled())
            assert predicted.device == y.device == torch.device("meta")
            self.device = None

        def to(self, device):
            self.device = device

        def compute(self):
            return 1.0

    looks = Looks()
    model = TorchModel(Affine(), optimizer=SGD, metrics={"m": form(lambda: looks)}, device="meta")
    assert looks.device == torch.device("meta")
    with MainLoop(model, Streams(train=XY), []) as loop:
        assert loop.epoch(["train"])["train"]["m"] == 1.0


def halfway(model, at=1):
    """Train on some of the batches, and return the state of the model."""
    model.before_epoch(1)
    for batch in THREE[:at]:
        model.run(batch, True, "train")
    return model.state_dict()


def rest(model, at=1):
    """Train on the other batches, and return the metrics of the stream."""
    for batch in THREE[at:]:
        model.run(batch, True, "train")
    model.after_stream("train")
    return model.stream_values("train")


def test_a_metric_that_has_changed_begins_anew_with_a_warning(caplog):
    same = {"same": form()}
    state = halfway(model_with(**same, changed=form(), gone=form()))
    model = model_with(**same, changed=form(Other), new=form())
    halfway(model)
    model.load_state_dict(state)
    assert "model.metrics: changed, new is not that of the checkpoint" in caplog.text
    found = rest(model)
    assert found["changed"] == found["new"] != found["same"]


def test_a_metric_that_is_new_leaves_those_of_several_ranks_as_they_are():
    states = [halfway(model_with(same=form())) for _ in range(2)]
    merged = model_with(same=form(), new=form()).of_new_rank(states, is_first=True)
    assert list(merged["stream_metrics"]["metrics"]) == ["same"]


def test_values_of_streams_that_have_ended_are_in_the_state():
    model, other = model_with(error=form()), model_with(error=form())
    halfway(model, 3)
    model.after_stream("train")
    model.run(XY[0], False, "valid")
    other.load_state_dict(model.state_dict())
    assert other.stream_values("train") == model.stream_values("train") != {}
    other.before_epoch(2)
    assert other.stream_values("train") == {}


# torchmetrics


@pytest.mark.campaign
def test_the_f1_of_torchmetrics_is_that_of_scikit_learn_on_the_whole_stream():
    torchmetrics, sklearn = pytest.importorskip("torchmetrics"), pytest.importorskip("sklearn.metrics")

    class Predictions(AbstractHook):
        def before_epoch(self):
            self.logits, self.labels = [], []

        def after_batch(self, batch_data):
            self.logits.append(batch_data["logits"])
            self.labels.append(batch_data["label"])

    hook = Predictions()
    f1 = Factory(torchmetrics.F1Score, task="multiclass", num_classes=10, average="macro", options=INPUTS)
    torch.manual_seed(0)
    loss = Factory(torch.nn.CrossEntropyLoss, options=INPUTS)
    model = TorchModel(torch.nn.Linear(64, 10), ["image"], ["logits"], loss, {"f1": f1}, SGD, device="cpu")
    with MainLoop(model, Digits(batch_size=100, flat=True), [hook]) as loop:
        for arguments in ((["train"],), ((), ["valid"])):
            (found,) = loop.epoch(*arguments).values()
            predicted = torch.cat(hook.logits).argmax(1)
            expected = sklearn.f1_score(np.concatenate(hook.labels), predicted, average="macro")
            assert found["f1"] == pytest.approx(expected, abs=1e-6)  # torchmetrics calculates in single precision


INPUTS = {"inputs": ["logits", "label"]}


def test_metrics_of_torchmetrics_are_restored_exactly():
    torchmetrics = pytest.importorskip("torchmetrics")
    regression = torchmetrics.regression

    def collection():
        return torchmetrics.MetricCollection([regression.MeanSquaredError(), regression.MeanAbsoluteError()])

    def shared():  # from the second batch on, only one of the two is updated
        metric = regression.ExplainedVariance
        return torchmetrics.MetricCollection({"mean": metric(), "weighted": metric("variance_weighted")})

    metrics = {
        "sums": form(regression.R2Score),
        "lists": form(regression.KendallRankCorrCoef),  # keeps all values
        "many": form(collection),
        "shared": form(shared),
        "wrapped": form(lambda: torchmetrics.wrappers.MinMaxMetric(regression.MeanSquaredError())),
    }
    straight, resumed = model_with(**metrics), model_with(**metrics)
    resumed.load_state_dict(halfway(straight, 2))
    resumed.module.load_state_dict(straight.module.state_dict())
    found = rest(straight, 2)
    assert rest(resumed, 2) == found
    assert set(found["many"]) == {"MeanSquaredError", "MeanAbsoluteError"}


# the installed command

METRICS = '''
import numpy as np


class F1:
    """F1 of the positive class."""

    def __init__(self):
        self.reset()

    def update(self, logit, y):
        self.predicted.append((logit > 0).cpu().numpy())
        self.expected.append((y > 0).cpu().numpy())

    def compute(self):
        predicted, expected = np.concatenate(self.predicted), np.concatenate(self.expected)
        return 2 * (predicted & expected).sum() / (predicted.sum() + expected.sum())

    def reset(self):
        self.predicted, self.expected = [], []

    def state_dict(self):
        return {"predicted": self.predicted, "expected": self.expected}

    def load_state_dict(self, state):
        self.predicted, self.expected = state["predicted"], state["expected"]


class Set(F1):
    """Has a state that no checkpoint can have."""

    def state_dict(self):
        return {"seen": object()}


class Forgetful(F1):
    """Has no state."""

    state_dict = load_state_dict = None
'''
CONFIG = """
seed: 7
dataset: {class: Majority, n: 120, dim: 3, batch_size: 20}
model:
  module: {class: torch.nn.Linear, in_features: 3, out_features: 1}
  inputs: [x]
  outputs: [logit]
  loss: {class: metrics_of_a_project.Loss, inputs: [logit, y]}
  metrics:
    f1: {class: metrics_of_a_project.F1, inputs: [logit, y]}
  optimizer: {class: SGD, lr: 0.5}
main_loop: {extra_streams: [valid]}
hooks: [ComputeStats, WriteCSV, SaveBest: {variable: f1, condition: max}, StopAfter: {epochs: 2}]
"""
LOSS = """

def _loss(logit, y):
    import torch

    return torch.nn.functional.binary_cross_entropy_with_logits(logit[:, 0], y)


class Loss:
    def __call__(self, logit, y):
        return _loss(logit, y)
"""


def lines_of(run):
    """Return the lines of the metrics of a run, without times."""
    return [{**json.loads(line), "seconds": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def project(tmp_path):
    (tmp_path / "metrics_of_a_project.py").write_text(METRICS.replace("logit > 0", "logit[:, 0] > 0") + LOSS)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def test_a_run_an_evaluation_and_a_check_have_the_metric(project, emrun_here):
    done = emrun_here("check", "c.yaml")
    assert "metrics of the stream 'valid', from its first batches: f1 0." in done.stdout, done.stderr
    done = emrun_here("train", "c.yaml", "--output-dir", "run")
    assert done.returncode == 0, done.stderr
    values = [line["streams"]["valid"]["f1"] for line in lines_of(project / "run")]
    assert f"new best valid/f1: {short(values[0])}" in done.stderr
    rows = (project / "run/training.csv").read_text().splitlines()
    assert "valid_f1" in rows[0]
    assert str(values[-1]) in rows[-1]
    done = emrun_here("eval", "run", "valid", "--checkpoint", "latest")
    assert f"{values[-1]:.6g}" in done.stdout


def test_a_state_that_cannot_be_saved_is_found_before_training(project, emrun_here):
    done = emrun_here("train", "c.yaml", "model.metrics.f1.class=metrics_of_a_project.Set", "--output-dir", "run")
    assert done.returncode == 2
    assert "metrics.f1.state_dict().seen is object, which cannot be saved; use plain types" in done.stderr
    assert not (project / "run/checkpoints").exists() or not list((project / "run/checkpoints").iterdir())


def test_a_metric_without_a_state_is_named_once(project, emrun_here):
    done = emrun_here("train", "c.yaml", "model.metrics.f1.class=metrics_of_a_project.Forgetful", "--output-dir", "run")
    assert done.returncode == 0
    assert done.stderr.count("model.metrics.f1: a resume within an epoch begins it anew, because Forgetful does") == 1


class Stops(AbstractHook):
    """Interrupts the run in the middle of a training epoch, or in an evaluation."""

    def __init__(self, stream, at):
        super().__init__()
        self.stream, self.at = stream, at

    def after_batch(self, stream_name):
        if (stream_name, self.main_loop.iterations_done) == (self.stream, self.at):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("stream", "at"), thinned([("train", 7), ("valid", 10)], [("train", 7)]))
def test_a_resume_gives_the_same_values(project, monkeypatch, stream, at):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    create_training("c.yaml", output_dir="straight").main_loop.run_training()
    training = create_training("c.yaml", output_dir="stopped")
    training.main_loop.change_hooks([*training.hooks, Stops(stream, at)])
    training.main_loop.run_training()
    assert len(lines_of(project / "stopped")) == 2  # of the zeroth and the first epoch
    resume_training("stopped").main_loop.run_training()
    assert lines_of(project / "stopped") == lines_of(project / "straight")


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [[], ["--kill"]])
def test_every_resume_is_exact(project, emrun, how):
    done = emrun("verify-resume", "c.yaml", *how, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an evaluation (valid)" in done.stdout


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": (self.scale * x).mean().square(), "logits": x, "probability": torch.sigmoid(x)}


LOGITS = [{"x": [0.2, 0.9, 0.4], "label": [1, 0, 1]}, {"x": [-3.0, 0.5, 2.0], "label": [0, 1, 1]}]


@pytest.mark.parametrize(
    ("kind", "source", "batches", "is_told"),
    [
        ("auroc", "logits", LOGITS, True),
        ("collection", "logits", LOGITS, True),
        ("auroc", "probability", LOGITS, False),
        ("auroc", "logits", LOGITS[1:], False),
        ("multiclass", "logits", [{"x": [[0.2, 0.9]], "label": [1]}, {"x": [[3.0, 0.9]], "label": [1]}], False),
    ],
)
def test_logits_that_torchmetrics_takes_as_probabilities_in_some_updates_are_told_once(
    kind, source, batches, is_told, caplog
):
    metrics = pytest.importorskip("torchmetrics.classification")
    torchmetrics = pytest.importorskip("torchmetrics")
    make = {
        "auroc": metrics.BinaryAUROC,
        "collection": lambda: torchmetrics.MetricCollection([metrics.BinaryF1Score()]),
        "multiclass": lambda: metrics.MulticlassAccuracy(2),
    }[kind]
    model = TorchModel(Logits(), optimizer=SGD, metrics={"m": Factory(make, options={"inputs": [source, "label"]})})
    loop = MainLoop(model, Streams(train=batches, valid=batches), [StopAfter(2)], extra_streams=["valid"])
    loop.run_training()
    told = [each.getMessage() for each in caplog.records if "model.metrics.m is wrong" in each.getMessage()]
    assert len(told) == is_told
    assert all("of 2 updates, 1 have values outside of 0 to 1" in each for each in told)
