"""WriteCSV: one header, one line per epoch, whatever the values."""

import csv
import logging

import numpy as np
import pytest
import torch

from emrun import AbstractHook, MainLoop, create_training, resume_training
from emrun.base.errors import ArgumentError, HookError, StateError
from emrun.hooks import StopAfter, WriteCSV
from emrun.training.create import train


class Loop:
    evaluating = False
    iterations_done = 0
    training_epochs_done = 0
    extra_streams = ("valid",)


def hook_of(directory, **arguments):
    hook = WriteCSV(output_dir=str(directory), **arguments)
    hook.main_loop = Loop()
    hook.before_training()
    return hook


def rows(path, delimiter=","):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_an_epoch_is_a_line_under_one_header(tmp_path):
    hook = hook_of(tmp_path)
    for epoch in (0, 1):
        hook.after_epoch(epoch, {"train": {"loss": {"mean": 0.5, "std": 3.0}}, "valid": {"loss": {"mean": epoch / 3}}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "valid_loss"],
        ["0", "0.5", "0.0"],
        ["1", "0.5", repr(1 / 3)],
    ]


def test_learning_rates_have_columns_of_the_train_stream_only(tmp_path):
    hook = hook_of(tmp_path)
    rates = {"learning_rate": 0.1, "learning_rate_1": 0.2}
    for epoch in (0, 1):
        hook.after_epoch(epoch, {"train": {**rates, "loss": {"mean": 0.5}}, "valid": {"loss": {"mean": 0.25}}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "train_learning_rate", "train_learning_rate_1", "valid_loss"],
        ["0", "0.5", "0.1", "0.2", "0.25"],
        ["1", "0.5", "0.1", "0.2", "0.25"],
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2, "2.0"),
        (np.float32(0.5), "0.5"),
        (torch.tensor(1.5), "1.5"),
        (np.array([1.0, np.nan, 3.0]), "2.0"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_of_any_kind_are_written(tmp_path, value, written):
    hook_of(tmp_path).after_epoch(0, {"train": {"v": value}, "valid": {"v": 1}})
    assert rows(tmp_path / "training.csv")[1][1] == written


def test_a_stream_that_is_not_evaluated_in_an_epoch_gets_the_default(tmp_path):
    hook = hook_of(tmp_path, default_value="-")
    hook.after_epoch(1, {"train": {"loss": 1}})
    hook.after_epoch(2, {"train": {"loss": 2}, "valid": {"loss": 3}})
    assert rows(tmp_path / "training.csv")[1:] == [["1", "1.0", "-"], ["2", "2.0", "3.0"]]


def test_names_and_values_are_quoted(tmp_path):
    hook_of(tmp_path, delimiter=";").after_epoch(0, {"train": {'a;"b': 1}, "valid": {'a;"b': 1}})
    assert rows(tmp_path / "training.csv", ";")[0] == ["epoch_id", 'train_a;"b', 'valid_a;"b']


def test_only_listed_variables_are_written(tmp_path):
    hook = hook_of(tmp_path, variables=["loss"], output_file="other.csv")
    hook.after_epoch(0, {"train": {"loss": 1, "b": 2}, "valid": {"loss": 1}})
    assert rows(tmp_path / "other.csv")[0] == ["epoch_id", "train_loss", "valid_loss"]


@pytest.mark.parametrize("value", ["text", None, {}])
@pytest.mark.parametrize("policy", ["error", "warn", "default"])
def test_a_value_that_is_missing_or_not_a_number_follows_the_policies(tmp_path, value, policy, caplog):
    hook = hook_of(tmp_path, on_unknown_type=policy, on_missing_variable=policy, default_value="?")
    data = {"train": {"v": 1.0}, "valid": {"v": value}}
    if policy == "error":
        with pytest.raises(HookError, match="valid/v"):
            hook.after_epoch(0, data)
        return
    with caplog.at_level(logging.WARNING):
        hook.after_epoch(0, data)
    assert rows(tmp_path / "training.csv")[1] == ["0", "1.0", "?"]
    assert ("valid/v" in caplog.text) is (policy == "warn")


def test_a_variable_without_a_mean_has_a_column_for_each_aggregation(tmp_path):
    hook = hook_of(tmp_path)
    hook.after_epoch(0, {"train": {"loss": {"std": 1.0, "max": 2.0}, "f1": {"mean": 0.5, "std": 0.1}}})
    hook.after_epoch(1, {"train": {"loss": {"std": 3.0, "max": 4.0}, "f1": {"mean": 0.6, "std": 0.1}},
                         "valid": {"loss": {"std": 5.0, "max": 6.0}, "f1": {"mean": 0.7, "std": 0.1}}})  # fmt: skip
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss_std", "train_loss_max", "train_f1", "valid_loss_std", "valid_loss_max", "valid_f1"],
        ["0", "1.0", "2.0", "0.5", "", "", ""],
        ["1", "3.0", "4.0", "0.6", "5.0", "6.0", "0.7"],
    ]


def test_an_aggregation_that_is_missing_later_follows_the_policy(tmp_path):
    hook = hook_of(tmp_path)
    hook.after_epoch(0, {"train": {"loss": {"std": 1.0}}})
    with pytest.raises(HookError, match="train/loss has no std"):
        hook.after_epoch(1, {"train": {"loss": {"max": 1.0}}})


@pytest.mark.parametrize("aggregations", [["std"], ["nanmean"]], ids=str)
def test_a_training_writes_aggregations_without_a_mean(train_digits, aggregations):
    training = train_digits([{"ComputeStats": {"variables": {"loss": aggregations}}}, "WriteCSV"])
    header, *lines = rows(training.output_dir / "training.csv")
    train_loss, valid_loss = (f"{stream}_loss_{aggregations[0]}" for stream in ("train", "valid"))
    assert header == ["epoch_id", train_loss, "train_learning_rate", valid_loss]
    assert len(lines) == 2
    assert all(float(cell) > 0 for line in lines for cell in line[1:])


def test_a_new_training_begins_the_file_anew(tmp_path):
    (tmp_path / "training.csv").write_text("old\n")
    hook_of(tmp_path).after_epoch(0, {"train": {"v": 1}})
    assert rows(tmp_path / "training.csv")[0][0] == "epoch_id"


def test_a_resumed_training_cuts_what_came_after_the_checkpoint(tmp_path):
    first = hook_of(tmp_path)
    first.after_epoch(0, {"train": {"v": 1}})
    state = first.state_dict()
    content = (tmp_path / "training.csv").read_text()
    first.after_epoch(1, {"train": {"v": 2}})
    second = WriteCSV(output_dir=str(tmp_path))
    second.main_loop = Loop()
    second.load_state_dict(state)
    second.before_training()
    assert (tmp_path / "training.csv").read_text() == content
    second.after_epoch(1, {"train": {"v": 2}})
    assert [row[0] for row in rows(tmp_path / "training.csv")] == ["epoch_id", "0", "1"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"output_file": "../a.csv"}, "output_file"),
        ({"output_file": ""}, "output_file"),
        ({"delimiter": ", "}, "delimiter"),
        ({"delimiter": '"'}, "delimiter"),
        ({"variables": "loss"}, "variables"),
        ({"every": "5 hours"}, "every"),
        ({"on_unknown_type": "ignore"}, "on_unknown_type"),
        ({"on_missing_variable": "ignore"}, "on_missing_variable"),
    ],
)
def test_wrong_arguments_are_refused(arguments, name, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        WriteCSV(output_dir=str(tmp_path), **arguments)
    assert caught.value.argument == name


# what cannot be written


@pytest.mark.parametrize("policy", ["error", "warn", "default"])
@pytest.mark.parametrize("value", [10**400, -(10**5000), [1, 10**400]], ids=["above", "far below", "in a list"])
def test_an_integer_that_no_float_can_hold_is_an_error_that_names_it(tmp_path, value, policy):
    hook = hook_of(tmp_path, on_unknown_type=policy)
    with pytest.raises(HookError) as caught:
        hook.after_epoch(0, {"train": {"n": value}, "valid": {"n": 1}})
    assert "WriteCSV: train/n is " in str(caught.value)
    assert "too large for a floating-point number; write a smaller number, or leave the variable out" in str(
        caught.value
    )
    assert not (tmp_path / "training.csv").exists()


def test_a_name_with_half_a_character_is_an_error_that_names_it(tmp_path):
    with pytest.raises(HookError, match=r"WriteCSV: .*'lo\\udc80ss' of stream 'train' has a lone surrogate, .*rename"):
        hook_of(tmp_path).after_epoch(0, {"train": {"lo\udc80ss": 1}, "valid": {"lo\udc80ss": 1}})
    assert not (tmp_path / "training.csv").exists()


@pytest.mark.parametrize("argument", ["default_value", "delimiter"])
def test_a_default_or_a_delimiter_with_half_a_character_is_an_error(tmp_path, argument):
    with pytest.raises(ArgumentError, match=rf"{argument}: '\\udc80' has a lone surrogate"):
        hook_of(tmp_path, **{argument: "\udc80"})


# a file that is changed


def test_a_file_that_is_deleted_meanwhile_gets_its_header_again(tmp_path, caplog):
    hook = hook_of(tmp_path)
    for epoch in (0, 1, 2):
        if epoch == 1:
            (tmp_path / "training.csv").unlink()
        hook.after_epoch(epoch, {"train": {"v": epoch}, "valid": {"v": 1}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_v", "valid_v"],
        ["1", "1.0", "1.0"],
        ["2", "2.0", "1.0"],
    ]
    assert "was deleted while the run writes it" in caplog.text


# variables that only some streams or only later epochs have


def test_a_variable_of_a_single_stream_has_a_single_column(tmp_path):
    hook = hook_of(tmp_path)
    hook.after_epoch(0, {"train": {"loss": 1}, "valid": {"loss": 2, "halvings": 3}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "valid_loss", "valid_halvings"],
        ["0", "1.0", "2.0", "3.0"],
    ]


def test_a_variable_that_comes_later_is_warned_of_once_with_what_gives_it_a_column(tmp_path, caplog):
    hook = hook_of(tmp_path)
    for epoch in (0, 1, 2):
        norm = {"gradient_norm": 1} if epoch else {}
        hook.after_epoch(epoch, {"train": {"loss": 1, **norm}, "valid": {"loss": 2}})
    assert caplog.messages == [
        "WriteCSV: train/gradient_norm is not written to training.csv, because the first epoch, which determines the "
        "columns, did not have it; to get the column, set variables: [loss, gradient_norm] and on_missing_variable: "
        "default"
    ]


def test_a_listed_variable_that_comes_later_has_its_column(tmp_path, caplog):
    hook = hook_of(tmp_path, variables=["loss", "gradient_norm"], on_missing_variable="default")
    for epoch in (0, 1):
        norm = {"gradient_norm": 5} if epoch else {}
        hook.after_epoch(epoch, {"train": {"loss": 1, **norm}, "valid": {"loss": 2}})
    assert rows(tmp_path / "training.csv")[0][:3] == ["epoch_id", "train_loss", "train_gradient_norm"]
    assert rows(tmp_path / "training.csv")[2][2] == "5.0"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("arguments", "value", "expected"),
    [
        ({"variables": ["loss", "f1"]}, 1.0, "stream 'train' has no variable 'f1'; to write '' instead, set "
         "on_missing_variable: default"),
        ({"on_unknown_type": "error"}, "x", "train/loss is str, not a number; to write '' instead, set "
         "on_unknown_type: default"),
    ],
)  # fmt: skip
def test_the_error_names_the_argument_to_set(tmp_path, arguments, value, expected):
    with pytest.raises(HookError) as caught:
        hook_of(tmp_path, **arguments).after_epoch(0, {"train": {"loss": value}})
    assert str(caught.value) == f"WriteCSV: {expected}"


# --- lines between epochs ---------------------------------------------------------------------------------------------

STATS = {"ComputeStats": {"variables": ["loss", {"accuracy": ["mean", "std"]}]}}


class Losses(AbstractHook):
    """Keeps the mean loss of each batch that was trained on."""

    def __init__(self):
        super().__init__()
        self.means = []

    def after_batch(self, batch_data):
        if self.main_loop.training:
            self.means.append(batch_data["loss"].double().mean().item())


def test_fewer_lines(train_digits):
    training = train_digits([STATS, {"WriteCSV": {"every": "2 epochs"}}, {"StopAfter": {"epochs": 5}}])
    assert [row[0] for row in rows(training.output_dir / "training.csv")] == ["epoch_id", "0", "2", "4"]


def test_lines_between_epochs_have_the_means_since_the_last_line(digits_config, tmp_path):
    every = {"WriteCSV": {"every": "6 updates", "default_value": "-"}}
    training = create_training(digits_config([STATS, every, {"StopAfter": {"epochs": 2}}]), output_dir=tmp_path / "run")
    loop, losses = training.main_loop, Losses()
    loop.change_hooks([*loop.hooks, losses])
    train(training)
    header, *lines = rows(tmp_path / "run" / "training.csv")
    of_train = ["train_loss", "train_accuracy", "train_learning_rate"]
    assert header == ["epoch_id", "iteration", *of_train, "valid_loss", "valid_accuracy"]
    length = len(losses.means) // 2
    assert length == 15
    due = [6, 12, 15, 18, 24, 30, 30]
    assert [int(row[1]) for row in lines] == [0, *due]
    assert [int(row[0]) for row in lines] == [0, 1, 1, 1, 2, 2, 2, 2]
    between = [row for row in lines if row[5:] == ["-", "-"]]
    assert {row[4] for row in lines} == {"0.5"}
    assert [int(row[1]) for row in between] == [6, 12, 18, 24, 30]
    first, second = (float(row[2]) for row in between[:2])
    assert first == pytest.approx(np.mean(losses.means[:6]), rel=1e-6)
    assert second == pytest.approx(np.mean(losses.means[6:12]), rel=1e-6)
    ends = [float(row[2]) for row in lines if row[1] == str(length) and row not in between]
    assert ends == [loop.run.metrics[1]["streams"]["train"]["loss"]["mean"]]


@pytest.mark.parametrize("skip_zeroth_epoch", [False, True])
@pytest.mark.parametrize("iterations", [14, 16, 21])
def test_a_resumed_run_writes_the_same_bytes(tmp_path, digits_config, iterations, skip_zeroth_epoch):
    hooks = [STATS, {"WriteCSV": {"every": "4 iterations"}}, {"StopAfter": {"epochs": 2}}]
    config = digits_config(hooks, skip_zeroth_epoch=skip_zeroth_epoch)
    train(create_training(config, output_dir=tmp_path / "straight"))
    directory = tmp_path / "resumed"
    train(create_training(config, output_dir=directory, overrides=[f"hooks.StopAfter.iterations={iterations}"]))
    with (directory / "training.csv").open("a") as file:
        file.write("2,99,1.0,,,\n")  # written after the checkpoint, by a process that was killed
    train(resume_training(directory, overrides=["~hooks.StopAfter.iterations"]))
    content = (directory / "training.csv").read_bytes()
    assert content == (tmp_path / "straight" / "training.csv").read_bytes()
    assert content.count(b"\n") > 8


def test_a_file_with_lines_between_epochs_that_lost_some_keeps_the_others(tmp_path, digits_config, caplog):
    config = digits_config([STATS, {"WriteCSV": {"every": "4 updates"}}, {"StopAfter": {"epochs": 1}}])
    train(create_training(config, output_dir=tmp_path / "run"))
    path = tmp_path / "run" / "training.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], *lines[4:], "2,99,1.0,,,\n"]))
    train(resume_training(tmp_path / "run", overrides=["hooks.StopAfter.epochs=2"]))
    after = path.read_text().splitlines(keepends=True)
    assert after[: len(lines) - 1] == [*lines[:3], *lines[4:]]
    assert "2,99" not in path.read_text()
    assert "has lost lines since the checkpoint" in caplog.text


def test_a_resume_does_not_begin_or_end_lines_between_epochs(tmp_path, digits_config):
    config = digits_config([STATS, "WriteCSV", {"StopAfter": {"epochs": 1}}])
    train(create_training(config, output_dir=tmp_path / "run"))
    with pytest.raises(
        StateError, match="every is 4 updates, but the file of the checkpoint has no lines between epochs"
    ):
        resume_training(tmp_path / "run", overrides=["hooks.WriteCSV.every=4 updates", "hooks.StopAfter.epochs=2"])


def test_batches_without_any_of_the_variables_are_an_error(scripted, numbers, write, tmp_path):
    hooks = [write([1, 2], "train", "accuracy"), WriteCSV(tmp_path, every="4 updates"), StopAfter(epochs=1)]
    expected = "WriteCSV writes the means of accuracy between epochs, but the batches of the train stream have x, loss"
    with pytest.raises(HookError, match=expected):
        MainLoop(scripted(), numbers, hooks).run_training()
