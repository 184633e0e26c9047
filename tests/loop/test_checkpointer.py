"""When checkpoints are saved: requests, names, the thread that writes, and what goes wrong in it."""

import errno
import json
import logging
import shutil
import threading
from contextlib import nullcontext

import pytest
import torch
from campaign import thinned
from doubles import Doubler, SixExamples
from storage.committing import names_in

from emrun import AbstractHook, MainLoop, TorchModel, TrainingTerminated
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.base.types import Factory
from emrun.hooks import SaveEvery, SaveLatest, StopAfter
from emrun.loop.checkpointer import Checkpointer
from emrun.loop.progress import Phase, Progress
from emrun.loop.requests import CheckpointRequests
from emrun.loop.snapshot import Copy
from emrun.storage.checkpoints.commits import commit
from emrun.storage.checkpoints.finding import find
from emrun.storage.checkpoints.manifest import verify
from emrun.storage.run import create_run


def save(directory):
    (directory / "state.pt").write_bytes(b"state")


def saving_to(root, take, **more):
    requests = CheckpointRequests(are_saved=root is not None)
    return Checkpointer(requests, Progress(), lambda names: Copy(*take(names)), root, **more)


def at(saving, epoch, iteration, phase="between"):
    """Return what saves checkpoints, when the training has come to a point."""
    saving.progress.start_from(epoch, iteration, iteration, Phase(phase))
    return saving


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def saved():
    return []


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def background(request):
    return request.param


@pytest.fixture
def saving(root, saved, background):
    def note(directory):
        saved.append(directory)
        save(directory)

    return saving_to(root, lambda names: (note, background))


def test_what_was_requested_becomes_one_checkpoint_with_all_the_names(saving, root, saved):
    saving.requests.add("latest", "error")
    saving.requests.add("best", "error")
    assert not root.exists()
    at(saving, 1, 10).save_requested()
    saving.wait()
    assert names_in(root) == ["best", "it-00000010", "latest"]
    assert len(saved) == 1
    at(saving, 1, 11).save_requested()
    saving.wait()
    assert len(saved) == 1


def test_a_second_request_in_the_same_state_only_names_it(saving, root, saved):
    saving.requests.add("best", "error")
    at(saving, 1, 10).save_requested()
    saving.wait()
    saving.requests.add("epoch-1", "error")
    at(saving, 1, 10).save_requested()
    saving.wait()
    at(saving, 1, 10).save_latest()
    assert len(saved) == 1
    assert {(root / name).readlink().name for name in ("best", "epoch-1", "latest")} == {"it-00000010"}


def test_a_checkpoint_that_somebody_deleted_is_saved_again(saving, root, saved):
    saving.requests.add("best", "error")
    at(saving, 1, 10).save_requested()
    saving.wait()
    shutil.rmtree(root / "it-00000010")
    at(saving, 1, 10).save_latest()
    assert len(saved) == 2
    assert verify(find(root, "latest")).iteration == 10


def test_a_name_that_is_given_up_and_requested_at_once_is_there(saving, root):
    saving.requests.add("epoch-1", "error", instead_of=["epoch-0"])
    saving.requests.add("epoch-0", "error")
    at(saving, 1, 10).save_requested()
    saving.wait()
    assert names_in(root) == ["epoch-0", "epoch-1", "it-00000010"]


def test_a_name_is_given_up_once_and_may_come_back(saving, root):
    for iteration, (name, others) in enumerate([("a", []), ("b", ["a"]), ("a", []), ("c", [])]):
        saving.requests.add(name, "error", instead_of=others)
        at(saving, 1, iteration).save_requested()
    saving.wait()
    assert [name for name in names_in(root) if not name.startswith("it-")] == ["a", "b", "c"]


def test_the_same_iteration_in_another_epoch_is_another_state(saving, root, saved):
    for epoch, name in ((0, "batch-10"), (1, "latest")):
        saving.requests.add(name, "error")
        at(saving, epoch, 10).save_requested()
    saving.wait()
    assert len(saved) == 2
    assert names_in(root) == ["batch-10", "it-00000010", "it-00000010-2", "latest"]


def test_the_state_at_the_end_is_saved_as_latest(saving, root):
    at(saving, 2, 20).save_latest()
    assert verify(find(root, "latest")).epoch == 2


def test_a_name_is_made_safe(saving, root):
    saving.requests.add("../a b", "error")
    at(saving, 0, 1).save_requested()
    saving.wait()
    assert names_in(root) == ["_a_b", "it-00000001"]


@pytest.mark.parametrize("name", ["it-00000001", "it-00000001-2", "it-123456789"])
def test_a_name_cannot_be_that_of_a_directory(saving, name):
    with pytest.raises(ArgumentError, match="is reserved for a checkpoint's directory; use another name"):
        saving.requests.add(name, "error")


@pytest.mark.parametrize("name", ["", "..", "x" * 101])
def test_a_name_that_cannot_be_one_is_an_error(saving, name):
    with pytest.raises(ArgumentError, match="cannot name a file"):
        saving.requests.add(name, "error")


def test_without_a_run_a_request_is_an_error_and_the_end_is_not():
    saving = saving_to(None, lambda names: (save, True))
    with pytest.raises(HookError, match="checkpoint 'best' cannot be saved: this main loop has no run directory"):
        saving.requests.add("best", "error")
    at(saving, 1, 1).save_requested()
    at(saving, 1, 1).save_latest()


def broken(root):
    def fails(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    return saving_to(root, lambda names: (fails, False))


@pytest.mark.parametrize("policies", [["error"], ["ignore", "error"], ["error", "warn"]], ids=str)
def test_a_checkpoint_that_cannot_be_saved_is_an_error_if_anyone_wants_it_so(root, policies):
    saving = broken(root)
    for index, policy in enumerate(policies):
        saving.requests.add(f"name-{index}", policy)
    with pytest.raises(StorageError, match="the disk is full"):
        at(saving, 1, 1).save_requested()


@pytest.mark.parametrize("policies", [["error", "warn"], ["ignore", "error"], ["warn", "error", "ignore"]], ids=str)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_strictest_policy_of_all_requests_for_a_name_applies(root, policies, at_the_end):
    saving = broken(root)
    for policy in policies:
        saving.requests.add("latest", policy)
    with pytest.raises(StorageError, match="the disk is full"):
        at(saving, 1, 1)
        (saving.save_latest if at_the_end else saving.save_requested)()


@pytest.mark.parametrize(("policies", "count"), [(["ignore"], 0), (["warn"], 1), (["warn", "ignore", "warn"], 1)])
def test_a_checkpoint_that_cannot_be_saved_may_be_a_warning_or_nothing(root, policies, count, caplog):
    saving = broken(root)
    for index, policy in enumerate(policies):
        saving.requests.add(f"name-{index}", policy)
    with caplog.at_level(logging.INFO):
        at(saving, 1, 1).save_requested()
    assert len(caplog.messages) == count
    assert all("no checkpoint was saved: " in message for message in caplog.messages)
    at(saving, 1, 2).save_requested()  # it is not tried again


def test_the_end_is_saved_with_the_policy_of_the_last_request_for_latest(root, background, caplog):
    def fails(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    saving = saving_to(root, lambda names: (fails, background))
    with pytest.raises(StorageError, match="the disk is full"):
        at(saving, 1, 1).save_latest()
    saving.requests.add("latest", "warn")
    for iteration in (2, 3):
        at(saving, 1, iteration).save_latest()
        saving.requests.add("best", "ignore")
    assert len(caplog.messages) == 2


def fails_halfway(directory):
    (directory / "half.bin").write_bytes(b"half")
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("policy", ["error", "warn", "ignore"])
def test_what_a_model_raises_while_it_is_saved_follows_the_policy_and_leaves_nothing(root, background, caplog, policy):
    writers = [save, fails_halfway, save]
    saving = saving_to(root, lambda names: (writers.pop(0), background))
    saving.requests.add("latest", "error")
    at(saving, 1, 1).save_requested()
    saving.wait()
    saving.requests.add("best", policy)
    caplog.clear()
    with pytest.raises(RuntimeError, match="out of memory") if policy == "error" else nullcontext():
        at(saving, 1, 2).save_requested()
        saving.wait()
    warnings = ["no checkpoint was saved: RuntimeError: CUDA error: out of memory"] if policy == "warn" else []
    assert caplog.messages == warnings
    assert names_in(root) == ["it-00000001", "latest"]
    at(saving, 1, 3).save_latest()
    assert verify(find(root, "latest")).iteration == 3


def test_what_a_model_raises_while_it_is_copied_follows_the_policy(root, caplog):
    def snapshot(names):
        raise RuntimeError("CUDA error: out of memory")

    saving = saving_to(root, snapshot)
    saving.requests.add("best", "warn")
    at(saving, 1, 1).save_requested()
    assert caplog.messages == ["no checkpoint was saved: RuntimeError: CUDA error: out of memory"]


OWN_SAVE = """
from emrun import TorchModel


class Unsaved(TorchModel):
    def save(self, directory):
        (directory / "half.bin").write_bytes(b"half")
        raise RuntimeError("the bucket is gone")


class UnsavedInTheThread(Unsaved):
    def stage(self):
        return self.save
"""
CONFIG = """
seed: 1
dataset: {class: Majority, n: 40}
model:
  class: unsaved.Unsaved
  module: {class: torch.nn.Linear, in_features: 11, out_features: 1}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.MSELoss, inputs: [logit, logit]}
  optimizer: {class: SGD, lr: 0.1}
main_loop: {skip_zeroth_epoch: true, on_unused_sources: ignore}
hooks:
  - ComputeStats: {variables: [loss]}
  - SaveBest: {stream: train, on_save_failure: warn}
  - SaveEvery: {on_failure: warn}
  - SaveLatest: {on_save_failure: warn}
  - StopAfter: {epochs: 2}
"""
KINDS = ("Unsaved", "UnsavedInTheThread")


@pytest.mark.parametrize(
    ("kind", "policy", "status"),
    thinned(
        ((kind, policy, int(policy == "error")) for policy in ("error", "warn", "ignore") for kind in KINDS),
        [(KINDS[0], "error", 1), (KINDS[1], "warn", 0)],
    ),
)
def test_a_run_whose_model_cannot_be_saved_follows_on_save_failure(emrun_here, tmp_path, kind, policy, status):
    (tmp_path / "unsaved.py").write_text(OWN_SAVE)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("warn", policy).replace(".Unsaved", f".{kind}"))
    done = emrun_here("train", "-q", "config.yaml", "--output-dir", "run")
    assert done.returncode == status
    warning = "warning: no checkpoint was saved: RuntimeError: the bucket is gone"
    assert (warning in done.stderr) is (policy == "warn")
    assert ("RuntimeError: the bucket is gone" in done.stderr) is (policy != "ignore")
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2] or policy == "error"  # of which a thread tells after a batch or more
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_the_newest_is_the_last_that_was_saved_or_loaded(saving, root):
    assert saving.progress.newest_checkpoint is None
    at(saving, 1, 10).save_latest()
    assert saving.progress.newest_checkpoint == ("it-00000010", 10)
    other = broken(root)
    at(other, 1, 10).rewind(find(root, "latest"))
    assert other.progress.newest_checkpoint == ("it-00000010", 10)
    with pytest.raises(StorageError, match="the disk is full"):
        at(other, 1, 11).save_latest()
    assert other.progress.newest_checkpoint == ("it-00000010", 10)


def test_the_state_of_a_checkpoint_that_was_loaded_is_only_named(saving, root):
    at(saving, 1, 10).save_latest()
    other = broken(root)
    at(other, 1, 10).rewind(find(root, "latest"))
    other.requests.add("best", "error")
    at(other, 1, 10).save_latest()
    assert names_in(root) == ["best", "it-00000010", "latest"]


def test_after_a_failure_the_state_can_be_saved_again(root, background):
    attempts = []

    def save_the_second_time(directory):
        attempts.append(directory)
        if len(attempts) == 1:
            raise OSError(errno.EIO, "Input/output error")
        save(directory)

    saving = saving_to(root, lambda names: (save_the_second_time, background))
    saving.requests.add("latest", "warn")
    at(saving, 1, 1).save_requested()
    at(saving, 1, 1).save_latest()
    assert verify(find(root, "latest")).iteration == 1


class Gate:
    """Writes a checkpoint when it is opened."""

    def __init__(self, error=None):
        self.open = threading.Event()
        self.began = threading.Event()
        self.error = error

    def __call__(self, directory):
        self.began.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        save(directory)


def test_the_loop_does_not_wait_for_what_is_written(root):
    gate = Gate()
    saving = saving_to(root, lambda names: (gate, True))
    saving.requests.add("latest", "error")
    at(saving, 1, 10).save_requested()
    assert gate.began.wait(60)
    assert [name for name in names_in(root) if not name.startswith(".")] == []  # nothing is there before the rename
    gate.open.set()
    saving.wait()
    assert names_in(root) == ["it-00000010", "latest"]


def test_only_one_is_in_flight_and_the_next_one_waits_for_it(root):
    running, most = [], []

    def write(directory):
        running.append(1)
        most.append(len(running))
        save(directory)
        running.pop()

    saving = saving_to(root, lambda names: (write, True))
    for iteration in range(20):
        saving.requests.add("latest", "error")
        at(saving, 1, iteration, "train").save_requested()
    at(saving, 1, 20).save_latest()
    assert most == [1] * 21
    assert names_in(root) == ["it-00000020", "latest"]


def test_the_thread_ends_when_all_is_written_and_another_checkpoint_gets_a_new_one(root):
    others = threading.enumerate()

    def threads():
        return [each.name for each in threading.enumerate() if each not in others]

    saving = saving_to(root, lambda names: (save, True))
    saving.close()
    for iteration in (1, 2):
        saving.requests.add("latest", "error")
        at(saving, 0, iteration, "train").save_requested()
        assert threads() == ["emrun checkpoint_0"]
        saving.close()
        assert threads() == []
        assert find(root, "latest").name == f"it-{iteration:08}"


def test_an_error_in_the_background_is_noticed_at_once_and_raised_by_the_next_call(root):
    told = threading.Event()
    gate = Gate(OSError(errno.ENOSPC, "No space left on device"))
    saving = saving_to(root, lambda names: (gate, True), notice=told.set)
    saving.requests.add("best", "error")
    at(saving, 1, 10, "train").save_requested()
    gate.open.set()
    assert told.wait(60)
    with pytest.raises(StorageError, match="the disk is full"):
        saving.wait()
    saving.wait()  # it is raised once


def test_an_error_in_the_background_is_raised_even_if_nothing_is_requested(root):
    told = threading.Event()
    gate = Gate(OSError(errno.ENOSPC, "No space left on device"))
    saving = saving_to(root, lambda names: (gate, True), notice=told.set)
    saving.requests.add("best", "error")
    at(saving, 1, 10, "train").save_requested()
    at(saving, 1, 11, "train").save_requested()  # which does not wait for it
    gate.open.set()
    assert told.wait(60)
    with pytest.raises(StorageError, match="the disk is full"):
        at(saving, 1, 12, "train").save_requested()


def test_an_error_of_the_model_is_raised_as_it_is(root):
    gate = Gate(ZeroDivisionError("in the model"))
    saving = saving_to(root, lambda names: (gate, True))
    saving.requests.add("latest", "error")
    at(saving, 1, 10, "train").save_requested()
    gate.open.set()
    with pytest.raises(ZeroDivisionError, match="in the model"):
        at(saving, 1, 11, "train").save_latest()


def test_the_same_state_is_only_named_also_while_it_is_written(root):
    gate = Gate()
    saving = saving_to(root, lambda names: (gate, True))
    saving.requests.add("latest", "error")
    at(saving, 1, 10).save_requested()
    assert gate.began.wait(60)
    gate.open.set()
    gate.began.clear()
    saving.requests.add("best", "error")
    at(saving, 1, 10).save_latest()
    assert not gate.began.is_set()
    assert (root / "best").readlink() == (root / "latest").readlink()


class Counting(TorchModel):
    """Saves an additional file."""

    def save(self, directory):
        super().save(directory)
        (directory / "more.txt").write_text("more")


def test_a_model_that_saves_in_its_own_way_is_waited_for(tmp_path):
    optimizer = Factory(torch.optim.SGD, lr=0.1)
    for kind, stages in ((TorchModel, True), (Counting, False)):
        model = kind(torch.nn.Linear(1, 1), outputs=["y"], optimizer=optimizer)
        assert (model.stage() is not None) is stages


def test_what_was_staged_does_not_change_with_the_model(tmp_path):
    model = TorchModel(torch.nn.Linear(3, 2), outputs=["y"])
    before = model.module.weight.detach().clone()
    write = model.stage()
    with torch.no_grad():
        model.module.weight.add_(1)
    write(tmp_path)
    model.load(tmp_path)
    assert torch.equal(model.module.weight, before)


# --- after_checkpoint -------------------------------------------------------------------------------------------------


class Told(AbstractHook):
    """Keeps what `after_checkpoint` tells, and the thread; raises `error` at the second call."""

    def __init__(self, error=None, at=2):
        super().__init__()
        self.told = []
        self.error, self.at = error, at

    def after_checkpoint(self, name, directory):
        assert threading.current_thread() is threading.main_thread()
        self.told.append((name, verify(directory).iteration, directory.name))
        torch.rand(3)
        if self.error is not None and len(self.told) == self.at:
            raise self.error

    def after_training(self):
        self.told.append("the end")


@pytest.fixture
def train_told(tmp_path, background):
    """Train with a hook `Told` for two epochs of three batches each."""

    def train(told, *hooks, epochs=2, name="run"):
        model = Doubler()
        if background:
            model.stage = lambda: model.save
        run = create_run("", "run", output_root=tmp_path, output_dir=tmp_path / name, seed=0)
        loop = MainLoop(model, SixExamples(), [*hooks, told, StopAfter(epochs=epochs)], run=run)
        loop.run_training()
        return loop

    return train


def test_after_checkpoint_is_called_once_for_each_name_before_the_end(train_told):
    told = Told()
    train_told(told, SaveLatest(), SaveEvery())
    assert told.told == [
        ("epoch-0", 0, "it-00000000"), ("latest", 0, "it-00000000"),
        ("epoch-1", 3, "it-00000003"), ("latest", 3, "it-00000003"),
        ("epoch-2", 6, "it-00000006"), ("latest", 6, "it-00000006"),
        "the end",
    ]  # fmt: skip


@pytest.mark.parametrize("background", [True])
def test_after_checkpoint_comes_with_the_next_batch_after_the_commit(train_told):
    committed, batches = threading.Event(), []

    class Wait(AbstractHook):
        def after_batch(self):
            if self.main_loop.training:
                batches.append(len(told.told))
                if self.main_loop.iterations_done == 2:
                    assert committed.wait(60)

    class Noticed(Told):
        def register_mainloop(self, main_loop):
            super().register_mainloop(main_loop)
            saving = main_loop.parts.checkpointer
            notice = saving.notice
            saving.notice = lambda: (notice(), committed.set())

    told = Noticed()
    train_told(told, SaveEvery(every="1 iteration", keep=1), Wait(), epochs=1)
    assert batches[2] >= 1  # the checkpoint of iteration 1 was told of after batch 2


def test_after_checkpoint_comes_before_the_next_commit_begins(train_told, monkeypatch):
    told, begun = Told(), []

    def note(*arguments, **more):
        begun.append((more["iteration"], [each[1] for each in told.told]))
        return commit(*arguments, **more)

    monkeypatch.setattr("emrun.loop.checkpointer.commit", note)
    train_told(told, SaveEvery(every="1 update"), epochs=1)
    assert begun == [(1, []), (2, [1]), (3, [1, 2]), (3, [1, 2, 3])]  # the last one is the end of the epoch


def test_after_checkpoint_does_not_change_random_states(train_told):
    class Draw(AbstractHook):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def after_batch(self):
            self.drawn.append(torch.rand(()).item())

    drawn = []
    for hooks in ([Told()], []):
        torch.manual_seed(1)
        draw = Draw()
        train_told(draw, SaveEvery(every="1 update"), *hooks, name=f"with {len(hooks)}")
        drawn.append(draw.drawn)
    assert drawn[0] == drawn[1]


def test_a_termination_in_after_checkpoint_ends_the_training(train_told):
    told = Told(TrainingTerminated("uploaded"))
    loop = train_told(told, SaveEvery(), epochs=9)
    assert (loop.outcome.status, loop.outcome.reason) == ("finished", "uploaded")
    assert loop.training_epochs_done < 9
    assert verify(find(loop.run.checkpoints, "latest")).iteration == loop.iterations_done


@pytest.mark.parametrize("background", [True])
def test_an_error_in_after_checkpoint_at_the_end_does_not_cost_the_last_checkpoint(train_told, tmp_path):
    told = Told(RuntimeError("no network"), at=3)
    with pytest.raises(RuntimeError, match="no network"):
        train_told(told, SaveEvery())
    assert verify(find(tmp_path / "run" / "checkpoints", "latest")).iteration == 6
    assert "reason: 'RuntimeError: no network'" in (tmp_path / "run" / "trace.yaml").read_text()
    assert told.told[-1] == "the end"


@pytest.mark.parametrize("background", [True])
def test_an_error_in_after_checkpoint_does_not_cost_the_checkpoint_that_is_requested_then(
    train_told, tmp_path, monkeypatch
):
    ended = threading.Event()

    class EndOfEpoch(AbstractHook):
        def after_epoch(self, epoch_id):
            if epoch_id == 1:
                ended.set()

    def late(*arguments, **more):
        assert ended.wait(60)
        return commit(*arguments, **more)

    monkeypatch.setattr("emrun.loop.checkpointer.commit", late)
    told = Told(RuntimeError("no network"), at=1)
    with pytest.raises(RuntimeError, match="no network"):
        train_told(told, EndOfEpoch(), SaveEvery(), SaveLatest())
    assert verify(find(tmp_path / "run" / "checkpoints", "epoch-1")).iteration == 3
    assert [each[0] for each in told.told[:2]] == ["epoch-0", "latest"]


def test_a_checkpoint_that_was_not_saved_is_not_told_of(train_told, monkeypatch, caplog):
    def fail(*arguments, **more):
        if more["iteration"] == 3:
            raise StorageError("full")
        return commit(*arguments, **more)

    monkeypatch.setattr("emrun.loop.checkpointer.commit", fail)
    told = Told()
    train_told(told, SaveEvery(on_failure="warn"))
    assert [each[:2] for each in told.told[:-1]] == [("epoch-0", 0), ("epoch-2", 6), ("latest", 6)]
    assert "no checkpoint was saved: full" in caplog.text
