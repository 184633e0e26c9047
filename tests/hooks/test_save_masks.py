"""SaveMasks: a picture for each mask, by its id; a folder that is complete or absent."""

import csv
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from emrun import MainLoop
from emrun.base.errors import ArgumentError, MissingExtra, StorageError, StreamError
from emrun.hooks import SaveMasks
from emrun.hooks.save_masks import PALETTE

CLASSES = torch.arange(5 * 4 * 6).reshape(5, 4, 6) % 7


class Pictures:
    """Five examples in two batches."""

    def __init__(self, **sources):
        self.sources = sources

    def valid_stream(self):
        for rows in (slice(0, 3), slice(3, 5)):
            yield {"x": list(range(5))[rows], **{name: values[rows] for name, values in self.sources.items()}}

    train_stream = valid_stream


@pytest.fixture
def save(tmp_path, scripted):
    """Evaluate a stream and return the pictures by their ids."""

    def run(masks, sources=None, **arguments):
        model = scripted(lambda batch: {"mask": masks[batch["x"]]})
        hook = SaveMasks("mask", output_dir=tmp_path, **arguments)
        loop = MainLoop(model, Pictures(**(sources or {})), [hook], on_unused_sources="ignore")
        with loop:
            loop.run_evaluation("valid")
        folder = tmp_path / "masks" / "valid"
        rows = list(csv.DictReader((folder / "masks.csv").read_text().splitlines()))
        assert sorted([row["file"] for row in rows] + ["masks.csv"]) == sorted(each.name for each in folder.iterdir())
        pictures = {}
        for row in rows:
            with Image.open(folder / row["file"]) as image:
                pictures[row["id"]] = (image.mode, np.asarray(image))
        return pictures

    return run


def test_classes_have_colors_and_keep_their_numbers(save):
    found = save(CLASSES, {"id": ["a/1", "a_1", "..", "b", "c"]})
    assert list(found) == ["a/1", "a_1", "..", "b", "c"]
    for (mode, pixels), mask in zip(found.values(), CLASSES.numpy(), strict=True):
        assert mode == "P"
        np.testing.assert_array_equal(pixels, mask)


def test_the_colors_are_those_of_pascal_voc():
    assert list(PALETTE[:18]) == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, 0, 0, 128, 128, 0, 128]
    assert len({PALETTE[at : at + 3] for at in range(0, 768, 3)}) == 256


@pytest.mark.parametrize(
    ("masks", "arguments", "expected"),
    [
        (CLASSES > 3, {}, (CLASSES > 3) * 255),
        ((CLASSES / 7)[:, None], {}, (CLASSES / 7 * 255).round()),
        (CLASSES, {"factor": 50.0}, (CLASSES * 50).clip(0, 255)),
        (-CLASSES.float(), {"factor": 255}, CLASSES * 0),
        (torch.nn.functional.one_hot(CLASSES).permute(0, 3, 1, 2).float(), {}, CLASSES),
    ],
    ids=["booleans", "probabilities", "factor", "negative", "logits"],
)
def test_other_values(save, masks, arguments, expected):
    for (_, pixels), wanted in zip(save(masks, **arguments).values(), expected.numpy(), strict=True):
        np.testing.assert_array_equal(pixels, wanted)


def test_masks_of_different_sizes(save):
    class Ragged(list):
        def __getitem__(self, rows):
            return [super(Ragged, self).__getitem__(row) for row in rows]

    found = save(Ragged([torch.zeros(3, 2 + row, dtype=torch.bool) for row in range(5)]))
    assert [pixels.shape for _, pixels in found.values()] == [(3, 2 + row) for row in range(5)]


@pytest.mark.parametrize(
    ("masks", "sources", "message"),
    [
        (CLASSES, {"id": list("abcda")}, "two examples have the id 'a'"),
        (CLASSES[:, 0], {}, r"'mask' of '0' is not a mask: shape \(6,\)"),
        (CLASSES[:, None].repeat(1, 2, 1, 1), {}, "only logits, which are floats, have several channels"),
        (CLASSES - 1, {}, r"int64 from -1 to 5, but classes must be from 0 to 255, and floats from 0 to 1"),
        (CLASSES * 1.0, {}, r"float32 from 0 to 6, but classes must be"),
        (CLASSES * float("nan"), {}, "float32 from nan to nan"),
        (CLASSES[:4], {}, "index 4 is out of bounds"),
    ],
)
def test_wrong_batches_leave_no_folder(save, tmp_path, masks, sources, message):
    with pytest.raises((StreamError, IndexError), match=message):
        save(masks, sources)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("factor", [0, -1.0, True, "255"])
def test_wrong_arguments(factor):
    with pytest.raises(ArgumentError, match=r"factor: .* is not a number above 0"):
        SaveMasks("mask", factor=factor)


def test_without_pillow_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"SaveMasks needs pillow.*'emrun\[data\]'"):
        SaveMasks("mask")


def test_the_next_evaluation_replaces_the_folder(save, tmp_path):
    save(CLASSES, {"id": list("abcde")})
    (tmp_path / "masks" / ".valid.tmp").mkdir()  # of a process that was killed
    assert list(save(CLASSES, {"id": list("vwxyz")})) == list("vwxyz")
    assert [path.name for path in (tmp_path / "masks").iterdir()] == ["valid"]


def test_a_disk_that_is_full_leaves_the_folder_before(save, tmp_path, monkeypatch):
    save(CLASSES, {"id": list("abcde")})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*valid: the disk is full"):
        save(CLASSES, {"id": list("vwxyz")})
    assert [path.name for path in (tmp_path / "masks").iterdir()] == ["valid"]
    assert (tmp_path / "masks" / "valid" / "a.png").exists()


def test_the_yaml_in_its_docstring_evaluates(tmp_path, scripted, in_docstring):
    (entry,) = in_docstring(SaveMasks)
    model = scripted(lambda batch: {"mask": CLASSES[batch["x"]]})
    loop = MainLoop(model, Pictures(), [SaveMasks(**entry["SaveMasks"], output_dir=tmp_path)])
    loop.run_evaluation("valid")
    assert len(list((tmp_path / "masks" / "valid").glob("*.png"))) == 5
