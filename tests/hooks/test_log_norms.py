"""LogNorms: the norms of a loop by hand, in the step record and in the data of the epoch."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from doubles import SGD, Embedded, Push, Streams, run as train, words
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel, create_training, read_steps
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import LogNorms


class EpochData(AbstractHook):
    """Keeps the data of the epochs."""

    def __init__(self):
        super().__init__()
        self.data = []

    def after_epoch(self, epoch_data):
        values = epoch_data["train"].items()
        self.data.append({name: value["mean"] for name, value in values if not name.startswith("learning_rate")})


PARTS = {"": "", "(^layers.0)": "layers.0", "(table|unused)": ("table", "unused")}


def by_hand():
    """Return name -> the values of the updates, as a script would calculate them."""
    torch.manual_seed(0)
    net, found = Embedded(), {}
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)

    def add(value, tensors):
        for end, prefix in PARTS.items():
            parts = [each for name, each in tensors.items() if name.startswith(prefix)]
            norm = torch.cat([each.flatten().double() for each in parts]).norm().item() if parts else 0.0
            found.setdefault(f"{value}{end}", []).append(norm)

    for batch in words():
        adam.zero_grad()
        net(torch.from_numpy(batch["x"]))["loss"].mean().backward()
        before = {name: each.detach().clone() for name, each in net.named_parameters()}
        add("gradient_norm", {name: each.grad for name, each in net.named_parameters() if each.grad is not None})
        adam.step()
        add("weight_norm", dict(net.named_parameters()))
        add("change", {name: before[name] - each for name, each in net.named_parameters()})
        add("before", before)
    for end in PARTS:
        pairs = zip(found.pop(f"change{end}"), found.pop(f"before{end}"), strict=True)
        found[f"update_ratio{end}"] = [change / before for change, before in pairs]
    return found


@pytest.mark.parametrize("sparse", [False, True])
def test_the_values_are_those_of_a_loop_by_hand(run, sparse):
    torch.manual_seed(0)
    optimizer = Factory(torch.optim.SGD, lr=0.1) if sparse else Factory(torch.optim.AdamW, lr=0.1)
    model = TorchModel(Embedded(sparse), optimizer=optimizer, device="cpu")
    seen, hook = EpochData(), LogNorms(match=["^layers.0", "table|unused"])
    with MainLoop(model, Streams(train=words()), [hook, seen], run=run) as loop:
        loop.epoch(["train"])
    steps, expected = read_steps(run.directory), by_hand()
    assert set(hook.writes) == {f"{name}/mean" for name in expected}
    for name, values in expected.items():
        if not sparse:
            np.testing.assert_allclose(steps[name], values, rtol=1e-5)
        np.testing.assert_allclose(seen.data[0][name], np.mean(steps[name]), rtol=1e-6)
    np.testing.assert_allclose(steps["gradient_norm"][0], expected["gradient_norm"][0], rtol=1e-5)


def test_the_norm_equals_that_of_torch_to_the_last_bit(run):
    class Torch(AbstractHook):
        def before_update(self, model):
            gradients = [each.grad for each in model.module.parameters() if each.grad is not None]
            self.main_loop.record("of torch", nn.utils.get_total_norm(gradients))

    torch.manual_seed(0)
    model = TorchModel(nn.Linear(3, 2), ["x"], ["loss"], optimizer=SGD, device="cpu")
    data = type("Own", (), {"train_stream": lambda self: iter([{"x": np.ones((2, 3), np.float32)}] * 3)})()
    with MainLoop(model, data, [LogNorms(), Torch()], run=run) as loop:
        loop.epoch(["train"])
    steps = read_steps(run.directory)
    assert steps["gradient_norm"].tolist() == steps["of torch"].tolist()
    assert (steps["gradient_norm"] > 0.1).all()


@pytest.mark.parametrize(("accumulate", "measured"), [(1, [1, 3, 5]), (2, [3]), (4, [5])])
def test_every_counts_updates(run, accumulate, measured):
    torch.manual_seed(0)
    seen = EpochData()
    model = TorchModel(Embedded(), optimizer=SGD, accumulate=accumulate)
    with MainLoop(model, Streams(train=words()), [LogNorms(every="2 updates"), seen], run=run) as loop:
        loop.epoch(["train"])
        loop.epoch(["train"])
    norms = read_steps(run.directory)["weight_norm"]
    assert np.flatnonzero(~np.isnan(norms[:6])).tolist() == measured
    assert seen.data[0]["weight_norm"] == pytest.approx(np.nanmean(norms[:6]))
    assert seen.data[1]["weight_norm"] == pytest.approx(np.nanmean(norms[6:]))


def test_an_epoch_without_a_measured_update_has_no_values_and_weights_of_0_have_the_ratio_0():
    seen = EpochData()
    train(TorchModel(Push(), optimizer=SGD), [{"x": [0.0]}] * 3, LogNorms(every="5 updates"), seen, epochs=2)
    assert [sorted(each) for each in seen.data] == [[], ["gradient_norm", "update_ratio", "weight_norm"]]
    model, seen = TorchModel(Push(), optimizer=SGD), EpochData()
    with torch.no_grad():
        model.module.w.zero_()
    train(model, [{"x": [0.0]}] * 2, LogNorms(), seen)
    assert seen.data[0] == pytest.approx({"gradient_norm": 1.0, "weight_norm": 0.15, "update_ratio": 0.5})


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.b(self.a(x)).squeeze(-1) ** 2}


def test_several_optimizers_have_values_of_what_matches_their_own_parameters():
    torch.manual_seed(0)
    forms = {name: Factory(torch.optim.SGD, lr=0.1, options={"match": f"^{name}"}) for name in "ab"}
    seen, norms = EpochData(), LogNorms(match=["^a", "bias"])
    data = Streams(train=[{"x": np.ones((2, 3), np.float32)}] * 2)
    with MainLoop(TorchModel(Pair(), optimizer=forms, device="cpu"), data, [norms, seen]) as loop:
        loop.epoch([], ["train"])
        loop.epoch(["train"])
    ends = ["_a", "_a(^a)", "_a(bias)", "_b", "_b(bias)"]
    values = [f"{value}{end}" for value in ("gradient_norm", "weight_norm", "update_ratio") for end in ends]
    assert sorted(seen.data[1]) == sorted(values)
    assert set(values) <= {each.removesuffix("/mean") for each in norms.writes}
    assert all(seen.data[1][name] > 0 for name in values)


def test_an_expression_for_parameters_without_an_optimizer_is_an_error():
    form = Factory(torch.optim.SGD, lr=0.1, options={"match": "^a"})
    with pytest.raises(ArgumentError, match=r"'\^b' matches only parameters that no optimizer trains"):
        MainLoop(TorchModel(Pair(), optimizer=form, device="cpu"), Streams(train=words()), [LogNorms(match="^b")])


def test_half_precision_is_measured_in_single_precision(run):
    module = nn.Linear(64, 64).bfloat16()
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(0.0)
    model = TorchModel(module, ["x"], ["loss"], optimizer=Factory(torch.optim.SGD, lr=1e-9), device="cpu")
    data = type("Own", (), {"train_stream": lambda self: iter([{"x": np.ones((1, 64), np.float32)}])})()
    with MainLoop(model, data, [LogNorms(match="weight")], run=run) as loop:
        loop.epoch(["train"])
    assert read_steps(run.directory)["weight_norm(weight)"].tolist() == [64.0]


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"match": "^boddy"}, "match", "'^boddy' matches none of the parameters"),
        ({"match": 5}, "match", "5 is neither"),
        ({"every": 5}, "every", "write for example '5 updates'"),
        ({"every": "5 epochs"}, "every", "'5 epochs' is not an interval"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        LogNorms(**arguments, model=TorchModel(Embedded(), optimizer=SGD))
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_model_without_a_module_is_an_error(scripted, numbers):
    with pytest.raises(HookError, match="LogNorms needs a TorchModel, not Scripted"):
        MainLoop(scripted(), numbers, [LogNorms()])


def test_later_hooks_have_the_means(in_docstring, train_digits):
    training = train_digits(
        [
            *in_docstring(LogNorms),
            "LogVariables",
            {"WriteCSV": {"variables": ["gradient_norm(bias)"], "on_missing_variable": "default"}},
        ]
    )
    rows = (training.output_dir / "training.csv").read_text().splitlines()
    assert "gradient_norm(bias)" in rows[0]


def test_later_hooks_of_a_batch_and_rows_between_epochs_have_the_norms(digits_config, tmp_path):
    found = []

    class Reads(AbstractHook):
        def after_batch(self):
            if self.main_loop.training:
                found.append(float(self.main_loop.recorded["gradient_norm"]))

    hooks = [{"ComputeStats": {"variables": ["loss"]}}, "LogNorms", {"WriteSQLite": {"every": "5 updates"}}]
    training = create_training(digits_config([*hooks, {"StopAfter": {"epochs": 1}}]), output_dir=tmp_path / "run")
    training.main_loop.change_hooks([*training.main_loop.hooks, Reads()])
    training.main_loop.run_training()
    with closing(sqlite3.connect(tmp_path / "run" / "metrics.sqlite")) as database:
        rows = database.execute("SELECT value FROM step_values WHERE name = 'gradient_norm'").fetchall()
    assert [value for (value,) in rows] == [pytest.approx(sum(found[at : at + 5]) / 5) for at in (0, 5, 10)]
