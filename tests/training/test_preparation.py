"""`preparation.json`: what a dataset has learnt lies in the run and its checkpoints, and comes back without files."""

import json
import re

import numpy as np
import pytest
from campaign import thinned
from in_ranks import in_ranks
from ruamel.yaml import YAML
from training.resuming import trained

from emrun import create_training, load_run, resume_training
from emrun.base.errors import ConfigError, StateError
from emrun.storage.checkpoints.manifest import verify
from emrun.storage.preparation import PREPARATION_FILE
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

FORM = {"valid": 0.25, "by": "label"}
MODEL = {
    "module": {"class": "torch.nn.Linear", "in_features": 2, "out_features": 3},
    "inputs": ["x"],
    "outputs": ["logits"],
    "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
    "optimizer": {"class": "SGD", "lr": 0.1},
}
OWN = """
import emrun


class Data:
    def __init__(self, preparation, output_dir):
        self.opened = preparation is None
        self.preparation = preparation or {"mean": emrun.ranks.group.ranks().rank + 1.5}

    def train_stream(self, ctx):
        for rows in ctx.batches(4, 2):
            yield {"x": [[self.preparation["mean"], 1.0]] * len(rows), "label": rows % 3}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", 40)
    write(tmp_path / "new.csv", 6)
    dataset = {"class": "Table", "train": "t.csv", "columns": {"x": ["a", "b"], "label": "label"}, "id": "name"}
    return {
        "seed": 0,
        "dataset": {**dataset, "split": FORM, "batch_size": 8},
        "model": MODEL,
        "main_loop": {"extra_streams": ["valid"], "report": False},
        "hooks": [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 2}}],
    }


def write(path, count):
    rows = np.random.default_rng(count).normal(size=(count, 2)).tolist()
    lines = [f"{a},{b},{number % 3},r{number}" for number, (a, b) in enumerate(rows)]
    path.write_text("\n".join(["a,b,label,name", *lines]) + "\n")


def run_of(config, tmp_path, epochs=2, **more):
    training = create_training({**config, **more}, output_dir=tmp_path / "run")
    training.main_loop.run_training()
    return training


def test_it_lies_in_the_run_and_in_each_checkpoint_under_the_manifest(config, tmp_path):
    made = run_of(config, tmp_path).dataset.preparation
    path = tmp_path / "run" / PREPARATION_FILE
    assert json.loads(path.read_text()) == {"format": 1, "datasets": {"dataset": json.loads(json.dumps(made))}}
    latest = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    assert (latest / PREPARATION_FILE).read_bytes() == path.read_bytes()
    (latest / PREPARATION_FILE).write_text("{}")
    with pytest.raises(Exception, match=PREPARATION_FILE):
        verify(latest)


def test_a_run_answers_when_its_train_file_is_gone(config, tmp_path):
    trained(config, tmp_path / "run")
    (tmp_path / "t.csv").unlink()
    found = predict(tmp_path / "run", "test", overrides=["dataset.test=new.csv"])
    assert found["id"].tolist() == [f"r{number}" for number in range(6)]
    assert evaluate(tmp_path / "run", "test", ["dataset.test=new.csv"])["test"]["loss"]["mean"] > 0
    training = load_run(tmp_path / "run")
    assert training.dataset.num_batches == {"train": 4, "valid": 2}
    (tmp_path / "run" / PREPARATION_FILE).unlink()  # that of the newest checkpoint takes its place
    assert len(predict(tmp_path / "run", "test", overrides=["dataset.test=new.csv"])["id"]) == 6


def test_resumed_on_changed_data(config, tmp_path):
    trained(config, tmp_path / "run")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text + "1,1,0,more\n")
    training = resume_training(tmp_path / "run", ["hooks.StopAfter.epochs=3"])
    with pytest.raises(
        Exception, match=r"^dataset\.split: t\.csv has changed .* train 30, valid 10, and now are train 30"
    ):
        training.main_loop.run_training()
    with pytest.raises(Exception, match=r"^dataset\.split: t\.csv has changed since the run began"):
        evaluate(tmp_path / "run", "valid")
    (tmp_path / "t.csv").write_text(text)
    training = resume_training(tmp_path / "run", ["hooks.StopAfter.epochs=4"])
    assert training.main_loop.run_training().status == "finished"


def test_a_cut_file_or_another_format_is_one_error(config, tmp_path):
    trained(config, tmp_path / "run")
    path = tmp_path / "run" / PREPARATION_FILE
    for text, message in (
        ('{"format": 1, "datasets": {"dat', r"preparation\.json is damaged or cut off \(.*; copy that of a checkpoint"),
        ("[]", r"preparation\.json is damaged or cut off"),
        ('{"format": 2, "datasets": {}}', r"preparation\.json has format 2, but this version of emrun reads format 1"),
        ('{"format": 1, "datasets": {"dataset": {}}}', r"preparation\.json\.class is missing"),
    ):
        path.write_text(text)
        for call in (
            load_run,
            lambda run: evaluate(run, "valid"),
            lambda run: resume_training(run, ["seed=0"], "latest"),
        ):
            with pytest.raises(StateError, match=message):
                call(tmp_path / "run")
    path.write_bytes(next((tmp_path / "run").glob("checkpoints/it-*/preparation.json")).read_bytes())
    load_run(tmp_path / "run")


def test_a_dataset_of_ones_own_and_one_within_another(config, tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"class": "own_data.Data"}
    training = run_of(config, tmp_path, dataset=own, main_loop={})
    assert training.dataset.opened
    assert load_run(tmp_path / "run").dataset.opened is False
    nested = {
        "class": "Mixed",
        "datasets": {"one": own, "two": {**config["dataset"], "class": "emrun.datasets.Table"}},
        "weights": {"one": 1, "two": 1},
    }
    training = create_training(
        {**config, "dataset": {**nested, "batches_per_epoch": 4}, "main_loop": {}}, output_dir=tmp_path / "mixed"
    )
    assert list(training.prepared.made) == ["dataset.datasets.one", "dataset.datasets.two"]
    training.main_loop.run_training()
    (tmp_path / "t.csv").unlink()
    assert load_run(tmp_path / "mixed").prepared.made == training.prepared.made


@pytest.mark.campaign
def test_what_no_evaluation_needs_is_kept_for_new_data_alone(config, tmp_path):
    del config["dataset"]["split"]
    run_of(config, tmp_path, main_loop={})
    kept = json.loads((tmp_path / "run" / PREPARATION_FILE).read_text())["datasets"]["dataset"]
    assert kept["binds"] is False
    assert load_run(tmp_path / "run").dataset.preparation == kept
    before = predict(tmp_path / "run", data="new.csv")
    evaluate(tmp_path / "run", "train", ["dataset.columns={x: [a, b], label: label, more: a}"])  # reads the train rows
    (tmp_path / "t.csv").unlink()
    assert (predict(tmp_path / "run", data="new.csv")["logits"] == before["logits"]).all()
    with pytest.raises(ConfigError, match=r"there is no file t\.csv"):
        load_run(tmp_path / "run")


def prepared_on_ranks(config, place):
    training = create_training(config, output_dir=place)
    return training.dataset.opened, training.dataset.preparation


def test_rank_0_prepares_for_all(config, tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    given = {**config, "dataset": {"class": "own_data.Data"}, "main_loop": {}}
    assert in_ranks(2, prepared_on_ranks, given, tmp_path / "run") == [(True, {"mean": 1.5}), (False, {"mean": 1.5})]


def bits_on_ranks(config, place):
    training = create_training(config, output_dir=place)
    training.main_loop.run_training()
    return [each.detach().numpy().tobytes() for each in training.model.module.parameters()]


def test_an_argument_that_emrun_supplies_cannot_be_given(config, tmp_path):
    config["dataset"]["preparation"] = {}
    with pytest.raises(Exception, match="'preparation' is supplied by emrun; remove it"):
        create_training(config, output_dir=tmp_path / "run")


def weights_of(run):
    return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("workers", thinned([0, 2], [0]))
def test_resumed_with_any_number_of_workers_it_ends_with_the_same_bits(config, tmp_path, workers):
    dataset = {**config["dataset"], "fill": {"a": {"by": "median"}}, "normalize": {"x": "standard"}, "balance": "label"}
    lines = (tmp_path / "t.csv").read_text().splitlines()
    lines[3] = lines[3][lines[3].index(",") :]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    given = {**config, "dataset": dataset}
    create_training(given, output_dir=tmp_path / "straight").main_loop.run_training()
    place = tmp_path / "resumed"
    overrides = ["hooks.StopAfter.updates=3", f"main_loop.workers={workers}"]
    create_training(given, output_dir=place, overrides=overrides).main_loop.run_training()
    training = resume_training(place, ["~hooks.StopAfter.updates"])
    assert training.main_loop.run_training().status == "finished"
    assert weights_of(place) == weights_of(tmp_path / "straight")


def resumed_on_ranks(config, place):
    create_training(config, output_dir=place, overrides=["hooks.StopAfter.updates=3"]).main_loop.run_training()
    resume_training(place, ["~hooks.StopAfter.updates"]).main_loop.run_training()


@pytest.mark.campaign
def test_resumed_on_two_ranks_it_ends_with_the_same_bits(config, tmp_path):
    given = {**config, "dataset": {**config["dataset"], "normalize": {"x": "robust"}, "balance": "label"}}
    in_ranks(2, bits_on_ranks, given, tmp_path / "straight")
    in_ranks(2, resumed_on_ranks, given, tmp_path / "resumed")
    assert weights_of(tmp_path / "straight") == weights_of(tmp_path / "resumed")


def with_loss(config, tmp_path, weight, **more):
    """Return the config with a weight of the loss, and 24, 12 and 4 rows of three classes."""
    rows = (tmp_path / "t.csv").read_text().splitlines()
    labels = [0] * 24 + [1] * 12 + [2] * 4
    lines = [
        ",".join([*row.split(",")[:2], str(label), row.split(",")[3]])
        for row, label in zip(rows[1:], labels, strict=True)
    ]
    (tmp_path / "t.csv").write_text("\n".join([rows[0], *lines]) + "\n")
    model = {**MODEL, **more, "loss": {**MODEL["loss"], "weight": weight}}
    return {**config, "model": model}


def loss_weights(training):
    return training.model._forward_pass.outputs.terms["loss"].function.weight.tolist()


def test_a_list_is_the_tensor_that_a_loss_needs(config, tmp_path):
    training = run_of(with_loss(config, tmp_path, [1, 2.5, 3]), tmp_path)
    assert loss_weights(training) == [1, 2.5, 3]
    with pytest.raises(ConfigError, match=r"model\.loss\.weight: \['a', 2\] is not a list of numbers for a tensor"):
        create_training(with_loss(config, tmp_path, ["a", 2]), output_dir=tmp_path / "other")


def test_balanced_weights_are_those_of_the_train_rows(config, tmp_path):
    config = with_loss(config, tmp_path, "balanced")
    expected = pytest.approx([30 / (3 * count) for count in (18, 9, 3)])
    assert loss_weights(run_of(config, tmp_path)) == expected
    before = evaluate(tmp_path / "run", "valid")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").unlink()
    assert evaluate(tmp_path / "run", "test", ["dataset.test=new.csv"])["test"]["loss"]["mean"] > 0
    (tmp_path / "t.csv").write_text(text)
    assert evaluate(tmp_path / "run", "valid") == before
    training = resume_training(tmp_path / "run", ["hooks.StopAfter.epochs=3"])
    training.main_loop.run_training()
    assert loss_weights(training) == expected


@pytest.mark.campaign
def test_an_evaluation_with_balanced_weights_is_that_with_a_list_of_them(config, tmp_path):
    run_of(with_loss(config, tmp_path, "balanced"), tmp_path)
    before = evaluate(tmp_path / "run", "valid")
    weighted = with_loss(config, tmp_path, [30 / (3 * count) for count in (18, 9, 3)])
    training = create_training(weighted, output_dir=tmp_path / "listed")
    training.main_loop.run_training()
    assert evaluate(tmp_path / "listed", "valid") == before


@pytest.mark.parametrize("categories", thinned([[], ["label"]], [["label"]]))
def test_a_class_without_train_rows_has_the_weight_1(config, tmp_path, categories):
    module = {**MODEL["module"], "out_features": 4}
    config = with_loss(config, tmp_path, "balanced", module=module)
    config["dataset"]["categories"] = categories
    assert loss_weights(run_of(config, tmp_path)) == pytest.approx([30 / 54, 30 / 27, 30 / 9, 1])


def test_balanced_weights_without_counts_are_refused_with_what_to_write(config, tmp_path):
    config = with_loss(config, tmp_path, "balanced")
    config["dataset"]["split"] = {"valid": 0.25}
    with pytest.raises(
        ConfigError, match=r"model\.loss\.weight: .* of 'label', its second input; write split: "
    ) as caught:
        create_training(config, output_dir=tmp_path / "run")
    config["dataset"]["split"] = YAML(typ="safe").load(re.search(r"split: (\{.*?\})", str(caught.value))[1])
    weights = loss_weights(run_of(config, tmp_path / "more"))
    assert weights == sorted(weights)
    assert weights[2] > 2


def test_balanced_weights_of_data_that_are_not_divided_are_refused_with_a_list(config, tmp_path):
    (tmp_path / "rows.py").write_text(
        "class Rows:\n    def train_stream(self):\n        yield {'x': [[0.0, 1.0]], 'label': [0]}\n"
    )
    config = with_loss({**config, "dataset": {"class": "rows.Rows"}, "main_loop": {}}, tmp_path, "balanced")
    with pytest.raises(ConfigError, match=r"'label', its second input; write a list with the weight of each class"):
        create_training(config, output_dir=tmp_path / "run")


def test_balanced_weights_need_an_output_for_each_class(config, tmp_path):
    config = with_loss(config, tmp_path, "balanced", module={**MODEL["module"], "out_features": 2})
    training = create_training(config, output_dir=tmp_path / "run")
    with pytest.raises(Exception, match=r"loss\.weight.*'logits' is \(8, 2\), but there are 3 classes"):
        training.main_loop.run_training()
