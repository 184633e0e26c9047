"""ComputeStats: which variables and aggregations it takes, and the statistics of each stream."""

import numpy as np
import pytest
import torch

from emrun import AbstractHook, MainLoop
from emrun.base.errors import ArgumentError, HookError, StreamError
from emrun.epoch_data import read_by
from emrun.hooks import ComputeStats, StopAfter


class Keep(AbstractHook):
    """Keeps what the batches of each stream gave, and what was written of each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.epochs = []

    def before_epoch(self):
        self.seen = {}

    def after_batch(self, stream_name, batch_data):
        for name, value in batch_data.items():
            self.seen.setdefault(stream_name, {}).setdefault(name, []).append(np.asarray(value))

    def after_epoch(self, epoch_data):
        self.epochs.append(epoch_data)

    def values(self, stream, name):
        return np.concatenate([each.ravel() for each in self.seen[stream][name]])


def statistics(model, dataset, variables, **arguments):
    """Return what is written of the zeroth epoch and the first."""
    keep = Keep()
    hooks = [ComputeStats(variables), keep, StopAfter(epochs=1)]
    MainLoop(model, dataset, hooks, on_unused_sources="ignore", **arguments).run_training()
    return keep.epochs


@pytest.mark.parametrize("is_first", [True, False])
def test_an_evaluation_by_a_hook_leaves_the_statistics_of_its_epoch(scripted, numbers, is_first):
    class Evaluates(AbstractHook):
        def after_batch(self, stream_name):
            if stream_name == "train":
                found.append(self.main_loop.run_evaluation("valid"))

    def epochs(*others):
        hooks = [ComputeStats([{"x": ["mean", "sum"]}]), keep := Keep(), StopAfter(epochs=2)]
        hooks = [*others, *hooks] if is_first else [*hooks, *others]
        MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], on_unused_sources="ignore").run_training()
        return [each for each in keep.epochs if "train" in each]

    found = []
    alone, evaluated = epochs(), epochs(Evaluates())
    assert (evaluated, len(evaluated)) == (alone, 3)
    assert len(found) == 9  # three batches of each epoch
    assert all(each["valid"]["x"] == alone[-1]["valid"]["x"] and "train" not in each for each in found)


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    entries = in_docstring(ComputeStats)
    training = train_digits(entries, batch_size=500)
    for epoch in training.main_loop.metrics:
        for stream in ("train", "valid"):
            rates = ["learning_rate"] if stream == "train" else []
            assert list(epoch["streams"][stream]) == [*rates, "loss", "accuracy"]
            assert list(epoch["streams"][stream]["loss"]) == ["mean"]
            assert list(epoch["streams"][stream]["accuracy"]) == ["mean", "std"]


def test_the_statistics_of_each_stream_are_those_of_numpy(train_digits, tmp_path, digits_config):
    variables = [{"loss": ["mean", "std", "max", "median"]}, {"label": ["mean", "min", "var"]}, {"logits": ["sum"]}]
    hooks = [ComputeStats(variables), keep := Keep(), StopAfter(epochs=2)]
    training = train_digits([])
    MainLoop(training.model, training.dataset, hooks, extra_streams=["valid", "test"]).run_training()
    data = keep.epochs[-1]
    assert list(data) == ["train", "valid", "test"]
    for stream in data:
        for variable in variables:
            for name, aggregations in variable.items():
                values = keep.values(stream, name).astype(np.float64)
                expected = {each: getattr(np, each)(values) for each in aggregations}
                assert data[stream][name] == pytest.approx(expected, rel=1e-9)


def test_a_name_alone_means_the_mean(scripted, numbers):
    model = scripted(lambda batch: {"loss": np.array(batch["x"])})
    assert statistics(model, numbers, ["loss"])[1] == {"train": {"loss": {"mean": 3.0}}}


def test_a_source_is_a_variable_too(scripted, numbers):
    (_, data) = statistics(scripted(), numbers, [{"x": ["sum", "count"]}], extra_streams=["valid"])
    assert data == {"train": {"x": {"sum": 15.0, "count": 5}}, "valid": {"x": {"sum": 30.0, "count": 2}}}


def test_a_scalar_counts_for_every_example_of_its_batch(scripted, numbers):
    model = scripted(lambda batch: {"loss": float(batch["x"][0])})
    assert statistics(model, numbers, ["loss"])[1]["train"]["loss"]["mean"] == (1.0 * 2 + 3.0 * 2 + 5.0) / 5


def test_example_weight_weights_the_statistics(scripted, numbers):
    model = scripted(lambda batch: {"loss": np.array(batch["x"]), "example_weight": np.array(batch["x"]) ** 2})
    values = np.arange(1.0, 6.0)
    (_, data) = statistics(model, numbers, [{"loss": ["mean", "std", "sum"]}])
    mean = np.average(values, weights=values**2)
    spread = np.average((values - mean) ** 2, weights=values**2) ** 0.5
    assert data["train"]["loss"] == pytest.approx({"mean": mean, "std": spread, "sum": 15.0})


def test_every_epoch_begins_anew(scripted, numbers):
    keep = Keep()
    hooks = [ComputeStats([{"x": ["count"]}]), keep, StopAfter(epochs=3)]
    MainLoop(scripted(), numbers, hooks).run_training()
    assert [data["train"]["x"]["count"] for data in keep.epochs] == [5, 5, 5, 5]


def test_entries_of_one_variable_are_put_together(scripted, numbers):
    variables = ["x", {"x": ["max", "mean", "max"]}, {"x": "min", "loss": ["mean"]}]
    (_, data) = statistics(scripted(), numbers, variables)
    assert data["train"] == {"x": {"mean": 3.0, "max": 5.0, "min": 1.0}, "loss": {"mean": 0.0}}


def test_an_aggregation_that_is_listed_twice_is_written_once():
    assert list(ComputeStats(["x", {"x": ["max", "mean", "max"]}]).writes) == ["x/mean", "x/max"]


def test_it_tells_what_it_reads_and_writes():
    hook = ComputeStats(["loss", {"accuracy": ["mean", "std"]}])
    assert (list(hook.reads), list(hook.writes)) == (
        ["loss", "accuracy"],
        ["loss/mean", "accuracy/mean", "accuracy/std"],
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("loss", "'loss' is not a list of variables such as [loss, {accuracy: [mean, std]}]"),
        ([], "[] is not a list of variables"),
        ("None", "'None' is not a list of variables"),
        ({}, "{} is not a list of variables"),
        ({"loss": ["mena"]}, "'mena' is not an aggregation; did you mean 'mean'?"),
        ({"loss": []}, "is neither a name nor {name: [aggregation, ...]}"),
        ([3], "3 is neither a name nor {name: [aggregation, ...]}"),
        ([{"loss": []}], "{'loss': []} is neither a name nor"),
        ([{"loss": 3}], "{'loss': 3} is neither a name nor"),
        ([{"loss": ["men"]}], "'men' is not an aggregation; did you mean 'mean'? (allowed: mean, sum, min,"),
        ([{"loss": ["nan_count"]}], "'nan_count' is not an aggregation; did you mean 'nancount'?"),
        ([{"loss": ["sort"]}], "'sort' is not an aggregation"),
        ([{"loss": ["pi"]}], "'pi' is not an aggregation"),
        ([{"loss": ["save"]}], "'save' is not an aggregation"),
        ([{"loss": ["array_repr"]}], "'array_repr' is not an aggregation"),
        ([{"loss": ["__name__"]}], "'__name__' is not an aggregation"),
        ([{"loss": [3]}], "3 is not an aggregation"),
    ],
)
def test_wrong_variables_are_refused_at_once(variables, message):
    with pytest.raises(ArgumentError) as caught:
        ComputeStats(variables)
    assert caught.value.argument == "variables"
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["los", "Loss", "x_"])
def test_a_wrong_name_is_reported_before_any_update(scripted, numbers, name):
    loop = MainLoop(scripted(), numbers, [ComputeStats([name]), StopAfter(epochs=1)], skip_zeroth_epoch=True)
    near = "x" if name == "x_" else "loss"
    message = f"hook ComputeStats reads '{name}', which is neither a source nor an output; did you mean '{near}'"
    with pytest.raises(StreamError) as caught:
        loop.run_training()
    assert message in str(caught.value)
    assert (caught.value.exit_status, loop.iterations_done) == (2, 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: {"loss": [1.0] * 4}, "has 4 entries, but the batch has 2 examples"),
        (lambda batch: {"loss": ["a"] * len(batch["x"])}, "is list of dtype <U1, not a number"),
        (lambda batch: {"loss": [[1.0], [1.0, 2.0]]}, "inhomogeneous"),
        (lambda batch: {"loss": torch.ones(2, dtype=torch.complex64)}, "is complex, not a real number"),
        (lambda batch: {"loss": 1.0 if batch["x"] == [5.0] else [1.0, 2.0]}, "is a scalar in some batches"),
    ],
)
def test_a_variable_without_statistics_is_named_with_its_stream(scripted, numbers, function, message):
    with pytest.raises(HookError, match=rf"ComputeStats: stream 'train', variable 'loss': .*{message}"):
        statistics(scripted(function), numbers, ["loss"])


def test_a_variable_that_a_later_batch_does_not_have_is_named_with_its_stream(scripted, numbers):
    model = scripted(lambda batch: {"loss": 1.0} if batch["x"] == [1.0, 2.0] else {})
    with pytest.raises(HookError, match=r"ComputeStats: stream 'train': a batch has no variable 'loss'"):
        statistics(model, numbers, ["loss"])


def test_a_mapping_says_the_aggregations_of_all_variables(scripted, numbers):
    (_, data) = statistics(scripted(), numbers, {"x": ["max", "mean"], "loss": "mean"})
    assert data["train"] == {"x": {"max": 5.0, "mean": 3.0}, "loss": {"mean": 0.0}}
    hook = ComputeStats({"x": ["max", "mean"], "loss": "mean"})
    assert (read_by(hook), hook.writes) == (("x", "loss"), ("x/max", "x/mean", "loss/mean"))


def test_a_mapping_of_variables_is_written_in_a_config(train_digits):
    training = train_digits(
        [{"ComputeStats": {"variables": {"loss": ["mean", "std"], "accuracy": "mean"}}}], batch_size=500
    )
    last = training.main_loop.metrics[-1]["streams"]["valid"]
    assert {name: list(found) for name, found in last.items()} == {"loss": ["mean", "std"], "accuracy": ["mean"]}


def test_without_arguments_the_loss_and_the_metrics_of_the_model_are_computed(train_digits):
    training = train_digits(["ComputeStats"], batch_size=500)
    assert training.hooks[0].writes == ("loss/mean", "accuracy/mean")
    for epoch in training.main_loop.metrics:
        assert {name: list(found) for name, found in epoch["streams"]["valid"].items()} == {
            "loss": ["mean"],
            "accuracy": ["mean"],
        }


def test_a_model_without_metrics_has_its_loss(scripted, numbers):
    keep = Keep()
    MainLoop(scripted(), numbers, [ComputeStats(), keep, StopAfter(epochs=1)]).run_training()
    assert keep.epochs[-1]["train"] == {"loss": {"mean": 0.0}}


def test_what_is_computed_without_arguments_can_be_monitored(train_digits):
    training = train_digits(
        ["ComputeStats", {"SaveBest": {"variable": "accuracy", "condition": "max"}}], batch_size=500
    )
    assert (training.output_dir / "checkpoints" / "best").exists()


def test_alone_it_leaves_out_what_is_not_there_or_not_a_number_for_each_example(scripted, numbers, caplog):
    values = {1.0: {"loss": 2.0, "flat": [1.0] * 5, "good": 1.0}, 4.0: {"good": 3.0}}
    model = scripted(lambda batch: values[1.0 if batch["x"][0] < 10 else 4.0])
    model.metric_names = ("flat", "good")
    with caplog.at_level("INFO"):
        first, second = statistics(model, numbers, None, extra_streams=["valid"])
    assert first == second
    assert {stream: list(names) for stream, names in second.items()} == {"train": ["loss", "good"], "valid": ["good"]}
    assert [record.getMessage() for record in caplog.records if "no statistic" in record.getMessage()] == [
        "ComputeStats: stream 'train', variable 'flat': has 5 entries, but the batch has 2 examples; it has no "
        "statistic",
        "ComputeStats: stream 'valid': a batch has no variable 'loss'; it has no statistic",
        "ComputeStats: stream 'valid': a batch has no variable 'flat'; it has no statistic",
    ]
