"""`units`: losses get outputs and sources as they are scaled, metrics, hooks and predictions in the unit of data."""

import csv
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from campaign import thinned
from samples import SAMPLES

from emrun import create_training
from emrun.diagnosis.replay import replay
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

SAMPLE = SAMPLES / "prepared" / "house_prices.yaml"
KEEP = "hooks=[ComputeStats, {SavePredictions: {stream: valid, file: p.csv, variables: [price_hat, price]}}]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a directory with the data of the sample, and a run of it."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        runpy.run_path(str(SAMPLE.with_name("prepare.py")))
        overrides = ["hooks.StopAfter.epochs=2", "~hooks.SaveBest", "main_loop.report=false"]
        create_training(SAMPLE, output_dir="run", overrides=overrides).main_loop.run_training()
    return place


@pytest.fixture
def prepared(trained, tmp_path, monkeypatch):
    """Go to a copy of the data of the sample."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(trained / "houses.csv", tmp_path)).parent


@pytest.fixture
def run(trained, prepared):
    """Return a copy of the run, beside its data."""
    return shutil.copytree(trained / "run", prepared / "run", symlinks=True)


def test_metrics_hooks_and_predictions_are_in_the_unit_of_the_data(run):
    with (run.parent / "houses.csv").open() as file:
        prices = {row["address"]: float(row["price"]) for row in csv.DictReader(file)}
    found = predict(run, "valid")
    truth = np.array([prices[name] for name in found["id"]])
    error = np.abs(found["price_hat"][:, 0] - truth)
    assert error.mean() > 1000
    statistics = evaluate(run, "valid", [KEEP])["valid"]
    assert statistics["mae"]["mean"] == pytest.approx(error.mean(), rel=1e-3)
    assert statistics["loss"]["mean"] < 2
    with next(run.glob("eval/valid-1/p.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["price"]) for row in rows] == pytest.approx(truth.tolist(), rel=1e-5)
    assert [float(row["price_hat"]) for row in rows] == pytest.approx(found["price_hat"][:, 0].tolist(), rel=1e-6)


def test_a_file_without_labels_is_predicted_when_the_train_file_is_gone(run):
    lines = (run.parent / "houses.csv").read_text().splitlines()
    before = predict(run, "valid")
    (run.parent / "new.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    (run.parent / "houses.csv").unlink()
    found = predict(run, "test", overrides=["dataset.test=new.csv"])
    of_valid = np.isin(found["id"], before["id"])
    np.testing.assert_allclose(found["price_hat"][of_valid], before["price_hat"], rtol=1e-6)
    with pytest.raises(Exception, match="price"):
        evaluate(run, "test", ["dataset.test=new.csv"])


@pytest.mark.parametrize("outputs", thinned(["", "  outputs: [price_hat]\n"], [""]))
def test_models_of_runs_measure_in_the_unit_of_the_data(run, outputs):
    text = (run / "config.yaml").read_text()
    (run.parent / "both").mkdir()
    (run.parent / "both" / "config.yaml").write_text(
        text[: text.index("model:")]
        + "model:\n  class: Ensemble\n  runs: [run, {run: run, checkpoint: latest}]\n"
        + outputs
        + "  loss: {class: torch.nn.L1Loss, inputs: [price_hat, price]}\n"
        + "  metrics: {mae: {class: torch.nn.L1Loss, inputs: [price_hat, price]}}\n"
    )
    alone = predict(run, "valid")
    found = predict("both", "valid")
    np.testing.assert_allclose(found["price_hat"], alone["price_hat"], rtol=1e-5)
    statistics = evaluate("both", "valid")["valid"]
    assert statistics["mae"]["mean"] == pytest.approx(evaluate(run, "valid")["valid"]["mae"]["mean"], rel=1e-5)
    assert statistics["loss"]["mean"] < 2


def test_a_logarithm_and_a_source_that_is_not_scaled(prepared):
    overrides = [
        "hooks=[ComputeStats, {StopAfter: {epochs: 1}}]",
        "dataset.normalize.price=log",
        "main_loop.report=false",
    ]
    training = create_training(SAMPLE, output_dir="run", overrides=overrides)
    training.main_loop.run_training()
    assert 1000 < training.main_loop.metrics[-1]["streams"]["valid"]["mae"]["mean"] < 500_000
    wrong = (
        r"units.price_hat: the dataset has not scaled 'price'; add it to dataset.normalize, or leave 'price_hat' out"
    )
    with pytest.raises(Exception, match=re.escape(wrong)):
        create_training(SAMPLE, output_dir="other", overrides=["~dataset.normalize.price"])
    create_training(SAMPLE, output_dir="third", overrides=["~dataset.normalize.price", "~model.units"])


def test_a_step_is_repeated_in_the_unit_of_the_data(prepared, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "limits.py").write_text(
        "def check(hat, price):\n    if price.max() > 100:\n        raise ValueError('too dear')\n    return hat\n"
    )
    metric = "model.metrics.limit={import: limits.check, inputs: [price_hat, price]}"
    training = create_training(SAMPLE, output_dir="run", overrides=[metric, "main_loop.report=false"])
    with pytest.raises(ValueError, match="too dear"):
        training.main_loop.run_training()
    (tmp_path / "houses.csv").unlink()
    found = replay("run")
    assert (found.reproduced, found.message) == (True, "ValueError: too dear")
