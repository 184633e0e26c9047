"""Sources that are scaled on the device."""

import numpy as np
import pytest
import torch
from doubles import Keep, Two, evaluate, identity
from torch import nn

from emrun import Factory, TorchModel
from emrun.base.errors import ArgumentError, StreamError

BYTES = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2) * 10
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]


class KeepOne(Keep):
    def forward(self, a):
        return self.keep(a)


def scaled(source=BYTES, module=None, **entry):
    module = module or KeepOne()
    evaluate(TorchModel(module, inputs={"a": {"source": "x", **entry}}), [{"x": source}])
    return module.called[0]


@pytest.mark.parametrize("form", [lambda each: each, torch.from_numpy, list, lambda each: each.astype(np.int64)])
def test_bytes_that_are_divided_by_255_are_the_floats_of_a_dataset_bit_for_bit(form):
    found = scaled(form(BYTES), scale=255)
    assert found.dtype is torch.float32
    assert found.numpy().tobytes() == (BYTES / np.float32(255)).tobytes()


@pytest.mark.parametrize("module_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_source_is_divided_shifted_and_divided_by_channel_in_float32(module_dtype):
    along = [np.array(each, np.float32).reshape(3, 1, 1) for each in (MEAN, STD)]
    expected = (BYTES / np.float32(255) - along[0]) / along[1]
    found = scaled(module=KeepOne().to(module_dtype), scale=255, mean=MEAN, std=STD)
    assert torch.equal(found, torch.from_numpy(expected).to(module_dtype))


def test_a_scaled_source_has_the_dtype_that_inputs_says():
    assert scaled(scale=2, dtype="float16").dtype is torch.float16


def test_losses_get_the_scaled_source_and_the_batch_keeps_its_own():
    batch = {"x": np.array([[4, 8]], np.uint8)}
    loss = Factory(nn.MSELoss, options={"inputs": ["same", "x"]})
    (data,) = evaluate(identity(inputs={"x": {"source": "x", "scale": 4}}, loss=loss), [batch])
    assert data["loss"].item() == 0
    assert data["same"].tolist() == [[1.0, 2.0]]
    floats = np.array([[4.0, 8.0]], np.float32)
    assert scaled(floats, mean=1, std=2).tolist() == [[1.5, 3.5]]
    assert (batch["x"].tolist(), floats.tolist()) == ([[4, 8]], [[4.0, 8.0]])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"scale": 0}, "inputs.a.scale: 0 would divide by 0"),
        ({"std": [0.1, 0.0]}, "inputs.a.std: [0.1, 0.0] would divide by 0"),
        ({"scale": True}, "inputs.a.scale: True is not a number; write a number, or a list"),
        ({"mean": "0.5"}, "inputs.a.mean: '0.5' is not a number"),
        ({"mean": []}, "inputs.a.mean: None is not a number"),
        ({"std": [0.1, float("nan")]}, "inputs.a.std: nan is not a number"),
        ({"scale": 255, "dtype": "uint8"}, "a: scale gives floating-point numbers; leave out dtype, or write"),
        ({"scale": 255, "dtype": "keep"}, "a: scale gives floating-point numbers; leave out dtype, or write"),
        (
            {"scal": 255},
            "inputs.a.scal: unknown key 'scal'; did you mean 'scale'?; allowed: source, dtype, scale, mean, std, stack",
        ),
    ],
)
def test_a_wrong_scale_is_refused(entry, message):
    with pytest.raises(ArgumentError, match=r"^inputs") as caught:
        TorchModel(KeepOne(), inputs={"a": entry})
    assert message in str(caught.value)


def test_a_source_has_one_scale():
    with pytest.raises(ArgumentError, match=r"source 'x' cannot have two dtypes or scale or mean or std"):
        TorchModel(Two(), inputs={"a": {"source": "x", "scale": 255}, "b": "x"})


@pytest.mark.parametrize("source", [BYTES[:, :2], np.arange(3, dtype=np.uint8)], ids=["two channels", "one axis"])
def test_a_mean_of_another_number_of_channels_is_refused(source):
    with pytest.raises(StreamError, match=r"mean has 3 values, but 'x' is a source of shape .*that of the channels"):
        scaled(source, mean=MEAN)


class OfTwo(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x, other=None):
        return {"y": self.first(x)}
