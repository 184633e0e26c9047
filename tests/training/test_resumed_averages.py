"""Averages of the weights over resumes, evaluations in other processes, and without their hook."""

import copy
import itertools
import json
import shutil

import pytest
import torch
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, interrupted, result, resumed

from emrun import create_training, load_run, resume_training
from emrun.training.create import train
from emrun.training.evaluate import evaluate


def config_with(**arguments):
    config = config_of(hooks=FEW_HOOKS)
    config["hooks"] = [{"AverageWeights": arguments or {"half_life": "3 updates"}}, *config["hooks"]]
    return config


@pytest.mark.campaign
@pytest.mark.parametrize("step", thinned([40, 3], [40]))
def test_a_resume_is_exact_from_every_kind_of_event(project, step):
    config = config_with()
    config["model"]["accumulate"] = 2
    events = interrupted(config, project / "straight", None)
    expected = {**result(project / "straight"), "trained": trained(project / "straight")}
    for at in range(events.index("before_epoch 1"), len(events), step):
        interrupted(config, project / "run", at + 1)
        resumed(project / "run")
        assert {**result(project / "run"), "trained": trained(project / "run")} == expected, events[at]
        shutil.rmtree(project / "run")


def trained(directory):
    return (directory / "checkpoints" / "latest" / "training.safetensors").read_bytes()


def test_a_resume_from_within_the_pass_that_recomputes_batch_norm_is_exact(project):
    config = config_with(kind="swa", every="1 epochs")
    config["main_loop"]["extra_streams"] = [{"valid": "2 epochs"}]  # the first epoch evaluates nothing
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    without_model = [("before_batch train", "before_batch train")]
    in_pass = [at for at, pair in enumerate(itertools.pairwise(events), 1) if pair in without_model]
    assert len(in_pass) == 8  # of the first four of five batches of two passes
    for at in in_pass[1:2]:
        interrupted(config, project / "run", at)
        resumed(project / "run")
        assert result(project / "run") == expected
        shutil.rmtree(project / "run")


def test_an_evaluation_in_another_process_has_the_same_figures_without_the_hook(project):
    config = config_with(decay=0.5)
    training = create_training(config, output_dir=project / "run")
    train(training)
    recorded = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    averages = training.model.evaluation_weights
    loaded = load_run(project / "run", "latest")
    assert all(torch.equal(value, averages[name]) for name, value in loaded.model.module.state_dict().items())
    evaluated = evaluate(project / "run", "valid", ["~hooks.AverageWeights"], checkpoint_name="latest")
    assert evaluated["valid"]["loss"] == recorded["streams"]["valid"]["loss"]


def test_the_averages_of_a_checkpoint_are_dropped_with_the_hook_and_begin_anew_with_a_new_one(project, caplog):
    create = create_training(config_with(), output_dir=project / "run")
    train(create)
    final = copy.deepcopy(create.model.module.state_dict())
    without = resume_training(project / "run", ["~hooks.AverageWeights", "hooks.StopAfter.epochs=3"])
    assert all(torch.equal(value, final[name]) for name, value in without.model.module.state_dict().items())
    train(without)
    assert "no hook averages any more" in caplog.text
    assert without.model.restored_weights is None
    assert not (project / "run" / "checkpoints" / "latest" / "training.safetensors").exists()
