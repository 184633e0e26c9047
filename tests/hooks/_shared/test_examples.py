"""Ids as names of files: never a path, hidden, too long, or the same for different ids."""

import pytest

from emrun.hooks._shared.examples import file_stem


def test_a_plain_id_is_its_file():
    assert [file_stem(each) for each in ("17", "cat-3.jpg", "é", "a" * 40)] == ["17", "cat-3.jpg", "é", "a" * 40]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", ".hidden", "a b", "猫" * 99],
)
def test_any_other_id_has_a_file_name_of_its_own(name):
    stem = file_stem(name)
    assert stem.replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert not stem.startswith(".")
    assert len(stem.encode()) < 200
    assert stem != file_stem(name + "_")
    assert stem == file_stem(name)
