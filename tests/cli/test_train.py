"""`emrun train` as an installed command in a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from campaign import thinned
from here import run_here
from projects import MAJORITY
from ruamel.yaml import YAML

from emrun import create_training, resume_training
from emrun.config import config, plan, planner, sections
from emrun.config.config import read_config
from emrun.record.rows import Reader

ROOT = Path(__file__).parent.parent.parent
EMRUN = str(Path(sys.executable).with_name("emrun"))

CONFIG = (
    "seed: 5\nname: tiny\n"
    + MAJORITY
    + """\
  optimizer: {class: SGD, lr: 0.5}
main_loop:
  extra_streams: [valid]
  report: false
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - StopAfter: {epochs: 2}
"""
)

HOOKS = """
import os, signal, sys
from emrun import AbstractHook, TrainingAborted

class Fail(AbstractHook):
    def after_batch(self):
        if self.main_loop.iterations_done == 3:
            raise RuntimeError("it broke")

class Visit(AbstractHook):
    def __init__(self, output_dir):
        super().__init__(output_dir=output_dir)
        (output_dir / "notes.txt").write_text("mine")

class SpoilMean(AbstractHook):
    def after_epoch(self, epoch_id, epoch_data):
        if epoch_id == 1:
            epoch_data["train"]["loss"] = float("inf")

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

class Unread(AbstractHook):
    def before_training(self):
        read, write = os.pipe()
        for place in (1, 2):
            os.dup2(write, place)
        os.close(read)

    def after_batch(self):
        print("of a hook", flush=True)

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


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Return a finished run of the config."""
    place = tmp_path_factory.mktemp("once")
    (place / "config.yaml").write_text(CONFIG)
    done = run_here(["train", "-q", "config.yaml", "--output-dir", "run"], place)
    assert done.returncode == 0, done.stderr
    return place / "run"


@pytest.fixture
def project_with_run(project, once):
    """Return the project with a copy of the run in `run`."""
    shutil.copytree(once, project / "run", symlinks=True)
    return project


def trace(root):
    (path,) = Path(root).glob("*/trace.yaml")
    return YAML(typ="safe", pure=True).load(path)


def test_a_training_prints_a_table_and_logs_readable_lines(project, emrun):
    done = emrun("train", "config.yaml", "main_loop.report=true")
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
    run = next((project / "log").iterdir())
    rows, last = done.stdout.splitlines()[2:-3], done.stdout.splitlines()[-3:]
    assert [line.split()[:2] for line in rows] == [["train", "loss"], ["valid", "loss"]]
    assert re.fullmatch(r"best: epoch [0-2], lowest valid/loss 0\.\d+", last[0])
    assert last[1:] == [
        f"page: log/{run.name}/report.html",
        f"next: emrun resume log/{run.name} hooks.StopAfter.epochs=4",
    ]
    assert "epoch 2  valid  loss 0." in done.stderr
    assert done.stderr.splitlines()[-1] == "finished: 2 epochs done (StopAfter epochs: 2)"
    assert "\x1b" not in done.stdout + done.stderr
    found = trace(project / "log")
    assert (found["status"], found["exit_status"], found["epochs_done"], found["seed"]) == ("finished", 0, 2, 5)
    assert found["command"][1:] == ["train", "config.yaml", "main_loop.report=true"]


LISTED = """\
  - ComputeStats: {variables: [loss]}
  - LogVariables
"""


def test_a_plain_config_logs_its_loss_and_resumes_exactly_by_command_and_in_python(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG.replace(LISTED, ""))
    for name, arguments in (("whole", ()), ("split", ("hooks.StopAfter.epochs=1",))):
        done = emrun_here("train", "config.yaml", "--output-dir", name, *arguments)
        assert (done.returncode, "epoch 1  valid  loss 0." in done.stderr) == (0, True)
        assert "valid   loss" in done.stdout
    resume_training(project / "split", ["hooks.StopAfter.epochs=2"]).main_loop.run_training()
    rows = [list(Reader(project / name).epochs()) for name in ("whole", "split")]
    for row in (*rows[0], *rows[1]):
        del row["seconds"]
    assert rows[0] == rows[1]
    done = emrun_here("resume", "split", "hooks.StopAfter.epochs=3")
    assert (done.returncode, "epoch 3  valid  loss 0." in done.stderr) == (0, True)
    assert read_config(project / "split")["hooks"] == ["ComputeStats", {"StopAfter": {"epochs": 3}}]
    done = emrun_here("train", "config.yaml", "--output-dir", "split", "--auto-resume", "hooks.StopAfter.epochs=3")
    assert "nothing to do: the run is finished" in done.stderr
    training = create_training(project / "config.yaml", output_dir=project / "in_python")
    assert [type(each).__name__ for each in training.main_loop.hooks] == ["StopAfter", "SaveLatest"]


NO_LOSS = """
import emrun, torch

class Module(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {"z": y, "loss": y.square().mean()} if self.training else {"z": y}

class Own(emrun.TorchModel):
    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.backward(outputs["loss"])
        self.update(self.optimizer)
        return {"z": outputs["z"]}
"""


@pytest.mark.parametrize("kind", thinned(["TorchModel", "models.Own"], ["TorchModel"]))
def test_what_has_no_loss_is_trained_without_one(project, emrun_here, kind):
    (project / "models.py").write_text(NO_LOSS)
    text = CONFIG.replace(LISTED, "").partition("model:")
    module = "{class: models.Module, in_features: 11, out_features: 1}"
    model = f"model: {{class: {kind}, module: {module}, inputs: [x], optimizer: {{class: SGD, lr: 0.1}}}}\n"
    (project / "config.yaml").write_text(text[0] + model + text[2][text[2].index("main_loop") :])
    done = emrun_here("train", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert ("epoch 1  train  loss" in done.stderr) is (kind == "TorchModel")
    assert "valid  loss" not in done.stderr
    assert done.stderr.count("has no variable 'loss'; it has no statistic") == 2 * (kind == "TorchModel")  # streams


TOO_FAST = "model.optimizer={class: SGD, lr: 1.0e38}"
TRAIN_ON = "main_loop.on_nan_loss=warn"


def test_a_loss_that_is_not_finite_ends_the_run_before_its_update_and_replay_finds_it(project, emrun_here):
    done = emrun_here("train", "-q", "config.yaml", TOO_FAST, "--output-dir", "run", "hooks.StopAfter.epochs=4")
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    found = re.match(r"error: the loss is (NaN|infinite) at iteration (\d+) \(main_loop.on_nan_loss\), so no upd", line)
    assert found, line
    assert "warning" not in done.stderr
    assert "repeat the step that failed with: emrun replay run/failures/1" in done.stderr
    assert "exit_status: 3" in (project / "run" / "trace.yaml").read_text()
    replayed = json.loads(emrun_here("replay", "--json", "run").stdout)
    assert (replayed["reproduced"], replayed["weights"]) == (True, "before the step")
    assert replayed["step"]["iteration"] == int(found[2]) - 1


@pytest.mark.campaign
def test_a_loss_that_is_not_finite_is_not_mentioned_if_the_config_says_so(project, emrun_here):
    done = emrun_here("train", "-q", "config.yaml", TOO_FAST, "main_loop.on_nan_loss=ignore")
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr


@pytest.mark.campaign
def test_a_skipped_update_with_a_loss_that_is_not_finite_does_not_end_the_run(project, emrun_here):
    done = emrun_here("train", "-q", "config.yaml", TOO_FAST, "hooks.SkipSpike={window: 1, variable: loss}")
    assert done.returncode == 0, done.stderr


def test_a_loss_that_becomes_nan_is_warned_of_once_and_in_the_last_line(project, emrun_here):
    done = emrun_here("train", "config.yaml", TOO_FAST, TRAIN_ON, "hooks.StopAfter.epochs=4")
    assert done.returncode == 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2, done.stderr
    assert re.match(
        r"warning: the loss of the last training batch is (NaN|infinite) in epoch \d \(iteration \d+\): the rest",
        warnings[0],
    )
    assert done.stderr.splitlines()[-1] == warnings[1]
    assert re.fullmatch(r"warning: the loss was (NaN|infinite) from epoch \d on", warnings[1])
    done = emrun_here("eval", "-q", next((project / "log").iterdir()), "valid")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.campaign
def test_a_quiet_run_that_ends_in_the_middle_of_an_epoch_says_that_its_loss_is_nan(project, emrun_here):
    done = emrun_here(
        "train", "-q", "config.yaml", TOO_FAST, TRAIN_ON, "hooks.StopAfter.iterations=3", "~main_loop.extra_streams"
    )
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [line.startswith("warning: the loss ") for line in lines] == [True, True]
    done = emrun_here("resume", "-q", next((project / "log").iterdir()), "hooks.StopAfter.iterations=4")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith("warning: the loss was NaN from epoch 1 on")


@pytest.mark.campaign
def test_a_resume_that_only_evaluates_at_the_end_has_the_seconds_of_that(project, emrun_here):
    assert (
        emrun_here("train", "-q", "config.yaml", "--output-dir", "mine", "hooks.StopAfter.iterations=1").returncode == 0
    )
    done = emrun_here("resume", "mine", "dataset.n=40")
    assert done.returncode == 0
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("at the end  train")]
    assert line.endswith(" s since the resume")


GUARDS = ["hooks.StopOnNaN.after_batch=true", "hooks.StopOnNaN={after_epoch: true}"]


@pytest.mark.parametrize("guard", thinned(GUARDS, GUARDS[:1]), ids=["batch", "epoch"])
def test_a_guard_that_ends_a_run_is_not_repeated_by_a_warning(project, emrun_here, guard):
    done = emrun_here("train", "-q", "config.yaml", TOO_FAST, TRAIN_ON, "hooks.StopAfter.epochs=4", guard)
    assert done.returncode == 3
    assert done.stderr.count("is NaN") == 1
    assert "warning" not in done.stderr


def test_a_mean_that_is_infinite_is_warned_of_too(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG.replace("  - LogVariables", "  - my_hooks.SpoilMean"))
    done = emrun_here("train", "-q", "config.yaml")
    assert done.returncode == 0
    assert "warning: the mean loss of stream 'train' is infinite in epoch 1 (iteration 4): " in done.stderr
    assert done.stderr.splitlines()[-1] == "warning: the loss was infinite in epoch 1"


def test_the_hook_of_the_readme_does_not_take_nan_for_a_small_gradient(project, emrun_here):
    shutil.copytree(ROOT / "sample_configs" / "my_project", project / "mine")
    done = emrun_here("train", "config.yaml", TOO_FAST, TRAIN_ON, "hooks.StopAfter.epochs=2", cwd=project / "mine")
    assert "gradients are as small as" not in done.stderr
    assert "finished: 2 epochs done" in done.stderr
    lines = next((project / "mine").glob("log/*/metrics.jsonl")).read_text().splitlines()
    assert json.loads(lines[-1])["streams"]["train"]["gradient_norm"] == "NaN"


def test_overrides_change_the_config_and_are_kept(project, emrun_here):
    emrun_here(
        "train", "-q", "config.yaml", "hooks.StopAfter.epochs=1", "model.optimizer.lr=0.25", "~main_loop", "name=other"
    )
    (directory,) = (project / "log").iterdir()
    assert directory.name.startswith("other_")
    stored = YAML(typ="safe", pure=True).load(directory / "config.yaml")
    assert stored["model"]["optimizer"]["lr"] == 0.25
    assert "main_loop" not in stored
    assert trace(project / "log")["epochs_done"] == 1


def test_the_directory_of_a_run_stands_for_its_config(project_with_run, emrun_here):
    again = emrun_here("train", "run", "-o", "again")
    assert again.returncode == 0
    assert "is a run; a new run begins with its config (to resume it, use `emrun resume run`)" in again.stderr
    runs = (project_with_run / "run", next((project_with_run / "again").iterdir()))
    metrics = [(run / "metrics.jsonl").read_text().splitlines() for run in runs]
    streams = [[json.loads(line)["streams"] for line in lines] for lines in metrics]
    assert streams[0] == streams[1]


def test_output_dir_is_the_run_directory_and_is_not_used_twice(project, emrun_here):
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "mine").returncode == 0
    again = emrun_here("train", "-q", "config.yaml", "--output-dir", "mine")
    assert again.returncode == 2
    assert again.stderr.startswith("error: mine already holds a run (finished); choose another --output-dir")


def test_a_run_directory_is_no_place_for_another_run(project_with_run, emrun_here):
    run = project_with_run / "run"
    there = {path.name for path in run.iterdir()}
    for arguments in (
        ["train", "--output-root", "run"],
        ["train", "--output-dir", "run/second"],
        ["sweep", "--output-dir", "run", "-p", "model.optimizer.lr=[0.1, 0.2]"],
    ):
        done = emrun_here(arguments[0], "config.yaml", *arguments[1:])
        assert done.returncode == 2
        assert "run is a run directory, and a run cannot lie in another one" in done.stderr
    assert {path.name for path in run.iterdir()} == there


def test_rm_deletes_the_run_directory(project, emrun_here):
    done = emrun_here("train", "--rm", "config.yaml")
    assert done.returncode == 0
    assert not list((project / "log").iterdir())


MORE_HOOKS = [[], ["hooks.my_hooks.Fail={}"], ["hooks.SaveFile={files: [x]}"]]


@pytest.mark.parametrize("more", thinned(MORE_HOOKS, MORE_HOOKS[1:]))
def test_rm_and_a_wrong_config_leave_what_the_run_has_not_written(project, emrun_here, more):
    done = emrun_here("train", "--rm", "config.yaml", "--output-dir", "run", "hooks.my_hooks.Visit={}", *more)
    assert (project / "run" / "notes.txt").read_text() == "mine"
    assert "run stays: it has 1 name that the run does not write: notes.txt; move or delete" in done.stderr
    assert (project / "run" / "trace.yaml").exists()  # nothing was removed


def test_rm_does_not_delete_what_was_there_before(project, emrun_here):
    (project / "mine").mkdir()
    done = emrun_here("train", "--rm", "config.yaml", "--output-dir", "mine")
    assert done.returncode == 2
    assert (project / "mine").exists()


def test_rm_of_a_training_that_fails_deletes_the_directory_and_keeps_the_exit_status(project, emrun_here):
    assert emrun_here("train", "--rm", "config.yaml", "hooks.my_hooks.Fail={}").returncode == 1
    assert not list((project / "log").iterdir())


def test_rm_of_a_step_that_fails_offers_the_traceback_and_names_no_file_of_the_run(project, emrun_here):
    done = emrun_here("train", "--rm", "config.yaml", "model.module.args.0.in_features=5")
    assert done.returncode == 1
    assert "--verbose shows the full traceback" in done.stderr.splitlines()
    assert "the full traceback is in" not in done.stderr
    assert "emrun replay" not in done.stderr
    assert "emrun train" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--output-dir", "mine"]], ids=["log", "output-dir"])
def test_rm_of_a_training_that_cannot_be_built_deletes_the_directory(project, emrun_here, arguments):
    (project / "broken.py").write_text("def model():\n    raise RuntimeError('no GPU today')\n")
    done = emrun_here("train", "--rm", *arguments, "config.yaml", "model.module={class: broken.model}")
    assert done.returncode == 1
    assert "RuntimeError: no GPU today" in done.stderr
    assert "deleted " in done.stderr
    assert not list(project.glob("log/*"))
    assert not (project / "mine").exists()


def test_an_exception_in_user_code_shows_its_traceback_and_what_survived(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Fail\n")
    done = emrun_here("train", "config.yaml")
    assert done.returncode == 1
    assert 'raise RuntimeError("it broke")' in done.stderr
    (directory,) = (project / "log").iterdir()
    assert done.stderr.splitlines()[-2:] == [
        "0 epochs, 3 iterations done; saved checkpoints: latest",
        f"resume with: emrun resume log/{directory.name}",
    ]
    assert trace(project / "log")["reason"] == "RuntimeError: it broke"
    assert "it broke" in (directory / "train.log").read_text()


def test_a_guard_ends_with_status_3_and_one_line(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Guard\n")
    done = emrun_here("train", "-q", "config.yaml")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "error: loss is NaN at iteration 3"
    assert "Traceback" not in done.stderr
    found = trace(project / "log")
    assert (found["status"], found["exit_status"]) == ("failed", 3)


def test_a_wrong_config_is_told_with_its_line_and_leaves_nothing(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG.replace("lr: 0.5", "lrate: 0.5").replace("epochs: 2", "epoch: 2"))
    done = emrun_here("train", "config.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "config.yaml:13:27: model.optimizer: unknown argument 'lrate'" in done.stderr
    assert "config.yaml:20:17: hooks[2].StopAfter: unknown argument 'epoch'; did you mean 'epochs'?" in done.stderr
    assert f"\n      - StopAfter: {{epoch: 2}}\n{' ' * 20}^\n" in done.stderr
    assert done.stderr.endswith("2 errors\n")
    assert not (project / "log").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "nothing.yaml"], "nothing.yaml: cannot be read: No such file or directory"),
        (["train", "config.yaml", "model.optimizer.lr"], "an override must be key=value, or ~key to delete a key"),
        (["train", "config.yaml", "-v", "-q"], "cannot be used together"),
        (["train", "config.yaml", "--epochs", "3"], "write KEY=VALUE, such as model.optimizer.lr=0.1.\n"),
        (["train", "config.yaml", "--quite"], "Did you mean '--quiet'?"),
        (["trian", "config.yaml"], "No such command 'trian'"),
        (["train", "config.yml"], "No such file or directory; did you mean 'config.yaml'?"),
        (["eval", "log"], "log is not a run directory"),
        (["eval", "log", "valid"], "log is not a run directory"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(project, emrun_here, arguments, message):
    done = emrun_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bare_command_shows_the_help_and_status_2(emrun_here):
    done = emrun_here()
    assert done.returncode == 2
    assert "train" in done.stdout + done.stderr


def test_what_the_first_batch_shows_ends_with_status_2(project, emrun_here):
    done = emrun_here("train", "config.yaml", "hooks.ComputeStats.variables=[los]")
    assert done.returncode == 2
    assert (
        "'los', which is neither a source nor an output; did you mean 'loss'? (available: x, y, logit, loss)"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", thinned([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_after_a_signal_the_process_ends_by_it_with_a_checkpoint(project, emrun, emrun_here, number):
    (project / "config.yaml").write_text(CONFIG + f"  - my_hooks.Interrupt: {{number: {int(number)}}}\n")
    done = emrun("train", "config.yaml")
    assert done.returncode == -number
    assert done.stderr.splitlines()[-3] == f"interrupted by {number.name}"
    assert done.stderr.splitlines()[-1].startswith("resume with: emrun resume log/tiny_")
    found = trace(project / "log")
    assert (found["status"], found["exit_status"], found["iterations_done"]) == ("interrupted", 128 + number, 3)
    (directory,) = (project / "log").iterdir()
    assert (directory / "checkpoints" / "latest").readlink().name == "it-00000003"
    assert emrun_here("eval", "-q", directory, "valid").returncode == 0


@pytest.mark.campaign
def test_the_second_signal_ends_the_process_at_once(project, emrun):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Interrupt: {number: 2, times: 2}\n")
    done = emrun("train", "config.yaml")
    assert done.returncode == -signal.SIGINT
    assert trace(project / "log")["status"] == "running"


@pytest.mark.campaign
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
def test_a_full_disk_ends_with_status_74_and_says_so(project, emrun_here, hook):
    (project / "config.yaml").write_text(CONFIG + f"  - my_hooks.{hook}\n")
    done = emrun_here("train", "-q", "config.yaml")
    assert done.returncode == 74
    assert "the disk is full" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert not list((project / "log").glob("*/checkpoints/.tmp*"))


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_behind_standard_output_is_told(project):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [EMRUN, "train", "config.yaml"], cwd=project, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100,
            check=False,
        )  # fmt: skip
    assert done.returncode not in (0, -signal.SIGABRT)
    assert trace(project / "log")["status"] == "finished"


LAST_HOOKS = [("", 0), ("  - my_hooks.Fail\n", 1), ("  - my_hooks.Guard\n", 3)]


@pytest.mark.parametrize(("hook", "status"), thinned(LAST_HOOKS, LAST_HOOKS[1:2]))
def test_the_status_is_that_of_the_run_when_the_reader_of_the_output_has_ended(hook, status, project, emrun):
    (project / "config.yaml").write_text(f"{CONFIG}  - my_hooks.Unread\n{hook}")
    done = emrun("train", "config.yaml")
    assert done.returncode == status, done.stderr
    assert trace(project / "log")["status"] == ("failed" if status else "finished")


@pytest.mark.campaign  # test_check.py has `check --static`
def test_python_m_emrun_is_the_same_and_does_not_hide_installed_modules(project):
    (project / "datasets").mkdir()
    (project / "datasets" / "__init__.py").write_text("raise ImportError('the wrong datasets')")
    (project / "click.py").write_text("raise ImportError('the wrong click')")
    done = subprocess.run(
        [sys.executable, "-m", "emrun", "train", "-q", "config.yaml"], cwd=project, capture_output=True, text=True,
        timeout=100, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_user_modules_are_found_in_the_directory_where_the_run_was_started(project, emrun_here, tmp_path_factory):
    (project / "config.yaml").write_text(CONFIG.replace("- LogVariables", "- my_hooks.Guard"))
    assert emrun_here("train", "-q", "config.yaml", "hooks.StopAfter.iterations=2").returncode == 0
    (directory,) = (project / "log").iterdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert emrun_here("eval", directory, "valid", cwd=elsewhere).returncode == 0


HIDDEN = """
import sys

from emrun.cli import main

for name in [each for each in sys.modules if each.partition(".")[0] == "sklearn"]:
    sys.modules[name] = None  # cannot be imported
sys.exit(main())
"""


def test_a_missing_extra_names_its_pip_command(warm, tmp_path):
    (tmp_path / "hidden.py").write_text(HIDDEN)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("Majority, n: 50", "Digits"))
    done = warm.run([str(tmp_path / "hidden.py"), "train", "c.yaml"], tmp_path, timeout=60)
    assert done.returncode == 2
    message = "Digits needs scikit-learn, which is not installed: pip install 'emrun[metrics]'"
    assert f"c.yaml:3:1: dataset: {message}\n    dataset: {{class: Digits}}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_only_process_of_torchrun_trains(project, emrun_here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "run").returncode == 0


FLAKY = """
import torch
from pathlib import Path

def model():
    if not Path("fixed").exists():
        raise RuntimeError("no weights yet")
    return torch.nn.Sequential(torch.nn.Linear(11, 1), torch.nn.Flatten(start_dim=0))

class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = model()

    def forward(self, x):
        if self.training and not Path("trainable").exists():
            raise RuntimeError("does not train yet")
        return self.layer(x)
"""


@pytest.mark.parametrize("options", thinned([[], ["--auto-resume"]], [["--auto-resume"]]), ids=["train", "auto-resume"])
def test_a_failed_start_is_not_in_the_way_of_the_same_command_and_its_log_is_kept(project, emrun_here, options):
    (project / "flaky.py").write_text(FLAKY)
    command = ["train", "config.yaml", "--output-dir", "mine", *options, "model.module={class: flaky.model}"]
    assert emrun_here(*command).returncode == 1
    assert "no weights yet" in (project / "mine" / "train.log").read_text()
    (project / "fixed").touch()
    done = emrun_here(*command, "model.optimizer.lr=0.25")
    assert done.returncode == 0, done.stderr
    text = (project / "mine" / "train.log").read_text()
    assert "RuntimeError: no weights yet" in text
    assert "epoch 2  valid  loss" in text
    assert trace(project)["status"] == "finished"
    assert "lr: 0.25" in (project / "mine" / "config.yaml").read_text()


def test_a_run_that_failed_with_metrics_is_not_taken_over(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Fail\n")
    command = ["train", "config.yaml", "--output-dir", "mine"]
    assert emrun_here(*command).returncode == 1
    before = {path: path.read_bytes() for path in (project / "mine").rglob("*") if path.is_file()}
    done = emrun_here(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("error: mine already holds a run (failed); choose another --output-dir")
    assert {path: path.read_bytes() for path in (project / "mine").rglob("*") if path.is_file()} == before


def test_a_run_without_a_checkpoint_does_not_suggest_to_resume_it(project, emrun_here):
    (project / "flaky.py").write_text(FLAKY)
    (project / "fixed").touch()
    overrides = ["model.module={class: flaky.Failing}", "main_loop.skip_zeroth_epoch=true"]
    done = emrun_here("train", "config.yaml", "--output-dir", "mine", *overrides)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "start again with: emrun train config.yaml "
        "--output-dir mine 'model.module={class: flaky.Failing}' main_loop.skip_zeroth_epoch=true"
    )
    (project / "trainable").touch()
    assert emrun_here("train", "config.yaml", "--output-dir", "mine", *overrides).returncode == 0


LATE = """
import torch

class Late(torch.nn.Linear):
    def __init__(self):
        super().__init__(11, 1)

    def forward(self, x):
        if self.training and not hasattr(self, "scale"):
            self.scale = torch.nn.Parameter(torch.ones(1))
        return super().forward(x)[:, 0]
"""


def test_a_module_that_is_refused_after_the_zeroth_epoch_is_not_to_be_resumed(project, emrun_here):
    (project / "late.py").write_text(LATE)
    done = emrun_here("train", "config.yaml", "--output-dir", "mine", "model.module={class: late.Late}")
    assert done.returncode == 2
    assert (
        "'scale' is new; create them in __init__; the optimizer would not train parameters that are created later"
    ) in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "start again with: emrun train config.yaml --output-dir mine-2 'model.module={class: late.Late}'"
    )


GROWING = """
import torch

class Growing(torch.nn.Linear):
    def __init__(self):
        super().__init__(11, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(1))

    def forward(self, x):
        self.calls += self.training
        if self.calls > 7:
            self.queue = torch.cat([self.queue, x[:, 0]])
        return super().forward(x)[:, 0]
"""


def test_a_checkpoint_of_a_module_that_changes_later_is_refused_and_the_one_before_is_kept(project, emrun_here):
    (project / "growing.py").write_text(GROWING)
    done = emrun_here("train", "config.yaml", "--output-dir", "mine", "model.module={class: growing.Growing}")
    assert done.returncode == 2
    assert "forward or a hook changes parameters or buffers: 'queue' had shape (1,), has (" in done.stderr
    assert "resume with: emrun resume mine" in done.stderr.splitlines()[-1]
    done = emrun_here("eval", "mine", "valid", "--checkpoint", "latest")
    assert done.returncode == 0, done.stderr


def test_a_run_without_a_checkpoint_that_has_begun_is_started_again_in_another_directory(project, emrun_here):
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Fail\n")
    done = emrun_here("train", "config.yaml", "--output-dir", "mine", "main_loop.skip_zeroth_epoch=true")
    assert done.stderr.splitlines()[-1] == (
        "start again with: emrun train config.yaml --output-dir mine-2 main_loop.skip_zeroth_epoch=true"
    )


def test_a_file_given_for_a_run_directory_is_reported_with_the_directory_that_is_meant(project_with_run, emrun_here):
    of_run = "error: run/config.yaml is a file; give the run directory instead: run\n"
    other = (
        "error: config.yaml is a file; give a run directory instead, such as log/NAME_TIME; to start a run with this "
        "config: emrun train config.yaml\n"
    )
    for command, *streams in (["resume"], ["eval", "valid"]):
        done = emrun_here(command, "run/config.yaml", *streams)
        assert (done.returncode, done.stderr) == (2, of_run)
        done = emrun_here(command, "config.yaml", *streams)
        assert (done.returncode, done.stderr) == (2, other)


def test_a_home_directory_is_found_wherever_a_config_or_the_command_names_a_path(emrun_here, tmp_path, monkeypatch):
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
    done = emrun_here("train", "-q", "c.yaml", "--output-dir=~/run")
    assert done.returncode == 0, done.stderr
    assert emrun_here("eval", "-q", "~/run", "valid", "--config=~/base.yaml").returncode == 0
    again = emrun_here("train", "-q", "c.yaml", "--output-dir=~/run", "--auto-resume")
    assert again.returncode == 0, again.stderr
    longer = emrun_here("resume", "-q", "~/run", "hooks.StopAfter.epochs=2")
    assert longer.returncode == 0, longer.stderr
    assert emrun_here("check", "--static", "~/base.yaml").returncode == 0
    assert not (tmp_path / "~").exists()
    assert sorted(path.name for path in home.iterdir()) == ["base.yaml", "code", "run", "train.csv", "valid.csv"]
    assert (home / "run" / "metrics.jsonl").exists()


COUNTED = [
    (config, "interpolate"),
    (plan, "check_sections"),
    (planner, "check_main_loop"),
    (planner, "check_call"),
    (sections, "check_hooks"),
]


def test_each_phase_interpolates_a_config_once_and_checks_each_of_its_sections_once(project, emrun_here, monkeypatch):
    """The second phase begins when PyTorch is imported."""
    counts, phases = Counter(), ["one"]

    def counted(name, function):
        def call(*arguments, **named):
            counts[name, named.get("key", ""), phases[-1]] += 1
            return function(*arguments, **named)

        return call

    for module, name in COUNTED:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    monkeypatch.setattr(import_module("emrun.cli.train"), "import_torch", lambda config: phases.append("two"))
    assert emrun_here("train", "config.yaml", "--quiet").returncode == 0
    assert phases == ["one", "two"]
    assert set(counts.values()) == {1}, counts
    assert len(counts) == 2 * 15 + 1, counts  # ShowProgress is added in phase two


OWN = "import emrun\n\nclass Own(emrun.TorchModel):\n    pass\n"
WITHOUT_STATISTICS = ("model.class=models.Own", "~hooks.0", "~hooks.0")


def test_without_statistics_there_is_no_table(project, emrun_here):
    (project / "models.py").write_text(OWN)
    done = emrun_here("train", "config.yaml", "--rm", *WITHOUT_STATISTICS)
    assert (done.returncode, done.stdout) == (0, "")
    assert "deleted " in done.stderr


@pytest.mark.campaign
def test_quiet_rm_says_nothing(project, emrun_here):
    (project / "models.py").write_text(OWN)
    done = emrun_here("train", "-q", "config.yaml", "--rm", *WITHOUT_STATISTICS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


OTHER_FILES = ["train.log", "code/main.py", "checkpoints/pretrained.pt", "notes.txt", "job.out"]


@pytest.mark.parametrize("name", thinned(OTHER_FILES, OTHER_FILES[1:4]))
def test_a_directory_that_is_not_empty_is_refused_and_stays_as_it_is(project, emrun_here, name):
    mine = project / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text("mine")
    for more in ([], ["--auto-resume"]):
        done = emrun_here("train", "-q", "config.yaml", "--output-dir", "mine", *more)
        assert done.returncode == 2
        assert f"mine is not empty: it has {name.partition('/')[0]}. A new run needs" in done.stderr
        assert "write what a job prints beside it, such as to mine.out" in done.stderr
    assert [path.read_text() for path in mine.rglob("*") if path.is_file() and path.name != ".lock"] == ["mine"]


def test_hidden_names_and_those_of_the_file_system_do_not_fill_a_directory(project, emrun_here):
    mine = project / "mine"
    (mine / "lost+found").mkdir(parents=True)
    (mine / ".nfs0001").write_text("mine")
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "mine").returncode == 0
    assert emrun_here("prune", "mine", "--yes").returncode == 0
    assert sorted(path.name for path in mine.iterdir()) == [".nfs0001", "lost+found"]


def test_a_run_with_a_file_of_somebody_else_is_resumed_and_not_removed(project_with_run, emrun_here):
    (project_with_run / "run" / "notes.txt").write_text("mine")
    assert emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=2").returncode == 0
    before = sorted((project_with_run / "run").rglob("*"))
    done = emrun_here("prune", "run", "--yes")
    assert "run stays: it has 1 name that the run does not write: notes.txt" in done.stderr
    assert sorted((project_with_run / "run").rglob("*")) == before
    (project_with_run / "run" / "notes.txt").unlink()
    assert emrun_here("prune", "run", "--yes").returncode == 0
    assert not (project_with_run / "run").exists()


def test_a_hook_that_a_resume_adds_replaces_no_file_of_somebody_else(project_with_run, emrun_here):
    (project_with_run / "run" / "training.csv").write_text("mine")
    done = emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=2", "hooks.WriteCSV={}")
    assert done.returncode == 2
    assert "the run has not written run/training.csv, which one of its hooks would write; move it" in done.stderr
    assert (project_with_run / "run" / "training.csv").read_text() == "mine"
    assert emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=2").returncode == 0


def test_the_directory_of_a_run_can_be_read_again(project, emrun_here):
    name = os.fsdecode(b"caf\xe9")
    done = emrun_here("train", "-q", "config.yaml", "--output-dir", name)
    assert done.returncode == 2
    assert "is not encoded in UTF-8, so that weights in it cannot be read" in done.stderr
    assert not (project / name).exists()
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "./~").returncode == 0
    assert (project / "~" / "trace.yaml").exists()


MOVES = """
import os


class Data:
    def __init__(self, to):
        os.chdir(to)

    def train_stream(self, ctx):
        for rows in ctx.batches(16, 4):
            yield {"x": [[1.0, 1.0, 1.0]] * len(rows)}
"""


MOVED = {
    "seed": 5,
    "model": {
        "module": {"class": "torch.nn.Linear", "in_features": 3, "out_features": 1},
        "inputs": ["x"],
        "outputs": ["loss"],
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "hooks": [{"StopAfter": {"epochs": 1}}],
}


@pytest.mark.campaign
def test_code_that_changes_the_current_directory_does_not_change_the_run(tmp_path, emrun_here):
    """Without an absolute path, the run in `run` writes into `other/run`."""
    (tmp_path / "movers.py").write_text(MOVES)
    config = {**MOVED, "dataset": {"class": "movers.Data", "to": "."}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "other").mkdir()
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "other/run").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}
    done = emrun_here("train", "config.yaml", "--output-dir", "run", "dataset.to=other")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest" / "model.safetensors").is_file()
    resumed = emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert emrun_here("eval", "-q", "run", "train", "--checkpoint", "latest").returncode == 0
    assert (tmp_path / "run" / "eval").is_dir()
    assert before == {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}
