"""What a resume may change, what it refuses, which checkpoint it takes, and that a copy of a run is a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, result, resumed, stopped, straight, train_with, trained

from emrun import AbstractHook, create_training, resume_training
from emrun.base.encoding import encode
from emrun.base.errors import ConfigError, RunInUse, StateError, StorageError, UsageError
from emrun.config.config import read_config
from emrun.runs.finding import find_runs
from emrun.storage.checkpoints.commits import commit
from emrun.storage.trace import read_trace
from emrun.training import evaluate as evaluation
from emrun.training.create import train


def test_a_finished_run_has_nothing_to_do(project, caplog):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    caplog.set_level("INFO")
    assert resume_training(directory) is None
    assert "nothing to do" in caplog.text
    assert {path: path.read_bytes() for path in before} == before


def test_a_later_end_continues_and_ends_like_a_longer_training(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert result(directory) == straight(project, config_of(hooks=FEW_HOOKS))
    assert "epochs: 2" in (directory / "config.yaml").read_text()
    assert "epochs: 1" in (directory / "config-1.yaml").read_text()
    assert "hooks.StopAfter.epochs" in (directory / "trace.yaml").read_text()


def test_an_edited_config_is_a_change_of_the_resume_and_a_comment_is_none(project, caplog):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    config = directory / "config.yaml"
    before = config.read_text()
    caplog.set_level("INFO")
    config.write_text(f"# mine\n{before}")
    assert resume_training(directory) is None
    config.write_text(before.replace("epochs: 1", "epochs: 2"))
    train(resume_training(directory))
    key = "hooks.StopAfter.epochs"
    assert f"changed: {key}: 1 -> 2" in caplog.text
    assert (directory / "config-1.yaml").read_text() == before
    (run,) = find_runs(project)
    assert (run.epochs_done, run.trace["resumes"][0]["changed"]) == (2, {key: [1, 2]})


LOST = ["emrun.training.resume.write_with_plain", "emrun.storage.trace.Trace.begin_again"]


@pytest.mark.parametrize("lost", thinned(LOST, LOST[1:]))
def test_a_later_end_is_trained_to_also_if_the_first_resume_was_killed_in_a_write(project, lost):
    class Killed(BaseException):
        pass

    def killed(*arguments, **keywords):
        raise Killed

    directory, longer = stopped(project, config_of(hooks=FEW_HOOKS)), ["hooks.StopAfter.epochs=2"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(lost, killed)
        resume_training(directory, longer)
    train(resume_training(directory, longer))
    assert json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 2
    assert "epochs: 2" in (directory / "config.yaml").read_text()


def test_an_end_that_has_passed_is_refused_and_changes_nothing(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.suffix not in (".log", ".json")}
    with pytest.raises(UsageError, match=r"StopAfter\.epochs=0 has passed: the checkpoint has made 1 of these epochs"):
        resume_training(directory, ["hooks.StopAfter.epochs=0", "main_loop.buffer=0"])
    assert {path: path.read_bytes() for path in before} == before
    train(resume_training(directory, ["main_loop.buffer=0"]))


def test_a_new_learning_rate_scales_the_current_one(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.lr=0.5"])
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(0.25)  # halved once by the scheduler
    assert training.model.scheduler.scheduler.base_lrs == [0.5]


def test_other_arguments_that_changed_win_over_the_saved_ones(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    training = resume_training(
        directory, ["hooks.StopAfter.epochs=2", "model.optimizer.weight_decay=0.1", "model.scheduler.gamma=0.9"]
    )
    assert training.model.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert training.model.scheduler.scheduler.gamma == 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.optimizer={class: SGD, lr: 0.1}", "model.optimizer is SGD, but was Adam"),
        ("model.scheduler={class: ExponentialLR, gamma: 0.5}", "model.scheduler is ExponentialLR, but was StepLR"),
        ("~model.scheduler", "model.scheduler was added or removed"),
        ("model.module.width=9", "in the checkpoint, "),
        ("model.optimizer.momentun=1", "unknown argument"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_loses_nothing(project, override, message):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.suffix not in (".log", ".json")}
    with pytest.raises(ValueError, match=message) as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=2", override])
    assert caught.value.exit_status == 2
    assert {path: path.read_bytes() for path in before} == before
    assert not (directory / "config-1.yaml").exists()


def test_an_older_checkpoint_becomes_the_latest_and_the_metrics_go_back_to_it(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS), epochs=2)
    expected = result(directory)
    shutil.copytree(directory, project / "copy", symlinks=True)
    name = (directory / "checkpoints" / "best").readlink().name
    train(resume_training(directory, checkpoint_name="best"))
    assert result(directory) == expected
    assert name


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(project):
    training = create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "run")
    training.main_loop.run.release()  # as the kernel does when the process is killed
    resumed(project / "run")
    assert result(project / "run") == straight(project, config_of(hooks=FEW_HOOKS))
    assert "status: killed" in (project / "run" / "trace.yaml").read_text()


TRACES = [b"", b"status: [", b"\xff\xfe", b"- 1\n", b"train_begin: 1\nresumes: 3\n", None]


@pytest.mark.parametrize("content", thinned(TRACES, [b"status: ["]))
def test_a_run_with_a_damaged_trace_can_be_resumed(project, content):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    trace = directory / "trace.yaml"
    trace.unlink() if content is None else trace.write_bytes(content)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    (run,) = find_runs(project)
    assert (run.status, run.trace["seed"]) == ("finished", read_config(directory)["seed"])


def test_metrics_that_end_in_half_a_line_are_read_up_to_there(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "iter')
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert [json.loads(line)["epoch"] for line in (directory / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_state_that_cannot_be_saved_is_found_before_the_first_batch(project):
    class Bad(AbstractHook):
        def state_dict(self):
            return {"a": {"b": np.array([b"text"])}}

    training = create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "run")
    with pytest.raises(ValueError, match=r"Bad.a.b is ndarray of \|S4, which cannot be saved") as caught:
        train_with(training, Bad())
    assert caught.value.exit_status == 2
    assert training.main_loop.iterations_done == 0
    assert not (project / "run" / "metrics.jsonl").exists()


def test_an_earlier_checkpoint_gives_a_name_back_to_where_it_was(project):
    config = config_of(hooks=FEW_HOOKS)
    config["hooks"] = [
        {"ComputeStats": {"variables": ["loss"]}}, {"SaveEvery": {"n_epochs": 1}}, "my_scores.Scores",
        {"SaveBest": {"variable": "score"}}, {"StopAfter": {"epochs": 4}},
    ]  # fmt: skip
    (project / "my_scores.py").write_text(
        "from emrun import AbstractHook\n\n\nclass Scores(AbstractHook):\n    writes = ['score']\n\n"
        "    def after_epoch(self, epoch_id, epoch_data):\n"
        "        epoch_data['valid']['score'] = [5.0, 6.0, 6.5, 4.0, 7.0][epoch_id]\n"
    )
    train(create_training(config, output_dir=project / "run"))
    checkpoints = project / "run" / "checkpoints"
    assert checkpoints.joinpath("best").readlink() == checkpoints.joinpath("epoch-3").readlink()
    training = resume_training(project / "run", checkpoint_name="epoch-2")
    assert checkpoints.joinpath("best").readlink() == checkpoints.joinpath("epoch-0").readlink()
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_symlink()) == [
        "best", "epoch-0", "epoch-1", "epoch-2", "latest",
    ]  # fmt: skip
    training.main_loop.run.release()


@pytest.mark.campaign
def test_a_csv_file_is_continued_by_its_hook_when_another_one_is_removed(project):
    config = config_of(hooks=FEW_HOOKS)
    config["hooks"] = [
        *FEW_HOOKS[:-1], {"WriteCSV": {"output_file": "a.csv"}}, {"WriteCSV": {"output_file": "b.csv"}}, FEW_HOOKS[-1],
    ]  # fmt: skip
    straight(project, config)
    directory = stopped(project, config)
    before = (directory / "a.csv").read_bytes()
    index = next(i for i, hook in enumerate(config["hooks"]) if "WriteCSV" in hook)
    train(resume_training(directory, [f"~hooks.{index}", "hooks.StopAfter.epochs=2"]))
    assert (directory / "b.csv").read_bytes() == (project / "straight" / "b.csv").read_bytes()
    assert (directory / "a.csv").read_bytes() == before


def test_another_statistic_starts_again_with_its_best(project, caplog):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", "hooks.SaveBest={variable: loss, condition: min}"]))
    assert "now watches another statistic" in caplog.text
    best = json.loads((directory / "checkpoints" / "best" / "manifest.json").read_text())
    assert best["epoch"] == 2


def test_a_config_error_leaves_a_directory_that_was_there_as_it_was(project):
    (project / "mine").mkdir()
    (project / "mine" / ".notes").write_text("mine")
    with pytest.raises(ValueError, match="buffer"):
        create_training(config_of(buffer=-1), output_dir=project / "mine")
    assert sorted(path.name for path in (project / "mine").iterdir()) == [".lock", ".notes"]
    create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "mine").main_loop.run.release()


@pytest.mark.campaign
def test_a_learning_rate_that_is_a_tensor_is_resumed(project):
    (project / "rates.py").write_text(
        "import torch\n\n\ndef adam(parameters):\n    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1))\n"
    )
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["optimizer"] = {"class": "rates.adam"}
    expected = straight(project, config)
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert result(directory) == expected


def test_parameters_that_change_their_group_are_refused(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["optimizer"] = {"class": "SGD", "lr": 0.1, "groups": [{"match": "weight", "lr": 0.2}]}
    directory = stopped(project, config)
    with pytest.raises(ValueError, match="other groups"):
        resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.groups=[{match: bias, lr: 0.2}]"])


@pytest.mark.parametrize("value", [b"", 2**3000, np.datetime64("2026-01-01"), np.longdouble(1)], ids=str)
def test_what_torch_could_not_read_again_is_not_saved(value):
    with pytest.raises(StateError, match=r"key is .*, which cannot be saved"):
        encode(value, "key")


def test_the_code_of_a_run_comes_before_that_of_the_current_directory(project, monkeypatch, caplog):
    caplog.set_level("INFO")
    (project / "here").mkdir()
    (project / "there").mkdir()
    for place, width in (("here", 4), ("there", 8)):
        (project / place / "placed_net.py").write_text(
            f"from resume_model import Net\n\n\nclass Placed(Net):\n    width = {width}\n"
        )
    config = {**config_of(hooks=FEW_HOOKS), "code_directory": str(project / "there")}
    config["model"] = {**config["model"], "module": {"class": "placed_net.Placed"}}
    monkeypatch.chdir(project / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    training = create_training(config, output_dir=project / "run")
    assert training.model.module.width == 8
    training.main_loop.run.release()
    there, here = project / "there", project / "here"
    assert f"imported from code_directory {there}: placed_net" in caplog.messages
    assert (
        f"not used: placed_net in the current directory, because the config has another code_directory, {there}; to "
        f"use the modules here, add code_directory={here}"
    ) in caplog.messages
    caplog.clear()
    monkeypatch.chdir(there)
    create_training(config, output_dir=project / "second").main_loop.run.release()
    assert not [each for each in caplog.messages if "code_directory" in each]


@pytest.mark.campaign
def test_a_run_is_resumed_without_the_directory_of_its_start_if_nothing_is_imported_from_there(project):
    (project / "gone").mkdir()
    directory = stopped(project, {**config_of(hooks=FEW_HOOKS), "code_directory": str(project / "gone")})
    (project / "gone").rmdir()
    with pytest.raises(ConfigError, match=rf"code_directory: there is no directory '{project}/gone', in which"):
        resume_training(directory, ["model.module.class=not_there.Net"])
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))


# copies


@pytest.mark.parametrize("name", thinned([None, "latest"], ["latest"]))
def test_a_copy_of_a_run_is_resumed_as_the_run_and_leaves_the_run_alone(project, name):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    subprocess.run(["cp", "-a", directory, project / "copy"], check=True)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    train(resume_training(project / "copy", ["hooks.StopAfter.epochs=2"], name))
    assert {path: path.read_bytes() for path in before} == before
    assert result(project / "copy") == straight(project, config_of(hooks=FEW_HOOKS))
    trace = read_trace(project / "copy")
    assert trace["directory"] == str(project / "copy")
    assert trace["resumes"][-1]["before"]["directory"] == str(directory)


def test_a_copy_of_a_run_that_is_in_use_can_be_resumed(project):
    """The copy has the files of the lock, which this process holds for the run itself."""
    training = create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "run")
    subprocess.run(["cp", "-a", project / "run", project / "copy"], check=True)
    other = resume_training(project / "copy")
    assert other.output_dir == project / "copy"
    other.main_loop.run.release()
    training.main_loop.run.release()


def test_a_finished_run_says_how_to_train_longer(project, caplog):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    caplog.set_level("INFO")
    assert resume_training(directory) is None
    assert caplog.messages[-2:] == [
        "nothing to do: the run is finished: 1 epoch done (StopAfter epochs: 1)",
        "to train longer, resume with a later end, such as hooks.StopAfter.epochs=2",
    ]
    trace = directory / "trace.yaml"
    before = trace.read_text()
    for reason, way in {
        "40 updates done (StopAfter updates: 40)": "a later end, such as hooks.StopAfter.updates=80",
        "0.5 minutes have passed (StopAfter minutes: 0.5)": "a later end, such as hooks.StopAfter.minutes=1",
        "valid/loss/mean is 3 (Check)": "other arguments of Check, or without it: '~hooks.Check'",
        "no (EarlyStopping patience: 3)": "other arguments of EarlyStopping, or without it: '~hooks.EarlyStopping'",
        "enough": "other arguments of the hook that ended it",
    }.items():
        trace.write_text(before.replace("1 epoch done (StopAfter epochs: 1)", reason))
        assert resume_training(directory) is None
        assert caplog.messages[-1] == f"to train longer, resume with {way}"


@pytest.mark.campaign
def test_a_run_whose_block_has_simply_ended_continues_from_its_checkpoint(project, caplog):
    directory = project / "run"
    with create_training(config_of(hooks=FEW_HOOKS), output_dir=directory).main_loop:
        pass
    caplog.set_level("INFO")
    assert resume_training(directory) is None
    said = ["nothing to do: the run is finished", "to train longer, resume with its checkpoint: --checkpoint latest"]
    assert caplog.messages[-2:] == said
    train(resume_training(directory, checkpoint_name="latest"))
    assert result(directory) == straight(project, config_of(hooks=FEW_HOOKS))


def test_another_architecture_is_refused_with_the_values_that_the_resume_changes(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    with pytest.raises(StateError, match=r"does not fit the module: .* in the checkpoint, .* in the module") as caught:
        resume_training(directory, ["model.module.width=7"])
    (note,) = caught.value.__notes__
    assert note.startswith("this resume changes model.module.width: ")
    assert note.endswith(" -> 7; undo that, or train anew with `emrun train`")


@pytest.mark.campaign
def test_a_module_that_is_built_in_another_way_each_time_is_refused_with_the_names_of_its_tensors(project):
    (project / "anew.py").write_text(
        "import os\n\nimport torch\nfrom resume_model import Net\n\n\ndef net():\n    module = Net()\n"
        "    module.register_buffer(f'b_{os.urandom(4).hex()}', torch.zeros(1))\n    return module\n"
    )
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["module"] = {"class": "anew.net"}
    directory = stopped(project, config)
    message = r"only in the module: b_\w{8}; only in the checkpoint: b_\w{8}\. Weights can only be loaded into the arch"
    with pytest.raises(StateError, match=message):
        resume_training(directory, ["hooks.StopAfter.epochs=2"])


def test_a_checkpoint_without_a_name_is_refused_and_not_taken_for_the_best_one(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS), epochs=2)
    metrics = (directory / "metrics.jsonl").read_text()
    with pytest.raises(UsageError, match="the name of the checkpoint is empty"):
        resume_training(directory, ["hooks.StopAfter.epochs=3"], checkpoint_name="")
    assert (directory / "metrics.jsonl").read_text() == metrics


def test_a_damaged_checkpoint_is_refused_with_those_that_are_intact(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS), epochs=2)
    root = directory / "checkpoints"
    damaged = commit(root, lambda place: (place / "state.pt").touch(), epoch=1, iteration=2, names=("mine",))
    (damaged / "state.pt").write_bytes(b"y")
    with pytest.raises(StorageError, match="is damaged") as caught:
        resume_training(directory, checkpoint_name="mine")
    intact = sorted(path.name for path in root.iterdir() if path.is_symlink() and path.name != "mine")
    assert caught.value.__notes__ == [f"intact checkpoints: {', '.join(intact)}"]


def test_each_damaged_checkpoint_has_a_line(project):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    places = [path for path in (directory / "checkpoints").iterdir() if not path.is_symlink() and path.name[0] != "."]
    for place in places:
        (place / "state.pt").write_bytes(b"y")
    with pytest.raises(StorageError) as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=2"])
    head, *lines = str(caught.value).split("\n")
    assert head.endswith("checkpoints is intact:")
    assert [line.partition(": ")[0] for line in lines] == [
        f"  checkpoint {place}" for place in sorted(places, reverse=True)
    ]


class Terminate(AbstractHook):
    def after_batch(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_is_named_once_in_the_log(project):
    training = create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "run")
    train_with(training, Terminate())
    assert (project / "run" / "train.log").read_text().rstrip().endswith(" interrupted by SIGTERM")


class Turns(AbstractHook):
    """Turns the link `current` to the directory `other`, after the first batch that the model is trained on."""

    def after_batch(self, batch_data):
        if self.main_loop.training and self.main_loop.iterations_done == 1:
            turn("other")


def turn(name):
    """Turn the link `current`, as `ln -sfn` does."""
    Path("current.new").symlink_to(name)
    Path("current.new").rename("current")


def files_of(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.fixture
def turned(project, monkeypatch):
    """A project with the run `other`, whose link `current` leads to the directory `run`; both are compared later."""
    monkeypatch.chdir(project)
    trained(config_of(hooks=FEW_HOOKS), project / "other")
    turn("run")
    return project


@pytest.mark.campaign
@pytest.mark.parametrize("given", thinned(["current", "./current", "other/../current/"], ["other/../current/"]))
def test_a_link_that_is_turned_leads_no_run_into_another_one(turned, given):
    before = files_of(turned / "other")
    training = create_training(config_of(hooks=FEW_HOOKS, report=True), output_dir=given)
    train_with(training, Turns())
    assert files_of(turned / "other") == before
    assert read_trace(turned / "run")["status"] == "finished"
    assert (turned / "run" / "report.html").exists()
    assert sorted(path.name for path in (turned / "run" / "checkpoints").iterdir() if path.is_symlink())


@pytest.mark.campaign
def test_a_link_above_the_run_that_is_turned_leads_no_run_into_another_one(turned):
    Path("run").mkdir()
    training = create_training(config_of(hooks=FEW_HOOKS), output_root="current")
    train_with(training, Turns())
    assert training.output_dir.parent == turned / "run"
    assert not list((turned / "other").glob("*/trace.yaml"))
    assert read_trace(training.output_dir)["status"] == "finished"


def test_a_resume_of_a_link_that_is_turned_stays_in_its_run(turned):
    trained(config_of(hooks=FEW_HOOKS), turned / "run")
    before = files_of(turned / "other")
    training = resume_training("current", ["hooks.StopAfter.epochs=3"])
    turn("other")
    train(training)
    assert files_of(turned / "other") == before
    assert read_trace(turned / "run")["epochs_done"] == 3


def test_an_evaluation_of_a_link_that_is_turned_has_one_run(turned, monkeypatch):
    trained(config_of(hooks=FEW_HOOKS), turned / "run")
    before = files_of(turned / "other")
    original = evaluation.assemble_alike
    monkeypatch.setattr(evaluation, "assemble_alike", lambda *a, **k: (turn("other"), original(*a, **k))[1])
    evaluation.evaluate("current", "valid")
    assert files_of(turned / "other") == before
    assert read_trace(turned / "run" / "eval" / "valid-1")["status"] == "finished"


def test_the_lock_of_a_run_is_that_of_the_directory_that_is_written(turned):
    Path("run").mkdir()
    training = create_training(config_of(hooks=FEW_HOOKS), output_dir="current")
    turn("other")
    (turned / "run" / ".owner.json").write_text('{"pid": 1, "started": 1, "host": "another"}')
    with pytest.raises(RunInUse, match="was taken over by process 1 on another"):
        train(training)


def test_a_resume_on_a_file_system_without_links_says_so_and_changes_nothing(project, monkeypatch):
    directory = stopped(project, config_of(hooks=FEW_HOOKS))
    before = files_of(directory)

    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(StorageError, match="has no symbolic links"):
        resume_training(directory, ["hooks.StopAfter.epochs=2"])
    assert files_of(directory) == before
    monkeypatch.undo()
    monkeypatch.chdir(project)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))


@pytest.mark.campaign
def test_a_file_system_without_modes_of_files_has_checkpoints(project, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    training = create_training(config_of(hooks=FEW_HOOKS), output_dir=project / "run")
    train(training)
    assert (project / "run" / "checkpoints" / "latest" / "model.safetensors").exists()
