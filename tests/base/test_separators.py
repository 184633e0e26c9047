"""Other separators than commas are found in the header of a CSV file."""

import pytest

from emrun.base.separators import wrong_separator

CASES = [
    ("a,b\n1,2\n", None),
    ("a\n1\n", None),
    ("a;b\n1;2\n", "cells are separated by ';'; write commas"),
    ("a\tb\n1\t2\n", "cells are separated by '\\t'; write commas"),
    ("a;b\nx;1,5\n", "cells are separated by ';'; write commas, and decimal points in numbers such as '1,5' in row 2"),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_separates_cells_is_told_from_the_header(tmp_path, text, expected):
    file = tmp_path / "t.csv"
    file.write_text(text)
    assert wrong_separator(file) == expected
