"""`emrun check` as an installed command, on correct configs and on mistakes that only appear with the data."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from campaign import thinned
from click.testing import CliRunner
from projects import MAJORITY

from emrun.base.errors import ConfigError, UsageError
from emrun.cli.check import _numerics, check
from emrun.config.config import load_config
from emrun.config.import_finder import Imported
from emrun.config.plan import Plan

ROOT = Path(__file__).parent.parent.parent

CONFIG = (
    "seed: 5\n"
    + MAJORITY
    + """\
  optimizer: {class: SGD, lr: 0.5, momentum: 0.9}
main_loop:
  extra_streams: [valid]
hooks:
  - ComputeStats: {variables: [loss]}
  - StopAfter: {epochs: 2}
"""
)

CODE = """
import numpy as np
import torch
from emrun import AbstractHook, TorchModel

class Data:
    def train_stream(self):
        for i in range(3):
            yield {"x": np.full((4, 2), i, "float32"), "y": np.ones(4, "float32")}
    def valid_stream(self):
        yield {"x": np.ones((4, 3), "float32"), "y": np.ones(4, "float32")}
    def test_stream(self):
        raise OSError("not downloaded")
    def empty_stream(self):
        return iter(())
    def late_stream(self):
        yield {"x": np.ones((0, 2), "float32"), "y": np.ones(0, "float32")}
        yield {"x": np.ones((0, 2), "float32"), "y": np.ones(0, "float32")}
        yield {"x": np.ones((4, 2), "float32"), "y": np.ones(4, "float32")}
    def nan_stream(self):
        yield {"x": np.array([[1, np.nan]] * 4, "float32"), "y": np.ones(4, "float32")}

class Net(torch.nn.Module):
    def __init__(self, forgetful=False):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.forgetful, self.steps = forgetful, 0
    def forward(self, x, y):
        if self.training and self.forgetful:
            self.steps += 1
        return {"loss": (self.inner(x)[:, 0] - y) ** 2 + self.steps}

class Late(TorchModel):
    def before_training(self):
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
    def register_mainloop(self, main_loop):
        super().register_mainloop(main_loop)
        self.steps_of = main_loop.train_stream_name
    def train_step(self, inputs):
        assert self.steps_of == "train"
        return super().train_step(inputs)

class Any(AbstractHook):
    def before_training(self):
        pass
    before_update = after_batch = after_epoch = after_training = before_batch = before_training
"""

OWN = """\
dataset: {class: code.Data}
model:
  module: {class: code.Net}
  optimizer: {class: SGD, lr: 0.1}
hooks:
  - code.Any
  - StopAfter: {epochs: 1}
"""


@pytest.fixture
def project(tmp_path):
    """Return a directory with configs, their code and a directory for temporary files."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "own.yaml").write_text(OWN.replace("code.", "my_code."))
    (tmp_path / "my_code.py").write_text(CODE)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def changed(project, old, new, name="own.yaml"):
    path = project / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def files_of(project):
    """Return all paths with the times of files; torch creates a folder for its compiler at unpredictable times."""
    paths = [path for path in project.rglob("*") if not path.name.startswith("torchinductor")]
    return {path: path.is_file() and path.stat().st_mtime_ns for path in paths}


def test_a_correct_config_shows_its_contract_and_leaves_no_trace(project, emrun_here, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(project / "tmp"))
    before = files_of(project)
    done = emrun_here("check", "c.yaml")
    assert done.returncode == 0, done.stderr
    assert files_of(project) == before
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(
        line.startswith("train trained on, ") and "batches x float32 (B, 11) 0 to 1 model" in line for line in lines
    )
    assert any(line.startswith("valid evaluated") for line in lines)
    assert any(line.startswith("loss float32 scalar ") for line in lines)
    assert "0 Linear weight (1, 11), bias (1,) 12 yes" in lines
    assert "all 12 12" in lines
    assert any(line.startswith("memory: parameters 48 B, gradients 48 B, optimizer 48 B, peak of ") for line in lines)
    assert any(line.startswith("an epoch takes about ") for line in lines)
    assert "read ahead" not in done.stdout
    assert "precision" not in done.stdout
    assert lines[-1] == "c.yaml: nothing is wrong; tried a short epoch with all hooks, saving and loading"
    assert done.stderr == ""


SAMPLES = sorted(ROOT.glob("sample_configs/*.yaml"))


@pytest.mark.campaign
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_config_passes(path, emrun_here):
    done = emrun_here("check", path)
    assert done.returncode == 0, done.stderr


def test_overrides_are_checked(project, emrun_here):
    done = emrun_here("check", "c.yaml", "hooks.StopAfter.epoch=3")
    assert done.returncode == 2
    assert "override 'hooks.StopAfter.epoch=3': hooks[1].StopAfter: unknown argument 'epoch'" in done.stderr


def test_static_imports_neither_torch_nor_the_users_code_nor_what_hides_installed_modules(project, emrun_here):
    (project / "my_code.py").write_text("raise RuntimeError('imported')\n" + CODE)
    (project / "datasets").mkdir()
    (project / "datasets" / "__init__.py").write_text("raise ImportError('the wrong datasets')")
    (project / "click.py").write_text("raise ImportError('the wrong click')")
    command = [sys.executable, "-X", "importtime", "-m", "emrun", "check", "--static", "own.yaml"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "own.yaml: nothing is wrong, as far as can be checked without importing anything\n"
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "emrun.config.plan" in imported
    assert not imported & {"torch", "numpy", "my_code", "emrun.hooks.stop_after"}
    changed(project, "code.Net}", "code.Net, deep: 3}")
    assert emrun_here("check", "--static", "own.yaml").returncode == 2


def test_how_streams_are_read_ahead_and_an_unusual_precision_are_told(project, emrun_here):
    shown = emrun_here("check", "c.yaml", "main_loop.buffer=2", "model.precision=bf16").stdout
    assert "\nstreams are read ahead with buffer: 2\n" in shown
    assert "\nprecision: bf16\n" in shown


def test_json_has_the_same_content(project, emrun_here):
    found = json.loads(emrun_here("check", "c.yaml", "--json").stdout)
    assert found["problems"] == []
    contract = found["contract"]
    assert contract["streams"]["train"]["sources"]["x"]["used_by"] == ["model"]
    assert contract["outputs"]["loss"]["shape"] == "scalar"
    assert contract["parameters"][0]["shapes"] == {"weight": [1, 11], "bias": [1]}
    assert contract["initial_weights"] is None
    assert contract["memory"]["parameters"] == 48
    assert contract["reading"] == {"buffer": 0, "workers": 0}
    assert contract["precision"] == 32
    assert set(contract["seconds_per_epoch"]) == {"train", "valid"}
    changed(project, "lr: 0.5", "lrr: 0.5", "c.yaml")
    done = emrun_here("check", "c.yaml", "--json")
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["file"], problem["line"], problem["column"]) == ("c.yaml", 12, 27)
    assert problem["message"].startswith("unknown argument 'lrr'; did you mean 'lr'?")


def test_an_unknown_key_at_the_top_hides_no_other_mistake(project, emrun_here):
    changed(project, "seed: 5", "sed: 5", "c.yaml")
    changed(project, "lr: 0.5", "lrr: 0.5", "c.yaml")
    changed(project, "{epochs: 2}", "2", "c.yaml")
    found = json.loads(emrun_here("check", "c.yaml", "--json").stdout)["problems"]
    assert [each["line"] for each in found] == [1, 12, 17]
    with pytest.raises(ConfigError) as caught:
        Plan.of(load_config(project / "c.yaml"), Imported())
    assert [problem.position.line for problem in caught.value.problems] == [1, 12, 17]


def test_streams_that_are_not_run_are_only_looked_at(project, emrun_here):
    done = emrun_here("check", "own.yaml")
    assert done.returncode == 0, done.stderr
    assert "test    not used in training" not in done.stdout
    assert "warning: stream 'test', which main_loop does not run, failed: OSError: not downloaded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("code.Net}", "code.Net, forgetful: true}", "a checkpoint does not restore the model exactly: output"),
        ("hooks:", "hooks:\n  - ComputeStats: {variables: [accuracy]}", "reads 'accuracy', which is neither a source"),
        ("hooks:", "hooks:\n  - SaveBest: {variable: loss}", "monitors valid/loss/mean, but stream 'valid' is not run"),
        ("hooks:", "main_loop: {extra_streams: [empty]}\nhooks:", "stream 'empty' has no batch for the model"),
        ("hooks:", "main_loop: {on_unused_sources: error}\nhooks:", None),
        ("hooks:", "main_loop: {fixed_batch_size: 3}\nhooks:", "stream 'train' has no batch for the model"),
        ("code.Net}", "code.Net, deep: 3}", "unknown argument 'deep'"),
        ("  optimizer:", "  inputs: [x, z]\n  optimizer:", "forward of Net needs z, which the batch does not have"),
        ("  optimizer: {class: SGD, lr: 0.1}\n", "", "training needs an optimizer"),
    ],
)
def test_mistakes_that_only_data_show_are_found_without_training(project, emrun_here, old, new, message):
    changed(project, old, new)
    done = emrun_here("check", "own.yaml")
    assert done.returncode == (0 if message is None else 2), done.stderr
    assert (message or "") in done.stderr
    assert "Traceback" not in done.stderr


POSSIBLE = [
    ("hooks:", "main_loop: {extra_streams: [late], on_empty_batch: ignore}\nhooks:", "out", ["late evaluated"]),
    (
        "hooks:",
        "eval: {tets: {seed: 1}}\nhooks:",
        "err",
        ["the dataset has no stream 'tets'; did you mean 'test'?"],
    ),
    (
        "hooks:",
        "main_loop: {extra_streams: [nan]}\nhooks:",
        "err",
        ["stream 'nan': source 'x' has values", "output 'loss' has values that are not finite"],
    ),
    ("model:\n", "model:\n  class: my_code.Late\n", "out", ["no error"]),
]


@pytest.mark.parametrize("old, new, where, messages", thinned(POSSIBLE, POSSIBLE[1:3]))
def test_possible_mistakes_are_warnings_and_other_things_are_not(project, emrun_here, old, new, where, messages):
    changed(project, old, new)
    done = emrun_here("check", "own.yaml")
    assert done.returncode == 0, done.stderr
    shown = " ".join((done.stdout if where == "out" else done.stderr).split())
    assert [message for message in messages if message not in shown] == []
    last = done.stdout.splitlines()[-1]  # each of these has a warning, also of the stream 'test' that is not there
    assert last.startswith("own.yaml: no error, but the warnings above; tried a short epoch")


@pytest.mark.parametrize(
    ("command", "wrong"),
    [("check", "{}['DATA_ROOT']"), ("train", "[][0]"), ("train", "(_ for _ in ()).throw(KeyError())")],
)
def test_an_error_of_the_users_module_is_not_an_error_of_the_config(project, emrun_here, command, wrong):
    with (project / "my_code.py").open("a") as file:
        file.write(f"ROOT = {wrong}\n")
    done = emrun_here(command, "own.yaml")
    assert done.returncode == 1
    assert "my_code.py" in done.stderr  # in the traceback
    assert "while importing my_code.Data for dataset (own.yaml:1:" in done.stderr


def test_json_is_json_whatever_the_users_code_prints(project, emrun_here):
    with (project / "my_code.py").open("a") as file:
        file.write("print('hello')\nData.num_batches = {'train': np.int64(3), 'valid': float('inf')}\n")
    done = emrun_here("check", "own.yaml", "--json")
    assert json.loads(done.stdout)["contract"]["streams"]["train"]["batches"] == 3
    assert "hello" in done.stderr


def test_a_check_that_is_terminated_leaves_no_trace_either(project, emrun, monkeypatch):
    with (project / "my_code.py").open("a") as file:
        file.write("import os, signal\nData.valid_stream = lambda self: os.kill(os.getpid(), signal.SIGTERM)\n")
    changed(project, "hooks:", "main_loop: {extra_streams: [valid]}\nhooks:")
    before = files_of(project)
    monkeypatch.setenv("TMPDIR", str(project / "tmp"))
    assert emrun("check", "own.yaml").returncode == -signal.SIGTERM
    assert files_of(project) == before


def test_an_error_of_the_users_code_has_its_traceback_and_the_stream(project, emrun_here):
    changed(project, "hooks:", "main_loop: {extra_streams: [valid]}\nhooks:")
    done = emrun_here("check", "own.yaml")
    assert done.returncode == 1
    assert "shapes cannot be multiplied" in done.stderr
    assert "while trying the first batches of stream 'valid'" in done.stderr


ODD = """
import functools

from emrun import AbstractHook

def validated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.extra = {name: kwargs.pop(name) for name in list(kwargs) if name != "hidden_size"}
        function(self, *args, **kwargs)
    return wrapper

class Config:
    @validated
    def __init__(self, hidden_size=11):
        self.hidden_size = hidden_size

def make(config):
    import torch
    return torch.nn.Sequential(torch.nn.Linear(config.hidden_size, 1), torch.nn.Flatten(0))

class Keeps(AbstractHook):
    def __init__(self, **options):
        super().__init__()
        assert options == {"colour": "red"}
"""


def test_arguments_that_a_wrapper_accepts_at_the_call_are_accepted(emrun_here, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    module = "{class: odd.make, config: {class: odd.Config, num_labels: 3}}"
    head, _, tail = CONFIG.partition("  module:")
    text = f"{head}  module: {module}\n  inputs{tail.partition('  inputs')[2]}  - odd.Keeps: {{colour: red}}\n"
    (tmp_path / "c.yaml").write_text(text)
    done = emrun_here("check", "c.yaml")
    assert (done.returncode, done.stderr) == (0, "")


USERS_DATA = """
class Data:
    def train_stream(self):
        yield {"x": [[0.0] * 11], "y": [0.0]}
"""


@pytest.mark.parametrize("module", ["random", "torch", "time"])
def test_a_module_hidden_by_an_installed_one_is_named_with_both(emrun_here, tmp_path, module):
    (tmp_path / f"{module}.py").write_text(USERS_DATA)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("{class: Majority, n: 50}", f"{{class: {module}.Data}}"))
    done = emrun_here("check", "c.yaml")
    message = done.stderr.splitlines()[0]
    assert done.returncode == 2
    assert f"dataset: {module}.Data: {module}.py is hidden by " in message
    assert message.endswith(f"which has no 'Data'; rename {module}.py")
    assert ("built into Python" if module == "time" else str(importlib.util.find_spec(module).origin)) in message


def test_a_package_hidden_by_a_module_is_named_too(emrun_here, tmp_path):
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "__init__.py").write_text(USERS_DATA)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("{class: Majority, n: 50}", "{class: random.Data}"))
    assert "random.Data: random/__init__.py is hidden by the module" in emrun_here("check", "c.yaml").stderr


def test_a_module_beside_the_config_is_suggested_from_another_directory(emrun_here, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_data.py").write_text(USERS_DATA)
    (project / "c.yaml").write_text(CONFIG.replace("{class: Majority, n: 50}", "{class: my_data.Data}"))
    done = emrun_here("train", "project/c.yaml")
    assert done.returncode == 2
    advice = f"my_data.py is in the folder of the config: set code_directory: {project}, or run emrun there"
    assert done.stderr.splitlines()[0] == (
        "project/c.yaml:2:11: dataset: no module 'my_data' (looked for in the current directory, then among installed "
        f"packages; to look in another folder, set code_directory); {advice}"
    )
    done = emrun_here("check", "--static", "project/c.yaml", f"code_directory={project}")
    assert "no module" not in done.stderr
    done = emrun_here("check", "--static", "project/c.yaml", "code_directory=gone")
    gone = "there is no directory 'gone', in which the modules are looked for first; set code_directory"
    assert f"override 'code_directory=gone': code_directory: {gone}\n" in done.stderr


SORTED = """
import numpy as np

class Sorted:
    def __init__(self, n=60, dim=11):
        self.x, self.y = np.ones((n, dim), "float32"), np.repeat(np.arange(3), n // 3)
    def train_stream(self, ctx):
        for rows in ctx.batches(60, 4, shuffle=True):
            yield {"x": self.x[rows], "y": np.ones(4, "float32"), "label": self.y[rows]}
    def valid_stream(self, ctx):
        for rows in ctx.batches(60, 4):
            yield {"x": self.x[rows], "y": np.ones(4, "float32"), "label": self.y[rows]}
"""


def test_a_part_of_a_stream_that_is_sorted_is_not_a_fair_sample(tmp_path, emrun_here):
    (tmp_path / "my_sorted.py").write_text(SORTED)
    config = CONFIG.replace("{class: Majority, n: 50}", "{class: my_sorted.Sorted}")
    (tmp_path / "config.yaml").write_text(config.replace("[valid]", "[{valid: {batches: 5}}, {train: {batches: 5}}]"))
    done = emrun_here("check", "config.yaml")
    assert done.returncode == 0
    (found,) = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "is sorted" in line]
    assert "stream 'valid': source 'label' is sorted in the first 5 batches, which alone are evaluated" in found


@pytest.mark.campaign
def test_a_whole_stream_may_be_sorted(tmp_path, emrun_here):
    (tmp_path / "my_sorted.py").write_text(SORTED)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("{class: Majority, n: 50}", "{class: my_sorted.Sorted}"))
    done = emrun_here("check", "config.yaml")
    assert done.returncode == 0
    assert "is sorted" not in done.stdout + done.stderr


def test_check_train_and_resume_show_the_plan_of_the_learning_rates(emrun_here, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "seed: 1\ndataset: {class: Majority, n: 20}\nmodel:\n"
        "  module: {class: torch.nn.Linear, in_features: 11, out_features: 1}\n  inputs: [x]\n  outputs: [logit]\n"
        "  loss: {class: my_loss.Loss, inputs: [logit, y]}\n  optimizer: {class: SGD, lr: 0.1}\n"
        "  scheduler: {class: Constant, warmup: 4 updates}\nhooks: [{StopAfter: {updates: 8}}]\n"
    )
    (tmp_path / "my_loss.py").write_text(
        "class Loss:\n    def __call__(self, logit, y):\n        return (logit.flatten() - y).square()\n"
    )
    lines = [
        "learning rate over 8 updates: Constant, warm-up 4 updates",
        "  0% 0.025, 25% 0.075, 50% 0.1, 75% 0.1, 100% 0.1  ▃▅▇█████",
    ]
    checked = emrun_here("check", "config.yaml")
    assert "\n".join(lines) in checked.stdout
    report = json.loads(emrun_here("check", "config.yaml", "--json").stdout)["contract"]["schedule"]
    assert report["updates"] == 8
    assert report["rates"] == [pytest.approx([0.025, 0.075, 0.1, 0.1, 0.1])]
    assert report["lines"] == lines
    trained = emrun_here("train", "config.yaml", "--output-dir", "run")
    assert all(line in trained.stderr for line in lines)
    resumed = emrun_here("resume", "run", "hooks.StopAfter.updates=12")
    assert "learning rate over 12 updates: Constant, warm-up 4 updates\n" in resumed.stderr
    refused = emrun_here("resume", "run", "hooks.StopAfter.updates=2", "model.scheduler.cooldown=1 update")
    assert refused.returncode == 2
    assert "model.scheduler.warmup: 4 updates: the run makes only 2 updates" in refused.stderr


def test_numerics_are_a_table_in_which_what_differs_is_wrong(project, emrun):
    (project / "tokens.py").write_text(
        "import torch\n"
        "class Tokens(torch.nn.Linear):\n"
        "    def forward(self, x, y):\n"
        "        lost, weight = (super().forward(x)[:, 0] - y) ** 2, x.abs().sum(1)\n"
        "        return {'loss': (lost * weight).sum() / weight.sum()}\n"
    )
    (project / "tokens.yaml").write_text(
        "dataset: {class: Majority, n: 50}\n"
        "model: {module: {class: tokens.Tokens, in_features: 11, out_features: 1}, optimizer: {class: SGD, lr: 0.1}}\n"
        "hooks: [StopAfter: {epochs: 9}]\n"
    )
    done = emrun("check", "tokens.yaml", "--numerics", "--nproc", "2", "--json", ranks=2)
    assert done.returncode == 1, done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)["numerics"]}
    results = {what: row["result"] for what, row in rows.items() if row["result"] != "not applicable"}
    assert results == {
        "gradients of the halves of a batch": "differs",
        "several ranks and one": "differs",
        "saved and loaded": "same",
    }
    assert len(rows) == 9
    assert rows["gradients of the halves of a batch"]["name"] in ("weight", "bias")
    assert "return the weights of the examples" in rows["gradients of the halves of a batch"]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--numerics"], "--numerics needs a CONFIG"),
        (["--nproc", "2"], "--nproc needs a CONFIG"),
        (["c.yaml", "--static", "--numerics"], "--static imports nothing, as --numerics does"),
        (["c.yaml", "--static", "--nproc", "2"], "--static imports nothing, as --nproc does"),
    ],
)
def test_numerics_need_a_config_that_runs(arguments, message):
    done = CliRunner().invoke(check, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_the_memory_of_ranks_that_share_nothing_is_refused_before_torch_is_imported(project, monkeypatch):
    monkeypatch.setattr("emrun.cli.check.import_torch", lambda: pytest.fail("torch is imported"))
    with pytest.raises(UsageError, match=r"--nproc needs --numerics, or model\.strategy: without them, each process"):
        check.main([str(project / "c.yaml"), "--nproc", "2"], standalone_mode=False)


def test_the_rows_of_numerics_are_a_table():
    row = {"what": "halves", "result": "differs", "text": "weight by 0.5", "name": "weight", "by": 0.5}
    (shown,) = _numerics([row])
    assert shown.splitlines()[-1].split() == ["halves", "differs", "weight", "by", "0.5"]
