"""`emrun resume` and `--auto-resume` as installed commands, with processes that are really killed."""

import json
import os
import shutil
import signal

import pytest
from campaign import thinned
from here import run_here
from projects import MAJORITY
from ruamel.yaml import YAML
from training.tiny import trace

from emrun import create_training
from emrun.base.errors import RunInUse

FLATTEN = "      - {class: torch.nn.Flatten, start_dim: 0}\n"
CONFIG = (
    "seed: 5\nname: tiny\n"
    + MAJORITY.replace(FLATTEN, "      - {class: torch.nn.Dropout, p: 0.2}\n" + FLATTEN)
    + """\
  optimizer: {class: Adam, lr: 0.05}
main_loop:
  extra_streams: [valid]
  buffer: 2
  report: false
hooks:
  - ComputeStats: {variables: [loss]}
  - SaveBest
  - WriteCSV
  - StopAfter: {epochs: 3}
"""
)

HOOKS = """
import os, signal
from emrun import AbstractHook

class Interrupt(AbstractHook):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def after_batch(self):
        if self.main_loop.iterations_done == self.at and self.main_loop.training:
            os.kill(os.getpid(), signal.SIGINT)


class Signal(AbstractHook):
    # plan: [[signal, stream, iterations done, batch of the stream], ...]

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.batch = 0

    def before_epoch(self):
        self.batch = 0

    def after_stream(self):
        self.batch = 0

    def after_batch(self, stream_name):
        self.batch += 1
        for number, *where in self.plan:
            if where == [stream_name, self.main_loop.iterations_done, self.batch]:
                if number == signal.SIGKILL:
                    self.main_loop.wait_for_checkpoints()
                os.kill(os.getpid(), number)
"""


def sending(*plan):
    """Return the entry of a config's hooks that sends these signals."""
    text = ", ".join(f"[{int(number)}, {', '.join(map(str, where))}]" for number, *where in plan)
    return f"  - my_hooks.Signal: {{plan: [{text}]}}\n"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    return tmp_path


def result(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": (directory / "checkpoints" / "latest" / "model.safetensors").read_bytes(),
        "best": (directory / "checkpoints" / "best" / "model.safetensors").read_bytes(),
        "metrics": [{**line, "seconds": None} for line in lines],
        "csv": (directory / "training.csv").read_text(),
    }


def test_an_interrupted_run_resumes_with_the_command_that_it_printed(project, emrun, emrun_here):
    straight = emrun_here("train", "config.yaml", "--output-dir", "straight")
    (project / "config.yaml").write_text(CONFIG + "  - my_hooks.Interrupt: {at: 6}\n")
    done = emrun("train", "-q", "config.yaml", "--output-dir", "run")
    assert done.returncode == -signal.SIGINT
    command = done.stderr.splitlines()[-1].partition("resume with: ")[2].split()
    assert command == ["emrun", "resume", "run"]
    done = emrun_here(*command[1:])
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "finished: 3 epochs done (StopAfter epochs: 3)"
    assert done.stdout == straight.stdout.replace("straight/", "run/").replace(" straight ", " run ")
    assert "(3)" in done.stdout
    assert result(project / "run") == result(project / "straight")
    found = trace(project / "run")
    assert (found["status"], found["epochs_done"], len(found["resumes"])) == ("finished", 3, 1)
    assert found["resumes"][0]["before"]["status"] == "interrupted"
    done = emrun_here("resume", "run")
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing to do: the run is finished" in done.stderr


def test_a_resume_that_trains_nothing_says_why(project, emrun_here):
    stopping = "hooks.EarlyStopping={stream: valid, patience: 1, min_delta: 1000}"
    assert "nothing was trained" not in emrun_here("train", "config.yaml", stopping, "--output-dir", "run").stderr
    done = emrun_here("resume", "run", "hooks.StopAfter.epochs=60")
    assert done.returncode == 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nothing was trained: valid/loss/mean has not improved since epoch ")
    assert "(EarlyStopping patience: 1)" in last


def test_the_same_command_starts_and_resumes(project, emrun_here):
    command = ["train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume"]
    assert emrun_here(*command).returncode == 0
    first = result(project / "run")
    assert emrun_here(*command).returncode == 0
    assert result(project / "run") == first


@pytest.mark.parametrize("option", thinned([["--auto-resume"], []], [["--auto-resume"]]), ids=["auto", "plain"])
def test_a_run_that_was_made_between_the_look_and_the_lock_is_found(project, emrun_here, option):
    """The module of a hook, which is imported in between, puts a finished run of the same config there."""
    with (project / "config.yaml").open("a") as file:
        file.write(sending())
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "other").returncode == 0
    with (project / "my_hooks.py").open("a") as file:
        file.write("\nif os.path.exists('other'):\n    os.rename('other', 'run')\n")
    done = emrun_here("train", "config.yaml", "--output-dir", "run", *option)
    assert done.returncode == (0 if option else 2), done.stderr
    assert ("nothing to do: the run is finished" in done.stderr) is bool(option)
    assert ("run already holds a run (finished)" in done.stderr) is not bool(option)
    assert emrun_here("eval", "run", "valid").returncode == 0


def test_auto_resume_with_another_config_is_refused_with_the_keys(project, emrun_here):
    command = ["train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume"]
    emrun_here(*command)
    done = emrun_here(*command, "model.optimizer.lr=1.0")
    assert done.returncode == 2
    assert "with other values (model.optimizer.lr: " in done.stderr
    assert "-> 1.0)" in done.stderr
    assert "Usage" not in done.stderr


WRONG = [
    (["train", "config.yaml", "--auto-resume"], "needs --output-dir"),
    (["resume", "nothing"], "is not a run directory"),
    (["resume", "run", "--checkpoint", "bset"], "no checkpoint 'bset'"),
    (["resume", "run", "--checkpoint", "/etc"], "is not a checkpoint in"),
    (["resume", "run", "a"], "an override must be key=value"),
    (["train", "config.yaml", "--output-dir="], "Invalid value for '--output-dir': the path is empty"),
]


def test_wrong_usage_ends_with_status_2(project, emrun_here):
    emrun_here("train", "-q", "config.yaml", "--output-dir", "run", "hooks.StopAfter.epochs=0")
    for arguments, message in WRONG:
        done = emrun_here(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert message in done.stderr


def test_a_run_in_use_is_refused_with_the_process_that_uses_it(project, emrun, emrun_here):
    training = create_training(project / "config.yaml", output_dir=project / "run")
    done = emrun("resume", "run")
    assert done.returncode == 75
    assert f"is in use by process {os.getpid()} on " in done.stderr
    with pytest.raises(RunInUse, match="another run of this process"):
        create_training(project / "config.yaml", output_dir=project / "run")
    training.main_loop.run.release()
    assert emrun_here("resume", "-q", "run").returncode == 0


DYING = """
import os, signal
from emrun.datasets.majority import Majority

if "{where}" == "import":
    os.kill(os.getpid(), signal.{name})


class Data(Majority):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        if "{where}" == "constructor":
            os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", thinned(["SIGINT", "SIGTERM"], ["SIGTERM"]))
def test_a_signal_while_the_dataset_is_built_ends_the_process_by_it(project, emrun, emrun_here, name):
    (project / "dying.py").write_text(DYING.format(where="constructor", name=name))
    done = emrun("train", "config.yaml", "--output-dir", "run", "dataset.class=dying.Data")
    assert done.returncode == -getattr(signal, name)
    assert "Traceback" not in done.stderr
    (project / "dying.py").write_text(DYING.format(where="", name=name))
    again = emrun_here("train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume", "dataset.class=dying.Data")
    assert again.returncode == 0, again.stderr


# what the config says about signals: eight train batches and two of `valid` make an epoch


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the result of a run without any signal."""
    directory = tmp_path_factory.mktemp("straight")
    (directory / "config.yaml").write_text(CONFIG)
    done = run_here(["train", "-q", "config.yaml", "--output-dir", "run", "dataset.n=100"], directory)
    assert done.returncode == 0, done.stderr
    return result(directory / "run")


def send(project, emrun, plan, *overrides):
    """Train with signals; take the hook that sends them out of the run again."""
    (project / "config.yaml").write_text(CONFIG + sending(*plan))
    done = emrun("train", "config.yaml", "--no-progress", "--output-dir", "run", "dataset.n=100", *overrides)
    config = YAML(typ="safe").load(project / "run/config.yaml")
    config["hooks"] = [hook for hook in config["hooks"] if "my_hooks.Signal" not in hook]
    (project / "run/config.yaml").write_text(json.dumps(config))
    return done


@pytest.mark.parametrize(
    ("plan", "iterations"),
    [
        pytest.param([[signal.SIGINT, "train", 11, 3]], 16, id="train"),
        pytest.param([[signal.SIGINT, "valid", 16, 1]], 16, id="evaluation", marks=pytest.mark.campaign),
        pytest.param([[signal.SIGINT, "train", 8, 8]], 8, id="boundary", marks=pytest.mark.campaign),
        pytest.param([[signal.SIGINT, "valid", 0, 2]], 0, id="zeroth", marks=pytest.mark.campaign),
    ],
)
def test_with_on_interrupt_epoch_the_run_ends_after_the_epoch(project, emrun, emrun_here, expected, plan, iterations):
    done = send(project, emrun, plan, "main_loop.on_interrupt=epoch")
    name = plan[0][0].name
    assert done.returncode == -plan[0][0]
    assert f"{name}: the training ends after this epoch" in done.stderr
    assert done.stderr.splitlines()[-3] == f"interrupted by {name}"
    found = trace(project / "run")
    assert (found["status"], found["iterations_done"], found["epochs_done"]) == (
        "interrupted",
        iterations,
        iterations // 8,
    )
    assert result_of_epochs(project / "run") == list(range(iterations // 8 + 1))
    assert emrun_here("resume", "-q", "run").returncode == 0
    assert result(project / "run") == expected


def result_of_epochs(directory):
    return [json.loads(line)["epoch"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("plan", "done_before"),
    [
        pytest.param([[signal.SIGTERM, "train", 13, 5]], 13, id="SIGTERM", marks=pytest.mark.campaign),
        pytest.param([[signal.SIGINT, "train", 11, 3], [signal.SIGINT, "train", 13, 5]], 13, id="second"),
        pytest.param(
            [[signal.SIGINT, "train", 11, 3], *[[signal.SIGTERM, "train", 13, 5]] * 2],
            None,
            id="third",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_with_on_interrupt_epoch_sigterm_and_a_second_signal_end_after_the_batch(
    project, emrun, emrun_here, expected, plan, done_before
):
    done = send(project, emrun, plan, "main_loop.on_interrupt=epoch")
    assert done.returncode == -plan[-1][0]
    found = trace(project / "run")
    if done_before is None:
        assert found["status"] == "running"
    else:
        assert (found["status"], found["iterations_done"]) == ("interrupted", done_before)
    assert result_of_epochs(project / "run") == [0, 1]
    assert emrun_here("resume", "-q", "run").returncode == 0
    assert result(project / "run") == expected


@pytest.mark.parametrize(
    ("saving", "killing", "checkpoint"),
    [
        pytest.param(["train", 3, 3], ["train", 5, 5], "it-00000003", id="train", marks=pytest.mark.campaign),
        pytest.param(["valid", 8, 1], ["valid", 8, 2], "it-00000008", id="evaluation"),
        pytest.param(["valid", 0, 1], ["valid", 0, 2], "it-00000000", id="zeroth", marks=pytest.mark.campaign),
    ],
)
def test_sigusr1_saves_a_checkpoint_from_which_the_run_resumes(
    project, emrun, emrun_here, expected, saving, killing, checkpoint
):
    done = send(project, emrun, [[signal.SIGUSR1, *saving], [signal.SIGKILL, *killing]])
    assert done.returncode == -signal.SIGKILL
    assert "SIGUSR1: saving a checkpoint" in done.stderr
    assert (project / "run" / "checkpoints" / "latest").readlink().name == checkpoint
    assert emrun_here("resume", "-q", "run").returncode == 0
    assert trace(project / "run")["resumes"][0]["checkpoint"] == checkpoint
    assert result(project / "run") == expected


@pytest.mark.parametrize("where", thinned(["import", "constructor"], ["constructor"]))
def test_sigusr1_before_there_is_anything_to_save_is_ignored(project, emrun, where):
    (project / "dying.py").write_text(DYING.format(where=where, name="SIGUSR1"))
    options = ["--output-dir", "run", "dataset.class=dying.Data", "hooks.StopAfter.epochs=1"]
    assert emrun("train", "-q", "config.yaml", *options).returncode == 0


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["import", "constructor"])
def test_sigusr1_before_a_resume_has_anything_to_save_is_ignored(project, emrun, where):
    (project / "dying.py").write_text(DYING.format(where="", name="SIGUSR1"))
    options = ["--output-dir", "run", "dataset.class=dying.Data", "hooks.StopAfter.epochs=1"]
    assert emrun("train", "-q", "config.yaml", *options).returncode == 0
    (project / "dying.py").write_text(DYING.format(where=where, name="SIGUSR1"))
    assert emrun("resume", "-q", "run", "hooks.StopAfter.epochs=2").returncode == 0


@pytest.mark.campaign
def test_sigusr1_does_not_change_the_result(project, emrun, expected):
    done = send(project, emrun, [[signal.SIGUSR1, "train", 3, 3], [signal.SIGUSR1, "valid", 8, 1]])
    assert (done.returncode, result(project / "run")) == (0, expected)


@pytest.mark.parametrize(
    ("number", "returncode"),
    thinned([(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)], [(signal.SIGTERM, 75)]),
    ids=["SIGTERM", "SIGINT"],
)
def test_after_sigterm_the_command_exits_with_the_status_that_the_config_says(
    project, emrun, emrun_here, expected, number, returncode
):
    done = send(project, emrun, [[number, "train", 5, 5]], "main_loop.preempt_exit_code=75")
    assert done.returncode == returncode
    assert done.stderr.splitlines()[-3] == f"interrupted by {number.name}"
    assert "resume with: emrun resume run" in done.stderr.splitlines()[-1]
    found = trace(project / "run")
    assert (found["status"], found["exit_status"]) == ("interrupted", 75 if returncode == 75 else 128 + number)
    assert emrun_here("resume", "-q", "run").returncode == 0
    assert result(project / "run") == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("main_loop.on_interrupt=epochs", "'epochs' is not one of batch, epoch"),
        ("main_loop.preempt_exit_code=256", "256 is not an exit status; use a whole number from 0 to 255"),
        ("main_loop.preempt_exit_code=true", "preempt_exit_code"),
    ],
)
def test_a_wrong_value_about_signals_is_reported_with_what_is_allowed(project, emrun_here, override, message):
    done = emrun_here("train", "config.yaml", "--output-dir", "run", override)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (project / "run").exists()


# a run that has no checkpoint


def files(directory):
    """Return all that a run has, but for what every process writes that looks at it."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".owner.json"}


def lose_checkpoints(project, emrun, *overrides):
    """Train for two epochs and delete the checkpoints; return what is left of the run."""
    emrun("train", "-q", "config.yaml", "--output-dir", "run", "hooks.StopAfter.epochs=2", *overrides)
    shutil.rmtree(project / "run" / "checkpoints")
    return files(project / "run")


def leave_as_killed_before_the_first_checkpoint(project):
    trace = project / "run" / "trace.yaml"
    text = trace.read_text().replace("status: finished", "status: running").replace("has_checkpoints: true\n", "")
    trace.write_text(text)


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(project, emrun_here):
    """Without the refusal, the metrics of both epochs are replaced."""
    before = lose_checkpoints(project, emrun_here)
    assert len((project / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    done = emrun_here("resume", "run", "hooks.StopAfter.epochs=3")
    assert done.returncode == 2
    assert "run has no checkpoint left to resume from" in done.stderr
    assert "would replace its records (2 epochs done)" in done.stderr
    assert done.stderr.rstrip().endswith("emrun train run")
    done = emrun_here("resume", "run", "--checkpoint", "best")
    assert (done.returncode, "no checkpoint 'best'" in done.stderr) == (2, True)
    assert files(project / "run") == before
    assert emrun_here("train", "-q", "run", "hooks.StopAfter.epochs=0").returncode == 0  # the way that was named


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("overrides", "command", "epochs"),
    [
        pytest.param(
            [],
            ["train", "config.yaml", "--output-dir", "run", "--auto-resume", "hooks.StopAfter.epochs=2"],
            [0, 1],
            id="auto-resume",
            marks=pytest.mark.campaign,
        ),
        pytest.param(["main_loop.skip_zeroth_epoch=true"], ["resume", "run"], [1], id="resume"),
    ],
)
def test_a_run_that_was_killed_in_its_second_epoch_and_lost_its_checkpoints_is_not_begun_anew(
    project, emrun, emrun_here, overrides, command, epochs
):
    (project / "config.yaml").write_text(CONFIG + sending((signal.SIGKILL, "train", 6, 2)))
    before = lose_checkpoints(project, emrun, *overrides)
    assert result_of_epochs(project / "run") == epochs
    done = emrun_here(*command)
    assert done.returncode == 2
    assert "would replace its records (1 epoch done)" in done.stderr
    assert files(project / "run") == before


@pytest.mark.campaign
def test_a_run_that_was_interrupted_in_its_first_epoch_and_lost_its_checkpoints_is_not_begun_anew(
    project, emrun, emrun_here
):
    (project / "config.yaml").write_text(CONFIG + sending((signal.SIGTERM, "train", 2, 2)))
    before = lose_checkpoints(project, emrun, "main_loop.skip_zeroth_epoch=true")
    assert not (project / "run" / "metrics.jsonl").exists()
    done = emrun_here("resume", "run")
    assert done.returncode == 2
    assert "would replace its records (2 iterations done)" in done.stderr
    assert files(project / "run") == before


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("where", "overrides"),
    [
        pytest.param(["valid", 0, 1], [], id="zeroth"),
        pytest.param(["train", 2, 2], ["main_loop.skip_zeroth_epoch=true"], id="first", marks=pytest.mark.campaign),
    ],
)
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
    project, emrun, emrun_here, expected, where, overrides
):
    done = send(project, emrun, [[signal.SIGKILL, *where]], *overrides)
    assert done.returncode == -signal.SIGKILL
    assert not (project / "run" / "checkpoints").exists()
    done = emrun_here("resume", "run")
    assert done.returncode == 0
    assert "has no checkpoint: starting from the beginning" in done.stderr
    assert result(project / "run")["weights"] == expected["weights"]


def test_a_run_that_was_killed_while_its_first_checkpoint_was_written_begins_anew(project, emrun_here):
    lose_checkpoints(project, emrun_here, "main_loop.skip_zeroth_epoch=true")
    leave_as_killed_before_the_first_checkpoint(project)
    (project / "run" / "checkpoints" / ".tmp-77").mkdir(parents=True)
    assert emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=1").returncode == 0
    assert result_of_epochs(project / "run") == [1]


@pytest.mark.campaign
def test_a_run_that_was_killed_between_its_first_epoch_and_the_checkpoint_of_it_begins_anew(project, emrun_here):
    overrides = ["main_loop.skip_zeroth_epoch=true", "hooks.StopAfter.epochs=1"]
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "run", *overrides).returncode == 0
    shutil.rmtree(project / "run" / "checkpoints")
    leave_as_killed_before_the_first_checkpoint(project)
    before = (project / "run" / "metrics.jsonl").read_text()
    done = emrun_here("resume", "run")
    assert done.returncode == 0, done.stderr
    after = (project / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line)["streams"] for line in after.splitlines()] == [json.loads(before)["streams"]]


@pytest.mark.campaign
def test_a_run_whose_data_have_changed_continues_with_the_command_that_it_printed(project, emrun_here):
    data = project / "data.csv"
    data.write_text("x,y\n" + "".join(f"{row},{row % 2}\n" for row in range(20)))
    (project / "config.yaml").write_text(
        "seed: 1\ndataset: {class: Table, train: data.csv, batch_size: 4}\nmodel:\n"
        "  module: {class: torch.nn.Embedding, num_embeddings: 100, embedding_dim: 2}\n  inputs: [x]\n"
        "  outputs: [z]\n  loss: {class: torch.nn.CrossEntropyLoss, inputs: [z, y]}\n"
        "  optimizer: {class: SGD, lr: 0.1}\nhooks: [{StopAfter: {epochs: 2, iterations: 3}}]\n"
    )
    assert emrun_here("train", "config.yaml", "-q", "--output-dir", "run").returncode == 0
    data.write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    for _ in range(2):
        done = emrun_here("resume", "run", "-q", "hooks.StopAfter.iterations=9", "--json")
        assert done.returncode == 2
        assert "has 1 batches, and had 3 or more before the resume" in done.stderr
        (problem,) = json.loads(done.stdout)["problems"]
        assert (problem["code"], problem["fix"]) == ("state.data", {"overrides": ["main_loop.on_changed_data=warn"]})
        command = done.stderr.splitlines()[-1].removeprefix("resume with: ").split()
        assert command == ["emrun", "resume", "run", "main_loop.on_changed_data=warn"]
    assert emrun_here(*command[1:]).returncode == 0
    assert "nothing to do" in emrun_here("resume", "run").stderr
