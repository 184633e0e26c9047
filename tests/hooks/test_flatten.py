"""Flatten: the entries of any value in their order, for the hooks that follow."""

import numpy as np
import pytest
import torch

from emrun import AbstractHook, MainLoop
from emrun.base.errors import ArgumentError, HookError, StreamError
from emrun.hooks import AccumulateVariables, ComputeStats, Flatten, StopAfter


@pytest.fixture
def flat(scripted, numbers):
    """Return what comes of an output of a single evaluated batch of two examples."""

    def run(value, **arguments):
        seen = {}

        class Look(AbstractHook):
            def after_batch(self, batch_data):
                seen.update(batch_data)

        hooks = [Flatten(**{"variables": {"y": "y_flat"}, **arguments}), Look()]
        MainLoop(scripted(lambda batch: {"y": value}), numbers, hooks).run_evaluation("valid")
        return seen["y_flat"]

    return run


def test_arrays_and_tensors_of_any_shape_get_one_axis(flat):
    values = np.arange(20).reshape(2, 5, 2)
    assert flat(values).tolist() == flat(torch.from_numpy(values)).tolist() == list(range(20))
    assert flat(torch.from_numpy(values)).dtype is torch.int64
    assert flat(np.float16([[0.5], [2]])).dtype == np.float16


def test_lists_of_different_lengths(flat):
    found = flat([[1, 2], [], [3, [4]]])
    assert (found.tolist(), found.dtype) == ([1, 2, 3, 4], np.int64)
    assert flat([torch.ones(2), torch.zeros(1)]).tolist() == [1.0, 1.0, 0.0]
    assert flat([np.ones(2), [2.0]]).tolist() == [1.0, 1.0, 2.0]
    assert flat([[True], [False]]).dtype == bool
    assert flat([["a", "bc"], []]).tolist() == ["a", "bc"]
    assert flat([[], []]).tolist() == []


def test_a_single_number_becomes_a_sequence_of_one(flat):
    assert flat(1.5).tolist() == [1.5]
    assert flat(torch.tensor(1.5)).tolist() == [1.5]


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    assert train_digits(in_docstring(Flatten), batch_size=500).main_loop.training_epochs_done == 1


def test_a_hook_that_reads_the_sequence_must_come_later(scripted, numbers):
    model = scripted(lambda batch: {"y": [[1], [2, 3]]})
    late = MainLoop(model, numbers, [ComputeStats(["y_flat"]), Flatten({"y": "y_flat"})])
    with pytest.raises(StreamError, match=r"ComputeStats reads 'y_flat'.*; move the hook after Flatten, which adds it"):
        late.run_evaluation("valid")
    kept = AccumulateVariables(["y_flat"])
    MainLoop(model, numbers, [Flatten({"y": "y_flat"}), kept]).run_evaluation("valid")
    assert kept.accumulated == {"valid": {"y_flat": [1, 2, 3]}}


def test_other_streams_need_not_have_the_variable(scripted, numbers):
    model = scripted(lambda batch: {"loss": 0.0, **({"y": [1, 2]} if batch["x"][0] == 10 else {})})
    kept = AccumulateVariables(["z"], streams=["valid"])
    hooks = [Flatten({"y": "z"}, streams=["valid"]), kept, StopAfter(epochs=1)]
    MainLoop(model, numbers, hooks, extra_streams=["valid"]).run_training()
    assert kept.accumulated == {"valid": {"z": [1, 2]}}


WRONG = [
    ({"variables": {}}, "variables", "{} is not a mapping of names"),
    ({"variables": ["y"]}, "variables", "['y'] is not a mapping of names"),
    ({"variables": {"y": 1}}, "variables", "{'y': 1} is not a mapping of names"),
    ({"variables": {"y": "z", "x": "z"}}, "variables", "'z': two variables would get this name"),
    ({"variables": {"y": "y"}}, "variables", "'y': it is flattened itself"),
    ({"streams": "valid"}, "streams", "'valid' is not a list of streams such as [valid]"),
    ({"streams": []}, "streams", "[] is not a list of streams"),
]


@pytest.mark.parametrize(("arguments", "argument", "message"), WRONG)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        Flatten(**{"variables": {"y": "z"}, **arguments})
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_stream_that_the_dataset_does_not_have(scripted, numbers):
    with pytest.raises(
        HookError,
        match=r"reads stream 'vaild', which .*; did you mean 'valid'\? \(its streams: train, valid\)",
    ) as e:
        MainLoop(scripted(), numbers, [StopAfter(epochs=1), Flatten({"y": "z"}, streams=["vaild"])])
    assert (e.value.hook_index, e.value.about) == (1, ("vaild", "streams"))


@pytest.mark.parametrize(
    ("value", "variables", "message"),
    [
        ([1, 2], {"z": "new"}, "a batch has no variable 'z'"),
        ([1, 2], {"y": "x"}, "a batch has a variable 'x' already; choose another name"),
        ({"a": [1, 2]}, {"y": "new"}, "'y' is a mapping, which has no order"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), {"y": "new"}, "'y' is a nested tensor"),
    ],
)
def test_what_a_batch_cannot_give_is_an_error_at_the_first_batch(flat, value, variables, message):
    with pytest.raises(StreamError) as caught:
        flat(value, variables=variables, streams=["valid"])
    assert message in str(caught.value)
    assert caught.value.exit_status == 2
