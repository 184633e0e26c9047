"""StopOnNaN: aborts with status 3, before anything of the epoch is saved."""

import numpy as np
import pytest
import torch
from projects import linear_on_majority

from emrun import AbstractHook, TrainingAborted, create_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import StopOnNaN
from emrun.training.create import train as run_training

CONFIG = linear_on_majority(seed=1, main_loop={"on_unused_sources": "ignore", "skip_zeroth_epoch": True})


class Loop:
    iterations_done = 7


def hook_of(**arguments):
    hook = StopOnNaN(**arguments)
    hook.main_loop = Loop()
    return hook


NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    [
        NAN,
        np.float32("nan"),
        np.array([[1.0, NAN]]),
        torch.tensor([1.0, NAN]),
        [1.0, NAN],
        {"mean": NAN},
        [[1.0], [NAN]],
    ],
)
def test_a_nan_of_any_kind_aborts_with_its_address(value):
    with pytest.raises(TrainingAborted, match=r"train/loss.* is NaN at iteration 7") as caught:
        hook_of().after_epoch(1, {"train": {"loss": value}})
    assert caught.value.exit_status == 3


ODD = {
    "ragged": lambda: [[1.0], [1.0, NAN]],
    "tensors": lambda: [torch.ones(2), torch.tensor([NAN])],
    "bfloat16 in a tuple": lambda: (torch.tensor([NAN], dtype=torch.bfloat16),),
    "with gradients in a list": lambda: [torch.tensor([NAN], requires_grad=True)],
    "float8": lambda: torch.tensor([1.0, NAN]).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_nan_in_an_output_of_an_odd_kind_aborts(kind):
    hook = hook_of(after_batch=True)
    with pytest.raises(TrainingAborted, match="train/x is NaN at iteration 7"):
        hook.after_batch("train", {"x": ODD[kind]()})


@pytest.mark.parametrize(
    "value",
    [1.0, 3, np.zeros((2, 2)), torch.ones(3), torch.ones(3).to_sparse(), ["a", "b"], "text", None, [[1], [1, 2]]],
)
def test_anything_else_does_not(value):
    hook_of().after_epoch(1, {"train": {"loss": value}})


@pytest.mark.parametrize("value", [float("inf"), np.array([-np.inf]), torch.tensor([1.0, float("inf")])])
def test_an_infinity_aborts_when_asked_to(value):
    hook_of().after_epoch(1, {"train": {"loss": value}})
    with pytest.raises(TrainingAborted, match="is infinite"):
        hook_of(stop_on_inf=True).after_epoch(1, {"train": {"loss": value}})


def test_only_listed_variables_are_looked_at():
    hook_of(variables=["loss"]).after_epoch(1, {"train": {"loss": 1.0, "other": NAN}})


def test_batches_are_looked_at_only_when_asked_to():
    assert hook_of().after_batch is None
    with pytest.raises(TrainingAborted):
        hook_of(after_batch=True, after_epoch=False).after_batch("train", {"loss": NAN})
    assert hook_of(after_batch=True, after_epoch=False).after_epoch is None


def test_a_list_with_a_string_is_not_a_number():
    with pytest.raises(HookError, match="train/x is str, not a number"):
        hook_of(on_unknown_type="error").after_epoch(1, {"train": {"x": [torch.ones(1), "x"]}})


@pytest.mark.parametrize("value", ["x", None, torch.tensor([NAN]).to_sparse()], ids=["text", "None", "sparse"])
def test_a_value_that_is_not_a_number_can_be_an_error(value):
    with pytest.raises(HookError, match=f"train/name is {type(value).__name__}, not a number"):
        hook_of(on_unknown_type="error").after_epoch(1, {"train": {"name": value}})


def test_a_value_that_is_not_a_number_can_cause_one_warning(caplog):
    hook = hook_of(on_unknown_type="warn")
    for _ in range(2):
        hook.after_epoch(1, {"train": {"name": "x", "loss": 1.0}})
    assert [record.getMessage() for record in caplog.records] == [
        "StopOnNaN: train/name is str, not a number (see on_unknown_type)"
    ]
    with pytest.raises(TrainingAborted):
        hook.after_epoch(1, {"train": {"name": "x", "loss": NAN}})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"variables": "loss"}, "variables"),
        ({"on_unknown_type": "default"}, "on_unknown_type"),
        ({"stop_on_inf": 1}, "stop_on_inf"),
        ({"after_batch": "yes"}, "after_batch"),
        ({"after_epoch": False}, "after_epoch"),
    ],
)
def test_wrong_arguments_are_refused(arguments, name):
    with pytest.raises(ArgumentError) as caught:
        StopOnNaN(**arguments)
    assert caught.value.argument == name


def test_the_weights_before_the_nan_are_kept(tmp_path):
    class Poison(AbstractHook):
        def after_batch(self, batch_data):
            if self.main_loop.training_epochs_done == 1:
                batch_data["loss"] = torch.tensor(NAN)

    config = {
        **CONFIG,
        "hooks": [{"StopOnNaN": {"variables": ["loss"], "after_batch": True}}, {"StopAfter": {"epochs": 3}}],
    }
    training = create_training(config, output_dir=tmp_path / "run")
    poison = Poison()
    poison.register_mainloop(main_loop=training.main_loop)
    training.main_loop.parts.callbacks.listeners["after_batch"].insert(
        0, lambda stream_name, batch_data: poison.after_batch(batch_data)
    )
    with pytest.raises(TrainingAborted):
        run_training(training)
    assert (tmp_path / "run" / "checkpoints" / "latest").readlink().name == "it-00000004"
    assert "exit_status: 3" in (tmp_path / "run" / "trace.yaml").read_text()


def test_it_aborts_before_the_update_so_that_the_weights_stay_as_they_were(tmp_path):
    config = {**CONFIG, "hooks": [{"StopOnNaN": {"after_batch": True}}, {"StopAfter": {"epochs": 3}}]}
    training = create_training(config, output_dir=tmp_path / "run")
    before = [parameter.clone() for parameter in training.model.module.parameters()]
    batches = [{"x": torch.full((2, 11), NAN)}]
    with (
        pytest.raises(TrainingAborted, match="unnamed_train_0/logit is NaN at iteration 1"),
        training.main_loop as loop,
    ):
        loop.epoch([batches])
    assert not training.model.has_updated
    after = list(training.model.module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        [torch.full((4,), 3e38), torch.full((4,), -3e38)],
        [torch.full((70000,), 60000, dtype=torch.float16)],
        [torch.full((4,), 1e308, dtype=torch.float64)],
        [torch.full((4,), 2**40), torch.ones(3, dtype=torch.bool)],
        [torch.tensor([1e30, 2]), np.ones(3), "text"],
    ],
    ids=["overflow", "half", "double", "no floats", "mixed"],
)
def test_numbers_whose_sum_is_infinite_do_not_abort(values):
    hook = hook_of(after_batch=True, stop_on_inf=True)
    hook.after_batch("train", {f"v{index}": value for index, value in enumerate(values)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_number_of_many_aborts_in_every_type(dtype, bad):
    values = torch.ones(1000, dtype=dtype)
    values[777] = bad
    hook = hook_of(after_batch=True, stop_on_inf=True)
    with pytest.raises(TrainingAborted, match="train/bad is"):
        hook.after_batch("train", {"good": torch.ones(3), "bad": values})


@pytest.mark.parametrize("others", [[torch.ones(3)], [torch.arange(3), torch.ones(3)]], ids=["floats", "mixed"])
def test_numbers_behind_it_do_not_hide_one(others):
    values = {"bad": torch.tensor([1.0, NAN]), **{f"v{index}": value for index, value in enumerate(others)}}
    with pytest.raises(TrainingAborted, match="train/bad is NaN"):
        hook_of(after_batch=True).after_batch("train", values)


def test_variables_that_are_looked_at_in_each_batch_are_read_and_those_of_the_epoch_need_not_be_there():
    hook = StopOnNaN(variables=["loss"], after_batch=True)
    assert (hook.reads, hook.monitors) == (["loss"], ())
    hook = StopOnNaN(variables=["loss"])
    assert (hook.reads, hook.monitors) == ((), ["loss"])
    hook = StopOnNaN(after_batch=True)  # any
    assert (hook.reads, hook.monitors) == (None, ())


class Gradients:
    """A model with a module whose gradients are set by hand."""

    def __init__(self, *gradients):
        self.module = torch.nn.Linear(2, 1)
        for parameter, gradient in zip(self.module.parameters(), gradients, strict=True):
            parameter.grad = gradient


class Training:
    iterations_done = 7
    stream_name = "train"


def looking(**arguments):
    hook = StopOnNaN(after_batch=True, **arguments)
    hook.main_loop = Training()
    return hook


def test_a_gradient_aborts_with_the_name_of_its_parameter_and_the_iteration_of_its_batch():
    model = Gradients(torch.tensor([[1.0, NAN]]), torch.ones(1))
    with pytest.raises(TrainingAborted, match="train/gradient of weight is NaN at iteration 8"):
        looking(variables=["loss"]).before_update(model)


def test_gradients_that_are_huge_or_sparse_or_missing_do_not():
    looking(stop_on_inf=True).before_update(Gradients(torch.tensor([[1e30, 1e30]]), None))
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (1, 2), check_invariants=True)
    looking(stop_on_inf=True).before_update(Gradients(sparse, None))
    looking().before_update(Gradients(None, None))


def test_an_infinite_gradient_aborts_when_asked_to():
    model = Gradients(torch.tensor([[1.0, float("inf")]]), torch.ones(1))
    looking().before_update(model)
    with pytest.raises(TrainingAborted, match="train/gradient of weight is infinite"):
        looking(stop_on_inf=True).before_update(model)


def test_updates_are_looked_at_only_when_asked_to():
    assert StopOnNaN().before_update is None


@pytest.mark.parametrize("arguments", [(), (3,)], ids=["none", "another"])
def test_a_model_without_a_torch_module_has_no_gradients_to_look_at(arguments):
    class Own:
        step_outputs = None

    model = Own()
    for module in arguments:
        model.module = module
    looking().before_update(model)


@pytest.mark.parametrize("name", ["loss/mean", "train/loss/mean"])
def test_an_address_guards_nothing_and_is_refused(name):
    with pytest.raises(ArgumentError, match=f"'{name}' is not a variable"):
        StopOnNaN(variables=[name])
