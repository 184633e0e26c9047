"""The file of first batches: a line for each stream, which a resume leaves as it is."""

import json

import pytest

from emrun.base.censor import Censor
from emrun.storage.code.files import FirstBatches, recorded_batches


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


def test_a_resume_writes_nothing(path):
    note(path, FIRST)
    before = path.read_bytes()
    note(path, FIRST, ("train", 0, {"x": "aa", "y": "ee", "z": "ff"}))
    assert path.read_bytes() == before


def test_another_number_of_ranks_has_its_own_line(path):
    found = note(path, FIRST, ("train", 0, {"x": "ee"}, 2), ("train", 0, {"x": "ff"}, 3), ("train", 0, {"x": "ee"}, 2))
    assert [line.get("ranks") for line in found] == [None, 2, 3]


def test_lines_of_another_form_are_left_as_they_are(path):
    note(path, FIRST)
    with path.open("a") as file:
        file.write('{"later": "format"}\nother\n')
    note(path, FIRST, ("valid", 0, {}))
    assert path.read_text().splitlines()[1:3] == ['{"later": "format"}', "other"]
    assert recorded_batches(path.parent) == {("train", 0, 1): {"x": "aa", "y": "bb"}, ("valid", 0, 1): {}}
