"""How the commands look: colours on a terminal, none elsewhere, and what `-q` and `-v` leave out and add."""

import pytest

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


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_colours_can_be_switched_off(emrun_on_terminal, variable):
    env = {"NO_COLOR": "1"} if variable == "NO_COLOR" else {"TERM": "dumb"}
    for command in (
        ["train", "c.yaml", "dataset.m=1"],
        ["train", "c.yaml", "hooks=[]", "dataset.n=x"],
        ["eval", "x", "y"],
    ):
        status, _, text = emrun_on_terminal(*command, env=env)
        assert status == 2
        assert "\x1b" not in text


def test_a_pipe_and_the_log_have_no_colours(emrun, tmp_path, run_directory):
    done = emrun("train", "c.yaml", "hooks=[StopAfter: {epochs: 0}]")
    assert "\x1b" not in done.stderr + done.stdout + (run_directory(tmp_path / "log") / "train.log").read_text()
    done = emrun("eval", "nowhere", "valid")
    assert done.stderr == "error: nowhere is no run directory: it has no config.yaml\n"


def test_quiet_shows_warnings_only_and_verbose_more(emrun, tmp_path):
    quiet = emrun("train", "-q", "c.yaml")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    normal, verbose = emrun("train", "c.yaml"), emrun("train", "-v", "c.yaml")
    assert "finished: 1 epochs done" in normal.stderr
    assert "built the dataset in" not in normal.stderr
    assert "built the dataset in" in verbose.stderr
    both = emrun("train", "-v", "-q", "c.yaml")
    assert both.returncode == 2
    assert "--verbose and --quiet exclude each other" in both.stderr


def test_a_warning_on_a_terminal_is_yellow(emrun_on_terminal, tmp_path):
    (tmp_path / "my_hooks.py").write_text(
        "import logging\nfrom emrun import AbstractHook\n"
        "class Warn(AbstractHook):\n"
        "    def before_training(self):\n"
        "        logging.getLogger('mine').warning('look here')\n"
    )
    _, _, text = emrun_on_terminal("train", "c.yaml", "hooks.my_hooks.Warn={}")
    assert "look here" not in text  # the key of an override has dots of its own
    (tmp_path / "c.yaml").write_text(CONFIG + "  - my_hooks.Warn\n")
    _, _, text = emrun_on_terminal("train", "c.yaml")
    assert "\x1b[33m\x1b[1mwarning:\x1b[0m look here" in text
