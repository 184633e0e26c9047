"""The file of first batches: a line for each stream, which a resume leaves as it is."""

import json

import pytest

from emrun.base.errors import StorageError
from emrun.storage.code.files import note_batch, recorded_batches


@pytest.fixture
def code(tmp_path):
    (tmp_path / "code").mkdir()
    return tmp_path / "code"


def note(code, *batches):
    for key, sources in batches:
        note_batch(code, key, sources)
    lines = (code / "batches.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


FIRST = ("train", 0, 1), {"x": "aa", "y": "bb"}


def test_each_stream_has_a_line_in_the_order_in_which_they_began(code):
    found = note(code, FIRST, (("valid", 0, 1), {"z": "ee"}), (("train", 1, 1), {"x": "cc", "y": "dd"}))
    assert found == [
        {"stream": "train", "pass": 0, "digests": {"x": "aa", "y": "bb"}},
        {"stream": "valid", "pass": 0, "digests": {"z": "ee"}},
        {"stream": "train", "pass": 1, "digests": {"x": "cc", "y": "dd"}},
    ]


def test_a_resume_writes_nothing_and_gets_the_sources_that_differ(code):
    note(code, FIRST)
    before = (code / "batches.jsonl").read_bytes()
    assert note_batch(code, FIRST[0], {"x": "aa", "y": "ee", "z": "ff"}) == ["y", "z"]
    assert (code / "batches.jsonl").read_bytes() == before


def test_another_number_of_ranks_has_its_own_line(code):
    found = note(code, FIRST, *((("train", 0, ranks), {"x": "ee"}) for ranks in (2, 3, 2)))
    assert [line.get("ranks") for line in found] == [None, 2, 3]


def test_lines_of_another_form_are_left_as_they_are(code):
    note(code, FIRST)
    with (code / "batches.jsonl").open("a") as file:
        file.write('{"later": "format"}\nother\n')
    note(code, FIRST, (("valid", 0, 1), {}))
    assert (code / "batches.jsonl").read_text().splitlines()[1:3] == ['{"later": "format"}', "other"]
    assert recorded_batches(code) == {FIRST[0]: FIRST[1], ("valid", 0, 1): {}}


def test_a_link_is_not_written_through(code, tmp_path):
    (tmp_path / "link").symlink_to(code)
    with pytest.raises(StorageError, match="link is a link"):
        note_batch(tmp_path / "link", *FIRST)
    assert list(code.iterdir()) == []
