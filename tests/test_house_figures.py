"""No room is larger than its ceiling; the figures count code, not its layout."""

from house_figures import CEILINGS, FILES, MANY, NAMES, ROOT, files, names, nodes, nodes_in


def test_no_room_is_larger_than_its_ceiling():
    found = nodes(ROOT)
    assert found.keys() == CEILINGS.keys()
    assert {room: size for room, size in found.items() if size > CEILINGS[room]} == {}


def test_no_folder_has_too_many_files():
    assert {folder: n for folder, n in files(ROOT).items() if folder not in MANY and n > FILES.get(folder, 20)} == {}


def test_there_are_no_more_public_names_than_agreed():
    found = names()
    assert found.keys() == NAMES.keys()
    assert {kind: count for kind, count in found.items() if count > NAMES[kind]} == {}


def test_layout_and_comments_weigh_nothing():
    assert nodes_in("x = f(1, 2)\n") == nodes_in("# comment\n\nx = f(\n    1,  # comment\n    2,\n)\n") > 0


def test_statements_that_are_joined_weigh_no_less():
    assert nodes_in("a, b = x, y\n") > nodes_in("a = x\nb = y\n")
    assert nodes_in("if a:\n    b = 1\n") < nodes_in("if a:\n    b = 1\nelse:\n    b = 2\n")
