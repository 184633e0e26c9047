"""Evaluations of a run, in this process."""

import json
import random

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from training.tiny import CONFIG, finished, metrics_in, trace

from emrun.base.errors import StateError, StorageError, UsageError
from emrun.datasets.majority import Majority
from emrun.training.evaluate import evaluate


def test_an_evaluation_gives_what_the_training_wrote(tmp_path):
    run = finished(tmp_path)
    found = evaluate(run, "valid", checkpoint_name="latest")
    assert found == {"valid": metrics_in(run)[-1]["streams"]["valid"]}


class Endless(Majority):
    """A train stream without an end, of which an epoch reads some batches."""

    def train_stream(self):
        while True:
            yield {"x": self._x[:10], "y": self._y[:10]}


def test_a_train_stream_without_an_end_is_evaluated_on_as_many_batches_as_an_override_says(tmp_path, caplog):
    caplog.set_level("INFO")
    dataset = {**CONFIG["dataset"], "class": f"{__name__}.Endless"}
    config = {**CONFIG, "dataset": dataset, "main_loop": {**CONFIG["main_loop"], "fixed_epoch_size": 2}}
    run = finished(tmp_path, config=config)
    found = evaluate(run, "train", ["main_loop.fixed_epoch_size=3"])
    assert found["train"]["loss"]["mean"] > 0
    assert not any("read whole" in each for each in caplog.messages)


def test_a_train_stream_is_evaluated_whole_and_the_log_says_how_to_read_a_part(tmp_path, caplog):
    caplog.set_level("INFO")
    run = finished(tmp_path, config={**CONFIG, "main_loop": {**CONFIG["main_loop"], "fixed_epoch_size": 2}})
    evaluate(run, "train")
    assert (
        "stream 'train' is read whole, not 2 batches as in an epoch of the training; if it has no end, add an "
        "override: main_loop.fixed_epoch_size=2"
    ) in caplog.messages


def test_results_of_an_evaluation_may_lie_outside_the_run(tmp_path):
    run = finished(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    evaluate(run, "valid", output_dir=tmp_path / "mine")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert (tmp_path / "mine" / "valid-1" / "metrics.jsonl").exists()


def test_an_evaluation_takes_the_best_checkpoint_by_default(tmp_path):
    run = finished(tmp_path, "model.optimizer.lr=30.0", "hooks.StopAfter.epochs=4")
    losses = [line["streams"]["valid"]["loss"]["mean"] for line in metrics_in(run)]
    assert min(losses) < losses[-1]
    assert evaluate(run, "valid")["valid"]["loss"]["mean"] == min(losses)


def test_an_evaluation_has_a_directory_of_its_own_and_leaves_the_run_alone(tmp_path):
    run = finished(tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for _ in range(2):
        evaluate(run, "valid")
    assert before == {path: path.read_bytes() for path in before}
    assert sorted(path.name for path in (run / "eval").iterdir()) == ["valid-1", "valid-2"]
    line = json.loads((run / "eval" / "valid-1" / "metrics.jsonl").read_text())
    assert list(line["streams"]) == ["valid"]
    assert trace(run / "eval" / "valid-1")["status"] == "finished"


def test_an_evaluation_leaves_the_random_states_of_the_process_as_they_were_seeded(tmp_path):
    run = finished(tmp_path)
    states = []
    for _ in range(2):
        evaluate(run, "valid")
        states.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert states[0] == states[1]


def test_an_overlay_changes_the_evaluation_of_its_stream_only(tmp_path):
    overlay = {"valid": {"hooks": [{"ComputeStats": {"variables": [{"logit": ["max"]}]}}], "dataset": {"n": 100}}}
    run = finished(tmp_path, config={**CONFIG, "eval": overlay})
    assert list(evaluate(run, "valid")["valid"]) == ["logit"]
    assert list(evaluate(run, "train")["train"]) == ["loss"]


def test_overrides_win_over_the_overlay(tmp_path):
    overlay = {"valid": {"dataset": {"n": 100}}}
    run = finished(tmp_path, config={**CONFIG, "eval": overlay})
    stats = "hooks.ComputeStats.variables=[{loss: [count]}]"
    assert evaluate(run, "valid", [stats])["valid"]["loss"]["count"] == 20
    assert evaluate(run, "valid", [stats, "dataset.n=200"])["valid"]["loss"]["count"] == 40


def test_another_config_can_evaluate_the_weights(tmp_path):
    run = finished(tmp_path)
    other = tmp_path / "other.yaml"
    YAML().dump({**CONFIG, "hooks": [{"ComputeStats": {"variables": ["logit"]}}]}, other)
    assert list(evaluate(run, "valid", config=other)["valid"]) == ["logit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream": "vaild"}, "no method 'vaild_stream'; did you mean 'valid'? (its streams: train, valid)"),
        ({"checkpoint_name": "bset"}, "no checkpoint 'bset'; did you mean 'best'? available: best"),
    ],
)
def test_an_evaluation_of_what_is_not_there_leaves_nothing_behind(tmp_path, arguments, message):
    run = finished(tmp_path)
    with pytest.raises(UsageError) as caught:
        evaluate(run, **{"stream": "valid", **arguments})
    assert message in str(caught.value)
    assert not list(run.glob("eval/*"))


def test_a_directory_without_a_run_cannot_be_evaluated(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        evaluate(tmp_path, "valid")


def test_weights_of_another_architecture_are_refused(tmp_path):
    run = finished(tmp_path)
    with pytest.raises(StateError, match=r"in the checkpoint, .* in the module"):
        evaluate(run, "valid", ["dataset.dim=13", "model.module.args.0.in_features=13"])


def test_damaged_weights_are_refused(tmp_path):
    run = finished(tmp_path)
    path = run / "checkpoints" / "best" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="differs from its manifest") as caught:
        evaluate(run, "valid")
    assert caught.value.__notes__[0].startswith("intact checkpoints: ")
