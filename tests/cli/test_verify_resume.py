"""`emrun verify-resume` as an installed command, on configs whose resume is exact and on some whose resume is not."""

import fcntl
import json
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from emrun.cli import emrun as commands

EMRUN = Path(sys.executable).with_name("emrun")
SAMPLES = Path(__file__).parents[2] / "sample_configs"

pytestmark = pytest.mark.timeout(300)  # up to eleven processes

CODE = '''
import fcntl
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch

from emrun import AbstractHook
from emrun.hooks import AbstractTracker


class Told(AbstractTracker):
    """Writes a file when anything is sent."""

    def begin(self, facts, identity):
        Path("told").touch()

    def newest(self):
        return None

    def write(self, row):
        Path("told").touch()


class Data:
    """Six batches per pass, made in a way that can or cannot be resumed exactly."""

    def __init__(self, kind="good", read_ahead=0, scale=1.0):
        self.read_ahead = read_ahead
        self.x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
        self.scale = scale
        self.train_stream = getattr(self, kind)

    def _batch(self, rows, noise=0.0):
        x = self.x[rows] + np.float32(noise)
        return {"x": x, "y": (x.sum(axis=1) > 0).astype(np.float32)}

    def good(self, ctx):
        for rows in ctx.batches(24, 4, shuffle=True):
            yield self._batch(rows, ctx.rng.normal() * self.scale)

    def augmented(self, ctx):
        for rows in ctx.batches(24, 4, shuffle=True):
            yield self._batch(rows, np.random.normal())

    def timed(self):
        order = list(range(24))
        random.Random(time.time_ns()).shuffle(order)
        for first in range(0, 24, 4):
            yield self._batch(order[first : first + 4])

    def hashed(self):
        names = list({f"name {number}" for number in range(24)})
        for first in range(0, 24, 4):
            yield self._batch([int(name.split()[1]) for name in names[first : first + 4]])

    def broken(self):
        yield self._batch([0])
        raise RuntimeError("the disk of the data is gone")

    def endless(self):
        self.file = Path("begun").open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        os.kill(os.getppid(), signal.SIGTERM)
        signal.alarm(1000)  # longer than a test
        signal.pause()

    def valid_stream(self, ctx):
        for rows in ctx.batches(12, 4):
            yield self._batch(rows)


class Net(torch.nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(x)[:, 0]


class CountingNet(Net):
    """Changes its output with the number of its calls, which is saved in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return super().forward(x) * (1 + 0.1 * self.steps)


class Warmup(AbstractHook):
    """Raises the learning rate by a counter, which is saved in no checkpoint."""

    def __init__(self, model):
        super().__init__()
        self.optimizer, self.count = model.optimizer, 0

    def after_update(self):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.count


class Freeze(AbstractHook):
    """Freezes the first layer in all epochs before `until`."""

    def __init__(self, model, until=2):
        super().__init__(model)
        self.until = until

    def before_epoch(self, epoch_id):
        for parameter in self.model.module.layers[0].parameters():
            parameter.requires_grad_(epoch_id >= self.until)


class Decay(AbstractHook):
    """Multiplies the learning rate at the beginning of each epoch."""

    def before_epoch(self):
        self.model.optimizer.param_groups[0]["lr"] *= 0.7


class Draw(AbstractHook):
    """Draws numbers from all generators at the start of an epoch, and adds them to the weights there and at the end."""

    def before_epoch(self):
        self.drawn = torch.rand(8).mul_(random.random()).add_(np.random.normal())
        self.add()

    def after_epoch(self):
        self.add()

    def add(self):
        with torch.no_grad():
            self.model.module.layers[0].bias.add_(self.drawn)


class Curriculum(AbstractHook):
    """Makes the data harder from epoch to epoch."""

    def before_epoch(self, epoch_id):
        self.dataset.scale = 1.0 + epoch_id


class Score(AbstractHook):
    """Writes a value for each epoch; the zeroth is the best."""

    writes = ["score"]

    def after_epoch(self, epoch_id, epoch_data):
        epoch_data["valid"]["score"] = [2.0, float("nan"), 2.0, 9.0][epoch_id]


class Clock(AbstractHook):
    """Has a time in its state, which is different in every run."""

    def state_dict(self):
        return {"time": time.time_ns()}
'''

CONFIG = """\
seed: 3
dataset: {class: my_code.Data}
model:
  module: {class: my_code.Net}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.BCEWithLogitsLoss, inputs: [logit, y]}
  optimizer: {class: Adam, lr: 0.05}
  scheduler: {class: StepLR, step_size: 1, gamma: 0.5}
main_loop:
  extra_streams: [valid]
  report: false
hooks:
  - ComputeStats: {variables: [loss]}
  - WriteCSV
  - StopAfter: {epochs: 1}
"""


@pytest.fixture
def project(tmp_path):
    """Return a directory with a config and its code; assert that the command leaves no other file there."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_code.py").write_text(CODE)
    (tmp_path / "temporary").mkdir()
    yield tmp_path
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "torchinductor" not in path.name)
    assert left == ["config.yaml", "my_code.py", "temporary"]


@pytest.fixture
def verify(project, emrun, monkeypatch):
    """Run the command; each of its runs is in a process that has imported PyTorch and stands by."""
    monkeypatch.setenv("TMPDIR", str(project / "temporary"))

    def run(*arguments):
        runs = 3 + 2 * (arguments.count("--at") or 4)
        return emrun("verify-resume", "-q", "config.yaml", *arguments, ranks=runs * (1 + 2 * ("--nproc" in arguments)))

    return run


def rows(done):
    """Return the rows of the table: point, iteration, signal, resumed at, result."""
    head, _, *lines = done.stdout.split("\n\n")[0].splitlines()
    starts = [head.index(title) for title in ("interrupted at", "iteration", "by", "resumed at", "result")]
    ends = [*starts[1:], None]
    return [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in lines]


@pytest.mark.campaign
def test_a_good_config_is_exact_at_every_point(verify):
    done = verify("main_loop.buffer=2", "main_loop.fixed_epoch_size=4", "main_loop.extra_streams=[valid, train]")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done) == [
        ["the middle of an epoch", "5", "SIGTERM", "5", "exact"],
        ["the end of a pass", "6", "SIGTERM", "6", "exact"],
        ["the last batch of an epoch", "4", "SIGTERM", "4", "exact"],
        ["an evaluation (train_eval)", "4", "SIGTERM", "4", "exact"],
    ]
    assert done.stdout.splitlines()[-1] == "exact: interrupted at 4 points, compared 10 iterations"


SHARDED = (r"model.strategy={shard: '^layers\.\d+$'}",)
EQUAL_ON_RANKS = ("dataset.scale=0", "model.module.dropout=0", "model.sync_batch_norm=true")


@pytest.mark.campaign
def test_another_number_of_ranks_is_equal_up_to_rounding(verify):
    done = verify("--nproc", "1,2", "--at", "4", *EQUAL_ON_RANKS)
    assert (done.returncode, done.stderr) == (0, "")
    (moved,) = rows(done)
    assert moved[:4] == ["the given iteration", "4", "SIGTERM", "4 on 2 ranks"]
    assert 0 < float(moved[4].removeprefix("rounded, by up to ")) < 1e-2
    assert "\nequal up to rounding: interrupted at 1 point, compared" in done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("sharded", [(), SHARDED], ids=["whole", "sharded"])
def test_several_ranks_are_exact_and_another_number_is_equal_up_to_rounding(verify, sharded):
    done = verify("--nproc", "2,2,3", "--at", "9", *EQUAL_ON_RANKS, *sharded)
    assert (done.returncode, done.stderr) == (0, "")
    moved, same = rows(done)
    assert moved[:4] == ["the given iteration", "9", "SIGTERM", "9 on 3 ranks"]
    assert 0 < float(moved[4].removeprefix("rounded, by up to ")) < 1e-2
    assert same == ["the given iteration", "9", "SIGTERM", "9", "exact"]
    assert "\nequal up to rounding: interrupted at 1 point, compared" in done.stdout


@pytest.mark.campaign
def test_random_numbers_of_ranks_are_named(verify):
    done = verify("--nproc", "1,2", "--at", "9", "--json")
    [row] = json.loads(done.stdout)["rows"]
    assert (done.returncode, row["resumed_on"]) == (1, 2)
    assert row["difference"].startswith("at the end: ")
    assert row["likely_cause"].startswith("each rank draws random numbers of its own, such as dropout")


@pytest.mark.parametrize("given", ["", "two", "2,", "2,0", "-1", "2;3"])
def test_other_numbers_of_ranks_are_refused(given):
    done = CliRunner().invoke(commands, ["verify-resume", "config.yaml", "--nproc", given])
    assert done.exit_code == 2
    assert f"{given!r} is not a number of processes, or several such as 2,3" in done.output


@pytest.mark.campaign
def test_trackers_are_left_out(verify, project):
    done = verify("--at", "5", "hooks=[{my_code.Told: {every: 2 updates}}, {StopAfter: {epochs: 1}}]")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (project / "told").exists()


SCHEDULERS = (
    "{class: SequentialLR, milestones: [4], step_on: update, schedulers: ["
    "{class: ChainedScheduler, schedulers: [{class: LinearLR}, {class: ExponentialLR, gamma: 0.9}]}, "
    "{class: CosineAnnealingLR, T_max: 9}]}"
)


@pytest.mark.campaign
def test_a_schedule_of_schedules_is_exact(verify):
    done = verify("--at", "3", "--at", "8", f"model.scheduler={SCHEDULERS}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row[-2:] for row in rows(done)] == [["3", "exact"], ["8", "exact"]]


OWN_SCHEDULES = (
    "{class: Constant, warmup: 2 updates, cooldown: 25%}",
    "{class: Linear, warmup: 10%}",
    "{class: Cosine, warmup: 1 pass, cycles: 2}",
    "{class: Polynomial, power: 2.0}",
    "{class: Exponential, cooldown: 2 updates}",
    "{class: InverseSqrt, warmup: 2 updates}",
    "{class: Steps, milestones: [30%, 9 updates]}",
)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", OWN_SCHEDULES)
def test_every_schedule_is_exact_after_a_kill(verify, schedule):
    done = verify("--kill", f"model.scheduler={schedule}", "hooks.StopAfter.epochs=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert {row[-1] for row in rows(done)} == {"exact"}


def test_a_killed_run_resumes_from_its_checkpoint_and_long_epochs_are_shortened(verify, project):
    sample = "{class: Majority, n: 300, batch_size: 10}"
    (project / "config.yaml").write_text(CONFIG.replace("{class: my_code.Data}", sample).replace(
        "{class: my_code.Net}", "{class: torch.nn.Sequential, args: [{class: torch.nn.Linear, in_features: 11, "
        "out_features: 1}, {class: torch.nn.Flatten, start_dim: 0}]}"
    ))  # fmt: skip
    schedule = (
        "{class: Cosine, warmup: 20 updates}"  # which only fits the length that the run has without the shortening
    )
    done = verify("--kill", "--at", "11", f"model.scheduler={schedule}")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done) == [["the given iteration", "11", "SIGKILL", "9", "exact"]]
    assert "verified with main_loop.fixed_epoch_size=8" in done.stdout
    assert "compared 18 iterations" in done.stdout


@pytest.mark.campaign
def test_the_installed_command_is_exact_with_new_processes_and_leaves_nothing_behind(project, emrun):
    arguments = ["config.yaml", "--kill", "--at", "9"]
    done = emrun("verify-resume", *arguments, env={"TMPDIR": str(project / "temporary")}, timeout=280)
    assert done.returncode == 0, done.stderr
    assert rows(done) == [["the given iteration", "9", "SIGKILL", "7", "exact"]]
    assert "running again without interruption" in done.stderr


@pytest.mark.campaign
def test_an_order_by_hashes_differs_between_new_processes_and_is_named(project, emrun):
    done = emrun("verify-resume", "config.yaml", "dataset.kind=hashed", env={"TMPDIR": str(project / "temporary")})
    assert done.returncode == 1, done.stderr
    assert "the batch differs" in done.stdout
    assert done.stdout.splitlines()[-1] == "not exact: two runs without an interruption differ too"


SET_UP = "my_code.Freeze, my_code.Freeze: {until: 3}, my_code.Decay, my_code.Draw, my_code.Curriculum"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("options", "resumed"),
    [(["--at", "6", "--at", "9"], ["6", "9"]), (["--kill", "--at", "5"], ["3"])],
    ids=["SIGTERM", "SIGKILL"],
)
def test_what_hooks_set_up_before_an_epoch_is_in_force_after_a_resume_in_its_middle(verify, options, resumed):
    done = verify(*options, f"hooks=[ComputeStats: {{variables: [loss]}}, WriteCSV, {SET_UP}]")
    assert [row[-2:] for row in rows(done)] == [[iteration, "exact"] for iteration in resumed], done.stdout
    assert done.returncode == 0


@pytest.mark.campaign
def test_the_hook_of_the_readme_is_exact(verify, project):
    code = (SAMPLES / "my_project" / "my_hooks.py").read_text()  # tests/test_readme.py compares it with the README
    with (project / "my_code.py").open("a") as file:
        file.write("\n\n" + code)
    done = verify(
        "--at", "9", "hooks=[ComputeStats: {variables: [loss]}, WriteCSV, my_code.GradientNorm: {enough: 0.0}]"
    )
    assert [row[-2:] for row in rows(done)] == [["9", "exact"]], done.stdout


@pytest.mark.campaign
def test_hooks_that_count_and_write_within_epochs_are_exact(verify):
    hooks = (
        "hooks=[ComputeStats: {variables: [loss]}, EarlyStopping: {patience: 9}, "
        "OnPlateau: {long_term: 2, short_term: 1}, SaveBest: {keep: 2}, "
        "LogVariables: {every: 4 updates}, WriteCSV: {every: 4 updates}]"
    )
    done = verify("--at", "3", "--at", "9", hooks)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
def test_a_run_that_early_stopping_ends_is_exact(verify):
    done = verify(
        "--at", "3", "--at", "9",
        "hooks=[my_code.Score, OnPlateau: {variable: score, long_term: 2, short_term: 1}, "
        "SaveBest: {variable: score, keep: 2}, EarlyStopping: {variable: score, patience: 2}]",
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "exact: interrupted at 2 points, compared 12 iterations", done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("ahead", [["main_loop.buffer=4"], ["dataset.read_ahead=4", "--at", "2"]], ids=str)
def test_a_stream_that_draws_global_random_numbers_in_a_thread_is_named(verify, ahead):
    done = verify("dataset.kind=augmented", *ahead)
    assert done.returncode == 1
    assert rows(done)[-1][-1] != "exact"
    assert (
        "likely cause: stream 'train' draws from the global random state of numpy in a read-ahead thread "
        "(main_loop.buffer: 4)"
    ) in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not exact")


@pytest.mark.campaign
def test_a_stream_shuffled_by_the_time_is_named_before_any_interruption(verify):
    done = verify("--at", "1", "dataset.kind=timed")
    assert done.returncode == 1
    assert rows(done) == [
        [
            "(not interrupted, the same run again)",
            "",
            "",
            "",
            "evaluation of train at iteration 0, batch 1: the batch differs",
        ]
    ]
    assert "likely cause: stream 'train' yields other batches each time it is read" in done.stdout


def test_a_module_with_state_outside_parameters_and_buffers_is_named(verify):
    done = verify("--at", "9", "model.module.class=my_code.CountingNet")
    assert done.returncode == 1
    ((*_, resumed, result),) = rows(done)
    assert (resumed, result[:25]) == ("9", "iteration 10: output loss")
    assert "likely cause: the module has state outside its parameters and buffers" in done.stdout
    assert "module CountingNet, attribute 'steps' (14 uninterrupted, 5 in the other run)" in done.stdout


@pytest.mark.campaign
def test_a_hook_that_changes_the_learning_rate_by_a_counter_is_named_and_one_with_a_clock_is_not(verify):
    done = verify("--at", "9", "hooks=[ComputeStats: {variables: [loss]}, my_code.Clock, my_code.Warmup]")
    assert done.returncode == 1
    assert rows(done)[0][-1] == "iteration 10: learning rate (0.1 uninterrupted, 0.01 in the other run)"
    assert "a hook has state that its state_dict() does not return: hook Warmup, attribute 'count' (14" in done.stdout
    assert "note: not compared: state of hook Clock.time, which differs between two uninterrupted runs" in done.stdout


@pytest.mark.campaign
def test_an_iteration_after_the_end_is_refused(verify):
    done = verify("--at", "14")
    assert done.returncode == 2
    assert "--at must be from 1 to 13, not 14; the run has 14 iterations" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "0"], "0 is not in the range x>=1"),
        (["--at", "middle"], "'middle' is not a valid integer"),
        (["main_loop.bufer=1"], "did you mean 'buffer'"),
    ],
)
def test_wrong_usage_ends_with_status_2(project, emrun_here, arguments, message):
    done = emrun_here("verify-resume", "-q", "config.yaml", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_fails_for_a_reason_of_its_own_is_reported_with_its_traceback(verify):
    done = verify("--at", "1", "dataset.kind=broken")
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: the disk of the data is gone" in done.stderr


def test_sigterm_ends_the_command_and_its_run_and_leaves_nothing_behind(project, verify):
    done = verify("dataset.kind=endless")
    assert (done.returncode, "Traceback" in done.stderr) == (-signal.SIGTERM, False)
    with (project / "begun").open() as begun:
        fcntl.flock(begun, fcntl.LOCK_EX)  # returns when that run has ended
    (project / "begun").unlink()
