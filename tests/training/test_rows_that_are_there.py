"""A rank weighs by the rows that are there, not by those that were drawn: all numbers of ranks give the same."""

import json

import numpy as np
import pytest
import torch
from campaign import thinned
from in_ranks import in_ranks
from torch import nn

from emrun import AbstractHook, MainLoop, TorchModel
from emrun.base.errors import StreamError
from emrun.hooks import ComputeStats, SavePredictions, StopAfter
from emrun.ranks.group import join, ranks

COUNT = 29


class Data:
    """Rows of different lengths, of which the stream leaves out some, or gives two views."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.batch_size, self.views, self.packs = int(rng.integers(1, 9)), rng.random() < 0.3, rng.random() < 0.5
        self.x = rng.normal(size=(COUNT, 4))
        self.there = rng.random(COUNT) < rng.choice([0.3, 0.7, 1.0])
        self.there[rng.integers(COUNT)] = True
        self.length = rng.integers(1, 5, COUNT)

    def batch(self, rows):
        rows = np.repeat(rows[self.there[rows]], 2 if self.views else 1)
        sign = np.where(np.arange(len(rows)) % 2, -1.0, 1.0)[:, None] if self.views else 1.0
        return {"row": rows, "x": self.x[rows] * sign, "length": self.length[rows], "name": [f"{row}" for row in rows]}

    def train_stream(self, ctx):
        for rows in ctx.batches(COUNT, self.batch_size, shuffle=True):
            yield self.batch(rows)

    def valid_stream(self):
        for first in range(0, COUNT, self.batch_size):
            yield self.batch(np.arange(first, min(first + self.batch_size, COUNT)))


class Drops(AbstractHook):
    """Leaves out rows of a batch."""

    reads = ("row",)

    def __init__(self, every):
        super().__init__()
        self.every = every

    def before_batch(self, stream_name, batch):
        kept = np.flatnonzero(batch["row"] % self.every)
        batch.update({name: [each[i] for i in kept] if name == "name" else each[kept] for name, each in batch.items()})


class Net(nn.Module):
    """Pads an output to the longest row of its batch; another output has one number for each column."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.register_buffer("shift", torch.randn(3, dtype=torch.float64).t().bool(), persistent=False)

    def forward(self, x, length):
        found = self.layers(x)[:, 0] + self.shift.sum()
        padded = torch.where(torch.arange(int(length.max()))[None] < length[:, None], found[:, None], 0.0)
        return {"found": found, "padded": padded, "columns": x.sum(0).repeat(10), "loss": (found - x.sum(1)) ** 2}


class Noted(AbstractHook):
    """Notes the data of each epoch."""

    reads = ()

    def __init__(self):
        super().__init__()
        self.epochs = []

    def after_epoch(self, epoch_data):
        self.epochs.append({stream: dict(values.get("loss", {})) for stream, values in epoch_data.items()})


def results(seed, place):
    """Return the statistics of a training, its weights, its updates and its predictions; `empty` after an error."""
    rng = np.random.default_rng(seed)
    data, every = Data(seed), int(rng.choice([1000, 2, 3]))
    torch.manual_seed(seed + 100 * join().rank)  # each rank draws its own weights
    parts = {"micro_batch_size": 2, "outputs": ["found", "padded", "loss"]}
    more = [{}, {"accumulate": 3}, parts][int(rng.integers(3))]
    model = TorchModel(Net(), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), **more)
    if ranks().is_first:
        torch.manual_seed(seed)
        for parameter in model.module.parameters():
            nn.init.normal_(parameter)
    noted, file = Noted(), place / f"{seed}-{ranks().size}.jsonl"
    before = [*[Drops(every)] * (every < COUNT), ComputeStats({"loss": ["mean", "count", "std"]}), noted]
    hooks = [*before, SavePredictions("valid", file), StopAfter(epochs=2)]
    policies = {f"on_{name}": "ignore" for name in ("empty_batch", "empty_stream", "unused_sources")}
    if rng.random() < 0.5:
        policies["on_empty_batch"] = "error"
    if rng.random() < 0.1:
        policies["fixed_batch_size"] = data.batch_size
    loop = MainLoop(model, data, hooks, extra_streams=["valid"], skip_zeroth_epoch=True, **policies)
    try:
        loop.run_training()
    except StreamError as error:
        assert "on_empty_batch" in str(error)
        return "empty"
    weights = torch.cat([each.detach().ravel() for each in model.module.parameters()])
    return noted.epochs, weights.numpy(), (loop.iterations_done, loop.updates_done), file


def rows_of(file):
    """Return the names and all numbers of the rows of predictions."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [list(row) for row in rows], np.concatenate([[], *(np.ravel(each) for row in rows for each in row.values())])


def check(seeds, size, place):
    (expected,) = in_ranks(1, lambda: [results(seed, place) for seed in seeds])
    found = in_ranks(size, lambda: [results(seed, place) for seed in seeds])[0]
    for seed, one, other in zip(seeds, expected, found, strict=True):
        if "empty" in (one, other):
            assert one == other, seed
            continue
        (epochs, weights, done, file), (others, its_weights, its_done, its_file) = one, other
        assert its_done == done, seed
        assert len(others) == len(epochs)
        for epoch, other in zip(epochs, others, strict=True):
            assert other.keys() == epoch.keys()
            for stream in epoch:
                assert other[stream] == pytest.approx(epoch[stream], abs=1e-9, nan_ok=True), (seed, stream)
        np.testing.assert_allclose(its_weights, weights, rtol=0, atol=1e-9, err_msg=str(seed))
        (names, numbers), (its_names, its_numbers) = rows_of(file), rows_of(its_file)
        assert its_names == names, seed
        np.testing.assert_allclose(its_numbers, numbers, rtol=0, atol=1e-9, err_msg=str(seed))


CASES = [(2, 8, 1), (3, 8, 4), (2, 0, 4), *((size, first, 20) for size in (2, 3) for first in range(0, 200, 20))]


@pytest.mark.parametrize(("size", "first", "count"), thinned(CASES, CASES[:1]))
def test_rows_that_are_left_out_added_or_padded_give_the_results_of_one_process(size, first, count, tmp_path):
    check(range(first, first + count), size, tmp_path)
