"""Transforms of pictures."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from emrun.datasets.image_folder import ImageFolder
from emrun.stream_context import StreamContext

READERS = [("loop", "1"), ("loop", "4"), ("thread", "1"), ("thread", "4"), ("worker", "1"), ("worker", "4")]
AUGMENT = [
    {"ColorJitter": {"brightness": 0.3, "hue": 0.1}},
    {"RandomApply": {"transforms": [{"RandomRotation": {"degrees": 30}}], "p": 0.5}},
    "GaussianNoise",
    "AugMix",
    {"RandomChoice": {"transforms": ["RandomHorizontalFlip", "RandomErasing"]}},
]


@pytest.fixture
def pictures(tmp_path):
    """Return a folder with twelve images of two classes."""
    random = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = random.integers(0, 255, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def by_hand(folder, ctx):
    """Return the images, transformed one by one under the seed of each."""
    from torchvision.transforms import v2

    steps = v2.Compose(
        [
            v2.ColorJitter(brightness=0.3, hue=0.1),
            v2.RandomApply([v2.RandomRotation(30)], p=0.5),
            v2.GaussianNoise(),
            v2.AugMix(),
            v2.RandomChoice([v2.RandomHorizontalFlip(), v2.RandomErasing()]),
        ]
    )
    found = []
    for row, file in enumerate(sorted(folder.rglob("*.png"))):
        torch.manual_seed(ctx.seed_for(row) % 2**63)
        pixels = np.asarray(Image.open(file)).transpose(2, 0, 1)
        found.append(steps(torch.from_numpy(pixels.copy())).numpy())
    return np.stack(found)


def made(dataset, ctx):
    """Return the batches of a training pass as one: source -> values in the order of the examples."""
    batches = list(dataset.train_stream(ctx))
    order = np.argsort(np.concatenate([batch["position"] for batch in batches]))
    assert len(order) == 12
    return {name: np.concatenate([batch[name] for batch in batches])[order] for name in batches[0]}


@pytest.mark.parametrize(("read_by", "threads"), READERS)
def test_the_bytes_are_those_of_the_transforms_called_by_hand_for_every_reader(pictures, monkeypatch, read_by, threads):
    monkeypatch.setitem(os.environ, "EMRUN_THREADS", threads)
    dataset = ImageFolder(pictures, augment=AUGMENT, batch_size=5, dtype="uint8")
    ctx = StreamContext("train", seed=3, epoch=2, read_by=read_by)
    np.testing.assert_array_equal(made(dataset, ctx)["image"], by_hand(pictures, ctx))
