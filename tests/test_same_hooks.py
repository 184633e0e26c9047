"""Which hook of a resumed run is which hook of before."""

import json
from typing import Literal

import pytest
from projects import linear_on_digits

from emrun import AbstractHook, create_training, resume_training
from emrun.hooks import SaveBest
from emrun.same_hooks import arguments_of, matched
from emrun.training.create import train


class Named(AbstractHook):
    """A hook as a user may write it."""

    def __init__(self, name=None, limit=3, mode: Literal["min", "max"] = "min", **kwargs):
        super().__init__(**kwargs)


class Derived(Named):
    """Hands its arguments on."""

    def __init__(self, *args, every="10 updates", **kwargs):
        super().__init__(*args, **kwargs)


LOSS, ACCURACY = SaveBest(), SaveBest("acc", "accuracy", "max")


@pytest.mark.parametrize(("before", "now", "expected"), [
    ([LOSS, ACCURACY], [ACCURACY, LOSS], [1, 0]),
    ([LOSS, ACCURACY], [LOSS, ACCURACY], [0, 1]),
    ([LOSS, ACCURACY], [ACCURACY], [1]),
    ([LOSS], [ACCURACY, LOSS], [None, 0]),
    ([LOSS], [SaveBest(keep=3, condition="max")], [0]),
    ([LOSS], [ACCURACY], [0]),  # SaveBest itself says what it compares now
    ([Named("a"), Named("b")], [Named("b"), Named("c")], [1, None]),
    ([Named("a", 5), Named("b", 7)], [Named("b", 5), Named("a", 7)], [1, 0]),
    ([Named("a", mode="min"), Named("b", mode="max")], [Named("b", mode="min"), Named("a", mode="max")], [1, 0]),
    ([Named(["a", "b"]), Named({"a": 1})], [Named({"a": 1}), Named(["a", "b"])], [1, 0]),
    ([Named(limit=5), Named(limit=7)], [Named(limit=7), Named(limit=5)], [1, 0]),
    ([Named(limit=5), Named(limit=7)], [Named(limit=6), Named(limit=8)], [0, 1]),
    ([Named(), Named()], [Named(), Named(), Named()], [0, 1, None]),
    ([Named(len), Named(print)], [Named(print), Named(len)], [1, 0]),
    ([Named(object()), Named(object())], [Named(object()), Named(object())], [0, 1]),
    ([Derived("a"), Derived(name="b")], [Derived(name="b", every="5 updates"), Derived("a")], [1, 0]),
])  # fmt: skip
def test_hooks_are_matched_by_what_names_them_and_else_by_their_order(before, now, expected):
    assert matched([*map(arguments_of, before)], [*map(arguments_of, now)]) == expected


def test_hooks_whose_arguments_are_not_known_are_matched_by_their_order():
    assert matched([{}, {}], [*map(arguments_of, [ACCURACY, LOSS])]) == [0, 1]


def test_a_value_of_an_argument_is_not_told():
    assert "secret" not in str(arguments_of(Named("secret")))


def test_two_hooks_of_a_class_that_are_listed_in_another_order_keep_their_best_checkpoints(tmp_path):
    def best(run):
        names = ("best", "acc")
        return [(run / "checkpoints" / name / "model.safetensors").read_bytes() for name in names]

    def hooks(epochs, *bests):
        return ["ComputeStats", *bests, {"StopAfter": {"epochs": epochs}}]

    loss = {"SaveBest": {"condition": "max"}}  # the zeroth epoch is the best: a later checkpoint would replace it
    accuracy = {"SaveBest": {"model_name": "acc", "variable": "accuracy"}}
    metrics = {"accuracy": {"import": "emrun.metrics.accuracy", "inputs": ["logits", "label"]}}
    config = linear_on_digits(main_loop={"extra_streams": ["valid"]}, hooks=hooks(1, loss, accuracy))
    config["model"]["metrics"] = metrics
    train(create_training(config, output_dir=tmp_path / "run"))
    expected = best(tmp_path / "run")
    swapped = hooks(2, accuracy, loss)
    train(resume_training(tmp_path / "run", [f"hooks={json.dumps(swapped)}"]))
    assert best(tmp_path / "run") == expected
