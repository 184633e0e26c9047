"""Reading the step record."""

import math

import numpy as np
import pytest

from emrun import read_steps
from emrun.base.errors import UsageError
from emrun.record.steps import Chunk


@pytest.fixture
def write(tmp_path):
    """Write lines into the step record of a run; return its directory."""

    def write(*lines):
        (tmp_path / "config.yaml").write_text("")
        texts = [each.line() if isinstance(each, Chunk) else each for each in lines]
        (tmp_path / "steps.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return tmp_path

    return write


FIRST, LATER = Chunk(1, 1, {"loss": [0.1, math.inf]}), Chunk(10, 5, {"norm": [None, 2.0], "loss": [0.3, math.nan]})


def test_the_chunks_become_columns(write):
    steps = read_steps(write(FIRST, LATER))
    assert list(steps) == ["iteration", "loss", "norm"]
    np.testing.assert_equal(steps["iteration"], np.array([1, 2, 10, 15]))
    np.testing.assert_equal(steps["loss"], np.array([0.1, np.inf, 0.3, np.nan]))
    np.testing.assert_equal(steps["norm"], np.array([np.nan, np.nan, np.nan, 2.0]))
    assert (steps["iteration"].dtype, steps["norm"].dtype) == (np.int64, np.float64)


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ('{"format": 1, "from": 3, "ev', "line 2 is damaged or not a chunk of steps"),
        ("my notes", "line 2 is damaged or not a chunk of steps"),
        ('{"format": 3, "blocks": []}', "line 2 has format 3, but this emrun reads 1"),
        (FIRST, "line 2 begins before the end of line 1"),
    ],
    ids=["cut", "foreign", "newer", "twice"],
)
def test_a_line_that_cannot_be_read_is_reported_and_left_out(write, caplog, line, warning):
    directory = write(FIRST, line, LATER)
    before = (directory / "steps.jsonl").read_bytes()
    assert read_steps(directory)["iteration"].tolist() == [1, 2, 10, 15]
    assert warning in caplog.text
    assert (directory / "steps.jsonl").read_bytes() == before


def test_a_project_with_a_config_is_not_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UsageError, match=r"is not a run directory: it has neither trace.yaml nor steps.jsonl$"):
        read_steps(tmp_path)


def test_a_run_without_a_step_record_has_no_steps(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "trace.yaml").write_text("")
    steps = read_steps(str(tmp_path))
    assert list(steps) == ["iteration"]
    assert steps["iteration"].shape == (0,)


def test_what_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="is not a run directory"):
        read_steps(tmp_path / "nothing")
