"""SaveExamples: the worst or the first examples, with pictures or texts; complete folders; bounded memory."""

import csv
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from emrun import MainLoop
from emrun.base.errors import ArgumentError, HookError, MissingExtra, StreamError
from emrun.hooks import SaveExamples
from emrun.hooks.save_examples import picture_of
from emrun.training.create import create_training

LOSSES = torch.tensor([1.0, 5.0, float("nan"), 5.0, float("inf"), 0.0])
IMAGES = torch.arange(6 * 3 * 4 * 5, dtype=torch.uint8).reshape(6, 3, 4, 5)
NAN_FIRST = ["2", "4", "1", "3", "0", "5"]


class Examples:
    """Six examples in two batches."""

    def __init__(self, sources, names=()):
        self.sources, self.names = sources, names

    def classes_names(self):
        return self.names

    def valid_stream(self):
        for rows in (slice(0, 4), slice(4, 6)):
            yield {"x": list(range(6))[rows], **{name: values[rows] for name, values in self.sources.items()}}

    train_stream = valid_stream


@pytest.fixture
def save(tmp_path, scripted):
    """Evaluate a stream and return the rows of examples.csv."""

    def run(sources=None, outputs=None, names=(), stream="valid", **arguments):
        dataset = Examples(sources or {}, names)
        outputs = {"loss": LOSSES} | (outputs or {})
        model = scripted(lambda batch: {name: values[batch["x"]] for name, values in outputs.items()})
        hook = SaveExamples(dataset=dataset, output_dir=tmp_path, **arguments)
        loop = MainLoop(model, dataset, [hook], on_unused_sources="ignore")
        loop.run_evaluation(stream)
        path = tmp_path / "examples" / "epoch_0" / stream / "examples.csv"
        return list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else None

    return run


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 100])
def test_the_worst_come_first_and_of_equal_ones_the_first_of_the_stream(save, count):
    rows = save(count=count)
    assert ids(rows) == NAN_FIRST[:count]
    assert [row["loss"] for row in rows] == ["nan", "inf", "5.0", "5.0", "1.0", "0.0"][:count]
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("count", [1, 4, 5, 7])
def test_the_first_are_those_of_the_stream(save, count):
    rows = save(select="first", count=count, variables=["loss"])
    assert ids(rows) == list("012345")[:count]
    assert rows[0]["loss"] == "1.0"


def test_another_variable_may_say_what_is_bad(save):
    assert ids(save(outputs={"error": -LOSSES.nan_to_num(9)[:, None]}, by="error", count=2)) == ["5", "0"]


def test_pictures_have_their_own_size_and_the_ids_in_their_names(save, tmp_path):
    names = ["a/b", "../c", "plain", "", "x" * 300, "f"]
    rows = save({"image": IMAGES, "id": names}, show="image", count=3)
    assert ids(rows) == ["plain", "x" * 300, "../c"]
    folder = tmp_path / "examples" / "epoch_0" / "valid"
    assert rows[0]["file"] == "01_plain.png"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["examples.csv", *(row["file"] for row in rows)])
    with Image.open(folder / rows[0]["file"]) as image:
        np.testing.assert_array_equal(np.asarray(image), np.moveaxis(IMAGES[2].numpy(), 0, -1))


def test_classes_have_their_names(save):
    logits = torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    rows = save(
        {"label": np.arange(6) % 2}, {"logits": logits}, ["cat", "dog", "eel"], label="label", prediction="logits"
    )
    assert [(row["label"], row["logits"], row["label_name"], row["logits_name"]) for row in rows[:2]] == [
        ("0", "2", "cat", "eel"),
        ("0", "1", "cat", "dog"),
    ]


def test_texts_are_in_the_table(save, tmp_path):
    rows = save({"text": ['=1+"a", b', "two\nlines", "猫 $x_{", "", "w" * 5000, "e"]}, show="text")
    assert [row["text"] for row in rows][:3] == ["猫 $x_{", "w" * 5000, "two\nlines"]
    assert [path.name for path in (tmp_path / "examples/epoch_0/valid").iterdir()] == ["examples.csv"]


def test_only_the_examples_that_are_saved_are_kept(tmp_path, scripted):
    class Long(Examples):
        def valid_stream(self):
            for batch in range(50):
                yield {"x": list(range(10)), "image": torch.full((10, 1, 8, 8), batch % 7 / 7)}

    dataset = Long({})
    hook = SaveExamples(show="image", count=3, output_dir=tmp_path, dataset=dataset)
    kept = []

    class Look(type(hook)):
        """Counts what the hook keeps after each batch."""

        def after_batch(self, stream_name, batch_data):
            kept.append((len(hook._kept), max((each.shown.base is None for each in hook._kept), default=True)))

    model = scripted(lambda batch: {"loss": torch.rand(10, generator=torch.Generator().manual_seed(len(kept)))})
    MainLoop(
        model, dataset, [hook, Look(root_dir="b", output_dir=tmp_path)], on_unused_sources="ignore"
    ).run_evaluation("valid")
    assert {count for count, _ in kept} == {3}
    assert all(is_copy for _, is_copy in kept)  # not a view that keeps its batch


@pytest.mark.parametrize(
    ("sources", "outputs", "arguments", "message"),
    [
        ({}, {"loss": torch.zeros(6, 2)}, {}, r"by: 'loss' has the shape \(4, 2\), not a number for each example"),
        ({}, {}, {"by": "lost"}, "'lost'"),
        ({}, {}, {"show": "x"}, r"show: 'x' is neither a picture nor a text"),
        ({"image": np.zeros((6, 64))}, {}, {"show": "image"}, r"shape \(64,\), but an image has the shape"),
        ({"image": np.zeros((6, 2, 9, 9))}, {}, {"show": "image"}, r"shape \(2, 9, 9\), but an image has the shape"),
        ({"id": np.zeros((6, 2))}, {}, {}, "'id' has no ids"),
    ],
)
def test_wrong_batches(save, tmp_path, sources, outputs, arguments, message):
    with pytest.raises(StreamError, match=message) as caught:
        save(sources, outputs, **arguments)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.rglob("*.csv"))


def test_a_loss_of_the_whole_batch_is_an_error(tmp_path, scripted):
    hook = SaveExamples(output_dir=tmp_path)
    loop = MainLoop(scripted(), Examples({}), [hook], on_unused_sources="ignore")
    with pytest.raises(StreamError, match=r"'loss' has one value for the whole batch.*none, or name one of several"):
        loop.run_evaluation("valid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "best"}, "select: 'best' is not one of worst, first"),
        ({"count": 0}, "count: 0 is not a whole number"),
        ({"select": "first", "by": "loss"}, "by: `select: first` does not compare examples"),
        ({"root_dir": "../examples"}, "root_dir: .* is not a folder in the run directory"),
        ({"root_dir": "/examples"}, "root_dir: .* is not a folder in the run directory"),
        ({"streams": "valid"}, "streams: 'valid' is not a list"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        SaveExamples(**arguments)


def test_two_hooks_need_two_folders(tmp_path, scripted):
    def loop(**arguments):
        hooks = [SaveExamples(output_dir=tmp_path), SaveExamples(select="first", output_dir=tmp_path, **arguments)]
        return MainLoop(scripted(), Examples({}), hooks)

    loop(root_dir="first")
    with pytest.raises(HookError, match="two hooks SaveExamples write to examples; set another root_dir"):
        loop()


def test_without_pillow_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"SaveExamples needs pillow.*'emrun\[data\]'"):
        SaveExamples()


PIXELS = [
    (np.array([[[0.0, 1.0]]]), [[0, 255]]),
    (np.array([[0.0, 0.5]]), [[0, 128]]),
    (np.array([[-1.0, 3.0]]), [[0, 255]]),
    (np.array([[5.0, 5.0]]), [[0, 0]]),
    (np.array([[np.nan, 2.0, 4.0, np.inf]]), [[0, 0, 255, 0]]),
    (np.array([[7, 255]]), [[7, 255]]),
    (np.array([[0, 510]]), [[0, 255]]),
    (np.array([[True, False]]), [[255, 0]]),
    (np.array([[[1, 2, 3]], [[4, 5, 6]]], np.uint8), [[[1, 2, 3]], [[4, 5, 6]]]),
    (np.array([[[1]], [[2]], [[3]]], np.uint8), [[[1, 2, 3]]]),
    (np.array([[[1]], [[2]], [[3]], [[4]]], np.uint8), [[[1, 2, 3, 4]]]),
]


@pytest.mark.parametrize(("image", "pixels"), PIXELS, ids=range(len(PIXELS)))
def test_arrays_as_pixels(image, pixels):
    found = picture_of(image)
    assert found.dtype == np.uint8
    assert found.tolist() == pixels


CONFIG = [
    {"SaveExamples": {"show": "image", "label": "label", "prediction": "logits", "count": 5, "streams": ["valid"]}},
    {"SaveExamples": {"select": "first", "root_dir": "first", "every": "2 epochs"}},
    {"StopAfter": {"epochs": 2}},
]


def test_in_a_run_each_evaluation_has_a_folder(tmp_path, digits_config):
    config = digits_config(CONFIG, extra_streams=["valid", "train"])
    config["dataset"]["flat"] = False
    config["model"]["module"] = {
        "class": "torch.nn.Sequential",
        "args": [{"class": "torch.nn.Flatten"}, config["model"]["module"]],
    }
    training = create_training(config, output_dir=tmp_path / "run")
    assert training.main_loop.run_training().status == "finished"
    found = sorted(str(path.parent.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("examples.csv"))
    assert found == [
        *(f"examples/epoch_{epoch}/valid" for epoch in (0, 1, 2)),
        *(f"first/epoch_{epoch}/{stream}" for epoch in (0, 2) for stream in ("train_eval", "valid")),
    ]  # not the stream that the model is trained on
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run/examples/epoch_2/valid/examples.csv").read_text())))
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert all(row["label"] != row["logits"] for row in rows)


def test_the_yaml_in_its_docstring_trains(tmp_path, digits_config, in_docstring):
    config = digits_config([*in_docstring(SaveExamples), {"StopAfter": {"epochs": 0}}])
    config["dataset"]["flat"] = False
    config["model"]["module"] = {
        "class": "torch.nn.Sequential",
        "args": [{"class": "torch.nn.Flatten"}, config["model"]["module"]],
    }
    create_training(config, output_dir=tmp_path / "run").main_loop.run_training()
    assert len(list((tmp_path / "run/examples/epoch_0/valid").iterdir())) == 17
