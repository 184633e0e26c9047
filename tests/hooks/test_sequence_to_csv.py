"""SequenceToCsv: a row for each element that is not padding."""

import csv

import numpy as np
import pytest
import torch

from emrun import MainLoop
from emrun.base.errors import ArgumentError, StreamError
from emrun.hooks import SequenceToCsv


class Videos:
    """Five examples in two batches."""

    def __init__(self, sources):
        self.sources = sources

    def valid_stream(self):
        for rows in (slice(0, 3), slice(3, 5)):
            yield {name: values[rows] for name, values in self.sources.items()}

    train_stream = valid_stream


SOURCES = {
    "x": [0.0] * 5,
    "pic_id": np.arange(5),
    "color": np.arange(15).reshape(5, 3),
    "area": torch.arange(30).reshape(5, 3, 2),
    "mask": ((0, 1, 1), (0, 1, 0), (0, 1, 1), (0, 1, 0), (0, 1, 1)),
    "words": [["a"], [], ["b", "c"], ["d"], []],
    "ragged": [[1.5], [], [2.0, 3.0], [4.0], []],
    "wide": np.arange(20).reshape(5, 4),
    "flat": np.arange(5),
    "id": list("abcde"),
}


def written(tmp_path, scripted, variables, **arguments):
    hook = SequenceToCsv(variables, "valid", output_dir=tmp_path, **arguments)
    MainLoop(scripted(), Videos(SOURCES), [hook], on_unused_sources="ignore").run_evaluation("valid")
    return list(csv.DictReader((tmp_path / "sequences.csv").read_text().splitlines()))


def test_every_element_has_a_row(tmp_path, scripted):
    rows = written(tmp_path, scripted, ["color", "area"], id_variable="pic_id")
    assert list(rows[0]) == ["pic_id", "index", "color", "area.0", "area.1"]
    assert [int(row["color"]) for row in rows] == list(range(15))
    assert [int(row["area.1"]) for row in rows] == list(range(1, 30, 2))
    assert [(int(row["pic_id"]), int(row["index"])) for row in rows] == [(i, j) for i in range(5) for j in range(3)]


def test_padding_has_no_rows_and_the_index_counts_it(tmp_path, scripted):
    rows = written(tmp_path, scripted, ["color"], pad_mask_variable="mask")
    assert [int(row["color"]) for row in rows] == [1, 2, 4, 7, 8, 10, 13, 14]
    assert [(row["id"], int(row["index"])) for row in rows][:3] == [("a", 1), ("a", 2), ("b", 1)]


def test_sequences_of_different_lengths_and_of_strings(tmp_path, scripted):
    rows = written(tmp_path, scripted, ["words", "ragged"])
    assert [tuple(row.values()) for row in rows] == [
        ("a", "0", "a", "1.5"),
        ("c", "0", "b", "2.0"),
        ("c", "1", "c", "3.0"),
        ("d", "0", "d", "4.0"),
    ]


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (["not-there"], {}, "no output or source 'not-there'"),
        (["color"], {"id_variable": "not-there"}, "no output or source 'not-there'"),
        (["color"], {"pad_mask_variable": "not-there"}, "no output or source 'not-there'"),
        (["area", "wide"], {}, "whose id is a, 'area' has 3 elements, and 'wide' 4"),
        (["wide"], {"pad_mask_variable": "mask"}, "whose id is a, 'wide' has 4 elements, and 'mask' 3"),
        (["flat"], {}, "'flat' is not a sequence for each example"),
        (["color"], {"pad_mask_variable": "flat"}, "'flat' is not a sequence for each example"),
    ],
)
def test_wrong_batches(tmp_path, scripted, variables, arguments, message):
    with pytest.raises(StreamError, match=f"SequenceToCsv: .*{message}") as caught:
        written(tmp_path, scripted, variables, **arguments)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variables", [[], "color", ["index"], ["pic_id"]])
def test_wrong_arguments(tmp_path, variables):
    with pytest.raises(ArgumentError, match=r"^variables: "):
        SequenceToCsv(variables, "valid", "pic_id", output_dir=tmp_path)


def test_the_yaml_in_its_docstring_writes(tmp_path, scripted, in_docstring):
    (entry,) = in_docstring(SequenceToCsv)
    hook = SequenceToCsv(**entry["SequenceToCsv"], output_dir=tmp_path)
    names = {"color": "area", "ragged": "speed"}
    sources = {names.get(name, name): values for name, values in SOURCES.items() if name != "area"}
    sources["speed"] = sources["area"] / 2
    MainLoop(scripted(), Videos(sources), [hook], on_unused_sources="ignore").run_evaluation("valid")
    assert (tmp_path / "sequences.csv").read_text().splitlines()[:2] == ["id,index,area,speed", '"a",1,1,0.5']
