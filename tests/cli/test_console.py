"""How the commands look: colours on a terminal, none elsewhere, and what `-q` and `-v` leave out and add."""

import re
import sys
import warnings

import pytest
from campaign import thinned

from emrun.cli.console import terminal_log

CONFIG = """\
dataset: {class: Majority, n: 50}
model:
  module:
    class: torch.nn.Sequential
    args: [{class: torch.nn.Linear, in_features: 11, out_features: 1}, {class: torch.nn.Flatten, start_dim: 0}]
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.BCEWithLogitsLoss, inputs: [logit, y]}
  optimizer: {class: SGD, lr: 0.5}
main_loop: {report: false}
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - StopAfter: {epochs: 1}
"""


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)


def test_an_error_on_a_terminal_has_its_position_bold_and_its_caret_red(emrun_on_terminal):
    status, _, text = emrun_on_terminal("train", "c.yaml", "dataset.m=1")
    assert status == 2
    assert text.startswith("\x1b[1moverride 'dataset.m=1'\x1b[0m: dataset: unknown argument 'm'")
    _, _, text = emrun_on_terminal("check", "--static", "c.yaml", "~model.module.args.0.in_features", "dataset.m=1")
    bold, red, reset = "\x1b[1m", "\x1b[31m\x1b[1m", "\x1b[0m"
    assert f"{bold}c.yaml:5:12{reset}: model.module.args[0]: missing argument 'in_features'" in text
    assert f"\r\n{red}{' ' * 15}^{reset}\r\n" in text
    assert text.endswith("2 errors\r\n")


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("NO_COLOR=1", ["train", "c.yaml", "dataset.m=1"]),
        ("NO_COLOR=1", ["eval", "x", "y"]),
        ("TERM=dumb", ["train", "c.yaml", "hooks=[]", "dataset.n=x"]),
    ],
    ids=["NO_COLOR-train", "NO_COLOR-eval", "TERM-train"],
)
def test_colours_can_be_switched_off(emrun_on_terminal, variable, command):
    status, _, text = emrun_on_terminal(*command, env=dict([variable.split("=")]))
    assert status == 2
    assert "\x1b" not in text


def test_a_pipe_and_the_log_have_no_colours(emrun, emrun_here, tmp_path, run_directory):
    done = emrun("train", "c.yaml", "hooks=[StopAfter: {epochs: 0}]")
    assert "\x1b" not in done.stderr + done.stdout + (run_directory(tmp_path / "log") / "train.log").read_text()
    done = emrun_here("eval", "nowhere", "valid")
    assert done.stderr == "error: nowhere is not a run directory: it does not exist\n"


def test_quiet_shows_warnings_only_and_verbose_more(emrun, emrun_here, tmp_path):
    quiet = emrun("train", "-q", "c.yaml")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    normal, verbose = emrun_here("train", "c.yaml"), emrun_here("train", "-v", "c.yaml")
    assert "finished: 1 epoch done" in normal.stderr
    assert "built the dataset in" not in normal.stderr
    assert "built the dataset in" in verbose.stderr
    assert re.search(r"^all +[\d,]+ +[\d,]+$", verbose.stderr, re.MULTILINE)  # the table of the parameters


def test_a_warning_on_a_terminal_is_yellow(emrun_on_terminal, tmp_path):
    (tmp_path / "my_hooks.py").write_text(
        "import logging\nfrom emrun import AbstractHook\n"
        "class Warn(AbstractHook):\n"
        "    def before_training(self):\n"
        "        logging.getLogger('mine').warning('look here')\n"
    )
    (tmp_path / "c.yaml").write_text(CONFIG + "  - my_hooks.Warn\n")
    _, _, text = emrun_on_terminal("train", "c.yaml")
    assert "\x1b[33m\x1b[1mwarning:\x1b[0m look here" in text


DATA = """\
import click
from emrun.datasets.majority import Majority

RAISED = {
    "exit": click.exceptions.Exit(0), "abort": click.Abort(), "usage": click.UsageError("x"),
    "pipe": BrokenPipeError(32, "x"), "eof": EOFError("x"),
}


class Data(Majority):
    def __init__(self, kind=None):
        super().__init__(n=50)
        if kind:
            raise RAISED[kind]
"""


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *(("train", "usage"), ("eval", "exit"), ("dataset", "abort")),
        *(pytest.param("train", kind, marks=pytest.mark.campaign) for kind in ("eof", "exit", "abort", "pipe")),
        pytest.param("resume", "pipe", marks=pytest.mark.campaign),
    ],
)
def test_what_click_would_end_with_is_a_failure_in_code_of_a_user(emrun_here, tmp_path, command, kind):
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("class: Majority, n: 50", "class: my_data.Data"))
    override = f"dataset.kind={kind}"
    if command in ("train", "dataset"):
        done = emrun_here(*command.split(), *(["stream_info"] * (command == "dataset")), "c.yaml", override)
    else:
        assert emrun_here("train", "-q", "c.yaml", "--output-dir", "run", "hooks.StopAfter.epochs=1").returncode == 0
        words = ["valid"] if command == "eval" else ["hooks.StopAfter.epochs=2"]
        done = emrun_here(command, "run", *words, override)
    assert done.returncode == 1, done
    assert 'my_data.py", line 14, in __init__' in done.stderr


NET = """\
import random
import torch


class Net(torch.nn.Module):
    def __init__(self, wrong="shape"):
        super().__init__()
        self.wrong = wrong
        self.layer = torch.nn.Linear(64, 1)

    def forward(self, x):
        if self.wrong == "library":
            return random.sample([1, 2], 5)
        if self.wrong == "token":
            return torch.nn.functional.embedding(torch.arange(3), self.layer.weight)
        return self.layer(x) if self.wrong == "shape" else [][len(x)]


def loss(logit, y):
    return torch.nn.functional.cross_entropy(logit, y.sum(dim=3))


def classes(logit, y):
    return torch.nn.functional.cross_entropy(logit[:, None].expand(-1, 2), (0 * y + 2).long())
"""
WRONG_CALLS = {
    "shape": (
        ["model.module={class: my_net.Net}"],
        "forward of Net got x: float32 (10, 11); a linear layer with in_features 64 got a last axis of 11: set "
        "in_features: 11, or change what it gets",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (10x11 and 64x1)",
        ['my_net.py", line 16, in forward', "return self.layer(x) if"],
    ),
    "Python": (
        ["model.module={class: my_net.Net, wrong: list}"],
        "forward of Net got x: float32 (10, 11)",
        "IndexError: list index out of range",
        ['my_net.py", line 16, in forward', "return self.layer(x) if"],
    ),
    "a library of Python's": (
        ["model.module={class: my_net.Net, wrong: library}"],
        "forward of Net got x: float32 (10, 11)",
        "ValueError: Sample larger than population",
        ['my_net.py", line 13, in forward', "random.sample"],
    ),
    "loss": (
        ["model.loss={import: my_net.loss, inputs: [logit, y]}"],
        "model.loss got logit: float32 (10,), y: float32 (10,)",
        "IndexError: Dimension out of range",
        ['my_net.py", line 20, in loss', "return torch.nn.functional.cross_entropy"],
    ),
    "metric": (
        ["model.metrics={m: {import: my_net.loss, inputs: [y, x]}}"],
        "model.metrics.m got y: float32 (10,), x: float32 (10, 11)",
        "IndexError: Dimension out of range",
        ['my_net.py", line 20, in loss'],
    ),
    "the number of a class": (
        ["model.loss={import: my_net.classes, inputs: [logit, y]}"],
        "model.loss got logit: float32 (10,), y: float32 (10,); cross_entropy takes whole numbers from 0 to 1 here",
        "IndexError: Target 2 is out of bounds.",
        ['my_net.py", line 24, in classes'],
    ),
    "the number of a token": (
        ["model.module={class: my_net.Net, wrong: token}"],
        "forward of Net got x: float32 (10, 11); embedding takes whole numbers from 0 to 0 here",
        "IndexError: index out of range in self",
        ['my_net.py", line 15, in forward'],
    ),
    "without code of one's own": (
        ["model.module={class: torch.nn.Linear, in_features: 64, out_features: 1}"],
        "forward of Linear got x: float32 (10, 11); a linear layer with in_features 64 got a last axis of 11: set "
        "in_features: 11, or change what it gets",
        "RuntimeError: mat1 and mat2",
        [],
    ),
}


@pytest.mark.parametrize("name", thinned(WRONG_CALLS, ["shape", "the number of a class"]))
def test_an_error_in_forward_or_loss_says_what_went_in_then_torchs_message_then_the_users_line(
    emrun_here, tmp_path, name
):
    overrides, went_in, message, own = WRONG_CALLS[name]
    (tmp_path / "my_net.py").write_text(NET)
    done = emrun_here("train", "-q", "c.yaml", "--output-dir", "run", *overrides)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == went_in
    assert lines[1].startswith(message)
    assert "Traceback" not in done.stderr
    places = [line for line in lines if line.startswith("  File ")]
    assert len(places) == bool(own)
    assert all(each in done.stderr for each in own)
    assert "the full traceback is in run/train.log" in lines
    log = (tmp_path / "run/train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert log.rstrip().endswith(went_in)
    replayed = emrun_here("replay", "run")
    assert (replayed.returncode, "\nreproduced\n" in replayed.stdout) == (0, True)


@pytest.mark.parametrize(("options", "times"), [([], 1), (["always"], 3)])
def test_a_warning_of_python_is_shown_once_unless_the_user_says_how_often(options, times, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "warnoptions", options)
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", lambda message, *others: shown.append(str(message)))
        warnings.simplefilter("always")  # as Python does after each `catch_warnings`
        before = warnings.showwarning
        with terminal_log():
            for _ in range(3):
                warnings.warn("the same", UserWarning, stacklevel=1)
            warnings.warn("another", UserWarning, stacklevel=1)
        assert warnings.showwarning is before
    assert shown == [*["the same"] * times, "another"]
