"""Runs that look at a part of the data: some batches of an extra stream, or `overfit`."""

import numpy as np
import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, ended, result, straight
from training.tiny import CONFIG, finished, metrics, metrics_in, trained, weights, weights_in

from emrun import AbstractHook
from emrun.base.errors import ConfigError
from emrun.training.create import create_training, train
from emrun.training.evaluate import evaluate
from emrun.training.resume import resume_training

SMALL = {**CONFIG, "dataset": {"class": "Majority", "n": 100, "batch_size": 4}}
"""A run with five batches of the stream for validation."""


class Seen(AbstractHook):
    """Records the sums of the batches: (stream, whether it is trained on, epoch) -> sums."""

    def __init__(self):
        super().__init__()
        self.sums = {}

    def after_batch(self, stream_name, batch_data):
        loop = self.main_loop
        key = stream_name, loop.training, loop.training_epochs_done
        self.sums.setdefault(key, []).append(float(np.sum(batch_data["x"])))


def seen_in(directory, **main_loop):
    training = create_training({**SMALL, "main_loop": main_loop}, directory)
    seen = Seen()
    training.main_loop.change_hooks([seen, *training.hooks])
    training.main_loop.run_training()
    return training, seen.sums


def test_some_batches_of_an_extra_stream_are_the_first_ones_each_time(tmp_path):
    _, whole = seen_in(tmp_path / "whole", extra_streams=["valid"])
    training, part = seen_in(tmp_path / "part", extra_streams=[{"valid": {"batches": 2}}])
    length = len(whole["valid", False, 1])
    assert length > 2
    assert part["valid", False, 1] == whole["valid", False, 1][:2]
    assert part["valid", False, 0] == 2 * part["valid", False, 1]  # of the zeroth and of the first epoch
    assert weights(training) == weights_in(finished(tmp_path, config=SMALL))


def test_an_evaluation_by_hand_and_by_the_command_reads_all(tmp_path, caplog):
    caplog.set_level("INFO")
    config = {**SMALL, "main_loop": {"extra_streams": [{"valid": {"batches": 2}}]}}
    training = trained(tmp_path / "part", config=config)
    part = metrics(training)[-1]["streams"]["valid"]
    whole = evaluate(training.output_dir, "valid", checkpoint_name="latest")
    assert "stream 'valid' is read whole; the training evaluates its first 2 batches" in caplog.messages
    by_hand = training.main_loop.run_evaluation("valid")
    assert by_hand == whole != {"valid": part}


@pytest.mark.campaign
def test_more_batches_than_there_are_is_all_of_them_once(tmp_path):
    config = {**SMALL, "main_loop": {"extra_streams": [{"valid": {"batches": 1000}}]}}
    assert metrics(trained(tmp_path / "part", config=config)) == metrics_in(finished(tmp_path, config=SMALL))


@pytest.mark.parametrize("size", thinned(["3 updates", "3 iterations", 3], ["3 updates"]))
def test_the_size_of_an_epoch_may_have_its_unit(tmp_path, size):
    training = trained(tmp_path, config={**SMALL, "main_loop": {"fixed_epoch_size": size, "extra_streams": ["valid"]}})
    assert [line["iteration"] for line in metrics(training)] == [0, 3, 6]


def test_overfit_trains_and_evaluates_on_the_same_few_batches(tmp_path, caplog):
    caplog.set_level("INFO")
    training, sums = seen_in(tmp_path, overfit=2, extra_streams=["valid", {"train": {"batches": 1}}], buffer=2)
    first = sums["train", True, 0]
    assert len(first) == 2
    assert sums["train", True, 1] == first
    assert caplog.messages.count("overfit: every stream gives the first 2 batches of stream 'train'") == 1
    assert sums["valid", False, 0] == 2 * first
    assert sums["train_eval", False, 1] == first[:1]
    assert sums["train", False, 0] == first
    _, whole = seen_in(tmp_path / "whole", extra_streams=["valid"])
    assert whole["train", True, 0][:2] == first
    assert training.main_loop.stream_sizes == {"train": 2, "valid": 2, "train_eval": 1}


@pytest.mark.campaign
def test_an_evaluation_of_a_run_with_overfit_reads_the_whole_stream(tmp_path):
    training = trained(tmp_path / "part", config={**SMALL, "main_loop": {"overfit": 2, "extra_streams": ["valid"]}})
    found = evaluate(training.output_dir, "valid", checkpoint_name="latest")["valid"]
    assert found == evaluate(training.output_dir, "valid", ["~main_loop.overfit"], checkpoint_name="latest")["valid"]
    assert found != metrics(training)[-1]["streams"]["valid"]


@pytest.mark.parametrize("kind", thinned(["context", "stateful", "global_random"], ["context"]))
def test_a_run_with_parts_is_resumed_exactly(project, kind):
    config = config_of(kind, FEW_HOOKS, overfit=3, extra_streams=[{"valid": {"batches": 2}}], buffer=1)
    ended(project, config, "hooks.StopAfter.iterations=4")
    train(resume_training(project / "run", ["hooks.StopAfter.iterations=99"]))
    assert result(project / "run") == straight(project, config)


def test_overfit_and_a_size_of_epochs_contradict_each_other(tmp_path):
    config = {**SMALL, "main_loop": {"overfit": 2, "fixed_epoch_size": 3}}
    with pytest.raises(ConfigError, match=r"main_loop\.overfit: overfit and fixed_epoch_size both set"):
        create_training(config, tmp_path)
