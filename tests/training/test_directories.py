"""What is known of a run directory without PyTorch."""

import pytest

from emrun.base.errors import RunExists, UsageError
from emrun.training.directories import check_free, check_outside, check_run, is_begun

ENDED = "status: {}\nreason: done\nepochs_done: {}\niterations_done: {}\n"


@pytest.fixture
def run(tmp_path):
    def write(text):
        (tmp_path / "trace.yaml").write_text(text)
        (tmp_path / "config.yaml").write_text("")
        return tmp_path

    return write


def test_a_run_that_has_ended_is_begun_and_its_directory_is_not_free(run):
    directory = run(ENDED.format("finished", 1, 5))
    assert is_begun(directory)
    check_run(directory)
    with pytest.raises(RunExists, match="already holds a run"):
        check_free(directory)


def test_a_failed_start_is_not_begun_and_its_directory_is_free(run):
    directory = run(ENDED.format("failed", 0, 0))
    assert not is_begun(directory)
    check_free(directory)


def test_whether_a_run_that_has_not_ended_is_in_use_is_left_to_its_lock(run):
    check_free(run("status: running\n"))


def test_a_run_does_not_lie_in_another_one_and_a_project_is_not_a_run(run, tmp_path):
    (tmp_path / "config.yaml").touch()
    check_outside(tmp_path / "log" / "digits")
    directory = run(ENDED.format("finished", 1, 5))
    check_outside(directory)
    for inner in (directory / "digits", directory / "log" / "digits"):
        with pytest.raises(
            UsageError, match=r"is a run directory, and a run cannot lie in another one; choose another"
        ):
            check_outside(inner)


def test_a_directory_that_is_empty_or_missing_is_free_and_not_a_run(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        check_free(directory)
        with pytest.raises(UsageError, match="is not a run directory"):
            check_run(directory)
