"""Files that are made from the rows of a run are those of an uninterrupted run, whenever it is killed.

Taken out once by hand, the making, the opening of the old database, the removal of the old event file, and the values
of the rows to come in the checkpoint, made this fail.
"""

import shutil
import signal
import sqlite3
from contextlib import closing
from time import perf_counter

import pytest

from emrun import AbstractHook, create_training, resume_training
from emrun.training.create import train

SINKS = [
    "LogNorms",
    {"WriteCSV": {"output_file": "curves.csv", "every": "2 updates", "on_missing_variable": "default"}},
    {"WriteSQLite": {"every": "3 updates"}},
    {"WriteTensorBoard": {"every": "2 updates"}},
]
LONGER = ["hooks.StopAfter.epochs=4", "main_loop.extra_streams=[{valid: 3 epochs}]"]


class Alarm(AbstractHook):
    """Ends the process like a kill, some seconds after the sinks begin to make their files."""

    def __init__(self, delay):
        super().__init__()
        self.delay = delay

    def before_training(self):
        signal.setitimer(signal.ITIMER_REAL, self.delay)


def start_or_resume(directory, config, *hooks):
    if (directory / "config.yaml").exists():
        training = resume_training(directory)
    else:
        training = create_training(config, output_dir=directory, overrides=LONGER)
    if training is not None:
        training.main_loop.change_hooks([*hooks, *training.main_loop.hooks])
        train(training)


def tables(directory):
    """Return the rows of the database, without times."""
    with closing(sqlite3.connect(directory / "metrics.sqlite")) as database:
        queries = ("epoch, iteration, updates FROM epochs", "* FROM epoch_values", "* FROM step_values")
        return [database.execute(f"SELECT {each} ORDER BY rowid").fetchall() for each in queries]


def points(directory):
    """Return the points of the curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def written(directory):
    texts = {name: (directory / name).read_text() for name in ("training.csv", "curves.csv")}
    return {**texts, "tables": tables(directory), "points": points(directory)}


def check_whole(directory):
    """Check that each file is the old one or the new one."""
    for name in ("training.csv", "curves.csv"):
        if (directory / name).exists():
            lines = (directory / name).read_text().splitlines()
            assert len({line.count(",") for line in lines}) <= 1
    if (directory / "metrics.sqlite").exists():
        with closing(sqlite3.connect(directory / "metrics.sqlite")) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (3,)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("kill -9 at random moments with CSV files, a database and TensorBoard", share=4)
def test_kills_at_random_moments_change_no_file_that_is_made_from_the_rows(tmp_path, small, trials):
    import torch.utils.tensorboard.summary  # noqa: F401 - once, before the children

    hooks = [*small.config["hooks"][:-1], *SINKS, small.config["hooks"][-1]]
    config = {**small.config, "hooks": hooks, "model": {**small.config["model"], "accumulate": 2}}
    config["main_loop"] = {**config["main_loop"], "fixed_epoch_size": 9}
    began = perf_counter()
    assert small.forked(start_or_resume, tmp_path / "straight", config) == 0
    seconds = perf_counter() - began
    expected = written(tmp_path / "straight")
    assert len(expected["points"]["steps/gradient_norm"]) > 8
    directory = tmp_path / "run"

    def run(draw, when):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process like a kill
        if when == "made":
            start_or_resume(directory, config, Alarm(draw.uniform(0.0005, 0.02)))
        else:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.3, 1) * seconds)
            start_or_resume(directory, config)

    for trial in trials(range(100), small=1):
        with trial:
            shutil.rmtree(directory, ignore_errors=True)
            for when in ("written", "made", "written", "made"):
                assert small.forked(run, trial.random, when) in (0, -signal.SIGALRM)
                trial.random.random()  # the children draw from copies
                check_whole(directory)
            assert small.forked(start_or_resume, directory, config) == 0
            assert written(directory) == expected
            if trial.case % 2:
                for name in ("training.csv", "curves.csv", "metrics.sqlite"):
                    (directory / name).unlink()
                shutil.rmtree(directory / "tensorboard")
                assert small.forked(start_or_resume, directory, config) == 0
                assert written(directory) == expected
