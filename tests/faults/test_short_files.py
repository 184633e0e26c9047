"""`metrics.jsonl` and `training.csv` are shorter than the checkpoint counts on, or others, when a run is resumed.

The CSV file is made again from `metrics.jsonl`; what `metrics.jsonl` has lost is named. No line is glued to another and
no epoch stands twice.

Taken out once by hand, these made this fail: the comparison of the digest, the making, and the cut behind the last
whole line, at a resume and while the run goes on.
"""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
from campaign import thinned

from emrun import AbstractHook, create_training
from emrun.training.create import train

MORE = ("resume", "-q", "run", "hooks.StopAfter.epochs=4")
FILES = ("metrics.jsonl", "training.csv")
CUT = [(name, "cut", index) for name in FILES for index in range(400)]
CHANGED = [
    *((name, "line gone", index) for name in FILES for index in range(5)),
    *((name, how, 0) for name in (*FILES, "both") for how in ("deleted", "emptied")),
    *((name, "edited", index) for name in FILES for index in range(10)),
    *((name, "longer", index) for name in FILES for index in range(5)),
    *(("both", "cut", index) for index in range(20)),
]


def harm(path, how, index):
    """Change a file."""
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    made = {
        "cut": content[: index * len(content) // 400],
        "line gone": b"".join(line for number, line in enumerate(lines) if number != index % len(lines)),
        "emptied": b"",
        "edited": _edited(content, index),
        "longer": b"".join(
            line.replace(b"\n", b" \n") if number <= index else line for number, line in enumerate(lines)
        ),
    }.get(how)
    if made is None:
        path.unlink()
    else:
        path.write_bytes(made)


def _edited(content, index):
    """Return content with another digit; of a number behind the first column, so that no epoch becomes another."""
    digits = [at for at, char in enumerate(content[:-2]) if chr(char) in "13579" and content[at - 1 : at] == b"."]
    at = digits[index % len(digits)]
    return content[:at] + (b"2") + content[at + 1 :]


def epochs(directory):
    return [json.loads(line)["epoch"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(finished_run, longer_run):
    """The directory of a finished run, and the file that the run has if it is one epoch longer."""
    return finished_run, (longer_run / "training.csv").read_bytes()


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("metrics.jsonl or training.csv is cut, edited, emptied, deleted, or lacks a line", share=2)
@pytest.mark.parametrize("cases", thinned([CUT, CHANGED], [CHANGED]), ids=["cut", "changed"])
def test_short_files_are_rebuilt_or_continue_on_a_new_line_with_a_warning(project, small, whole, trials, cases):
    finished, expected = whole
    run = project / "run"
    for trial in trials(cases, small=4):
        name, how, index = trial.case
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(finished, run, symlinks=True)
        names = FILES if name == "both" else (name,)
        for each in names:
            harm(run / each, how, index)
        with trial:
            done = small.command(*MORE, cwd=project)
            assert done.returncode == 0, done.stderr
            found, csv = epochs(run), (run / "training.csv").read_bytes()
            assert found == sorted(set(found))
            assert found[-1] == 4
            missing = sorted({0, 1, 2, 3} - set(found))
            with trial.telling():
                if "metrics.jsonl" in names:
                    assert str(Path("run", "metrics.jsonl")) in done.stderr
                    assert not missing or f"missing epochs: {', '.join(map(str, missing))}." in done.stderr
            if how == "edited":
                assert missing == []
            if "metrics.jsonl" not in names:
                assert csv == expected
            assert csv.count(b"\n") == len(csv.splitlines())
            header, *rows = [line.split(b",") for line in csv.splitlines()]
            assert {len(row) for row in rows} == {len(header)}
            assert [int(row[0]) for row in rows] == found


class Harm(AbstractHook):
    """Changes a file of the run after an epoch, when its line is written."""

    def __init__(self, path, how, epoch):
        super().__init__()
        self.path, self.how, self.epoch = path, how, epoch

    def before_epoch(self, epoch_id):
        if epoch_id == self.epoch + 1:
            harm(self.path, self.how, 251)  # of the lines, the last


def train_and_harm(config, directory, name, how, epoch):
    training = create_training(config, output_dir=directory)
    training.main_loop.change_hooks([*training.main_loop.hooks, Harm(directory / name, how, epoch)])
    train(training)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("metrics.jsonl or training.csv is cut, emptied or deleted while the run goes on")
def test_a_file_that_is_harmed_while_the_run_goes_on_is_whole_after_the_next_start(tmp_path, small, trials):
    assert small.forked(train_and_harm, small.config, tmp_path / "straight", "none", "none", 9) == 0
    expected = (tmp_path / "straight" / "training.csv").read_text()
    cases = product(FILES, ("deleted", "emptied", "cut", "line gone"), (0, 1, 2))
    for trial in trials(cases, small=4):
        directory = tmp_path / "-".join(map(str, trial.case))
        name, how, epoch = trial.case
        with trial:
            assert small.forked(train_and_harm, small.config, directory, name, how, epoch) == 0
            with trial.telling():
                log = (directory / "train.log").read_text()
                assert name == "training.csv" or "metrics.jsonl was " in log
                assert (name, how) != ("training.csv", "deleted") or "the run goes on without this file" in log
            assert epochs(directory)[-(3 - epoch) :] == list(range(epoch + 1, 4))
            with trial.reading():
                assert small.forked(small.start_or_resume, directory) == 0
            csv = (directory / "training.csv").read_text()
            assert [int(line.split(",")[0]) for line in csv.splitlines()[1:]] == epochs(directory)
            assert csv == expected or name == "metrics.jsonl"
