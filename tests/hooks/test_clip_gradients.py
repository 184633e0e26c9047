"""ClipGradients: equals torch's functions, for windows, several kinds of gradients and several updates."""

import math

import numpy as np
import pytest
import torch
from doubles import SGD, Embedded, Streams, run as train, state_of, words
from torch import nn

from emrun import Factory, MainLoop, TorchModel, read_steps
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import ClipGradients


def by_hand(clip, accumulate, **optimizer):
    """Train as a script would."""
    torch.manual_seed(0)
    net = Embedded(scale=50)
    sgd = torch.optim.SGD(net.parameters(), **optimizer)
    norms = []
    data = [torch.from_numpy(batch["x"]) for batch in words()]
    for first in range(0, len(data), accumulate):
        sgd.zero_grad()
        window = data[first : first + accumulate]
        for x in window:
            loss = net(x)["loss"].mean()
            (loss * 4 if accumulate > 1 else loss).backward()
        if accumulate > 1:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 4 * len(window)
        norms.append(clip(net.parameters()))
        sgd.step()
    return net, norms


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "clip"),
    [
        ({"norm": 0.5}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
        ({"value": 0.1}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.1)),
    ],
    ids=["norm", "value"],
)
def test_the_weights_equal_those_of_a_loop_by_hand_to_the_last_bit(arguments, clip, accumulate):
    expected, norms = by_hand(clip, accumulate, lr=0.1, momentum=0.9)
    torch.manual_seed(0)
    optimizer = Factory(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = TorchModel(Embedded(scale=50), optimizer=optimizer, accumulate=accumulate, device="cpu")
    train(model, words(), ClipGradients(**arguments))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.module.state_dict().items())
    if "norm" in arguments:
        assert all(norm > 0.5 for norm in norms)


@pytest.mark.parametrize("arguments", [{"norm": 0.5}, {"value": 0.1}])
def test_sparse_gradients_are_clipped_as_dense_ones(arguments):
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = TorchModel(Embedded(sparse, scale=50), optimizer=Factory(torch.optim.SGD, lr=0.1), device="cpu")
        train(model, [{"x": np.array([1, 1, 2])}] * 3, ClipGradients(**arguments))
        ends.append(state_of(model.module))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


def test_the_norm_before_clipping_is_in_the_step_record(train_digits):
    training = train_digits([{"ClipGradients": {"norm": 1e-3}}, {"StopAfter": {"updates": 3}}])
    norms = read_steps(training.output_dir)["gradient_norm"]
    assert len(norms) == 3
    assert all(norm > 0.1 for norm in norms)


def test_each_optimizer_is_clipped_by_itself_and_one_without_gradients_is_skipped(run):
    class Both(TorchModel):
        def train_step(self, inputs):
            outputs = self.forward(inputs)
            self.backward(outputs["loss"].mean())
            for optimizer in self.optimizers.values():
                before = [each.clone() for each in optimizer.param_groups[0]["params"]]
                self.update(optimizer)
                pairs = zip(before, optimizer.param_groups[0]["params"], strict=True)
                moved.append(math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in pairs)))
            return outputs

    moved = []
    names = {"a": r"layers\.0|table", "b": r"layers\.2", "c": "unused"}
    model = Both(
        Embedded(scale=50),
        optimizer={name: Factory(torch.optim.SGD, options={"match": match}, lr=1.0) for name, match in names.items()},
        device="cpu",
    )
    streams = Streams(train=words(1))
    with MainLoop(model, streams, [ClipGradients(norm=0.25)], run=run) as loop:
        loop.epoch(["train"])
    assert moved == pytest.approx([0.25, 0.25, 0.0], rel=1e-4)
    recorded = read_steps(run.directory)
    assert {name for name in recorded if "norm" in name} == {"gradient_norm_a", "gradient_norm_b"}


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({}, "norm", "give norm or value"),
        ({"norm": 1.0, "value": 1.0}, "norm", "list the hook twice"),
        ({"norm": 0}, "norm", "0 is not a positive number"),
        ({"value": math.nan}, "value", "nan is not a positive number"),
        ({"norm": True}, "norm", "True is not a positive number"),
        ({"norm": "1"}, "norm", "'1' is not a positive number"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        ClipGradients(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_norm_that_is_not_finite_is_not_hidden():
    model = TorchModel(Embedded(scale=50), optimizer=SGD)
    with torch.no_grad():
        model.module.layers[2].weight.fill_(math.inf)
    train(model, words()[:1], ClipGradients(norm=1.0), on_nan_loss="ignore")
    assert not torch.isfinite(model.module.layers[0].weight).all()


def test_a_model_without_a_module_is_an_error(scripted, numbers):
    with pytest.raises(HookError, match="ClipGradients needs a TorchModel, not Scripted"):
        MainLoop(scripted(), numbers, [ClipGradients(norm=1.0)]).__enter__()


def test_the_yaml_of_the_docstring(in_docstring, train_digits):
    train_digits([*in_docstring(ClipGradients), {"StopAfter": {"updates": 1}}])
