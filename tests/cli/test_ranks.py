"""`--nproc` and torchrun: the installed command in several processes that train one model together."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from projects import SEVERAL, SEVERAL_PARTS
from safetensors.torch import load_file

from emrun import read_steps
from emrun.base.errors import RankFailed
from emrun.cli.failures import unwound_by_sigterm, words_before_sigterm
from emrun.ranks import group as emrun_ranks

EMRUN = Path(sys.executable).with_name("emrun")
TORCHRUN = (str(Path(__file__).with_name("warm_torchrun.py")), str(EMRUN.with_name("torchrun")))

pytestmark = pytest.mark.timeout(300)  # each rank is a process that imports PyTorch

PARTS = f"""{SEVERAL_PARTS}

import os
import signal
import sys
import time

from emrun import AbstractHook
from emrun.ranks.group import ranks


def failing_net():
    if os.environ.get("RANK") == "1":
        raise OSError("no weights on this machine")
    return net()


class Fault(AbstractHook):
    '''Does something once, after a batch on one rank, if the file `fault` names it: a signal, or another word.'''

    every_rank = True
    reads = ()

    def after_batch(self):
        if self.main_loop.iterations_done != 7 or ranks().rank != 1 or not os.path.exists("fault"):
            return
        what = open("fault").read()
        os.unlink("fault")
        if what == "raise":
            raise ValueError("a hook of rank 1")
        if what == "exit":
            os._exit(9)
        number = signal.Signals[what.split()[0]]
        if what == "SIGTERM parent":
            return self.asked_by_parent(number)
        os.kill(os.getppid() if what.endswith("parent") else os.getpid(), number)

    def asked_by_parent(self, number):
        came, handler = [], signal.getsignal(number)
        signal.signal(number, lambda *args: (came.append(number), handler(*args)))
        os.kill(os.getppid(), number)
        while not came:  # a slow parent must not find a run that has ended
            time.sleep(0.01)
        signal.signal(number, handler)
"""

CONFIG = f"""{SEVERAL}
main_loop: {{report: false, skip_zeroth_epoch: true}}
hooks:
  - ComputeStats
  - parts.Fault
  - SaveEvery: {{every: 5 updates, keep: 2}}
  - StopAfter: {{epochs: 2}}
"""
PAGE = "main_loop.report=true"


@pytest.fixture
def emrun(emrun):
    """Run the command; its ranks are processes that have imported PyTorch, so that only a test of campaigns waits."""
    return lambda *words, **options: emrun(*words, **{"ranks": 2, **options})


@pytest.fixture
def project(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def straight(tmp_path_factory, warm):
    """Return the run directory of an uninterrupted run on two ranks; what it has printed is in files beside it."""
    project = tmp_path_factory.mktemp("straight")
    (project / "parts.py").write_text(PARTS)
    (project / "config.yaml").write_text(CONFIG)
    command = [str(EMRUN), "train", "config.yaml", "--nproc", "2", "--output-dir", "run", PAGE]
    done = warm.run(command, project, timeout=100, ranks=2)
    assert done.returncode == 0, done.stderr
    (project / "stdout").write_text(done.stdout)
    (project / "stderr").write_text(done.stderr)
    return project / "run"


def assert_same(one, other):
    def epochs(directory):
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        return [line["streams"]["train"]["loss"] for line in lines]

    assert epochs(one) == epochs(other)
    assert read_steps(one)["loss"].tolist() == read_steps(other)["loss"].tolist()
    weights = [load_file(each / "checkpoints/latest/model.safetensors") for each in (one, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.campaign
def test_new_processes_train_as_those_that_stand_by(project, straight, emrun):
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", env={}, timeout=200)
    assert done.returncode == 0, done.stderr
    assert_same(straight, project / "run")


def test_the_output_of_several_ranks_is_that_of_one(project, straight, emrun_here):
    alone = emrun_here("train", "config.yaml", "--output-dir", "alone", PAGE)
    output, errors = ((straight.parent / name).read_text() for name in ("stdout", "stderr"))
    assert (alone.returncode, output.count("\n")) == (0, alone.stdout.count("\n"))
    assert errors.count("run directory:") == 1
    assert "batch 8 = 2 ranks x 4" in errors
    names = {path.name for path in straight.iterdir()}
    assert names == {path.name for path in (project / "alone").iterdir()} | {"train-1.log"}
    assert "command:\n- emrun\n- train\n- config.yaml\n- --nproc\n" in (straight / "trace.yaml").read_text()


@pytest.mark.campaign
def test_the_end_of_several_ranks_is_measured_and_may_be_the_best(project, emrun):
    hooks = "hooks=[ComputeStats, {SaveBest: {stream: train_eval}}, {StopAfter: {updates: 3}}]"
    loop = "main_loop={extra_streams: [train], skip_zeroth_epoch: true}"
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", hooks, loop)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (project / "run/metrics.jsonl").read_text().splitlines())
    assert (line["epoch"], line["iteration"], line["at_end"]) == (1, 3, True)
    assert (project / "run/checkpoints/best").readlink() == (project / "run/checkpoints/latest").readlink()


def test_two_ranks_evaluate_as_one_does(straight, emrun, emrun_here, tmp_path):
    found = []
    for size, command in ((1, emrun_here), (2, emrun)):
        done = command("eval", straight, "train", "--nproc", size, "--output-dir", tmp_path / f"eval-{size}", "--json")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("checkpoint latest") == 1
        assert done.stderr.count("importing PyTorch") <= 1
        found.append(json.loads(done.stdout)["streams"]["train"]["loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.campaign  # tests/training/test_ranks.py has the predictions of several ranks
def test_two_ranks_predict_as_one_does(straight, emrun, emrun_here, tmp_path):
    for size, command in ((1, emrun_here), (2, emrun)):
        done = command("predict", straight, "train", "-o", tmp_path / f"{size}.csv", "--nproc", size)
        assert (done.returncode, done.stdout.count("37 rows of stream train")) == (0, 1), done.stderr
        assert done.stderr.count("importing PyTorch") <= 1
    one, two = (np.loadtxt(tmp_path / f"{size}.csv", delimiter=",", skiprows=1) for size in (1, 2))
    assert one[:, 0].tolist() == list(range(37))
    assert one == pytest.approx(two, abs=1e-5)


def test_a_signal_to_the_command_ends_all_ranks_and_resume_starts_as_many(project, straight, emrun):
    (project / "fault").write_text("SIGTERM parent")
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stderr.count("interrupted by SIGTERM") == 1
    assert done.stderr.splitlines()[-1].endswith("resume with: emrun resume run")
    done = emrun("resume", "run")
    assert done.returncode == 0, done.stderr
    assert "ranks: 2\n" in (project / "run" / "trace.yaml").read_text()
    assert_same(straight, project / "run")


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("SIGKILL", 137, "error: rank 1 was killed by SIGKILL"),
        ("exit", 9, "error: rank 1 ended with exit status 9"),
        ("raise", 1, "rank 1: in hook Fault, after_batch of stream 'train'"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_the_run_resumes_exactly(project, straight, emrun, fault, status, cause):
    (project / "fault").write_text(fault)
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run")
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if "rank 1" in line]
    assert lines[0].startswith(cause)
    assert "another rank" not in done.stderr
    assert done.stderr.count("ValueError: a hook of rank 1") == (fault == "raise")
    assert done.stderr.splitlines()[-1].endswith("resume with: emrun resume run")
    done = emrun("resume", "run", "-q")
    assert done.returncode == 0, done.stderr
    assert_same(straight, project / "run")


def test_the_ranks_end_with_the_command_that_is_killed_and_the_run_resumes_exactly(project, straight, emrun):
    (project / "fault").write_text("SIGKILL parent")
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run")  # waits for all that write its output
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = emrun("resume", "run", "-q")
    assert done.returncode == 0, done.stderr
    assert_same(straight, project / "run")


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("raise", 1, "rank 1: in hook Fault, after_batch"),
        pytest.param("SIGKILL", 137, "error: rank 1 was killed by SIGKILL", marks=pytest.mark.campaign),
    ],
)
def test_a_run_that_is_deleted_at_its_end_tells_the_cause_of_a_failure(project, emrun, fault, status, cause):
    (project / "fault").write_text(fault)
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", "--rm")
    assert done.returncode == status, done.stderr
    said = [line for line in done.stderr.splitlines() if "rank 1" in line or "(--rm)" in line or "another" in line]
    assert said[0].startswith(cause)
    assert said[-1] == "deleted run (--rm)"
    assert done.stderr.count("ValueError: a hook of rank 1") == (fault == "raise")
    assert not (project / "run").exists()


def test_a_run_whose_rank_is_killed_is_resumed_as_often_as_allowed(project, straight, emrun):
    (project / "fault").write_text("SIGKILL")
    done = emrun(
        "train", "config.yaml", "--nproc", "2", "--output-dir", "run", "--max-restarts", "1", "--no-progress", ranks=4
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: rank 1 was killed by SIGKILL") == 1
    assert f"restart 1 of 1: resuming {project / 'run'}\n" in done.stderr
    assert_same(straight, project / "run")


@pytest.mark.parametrize("block", [unwound_by_sigterm, words_before_sigterm])
def test_a_rank_that_misses_another_leaves_its_words_whatever_the_launcher_sends(monkeypatch, block):
    monkeypatch.setattr(emrun_ranks, "_misses_others", False)
    monkeypatch.setattr("emrun.cli.failures.number_of_ranks", lambda: 2)
    with block():
        with pytest.raises(RankFailed), emrun_ranks.answered(()):
            raise RuntimeError("Connection closed by peer")
        os.kill(os.getpid(), signal.SIGTERM)
        said = "what survived"
    assert said


def test_restarts_need_several_processes(project, emrun_here):
    done = emrun_here("train", "config.yaml", "--max-restarts", "1")
    assert done.returncode == 2
    assert "--max-restarts is for several processes; add --nproc" in done.stderr
    assert not (project / "log").exists()


@pytest.mark.campaign
def test_the_status_that_the_config_has_for_an_interrupted_run(project, emrun):
    (project / "fault").write_text("SIGTERM")
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", "main_loop.preempt_exit_code=85")
    assert done.returncode == 85
    assert "error" not in done.stderr, done.stderr


def test_a_rank_that_cannot_build_its_model_is_one_message_and_the_others_end(project, emrun):
    words = ["--nproc", "2", "--output-dir", "run", "model.module.class=parts.failing_net"]
    done = emrun("train", "config.yaml", *words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("OSError: no weights on this machine") == 1
    assert "rank 1: " in done.stderr


@pytest.mark.campaign
def test_a_mistake_in_the_config_is_printed_once_and_leaves_nothing(project, emrun):
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", "model.optimizer.lr=-1")
    assert done.returncode == 2
    assert done.stderr.count("Invalid learning rate") == 1, done.stderr
    assert not (project / "run").exists()


def test_an_error_of_all_ranks_is_printed_once(project, emrun):
    done = emrun("train", "config.yaml", "--nproc", "2", "--output-dir", "run", "model.inputs=[z]")
    assert done.returncode == 2
    assert done.stderr.count("forward of Sequential needs z, which the batch does not have") == 1, done.stderr


def test_torchrun_is_the_same_as_nproc(project, straight, warm, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "emrun", "train"]
    done = warm.run([*command, "config.yaml", "--output-dir", "run"], project, timeout=200, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_same(straight, project / "run")


def test_a_launcher_that_does_not_say_where_the_ranks_meet_is_an_error(project, straight, emrun_here, monkeypatch):
    shutil.copytree(straight, project / "run", symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for command in (
        ["eval", "run", "train"],
        ["predict", "run", "train", "-o", "found.csv"],
        ["train", "config.yaml", "-o", "other"],
    ):
        done = emrun_here(*command)
        assert done.returncode == 2
        assert done.stderr.startswith("rank 1: error: WORLD_SIZE=2: this is one of 2 processes that train together")
        assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set" in done.stderr
    monkeypatch.delenv("RANK")
    done = emrun_here("train", "config.yaml", "-o", "other")
    assert (done.returncode, done.stderr[:21]) == (2, "error: WORLD_SIZE=2: ")
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before


def test_variables_that_no_launcher_has_set_are_named_or_ignored(project, emrun, emrun_here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = emrun_here("train", "config.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; start them" in done.stderr
    for name, value in {"RANK": "2", "LOCAL_RANK": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = emrun_here("train", "config.yaml")
    assert done.returncode == 2
    assert "but RANK=2, LOCAL_RANK=x, which must be from 0 to 1; start them" in done.stderr
    done = emrun("train", "config.yaml", "--nproc", "3")
    assert done.returncode == 2
    assert "--nproc 3: a launcher has started 2 processes; leave out --nproc" in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "0")
    done = emrun_here("train", "-q", "config.yaml", "--output-dir", "run", "hooks.StopAfter.epochs=1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_of_more_ranks_than_this_machine_has_cores_and_gpus_is_resumed_only_on_request(
    project, straight, emrun_here
):
    shutil.copytree(straight, project / "run", symlinks=True)
    trace = project / "run" / "trace.yaml"
    trace.write_text(trace.read_text().replace("\nranks: 2\n", "\nranks: 4096\n"))
    done = emrun_here("resume", "run", "hooks.StopAfter.epochs=5")
    assert done.returncode == 2
    assert "run was trained by 4096 processes, but this machine has " in done.stderr
    assert "emrun resume run hooks.StopAfter.epochs=5 --nproc 4096" in done.stderr


NINE_ROWS = """
class Nine(Data):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def train_stream(self, ctx):
        for rows in ctx.batches(9, self.size, shuffle=True):
            yield {"x": self.x[rows], "y": (self.x[rows].sum(axis=1) > 0).astype(np.int64)}

    def valid_stream(self, ctx):
        return self.train_stream(ctx)
"""


@pytest.mark.campaign
@pytest.mark.parametrize(("size", "options"), [(1, ("--at", "3")), (4, ("--kill", "--at", "5")), (2, ())])
def test_verify_resume_of_ranks_that_have_no_rows_of_some_batches(project, emrun, size, options):
    (project / "parts.py").write_text(PARTS + NINE_ROWS)
    config = [f"dataset={{class: parts.Nine, size: {size}}}", "main_loop.extra_streams=[valid]", "~hooks.parts.Fault"]
    config.append("hooks.StopAfter.epochs=1")
    done = emrun("verify-resume", "config.yaml", "--nproc", "2", *options, *config, ranks=8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nexact: interrupted at" in done.stdout
