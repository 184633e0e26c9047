"""WriteCSV: one header, one line per epoch, whatever the values."""

import csv
import itertools
import logging

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun import AbstractHook, MainLoop, create_training, resume_training
from emrun.base.errors import ArgumentError, HookError, UsageError
from emrun.hooks import StopAfter, WriteCSV
from emrun.record.metrics_log import MetricsLog
from emrun.storage.run import Run
from emrun.training.create import train


class Loop:
    evaluating = has_run = False
    iterations_done = 0
    training_epochs_done = 0
    extra_streams = ("valid",)
    train_stream_name = "train"

    def __init__(self):
        self.rows = MetricsLog(None)


def hook_of(directory, **arguments):
    hook = WriteCSV(output_dir=str(directory), **arguments)
    hook.register_mainloop(Loop())
    hook.before_training()
    return hook


def after_epoch(hook, epoch, data):
    hook.main_loop.rows.add_epoch(epoch, 0, 0, 0.1, data)


def rows(path, delimiter=","):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_an_epoch_is_a_line_under_one_header(tmp_path):
    hook = hook_of(tmp_path)
    for epoch in (0, 1):
        after_epoch(hook, epoch, {"train": {"loss": {"mean": 0.5, "std": 3.0}}, "valid": {"loss": {"mean": epoch / 3}}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "valid_loss"],
        ["0", "0.5", "0.0"],
        ["1", "0.5", repr(1 / 3)],
    ]


def test_learning_rates_have_columns_of_the_train_stream_only(tmp_path):
    hook = hook_of(tmp_path)
    rates = {"learning_rate": 0.1, "learning_rate_1": 0.2}
    for epoch in (0, 1):
        after_epoch(hook, epoch, {"train": {**rates, "loss": {"mean": 0.5}}, "valid": {"loss": {"mean": 0.25}}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "train_learning_rate", "train_learning_rate_1", "valid_loss"],
        ["0", "0.5", "0.1", "0.2", "0.25"],
        ["1", "0.5", "0.1", "0.2", "0.25"],
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2, "2"),
        (10**400, str(10**400)),
        (np.float32(0.5), "0.5"),
        (torch.tensor(1.5), "1.5"),
        (np.array([1.0, np.nan, 3.0]), ""),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_of_any_kind_are_written(tmp_path, value, written):
    after_epoch(hook_of(tmp_path), 0, {"train": {"v": value}, "valid": {"v": 1}})
    assert rows(tmp_path / "training.csv")[1][1] == written


def test_a_stream_that_is_not_evaluated_in_an_epoch_gets_the_default(tmp_path):
    hook = hook_of(tmp_path, default_value="-")
    after_epoch(hook, 1, {"train": {"loss": 1}})
    after_epoch(hook, 2, {"train": {"loss": 2}, "valid": {"loss": 3}})
    assert rows(tmp_path / "training.csv")[1:] == [["1", "1", "-"], ["2", "2", "3"]]


def test_names_and_values_are_quoted(tmp_path):
    after_epoch(hook_of(tmp_path, delimiter=";"), 0, {"train": {'a;"b': 1}, "valid": {'a;"b': 1}})
    assert rows(tmp_path / "training.csv", ";")[0] == ["epoch_id", 'train_a;"b', 'valid_a;"b']


def test_only_listed_variables_are_written(tmp_path):
    hook = hook_of(tmp_path, variables=["loss"], output_file="other.csv")
    after_epoch(hook, 0, {"train": {"loss": 1, "b": 2}, "valid": {"loss": 1}})
    assert rows(tmp_path / "other.csv")[0] == ["epoch_id", "train_loss", "valid_loss"]


@pytest.mark.parametrize("value", ["text", None, {}])
@pytest.mark.parametrize("policy", ["error", "warn", "default"])
def test_a_value_that_is_missing_or_not_a_number_follows_the_policies(tmp_path, value, policy, caplog):
    hook = hook_of(tmp_path, on_unknown_type=policy, on_missing_variable=policy, default_value="?")
    data = {"train": {"v": 1.0}, "valid": {"v": value}}
    if policy == "error":
        with pytest.raises(HookError, match="valid/v"):
            after_epoch(hook, 0, data)
        return
    with caplog.at_level(logging.WARNING):
        after_epoch(hook, 0, data)
    assert rows(tmp_path / "training.csv")[1] == ["0", "1.0", "?"]
    assert ("valid/v" in caplog.text) is (policy == "warn")


def test_a_variable_without_a_mean_has_a_column_for_each_aggregation(tmp_path):
    hook = hook_of(tmp_path)
    after_epoch(hook, 0, {"train": {"loss": {"std": 1.0, "max": 2.0}, "f1": {"mean": 0.5, "std": 0.1}}})
    after_epoch(hook, 1, {"train": {"loss": {"std": 3.0, "max": 4.0}, "f1": {"mean": 0.6, "std": 0.1}},
                         "valid": {"loss": {"std": 5.0, "max": 6.0}, "f1": {"mean": 0.7, "std": 0.1}}})  # fmt: skip
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss_std", "train_loss_max", "train_f1", "valid_loss_std", "valid_loss_max", "valid_f1"],
        ["0", "1.0", "2.0", "0.5", "", "", ""],
        ["1", "3.0", "4.0", "0.6", "5.0", "6.0", "0.7"],
    ]


def test_an_aggregation_that_is_missing_later_follows_the_policy(tmp_path):
    hook = hook_of(tmp_path)
    after_epoch(hook, 0, {"train": {"loss": {"std": 1.0}}})
    with pytest.raises(HookError, match="train/loss has no std"):
        after_epoch(hook, 1, {"train": {"loss": {"max": 1.0}}})


@pytest.mark.parametrize("aggregations", thinned([["std"], ["nanmean"]], [["std"]]), ids=str)
def test_a_training_writes_aggregations_without_a_mean(train_digits, aggregations):
    training = train_digits([{"ComputeStats": {"variables": {"loss": aggregations}}}, "WriteCSV"])
    header, *lines = rows(training.output_dir / "training.csv")
    train_loss, valid_loss = (f"{stream}_loss_{aggregations[0]}" for stream in ("train", "valid"))
    assert header == ["epoch_id", train_loss, "train_learning_rate", valid_loss]
    assert len(lines) == 2
    assert all(float(cell) > 0 for line in lines for cell in line[1:])


def test_a_file_that_exists_is_an_error_without_a_run_directory(tmp_path):
    (tmp_path / "training.csv").write_text("theirs\n")
    expected = "WriteCSV: .*/training.csv exists; move it elsewhere, or choose another name or directory"
    with pytest.raises(HookError, match=expected):
        hook_of(tmp_path)
    assert (tmp_path / "training.csv").read_text() == "theirs\n"


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


def test_a_name_with_half_a_character_is_an_error_that_names_it(tmp_path):
    with pytest.raises(HookError, match=r"WriteCSV: .*'lo\\udc80ss' of stream 'train' has a lone surrogate, .*rename"):
        after_epoch(hook_of(tmp_path), 0, {"train": {"lo\udc80ss": 1}, "valid": {"lo\udc80ss": 1}})
    assert (tmp_path / "training.csv").read_text() == ""


@pytest.mark.parametrize("argument", ["default_value", "delimiter"])
def test_a_default_or_a_delimiter_with_half_a_character_is_an_error(tmp_path, argument):
    with pytest.raises(ArgumentError, match=rf"{argument}: '\\udc80' has a lone surrogate"):
        hook_of(tmp_path, **{argument: "\udc80"})


# variables that only some streams or only later epochs have


def test_a_variable_of_a_single_stream_has_a_single_column(tmp_path):
    hook = hook_of(tmp_path)
    after_epoch(hook, 0, {"train": {"loss": 1}, "valid": {"loss": 2, "halvings": 3}})
    assert rows(tmp_path / "training.csv") == [
        ["epoch_id", "train_loss", "valid_loss", "valid_halvings"],
        ["0", "1", "2", "3"],
    ]


def test_a_variable_that_comes_later_gets_a_column_at_the_end(tmp_path, caplog):
    hook = hook_of(tmp_path, default_value="-", delimiter=";")
    later = [{}, {"gradient_norm": 5, "f;1": {"std": 0.5, "max": 2}}, {}, {"gradient_norm": 6}]
    for epoch, each in enumerate(later):
        after_epoch(hook, epoch, {"train": {"loss": 1, **each}, "valid": {"loss": 2}})
    assert rows(tmp_path / "training.csv", ";") == [
        ["epoch_id", "train_loss", "valid_loss", "train_gradient_norm", "train_f;1_std", "train_f;1_max"],
        ["0", "1", "2", "-", "-", "-"],
        ["1", "1", "2", "5", "0.5", "2"],
        ["2", "1", "2", "-", "-", "-"],
        ["3", "1", "2", "6", "-", "-"],
    ]
    assert not caplog.messages


class Records(AbstractHook):
    """Records a value of its own, from the fourth batch on."""

    def after_batch(self):
        if self.main_loop.training and self.main_loop.iterations_done > 3:
            self.main_loop.record("halves", self.main_loop.iterations_done / 2)


def test_what_hooks_record_has_a_column_and_a_resumed_run_has_the_same_bytes(tmp_path, digits_config):
    hooks = [STATS, {"WriteCSV": {"every": "3 updates"}}, {"StopAfter": {"epochs": 1}}]
    for name, ends in (("straight", []), ("resumed", ["hooks.StopAfter.iterations=8"])):
        training = create_training(digits_config(hooks), output_dir=tmp_path / name, overrides=ends)
        training.main_loop.change_hooks([Records(), *training.main_loop.hooks])
        train(training)
    path = tmp_path / "resumed" / "training.csv"
    assert rows(path)[0][-1] == "train_halves"
    again = resume_training(tmp_path / "resumed", ["~hooks.StopAfter.iterations"])
    again.main_loop.change_hooks([Records(), *again.main_loop.hooks])
    train(again)
    assert path.read_bytes() == (tmp_path / "straight" / "training.csv").read_bytes()
    assert [row[-1] for row in rows(path)[1:6]] == ["", "", "2.5", "4.0", "5.5"]  # means of batches 4 to 6, 7 to 9, ...


def test_a_listed_variable_that_comes_later_has_its_column(tmp_path, caplog):
    hook = hook_of(tmp_path, variables=["loss", "gradient_norm"], on_missing_variable="default")
    for epoch in (0, 1):
        norm = {"gradient_norm": 5} if epoch else {}
        after_epoch(hook, epoch, {"train": {"loss": 1, **norm}, "valid": {"loss": 2}})
    assert rows(tmp_path / "training.csv")[0][:3] == ["epoch_id", "train_loss", "train_gradient_norm"]
    assert rows(tmp_path / "training.csv")[2][2] == "5"
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
        after_epoch(hook_of(tmp_path, **arguments), 0, {"train": {"loss": value}})
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
    training = train_digits([STATS, {"WriteCSV": {"every": "2 epochs"}}, {"StopAfter": {"epochs": 3}}], batch_size=500)
    assert [row[0] for row in rows(training.output_dir / "training.csv")] == ["epoch_id", "0", "2"]


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
    assert ends == [loop.metrics[1]["streams"]["train"]["loss"]["mean"]]


@pytest.mark.parametrize(
    ("iterations", "skip_zeroth_epoch"), thinned(itertools.product((7, 9, 12), (False, True)), [(9, False)])
)
def test_a_resumed_run_writes_the_same_bytes(tmp_path, digits_config, iterations, skip_zeroth_epoch):
    hooks = [STATS, {"WriteCSV": {"every": "2 iterations"}}, {"StopAfter": {"epochs": 2}}]
    config = digits_config(hooks, batch_size=200, skip_zeroth_epoch=skip_zeroth_epoch)
    train(create_training(config, output_dir=tmp_path / "straight"))
    directory = tmp_path / "resumed"
    train(create_training(config, output_dir=directory, overrides=[f"hooks.StopAfter.iterations={iterations}"]))
    with (directory / "training.csv").open("a") as file:
        file.write("2,99,1.0,,,\n")  # written after the checkpoint, by a process that was killed
    train(resume_training(directory, overrides=["~hooks.StopAfter.iterations"]))
    content = (directory / "training.csv").read_bytes()
    assert content == (tmp_path / "straight" / "training.csv").read_bytes()
    assert content.count(b"\n") > 8


def test_without_a_zeroth_epoch_the_columns_are_what_hooks_write(tmp_path, digits_config):
    hooks = [{"ComputeStats": {"variables": ["accuracy"]}}, {"WriteCSV": {"every": "4 updates"}}]
    config = digits_config([*hooks, {"StopAfter": {"epochs": 1}}], skip_zeroth_epoch=True)
    train(create_training(config, output_dir=tmp_path / "run"))
    path = tmp_path / "run" / "training.csv"
    header = ["epoch_id", "iteration", "train_accuracy", "train_learning_rate", "valid_accuracy"]
    assert rows(path)[0] == header  # not the loss, which the steps have too
    assert [row[1] for row in rows(path)[1:]] == ["4", "8", "12", "15"]
    before = path.read_bytes()
    path.unlink()
    assert resume_training(tmp_path / "run") is None
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("how", "is_finished"),
    thinned(itertools.product(("deleted", "edited"), (False, True)), [("edited", False)]),
)
def test_a_file_that_others_have_changed_is_made_again(tmp_path, digits_config, how, is_finished):
    config = digits_config([STATS, {"WriteCSV": {"every": "4 updates"}}, {"StopAfter": {"epochs": 1}}], batch_size=200)
    train(create_training(config, output_dir=tmp_path / "run"))
    path = tmp_path / "run" / "training.csv"
    before = path.read_text()
    if how == "deleted":
        path.unlink()
    else:
        path.write_text(before.replace("train_loss", "my_loss") + "mine\n")
    if is_finished:
        assert resume_training(tmp_path / "run") is None
        assert path.read_text() == before
    else:
        train(resume_training(tmp_path / "run", overrides=["hooks.StopAfter.epochs=2"]))
        assert path.read_text().startswith(before)
    assert [each.name for each in path.parent.glob("*training*")] == ["training.csv"]


def test_a_resume_refuses_a_name_of_a_file_that_the_run_has_not_written_and_changes_nothing(tmp_path, digits_config):
    run = tmp_path / "run"
    config = digits_config([STATS, "WriteCSV", {"StopAfter": {"epochs": 1}}], batch_size=500)
    train(create_training(config, output_dir=run))
    (run / "notes.csv").write_text("mine\n")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "train.log"}
    for _ in range(2):
        with pytest.raises(UsageError, match=r"the run has not written .*notes\.csv, which one of its hooks"):
            resume_training(run, ["hooks.WriteCSV.output_file=notes.csv", "hooks.StopAfter.epochs=2"])
    assert {path: path.read_bytes() for path in before} == before


class Words(AbstractHook):
    """Adds a statistic that is a word until epoch 1."""

    writes = ("words",)

    def after_epoch(self, epoch_id, epoch_data):
        epoch_data["train"]["words"] = "many" if epoch_id < 2 else 2


@pytest.mark.campaign  # what hooks record has a column after a resume, see above
def test_what_is_not_a_number_has_its_column_after_a_resume_too(tmp_path, digits_config):
    for name, epochs in (("straight", 2), ("resumed", 1)):
        config = digits_config([STATS, "WriteCSV", {"StopAfter": {"epochs": epochs}}], batch_size=500)
        training = create_training(config, output_dir=tmp_path / name)
        training.main_loop.change_hooks([Words(), *training.main_loop.hooks])
        train(training)
    again = resume_training(tmp_path / "resumed", ["hooks.StopAfter.epochs=2"])
    again.main_loop.change_hooks([Words(), *again.main_loop.hooks])
    train(again)
    header, *lines = rows(tmp_path / "resumed" / "training.csv")
    assert [line[header.index("train_words")] for line in lines] == ["", "", "2"]
    assert rows(tmp_path / "straight" / "training.csv") == [header, *lines]


@pytest.mark.parametrize("has_run", [False, True])
def test_a_second_session_has_the_rows_of_the_first(tmp_path, scripted, numbers, write, has_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path) if has_run else None
    end = StopAfter(epochs=1)
    hooks = [write([1, 2, 3], "train", "accuracy"), WriteCSV(run and tmp_path), end]
    loop = MainLoop(scripted(), numbers, hooks, run=run)
    loop.run_training()
    end.limits = {"epochs": 2}
    loop.run_training()
    assert [row[0] for row in rows(tmp_path / "training.csv")] == ["epoch_id", "0", "1", "2"]


@pytest.mark.parametrize("blocked", thinned(["deleted", "directory", "link"], ["directory"]))
def test_a_file_that_cannot_be_written_is_a_warning_and_the_next_start_completes_it(
    tmp_path, digits_config, caplog, blocked
):
    config = digits_config([STATS, "WriteCSV", {"StopAfter": {"epochs": 1}}], batch_size=500)
    training = create_training(config, output_dir=tmp_path / "run")
    path = tmp_path / "run" / "training.csv"

    class Blocks(AbstractHook):
        def after_stream(self, stream_name):
            if self.main_loop.training_epochs_done == 0 and stream_name == "valid" and self.main_loop.iterations_done:
                path.unlink()
                if blocked == "directory":
                    path.mkdir()
                elif blocked == "link":
                    path.symlink_to(tmp_path / "elsewhere")

    training.main_loop.change_hooks([*training.main_loop.hooks, Blocks()])
    train(training)
    assert training.main_loop.outcome.status == "finished"
    assert caplog.text.count("the run goes on without this file, and the next start of the run completes it") == 1
    assert not (tmp_path / "elsewhere").exists()
    if blocked == "directory":
        path.rmdir()
    assert resume_training(tmp_path / "run") is None
    assert [row[0] for row in rows(path)] == ["epoch_id", "0", "1"]


def test_columns_that_would_have_the_same_name_have_slashes(tmp_path):
    after_epoch(hook_of(tmp_path), 0, {"valid": {"hard_loss": 1, "loss": 2}, "valid_hard": {"loss": 3}})
    header = rows(tmp_path / "training.csv")[0]
    assert [name for name in header if name.endswith(("hard_loss", "hard/loss"))] == [
        "valid/hard_loss",
        "valid_hard/loss",
    ]
    assert len(set(header)) == len(header)


def test_a_resume_with_other_arguments_makes_the_file_again(tmp_path, digits_config):
    config = digits_config([STATS, "WriteCSV", {"StopAfter": {"epochs": 1}}], batch_size=500)
    train(create_training(config, output_dir=tmp_path / "run"))
    changed = ["hooks.WriteCSV.delimiter=;", "hooks.StopAfter.epochs=2"]
    train(resume_training(tmp_path / "run", overrides=changed))
    lines = rows(tmp_path / "run" / "training.csv", ";")
    assert [row[0] for row in lines] == ["epoch_id", "0", "1", "2"]


def test_batches_without_any_of_the_variables_are_an_error(scripted, numbers, write, tmp_path):
    hooks = [write([1, 2], "train", "accuracy"), WriteCSV(tmp_path, every="4 updates"), StopAfter(epochs=1)]
    expected = "WriteCSV writes the means of accuracy between epochs, but the batches of the train stream have x, loss"
    with pytest.raises(HookError, match=expected):
        MainLoop(scripted(), numbers, hooks).run_training()
