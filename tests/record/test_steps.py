"""The file steps.jsonl: its chunks, and what is never written over."""

import errno
import json
import logging
import math
import os

import pytest

from emrun.base.errors import StorageError
from emrun.record.steps import Chunk, StepsFile, format_of, read_chunk

CHUNKS = [
    Chunk(1, 1, {"loss": [0.1, 1 / 3]}),
    Chunk(3, 1, {"loss": [0.3], "norm": [None]}),
    Chunk(4, 1, {"loss": [2.0]}),
]


LONG_NUMBER = b'{"format": %s, "from": 1}' % (b"9" * 5000)


@pytest.fixture
def file(tmp_path):
    """Return a file with three chunks, and its position after each."""
    found = StepsFile(tmp_path / "steps.jsonl")
    found.begin()
    positions = [found.position]
    for chunk in CHUNKS:
        found.append(chunk)
        positions.append(found.position)
    return tmp_path / "steps.jsonl", positions


# --- a line -----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_a_line_of_columns():
    line = Chunk(3, 10, {"loss": [0.25, None, math.nan, -math.inf], "learning_rate": [1e-3] * 4}).line()
    assert line == (
        '{"format": 1, "from": 3, "every": 10, "loss": [0.25, null, "NaN", "-Infinity"], '
        '"learning_rate": [0.001, 0.001, 0.001, 0.001]}'
    )
    assert read_chunk(line).line() == line
    assert format_of(line.encode()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"from": 0},
        {"from": "1"},
        {"every": 0},
        {"every": None},
        {"format": 2},
        {"format": "1"},
        {"loss": []},
        {"loss": [1.0, 2.0]},
        {"loss": 1.0},
        {"loss": ["one"]},
        {"loss": [[1.0]]},
        {"loss": [True]},
        {"loss": [10**400]},
        {"loss": {"a": 1}},
        {"iteration": [1.0]},
    ],
    ids=repr,
)
def test_a_line_with_a_wrong_field_is_not_a_chunk(change):
    right = {"format": 1, "from": 1, "every": 1, "loss": [1.0], "norm": [2.0]}
    assert read_chunk(json.dumps(right)) is not None
    assert read_chunk(json.dumps({**right, **change})) is None


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"\xff\xfe", b"[]", b"1", b'{"format": 1, "from": 1, "every": 1}', b"[" * 99999, LONG_NUMBER],
    ids=lambda line: repr(line[:40]),
)
def test_what_is_not_a_chunk_is_none(line):
    assert read_chunk(line) is None
    assert format_of(line) in (None, 1)


# --- going back to a checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_file_goes_back_to_a_checkpoint_and_ends_equal(file, count):
    path, positions = file
    whole = path.read_bytes()
    again = StepsFile(path)
    again.rewind(*positions[count], 5)
    assert (path.stat().st_size, again.position) == (positions[count][0], positions[count])
    for chunk in CHUNKS[count:]:
        again.append(chunk)
    assert path.read_bytes() == whole


def test_a_file_that_was_cut_keeps_its_complete_lines_with_a_warning(file, caplog):
    path, positions = file
    path.write_bytes(path.read_bytes()[:-3])
    again = StepsFile(path)
    again.rewind(*positions[3], 5)
    assert "was changed since the checkpoint was saved" in caplog.text
    again.append(Chunk(5, 1, {"loss": [5.0]}))
    assert [read_chunk(line).first for line in path.read_bytes().splitlines()] == [1, 3, 5]


def test_an_edited_file_is_continued_with_a_warning(file, caplog):
    path, positions = file
    edited = path.read_bytes().replace(b"0.1", b"0.2")
    path.write_bytes(edited)
    again = StepsFile(path)
    again.rewind(*positions[3], 5)
    assert "was changed since the checkpoint was saved" in caplog.text
    again.append(Chunk(5, 1, {"loss": [5.0]}))
    assert path.read_bytes().startswith(edited)


def test_a_deleted_file_begins_again_with_a_warning(file, caplog):
    path, positions = file
    path.unlink()
    again = StepsFile(path)
    again.rewind(*positions[3], 5)
    assert "its complete lines are kept" in caplog.text
    again.append(Chunk(5, 1, {"loss": [5.0]}))
    assert read_chunk(path.read_bytes()).first == 5


def test_without_a_position_the_iterations_before_the_checkpoint_are_kept_silently(file, caplog):
    path, _ = file
    StepsFile(path).rewind(None, None, 4)
    assert [read_chunk(line).first for line in path.read_bytes().splitlines()] == [1, 3]
    assert caplog.records == []


# --- files of others --------------------------------------------------------------------------------------------------

NEWER = CHUNKS[0].line().encode() + b'\n{"format": 2, "blocks": "..."}\n'
FOREIGN = {"text": b"my notes\nof steps", "one line": b"x", "json": b'{"step": 1}\n', "binary": bytes(range(256)) * 999}
FOREIGN |= {"zeros": b"x" + bytes(9999), "long line": b"x" * 10**7}


@pytest.mark.parametrize("kept", [0, 6, 22, 60])
def test_zeros_that_a_loss_of_power_leaves_are_cut_off(tmp_path, caplog, kept):
    path, line = tmp_path / "steps.jsonl", f"{CHUNKS[0].line()}\n".encode()
    path.write_bytes(line[:kept] + bytes(len(line) - kept))
    file = StepsFile(path)
    file.rewind()
    file.begin()
    file.append(CHUNKS[0])
    assert path.read_bytes() == line
    assert caplog.records == []


@pytest.mark.parametrize("content", [NEWER, *FOREIGN.values()], ids=["newer", *FOREIGN])
@pytest.mark.parametrize("at", [(0, None), (None, None), (10, "0" * 64)], ids=["begin", "unknown", "within"])
def test_a_newer_or_foreign_file_is_never_changed(tmp_path, caplog, content, at):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    file = StepsFile(path)
    file.rewind(*at, 3)
    file.begin()
    file.append(CHUNKS[0])
    assert path.read_bytes() == content
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    what = "has lines of format 2, which a newer emrun wrote" if content == NEWER else "is not a step record"
    assert f"{path} {what}: the file is left as it is, and the steps of this run are not recorded" in caplog.text


@pytest.mark.parametrize("kind", ["directory", "link", "dangling link", "pipe"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_is_not_a_regular_file_is_left_as_it_is(file, tmp_path, caplog, kind, is_resumed):
    record, positions = file
    before = record.read_bytes()
    place = tmp_path / "run" / "steps.jsonl"
    place.parent.mkdir()
    if kind == "directory":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(record if kind == "link" else tmp_path / "nothing")
    steps = StepsFile(place)
    if is_resumed:
        steps.rewind(*positions[1], 5)
    steps.begin()
    steps.append(CHUNKS[0])
    assert f"{place} is not a regular file: the file is left as it is" in caplog.text
    assert record.read_bytes() == before
    assert not (tmp_path / "nothing").exists()


def test_a_file_that_may_not_be_read_is_an_error_that_names_it(file, monkeypatch):
    path, positions = file
    before = path.read_bytes()
    refused = OSError(errno.EACCES, "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr("emrun.storage.files._open_regular", lambda *_: (_ for _ in ()).throw(refused))
        with pytest.raises(StorageError, match=f"cannot read {path}: Permission denied") as caught:
            StepsFile(path).rewind(*positions[1], 5)
    assert caught.value.exit_status == 74
    assert path.read_bytes() == before


def test_a_new_run_does_not_continue_the_file_of_another_run(file, caplog):
    path, _ = file
    before = path.read_bytes()
    new = StepsFile(path)
    new.begin()
    new.append(CHUNKS[0])
    assert path.read_bytes() == before
    assert "exists, but this run did not write it" in caplog.text


@pytest.mark.parametrize("length", [3, 15, 40])
def test_a_first_line_that_was_cut_is_no_foreign_file(tmp_path, caplog, length):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(CHUNKS[0].line().encode()[:length])
    file = StepsFile(path)
    file.rewind()
    file.append(CHUNKS[0])
    assert path.read_text() == CHUNKS[0].line() + "\n"
    assert caplog.records == []
