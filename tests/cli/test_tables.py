"""Tables: what the last one says of a run."""

import re
from types import SimpleNamespace

import pytest

import emrun.hooks
from emrun.cli import closing_lines
from emrun.cli.output import summary

NAN = float("nan")


def test_the_last_table_skips_nan_and_has_the_variables_of_the_log_and_one_row_for_many_classes():
    classes = {"mean": 0.5, **{name: index / 10 for index, name in enumerate("abcdef")}}
    epochs = [
        {"epoch": epoch, "streams": {"valid": {"loss": {"mean": loss}, "f1": classes, "learning_rate": 0.1}}}
        for epoch, loss in enumerate((NAN, 3.0, 2.0, NAN))
    ]
    assert [line.split() for line in summary(epochs).splitlines()[2:]] == [
        ["valid", "loss", "nan", "2", "(2)", "3", "(1)"],
        ["valid", "f1", "0.5", "0.5", "(0)", "0.5", "(0)"],
        ["valid", "lowest", "f1", "a", "0,", "b", "0.1,", "c", "0.2"],
    ]
    assert [line.split()[:2] for line in summary(epochs, ["loss"]).splitlines()[2:]] == [["valid", "loss"]]
    large = [{"epoch": 1, "streams": {"valid": {"count": 10**400}}}]  # too large for a float
    assert summary(large).splitlines()[2].split()[2] == str(10**400)


ROWS = """
import numpy as np

class Rows:
    def train_stream(self, ctx):
        for rows in ctx.batches(20, 10):
            yield {"x": np.ones((len(rows), 2), "float32"), "y": np.ones((len(rows), 1), "float32")}

    valid_stream = test_stream = train_stream
"""
CONFIG = """
name: a_name_that_is_long
dataset: {class: rows_of_a_project.Rows}
model:
  module: {class: torch.nn.Sequential, args: [%s]}
  inputs: [x]
  outputs: [out]
  loss: {class: torch.nn.MSELoss, inputs: [out, y]}
  optimizer: {class: SGD, lr: 0.01, match: "^39"}
main_loop: {extra_streams: [valid], report: false}
hooks:
  - ComputeStats: {variables: [{loss: [mean, std, min, max, median]}]}
  - SavePredictions: {stream: valid, file: rows.csv}
  - StopAfter: {epochs: 2}
"""


@pytest.fixture
def project(tmp_path):
    layers = ", ".join("{class: torch.nn.Linear, in_features: 2, out_features: 2}" for _ in range(40))
    (tmp_path / "rows_of_a_project.py").write_text(ROWS)
    (tmp_path / "c.yaml").write_text(CONFIG % f"{layers}, {{class: torch.nn.Linear, in_features: 2, out_features: 1}}")
    return tmp_path


def test_a_terminal_of_80_columns_gets_folded_lines_each_file_once_and_a_command_to_paste(project, emrun_on_terminal):
    place = "a_folder/of_some_depth/and_a_long_name"
    status, out, text = emrun_on_terminal("train", "c.yaml", "--output-dir", place)
    assert status == 0, text
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)) if line.strip()]
    epochs = [index for index, line in enumerate(lines) if line.startswith("epoch 1  train")]
    assert max(len(lines[index]) for index in epochs) <= 80
    assert any(lines[index + 1].startswith("    ") for index in epochs)
    assert sum("of stream 'valid' to" in line for line in lines) == 1
    log = (project / place / "train.log").read_text()
    assert log.count("of stream 'valid' to") == 3
    assert re.search(r"epoch 1  train  loss .* s$", log, re.MULTILINE)
    assert f"next: emrun eval {place} test" in out  # standard output is a pipe here


def test_check_keeps_the_last_modules_and_counts_what_is_trained(project, emrun_here):
    done = emrun_here("check", "c.yaml", "model.optimizer.match=^40")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["11", "more", "(emrun", "check", "--json", "lists", "all)", "66"] in rows
    assert any(row[:2] == ["40", "Linear"] for row in rows)
    assert not any(row[:2] == ["20", "Linear"] for row in rows)
    assert ["optimizer", "SGD", "0", "0.01", "0", "3", "40.weight,", "40.bias"] in rows


def test_the_next_end_is_later_than_what_a_fork_to_an_end_that_has_passed_has_done(make_run):
    loop = SimpleNamespace(train_stream_name="train", extra_streams=[], hooks=[emrun.hooks.StopAfter(1)], report=False)
    loop.model = SimpleNamespace(schedulers=())
    training = SimpleNamespace(main_loop=loop, dataset=object(), output_dir=make_run("a", [0.5]).directory)
    *_, last = closing_lines.closing_lines(training, "3 epochs done (StopAfter epochs: 1)", keeps=True)
    assert last.endswith("log/a hooks.StopAfter.epochs=6")


def test_the_next_command_is_broken_where_the_shell_goes_on(monkeypatch, make_run):
    run = make_run("a", [0.5])
    hook = emrun.hooks.StopAfter(epochs=3)
    model = SimpleNamespace()
    loop = SimpleNamespace(train_stream_name="train", extra_streams=[], hooks=[hook], report=False, model=model)
    training = SimpleNamespace(main_loop=loop, dataset=object(), output_dir=run.directory)
    for columns, end in ((None, " "), (200, " "), (40, " \\\n    ")):
        monkeypatch.setattr(closing_lines, "width", lambda stream, columns=columns: columns)
        *_, last = closing_lines.closing_lines(training, "3 epochs done (StopAfter epochs: 3)", keeps=True)
        assert last.startswith("next: emrun resume ")
        assert last.endswith(f"log/a{end}hooks.StopAfter.epochs=6")
    loop.extra_streams, model.schedulers = ["valid"], {"optimizer": object()}  # which may have the length of the run
    *_, last = closing_lines.closing_lines(training, "3 epochs done (StopAfter epochs: 3)", keeps=True)
    assert last.split()[1:3] == ["emrun", "eval"]
