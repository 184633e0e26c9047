"""The SQLite database of a run; tests/training/test_everything.py has runs that are interrupted and killed."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from campaign import thinned

from emrun import AbstractHook, create_training, read_steps, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import WriteSQLite
from emrun.record.metrics_log import MetricsLog
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
    run, _ = run_with(STATS, "WriteSQLite", more=[NotANumber()], epochs=1, batch_size=500)
    found = query(run, "SELECT variable, aggregation, value FROM epoch_values WHERE epoch = 1 AND stream = 'valid'")
    assert [row for row in found if row[0] != "loss"] == [
        ("odd", "nan", None),
        ("odd", "inf", np.inf),
        ("plain", None, 3),
        ("large", None, np.inf),
    ]


def test_means_are_there_within_the_epoch_at_most_once_a_second(tmp_path, monkeypatch):
    now = iter([100.0, 100.0, 100.5, 101.1, 101.1])  # for each row, and when rows are written
    monkeypatch.setattr("emrun.record.metrics_log.monotonic", lambda: next(now))
    record, hook = MetricsLog(None), WriteSQLite(every="2 updates", output_dir=tmp_path)
    hook.register_mainloop(SimpleNamespace(rows=record, has_run=False))
    hook.before_training()
    for done, count in ((2, 1), (4, 1), (6, 3)):
        counts = {"training_epochs_done": 0, "iterations_done": done, "updates_done": done}
        record._add_means("2 updates", {"loss": 0.5}, SimpleNamespace(train_stream_name="train", **counts))
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
    run, _ = run_with(STATS, "WriteSQLite", more=[Locks(tmp_path / "run" / "metrics.sqlite")], batch_size=500)
    assert "another program locks" in caplog.text
    assert query(run, "SELECT epoch FROM epochs") == [(0,), (1,), (2,)]
    assert query(run, "SELECT count(*) FROM epoch_values WHERE epoch = 1") == [(5,)]


def change(path, how):
    """Change a database in a way in which another program, or a kill, may have changed it."""
    if how == "not a database":
        path.write_bytes(b"not a database, but long enough to be one" * 10)
        return
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO epochs VALUES (99, 1, 1, 0.1, 0.1)")
        database.execute("DELETE FROM epoch_values WHERE epoch = 2 AND stream = 'valid'")


@pytest.mark.parametrize("how", thinned(["rows", "not a database"], ["rows"]))
def test_a_resume_makes_the_rows_again_whatever_others_have_done_to_the_database(run_with, how):
    run, _ = run_with(STATS, "WriteSQLite", batch_size=500)
    before = query(run, "SELECT * FROM epoch_values")
    change(run / "metrics.sqlite", how)
    train(resume_training(run, ["hooks.StopAfter.epochs=3"]))
    assert query(run, "SELECT epoch FROM epochs") == [(0,), (1,), (2,), (3,)]
    assert query(run, "SELECT count(*) FROM epoch_values WHERE epoch = 3") == [(5,)]
    assert query(run, "SELECT * FROM epoch_values WHERE epoch < 3") == before


KILLED = """
import os, sqlite3, sys

path, mode = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
database.execute(f"PRAGMA journal_mode = {mode}")
database.execute("PRAGMA cache_size = 1")  # so that pages are written before the end of the transaction
for number in range(3):
    database.execute("BEGIN")
    database.execute("UPDATE epoch_values SET stream = 'theirs'")
    database.execute("INSERT INTO epoch_values SELECT a.* FROM epoch_values AS a, (SELECT 1 FROM epoch_values LIMIT 9)")
    if number < 2:
        database.execute("COMMIT")
os._exit(0)
"""


@pytest.mark.parametrize(("mode", "journal"), thinned([("delete", "journal"), ("wal", "wal")], [("wal", "wal")]))
def test_no_journal_of_the_old_database_is_applied_to_the_new_one(run_with, mode, journal):
    run, _ = run_with(STATS, "WriteSQLite", batch_size=500)
    before = query(run, "SELECT * FROM epoch_values")
    subprocess.run([sys.executable, "-c", KILLED, run / "metrics.sqlite", mode], check=True)
    assert (run / f"metrics.sqlite-{journal}").stat().st_size > 0
    train(resume_training(run, ["hooks.StopAfter.epochs=3"]))
    assert query(run, "SELECT * FROM epoch_values WHERE epoch < 3") == before
    assert query(run, "PRAGMA integrity_check") == [("ok",)]
    assert [path.name for path in run.glob("*metrics.sqlite*")] == ["metrics.sqlite"]


def test_a_name_of_a_file_that_exists_is_an_error(tmp_path):
    path = tmp_path / "theirs.sqlite"
    path.write_bytes(b"theirs")
    hook = WriteSQLite(file="theirs.sqlite", output_dir=tmp_path)
    with pytest.raises(HookError, match=r"theirs\.sqlite exists; move it elsewhere, or choose another name"):
        hook.register_mainloop(SimpleNamespace(rows=MetricsLog(None), has_run=False))
    assert path.read_bytes() == b"theirs"


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"file": "a/b.sqlite"}, "file"), ({"file": ""}, "file"), ({"every": "2 epochs"}, "every"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteSQLite(**arguments)
    assert caught.value.argument == argument
