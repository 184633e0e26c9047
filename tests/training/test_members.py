"""Models of several runs: the behaviours that docs/guide/weights.md lists, each by runs that were trained."""

import json

import numpy as np
import pytest
import torch

from emrun import AbstractModel, create_model, create_training, evaluate, load_run, predict, resume_training
from emrun.base.errors import ArgumentError, ConfigError, StateError, StreamError, UsageError
from emrun.cli import emrun as commands
from emrun.config.config import read_config
from emrun.diagnosis.tryout import try_out
from emrun.models.ensemble import Ensemble

DATA = """
import numpy as np


class Data:
    def __init__(self, classes=("no", "yes"), lacks=("logits",)):
        self.names, self.lacks = classes, lacks
        self.x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")

    def classes_names(self):
        return list(self.names)

    def train_stream(self):
        x, y = self.x, (self.x.sum(1) > 0).astype("int64")
        batch = {"x": x, "y": y, "logits": np.stack([x[:, 0], -x[:, 0]], 1), "more": x[:, :1]}
        yield {name: value for name, value in batch.items() if name not in self.lacks}

    valid_stream = train_stream
"""
PARTS = """
import torch

from emrun import AbstractModel


class Net(torch.nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        return {"logits": logits, "choice": logits.argmax(1), "is_yes": logits[:, 0] < logits[:, 1]}


class Half(torch.nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


class Transposed(torch.nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x).T}


class Second(torch.nn.Linear):
    def __init__(self, size, name):
        super().__init__(size, 2)
        self.name = name

    def forward(self, logits, more):
        return {self.name: super().forward(torch.cat([logits, more], 1))}


class Plain(AbstractModel):
    input_names, output_names = ["x"], ["choice"]

    def __init__(self, dataset, value):
        self.value, self.dataset = value, dataset

    def run(self, batch, train, stream):
        assert not train
        return {"choice": [self.value] * len(batch["x"]), "loss": 9.0}

    def save(self, directory):
        (directory / "model").write_text("")

    def load(self, directory):
        (directory / "model").read_text()


class Student(torch.nn.Linear):
    def __init__(self, teacher, load_model):
        super().__init__(3, 2)
        self.teacher = [load_model(teacher)]

    def forward(self, x):
        return super().forward(x), self.teacher[0].run({"x": x}, False, "")["logits"]
"""
METRICS = {"accuracy": {"import": "emrun.metrics.accuracy", "inputs": ["logits", "y"]}}
LOSS = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"]}
SGD = {"class": "torch.optim.SGD", "lr": 1.0}


def config_of(model, **dataset):
    return {"seed": 1, "dataset": {"class": "of_members.Data", **dataset}, "model": model}


def net(**module):
    net = {"class": "member_parts.Net", "in_features": 3, "out_features": 2, **module}
    return {"module": net, "loss": LOSS, "metrics": METRICS, "optimizer": SGD}


def train(config, directory, *overrides, epochs=1):
    overrides = [
        f"hooks=[ComputeStats, SaveBest, {{StopAfter: {{epochs: {epochs}}}}}]",
        "main_loop.extra_streams=[valid]",
        "main_loop.report=false",
        *overrides,
    ]
    create_training(config, output_dir=directory, overrides=overrides).main_loop.run_training()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a directory with three runs of different weights, others, and the modules."""
    place = tmp_path_factory.mktemp("members")
    (place / "of_members.py").write_text(DATA)
    (place / "member_parts.py").write_text(PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        for seed, name in enumerate("cab"):
            train(config_of(net()), f"log/{name}", f"seed={seed}", epochs=seed + 1)
        second = {"module": {"class": "member_parts.Second", "size": 3, "name": "other"}, "optimizer": SGD}
        second["loss"] = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["other", "y"]}
        train(config_of(second, lacks=[]), "second")
        plain = config_of({"class": "member_parts.Plain", "value": 1})
        plain["hooks"] = [{"StopAfter": {"epochs": 0}}]
        for value in (0, 1):
            training = create_training(plain, output_dir=f"plain{value}", overrides=[f"model.value={value}"])
            training.main_loop.run_training()
        yield place


@pytest.fixture
def at(trained, tmp_path, monkeypatch):
    """Write configs of ensembles and sequences; the runs lie in the current directory."""
    monkeypatch.chdir(trained)

    def write(kind="Ensemble", name="made", dataset=None, **model):
        (tmp_path / name).mkdir(exist_ok=True)
        text = json.dumps(config_of({"class": kind, **model}, **(dataset or {})), indent=1)
        (tmp_path / name / "config.yaml").write_text(text)
        return tmp_path / name

    return write


def outputs_of(run, **options):
    return predict(run, "valid", **options)


def logits(*runs, **options):
    return np.stack([outputs_of(run, **options)["logits"] for run in runs])


def content(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_the_mean_of_outputs_with_losses_and_metrics_of_the_mean(at):
    made = at(runs=["log/a", "log/b", "log/c"], outputs=["logits"], loss=LOSS, metrics=METRICS)
    mean = torch.from_numpy(logits("log/a", "log/b", "log/c")).mean(0)
    assert np.array_equal(outputs_of(made)["logits"], mean.numpy())
    found = evaluate(made, "valid")["valid"]
    labels = torch.from_numpy(predict("log/a", "valid", variables=["y"])["y"])
    assert found["loss"]["mean"] == pytest.approx(float(torch.nn.functional.cross_entropy(mean, labels)), rel=1e-6)
    assert found["accuracy"]["mean"] == pytest.approx(float((mean.argmax(1) == labels).float().mean()), rel=1e-6)
    assert [path.name for path in (made / "eval").iterdir()] == ["valid-1"]


def test_by_default_all_outputs_of_the_runs_but_no_loss_and_no_metric_of_theirs(at):
    found = outputs_of(at(runs=["log/a", "log/b"]))
    assert list(found) == ["position", "logits", "choice", "is_yes"]
    assert (found["choice"].dtype, found["is_yes"].dtype) == (np.float32, np.float32)
    each = [outputs_of(run)["choice"] for run in ("log/a", "log/b")]
    assert found["choice"].tolist() == np.mean(each, 0).tolist()


def test_a_vote_takes_the_value_of_most_runs_and_else_the_first(at):
    options = {"aggregation": "major_vote", "outputs": ["choice"]}
    runs = ["log/a", "log/b", "log/c"]
    each = np.stack([outputs_of(run)["choice"] for run in runs])
    assert outputs_of(at(runs=runs, **options))["choice"].tolist() == (each.sum(0) > 1).astype(int).tolist()
    assert set(outputs_of(at(runs=["plain1", "plain0"], **options))["choice"]) == {1}
    assert set(outputs_of(at(runs=["plain0", "plain1"], **options))["choice"]) == {0}
    assert set(outputs_of(at(runs=["plain0", "plain1", "plain1"], **options))["choice"]) == {1}


def test_fractions_cannot_be_voted_on_and_no_results_are_left(at):
    made = at(runs=["log/a", "log/b"], aggregation="major_vote", outputs=["logits"])
    with pytest.raises(StateError, match="'logits' has fractions, which cannot be voted on"):
        evaluate(made, "valid")
    assert content(made / "eval") == []


def test_a_directory_of_runs_means_all_runs_in_the_order_of_their_names(at):
    model = load_run(at(runs="log")).model
    assert [run for run, _ in model.members] == ["log/a", "log/b", "log/c"]
    assert model.members[0][1].module.training is False


def test_an_entry_may_name_a_checkpoint_and_change_the_config_of_its_run(at):
    entry = {"run": "log/b", "checkpoint": "latest", "overrides": ["model.outputs=[logits]"]}
    found = outputs_of(at(runs=[entry]))
    assert list(found) == ["position", "logits"]
    assert np.array_equal(found["logits"], outputs_of("log/b", checkpoint_name="latest")["logits"])
    best = outputs_of(at(runs=["log/b"]))["logits"]
    assert np.array_equal(best, outputs_of("log/b", checkpoint_name="best")["logits"])


def test_a_sequence_passes_sources_and_outputs_on(at):
    found = outputs_of(at("Sequence", runs=["log/a", "second"]))
    assert list(found) == ["position", "logits", "choice", "is_yes", "other"]
    second = load_run("second").model.module
    first = logits("log/a")[0]
    more = predict("log/a", "valid", variables=["x"])["x"][:, :1]
    with torch.no_grad():
        expected = second(torch.from_numpy(first), torch.from_numpy(more))["other"]
    assert np.array_equal(found["other"], expected.numpy())


@pytest.mark.campaign
def test_of_two_outputs_of_one_name_the_later_counts_and_outputs_selects(at):
    renamed = {"run": "second", "overrides": ["model.module.name=logits", "model.loss=null"]}
    found = outputs_of(at("Sequence", runs=["log/a", renamed], outputs=["logits"]))
    plain = outputs_of(at("Sequence", name="plain", runs=["log/a", "second"]))
    assert list(found) == ["position", "logits"]
    assert np.array_equal(found["logits"], plain["other"])
    with pytest.raises(StateError, match="no run returns nothing_like_it"):
        evaluate(at("Sequence", runs=["log/a"], outputs=["nothing_like_it"]), "valid")


def test_what_the_first_run_needs_is_a_source_and_what_a_later_one_lacks_an_error(at):
    made = at("Sequence", runs=["log/a", "second"], dataset={"lacks": ["logits", "more"]})
    with pytest.raises(StateError, match="second needs more; there is x, y, logits, choice, is_yes"):
        evaluate(made, "valid")
    assert content(made / "eval") == []
    with pytest.raises(StreamError, match="run log/a needs x, which the batch does not have"):
        evaluate(at("Sequence", runs=["log/a", "second"], dataset={"lacks": ["logits", "x"]}), "valid")


def test_an_ensemble_needs_the_sources_of_all_its_runs(at):
    model = create_model(at(runs=["log/a", "second"]) / "config.yaml")
    assert model.input_names == ["x", "logits", "more"]


def test_a_run_may_be_made_of_runs_but_not_of_itself(at):
    inner = at(name="inner", runs=["log/a", "log/b"])
    nested = at(name="outer", runs=[str(inner), "log/c"], outputs=["logits"])
    mean = torch.stack([torch.from_numpy(outputs_of(inner)["logits"]), torch.from_numpy(logits("log/c")[0])]).mean(0)
    assert np.array_equal(outputs_of(nested)["logits"], mean.numpy())
    at(name="inner", runs=["log/a", str(nested)])
    with pytest.raises(ConfigError, match=r"config.yaml:.*runs\[0\]: .*inner is among its own runs"):
        evaluate(nested, "valid")


def test_models_of_any_class_get_the_dataset_of_the_config(at):
    model = load_run(at(runs=["plain0"])).model
    assert model.members[0][1].dataset.names == ("no", "yes")


@pytest.mark.parametrize(
    ("runs", "more", "message"),
    [
        (["log/a", "log/z"], {}, r"config.yaml:10:.*runs\[1\]: log/z: .*log/z is not a run directory"),
        (
            ["log/a", {"run": "log/b", "checkpoint": "last"}],
            {},
            r"runs\[1\]: log/b: .*no checkpoint 'last'; .*available: best",
        ),
        (
            ["log/a", "plain0"],
            {"outputs": ["logits"]},
            r"outputs: run plain0 does not return logits \(it returns choice\)",
        ),
        ("nowhere", {}, "runs: there are no runs in nowhere"),
        ([], {}, r"runs: \[\] is neither a list of run directories"),
        (
            [{"path": "log/a"}],
            {},
            r"runs\[0\]: .* is neither a run directory nor a mapping with run, checkpoint, overrides",
        ),
        (["log/a"], {"dataset": {"classes": ["yes", "no"]}}, r"runs\[0\]: log/a: the dataset has other classes"),
    ],
)
def test_runs_that_cannot_be_used_are_one_message_with_a_place_and_nothing_is_written(at, runs, more, message):
    made = at(runs=runs, **more)
    with pytest.raises(ConfigError, match=message) as error:
        evaluate(made, "valid")
    assert len(error.value.problems) == 1
    assert content(made) in (["config.yaml"], ["config.yaml", "eval"])
    with pytest.raises(ConfigError, match=message):
        predict(made, "valid", made / "p.csv")
    assert not (made / "p.csv").exists()


@pytest.mark.campaign
def test_outputs_that_are_only_known_with_a_batch(at):
    made = at(runs=["log/a", {"run": "log/b", "overrides": ["model.module.class=member_parts.Half"]}])
    with pytest.raises(StateError, match=r"run log/b does not return choice, is_yes \(it returns logits\)"):
        evaluate(made, "valid")
    wide = {"run": "log/b", "overrides": ["model.module.class=member_parts.Transposed"]}
    with pytest.raises(
        StateError, match=r"'logits' of the runs: .*\[12, 2\] at entry 0 and \[2, 12\] at entry 1; choose"
    ):
        evaluate(at(runs=["log/a", wide], outputs=["logits"]), "valid")
    assert content(made / "eval") == []


def test_train_check_and_resume_refuse_and_write_nothing(at, tmp_path):
    made = at(runs=["log/a"])
    message = "config.yaml:7:.*Ensemble is made of finished runs and cannot be trained; use emrun eval or emrun predict"
    for attempt in (
        lambda: create_training(made, output_dir=tmp_path / "new"),
        lambda: try_out(read_config(made)),
        lambda: resume_training(made),
    ):
        with pytest.raises(ConfigError, match=message):
            attempt()
    assert not (tmp_path / "new").exists()
    assert content(made) == [".lock", "config.yaml"]  # `resume` has looked for another process
    with pytest.raises(UsageError, match="cannot be trained"):
        load_run(made).model.run({"x": np.zeros((1, 3))}, True, "train")


def test_a_checkpoint_is_named_for_each_run(at):
    made = at(runs=["log/a"])
    with pytest.raises(UsageError, match="'best': the model is made of runs; name their"):
        evaluate(made, "valid", checkpoint_name="best")


def test_the_config_alone_may_be_given_for_a_run(at, tmp_path):
    made = at(runs=["log/b"], loss=LOSS)
    found = evaluate("log/a", "valid", config=made / "config.yaml", output_dir=tmp_path / "mine")
    assert found == evaluate(made, "valid")


def test_the_commands_evaluate_and_predict(at, capsys):
    made = at(runs=["log/a", "log/b"], loss=LOSS)
    assert commands.commands["eval"].main([str(made), "valid", "--json"], standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["streams"] == evaluate(made, "valid")
    arguments = [str(made), "valid", "-o", str(made / "p.csv")]
    assert commands.commands["predict"].main(arguments, standalone_mode=False) == 0
    assert capsys.readouterr().out.startswith(f"{made / 'p.csv'}: 12 rows of stream valid: position, logits.0")


def test_a_module_of_ones_own_gets_the_model_of_a_run(at, tmp_path):
    student = {"class": "member_parts.Student", "teacher": "log/a"}
    config = config_of({
        "module": student, "outputs": ["logits", "wanted"], "optimizer": SGD,
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["logits", "wanted"]},
    })  # fmt: skip
    train(config, tmp_path / "student", epochs=10)
    assert isinstance(load_run(tmp_path / "student").model, AbstractModel)
    found = predict(tmp_path / "student", "valid")
    assert np.abs(found["logits"] - found["wanted"]).max() < 0.1
    assert np.array_equal(found["wanted"], logits("log/a")[0])


def test_an_aggregation_that_is_not_known_is_an_error_from_python_too():
    with pytest.raises(ArgumentError, match="'unknown' is not one of mean, major_vote"):
        Ensemble(None, "run", aggregation="unknown")
