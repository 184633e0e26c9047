"""Which hooks each rank calls, and with which data."""

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, Affine, Streams
from in_ranks import all_in_ranks, results_of

from emrun import AbstractHook, MainLoop, TorchModel
from emrun.hooks import ComputeStats, StopAfter
from emrun.ranks.group import join

BATCHES = [{"x": np.arange(5.0) + n, "y": np.arange(5.0), "name": [f"{n}{each}" for each in "abcde"]} for n in range(3)]


class Notes(AbstractHook):
    """Notes the events that reach it."""

    reads = ("x", "name")
    whole_batches = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_epoch(self, epoch_id):
        self.seen.append(("before_epoch", epoch_id))

    def after_batch(self, stream_name, batch_data):
        predicted = batch_data["predicted"]
        assert isinstance(predicted, torch.Tensor)
        self.seen.append((stream_name, list(batch_data["name"]), predicted.tolist(), float(batch_data["mean"])))

    def after_epoch(self, epoch_id, epoch_data):
        self.seen.append(("after_epoch", epoch_id))
        epoch_data.setdefault("train", {})["noted"] = len(self.seen)


class Everywhere(Notes):
    every_rank = True


class Reads(AbstractHook):
    every_rank = True
    reads = ()

    def after_epoch(self, epoch_data):
        self.found = dict(epoch_data["train"])


class Module(Affine):
    def forward(self, x, y):
        outputs = super().forward(x, y)
        return {**outputs, "mean": outputs["loss"].mean()}


def run(*hooks, batches=BATCHES):
    join()
    model = TorchModel(Module().double(), ["x", "y"], ["predicted", "loss", "mean"], optimizer=SGD)
    policies = {"on_unused_sources": "ignore", "skip_zeroth_epoch": True}
    loop = MainLoop(model, Streams(train=batches), [*hooks, StopAfter(epochs=1)], **policies)
    loop.run_training()
    return loop


def noted(kind, batches=BATCHES):
    hook = kind()
    run(hook, batches=batches)
    return hook.seen


def statistics():
    hook = Reads()
    run(ComputeStats([{"loss": ["mean", "std", "min", "max"]}]), Notes(), hook)
    return hook.found


def counted():
    hook = Counts()
    run(hook)
    return hook.at_end


@pytest.fixture(scope="module")
def alone():
    """Return what hooks get in one process."""
    return all_in_ranks(1, {"notes": lambda: noted(Notes), "statistics": statistics})


@pytest.fixture(scope="module")
def of_two():
    """Return what hooks get on two ranks, or the errors of the last calls."""
    few = [{name: values[:1] for name, values in batch.items()} for batch in BATCHES]
    calls = {"notes": lambda: noted(Notes), "statistics": statistics, "count": counted}
    calls |= {"all": lambda: noted(Everywhere), "few": lambda: noted(Everywhere, few)}
    failing = {"undeclared": lambda: run(Undeclared()), "differ": differ}
    return all_in_ranks(2, {**calls, **failing}, failing)


def test_a_hook_of_rank_0_gets_whole_batches_and_the_means_of_scalars(alone, of_two):
    (alone,) = alone["notes"]
    first, second = of_two["notes"]
    assert second == []
    assert len(first) == len(alone)
    for one, other in zip(first, alone, strict=True):
        assert one[:2] == other[:2]
        if one[0] == "train":
            assert np.allclose(one[2], other[2])
            assert np.isclose(one[3], other[3])


def test_a_hook_of_every_rank_gets_its_rows_and_a_rank_without_rows_does_not_call_after_batch(of_two):
    found = of_two["all"]
    names = [[each[1] for each in seen if each[0] == "train"] for seen in found]
    assert [first + second for first, second in zip(*names, strict=True)] == [batch["name"] for batch in BATCHES]
    first, second = of_two["few"]
    assert sum(len([each for each in seen if each[0] == "train"]) for seen in (first, second)) == 3


def test_statistics_are_merged_and_the_data_of_the_epoch_is_that_of_rank_0_everywhere(alone, of_two):
    (alone,) = alone["statistics"]
    for each in of_two["statistics"][:1]:
        assert each["noted"] == alone["noted"]
        assert each["loss"].keys() == alone["loss"].keys()
        for name, value in alone["loss"].items():
            assert np.isclose(each["loss"][name], value, rtol=1e-12)


class Counts(AbstractHook):
    """Adds up over ranks."""

    every_rank = True
    reads = ("x",)

    def __init__(self):
        super().__init__()
        self.count, self.at_end = 0, None

    def after_batch(self, batch_data):
        self.count += len(batch_data["x"])

    def after_epoch(self):
        self.at_end = self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def merge(self, states):
        self.count += sum(each["count"] for each in states)


def test_a_hook_that_merges_has_what_all_ranks_collected_on_rank_0(of_two):
    assert of_two["count"][0] == 15


def differ():
    run(batches=[dict(BATCHES[0], x=BATCHES[0]["x"] + join().rank)])


def test_batches_that_differ_are_an_error_on_every_rank(of_two):
    for each in of_two["differ"]:
        assert each.kind == "DifferentRanks"
        assert "rank 1 reads another batch of stream 'train' than rank 0" in each.message


class Fails(AbstractHook):
    reads = ("x",)
    whole_batches = True

    def after_batch(self, batch_data):
        raise ValueError("a fault")


class FailsEverywhere(Fails):
    every_rank = True


@pytest.mark.parametrize("kind", thinned([Fails, FailsEverywhere], [Fails]))
def test_the_hook_that_failed_is_named_though_others_before_it_get_the_batch_together(kind):
    first, _ = results_of(2, run, Notes(), Notes(), kind())
    assert f"in hook {kind.__name__}, after_batch of stream 'train'" in first.text


class Undeclared(Fails):
    whole_batches = False


def test_a_hook_that_takes_batches_and_does_not_say_which_is_an_error_at_the_start(of_two):
    for each in of_two["undeclared"]:
        assert each.kind == "HookError"
        assert "Undeclared.after_batch takes batch_data, and several ranks have parts of each batch" in each.message
