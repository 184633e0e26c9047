"""The script that takes guards out finds them, makes their conditions false, and knows their tests."""

import sqlite3
import textwrap

import guards
import pytest


def found(source):
    """Return the guards of a source."""
    return guards.guards_in(textwrap.dedent(source), "emrun/a.py")


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError(x)",
        "raise",
        "return UsageError(x)",
        "return errors.UsageError(x)",
        "return Problem(x)",
        "return [Problem(x), Problem(y)]",
        "return self._error(x)",
        "return _sampler_error(x)",
    ],
)
def test_what_only_raises_or_returns_an_error_is_a_guard(body):
    (guard,) = found(f"def f(x):\n    if x > 1:\n        {body}\n")
    assert (guard.function, guard.condition, guard.line, guard.body) == ("f", "x > 1", 2, 3)


@pytest.mark.parametrize(
    "body",
    [
        "y = 1; raise ValueError(x)",
        "return",
        "return None",
        "return x",
        "return []",
        "return float(x)",
        "return [Problem(x), x]",
        "return UsageError",
        "f()",
    ],
)
def test_anything_else_is_no_guard(body):
    assert found(f"def f(x):\n    if x > 1:\n        {body}\n") == []


def test_every_branch_is_judged_alone_and_functions_have_qualified_names():
    source = """
        class A:
            def f(self, x):
                if x:
                    return 1
                elif x is None:
                    raise ValueError
                else:
                    def g():
                        if self:
                            raise TypeError
    """
    assert [(each.function, each.condition) for each in found(source)] == [("A.f", "x is None"), ("A.f.g", "self")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if a or b:\n    raise E\n", "if (a or b) and False:\n    raise E\n"),
        ("if (a) or (b):\n    raise E\n", "if ((a) or (b)) and False:\n    raise E\n"),
        ("if 'é' in a:  # é\n    raise E\n", "if ('é' in a) and False:  # é\n    raise E\n"),
        (
            "if (\n    a  # one\n    or b\n):\n    raise E\n",
            "if (\n    (a  # one\n    or b) and False\n):\n    raise E\n",
        ),
        ("if f(\n    a\n):\n    raise E\n", "if (f(\n    a\n)) and False:\n    raise E\n"),
        ("if a:\n    b()\nelif c:\n    raise E\n", "if a:\n    b()\nelif (c) and False:\n    raise E\n"),
        ("if x := f():\n    raise E\n", "if (x := f()) and False:\n    raise E\n"),
        ("if (x := f()) is None:\n    raise E\n", "if ((x := f()) is None) and False:\n    raise E\n"),
        ("if x if y else z:\n    raise E\n", "if (x if y else z) and False:\n    raise E\n"),
    ],
)
def test_a_guard_is_taken_out_where_it_is(before, after):
    (guard,) = found(before)
    assert guards.taken_out(before, guard) == after
    compile(after, "a.py", "exec")


def test_only_the_given_guard_is_taken_out():
    source = "if a:\n    raise E\nif a:\n    raise E\n"
    assert guards.taken_out(source, found(source)[1]) == "if a:\n    raise E\nif (a) and False:\n    raise E\n"


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("", ""),
        ("tests/test_a.py::test_b", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b (call)", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b (setup)|tests/test_c.py::test_d[x y] (call)", "tests/test_c.py::test_d[x y]"),
        ("tests/test_a.py::test_b[int|None]", "tests/test_a.py::test_b[int|None]"),
        ("|tests/test_a.py::test_b", "tests/test_a.py::test_b"),
    ],
)
def test_the_node_id_of_a_context(context, test):
    assert guards.node_id(context) == test


def test_the_tests_of_a_guard_are_those_with_an_arc_to_or_from_its_body(tmp_path):
    one, two = found("if a:\n    raise E\nif b:\n    raise E\n")
    database = tmp_path / "a b.db"
    connection = sqlite3.connect(database)
    connection.executescript("""
        CREATE TABLE file (id integer primary key, path text);
        CREATE TABLE context (id integer primary key, context text);
        CREATE TABLE arc (file_id integer, context_id integer, fromno integer, tono integer);
        INSERT INTO file VALUES (1, '/there/emrun/a.py'), (2, '/there/emrun/b.py'), (3, '/here/emrun/a.py');
        INSERT INTO context VALUES (1, ''), (2, 't.py::to (call)'), (3, 's.py::x|t.py::from'), (4, 't.py::around');
        INSERT INTO arc VALUES (1, 1, 1, 2), (1, 2, 1, 2), (1, 3, 2, -1), (1, 4, 1, 3), (1, 4, 3, -2);
        INSERT INTO arc VALUES (2, 4, 3, 4), (3, 4, 3, 4);
    """)
    connection.close()
    assert guards.executing_tests(database, "/there", [one, two]) == {one: ["t.py::from", "t.py::to"], two: []}


def test_a_test_with_former_parameters_stands_for_all_of_its_function():
    collected = {"t.py::a[1]", "t.py::a[2]", "t.py::b[1]", "t.py::b[2]", "t.py::ab"}
    assert guards.still_there(["t.py::a[0]", "t.py::b[1]", "t.py::gone"], collected) == {
        "t.py::a[1]",
        "t.py::a[2]",
        "t.py::b[1]",
    }
    assert guards.still_there([], collected) == set()


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        ("emrun/config/plan.py", "tests/config/test_plan.py::z", "tests/config/test_a.py::a"),
        ("hooks/check.py", "tests/hooks/test_check.py::z", "tests/hooks/test_a.py::a"),
        ("emrun/hook.py", "tests/test_hook.py::z", "tests/test_a.py::a"),
    ],
)
def test_the_tests_nearest_to_a_source_come_first(path, first, second):
    other = "tests/cli/test_a.py::a"
    assert guards.nearest_first([other, second, first], path) == [first, second, other]


def test_guards_of_a_file_are_found_again_where_they_are_now(tmp_path, capsys):
    file = tmp_path / "guards.json"
    entry = {"path": "emrun/a.py", "function": "", "condition": "a", "line": 5}
    file.write_text(guards.json.dumps([entry, {**entry, "condition": "c"}]))
    now = found("if a:\n    raise E\n\n\n\n\nif a:\n    raise E\nif b:\n    raise E\n")
    assert guards.named(file, now) == [now[1]]
    assert "`c`: is not there any more" in capsys.readouterr().out
