"""The train stream among the extra streams: it is evaluated too, and training does not change by that."""

import numpy as np
import pytest
from campaign import thinned
from training.tiny import CONFIG, metrics, trained, weights

import emrun
from emrun.training.create import create_training


class Probed(emrun.AbstractHook):
    """Records for each batch of a stream: its name, whether it is trained on, the sum of its first source."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def after_batch(self, stream_name, batch_data):
        key = (stream_name, self.main_loop.training, self.main_loop.training_epochs_done)
        self.seen.setdefault(key, []).append(float(np.sum(batch_data["x"])))


def with_train_evaluated(**main_loop):
    return {**CONFIG, "main_loop": {"extra_streams": ["train", "valid"], **main_loop}}


@pytest.mark.parametrize("main_loop", thinned([{}, {"buffer": 3}, {"fixed_epoch_size": 2}], [{"buffer": 3}]), ids=str)
def test_evaluating_the_train_stream_too_changes_nothing_of_the_training(tmp_path, main_loop):
    both = trained(tmp_path, config=with_train_evaluated(**main_loop))
    plain = trained(tmp_path, config={**CONFIG, "main_loop": {"extra_streams": ["valid"], **main_loop}})
    assert weights(both) == weights(plain)
    for one, other in zip(metrics(both), metrics(plain), strict=True):
        assert {name: data for name, data in one["streams"].items() if name != "train_eval"} == other["streams"]


@pytest.mark.parametrize("size", [None, 2])
def test_the_train_stream_is_evaluated_on_the_same_batches_each_time_under_a_name_of_its_own(tmp_path, size):
    overrides = [] if size is None else [f"main_loop.fixed_epoch_size={size}"]
    training = create_training(with_train_evaluated(), tmp_path, overrides=overrides)
    probe = Probed()
    training.main_loop.change_hooks([probe, *training.hooks])
    training.main_loop.run_training()
    count = len(probe.seen["train", True, 1])
    in_two_epochs = probe.seen["train_eval", False, 0]  # the counter grows behind the evaluations
    assert len(in_two_epochs) == 2 * count
    assert in_two_epochs[:count] == in_two_epochs[count:] == probe.seen["train_eval", False, 1]
    assert not [key for key in probe.seen if key[0] == "train_eval" and key[1]]
    assert list(metrics(training)[-1]["streams"]) == ["train", "train_eval", "valid"]
    first = metrics(training)[0]["streams"]
    assert {**first["train_eval"], "learning_rate": 0.5} == first["train"]


def test_a_hook_may_watch_the_evaluated_train_stream(tmp_path):
    config = with_train_evaluated()
    config["hooks"] = [CONFIG["hooks"][0], {"SaveBest": {"stream": "train_eval"}}, {"StopAfter": {"epochs": 1}}]
    assert (trained(tmp_path, config=config).output_dir / "checkpoints" / "best").exists()
