"""`emrun trace`."""

import csv
import io
import json
import subprocess
import sys

import pytest

from emrun.record.metrics_log import MetricsLog
from emrun.record.steps import Chunk

STEPS = [Chunk(1, 1, {"loss": [0.5, float("nan")]}), Chunk(10, 5, {"loss": [0.25, 0.2], "norm": [None, 2.0]})]


@pytest.fixture
def runs(make_run):
    for name in ("a", "b"):
        make_run(name, (0.1, 1 / 3), steps=STEPS)


def test_epochs_are_csv_with_exact_numbers(runs, emrun_here):
    done = emrun_here("trace", "log/a")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [*csv.DictReader(io.StringIO(done.stdout))]
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[1]["valid/accuracy"]) == 1 / 3


def test_several_runs_are_one_table_with_their_names(runs, emrun_here):
    done = emrun_here("trace", "log/a", "log/b", "-f", "tsv", "-k", "lr=model.optimizer.lr,epoch", "-k", "valid/loss")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[0] == ["run", "lr", "epoch", "valid/loss"]
    assert [line[:3] for line in lines[1:]] == [
        ["a", "0.003", "0"],
        ["a", "0.003", "1"],
        ["b", "0.003", "0"],
        ["b", "0.003", "1"],
    ]


def test_steps_are_printed_in_each_format(runs, emrun_here):
    assert (
        emrun_here("trace", "log/a", "--steps").stdout == "iteration,loss,norm\n1,0.5,\n2,NaN,\n10,0.25,\n15,0.2,2.0\n"
    )
    lines = emrun_here("trace", "log/a", "--steps", "-f", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines][1:] == [
        {"iteration": 2, "loss": "NaN"}, {"iteration": 10, "loss": 0.25}, {"iteration": 15, "loss": 0.2, "norm": 2.0},
    ]  # fmt: skip
    table = emrun_here("trace", "log/a", "--steps", "-f", "table", "--variable", "loss").stdout
    assert [line.split() for line in table.splitlines()][::5] == [["iteration", "loss"], ["15", "0.2"]]


def test_the_keys_are_listed(runs, emrun_here):
    done = emrun_here("trace", "log/a", "--list-keys", "--stream", "valid")
    assert done.stdout.split() == [
        "epoch",
        "iteration",
        "seconds",
        "valid/loss",
        "valid/accuracy",
        "valid/accuracy/std",
    ]


def test_a_reader_that_ends_early_ends_the_command_quietly(make_run, emrun, tmp_path):
    make_run("a", steps=[Chunk(1 + 1000 * index, 1, {"loss": [0.5] * 1000}) for index in range(50)])
    script = f"{sys.executable} -m emrun trace log/a --steps 2> errors | head -n 2; cat errors"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "iteration,loss\n1,0.5\n"


def test_names_of_any_kind_are_in_one_line(make_run, emrun_here, tmp_path):
    directory = make_run("a", (0.5,)).directory
    name = json.dumps("\x1b[31m\n,x")
    line = f'{{"epoch": 1, "streams": {{"valid": {{{name}: 1.0}}}}}}\nnothing\n'
    (directory / "metrics.jsonl").write_text(line)
    directory.rename(tmp_path / "log" / "\x1b[31m")
    for kind in ("csv", "table", "jsonl"):
        done = emrun_here("trace", "log/\x1b[31m", "log/\x1b[31m/../\x1b[31m", "-f", kind)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert r"metrics.jsonl: line 2 is damaged" in done.stderr
    assert len(done.stdout.splitlines()) == 2


WRONG = [
    (["trace", "log"], "log is not a run directory: it has no trace.yaml of a run; the newest runs in it: log/"),
    (["trace", "log/none"], "log/none is not a run directory: it does not exist"),
    (["trace", "log/a", "--stream", "tets"], "no run has recorded the stream 'tets'"),
    (["trace", "log/a", "-k", "valid/los"], "did you mean 'valid/loss'"),
    (["trace", "log/a", "--steps", "--stream", "train"], "leave it out"),
    (["trace", "log/a", "-f", "xml"], "is not one of"),
]  # fmt: skip


def test_what_cannot_be_printed_is_an_error(runs, emrun_here):
    for arguments, message in WRONG:
        done = emrun_here(*arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr


def test_a_run_is_followed_until_it_ends(make_run, emrun_here, monkeypatch):
    run = make_run("a", (0.1,), status="running")
    record = MetricsLog(run.directory)
    record.read_epochs()

    def pause(seconds):
        if len(record.epochs) < 3:
            record.add_epoch(len(record.epochs), 10, 10, 0.5, {"valid": {"accuracy": {"mean": 0.5}}})
        else:
            run.end("finished", 0, None, 2, 20)

    monkeypatch.setattr("emrun.runs.finding.sleep", pause)
    done = emrun_here("trace", "log/a", "--follow", "-k", "epoch,valid/accuracy")
    assert (done.returncode, done.stdout) == (0, "epoch,valid/accuracy\n0,0.1\n1,0.5\n2,0.5\n")


@pytest.mark.parametrize("arguments", [("log/b",), ("-f", "table"), ("--list-keys",)])
def test_only_rows_of_one_run_can_be_followed(runs, emrun_here, arguments):
    done = emrun_here("trace", "log/a", "--follow", *arguments)
    assert done.returncode == 2
    assert "--follow prints the rows of one run as csv, tsv or jsonl" in done.stderr
