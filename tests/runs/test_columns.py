"""What can be asked of a run by name."""

from datetime import timedelta

import pytest
from stored_runs import BEGIN

from emrun.base.errors import UsageError
from emrun.runs.columns import FACTS, check_known, column, rows_of
from emrun.runs.finding import find_runs
from emrun.runs.stored_run import MISSING


@pytest.fixture
def rows(make_run, tmp_path):
    """Return the rows of two runs, two days after they began."""

    def rows(*columns):
        make_run("a", (0.1, 0.7, 0.6))
        make_run("b", (0.2,), status="killed")
        return rows_of(find_runs(tmp_path / "log"), tmp_path / "log", columns, BEGIN + timedelta(days=2))

    return rows


def test_facts_are_shown_with_their_units(rows):
    first, second = rows(*FACTS.values())
    shown = {name: each.text(each.of(first)) for name, each in FACTS.items()}
    assert shown.pop("size").endswith("KB")
    assert shown.pop("host")
    assert shown == {
        "name": "a", "status": "finished", "epochs": "2", "iterations": "20", "best": "0.7", "best_epoch": "1",
        "looks": "0",
        "config_looks": "0",
        "age": "2 d", "duration": "2 min", "begin": "2026-11-20 21:03", "end": "2026-11-20 21:05",
        "reason": "finished here", "model": "my_model.Net", "dataset": "Digits",
    }  # fmt: skip
    assert FACTS["reason"].text(FACTS["reason"].of(second)) == ""


def test_a_name_is_a_fact_a_statistic_or_a_key_of_the_config(rows):
    names = ("valid/accuracy", "min:valid/accuracy", "max:valid/accuracy/std", "model.optimizer.lr", "hooks.StopAfter")
    columns = [column(name) for name in names]
    first, _ = rows(*columns)
    assert [each.of(first) for each in columns] == [0.6, 0.6, 0.5, 0.003, {"epochs": 3}]
    assert columns[4].text({"epochs": 3}) == '{"epochs": 3}'
    check_known(columns, [first])


@pytest.mark.parametrize(("name", "message"), [
    ("model.optimizer.rl", r"the key 'model\.optimizer\.rl'; did you mean 'model\.optimizer\.lr'"),
    ("lr", r"the key 'lr'; did you mean 'model\.optimizer\.lr'"),
    ("valid/acuracy", r"the statistic 'valid/acuracy'; did you mean 'valid/accuracy'"),
    ("min:test/x", r"the statistic 'test/x'"),
    ("epoch", r"did you mean 'epochs'"),
])  # fmt: skip
def test_a_name_that_no_run_has_is_an_error(rows, name, message):
    asked = [column(name)]
    with pytest.raises(UsageError, match=message):
        check_known(asked, rows(*asked))


@pytest.mark.parametrize("value", ["\x1b[31mred", "two\nlines", "\u202ereversed", "\udcff", "x" * 1000])
def test_a_value_is_shown_in_one_short_line_without_control_characters(value):
    for shown in (column("model.name").text(value), column("model.name").text({"a": value})):
        assert shown.isprintable()
        assert len(shown) < 70


def test_a_run_without_anything_has_no_values(tmp_path):
    (tmp_path / "log" / "a").mkdir(parents=True)
    (tmp_path / "log" / "a" / "trace.yaml").write_text("")
    (row,) = rows_of(find_runs(tmp_path / "log"), tmp_path / "log", FACTS.values())
    lacking = {name for name, each in FACTS.items() if each.of(row) is MISSING}
    assert lacking == {"best", "best_epoch", "age", "duration", "begin", "reason", "host", "model", "dataset"}
    assert "cannot read" in " ".join(row.run.problems)
