"""Where the time of an epoch went, in the log, and the verdict."""

import logging
import re
from array import array

import pytest

from emrun.hooks import LogProfile
from emrun.hooks._time_shares import Times, verdict

AHEAD = {"buffer": 0, "workers": 0}


def seconds(*values):
    return array("d", values)


def profile(**parts):
    return {name: seconds(*values) for name, values in parts.items()}


def test_the_shares_of_an_epoch_are_what_its_parts_took():
    found = Times.of(
        profile(
            read_batch_train=[1.0, 2.0], read_batch_valid=[1.0], eval_batch_train=[2.5, 2.0], eval_batch_valid=[1.0],
            hook_WriteCSV=[1.0], hooks_in_updates=[0.5], save_checkpoints=[0.5, 0.25], hooks_in_checkpoints=[0.25],
            batch_length_train=[32, 28], batch_length_valid=[50],
        ),
        ["train", "valid"], ["train"], 16.0,
    )  # fmt: skip
    assert found.shares() == {
        "model": 5 / 16, "reading": 4 / 16, "hooks": 1 / 16, "checkpoints": 0.5 / 16, "other": 5.5 / 16
    }  # fmt: skip
    assert sum(found.shares().values()) == pytest.approx(1)
    assert found.rate("train") == pytest.approx(60 / 7)
    assert found.rate("valid") == pytest.approx(50 / 2)
    assert found.evaluating() == pytest.approx(2 / 16)


def test_parts_that_took_longer_than_the_epoch_are_the_epoch():
    found = Times.of(profile(read_batch_train=[3.0], eval_batch_train=[1.0]), ["train"], ["train"], 2.0)
    assert found.shares() == {"model": 0.25, "reading": 0.75, "hooks": 0, "checkpoints": 0, "other": 0}


def test_times_of_epochs_add_up():
    total = Times()
    for _ in range(2):
        total.add(Times.of(profile(read_batch_train=[1.0], hook_A=[1.0]), ["train"], ["train"], 4.0))
    assert (total.seconds, total.reading, total.hooks) == (8.0, {"train": 2.0}, {"A": 2.0})


def test_the_limits_of_the_process_are_read_once_in_a_run(train_digits, monkeypatch):
    calls = []
    monkeypatch.setattr("emrun.hooks.log_profile.cores", lambda: calls.append(1) or 2)
    train_digits(["LogProfile", {"StopAfter": {"epochs": 2}}], batch_size=500)
    assert len(calls) == 1


def of(**parts):
    return Times.of(profile(**parts), ["train", "valid"], ["train"], 10.0)


@pytest.mark.parametrize(("times", "ahead", "cores", "subject", "advice"), [
    (of(read_batch_train=[6.2]), AHEAD, 4, "reading", "waits for data 62% of the time: main_loop.workers: 2"),
    (of(read_batch_train=[6.2]), AHEAD, 1, "reading", "main_loop.buffer: 4"),
    (of(read_batch_train=[6.2]), {"buffer": 4, "workers": 0}, 1, "reading", "make the dataset faster"),
    (of(read_batch_train=[6.2]), {"buffer": 0, "workers": 2}, 8, "reading", "main_loop.workers: 4 instead of 2"),
    (of(read_batch_train=[6.2]), {"buffer": 0, "workers": 2}, 2, "reading", "is 2 on 2 processors, so make the data"),
    (of(eval_batch_train=[3.0], eval_batch_valid=[6.0]), AHEAD, 2, "evaluations", "[{valid: 5 epochs}]"),
    (of(eval_batch_train=[6.0], hook_A=[0.5], hook_B=[1.5]), AHEAD, 2, "hooks", "hooks take 20% of the time, B 15%"),
    (of(eval_batch_train=[6.0], save_checkpoints=[2.0]), AHEAD, 2, "checkpoints", "save less often"),
    (of(eval_batch_train=[3.0]), AHEAD, 2, "other", "70% of the time is around the batches"),
    (of(eval_batch_train=[9.0]), AHEAD, 2, "model", "the model takes 90% of the time"),
])  # fmt: skip
def test_the_verdict_names_what_to_change(times, ahead, cores, subject, advice):
    found, text = verdict(times, ahead, ["valid"], cores)
    assert found == subject
    assert advice in text


def test_a_run_logs_the_shares_of_each_epoch_and_of_all(train_digits, in_docstring, caplog):
    caplog.set_level(logging.INFO)
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, *in_docstring(LogProfile), {"StopAfter": {"epochs": 2}}]
    train_digits(hooks, batch_size=300, workers=1)
    lines = [each.getMessage() for each in caplog.records if each.name == "emrun.hooks.log_profile"]
    shares = [line for line in lines if re.match(r"(epoch \d|2 epochs), .*: model \d+%", line)]
    assert [line.split(",")[0] for line in shares] == ["epoch 0", "epoch 1", "epoch 2", "2 epochs"]
    for line in shares:
        found = re.findall(r"(?:model|reading|hooks|checkpoints|other) (\d+)%", line)
        assert len(found) == 5
        assert 97 <= sum(map(int, found)) <= 103, line  # rounded
        assert re.search(r"train [\d,]+ examples/s, valid [\d,]+ examples/s; memory \d+(\.\d+)? [MG]B", line)
    assert "(ComputeStats " in shares[-1] or "(LogProfile" in shares[-1] or "(StopAfter" in shares[-1]
    assert any(re.search(r"of the time", line) for line in lines[-1:])


def test_hooks_are_timed_only_if_a_hook_asks_for_the_times(train_digits):
    plain = train_digits([{"ComputeStats": {"variables": ["loss"]}}]).main_loop
    timed = train_digits([{"ComputeStats": {"variables": ["loss"]}}, "LogProfile"]).main_loop
    assert plain.parts.callbacks.profiling is None
    profile = timed.parts.callbacks.profiling.seconds
    assert profile["hook_ComputeStats"][0] > 0
    assert list(profile["batch_length_valid"]) == [100, 80]
