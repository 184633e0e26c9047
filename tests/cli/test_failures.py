"""What the commands print of an error in the user's code: its frames, message and notes, and where the rest is."""

import gc
import io
import json
import shutil

import pytest
from campaign import thinned
from click import BadParameter
from PIL import Image

from emrun.base.errors import StreamError
from emrun.cli import emrun as commands, failures
from emrun.cli.failures import print_failure

MINE = """
import gc
import io
import os
import sys
from pathlib import Path

import numpy as np

from emrun import AbstractHook
from emrun.base.errors import ArgumentError


class Data:
    def __init__(self, bad="", at=0, path=None):
        self.bad, self.at = bad, at
        if path is not None:
            Path(path).read_text()

    def train_stream(self, ctx):
        for rows in ctx.batches(40, 10):
            x, y = np.ones((10, 4), "float32"), np.zeros((10, 1), "float32")
            if rows[0] // 10 == self.at:
                y = y[:3] if self.bad == "unequal" else ["seven"] * 10 if self.bad == "strings" else y
                if self.bad == "raises":
                    raise KeyError("no row")
            yield {"x": x, "y": y}

    valid_stream = test_stream = train_stream


class Fails(AbstractHook):
    def after_epoch(self, epoch_id):
        1 / (1 - epoch_id)


class ReadsValid(AbstractHook):
    def after_epoch(self, epoch_data):
        epoch_data["valid"]["loss"]


class MonitorsValid(ReadsValid):
    monitors = ["valid/loss/mean"]


class Refuses(AbstractHook):
    def before_training(self):
        raise ArgumentError("loss", "is mine")


class Imports(AbstractHook):
    def __init__(self):
        import nobody_has.parts


class Takes(AbstractHook):
    def __init__(self, code):
        super().__init__()
        self.code = code

    def after_epoch(self):
        exec(self.code)


class WritesOnly:
    def write(self, text):
        pass


class Late(AbstractHook):
    def __init__(self):
        os.kill(os.getpid(), 15)
"""
CONFIG = {
    "seed": 1,
    "dataset": {"class": "mine.Data"},
    "model": {
        "module": {"class": "torch.nn.Linear", "in_features": 4, "out_features": 1},
        "inputs": ["x"],
        "outputs": ["z"],
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["z", "y"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "main_loop": {"extra_streams": ["valid"], "skip_zeroth_epoch": True, "report": False},
    "hooks": [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 1}}],
}


RAISES = next(number for number, line in enumerate(MINE.splitlines(), 1) if "raise KeyError" in line)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)

    def write(*hooks):
        (tmp_path / "c.yaml").write_text(json.dumps({**CONFIG, "hooks": [*CONFIG["hooks"], *hooks]}))
        return tmp_path

    write()
    return write


def test_every_command_prints_the_frames_of_the_users_code_only_and_verbose_prints_all(project, emrun_here):
    where = f'mine.py", line {RAISES}, in train_stream'
    for command in (["check"], ["train", "-q", "--rm"], ["train", "-q", "--output-dir", "run"]):
        done = emrun_here(*command, "c.yaml", "dataset.bad=raises")
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert "KeyError: 'no row'" in lines
        (frame,) = [line for line in lines if line.startswith("  File ")]
        assert where in frame
        assert "Traceback" not in done.stderr
        last = "the full traceback is in run/train.log" if "run" in command else "--verbose shows the full traceback"
        assert last in lines
    done = emrun_here("check", "-v", "c.yaml", "dataset.bad=raises")
    assert "Traceback (most recent call last)" in done.stderr
    assert where in done.stderr
    assert "emrun/cli/check.py" in done.stderr
    assert "--verbose" not in done.stderr


def test_an_error_of_a_class_of_torch_while_building_has_no_frame_of_emrun_or_click(project, emrun_here):
    done = emrun_here("check", "c.yaml", "model.module.in_features=-1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("while building model.module (c.yaml:")
    assert lines[1:] == [
        "RuntimeError: Trying to create tensor with negative dimension -1: [1, -1]",
        "--verbose shows the full traceback",
    ]


def test_an_argument_of_the_model_that_its_first_batch_refuses_is_told_with_its_line_in_the_config(project, emrun_here):
    parts = [{"class": "torch.nn.BatchNorm1d", "num_features": 4}, CONFIG["model"]["module"]]
    model = {**CONFIG["model"], "module": {"class": "torch.nn.Sequential", "args": parts}, "recompute": "0"}
    text = json.dumps({**CONFIG, "model": model}, indent=1)
    (project() / "c.yaml").write_text(text)
    line = 1 + text.splitlines().index('  "recompute": "0"')
    told = f"c.yaml:{line}:16: model.recompute: the forward of BatchNorm1d changes its buffer 'running_mean'"
    for command in ("check", "train"):
        done = emrun_here(command, "c.yaml")
        assert done.returncode == 2
        assert any(each.startswith(told) for each in done.stderr.splitlines())


def test_an_argument_that_a_hook_refuses_in_an_event_is_told_without_a_place_in_the_model(project, emrun_here):
    project("mine.Refuses")
    assert (
        emrun_here("train", "-q", "c.yaml").stderr.splitlines()[0]
        == "error: loss: is mine (in hook Refuses, before_training)"
    )


def test_a_library_that_a_constructor_imports_and_that_is_missing_is_told_with_what_to_install(project, emrun_here):
    place = project("mine.Imports")
    done = emrun_here("train", "-q", "c.yaml", "--output-dir", "run")
    assert done.returncode == 1
    told = "'nobody_has' is not installed: pip install nobody_has; or, if it is a module of yours, put it beside"
    assert f"\n    import nobody_has.parts\n{told} the others\n" in done.stderr
    assert f'File "{place / "mine.py"}"' in done.stderr


def test_an_error_in_a_worker_process_has_one_frame_of_the_user(project, emrun):
    done = emrun("train", "-q", "--rm", "c.yaml", "dataset.bad=raises", "main_loop.workers=1")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("in worker process 0, pid ")
    assert lines[1:3] == ["in stream 'train', batch 0 of the pass", "KeyError: 'no row'"]
    assert len([line for line in lines if line.startswith("  File ")]) == 1
    assert f"line {RAISES}, in train_stream" in lines[3]


@pytest.mark.parametrize(("at", "status"), thinned([(0, 2), (2, 1)], [(2, 1)]))
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("unequal", "sources of unequal length: x 10, y 3"),
        ("strings", "source 'y' cannot become a tensor: too many dimensions 'str'; the dataset must yield numbers"),
    ],
)
def test_wrong_data_is_one_line_with_stream_and_batch(project, emrun_here, bad, message, at, status):
    done = emrun_here("train", "-q", "--rm", "c.yaml", f"dataset.bad={bad}", f"dataset.at={at}")
    assert done.returncode == status
    (first,) = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert f"stream 'train', batch {at} of the epoch" in first


def test_a_picture_that_is_cut_off_is_one_line_without_the_frames_of_pillow(tmp_path, capsys):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "png")
    try:
        Image.open(io.BytesIO(file.getvalue()[:60])).load()
    except OSError as cause:
        error = StreamError(f"cannot read 0.png: {cause}")
        error.__cause__ = cause.with_traceback(cause.__traceback__.tb_next)  # without this test
    print_failure(error)
    assert capsys.readouterr().err.strip().splitlines() == [f"error: {error}"]


def test_an_exception_of_a_hook_names_hook_event_and_epoch(project, emrun_here):
    project("mine.Fails")
    done = emrun_here("train", "-q", "--rm", "c.yaml")
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "in hook Fails, after_epoch of epoch 1",
        "ZeroDivisionError: division by zero",
    ]


TAKES = [
    ("sys.stderr.close(); sys.stdout.close(); 1 / 0", 1),
    ("sys.stderr = sys.stdout = None; 1 / 0", 1),
    ("sys.stderr = io.StringIO(); raise BrokenPipeError('division by zero')", 1),
    ("os.close(1); os.close(2); self.file = open('opened', 'w'); 1 / 0", 1),
    ("sys.stderr = io.TextIOWrapper(sys.stderr.detach()); sys.stderr = None; 1 / 0", 1),
    ("sys.stdout = sys.stderr = WritesOnly(); 1 / 0", 1),
    ("sys.stderr = sys.stdout = None; os.kill(os.getpid(), 15)", -15),
]


@pytest.mark.parametrize(("code", "status"), thinned(TAKES, [TAKES[0], TAKES[-1]]))
def test_an_error_is_told_after_user_code_has_taken_the_output_away(project, emrun, tmp_path, code, status):
    project({"mine.Takes": {"code": code}})
    done = emrun("train", "c.yaml", "hooks.StopAfter.epochs=3", "--output-dir", "run", "--json")
    reason = "division by zero" if status == 1 else "interrupted by SIGTERM"
    assert done.returncode == status
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert reason in (tmp_path / "run" / "train.log").read_text()
    assert json.loads(done.stdout)["exit_status"] == abs(status) + 128 * (status < 0)
    assert not (tmp_path / "opened").exists() or not (tmp_path / "opened").read_text()


@pytest.mark.campaign
def test_results_are_printed_after_user_code_has_taken_the_output_away(project, emrun):
    place = project()
    assert emrun("train", "-q", "c.yaml", "--output-dir", "run").returncode == 0
    taken = MINE.replace("def train_stream(self, ctx):", "def train_stream(self, ctx):\n        sys.stdout = None")
    (place / "mine.py").write_text(f"{taken}\nsys.stdout.close()\nsys.stderr = None\n")
    for command, printed in {
        "eval run valid": "loss",
        "predict run valid -o p.csv": "40 rows",
        "dataset stream_info c.yaml": "valid",
        "dataset valid_stream c.yaml": "missing 1 required positional argument",
        "check c.yaml": "nothing is wrong",
        "check --data c.yaml": "valid",
        "show mine.Data": "mine.Data has no docstring",
        "resume run hooks.StopAfter.epochs=2": "page: run",
        "train c.yaml dataset.bad=raises": "no row",
        "check c.yaml dataset.bad=raises": "no row",
        "eval run valid dataset.bad=raises": "no row",
    }.items():
        done = emrun(*command.split())
        assert printed in done.stdout + done.stderr, command


def test_what_a_constructor_puts_in_place_of_the_output_gets_what_is_printed_in_the_training(project, emrun):
    place = project()
    copies = "class Copies(WritesOnly):\n    def flush(self):\n        pass\n"
    copies += "    def write(self, text):\n        print(text, end='', file=open('copy', 'a'))\n"
    put = "self.bad, self.at = bad, at\n        sys.stdout = Copies()\n"
    (place / "mine.py").write_text(
        MINE.replace("self.bad, self.at = bad, at\n", put).replace("for rows", "print('seen')\n        for rows")
        + copies
    )
    done = emrun("train", "c.yaml", "--output-dir", "run")
    assert done.returncode == 0
    assert "seen" in (place / "copy").read_text()
    assert "next: emrun eval run test" in done.stdout


def test_a_hook_that_fails_in_an_evaluation_says_what_an_evaluation_lacks(project, emrun_here):
    project("mine.ReadsValid", "mine.MonitorsValid")
    assert emrun_here("train", "-q", "c.yaml", "--output-dir", "run").returncode == 0
    done = emrun_here("eval", "-q", "run", "test")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "in hook ReadsValid, after_epoch of epoch 0"
    assert "with epoch_id 0 and one stream" in lines[1]
    assert "eval.STREAM.hooks" in lines[1]
    assert lines[2] == """KeyError: "there is no stream 'valid' in the data of the epoch (it has test)\""""
    assert lines[-1] == "the full traceback is in run/eval/test-1/train.log"
    done = emrun_here("eval", "run", "test", "~hooks.2")
    assert done.returncode == 0
    left_out = "hook MonitorsValid is left out: it monitors valid/loss/mean, but only test is run"
    assert left_out in done.stderr.splitlines()
    done = emrun_here("eval", "run", "valid")
    assert (done.returncode, "left out" in done.stderr) == (0, False)


def test_a_file_that_is_not_found_elsewhere_names_the_directory_of_the_start(project, emrun_here):
    place = project()
    (place / "data.txt").write_text("")
    assert emrun_here("train", "-q", "c.yaml", "dataset.path=data.txt", "--output-dir", "run").returncode == 0
    (place / "elsewhere").mkdir()
    shutil.move(place / "run", place / "elsewhere" / "run")
    done = emrun_here("eval", "-q", "run", "test", cwd=place / "elsewhere")
    assert done.returncode == 1
    assert f"the run was started in {place}; relative paths begin in the current directory" in done.stderr.splitlines()


def test_a_signal_while_hooks_are_built_is_reported_and_recorded(project, emrun):
    place = project("mine.Late")
    done = emrun("train", "-q", "c.yaml", "--output-dir", "run")
    assert (done.returncode, done.stderr) == (-15, "interrupted by SIGTERM\n")
    text = (place / "run" / "trace.yaml").read_text()
    assert "status: interrupted" in text
    assert "reason: interrupted by SIGTERM" in text


@pytest.mark.parametrize(
    "command",
    ["ls D", "trace D", "report D", "prune --dry-run D", "train c.yaml -o D"],
)
def test_a_directory_that_the_system_refuses_is_one_line_and_no_failure_of_code(project, emrun_here, command):
    project()
    done = emrun_here(*command.replace("D", "d" * 300).split())
    assert done.returncode == 74
    assert done.stderr.splitlines()[-1].startswith("error: file name too long: ")
    assert "  File " not in done.stderr


@pytest.mark.parametrize(
    "command", ["ls", "prune --dry-run", "report", "config", "train c.yaml --output-dir", "init", "predict R valid -o"]
)
def test_an_empty_path_is_an_error_and_not_the_current_directory(project, monkeypatch, command):
    monkeypatch.chdir(project())
    with pytest.raises(BadParameter, match="the path is empty, perhaps because a variable is not set"):
        commands.main([*command.split(), ""], standalone_mode=False)
    assert sorted(each.name for each in project().iterdir()) == ["c.yaml", "mine.py"]


def test_garbage_is_never_looked_for_among_what_the_import_of_pytorch_has_made():
    made = []
    try:
        failures.import_torch()
        assert gc.isenabled()
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
