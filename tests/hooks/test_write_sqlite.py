"""The SQLite database of a run; tests/training/test_everything.py has runs that are interrupted and killed."""

import sqlite3
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from emrun import AbstractHook, create_training, read_steps, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import WriteSQLite
from emrun.record.record import Record
from emrun.training.create import train

STATS = {"ComputeStats": {"variables": [{"loss": ["mean", "std"]}]}}


def query(run, sql):
    with closing(sqlite3.connect(run / "metrics.sqlite")) as database:
        return database.execute(sql).fetchall()


class NotANumber(AbstractHook):
    """Adds NaN, infinity, a plain number, one that is too large for a float, and a word."""

    writes = ("odd", "plain", "large", "word")

    def after_epoch(self, epoch_data):
        odd = {"nan": float("nan"), "inf": float("inf")}
        epoch_data["valid"] |= {"odd": odd, "plain": 3, "large": 10**400, "word": "many"}


@pytest.fixture
def run_with(tmp_path, digits_config):
    """Train with these hooks; return the run directory and the main loop. An epoch has 15 updates."""

    def run(*hooks, more=(), epochs=2, **main_loop):
        config = digits_config([*hooks, {"StopAfter": {"epochs": epochs}}], **main_loop)
        training = create_training(config, output_dir=tmp_path / "run")
        training.main_loop.change_hooks([*more, *training.main_loop.hooks])
        train(training)
        return tmp_path / "run", training.main_loop

    return run


def test_the_tables_have_the_epochs_the_statistics_and_the_steps(run_with, in_docstring):
    (stats, hook) = in_docstring(WriteSQLite)
    hook["WriteSQLite"]["every"] = "4 updates"
    run, loop = run_with(stats, hook)
    assert query(run, "SELECT epoch, iteration, updates FROM epochs") == [(0, 0, 0), (1, 15, 15), (2, 30, 30)]
    for line in loop.metrics:
        expected = {
            (stream, name, aggregation): value
            for stream, variables in line["streams"].items()
            for name, found in variables.items()
            for aggregation, value in (found.items() if isinstance(found, dict) else [(None, found)])
        }
        rows = query(
            run, f"SELECT stream, variable, aggregation, value FROM epoch_values WHERE epoch = {line['epoch']}"
        )
        assert {row[:3]: row[3] for row in rows} == expected
        assert len(rows) == len(expected)
    rows = query(run, "SELECT iteration, updates, value FROM step_values WHERE name = 'loss'")
    assert [row[:2] for row in rows] == [(each, each) for each in (4, 8, 12, 16, 20, 24, 28)]
    assert rows[0][2] == pytest.approx(read_steps(run)["loss"][:4].mean(), rel=1e-6)


def test_nan_is_null_and_what_is_not_a_number_is_left_out(run_with):
    run, _ = run_with(STATS, "WriteSQLite", more=[NotANumber()], epochs=1)
    found = query(run, "SELECT variable, aggregation, value FROM epoch_values WHERE epoch = 1 AND stream = 'valid'")
    assert [row for row in found if row[0] != "loss"] == [
        ("odd", "nan", None),
        ("odd", "inf", np.inf),
        ("plain", None, 3),
        ("large", None, np.inf),
    ]


def test_means_are_there_within_the_epoch_at_most_once_a_second(tmp_path, monkeypatch):
    now = iter([100.0, 100.0, 100.5, 101.1, 101.1])  # for each row, and when rows are written
    monkeypatch.setattr("emrun.record.record.monotonic", lambda: next(now))
    record, hook = Record(None), WriteSQLite(every="2 updates", output_dir=tmp_path)
    hook.main_loop = SimpleNamespace(rows=record)
    hook.ask(record)
    hook.before_training()
    for done, count in ((2, 1), (4, 1), (6, 3)):
        counts = {"training_epochs_done": 0, "iterations_done": done, "updates_done": done}
        record._add_means("2 updates", {"loss": 0.5}, None, SimpleNamespace(train_stream_name="train", **counts))
        assert query(tmp_path, "SELECT count(*) FROM step_values") == [(count,)]


class Locks(AbstractHook):
    """Another program that locks the database during epoch 1."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def before_epoch(self, epoch_id):
        if epoch_id == 1:
            self.other = sqlite3.connect(self.path)
            self.other.execute("BEGIN EXCLUSIVE")
        elif epoch_id == 2:
            self.other.rollback()
            self.other.close()


def test_rows_that_a_lock_keeps_waiting_are_written_later(run_with, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("emrun.hooks.write_sqlite._WAIT", 0.01)
    run, _ = run_with(STATS, "WriteSQLite", more=[Locks(tmp_path / "run" / "metrics.sqlite")])
    assert "another program locks" in caplog.text
    assert query(run, "SELECT epoch FROM epochs") == [(0,), (1,), (2,)]
    assert query(run, "SELECT count(*) FROM epoch_values WHERE epoch = 1") == [(5,)]


def test_a_resume_deletes_later_rows_and_makes_those_that_were_lost_again(run_with):
    run, _ = run_with(STATS, "WriteSQLite")
    before = query(run, "SELECT * FROM epoch_values")
    with closing(sqlite3.connect(run / "metrics.sqlite")) as database, database:
        database.execute("INSERT INTO epochs VALUES (3, 45, 45, 0.1, 0.1)")  # by a process that was killed
        database.execute("DELETE FROM epoch_values WHERE epoch = 2 AND stream = 'valid'")
    train(resume_training(run, ["hooks.StopAfter.epochs=3"]))
    assert query(run, "SELECT epoch FROM epochs") == [(0,), (1,), (2,), (3,)]
    assert query(run, "SELECT count(*) FROM epoch_values WHERE epoch = 3") == [(5,)]
    assert query(run, "SELECT * FROM epoch_values WHERE epoch < 3") == before
    assert query(run, "SELECT count(*) FROM epoch_values WHERE epoch = 2") == [(5,)]


@pytest.mark.parametrize("content", [b"not a database, but long enough to be one" * 10, None])
def test_a_foreign_file_is_an_error_and_stays(run_with, tmp_path, content):
    path = tmp_path / "theirs.sqlite"
    if content is None:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE epochs (theirs)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    hook = WriteSQLite(file="theirs.sqlite", output_dir=tmp_path)
    hook.main_loop = SimpleNamespace(rows=Record(None))
    with pytest.raises(HookError, match="choose another name with `file`"):
        hook.before_training()
    assert path.read_bytes() == before


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"file": "a/b.sqlite"}, "file"), ({"file": ""}, "file"), ({"every": "2 epochs"}, "every"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteSQLite(**arguments)
    assert caught.value.argument == argument


def test_a_database_whose_beginning_was_interrupted_is_not_kept_aside(tmp_path, digits_config, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*arguments):
        raise Killed

    directory, config = tmp_path / "run", digits_config(["WriteSQLite", {"StopAfter": {"epochs": 1}}])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(WriteSQLite, "_note_place", killed)
        train(create_training(config, output_dir=directory))
    assert (directory / "metrics.sqlite").exists()
    train(resume_training(directory))
    assert not [*directory.glob("*kept*")]
