"""Pictures, texts and histograms that hooks show."""

import numpy as np
import pytest
import torch
from doubles import SGD, XY, Affine, Streams

from emrun import AbstractHook, TorchModel
from emrun.hooks import StopAfter
from emrun.loop.main_loop import MainLoop
from emrun.shown import Histogram, Picture, Text

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (7).to_bytes(4, "big") + (5).to_bytes(4, "big") + bytes(4)


def test_a_picture_knows_its_size():
    assert Picture(PNG).size == (7, 5)


@pytest.mark.parametrize("wrong", [b"", b"GIF89a", "text", PNG[:20]])
def test_a_picture_that_is_not_a_png_is_an_error(wrong):
    with pytest.raises(ValueError, match="PNG"):
        Picture(wrong)


def test_a_histogram_has_the_finite_values():
    values = torch.tensor([[1, float("nan")], [float("inf"), -2]], dtype=torch.bfloat16)
    np.testing.assert_array_equal(Histogram(values).finite(), [1, -2])


def loop_with(*hooks, **main_loop):
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    return MainLoop(model, Streams(train=XY, valid=XY), hooks, skip_zeroth_epoch=True, **main_loop)


class Shows(AbstractHook):
    """Shows something after each epoch; a later hook reads it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def after_stream(self, stream_name):
        self.main_loop.show(f"{stream_name}/note", Text(stream_name))

    def after_epoch(self, epoch_id):
        if epoch_id == 1:
            self.main_loop.show("once", Text("epoch 1"))

    def after_epoch_profile(self, epoch_id):
        self.seen.append({name: each.text for name, each in self.main_loop.shown.items()})


def test_what_hooks_show_is_there_until_the_next_epoch():
    hook = Shows()
    loop_with(hook, StopAfter(epochs=2), extra_streams=["valid"]).run_training()
    notes = {"train/note": "train", "valid/note": "valid"}
    assert hook.seen == [{**notes, "once": "epoch 1"}, notes]


def test_something_else_cannot_be_shown():
    loop = loop_with(StopAfter(epochs=1))
    with pytest.raises(TypeError, match=r"show\('x', \.\.\.\): 3\.5 is not a Picture, a Text or a Histogram"):
        loop.show("x", 3.5)
