"""ShowProgress: a bar on a terminal, nothing elsewhere."""

import io
import os
import re
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
from campaign import thinned
from tqdm import TMonitor

from emrun import AbstractHook, MainLoop
from emrun.hooks import SaveEvery, ShowProgress, StopAfter, show_progress
from emrun.storage.checkpoints import finding

CONFIG = """
seed: 1
dataset: {class: Digits, flat: true, batch_size: 100}
model:
  module: {class: torch.nn.Linear, in_features: 64, out_features: 10}
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  optimizer: {class: SGD, lr: 0.1}
main_loop: {extra_streams: [valid]}
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - ShowProgress
  - StopAfter: {epochs: 1}
"""


class Terminal(io.StringIO):
    """Takes what is written to a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(show_progress, "sys", SimpleNamespace(stderr=terminal))  # pytest sets sys.stderr back
    return terminal


def bars(text):
    """Return the bars in the order in which they appeared: (epoch, stream) -> total, None when it is not known."""
    found = {}
    for epoch, stream, rest in re.findall(r"epoch (\d+) (\w+): ([^\r\n]*)", text):
        total = re.search(r"\d+/(\d+) ", rest)
        found.setdefault((int(epoch), stream), int(total.group(1)) if total else None)
    return found


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring, terminal):
    train_digits(in_docstring(ShowProgress))
    assert bars(terminal.getvalue()) == {(0, "train"): 15, (0, "valid"): 2, (1, "train"): 15, (1, "valid"): 2}


def test_a_terminal_shows_a_bar_for_each_stream(tmp_path, emrun_on_terminal):
    (tmp_path / "config.yaml").write_text(CONFIG)
    status, table, text = emrun_on_terminal("train", "config.yaml")
    assert status == 0
    assert bars(text) == {(0, "train"): 15, (0, "valid"): 2, (1, "train"): 15, (1, "valid"): 2}
    assert "epoch 1  valid  loss" in text  # log lines stand above the bar
    assert "epoch 1 " not in table
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    assert not [line for line in lines if "batch" in line]  # no bar is left


@pytest.mark.parametrize("option", thinned(["--no-progress", "-q"], ["--no-progress"]))
def test_a_terminal_shows_no_bar_when_none_is_wanted(tmp_path, emrun_on_terminal, option):
    (tmp_path / "config.yaml").write_text(CONFIG)
    status, _, text = emrun_on_terminal("train", option, "config.yaml")
    assert status == 0
    assert not bars(text)
    assert ("epoch 1  valid  loss" in text) is (option == "--no-progress")


def test_nothing_is_written_when_standard_error_is_not_a_terminal(tmp_path, emrun_here):
    (tmp_path / "config.yaml").write_text(CONFIG)
    finished = emrun_here("train", "config.yaml")
    assert finished.returncode == 0
    assert "\r" not in finished.stdout + finished.stderr
    assert "batch" not in finished.stdout + finished.stderr
    assert "epoch 1  valid  loss" in finished.stderr


def test_the_length_is_that_of_the_pass_before_when_the_dataset_does_not_tell(scripted, numbers, terminal):
    hooks = [ShowProgress(dataset=numbers), StopAfter(epochs=1)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"]).run_training()
    assert bars(terminal.getvalue()) == {(0, "train"): None, (0, "valid"): None, (1, "train"): 3, (1, "valid"): 1}


def test_the_length_is_that_of_the_dataset_when_it_tells(scripted, numbers, terminal):
    numbers.num_batches = {"train": 30}
    MainLoop(scripted(), numbers, [ShowProgress(dataset=numbers), StopAfter(epochs=0)]).run_training()
    assert bars(terminal.getvalue()) == {(0, "train"): 30}
    assert numbers.num_batches == {"train": 30}


def test_the_length_is_that_of_fixed_epochs(scripted, numbers, terminal):
    numbers.num_batches = {"train": 3, "valid": 1}
    hooks = [ShowProgress(dataset=numbers), StopAfter(epochs=2)]
    MainLoop(scripted(), numbers, hooks, fixed_epoch_size=2, skip_zeroth_epoch=True).run_training()
    assert bars(terminal.getvalue()) == {(1, "train"): 2, (2, "train"): 2}


def test_a_bar_is_removed_when_the_training_fails(scripted, numbers, terminal):
    class Fail(AbstractHook):
        def after_batch(self):
            raise RuntimeError("broken")

    loop = MainLoop(scripted(), numbers, [ShowProgress(), Fail()])
    with pytest.raises(RuntimeError, match=r"broken"):
        loop.run_training()
    *_, shown, blanks, rest = terminal.getvalue().split("\r")
    assert shown.startswith("epoch 0 train")
    assert blanks.strip() == rest == ""


def test_no_thread_is_started(scripted, numbers, terminal):
    class Look(AbstractHook):
        def after_batch(self):
            assert not [thread for thread in threading.enumerate() if isinstance(thread, TMonitor)]

    MainLoop(scripted(), numbers, [ShowProgress(), Look(), StopAfter(epochs=1)]).run_training()
    assert bars(terminal.getvalue())


AT_THE_END = 1  # the loop looks whether the loss of an epoch's last step is finite


class Loss:
    """A loss on a device: counts how often its value is read."""

    def __init__(self):
        self.reads = 0

    def __float__(self):
        self.reads += 1
        return 0.125


def test_the_bar_of_a_training_shows_the_loss_without_any_statistics(train_digits, terminal):
    train_digits(["ShowProgress"])
    trained = re.findall(r"epoch 1 train: [^\r\n]*", terminal.getvalue())
    assert re.search(r", loss 2\.\d+\]", trained[0])
    assert "loss" not in "".join(re.findall(r"epoch \d valid: [^\r\n]*|epoch 0 train: [^\r\n]*", terminal.getvalue()))


def test_the_loss_is_read_only_when_the_bar_is_drawn(scripted, terminal):
    class Many:
        def train_stream(self):
            return ({"x": [1.0]} for _ in range(2000))

    model, loss = scripted(), Loss()
    model.step_values = lambda: {"loss": loss}
    MainLoop(model, Many(), [ShowProgress(), StopAfter(epochs=1)], skip_zeroth_epoch=True).run_training()
    assert "loss 0.125" in terminal.getvalue()
    assert loss.reads - AT_THE_END == terminal.getvalue().count("loss 0.125") < 100


def test_the_loss_is_not_read_where_no_bar_is_shown(scripted, numbers, monkeypatch):
    monkeypatch.setattr(show_progress, "sys", SimpleNamespace(stderr=io.StringIO()))
    model, loss = scripted(), Loss()
    model.step_values = lambda: {"loss": loss}
    MainLoop(model, numbers, [ShowProgress(), StopAfter(epochs=1)]).run_training()
    assert loss.reads == AT_THE_END


def test_a_terminal_without_a_size_shows_a_bar_of_80_columns(monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal, os.fdopen(leader, "rb", buffering=0) as shown:
        monkeypatch.setattr(show_progress, "sys", SimpleNamespace(stderr=terminal))
        hook = ShowProgress()
        hook.main_loop = SimpleNamespace(training=False)
        hook.after_batch("valid")
        text = shown.read(4096).decode()
        hook.after_training(True)
    assert "epoch 0 valid: " in text


class Passes(AbstractHook):
    """A clock that four seconds pass on with every batch."""

    def __init__(self):
        super().__init__()
        self.now = 100.0

    def before_batch(self):
        self.now += 4


class Four:
    """Four batches a stream."""

    num_batches: ClassVar = {"train": 4, "valid": 40}

    def train_stream(self):
        return [{"x": [1.0]}] * 4

    def valid_stream(self):
        return [{"x": [1.0]}] * 40


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"epochs": 2}, [None, "00:24", "00:20", "00:16", "00:12", "00:08", "00:04", "00:00"]),
        ({"iterations": 6}, [None, "00:16", "00:12", "00:08", "00:04", "00:00"]),
        ({"epochs": 2, "iterations": 5}, [None, "00:12", "00:08", "00:04", "00:00"]),
        ({"minutes": 1 / 3, "epochs": 2}, [None, "00:24", "00:20", "00:16", "00:12"]),  # minutes are not looked at
    ],
)
def test_the_bar_shows_the_time_left_of_the_run(scripted, terminal, monkeypatch, limits, expected):
    clock = Passes()
    monkeypatch.setattr(show_progress, "_SECONDS", 0)
    hooks = [clock, ShowProgress(dataset=Four()), StopAfter(**limits)]
    monkeypatch.setattr(show_progress, "monotonic", lambda: clock.now)
    hooks[2].clock = lambda: clock.now
    MainLoop(scripted(), Four(), hooks, skip_zeroth_epoch=True).run_training()
    found = re.findall(r"epoch (\d) train: [^\r]*? (\d)/4 \[[^\r]*?(?:run ([\d:]+) left)?\]", terminal.getvalue())
    shown = {(int(epoch), int(batch)): left or None for epoch, batch, left in found if batch != "0"}
    assert list(shown.values()) == expected


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, r"epoch 1 train:  75%\|\S{60,} +\| 3/4 \[00:\d\d<00:\d\d, [\d.]+ \S+, loss 0.125, run 00:08 left\]"),
        (80, r"epoch 1 train:  75%\|\S{4,} +\| 3/4 \[00:\d\d<00:\d\d, loss 0.125, run 00:08 left\]"),
        (60, r"epoch 1 train:  75%\|\S{4,} +\| 3/4 \[00:\d\d<00:\d\d, loss 0.125\]"),
        (45, r"epoch 1 train:  75%\|\S{4,} +\| 3/4 \[loss 0.125\]"),
        (32, r"epoch 1 train:  75%\|\S{4,} +\| 3/4"),
    ],
)
def test_a_narrow_bar_leaves_out_the_rate_then_the_far_time(scripted, terminal, monkeypatch, width, shown):
    clock = Passes()
    monkeypatch.setattr(show_progress, "_SECONDS", 0)
    monkeypatch.setattr(show_progress, "width", lambda stream: width)
    monkeypatch.setattr(show_progress, "monotonic", lambda: clock.now)
    model = scripted()
    model.step_values = lambda: {"loss": Loss()}
    hooks = [clock, ShowProgress(dataset=Four()), StopAfter(updates=5)]
    MainLoop(model, Four(), hooks, skip_zeroth_epoch=True).run_training()
    lines = [each for each in re.split(r"[\r\n]+", terminal.getvalue()) if each.strip()]
    assert {len(each) for each in lines} == {width}
    assert [each for each in lines if re.fullmatch(shown, each)], lines


def test_a_long_epoch_has_lines_where_there_is_no_bar(scripted, monkeypatch, caplog):
    clock = Passes()
    monkeypatch.setattr(show_progress, "sys", SimpleNamespace(stderr=io.StringIO()))
    monkeypatch.setattr(show_progress, "monotonic", lambda: 15 * (clock.now - 100))  # a minute for each batch
    model = scripted()
    model.step_values = lambda: {"loss": Loss()}
    hooks = [clock, ShowProgress(dataset=Four()), StopAfter(epochs=1)]
    with caplog.at_level("INFO"):
        MainLoop(model, Four(), hooks, extra_streams=["valid"], skip_zeroth_epoch=True).run_training()
    assert [each.getMessage() for each in caplog.records if "batches" in each.getMessage()] == [
        "epoch 1  train  2 of 4 batches  loss 0.125  02:00 left  run 02:00 left",
        "epoch 1  valid  6 of 40 batches  34:00 left",
        "epoch 1  valid  16 of 40 batches  24:00 left",
        "epoch 1  valid  26 of 40 batches  14:00 left",
        "epoch 1  valid  36 of 40 batches  04:00 left",
    ]


def test_a_resumed_stream_is_counted_from_its_beginning(scripted, numbers, terminal, run):
    hooks = [ShowProgress(), SaveEvery(every="1 iterations"), StopAfter(iterations=1)]
    MainLoop(scripted(), numbers, hooks, fixed_epoch_size=3, skip_zeroth_epoch=True, run=run).run_training()
    hooks = [ShowProgress(), StopAfter(epochs=1)]
    loop = MainLoop(scripted(), numbers, hooks, fixed_epoch_size=3, skip_zeroth_epoch=True, run=run)
    loop.restore(finding.newest(run.directory / "checkpoints"))
    terminal.truncate(0)
    loop.run_training()
    assert re.findall(r" (\d)/3", terminal.getvalue())[0] == "1"


def test_the_bar_shows_no_time_left_without_a_limit(scripted, numbers, terminal):
    MainLoop(scripted(), numbers, [ShowProgress(), StopAfter(minutes=0.0001)]).run_training()
    assert "run" not in terminal.getvalue()
