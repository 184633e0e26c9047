"""The rows of metrics and steps in the order of their iterations, read as the files grow."""

import json

import pytest

from emrun.storage.tracked_rows import RowReader


def epoch(number, iteration, **values):
    return json.dumps({"epoch": number, "iteration": iteration, "seconds": 1.0, "streams": {"valid": values}}) + "\n"


def chunk(first, *losses):
    return json.dumps({"format": 1, "from": first, "every": 1, "loss": losses, "norm": [None, *losses[1:]]}) + "\n"


@pytest.fixture
def write(tmp_path):
    def append(name, text):
        with (tmp_path / name).open("a") as file:
            file.write(text)

    return append


NONE, ALL = (-1, -1), (100, 10**6)


def test_statistics_and_steps_come_in_order_and_named_as_on_the_page(tmp_path, write):
    write("metrics.jsonl", epoch(0, 0, loss={"mean": 2.0, "std": 1.0}) + epoch(1, 4, loss={"mean": "NaN"}, n=3))
    write("steps.jsonl", chunk(1, 1.0, 0.5, 0.25, 0.125))
    rows = list(RowReader(tmp_path, 2).rows(NONE, ALL))
    assert [(at, number) for at, number, _ in rows] == [(0, 0), (2, None), (4, 1)]
    assert rows[0][2] == {"valid/loss": 2.0, "valid/loss/std": 1.0}
    assert rows[1][2] == {"steps/loss": 0.5, "steps/norm": 0.5}
    assert rows[2][2].keys() == {"valid/loss", "valid/n", "steps/loss", "steps/norm"}


def test_rows_stay_until_they_are_not_needed_and_files_may_grow(tmp_path, write):
    reader = RowReader(tmp_path, 1)
    assert list(reader.rows(NONE, ALL)) == []
    write("steps.jsonl", chunk(1, 1.0, 0.5) + '{"format": 1, "from": 3,')
    first = list(reader.rows(NONE, (0, 2)))
    assert first == list(reader.rows(NONE, (0, 2)))
    assert [at for at, *_ in first] == [1]
    assert [at for at, *_ in reader.rows(NONE, (0, 2), is_end=True)] == [1, 2]
    write("steps.jsonl", ' "every": 1, "loss": [0.25]}\n')
    assert [at for at, *_ in reader.rows((-1, 1), ALL)] == [2, 3]
    assert [at for at, *_ in reader.rows((-1, 3), ALL)] == []


def test_an_epoch_whose_last_step_was_sent_before_comes_without_its_step(tmp_path, write):
    reader = RowReader(tmp_path, 2)
    write("steps.jsonl", chunk(1, 1.0, 0.5))
    assert [(at, number) for at, number, _ in reader.rows(NONE, (0, 2))] == []
    assert [(at, number) for at, number, _ in reader.rows(NONE, (0, 2), is_end=True)] == [(2, None)]
    write("metrics.jsonl", epoch(1, 2, loss=0.75))
    assert list(reader.rows((-1, 2), (1, 2))) == [(2, 1, {"valid/loss": 0.75})]
    assert reader.epoch_before(2) == 1
    assert reader.epoch_before(1) == -1


def test_damaged_lines_are_left_out_and_steps_only_with_an_interval(tmp_path, write):
    write("metrics.jsonl", "damaged\n" + epoch(1, 2, loss=0.75))
    write("steps.jsonl", "damaged\n" + chunk(1, 1.0, 0.5))
    assert [at for at, *_ in RowReader(tmp_path, 1).rows(NONE, ALL)] == [1, 2]
    assert [at for at, *_ in RowReader(tmp_path, 0).rows(NONE, ALL)] == [2]
