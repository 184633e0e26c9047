"""The file of first batches: a line for each stream, and what a resume says about another batch."""

import json

import pytest

from emrun.base.censor import Censor
from emrun.storage.code.first_batches import FirstBatches


@pytest.fixture
def path(tmp_path):
    return tmp_path / "code" / "batches.jsonl"


def note(path, *lines):
    batches = FirstBatches(path.parent, Censor([("hunter22", "${env:TOKEN}")]))
    for line in lines:
        batches.note(*line)
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


FIRST = ("train", 0, {"x": "aa", "y": "bb"})


def test_each_stream_has_a_line_in_the_order_in_which_they_began(path):
    found = note(path, FIRST, ("hunter22", 0, {"hunter22": None}), ("train", 1, {"x": "cc", "y": "dd"}))
    assert found == [
        {"stream": "train", "pass": 0, "sources": {"x": "aa", "y": "bb"}},
        {"stream": "${env:TOKEN}", "pass": 0, "sources": {"${env:TOKEN}": None}},
        {"stream": "train", "pass": 1, "sources": {"x": "cc", "y": "dd"}},
    ]


def test_a_resume_with_the_same_batches_writes_nothing(path, caplog):
    note(path, FIRST)
    before = path.read_bytes()
    note(path, FIRST)
    assert path.read_bytes() == before
    assert caplog.text == ""


def test_a_resume_with_another_batch_adds_a_line_and_names_the_sources(path, caplog):
    note(path, FIRST)
    found = note(path, ("train", 0, {"x": "aa", "y": "ee", "z": "ff"}))
    assert [line["sources"]["y"] for line in found] == ["bb", "ee"]
    assert "stream 'train' begins with another batch than when the run began (sources: y, z)" in caplog.text
    assert len(note(path, ("train", 0, {"x": "aa", "y": "ee", "z": "ff"}))) == 2


def test_rows_of_another_number_of_ranks_are_not_compared(path, caplog):
    found = note(path, FIRST, ("train", 0, {"x": "ee"}, 2), ("train", 0, {"x": "ff"}, 3), ("train", 0, {"x": "ee"}, 2))
    assert [line.get("ranks") for line in found] == [None, 2, 3]
    assert caplog.text == ""
    note(path, ("train", 0, {"x": "gg"}, 3))
    assert "begins with another batch" in caplog.text


def test_an_incomplete_line_is_removed_and_others_are_kept(path):
    note(path, FIRST)
    with path.open("a") as file:
        file.write('{"later": "format"}\nother\n{"stream": "val')
    note(path, FIRST, ("valid", 0, {}))
    lines = path.read_text().splitlines()
    assert lines[1:3] == ['{"later": "format"}', "other"]
    assert json.loads(lines[3]) == {"stream": "valid", "pass": 0, "sources": {}}
    assert len(lines) == 4
