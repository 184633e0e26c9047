"""Files that grow line by line: changes by others are noticed at the next line and at a resume."""

import hashlib
import logging

import pytest

from emrun.storage.lines import Change, Lines, read_lines


@pytest.fixture
def lines(tmp_path):
    """Return a file of three lines."""
    lines = Lines(tmp_path / "lines")
    for line in ("zero", "öne", "two"):
        lines.append(line)
    return lines


def test_length_and_digest_are_those_of_the_file(lines):
    content = lines.path.read_bytes()
    assert content == "zero\növ\ntwo\n".replace("öv", "öne").encode()
    assert lines.length == len(content)
    assert lines.digest == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("content", "change", "left"),
    [
        (b"zero\n\xc3\xb6ne\ntwo\n", Change.NONE, b"zero\n\xc3\xb6ne\ntwo\n"),
        (b"zero\n\xc3\xb6ne\ntwo\nthree\nfo", Change.NONE, b"zero\n\xc3\xb6ne\ntwo\n"),
        (b"zero\n\xc3\xb6ne\ntw0\n", Change.EDITED, b"zero\n\xc3\xb6ne\ntw0\n"),
        (b"zero\n\xc3\xb6ne\ntw", Change.LOST, b"zero\n\xc3\xb6ne\n"),
        (b"zero\ntwo\n", Change.LOST, b"zero\ntwo\n"),
        (b"", Change.LOST, b""),
        (None, Change.LOST, b""),
    ],
)
def test_what_a_checkpoint_counts_on_is_compared_and_whole_lines_are_kept(lines, content, change, left):
    length, digest = lines.length, lines.digest
    if content is None:
        lines.path.unlink()
    else:
        lines.path.write_bytes(content)
    again = Lines(lines.path)
    assert again.go_back_to(length, digest, is_wanted=lambda line: line.endswith(b"\n")) is change
    again.append("next")
    assert lines.path.read_bytes() == left + b"next\n"
    assert (again.length, again.digest) == (len(left) + 5, hashlib.sha256(left + b"next\n").hexdigest())


@pytest.mark.parametrize("made", [None, b"zero\n", b"zero\n\xc3\xb6ne\nTWO\n"])
def test_what_is_rebuilt_counts_only_where_it_is_the_same(lines, made):
    length, digest, content = lines.length, lines.digest, lines.path.read_bytes()
    lines.path.write_bytes(b"zero\n")
    assert Lines(lines.path).go_back_to(length, digest, rebuilt=lambda: made) is Change.LOST
    lines.path.write_bytes(b"zero\n")
    assert Lines(lines.path).go_back_to(length, digest, rebuilt=lambda: content) is Change.REBUILT
    assert lines.path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "left"), [(None, b""), (b"zero\nhalf", b"zero\n"), (b"", b""), (b"other\n", b"other\n")]
)
def test_a_file_that_is_changed_meanwhile_continues_after_its_last_complete_line_with_a_warning(
    lines, content, left, caplog
):
    if content is None:
        lines.path.unlink()
    else:
        lines.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        lines.append("next")
        lines.append("last")
    assert lines.path.read_bytes() == left + b"next\nlast\n"
    assert len(caplog.records) == 1
    assert lines.digest == hashlib.sha256(left + b"next\nlast\n").hexdigest()


def test_lines_are_read_one_after_another_and_none_is_too_long(tmp_path):
    (tmp_path / "lines").write_bytes(b"one\n" + b"x" * 95 + b"\n\ntwelve letter\nend")
    assert list(read_lines(tmp_path / "lines", 12)) == [b"one\n", b"", b"\n", b"", b"end"]
    assert list(read_lines(tmp_path / "none")) == []
