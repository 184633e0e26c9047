"""Batches that are read ahead: a stream may use again what it has yielded."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import wrapped

from emrun.base.encoding import digest
from emrun.streams.reuse import copied

FILE = Path(__file__).with_name("reusing_streams.py")
SPEC = importlib.util.spec_from_file_location("reusing_streams", FILE)
streams = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(streams)


def content(batch):
    """Return a checksum; of a sparse tensor and a memoryview, of their numbers."""
    x = batch["x"]
    dense = x.to_dense() if isinstance(x, torch.Tensor) else np.asarray(x) if isinstance(x, memoryview) else x
    return digest({**batch, "x": dense})


def seen(kind, **ahead):
    with wrapped(streams.KINDS[kind], name="train", **ahead) as stream:
        return [content(batch) for batch in (list(stream) if ahead else stream)]


@pytest.mark.parametrize("kind", streams.KINDS)
def test_what_is_filled_again_gives_the_batches_that_it_gives_without_reading_ahead(kind):
    assert seen(kind, buffer=8) == seen(kind)


SENT = ["one_array", "one_large_tensor", "one_list", "a_masked_array"]


@pytest.mark.parametrize("kind", thinned(SENT, ["one_large_tensor", "a_masked_array"]))
def test_worker_processes_send_copies(kind):
    assert seen(kind, workers=1, start_method="fork") == seen(kind)


def test_a_copy_has_the_type_the_layout_and_the_gradient_of_what_was_yielded():
    class Own(np.ndarray):
        pass

    by_column = np.asfortranarray(np.ones((2, 3), np.float16))
    batch = {
        "own": by_column.view(Own), "channels": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "weight": torch.ones(2, requires_grad=True), "number": np.float32(1), "name": "a", "other": object(),
    }  # fmt: skip
    (made,) = copied(iter([batch]))
    assert type(made["own"]) is Own
    assert made["own"].flags.f_contiguous
    assert made["own"].base is not by_column
    assert made["channels"].stride() == batch["channels"].stride()
    assert made["weight"].requires_grad
    assert made["weight"].is_leaf
    assert all(made[name] is batch[name] for name in ("number", "name", "other"))


def test_the_stream_is_closed_with_its_copies():
    closed = []

    def batches():
        try:
            yield {"x": [1]}
            yield {"x": [2]}
        finally:
            closed.append(True)

    made = copied(batches())
    next(made)
    made.close()
    assert closed == [True]


def test_batches_of_a_dataset_that_makes_new_arrays_are_not_copied():
    class Data:
        fresh_batches = False

        def train_stream(self):
            yield {"x": X}

    X = np.ones(3)
    for Data.fresh_batches in (False, True):
        with wrapped(Data().train_stream, name="train", buffer=2) as stream:
            (batch,) = stream
            assert (batch["x"] is X) is Data.fresh_batches
