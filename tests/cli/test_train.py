"""`emrun train` as an installed command in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

EMRUN = str(Path(sys.executable).with_name("emrun"))

CONFIG = """\
seed: 5
name: tiny
dataset: {class: Majority, n: 50}
model:
  module:
    class: torch.nn.Sequential
    args:
      - {class: torch.nn.Linear, in_features: 11, out_features: 1}
      - {class: torch.nn.Flatten, start_dim: 0}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.BCEWithLogitsLoss, inputs: [logit, y]}
  optimizer: {class: SGD, lr: 0.5}
main_loop:
  extra_streams: [valid]
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - StopAfter: {epochs: 2}
"""

HOOKS = """
import os, signal, sys
from emrun import AbstractHook, TrainingAborted

class Fail(AbstractHook):
    def after_batch(self):
        if self.main_loop.iterations_done == 3:
            raise RuntimeError("it broke")

class Guard(AbstractHook):
    def after_batch(self):
        if self.main_loop.iterations_done == 3:
            raise TrainingAborted("loss is NaN at iteration 3")

class Interrupt(AbstractHook):
    def __init__(self, number, times=1):
        super().__init__()
        self.number, self.times = number, times

    def after_batch(self):
        if self.main_loop.iterations_done == 3 and self.main_loop.training:  # not in `eval`
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

class InterruptGroup(AbstractHook):
    def after_batch(self):
        os.kill(0, signal.SIGINT)

class FillDisk(AbstractHook):
    def __init__(self, model):
        super().__init__()
        def save(directory):
            raise OSError(28, "No space left on device", str(directory))
        model.save = save

class FillDiskInTheBackground(FillDisk):
    def __init__(self, model):
        super().__init__(model)
        model.stage = lambda: model.save
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    return tmp_path


def trace(root):
    (path,) = Path(root).glob("*/trace.yaml")
    return YAML(typ="safe", pure=True).load(path)


def test_a_training_prints_a_table_and_logs_readable_lines(project, emrun):
    done = emrun("train", "config.yaml")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == [
        "stream",
        "variable",
        "last",
        "lowest",
        "(epoch)",
        "highest",
        "(epoch)",
    ]
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["train", "loss"], ["valid", "loss"]]
    assert "epoch 2  valid  loss 0." in done.stderr
    assert done.stderr.splitlines()[-1] == "finished: 2 epochs done (StopAfter epochs: 2)"
    assert "\x1b" not in done.stdout + done.stderr
    found = trace(project / "log")
    assert (found["status"], found["exit_status"], found["epochs_done"], found["seed"]) == ("finished", 0, 2, 5)
    assert found["command"][1:] == ["train", "config.yaml"]


def test_quiet_prints_nothing(project, emrun):
    done = emrun("train", "-q", "config.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_overrides_change_the_config_and_are_kept(project, emrun):
    emrun(
        "train", "-q", "config.yaml", "hooks.StopAfter.epochs=1", "model.optimizer.lr=0.25", "~main_loop", "name=other"
    )
    (directory,) = (project / "log").iterdir()
    assert directory.name.startswith("other_")
    stored = YAML(typ="safe", pure=True).load(directory / "config.yaml")
    assert stored["model"]["optimizer"]["lr"] == 0.25
    assert "main_loop" not in stored
    assert trace(project / "log")["epochs_done"] == 1


def test_the_directory_of_a_run_stands_for_its_config(project, emrun):
    emrun("train", "-q", "config.yaml")
    (directory,) = (project / "log").iterdir()
    assert emrun("train", "-q", directory, "-o", "again").returncode == 0
    metrics = [next(project.glob(f"{root}/*/metrics.jsonl")) for root in ("log", "again")]
    streams = [[json.loads(line)["streams"] for line in path.read_text().splitlines()] for path in metrics]
    assert streams[0] == streams[1]


def test_output_dir_is_the_run_directory_and_is_not_used_twice(project, emrun):
    assert emrun("train", "-q", "config.yaml", "--output-dir", "mine").returncode == 0
    again = emrun("train", "-q", "config.yaml", "--output-dir", "mine")
    assert again.returncode == 2
    assert again.stderr.startswith("error: mine holds a run already (finished); choose another --output-dir")


def test_rm_deletes_the_run_directory(project, emrun):
    done = emrun("train", "--rm", "config.yaml")
    assert done.returncode == 0
    assert not list((project / "log").iterdir())


def test_rm_does_not_delete_what_was_there_before(project, emrun):
    (project / "mine").mkdir()
    done = emrun("train", "--rm", "config.yaml", "--output-dir", "mine")
    assert done.returncode == 2
    assert (project / "mine").exists()


def test_rm_of_a_training_that_fails_deletes_the_directory_and_keeps_the_exit_status(project, emrun):
    done = emrun("train", "--rm", "config.yaml", "hooks.my_hooks.Fail={}")
    assert (
        done.returncode == 2
    )  # a name with a dot cannot be an override's key: it is read as hooks -> my_hooks -> Fail
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Fail\n")
    done = emrun("train", "--rm", "config.yaml")
    assert done.returncode == 1
    assert not list((project / "log").iterdir())


def test_an_exception_in_user_code_shows_its_traceback_and_what_survived(project, emrun):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Fail\n")
    done = emrun("train", "config.yaml")
    assert done.returncode == 1
    assert 'raise RuntimeError("it broke")' in done.stderr
    last = done.stderr.splitlines()[-1]
    (directory,) = (project / "log").iterdir()
    assert last == (
        f"0 epochs, 3 iterations done; checkpoints latest are kept; go on with: emrun resume log/{directory.name}"
    )
    assert trace(project / "log")["reason"] == "RuntimeError: it broke"
    assert "it broke" in (directory / "train.log").read_text()


def test_a_guard_ends_with_status_3_and_one_line(project, emrun):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Guard\n")
    done = emrun("train", "-q", "config.yaml")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "error: loss is NaN at iteration 3"
    assert "Traceback" not in done.stderr
    found = trace(project / "log")
    assert (found["status"], found["exit_status"]) == ("failed", 3)


def test_a_wrong_config_is_told_with_its_line_and_leaves_nothing(project, emrun):
    (project / "config.yaml").write_text(CONFIG.replace("lr: 0.5", "lrate: 0.5").replace("epochs: 2", "epoch: 2"))
    done = emrun("train", "config.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "config.yaml:13:27: model.optimizer: unknown argument 'lrate'" in done.stderr
    assert "config.yaml:19:17: hooks[2].StopAfter: unknown argument 'epoch'; did you mean 'epochs'?" in done.stderr
    assert f"\n      - StopAfter: {{epoch: 2}}\n{' ' * 20}^\n" in done.stderr
    assert done.stderr.endswith("2 errors\n")
    assert not (project / "log").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "nothing.yaml"], "nothing.yaml: cannot be read: No such file or directory"),
        (["train", "config.yaml", "model.optimizer.lr"], "an override is key=value, or ~key to delete"),
        (["train", "config.yaml", "-v", "-q"], "exclude each other"),
        (["train", "config.yaml", "--buffer", "3"], "No such option"),
        (["trian", "config.yaml"], "No such command 'trian'"),
        (["eval", "log"], "Missing argument"),
        (["eval", "log", "valid"], "log is no run directory"),
        (["eval", "log", "a=1"], "name a stream"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(project, emrun, arguments, message):
    done = emrun(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bare_command_shows_the_help_and_status_2(emrun):
    done = emrun()
    assert done.returncode == 2
    assert "train" in done.stdout + done.stderr


def test_what_the_first_batch_shows_ends_with_status_2(project, emrun):
    done = emrun("train", "config.yaml", "hooks.ComputeStats.variables=[los]")
    assert done.returncode == 2
    assert (
        "'los', which is neither a source nor an output; did you mean 'loss'? (there is x, y, logit, loss)"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_the_process_ends_by_it_with_a_checkpoint(project, emrun, number):
    (project / "config.yaml").write_text(CONFIG + f"  - my_hooks.Interrupt: {{number: {int(number)}}}\n")
    done = emrun("train", "config.yaml")
    assert done.returncode == -number
    assert done.stderr.splitlines()[-2] == f"interrupted by {number.name}"
    assert "checkpoints latest are kept; go on with: emrun resume log/tiny_" in done.stderr.splitlines()[-1]
    found = trace(project / "log")
    assert (found["status"], found["exit_status"], found["iterations_done"]) == ("interrupted", 128 + number, 3)
    (directory,) = (project / "log").iterdir()
    assert (directory / "checkpoints" / "latest").readlink().name == "it-00000003"
    assert emrun("eval", "-q", directory, "valid").returncode == 0


def test_the_second_signal_ends_the_process_at_once(project, emrun):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Interrupt: {number: 2, times: 2}\n")
    done = emrun("train", "config.yaml")
    assert done.returncode == -signal.SIGINT
    assert trace(project / "log")["status"] == "running"


def test_a_signal_to_the_process_group_stops_a_shell_loop(project):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.InterruptGroup\n")
    script = f"for i in 1 2 3; do {EMRUN} train -q config.yaml; echo round; done"
    done = subprocess.run(
        ["bash", "-c", script], cwd=project, capture_output=True, text=True, timeout=100, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert len(list((project / "log").iterdir())) == 1


@pytest.mark.parametrize("hook", ["FillDisk", "FillDiskInTheBackground"])
def test_a_full_disk_ends_with_status_74_and_says_so(project, emrun, hook):
    (project / "config.yaml").write_text(CONFIG + f"  - my_hooks.{hook}\n")
    done = emrun("train", "-q", "config.yaml")
    assert done.returncode == 74
    assert "the disk is full" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert not list((project / "log").glob("*/checkpoints/.tmp*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_behind_standard_output_is_told(project):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [EMRUN, "train", "config.yaml"], cwd=project, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100,
            check=False,
        )  # fmt: skip
    assert done.returncode not in (0, -signal.SIGABRT)
    assert trace(project / "log")["status"] == "finished"


def test_python_m_emrun_is_the_same_and_does_not_hide_installed_modules(project):
    (project / "datasets").mkdir()
    (project / "datasets" / "__init__.py").write_text("raise ImportError('the wrong datasets')")
    (project / "click.py").write_text("raise ImportError('the wrong click')")
    done = subprocess.run(
        [sys.executable, "-m", "emrun", "train", "-q", "config.yaml"], cwd=project, capture_output=True, text=True,
        timeout=100, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_user_modules_are_found_in_the_directory_where_the_run_was_started(project, emrun, tmp_path_factory):
    (project / "config.yaml").write_text(CONFIG.replace("- LogVariables", "- my_hooks.Guard"))
    assert emrun("train", "-q", "config.yaml", "hooks.StopAfter.iterations=2").returncode == 0
    (directory,) = (project / "log").iterdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert emrun("eval", directory, "valid", cwd=elsewhere).returncode == 0


def test_a_missing_extra_names_its_pip_command(emrun, tmp_path):
    (tmp_path / "hidden" / "sklearn").mkdir(parents=True)
    (tmp_path / "hidden" / "sklearn" / "__init__.py").write_text("raise ImportError('hidden')")
    (tmp_path / "c.yaml").write_text(CONFIG.replace("Majority, n: 50", "Digits"))
    done = emrun("train", "c.yaml", env={"PYTHONPATH": str(tmp_path / "hidden")})
    assert done.returncode == 2
    message = "Digits needs scikit-learn, which is not installed: pip install 'emrun[metrics]'"
    assert f"c.yaml:3:1: dataset: {message}\n    dataset: {{class: Digits}}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_home_directory_is_found_wherever_a_config_or_the_command_names_a_path(emrun, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "code").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for stream in ("train", "valid"):
        (home / f"{stream}.csv").write_text("x,y\n1.0,2.0\n3.0,4.0\n")
    (home / "code" / "nets_of_mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(1, 1)\n"
        "    def forward(self, x, y):\n"
        "        return {'loss': (super().forward(x[:, None].float())[:, 0] - y) ** 2}\n"
    )
    (home / "base.yaml").write_text(
        "code_directory: ~/code\n"
        "dataset: {class: Table, train: ~/train.csv, valid: ~/valid.csv}\n"
        "model: {module: {class: nets_of_mine.Net}, optimizer: {class: SGD, lr: 0.1}}\n"
        "hooks: [StopAfter: {epochs: 1}]\n"
    )
    (tmp_path / "c.yaml").write_text("extends: ~/base.yaml\n")
    done = emrun("train", "-q", "c.yaml", "--output-dir=~/run")
    assert done.returncode == 0, done.stderr
    assert emrun("train", "-q", "~/base.yaml", "-o", "~/runs").returncode == 0
    assert emrun("eval", "-q", "~/run", "valid", "--config=~/base.yaml").returncode == 0
    forked = emrun("resume", "-q", "~/run", "--fork=~/fork", "hooks.StopAfter.epochs=2")
    assert forked.returncode == 0, forked.stderr
    again = emrun("train", "-q", "c.yaml", "--output-dir=~/run", "--auto-resume")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "~").exists()
    assert len(list((home / "runs").iterdir())) == 1
    assert (home / "fork" / "metrics.jsonl").exists()
