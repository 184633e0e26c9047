"""AccumulateVariables: all values of an epoch, also of one that is resumed in its middle."""

import io

import numpy as np
import pytest
import torch

from emrun import MainLoop, create_training, resume_training
from emrun.base.encoding import decode, encode
from emrun.base.errors import ArgumentError, StreamError
from emrun.hooks import AccumulateVariables, StopAfter
from emrun.training.create import train


class Kept(AccumulateVariables):
    """Keeps the values of each epoch, and writes their sum."""

    writes = ("total",)

    def __init__(self, variables=("loss",), **arguments):
        super().__init__(list(variables), **arguments)
        self.epochs = []

    def after_epoch(self, epoch_data):
        self.epochs.append(self.accumulated)
        for stream, values in self.accumulated.items():
            epoch_data[stream]["total"] = float(np.sum(next(iter(values.values()))))


def test_the_values_of_each_epoch_in_their_order(scripted, numbers):
    kept = Kept(["x", "y"])
    model = scripted(lambda batch: {"loss": 0.0, "y": torch.tensor(batch["x"])[:, None] * 2})
    MainLoop(model, numbers, [kept, StopAfter(epochs=1)], extra_streams=["valid"]).run_training()
    assert len(kept.epochs) == 2
    for epoch in kept.epochs:
        assert epoch["train"]["x"] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert np.concatenate(epoch["valid"]["y"]).tolist() == [20.0, 40.0]


def test_values_of_any_kind_survive_a_checkpoint(scripted, numbers):
    values = {
        "half": torch.tensor([0.5, 1.5]).bfloat16(),
        "image": np.arange(8, dtype=np.uint8).reshape(2, 4),
        "text": ["ünïcode", ""],
        "tokens": [[1, 2], [3]],
        "words": [["a"], ["b", "c"]],
        "right": [True, False],
    }
    hook = AccumulateVariables(list(values))
    loop = MainLoop(scripted(lambda batch: values), numbers, [hook])
    with loop:
        loop.notify("after_batch", stream_name="valid", batch_data=values)
        state = io.BytesIO()
        torch.save(encode(hook.state_dict(), "state"), state)
        state.seek(0)
        loaded = AccumulateVariables(list(values))
        loaded.load_state_dict(decode(torch.load(state, weights_only=True)))
    for each in (hook, loaded):
        found = each.accumulated["valid"]
        assert found["half"] == [0.5, 1.5]
        assert [row.tolist() for row in found["image"]] == values["image"].tolist()
        assert found["image"][0].dtype == np.uint8
        assert (found["text"], found["words"], found["right"]) == (values["text"], values["words"], values["right"])
        assert [row.tolist() for row in found["tokens"]] == values["tokens"]


def test_an_array_that_the_stream_uses_again_was_copied(scripted):
    class Again:
        def valid_stream(self):
            array = np.zeros(2)
            for number in range(3):
                array[:] = number
                yield {"x": array}

        train_stream = valid_stream

    hook = AccumulateVariables(["x"])
    MainLoop(scripted(), Again(), [hook]).run_evaluation("valid")
    assert hook.accumulated["valid"]["x"] == [0, 0, 1, 1, 2, 2]


@pytest.mark.campaign  # test_classification_metrics.py resumes in the middle of an epoch; the state has a test above
@pytest.mark.parametrize("iterations", [13, 17])
def test_a_resume_in_the_middle_of_an_epoch_has_all_values(tmp_path, digits_config, iterations):
    hooks = [{f"{__name__}.Kept": {}}, {"StopAfter": {"epochs": 2}}]
    config = digits_config(hooks, fixed_epoch_size=9)
    straight = create_training(config, output_dir=tmp_path / "straight")
    train(straight)
    train(create_training(config, output_dir=tmp_path / "run", overrides=[f"hooks.StopAfter.iterations={iterations}"]))
    resumed = resume_training(tmp_path / "run", overrides=["~hooks.StopAfter.iterations"])
    train(resumed)
    assert resumed.main_loop.metrics[-1]["streams"] == straight.main_loop.metrics[-1]["streams"]
    assert len(straight.hooks[0].epochs[-1]["train"]["loss"]) == 837  # one batch has 37
    assert resumed.hooks[0].epochs[-1] == straight.hooks[0].epochs[-1]


def test_other_variables_than_those_of_the_checkpoint_begin_anew(caplog):
    hook = AccumulateVariables(["y"])
    hook.load_state_dict({"variables": ["x"], "chunks": {"train": {"x": [[1.0]]}}})
    assert hook.accumulated == {}
    assert "AccumulateVariables: the variables are not those of the checkpoint" in caplog.text


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(AccumulateVariables), batch_size=500)
    assert len(training.hooks[0].accumulated["valid"]["accuracy"]) == 180


@pytest.mark.parametrize("variables", ["x", [], [1], None])
def test_variables_are_a_list_of_names(variables):
    with pytest.raises(ArgumentError) as caught:
        AccumulateVariables(variables)
    assert caught.value.argument == "variables"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"z": 1.0}, "hook AccumulateVariables reads 'y', which is neither a source nor an output"),
        ({"y": 1.0}, "'y' is float, not a list, an array or a tensor with an axis"),
        ({"y": torch.tensor(1.0)}, "'y' is Tensor, not a list"),
        ({"y": {"a": 1}}, "'y' is dict, not a list"),
        ({"y": [object()]}, "'y': it has values of the type object"),
    ],
)
def test_what_cannot_be_kept_is_an_error_at_the_first_batch(scripted, numbers, outputs, message):
    loop = MainLoop(scripted(lambda batch: outputs), numbers, [AccumulateVariables(["y"])])
    with pytest.raises(StreamError) as caught:
        loop.run_evaluation("valid")
    assert message in str(caught.value)
    assert caught.value.exit_status == 2
