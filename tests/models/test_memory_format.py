"""`memory_format`: weights and inputs lie in another order in memory; shapes, values and checkpoints are the same."""

import pytest
import torch
from doubles import SGD, Streams, state_of
from safetensors.torch import load_file
from torch import nn

from emrun import MainLoop, TorchModel
from emrun.base.errors import ArgumentError

LAST = torch.channels_last


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 1)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.is_contiguous(memory_format=LAST))
        return {"loss": self.head(self.layers(x).mean((2, 3))).square()}


def trained(module=None, memory_format=None, **arguments):
    torch.manual_seed(1)
    batches = [{"x": torch.randn(2, 3, 6, 6)} for _ in range(3)]
    model = TorchModel(module or Net(), optimizer=SGD, device="cpu", memory_format=memory_format, **arguments)
    with MainLoop(model, Streams(train=batches)) as loop:
        loop.epoch(["train"])
    return model


def close(one, other):
    states = state_of(one.module), state_of(other.module)
    return all(torch.allclose(each, states[1][name], atol=1e-6) for name, each in states[0].items())


def test_weights_and_inputs_have_the_format_and_results_are_close(tmp_path):
    plain, model = trained(), trained(memory_format="channels_last")
    weight = model.module.layers[0].weight
    assert weight.is_contiguous(memory_format=LAST)
    assert not weight.is_contiguous()
    assert model.module.seen == [True] * 3
    assert plain.module.seen == [False] * 3
    assert close(plain, model)
    model.save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    assert torch.equal(load_file(path)["layers.0.weight"], weight)


def test_a_checkpoint_is_loaded_into_the_format(tmp_path):
    trained().save(tmp_path)
    model = TorchModel(Net(), optimizer=SGD, device="cpu", memory_format="channels_last")
    model.load(tmp_path)
    assert model.module.layers[0].weight.is_contiguous(memory_format=LAST)
    assert close(trained(), model)


def test_volumes_have_a_format_of_their_own():
    model = TorchModel(
        nn.Conv3d(2, 2, 2), ["x"], ["loss"], optimizer=SGD, device="cpu", memory_format="channels_last_3d"
    )
    assert model.module.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not model.module.weight.is_contiguous()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("channels", "memory_format: 'channels' is not one of channels_last, channels_last_3d"),
        ("channels_last_3d", "memory_format: channels_last_3d has no effect: no parameter of Net has 5 dimensions, as"),
    ],
)
def test_wrong_values_are_errors(value, message):
    with pytest.raises(ArgumentError) as caught:
        trained(memory_format=value)
    assert str(caught.value).startswith(message)


@pytest.mark.campaign  # in `make test`, pairs of them: see test_recomputation.py
def test_the_keys_go_together():
    arguments = {"recompute": r"^layers\.0$", "compile": {"backend": "aot_eager"}, "accumulate": 2}
    assert close(trained(accumulate=2), trained(memory_format="channels_last", **arguments))
