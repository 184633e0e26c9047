"""LogitsToCsv: a column for each class, by name; another number of classes than of names is an error."""

import csv

import numpy as np
import pytest
import torch

from emrun import MainLoop
from emrun.base.errors import ArgumentError, HookError, StreamError
from emrun.hooks import LogitsToCsv

LOGITS = torch.arange(15.0).reshape(5, 3) / 7
COLORS = ["red", "green", "blue"]


class Colors:
    """Five examples in two batches."""

    def __init__(self, names=None, **sources):
        self.names = names or []
        self.sources = sources

    def classes_names(self):
        return self.names

    def valid_stream(self):
        for rows in (slice(0, 3), slice(3, 5)):
            yield {"x": list(range(5)[rows]), **{name: values[rows] for name, values in self.sources.items()}}

    train_stream = valid_stream


def written(tmp_path, scripted, dataset=None, logits=LOGITS, stream="valid", **arguments):
    dataset = dataset or Colors(pic_id=[7, 8, 9, 10, 11])
    model = scripted(lambda batch: {"logits": logits[batch["x"]] if len(logits) == 5 else logits})
    hook = LogitsToCsv("logits", stream, dataset=dataset, output_dir=tmp_path, **arguments)
    MainLoop(model, dataset, [hook], on_unused_sources="ignore").run_evaluation("valid")
    path = tmp_path / arguments.get("output_file", "logits.csv")
    return list(csv.reader(path.read_text().splitlines())) if path.exists() else None


def test_columns_have_the_names_of_the_classes(tmp_path, scripted):
    header, *rows = written(tmp_path, scripted, class_names=COLORS, id_variable="pic_id")
    assert header == ["pic_id", *COLORS]
    assert [row[0] for row in rows] == ["7", "8", "9", "10", "11"]
    np.testing.assert_array_equal(np.array([row[1:] for row in rows], float), LOGITS.double().numpy())


def test_names_are_those_of_the_dataset_or_else_numbers(tmp_path, scripted):
    assert written(tmp_path, scripted, Colors(COLORS))[0] == ["position", *COLORS]
    assert written(tmp_path, scripted, Colors(id=list("abcde")))[0] == ["id", "0", "1", "2"]


def test_a_stream_that_is_not_evaluated_has_no_file(tmp_path, scripted):
    assert written(tmp_path, scripted, stream="train") is None
    assert not list(tmp_path.iterdir())


def test_a_stream_that_is_not_there_is_an_error(tmp_path, scripted):
    with pytest.raises(HookError, match=r"LogitsToCsv reads stream 'vaild'.*did you mean 'valid'"):
        written(tmp_path, scripted, stream="vaild")


@pytest.mark.parametrize(
    ("logits", "arguments", "message"),
    [
        (
            LOGITS[:, :2],
            {"class_names": COLORS},
            r"'logits' has 2 classes, shape \(3, 2\), but class_names has 3 names",
        ),
        (LOGITS[:, 0], {}, r"'logits' has the shape \(3,\), not \(examples, classes\)"),
        (LOGITS[:4], {}, "'logits' has 4 values, but the batch has 3 examples"),
        (LOGITS, {"id_variable": "ids"}, "no output or source 'ids'"),
        (LOGITS, {"class_names": ["pic_id", "a", "b"], "id_variable": "pic_id"}, "are both called 'pic_id'"),
    ],
)
def test_wrong_batches(tmp_path, scripted, logits, arguments, message):
    with pytest.raises(StreamError, match=f"LogitsToCsv: .*{message}") as caught:
        written(tmp_path, scripted, logits=logits, **arguments)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": []}, "class_names: .*needs a name for each class"),
        ({"class_names": ["a", "a"]}, "class_names: .*has 'a' twice"),
        ({"class_names": "abc"}, "class_names: 'abc' is not a list of names"),
        ({"output_file": "logits.txt"}, "output_file: the name 'logits.txt' must end in"),
    ],
)
def test_wrong_arguments(tmp_path, scripted, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        written(tmp_path, scripted, **arguments)


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(LogitsToCsv))
    assert (training.output_dir / "logits.csv").read_text().startswith("position,0,1,2,3,4,5,6,7,8,9\n")
    assert len((training.output_dir / "logits.csv").read_text().splitlines()) == 181
