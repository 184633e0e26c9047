"""LogVariables: the line of each stream, and what happens to values that are not numbers."""

import logging
import re

import numpy as np
import pytest

from emrun import AbstractHook, MainLoop, create_training, read_steps, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import ComputeStats, LogVariables, StopAfter
from emrun.record.rows import Reader
from emrun.record.running_stats import RunningStats
from emrun.training.create import train


class Fill(AbstractHook):
    """Replaces the data of an epoch."""

    def __init__(self, data):
        super().__init__()
        self.data = data
        self.writes = list(dict.fromkeys(name for variables in data.values() for name in variables))

    def after_epoch(self, epoch_data):
        epoch_data.clear()
        epoch_data.update(self.data)


def without_seconds(line):
    """Return a line of the log without what the clock decides."""
    return re.sub(r"\S+ s( since the resume)?$", "? s", line)


@pytest.fixture
def log(caplog, scripted, numbers):
    """Return the messages about an epoch, the third, with the given data."""
    caplog.set_level(logging.INFO)

    def lines(epoch_data, **arguments):
        loop = MainLoop(scripted(), numbers, [Fill(epoch_data), LogVariables(**arguments)])
        loop.start_from(3, 9)
        loop.run_evaluation("valid")
        return [record.getMessage() for record in caplog.records if record.name == "emrun.hooks.log_variables"]

    return lines


def test_the_yaml_in_its_docstring_trains_and_logs(train_digits, in_docstring, caplog):
    caplog.set_level(logging.INFO)
    train_digits(in_docstring(LogVariables), batch_size=500)
    lines = [record.getMessage() for record in caplog.records if record.name == "emrun.hooks.log_variables"]
    assert [line.split()[:4] for line in lines] == [
        ["epoch", str(epoch), stream, "loss"] for epoch in (0, 1) for stream in ("train", "valid")
    ]


def test_the_lines_are_in_the_log_of_the_run(in_docstring, tmp_path, digits_config):
    config = digits_config([*in_docstring(LogVariables), {"StopAfter": {"epochs": 1}}], batch_size=200)
    training = create_training(config, output_root=tmp_path)
    train(training)
    assert "epoch 1  valid  loss 1." in (training.output_dir / "train.log").read_text()


def test_a_line_for_each_stream_with_all_variables(log):
    data = {"train": {"loss": {"mean": 0.124}, "accuracy": {"mean": 0.9611, "std": 0.2}}, "validation": {"count": 7}}
    assert log(data) == [
        "epoch 3  train       loss 0.1240  accuracy 0.9611  accuracy/std 0.2000",
        "epoch 3  validation  count 7",
    ]


def test_only_the_variables_that_are_named(log):
    data = {"train": {"loss": {"mean": 1.0}, "accuracy": {"mean": 0.5}}, "valid": {"accuracy": {"mean": 0.25}}}
    assert log(data, variables=["accuracy"]) == ["epoch 3  train  accuracy 0.5000", "epoch 3  valid  accuracy 0.2500"]


def test_a_stream_without_any_of_them_has_no_line(log):
    assert log({"train": {"loss": {"mean": 1.0}}, "valid": {}}) == ["epoch 3  train  loss 1.0000"]


def test_a_statistic_of_many_classes_has_its_mean_and_the_three_lowest(log):
    f1 = {"mean": 0.625, "cat": 0.75, "dog": 0.25, "eel": 1.0, "fox": 0.5, "gnu": float("nan")}
    assert log({"valid": {"f1": f1}}) == ["epoch 3  valid  f1 0.6250  lowest f1 dog 0.25, fox 0.5, cat 0.75"]
    for name in ("max", "nanfraction"):  # of ComputeStats, not of classes
        assert "f1/eel 1.0000" in log({"valid": {"f1": {**f1, name: 1.0}}})[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"), (1.0, "1.0000"), (-0.5, "-0.5000"), (1234.5678, "1234.5678"), (0.001, "0.0010"),
        (0.000999, "9.990e-04"), (10000.0, "1.000e+04"), (-1e-9, "-1.000e-09"), (1e300, "1.000e+300"),
        (float("nan"), "nan"), (float("inf"), "inf"), (5, "5"), (123456789, "123456789"),
        (np.float64(0.5), "0.5000"), (np.float32(0.5), "0.5000"), (np.float16(0.5), "0.5000"), (np.int64(5), "5"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_keep_their_digits(log, value, text):
    assert log({"train": {"loss": value}}) == [f"epoch 3  train  loss {text}"]


ODD = {"train": {"name": "best", "loss": {"mean": 1.0, "curve": [1, 2]}}}


def test_values_that_are_not_numbers_are_ignored_by_default(log):
    assert log(ODD) == ["epoch 3  train  loss 1.0000"]


def test_values_that_are_not_numbers_may_be_logged_as_strings(log):
    assert log(ODD, on_unknown_type="str") == ["epoch 3  train  name best  loss 1.0000  loss/curve [1, 2]"]


def test_values_that_are_not_numbers_may_cause_a_warning(log, caplog):
    lines = log(ODD, on_unknown_type="warn")
    assert lines == [
        "LogVariables: train/name is str, not a number",
        "LogVariables: train/loss/curve is list, not a number",
        "epoch 3  train  loss 1.0000",
    ]
    levels = [record.levelname for record in caplog.records if record.name == "emrun.hooks.log_variables"]
    assert levels == ["WARNING", "WARNING", "INFO"]


def test_values_that_are_not_numbers_may_be_errors(log):
    with pytest.raises(HookError, match=r"LogVariables: train/name is str, not a number; to allow such values, set"):
        log(ODD, on_unknown_type="error")


def test_an_error_of_an_unknown_type_fails_the_training(scripted, numbers, write):
    hooks = [write(["no number"] * 2, stream="train"), LogVariables(on_unknown_type="error"), StopAfter(epochs=1)]
    loop = MainLoop(scripted(), numbers, hooks)
    with pytest.raises(HookError):
        loop.run_training()
    assert loop.outcome.status == "failed"


def test_all_that_was_computed_is_logged_in_a_training(scripted, numbers, caplog):
    caplog.set_level(logging.INFO)
    hooks = [ComputeStats(["loss", {"x": ["max"]}]), LogVariables(), StopAfter(epochs=1)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"]).run_training()
    lines = [record.getMessage() for record in caplog.records if record.name == "emrun.hooks.log_variables"]
    assert [without_seconds(line) for line in lines[2:]] == [
        "epoch 1  train  loss 0.0000  x/max 5.0000  ? s",
        "epoch 1  valid  loss 0.0000  x/max 20.0000",
    ]


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"on_unknown_type": "fail"}, "on_unknown_type", "'fail' is not one of error, warn, str, ignore"),
        ({"variables": "loss"}, "variables", "'loss' is not a list of variables"),
        ({"variables": [3]}, "variables", "3 is neither a name nor"),
        (
            {"variables": [{"loss": "lst"}], "every": "5 updates"},
            "variables",
            "not an aggregation; did you mean 'last'?",
        ),
        ({"variables": [{"loss": ["max"]}]}, "variables", "set every to updates, or list them in ComputeStats"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        LogVariables(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_listed_variable_that_nothing_wrote_is_an_error_with_the_nearest_name():
    from emrun.base.errors import HookError

    hook = LogVariables(variables=["los"])
    with pytest.raises(HookError, match=r"wrote 'los'; did you mean 'loss'\?"):
        hook.after_epoch(0, {"train": {"loss": {"mean": 1.0}}})


def test_the_line_of_the_train_stream_ends_with_learning_rates_and_seconds(train_digits, caplog):
    caplog.set_level(logging.INFO)
    train_digits([{"ComputeStats": {"variables": ["loss"]}}, "LogVariables"], batch_size=500)
    lines = [record.getMessage() for record in caplog.records if record.name == "emrun.hooks.log_variables"]
    ends = [without_seconds(line).split("  ")[3:] for line in lines]
    assert ends == [["? s"], [], ["lr 0.5", "? s"], []]


class Rates(AbstractHook):
    """Lets the model say that it has these learning rates."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def before_training(self):
        self.main_loop.model.step_values = lambda: {"learning_rate": self.rates}


@pytest.mark.parametrize(
    ("rates", "text"),
    [([0.001], "lr 0.001"), ([0.5, 0.5], "lr 0.5"), ([3e-5, 0.01], "lr 3e-05 0.01"), ([], None)],
)
def test_learning_rates_that_differ_are_all_logged_even_without_statistics(scripted, numbers, caplog, rates, text):
    caplog.set_level(logging.INFO)
    MainLoop(scripted(), numbers, [Rates(rates), LogVariables(), StopAfter(epochs=1)]).run_training()
    lines = [record.getMessage() for record in caplog.records if record.name == "emrun.hooks.log_variables"]
    expected = ["epoch 0  train  ? s", "  ".join(filter(None, ["epoch 1  train", text, "? s"]))]
    assert [without_seconds(line) for line in lines] == expected


def test_lines_between_epochs_have_the_means_of_the_train_stream_since_the_last_line(train_digits, caplog):
    caplog.set_level(logging.INFO)
    train_digits([{"ComputeStats": {"variables": ["loss"]}}, {"LogVariables": {"every": "6 updates"}}])
    lines = [line for line in caplog.messages if line.startswith("epoch 1  ")]
    pattern = r"epoch 1  iteration (\d+)  train  loss \d\.\d{4}  lr 0\.5"
    between = [found.group(1) for found in (re.fullmatch(pattern, line) for line in lines) if found]
    assert between == ["6", "12"]
    assert [line.split()[2] for line in lines[2:]] == ["train", "valid"]


@pytest.mark.campaign  # test_write_csv.py has means between epochs, also after a resume
def test_aggregations_between_epochs_are_those_of_numpy_on_the_step_record_also_after_a_resume(
    tmp_path, digits_config, caplog
):
    caplog.set_level(logging.INFO)
    asked = {"loss": ["mean", "max", "std", "last"], "gradient_norm": ["min", "median", "std", "last"]}
    sinks = [{"LogVariables": {"variables": [asked], "every": "5 updates"}}, {"WriteCSV": {"every": "5 updates"}}]
    config = digits_config(["LogNorms", "ComputeStats", *sinks, {"StopAfter": {"epochs": 1}}])
    config["model"]["loss"]["reduction"] = "mean"
    train(create_training(config, output_dir=tmp_path / "straight"))
    (line,) = [each for each in caplog.messages if "iteration 10 " in each]
    names = [f"{name}/{each}".removesuffix("/mean") for name, those in asked.items() for each in those]
    assert re.findall(r"(\S+) \d", line)[2:-1] == names
    steps = read_steps(tmp_path / "straight")
    rows = [row for row in Reader(tmp_path / "straight").rows() if row.every == "5 updates"][:2]  # of equal batches
    for row, part in zip(rows, (slice(0, 5), slice(5, 10)), strict=True):
        for name, those in asked.items():
            values = steps[name][part]
            for each in those:
                expected = values[-1] if each == "last" else getattr(np, each)(values)
                assert row.means[f"{name}/{each}".removesuffix("/mean")] == pytest.approx(expected, rel=1e-6)
    assert "train_gradient_norm/median" in (tmp_path / "straight" / "training.csv").read_text().splitlines()[0]
    train(create_training(config, output_dir=tmp_path / "resumed", overrides=["hooks.StopAfter.iterations=8"]))
    train(resume_training(tmp_path / "resumed", overrides=["~hooks.StopAfter.iterations"]))
    again = [row.means for row in Reader(tmp_path / "resumed").rows() if row.every]
    assert again == [row.means for row in Reader(tmp_path / "straight").rows() if row.every]


@pytest.mark.campaign  # test_running_stats.py has what follows another object
def test_means_between_epochs_are_those_of_values_that_are_copied_for_them_alone(tmp_path, digits_config, monkeypatch):
    hooks = ["ComputeStats", {"WriteCSV": {"every": "4 updates"}}, {"StopAfter": {"epochs": 1}}]

    def means(name):
        config = digits_config(hooks, extra_streams=[], skip_zeroth_epoch=True)
        train(create_training(config, output_dir=tmp_path / name))
        return [row.means for row in Reader(tmp_path / name).rows() if row.every]

    shared = means("shared")
    monkeypatch.setattr(RunningStats, "follow", None)
    monkeypatch.setattr(RunningStats, "source", property(lambda stats: None, lambda stats, value: None), raising=False)
    assert means("alone") == shared
    assert {"loss", "accuracy"} <= {*shared[0]}


def test_a_run_that_fails_has_logged_and_recorded_the_means_up_to_there(tmp_path, digits_config, caplog):
    caplog.set_level(logging.INFO)
    seen = []

    class Fail(AbstractHook):
        def after_batch(self):
            if self.main_loop.iterations_done == 7:
                seen.extend(line.split()[3] for line in caplog.messages if "  iteration " in line)
                raise ValueError("seven")

    config = digits_config(["ComputeStats", {"LogVariables": {"every": "1 updates"}}], skip_zeroth_epoch=True)
    training = create_training(config, output_dir=tmp_path / "run")
    training.main_loop.change_hooks([*training.main_loop.hooks, Fail()])
    with pytest.raises(ValueError, match="seven"):
        train(training)
    assert seen == ["1", "2", "3", "4", "5", "6"]
    assert [row.iteration for row in Reader(tmp_path / "run").rows()] == [1, 2, 3, 4, 5, 6]


def test_fewer_lines(train_digits, caplog):
    caplog.set_level(logging.INFO)
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"LogVariables": {"every": 2}}, {"StopAfter": {"epochs": 2}}]
    train_digits(hooks, batch_size=500)
    assert [line[:12] for line in caplog.messages if "  valid  loss" in line] == ["epoch 0  val", "epoch 2  val"]


def test_a_resumed_run_logs_the_same_lines(tmp_path, digits_config, caplog):
    caplog.set_level(logging.INFO)
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"LogVariables": {"every": "4 updates"}}]
    config = digits_config([*hooks, {"StopAfter": {"epochs": 2}}], batch_size=200)

    def lines():
        found = [without_seconds(line) for line in caplog.messages if re.match(r"epoch \d+  ", line)]
        parts = [line.endswith("since the resume") for line in caplog.messages]
        caplog.clear()
        return found, sum(parts)

    train(create_training(config, output_dir=tmp_path / "straight"))
    straight, parts = lines()
    assert parts == 0
    train(create_training(config, output_dir=tmp_path / "resumed", overrides=["hooks.StopAfter.iterations=10"]))
    train(resume_training(tmp_path / "resumed", overrides=["~hooks.StopAfter.iterations"]))
    assert lines() == (straight, 1)
    assert len(straight) > 8


def test_a_variable_that_a_hook_does_not_write_in_every_epoch_is_left_out(train_digits, caplog):
    caplog.set_level(logging.INFO)
    train_digits(["LogNorms", {"LogVariables": {"variables": ["gradient_norm"]}}], batch_size=500)
    assert any("gradient_norm" in message for message in caplog.messages)
