"""The end of a run: limits of every kind, each measured once, and taken back by what makes the run longer."""

import json
import sqlite3
from contextlib import closing

import pytest
from campaign import thinned
from training.resuming import config_of, result, train_with

from emrun import AbstractHook, create_training, resume_training
from emrun.storage.trace import read_trace

HOOKS = [
    {"ComputeStats": {"variables": [{"loss": ["mean", "count"]}, "accuracy"]}},
    {"SaveBest": {"variable": "loss", "keep": 2}},
    "SaveLatest",
    {"SaveEvery": {"every": "1 epochs"}},
    "WriteCSV",
    {"WriteCSV": {"output_file": "curves.csv", "every": "2 updates"}},
    "WriteSQLite",
    {"EarlyStopping": {"patience": 50}},
    {"StopOnPlateau": {"long_term": 50, "short_term": 50}},
]
WATCHING = [HOOKS[1], *HOOKS[-2:]]

# the limit, that of a longer run, the batches of an epoch -> the epoch that is measured at the end, and whether the
# limit was reached with the last batch of the epoch; a pass has five batches
LIMITS = {
    "epochs": ({"epochs": 1}, {"epochs": 3}, None, 1, True),
    "updates in an epoch": ({"updates": 7}, {"updates": 14}, None, 2, False),
    "updates at the end of a pass": ({"updates": 10}, {"updates": 14}, None, 2, True),
    "updates at the end of a fixed size": ({"updates": 9}, {"updates": 13}, 3, 3, True),
    "iterations": ({"iterations": 8}, {"iterations": 10}, None, 2, False),
    "passes in an epoch": ({"passes": 2}, {"passes": 4}, 4, 3, False),
}
INTERVALS = {"every epoch": "valid", "every second": {"valid": "2 epochs"}, "none": None}


class Fails(AbstractHook):
    """Fails when the end is measured."""

    def after_batch(self, stream_name):
        if self.main_loop.at_end:
            raise RuntimeError("no")


class Heard(AbstractHook):
    """Lists the events at the end."""

    def __init__(self):
        super().__init__()
        self.events = []

    def happened(self, *event):
        if self.main_loop.at_end:
            self.events.append(event)

    def before_epoch(self, epoch_id):
        self.happened("before_epoch", epoch_id)

    def before_evaluation(self):
        self.happened("before_evaluation")

    def before_stream(self, stream_name):
        self.happened("before_stream", stream_name)

    def after_stream(self, stream_name):
        self.happened("after_stream", stream_name)

    def after_epoch(self, epoch_id, epoch_data):
        self.happened("after_epoch", epoch_id, *epoch_data)


@pytest.fixture(autouse=True)
def data(project):
    text = "import resume_data\n\n\nclass Data(resume_data.Data):\n    num_batches = {'train': 5}\n"
    (project / "ends_data.py").write_text(text)


def trained(directory, limit, interval, size, *hooks, kind="context", **main_loop):
    config = config_of(kind, extra_streams=[interval] if interval else [], fixed_epoch_size=size, **main_loop)
    config["dataset"]["class"] = "ends_data.Data"
    config["hooks"] = [*(HOOKS if interval else [each for each in HOOKS if each not in WATCHING]), {"StopAfter": limit}]
    train_with(create_training(config, output_dir=directory), *hooks)
    return directory


def resumed(directory, overrides=(), *hooks):
    train_with(resume_training(directory, overrides), *hooks)


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def differing(one, other):
    """Return what differs between two runs."""
    found, expected = everything(one), everything(other)
    return [key for key in expected if found[key] != expected[key]]


def everything(directory):
    """Return all that must be the same, and which checkpoint has which name."""
    names = {
        path.name: path.readlink().name[:11] for path in (directory / "checkpoints").iterdir() if path.is_symlink()
    }
    files = {name: (directory / name).read_bytes() for name in ("training.csv", "curves.csv", "steps.jsonl")}
    with closing(sqlite3.connect(directory / "metrics.sqlite")) as database:
        rows = [database.execute(f"SELECT * FROM {name}").fetchall() for name in ("epoch_values", "step_values")]
    found = {**result(directory, has_best=False), **files, "links": names, "rows": rows}
    found["hooks"] = {key: each for key, each in found["hooks"].items() if not key.startswith(__name__)}
    return found


CASES = [*((name, "every second") for name in LIMITS), ("iterations", "every epoch"), ("iterations", "none")]
FEW = [("epochs", "every second")]


@pytest.mark.parametrize(("name", "interval"), thinned(CASES, FEW))
def test_an_end_is_measured_and_a_longer_run_takes_it_back(project, name, interval):
    limit, later, size, epoch, is_last = LIMITS[name]
    stream, heard = INTERVALS[interval], Heard()
    found = trained(project / "run", limit, stream, size, heard)
    is_measured = stream is not None and not (is_last and (interval == "every epoch" or epoch % 2 == 0))
    of_run = [] if is_last else ["train"]
    events = [("before_evaluation",), ("before_stream", "valid"), ("after_stream", "valid")]
    events += [("after_epoch", epoch, *of_run, "valid")]
    before = [("before_epoch", epoch)] if is_last else []
    assert heard.events == ([*before, *events] if is_measured else [])
    rows = lines(found)
    assert [row.get("at_end", False) for row in rows] == [False] * (len(rows) - is_measured) + [True] * is_measured
    if is_measured:
        assert rows[-1]["epoch"] == epoch
        assert rows[-1]["streams"]["valid"]["loss"]["count"] == 12
        assert (found / "training.csv").read_text().count("\n") == len(rows) + 1
        with pytest.raises(RuntimeError, match="no") as caught:
            trained(project / "failed", limit, stream, size, Fails())
        assert "emrun resume" in caught.value.__notes__[-1]
        trace = read_trace(project / "failed")
        assert (trace["status"], trace["exit_status"]) == ("finished", 1)
        resumed(project / "failed")
        assert differing(project / "failed", found) == []
    resumed(found, [f"hooks.StopAfter.{key}={value}" for key, value in later.items()])
    assert differing(found, trained(project / "straight", later, stream, size)) == []


AHEAD = [("own_random", {"workers": 1}), ("stateful", {"buffer": 2})]


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "ahead"), [*AHEAD, ("plain", {}), ("global_random", {}), ("stateful", {})], ids=str)
def test_asking_for_the_next_batch_changes_nothing(project, kind, ahead):
    found = trained(project / "run", {"updates": 7}, "valid", None, kind=kind, **ahead)
    assert [row["epoch"] for row in lines(found)] == [0, 1, 2]
    resumed(found, ["hooks.StopAfter.updates=10"])
    assert [row["epoch"] for row in lines(found)] == [0, 1, 2]
    resumed(found, ["hooks.StopAfter.updates=12"])
    assert differing(found, trained(project / "straight", {"updates": 12}, "valid", None, kind=kind, **ahead)) == []


class FailsOnce(AbstractHook):
    """Fails in an event of epoch 2."""

    def __init__(self, event):
        super().__init__()
        setattr(self, event, self.fail)

    def fail(self, **arguments):
        if self.main_loop.iterations_done == 10 and not self.main_loop.training:
            raise RuntimeError("no")


FAILURES = [("before_evaluation", "valid"), ("after_batch", "valid"), ("after_epoch_profile", None)]


@pytest.mark.campaign
@pytest.mark.parametrize(("event", "stream"), thinned(FAILURES, FAILURES[1:2]))
def test_a_failure_after_the_train_stream_keeps_the_batches_of_the_epoch(project, event, stream):
    with pytest.raises(RuntimeError, match="no"):
        trained(project / "run", {"epochs": 3}, stream, None, FailsOnce(event))
    trace = read_trace(project / "run")
    assert (trace["status"], trace["epochs_done"], trace["iterations_done"]) == ("failed", 1, 10)
    resumed(project / "run", (), heard := Trained())
    assert heard.batches == 5
    assert differing(project / "run", trained(project / "straight", {"epochs": 3}, stream, None)) == []


class Trained(AbstractHook):
    """Counts the batches that the model is trained on."""

    batches = 0

    def after_batch(self, stream_name):
        self.batches += self.main_loop.training


class AddsToTrain(AbstractHook):
    """Writes into the data of the train stream after each training epoch, as the hook of the README does."""

    writes = ("largest",)

    def __init__(self, stream="train"):
        super().__init__()
        self.stream, self.seen = stream, []

    def after_epoch(self, epoch_id, epoch_data):
        if epoch_id > 0:
            epoch_data["train"]["largest"] = float(epoch_id)
            self.seen.append(epoch_data[self.stream]["loss"]["mean"])


def test_a_hook_may_write_about_the_train_stream_at_the_end_which_is_not_recorded(project):
    hook = AddsToTrain()
    run = trained(project / "run", {"epochs": 1}, {"valid": "2 epochs"}, None, hook)
    assert hook.seen[-1] == hook.seen[-2]  # of the last training epoch
    assert [list(each["streams"]) for each in lines(run)][-2:] == [["train"], ["valid"]]
    assert lines(run)[-2]["streams"]["train"]["largest"] == 1


def test_a_process_that_only_measures_the_end_has_the_last_training_epoch_of_the_record(project):
    with pytest.raises(RuntimeError, match="no"):
        trained(project / "run", {"epochs": 1}, {"valid": "2 epochs"}, None, AddsToTrain(), Fails())
    hook = AddsToTrain()
    resumed(project / "run", (), hook)
    assert hook.seen == [lines(project / "run")[-2]["streams"]["train"]["loss"]["mean"]]
    assert lines(project / "run")[-1]["at_end"]


def test_a_stream_that_is_nowhere_is_told_at_the_end_as_in_any_epoch(project):
    with pytest.raises(KeyError, match="there is no stream 'trian' in the data of the epoch; did you mean 'train'"):
        trained(project / "run", {"epochs": 1}, {"valid": "2 epochs"}, None, AddsToTrain("trian"))
