"""SkipSpike: the updates that a list of values by hand would skip."""

from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, Push, run as train
from in_ranks import in_ranks
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel, create_training, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import ClipGradients, SkipSpike
from emrun.ranks.group import join


class Scaled(nn.Module):
    """Its loss and its gradient are the mean of x, as long as its weight is 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": self.w * x}


class Weights(AbstractHook):
    every_rank = True

    def __init__(self):
        super().__init__()
        self.weights = []

    def after_batch(self):
        self.weights.append(self.main_loop.model.module.w.item())


VALUES = [1, 2, 3, 100, 2, 30, float("nan"), 3, float("inf"), 2, 40, 40, 40, 40, 40, 2]


def skipped_by_hand(values, factor, window):
    kept, found = [], []
    for value in values:
        last = kept[-window:]
        finite = np.isfinite(value)
        found.append(bool(not finite or (len(last) == window and value > factor * median(last))))
        if finite:
            kept.append(value)
    return found


@pytest.mark.parametrize("variable", ["gradient_norm", "loss"])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_the_updates_that_are_skipped(variable, window, caplog):
    caplog.set_level("INFO")
    model, seen = TorchModel(Scaled(), optimizer=Factory(torch.optim.SGD, lr=1e-9), device="cpu"), Weights()
    with torch.no_grad():
        model.module.w.data = torch.ones((), dtype=torch.double)
    hook = SkipSpike(factor=5.0, window=window, variable=variable)
    train(model, [{"x": [value]} for value in map(float, VALUES)], hook, ClipGradients(norm=1e-3), seen)
    changed = np.diff([1.0, *seen.weights]) != 0
    expected = skipped_by_hand(VALUES, 5.0, window)
    assert (~changed).tolist() == expected
    assert caplog.text.count("SkipSpike skips the update") == sum(expected)
    assert "SkipSpike skips the update of iteration 7: " in caplog.text


class Weighted(Scaled):
    """Its examples have weights."""

    def forward(self, x, weight):
        return {**super().forward(x), "example_weight": weight}


class Own(TorchModel):
    """Trains in its own way."""

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.backward(outputs["loss"].mean())
        self.update(self.optimizer)
        return outputs


LOSSES = [[1, 1, 1, 1], [1, 1, 2, 2], [2, 2, 9, 9], [9, 9, 3, 3], [1, 1, 1, 1]]  # batches of two examples for each rank
WEIGHTS = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


def weight_after_spikes(model, module):
    """Train on the ranks, if there are several; return the weight after each update."""
    join()
    model, seen = model(module(), optimizer=Factory(torch.optim.SGD, lr=0.01), device="cpu"), Weights()
    rows = zip(LOSSES, WEIGHTS, strict=True)
    batches = [{"x": np.array(x, np.float32), "weight": np.array(weight, np.float32)} for x, weight in rows]
    train(model, batches, SkipSpike(factor=2.5, variable="loss", window=2), seen)
    return seen.weights


@pytest.mark.parametrize(
    ("model", "module"), thinned([(TorchModel, Weighted), (Own, Scaled)], [(TorchModel, Weighted)])
)
def test_ranks_skip_the_updates_of_one_process_by_the_loss_of_all_their_examples(model, module):
    expected = weight_after_spikes(model, module)
    assert 0 < np.count_nonzero(np.diff(expected) == 0) < 4
    for found in in_ranks(2, weight_after_spikes, model, module):
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_count_is_in_the_data_of_the_epoch():
    class Data(AbstractHook):
        def after_epoch(self, epoch_data):
            self.found = epoch_data["train"]["skipped_updates"]

    data = Data()
    train(TorchModel(Scaled(), optimizer=SGD), [{"x": [float(value)]} for value in (1, 1, 90, 1)],
          SkipSpike(window=2), data)  # fmt: skip
    assert data.found == 1


@pytest.mark.parametrize(("keep", "kept"), thinned([(0, []), (1, ["1"]), (3, ["1", "2"])], [(1, ["1"])]))
def test_the_first_skipped_updates_are_kept_and_not_again_by_a_resume(doomed, monkeypatch, caplog, keep, kept):
    caplog.set_level("INFO")
    monkeypatch.chdir(doomed)
    monkeypatch.syspath_prepend(doomed)
    hooks = f"hooks=[{{SkipSpike: {{factor: 5.0, window: 2, keep: {keep}}}}}, {{SaveEvery: {{every: 2 iterations}}}}]"
    overrides = ["dataset.large=[13]", hooks, "hooks.StopAfter.epochs=2"]
    loop = create_training("config.yaml", output_dir="run", overrides=overrides).main_loop
    loop.run_training()
    folder = Path("run/failures")
    found = {path.name: path.stat().st_ino for path in folder.iterdir()} if folder.exists() else {}
    assert sorted(found) == kept
    assert caplog.text.count("saved the batch of the skipped update") == len(kept)
    state = loop.hooks[0].state_dict()
    assert state["kept"] == len(kept)
    resumed = resume_training("run", checkpoint_name="iteration-2").main_loop
    resumed.run_training()
    assert resumed.hooks[0].state_dict() == state
    assert {name: (folder / name).stat().st_ino for name in found} == found
    assert len(list(folder.iterdir()) if folder.exists() else []) == len(kept)


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"factor": 1.0}, "factor", "1.0 is not a number above 1"),
        ({"factor": True}, "factor", "True is not a number above 1"),
        ({"variable": "accuracy"}, "variable", "'accuracy' is not one of"),
        ({"window": 0}, "window", "0 is not a whole number"),
        ({"keep": -1}, "keep", "-1 is not a whole number"),
        ({"keep": 6}, "keep", "6 is too many: a run keeps its 5 newest"),
        ({"variable": "loss"}, "variable", "with model.accumulate, the loss of an update is not known"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        SkipSpike(**arguments, model=TorchModel(Push(), optimizer=SGD, accumulate=2))
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_model_without_a_module_is_an_error(scripted, numbers):
    with pytest.raises(HookError, match="SkipSpike needs a TorchModel, not Scripted"):
        MainLoop(scripted(), numbers, [SkipSpike()])


def test_the_yaml_of_the_docstring(in_docstring, train_digits):
    train_digits([*in_docstring(SkipSpike), {"StopAfter": {"updates": 5}}])
