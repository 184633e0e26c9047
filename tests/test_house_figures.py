"""No room is larger than its ceiling; the figures count code, not its layout."""

import pytest
from house_figures import CEILINGS, FILES, MANY, NAMES, ROOT, code_lines, files, lines, names


def test_no_room_is_larger_than_its_ceiling():
    found = lines(ROOT)
    assert found.keys() == CEILINGS.keys()
    assert {room: size for room, size in found.items() if size > CEILINGS[room]} == {}


def test_no_folder_has_too_many_files():
    assert {folder: n for folder, n in files(ROOT).items() if folder not in MANY and n > FILES.get(folder, 20)} == {}


def test_there_are_no_more_public_names_than_agreed():
    found = names()
    assert found.keys() == NAMES.keys()
    assert {kind: count for kind, count in found.items() if count > NAMES[kind]} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Text."""\n\nx = f(\n    1,\n    2,\n)\n', 1),
        ("x = f(1, 2)  # comment\n\n# comment\n", 1),
        ('class A:\n    """Text."""\n\n    b = 1\n    """Text\n    of b."""\n', 2),
        ("if a:\n    b = 1\nelse:\n    b = 2\n", 4),
    ],
)
def test_a_line_is_a_logical_line_of_code(tmp_path, text, count):
    (tmp_path / "a.py").write_text(text)
    assert code_lines(tmp_path / "a.py") == count
