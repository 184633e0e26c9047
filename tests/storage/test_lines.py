"""Files that grow line by line: changes by others are noticed at the next line and at a resume."""

import hashlib
import logging

import pytest

from emrun.storage.lines import Lines, read_lines


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
    ("content", "is_whole", "left"),
    [
        (b"zero\n\xc3\xb6ne\ntwo\n", True, b"zero\n\xc3\xb6ne\ntwo\n"),
        (b"zero\n\xc3\xb6ne\ntwo\nthree\nfo", True, b"zero\n\xc3\xb6ne\ntwo\n"),
        (b"zero\n\xc3\xb6ne\ntw0\n", False, b"zero\n\xc3\xb6ne\ntw0\n"),
        (b"zero\n\xc3\xb6ne\ntw", False, b"zero\n\xc3\xb6ne\n"),
        (b"zero\ntwo\n", False, b"zero\ntwo\n"),
        (b"", False, b""),
        (None, False, b""),
    ],
)
def test_what_a_checkpoint_counts_on_is_compared_and_whole_lines_are_kept(lines, content, is_whole, left):
    length, digest = lines.length, lines.digest
    if content is None:
        lines.path.unlink()
    else:
        lines.path.write_bytes(content)
    again = Lines(lines.path)
    assert again.go_back_to(length, digest, is_wanted=lambda line: line.endswith(b"\n")) is is_whole
    again.append("next")
    assert lines.path.read_bytes() == left + b"next\n"
    assert (again.length, again.digest) == (len(left) + 5, hashlib.sha256(left + b"next\n").hexdigest())


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
