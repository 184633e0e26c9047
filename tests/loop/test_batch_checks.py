"""The checks of batches before the model gets them."""

import logging
from collections import UserDict, UserList
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from doubles import Doubler, SixExamples

from emrun import AbstractHook, AbstractModel, MainLoop
from emrun.base.errors import ArgumentError, StreamError
from emrun.loop.batch_checks import BatchChecks, VariableChecks
from emrun.loop.progress import Progress


class Model(AbstractModel):
    """A model with the given inputs."""

    output_names = ("loss",)

    def __init__(self, *input_names, optional=()):
        self._input_names = input_names
        self.optional_input_names = optional

    @property
    def input_names(self):
        return self._input_names

    def run(self, batch, train, stream):
        return {"loss": 0.0}

    def save(self, directory):
        pass

    def load(self, directory):
        pass


class Reader(AbstractHook):
    """A hook that reads the given variables."""

    def __init__(self, *reads):
        super().__init__()
        self.reads = reads


def checks_of(*inputs, hooks=(), optional=(), empty="error", unused="ignore", **options):
    variables = VariableChecks(Model(*inputs, optional=optional), list(hooks), unused)
    return BatchChecks(variables, Progress(), on_empty_batch=empty, **options)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Lengths

SOURCES = {
    "list": [1, 2, 3],
    "tuple": (1, 2, 3),
    "range": range(3),
    "array": np.zeros(3),
    "matrix": np.zeros((3, 0, 5)),
    "tensor": torch.zeros(3),
    "images": torch.zeros(3, 2, 2),
    "sparse": torch.zeros(3, 2).to_sparse(),
    "strings": ["a", "bc", ""],
    "ragged": [[1], [1, 2], []],
    "objects": np.array([None, {}, []], dtype=object),
    "anything with a length": UserList([1, 2, 3]),
    "anything with a shape": SimpleNamespace(shape=(3, 2)),  # such as a sparse array of SciPy, whose len() is an error
}


@pytest.mark.parametrize("values", SOURCES.values(), ids=SOURCES)
def test_the_length_of_a_batch_is_the_first_axis_of_its_sources(values):
    checks = checks_of("x")
    assert checks.begin("train")({"x": values}) == 3
    assert checks._progress.batch_length == 3


def test_sources_of_all_kinds_stand_side_by_side():
    assert checks_of().begin("train")(SOURCES) == 3


def test_any_mapping_is_a_batch():
    assert checks_of("x").begin("train")(UserDict(x=[1, 2])) == 2


def test_batches_of_a_stream_may_differ_in_length():
    check = checks_of("x").begin("train")
    assert [check({"x": [0] * count}) for count in (3, 1, 7)] == [3, 1, 7]


def test_the_length_of_a_mapping_is_that_of_its_parts():
    check = checks_of("x").begin("train")
    assert check({"x": {"ids": np.zeros((4, 2)), "inner": {"mask": [1] * 4}}}) == 4
    with pytest.raises(StreamError, match=r"sources without a length: x \(dict\); every"):
        check({"x": {}})
    with pytest.raises(StreamError, match=r"sources without a length: x\.task \(int\); every"):
        check({"x": {"ids": [1], "task": 5}})


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        ({"x": [1, 2], "y": [1]}, "x 2, y 1"),
        ({"x": np.zeros((4, 2)), "y": torch.zeros(2, 4), "z": [0] * 4}, "x 4, y 2, z 4"),
        ({"x": [], "y": [1]}, "x 0, y 1"),
        ({"x": [1], "y": ()}, "x 1, y 0"),
        ({"x": SOURCES["anything with a shape"], "y": [1]}, "x 3, y 1"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(3, 0)}, "x 0, y 3"),
        ({"x": {"ids": np.zeros((2, 5)), "mask": [1, 2, 3]}, "y": [1, 2]}, "x.ids 2, x.mask 3, y 2"),
        ({"x": {"ids": [1, 2]}, "y": torch.nested.nested_tensor([[1.0]], layout=torch.jagged)}, "x.ids 2, y 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sources_of_unequal_length_are_an_error_with_names_and_lengths(batch, counts):
    check = checks_of("x", empty="ignore").begin("train")
    with pytest.raises(StreamError) as raised:
        check(batch)
    message = f"sources of unequal length: {counts}; every source needs one entry per example"
    assert str(raised.value) == f"stream 'train', batch 0 of the epoch: {message}"


def test_the_stream_is_named_though_a_hook_has_looked_at_another_one_since():
    checks = checks_of("x")
    check = checks.begin("train")
    check({"x": [1], "y": [1]})
    checks.begin("valid")({"x": [1]})
    with pytest.raises(StreamError, match="stream 'train', batch 1 of the epoch: sources of unequal length"):
        check({"x": [1], "y": []})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (5, "int"),
        (1.5, "float"),
        (None, "NoneType"),
        (np.array(5), "ndarray"),
        (np.float32(5), "float32"),
        (torch.tensor(5), "Tensor"),
        (iter([1, 2]), "list_iterator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_source_without_a_length_is_an_error_with_its_type(value, kind, first):
    batch = {"x": value, "y": [1, 2]} if first else {"y": [1, 2], "x": value}
    with pytest.raises(StreamError, match=rf"sources without a length: x \({kind}\); every source needs one entry"):
        checks_of("x").begin("train")(batch)


def test_all_sources_without_a_length_are_listed():
    with pytest.raises(StreamError, match=r"without a length: x \(int\), z \(Tensor\)"):
        checks_of("x").begin("train")({"x": 1, "y": [1], "z": torch.tensor(1)})


@pytest.mark.parametrize(("batch", "kind"), [([1, 2], "list"), ((1, 2), "tuple"), (None, "NoneType"), (3, "int")])
def test_a_batch_that_is_no_mapping_is_an_error_with_its_type(batch, kind):
    with pytest.raises(StreamError, match=f"a batch must be a mapping source name -> values, not {kind}"):
        checks_of("x").begin("train")(batch)


# The exit status


@pytest.mark.parametrize("bad", [{"x": [1], "y": []}, {"x": 1}, {}, {"x": []}, {"y": [1]}, [1]], ids=str)
def test_what_the_first_batch_shows_is_a_mistake_in_the_config_and_what_comes_later_a_failure(bad):
    checks = checks_of("x")
    with pytest.raises(StreamError, match="batch 0 of the epoch") as raised:
        checks.begin("train")(bad)
    assert raised.value.exit_status == 2
    check = checks.begin("valid")
    check({"x": [1]})
    check({"x": [1]})
    with pytest.raises(StreamError, match="stream 'valid', batch 2 of the epoch") as raised:
        check(bad)
    assert raised.value.exit_status == 1


# Empty batches and streams


EMPTY = [{}, {"x": []}, {"x": [], "y": ()}, {"x": np.zeros((0, 3))}, {"x": torch.zeros(0, 3)}]


@pytest.mark.parametrize("batch", EMPTY, ids=str)
def test_an_empty_batch_is_an_error_by_default(batch):
    what = "has sources of length 0: x" if batch else "has no sources"
    with pytest.raises(StreamError, match=rf"{what}.*\(see main_loop.on_empty_batch\)"):
        checks_of("x", empty="error").begin("train")(batch)


@pytest.mark.parametrize("batch", EMPTY, ids=str)
def test_an_empty_batch_is_skipped_with_a_warning(batch, caplog):
    check = checks_of("x", empty="warn").begin("train")
    assert [check({"x": [1]}), check(batch), check(batch)] == [1, 0, 0]
    assert [message.partition(": the batch has")[0] for message in messages(caplog)] == [
        "stream 'train', batch 1",
        "stream 'train', batch 2",
    ]


@pytest.mark.parametrize("batch", EMPTY, ids=str)
def test_an_empty_batch_is_skipped_silently(batch, caplog):
    checks = checks_of("x", empty="ignore")
    check = checks.begin("train")
    assert [check({"x": [1, 2]}), check(batch)] == [2, 0]
    assert checks._progress.batch_length == 2
    assert not messages(caplog)


def test_a_batch_without_sources_does_not_miss_any():
    assert checks_of("x", empty="ignore").begin("train")({}) == 0


def test_an_empty_stream_is_an_error():
    message = r"stream .valid. has no batch for the model; .*same iterator .* \(see main_loop.on_empty_stream\)"
    with pytest.raises(StreamError, match=message) as raised:
        checks_of().report_empty_stream("valid")
    assert raised.value.exit_status == 2


@pytest.mark.parametrize(("policy", "count"), [("warn", 1), ("ignore", 0)])
def test_an_empty_stream_can_be_allowed(policy, count, caplog):
    checks_of(on_empty_stream=policy).report_empty_stream("valid")
    assert len(messages(caplog)) == count
    assert all("stream 'valid' has no batch" in message for message in messages(caplog))


# Missing and unused sources


def test_missing_sources_are_an_error_with_what_there_is_and_what_may_be_meant():
    with pytest.raises(StreamError) as raised:
        checks_of("image", "label").begin("train")({"images": [1], "id": [2]})
    assert str(raised.value) == (
        "stream 'train', batch 0 of the epoch: the model needs image, label, which the batch does not have; did you "
        "mean 'images'? (it has images, id)"
    )


def test_optional_sources_may_be_missing():
    assert checks_of("x", optional=["mask"]).begin("train")({"x": [1]}) == 1


def test_a_source_that_is_missing_in_a_later_batch_is_an_error():
    check = checks_of("x", "y").begin("train")
    assert check({"x": [1], "y": [1]}) == 1
    with pytest.raises(StreamError, match="batch 1 of the epoch: the model needs y"):
        check({"x": [1]})


def test_a_source_that_goes_missing_from_one_mapping_that_is_used_again_is_an_error():
    check, batch = checks_of("x", "y").begin("train"), {"x": [1], "y": [1]}
    assert check(batch) == 1
    del batch["y"]
    with pytest.raises(StreamError, match="batch 1 of the epoch: the model needs y"):
        check(batch)


def test_unused_sources_are_an_error_if_wanted():
    checks = checks_of("x", unused="error")
    message = r"neither the model nor a hook reads the sources y, z; if this is right, set main_loop.on_unused_sources"
    with pytest.raises(StreamError, match=message):
        checks.begin("train")({"x": [1], "y": [1], "z": [1]})


def test_unused_sources_are_warned_of_once_however_many_batches_and_streams(caplog):
    checks = checks_of("x", unused="warn")
    for stream in ("train", "valid", "train"):
        check = checks.begin(stream)
        for _ in range(3):
            check({"x": [1], "y": [1]})
    assert messages(caplog) == [
        "stream 'train': neither the model nor a hook reads the source y; if this is right, set "
        "main_loop.on_unused_sources: ignore",
    ]
    checks.begin("test")({"x": [1], "y": [1], "z": [1]})
    assert "stream 'test': neither the model nor a hook reads the source z;" in messages(caplog)[1]


def test_what_says_which_example_is_in_a_row_is_not_unused():
    checks_of("x", unused="error").begin("train")({"x": [1.0], "id": ["a"], "position": [3]})
    with pytest.raises(StreamError, match="neither the model nor a hook reads the source position"):
        checks_of("x", unused="error").begin("train")({"x": [1.0], "position": [3]})


def test_unused_sources_can_be_ignored(caplog):
    assert checks_of("x", unused="ignore").begin("train")({"x": [1], "y": [1]}) == 1
    assert not messages(caplog)


@pytest.mark.parametrize(
    "options", [{"hooks": [Reader("loss"), Reader("y")]}, {"optional": ["y"]}], ids=["hook", "optional"]
)
def test_what_a_hook_reads_or_the_model_may_use_is_not_unused(options):
    assert checks_of("x", unused="error", **options).begin("train")({"x": [1], "y": [1]}) == 1


@pytest.mark.parametrize("argument", ["on_empty_batch", "on_empty_stream", "on_unused_sources"])
def test_a_policy_is_one_of_three(argument):
    with pytest.raises(ArgumentError, match=f"{argument}: 'raise' is not one of error, warn, ignore"):
        MainLoop(Doubler(), SixExamples(), **{argument: "raise"})


# Outputs


def checked(*, hooks=(), batch=None, outputs=None, stream="train"):
    checks = checks_of("x", hooks=hooks)
    checks.begin(stream)(batch or {"x": [1], "y": [2]})
    checks.check_outputs({"loss": 0.5} if outputs is None else outputs)
    return checks


def test_outputs_beside_the_sources_are_fine():
    checked(hooks=[Reader("x", "loss"), Reader("y")])


def test_a_source_and_an_output_of_the_same_name_are_an_error():
    with pytest.raises(StreamError, match=r"x, y: a source and an output have the same name; rename one") as raised:
        checked(outputs={"x": [1], "loss": 0, "y": [1]})
    assert raised.value.exit_status == 2


def train_a_model_with(values):
    model = Doubler()
    model.step_values = lambda: values
    with MainLoop(model, SixExamples()) as loop:
        loop.epoch(["train"])


WRONG_VALUES = [(None, "must return a mapping"), ({"learning_rate": 0.1}, "learning_rate is 0.1, not a list")]
WRONG_VALUES += [({"learning_rate": each}, "learning_rate is .* not a list") for each in (torch.tensor(0.1), ["a"])]


@pytest.mark.parametrize(("values", "message"), WRONG_VALUES, ids=repr)
def test_wrong_values_of_the_first_training_step_are_an_error(values, message):
    with pytest.raises(StreamError, match=f"model.step_values.*{message}"):
        train_a_model_with(values)


@pytest.mark.parametrize("rates", [None, [], [0.1, torch.tensor(0.2)], np.array([1, 2]), torch.tensor([0.1])], ids=repr)
def test_learning_rates_may_be_numbers_of_any_kind(rates):
    train_a_model_with({"learning_rate": rates})


@pytest.mark.parametrize("outputs", [[1], None, 3.0], ids=repr)
def test_outputs_that_are_no_mapping_are_an_error(outputs):
    checks = checks_of("x")
    checks.begin("train")({"x": [1]})
    with pytest.raises(StreamError, match=f"must return a mapping output name -> value, not {type(outputs).__name__}"):
        checks.check_outputs(outputs)


def test_a_hook_that_reads_what_is_not_there_is_an_error_with_what_is_there():
    with pytest.raises(StreamError) as raised:
        checked(hooks=[Reader("loss"), Reader("x", "los")])
    assert str(raised.value) == (
        "stream 'train', batch 0 of the epoch: hook Reader reads 'los', which is neither a source nor an output; did "
        "you mean 'loss'? (available: x, y, loss)"
    )
    assert raised.value.exit_status == 2


def test_outputs_are_checked_once_for_each_stream():
    checks = checked()
    checks.check_outputs({"x": [1]})  # not looked at: the stream had its first batch
    checks.begin("valid")({"x": [1]})
    with pytest.raises(StreamError, match="stream 'valid'"):
        checks.check_outputs({"x": [1]})


def test_the_outputs_are_compared_with_the_first_batch_that_had_sources():
    checks = checks_of("x", empty="ignore")
    check = checks.begin("train")
    check({})
    check({"x": [1]})
    with pytest.raises(StreamError, match="the same name"):
        checks.check_outputs({"x": [1]})


def test_the_outputs_of_a_stream_are_compared_with_its_own_sources():
    checks = checks_of("x", hooks=[Reader("z")])
    checks.begin("train")({"x": [1], "z": [2]})
    checks.check_outputs({"loss": 0.5})
    checks.begin("valid")({"x": [1]})
    checks.check_outputs({"z": 0.5})
    checks.begin("test")({"x": [1], "y": [2]})
    with pytest.raises(StreamError, match=r"stream 'test'.* hook Reader reads 'z', .*available: x, y, loss"):
        checks.check_outputs({"loss": 0.5})
