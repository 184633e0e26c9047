"""AverageWeights: the averages equal torch's, and evaluations use them wherever a run is interrupted."""

import logging

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, Net, Push, Streams, run, vectors
from in_ranks import in_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import AverageWeights, StopAfter
from emrun.ranks.group import join


class Averaged(AbstractHook):
    """Averages as a script would, with torch's class."""

    def __init__(self, function, every=1):
        super().__init__()
        self.function, self.every = function, every
        self.model = None
        self.count = 0

    def after_update(self, model):
        if self.model is None:
            self.model = AveragedModel(model.module, multi_avg_fn=self.function)
            self.statistics = []
        done = self.main_loop.updates_done + 1
        if done % self.every == 0:
            self.model.update_parameters(model.module)
            now = model.module.layers[1].running_mean
            if self.statistics:
                self.function(self.statistics, [now], self.count)
            else:
                self.statistics = [now.clone()]
            self.count += 1


AVERAGES = [
    ({"decay": 0.9}, get_ema_multi_avg_fn(0.9), 1),
    ({"half_life": "3 updates"}, get_ema_multi_avg_fn(0.5 ** (1 / 3)), 1),
    ({"half_life": "3 updates", "every": "2 updates"}, get_ema_multi_avg_fn(0.5 ** (2 / 3)), 2),
    ({"kind": "swa"}, get_swa_multi_avg_fn(), 1),
]
CASES = [(*average, accumulate) for average in AVERAGES for accumulate in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "function", "every", "accumulate"), thinned(CASES, [CASES[0], CASES[2], CASES[5], CASES[6]])
)
def test_the_averages_equal_those_of_torch_to_the_last_bit(arguments, function, every, accumulate):
    torch.manual_seed(0)
    own, theirs = AverageWeights(**arguments, batch_norm="average"), Averaged(function, every)
    optimizer = Factory(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = TorchModel(Net(nn.BatchNorm1d(4)), optimizer=optimizer, accumulate=accumulate, device="cpu")
    run(model, vectors(), own, theirs, epochs=2)
    own_values = model.evaluation_weights
    assert own_values.keys() == model.module.state_dict().keys()
    for name, value in theirs.model.module.named_parameters():
        assert torch.equal(own_values[name], value), name
    assert torch.equal(own_values["layers.1.running_mean"], theirs.statistics[0])
    assert own_values["layers.1.num_batches_tracked"] <= 12


def test_an_evaluation_uses_the_averages_and_the_training_does_not_change():
    class Watch(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def after_batch(self, stream_name):
            self.seen.append((stream_name, round(self.main_loop.model.module.w.item(), 4)))

        def after_epoch(self):
            self.seen.append(("epoch", round(self.main_loop.model.module.w.item(), 4)))

    watch = Watch()
    data = Streams(train=[{"x": [0.0]}] * 2, valid=[{"x": [0.0]}])
    loop = MainLoop(TorchModel(Push(), optimizer=SGD), data, [AverageWeights(kind="swa"), watch])
    with loop:
        loop.epoch(["train"], ["valid"])
        loop.epoch(["train"], ["valid"])
    assert watch.seen == [
        ("train", 0.9), ("train", 0.8), ("valid", 0.85), ("epoch", 0.8),
        ("train", 0.7), ("train", 0.6), ("valid", 0.75), ("epoch", 0.6),
    ]  # fmt: skip


class Both:
    """A dataset whose train stream is shuffled."""

    def train_stream(self, ctx):
        for rows in ctx.batches(24, 4, shuffle=True):
            yield {"x": np.concatenate([each["x"] for each in vectors()])[rows]}

    def valid_stream(self):
        yield vectors()[0]


class Statistics(AbstractHook):
    """Keeps the statistics of BatchNorm of each evaluation, and recomputes them as a script would, with torch."""

    def __init__(self):
        super().__init__()
        self.seen, self.expected = [], []

    def before_evaluation(self):
        model = self.main_loop.model
        if model.evaluation_weights is not None:
            theirs = AveragedModel(Net(nn.BatchNorm1d(4)))
            theirs.module.load_state_dict(model.evaluation_weights)
            update_bn([torch.from_numpy(each["x"]) for each in self.main_loop.evaluation_pass("train")], theirs)
            self.expected.append([value.clone() for value in theirs.module.layers[1].buffers()])

    def after_batch(self, stream_name):
        if stream_name == "valid" and self.main_loop.model.evaluation_weights is not None:
            self.seen.append([value.clone() for value in self.main_loop.model.module.layers[1].buffers()])


@pytest.mark.parametrize("arguments", [{"kind": "swa"}, {"decay": 0.9, "batch_norm": "recompute"}], ids=["swa", "ema"])
def test_recomputed_statistics_equal_those_of_torch_and_the_training_does_not_change(arguments):
    def trained(*hooks, streams=("valid",)):
        torch.manual_seed(0)
        model = TorchModel(Net(nn.BatchNorm1d(4)), optimizer=Factory(torch.optim.SGD, lr=0.1), device="cpu")
        with MainLoop(model, Both(), hooks, on_unused_sources="ignore") as loop:
            loop.epoch([], ["train"])  # as the zeroth
            for _ in range(2):
                loop.epoch(["train"], streams)
        return model, torch.rand(1)

    plain, random = trained()
    statistics = Statistics()
    model, _ = trained(AverageWeights(**arguments), statistics)
    assert len(statistics.seen) == 2
    for seen, expected in zip(statistics.seen, statistics.expected, strict=True):
        assert all(map(torch.equal, seen, expected))
    assert all(map(torch.equal, model.module.state_dict().values(), plain.module.state_dict().values()))
    without_evaluation, random_of_averages = trained(AverageWeights(**arguments), streams=())
    assert torch.equal(without_evaluation.evaluation_weights["layers.1.running_mean"], statistics.expected[-1][0])
    assert torch.equal(random, random_of_averages)


def messages_of(**arguments):
    """Train an epoch with averages on the ranks, if there are several; return the messages of the hook."""
    join()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("emrun.hooks.average_weights").addHandler(handler)
    model = TorchModel(Net(nn.BatchNorm1d(4)), optimizer=SGD, device="cpu")
    MainLoop(
        model, Both(), [AverageWeights(**arguments), StopAfter(epochs=1)], on_unused_sources="ignore"
    ).run_training()
    return messages


@pytest.mark.parametrize(
    ("arguments", "count"),
    thinned([({"kind": "swa"}, 1), ({"kind": "swa", "batch_norm": "average"}, 0)], [({"kind": "swa"}, 1)]),
)
def test_several_ranks_say_that_statistics_are_not_recomputed(arguments, count):
    expected = "AverageWeights: the statistics of BatchNorm are averaged, not recomputed: each rank reads only its rows"
    found = in_ranks(2, messages_of, **arguments)[0]
    assert sum(each.startswith(expected) for each in found) == count
    assert not messages_of(**arguments)


def test_averages_that_have_not_changed_and_modules_without_batch_norm_need_no_pass():
    class Passes(AbstractHook):
        count = 0

        def before_batch(self, stream_name):
            self.count += stream_name == "train" and not self.main_loop.training

    def passes(module, **arguments):
        hook = Passes()
        model = TorchModel(module, optimizer=SGD, device="cpu")
        with MainLoop(model, Both(), [AverageWeights(**arguments), hook], on_unused_sources="ignore") as loop:
            loop.epoch(["train"], ["valid"])
            loop.epoch([], ["valid"])
        return hook.count

    assert passes(Net(nn.BatchNorm1d(4)), kind="swa") == 6
    assert passes(Net(nn.BatchNorm1d(4)), decay=0.9) == 0
    assert passes(Push(), kind="swa") == 0
    with pytest.raises(HookError, match="batch_norm: recompute: the module has no BatchNorm"):
        passes(Push(), kind="swa", batch_norm="recompute")


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({}, "half_life", "give one of half_life and decay"),
        ({"decay": 0.9, "half_life": "5 updates"}, "half_life", "half_life is 5 updates, and decay 0.9"),
        ({"kind": "swa", "batch_norm": "none"}, "batch_norm", "'none'"),
        ({"decay": 1.0}, "decay", "1.0 is not a decay between 0 and 1"),
        ({"decay": True}, "decay", "True is not a decay between 0 and 1"),
        ({"half_life": "1 updates", "every": "5000 updates"}, "half_life", "0.0 is not a decay between 0 and 1"),
        ({"half_life": "5 epochs"}, "half_life", "'5 epochs' is not an interval"),
        ({"half_life": "5 updates", "every": "1 epochs"}, "half_life", "give decay instead"),
        ({"kind": "swa", "decay": 0.9}, "decay", "remove it"),
        ({"kind": "sma"}, "kind", "'sma'"),
        ({"decay": 0.9, "every": "5 minutes"}, "every", "'5 minutes' is not an interval"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        AverageWeights(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_an_optimizer_that_averages_itself_is_an_error():
    class Free(torch.optim.SGD):
        def train(self): ...

        def eval(self): ...

    with pytest.raises(HookError, match="Free averages the weights itself"):
        run(TorchModel(Push(), optimizer=Factory(Free, lr=0.1)), [{"x": [0.0]}], AverageWeights(decay=0.9))


@pytest.mark.parametrize("wrong", [{"b": torch.ones(())}, {"w": torch.ones(2)}, {"w": torch.ones((), dtype=torch.int)}])
def test_weights_that_do_not_fit_are_an_error(wrong):
    with pytest.raises(ArgumentError, match=r"'b'|'w' is"):
        TorchModel(Push(), optimizer=SGD).evaluation_weights = wrong
