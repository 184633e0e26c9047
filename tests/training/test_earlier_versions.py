"""A run that an earlier version of emrun has made: it can be looked at and evaluated, but not resumed."""

import logging
import shutil

import pytest
from click.testing import CliRunner
from storage.committing import sealed, tree
from training.tiny import CONFIG, trained, weights

from emrun import resume_training
from emrun.base.errors import UsageError
from emrun.cli import emrun

LISTS = (".files", ".lock", ".owner.json")  # that a process keeps of what it writes


@pytest.fixture
def earlier(tmp_path):
    """Return the directory of a run, with the checkpoints and the files of the first format."""
    config = {**CONFIG, "hooks": ["WriteCSV", *CONFIG["hooks"]]}
    directory = trained(tmp_path / "log", config=config).output_dir
    for place in (directory / "checkpoints").glob("it-*"):
        sealed(place, format=1)
    for name in ("rows.jsonl", ".files"):
        (directory / name).unlink()
    return directory


def content(directory):
    return {name: each for name, each in tree(directory).items() if name not in LISTS}


@pytest.mark.parametrize("fork", [False, True])
def test_a_resume_says_that_an_earlier_version_made_the_run_and_what_can_be_done(earlier, tmp_path, fork):
    before = content(earlier)
    with pytest.raises(
        UsageError, match=r"was made by an earlier version of emrun, .*can still be evaluated"
    ) as caught:
        resume_training(earlier, ["hooks.StopAfter.epochs=3"], fork=tmp_path / "fork" if fork else None)
    assert "set model.init_from: " in str(caught.value)
    assert content(earlier) == before
    assert not (tmp_path / "fork").exists()


def test_a_finished_run_has_nothing_to_do_and_its_files_stay(earlier, caplog):
    before = content(earlier)
    caplog.set_level(logging.INFO)
    assert resume_training(earlier) is None
    assert "an earlier version of emrun has made the run, which alone can train it longer" in caplog.text
    assert {name: each for name, each in content(earlier).items() if name != "train.log"} == {
        name: each for name, each in before.items() if name != "train.log"
    }


def test_a_run_of_an_earlier_version_can_be_looked_at_evaluated_and_begun_with(earlier, tmp_path):
    other = shutil.copytree(earlier, earlier.with_name("other"), symlinks=True)
    page = tmp_path / "page.html"
    for command in (
        ["ls", str(earlier.parent)],
        ["trace", str(earlier)],
        ["report", str(earlier), "-o", str(page)],
        ["eval", str(earlier), "valid", "-q"],
    ):
        done = CliRunner().invoke(emrun, command)
        assert (done.exit_code, done.exception) == (0, None), command
    assert "the runs are equal" in CliRunner().invoke(emrun, ["diff", str(earlier), str(other)]).stdout
    assert page.stat().st_size > 10_000
    begun = trained(
        tmp_path / "log", f"model.init_from={earlier / 'checkpoints' / 'latest'}", "hooks.StopAfter.epochs=0"
    )
    assert weights(begun) == (earlier / "checkpoints" / "latest" / "model.safetensors").read_bytes()
