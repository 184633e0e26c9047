"""`Graph`: layers that do not follow each other one by one."""

import copy

import pytest
import torch
from torch import nn

from emrun import TorchModel, create_training
from emrun.base.errors import ArgumentError, ConfigError
from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out
from emrun.models.graph import Graph

STEPS = [
    ["words", nn.Embedding(10, 4)],
    [None, nn.GRU(4, 6, batch_first=True), "gru", {"take": 0}],
    ["gru", "last"],
    [[None, "numbers"], "cat", "both"],
    ["both", nn.Linear(9, 3), "head"],
]


def test_a_graph_is_what_its_steps_say_and_names_its_layers():
    graph = Graph(["words", "numbers"], copy.deepcopy(STEPS))
    assert {name.partition(".")[0] for name in graph.state_dict()} == {"0", "gru", "head"}
    words, numbers = torch.arange(10).reshape(2, 5), torch.rand(2, 3)
    states, _ = graph.gru(graph.get_submodule("0")(words))
    torch.testing.assert_close(graph(words, numbers), graph.head(torch.cat([states[:, -1], numbers], 1)))


def test_joins_take_several_values_and_a_dimension():
    a, b = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    for what, options, expected in [
        ("add", {}, a + b), ("mul", {}, a * b), ("cat", {}, torch.cat([a, b], 1)),
        ("cat", {"dim": -1}, torch.cat([a, b], 2)),
    ]:  # fmt: skip
        torch.testing.assert_close(Graph(["a", "b"], [[["a", "b"], what, "x", options]])(a, b), expected)
    torch.testing.assert_close(Graph(["a"], [["a", "mean"]])(a), a.mean(1))
    torch.testing.assert_close(Graph(["a"], [["a", "last", {"dim": 2}]])(a), a[:, :, -1])
    both = Graph(["a"], [["a", nn.ReLU(), "x"], ["a", "mean", "y"]], ["y", "x"])(a)
    assert [tuple(each.shape) for each in both] == [(2, 4), (2, 3, 4)]


@pytest.mark.parametrize(
    ("steps", "argument", "message"),
    [
        ([["word", nn.ReLU()]], "steps[0]", "nothing before is 'word'; did you mean 'words'?"),
        ([["words", "catt"]], "steps[0]", "is not a step; write [from, layer or cat, name, {take: 0}]"),
        (["words"], "steps[0]", "is not a step"),
        ([["words", {"a": 1}]], "steps[0]", "is not a step"),
        ([["words", nn.ReLU(), "x"], ["x", nn.ReLU(), "x"]], "steps[1]", "'x' is taken"),
        ([["words", nn.ReLU(), "forward"]], "steps[0]", "'forward' is taken"),
        ([["words", nn.ReLU(), "a.b"]], "steps[0]", "'a.b' is taken, or is not a name"),
        ([["words", nn.ReLU(), "x", {"tak": 0}]], "steps[0]", "is not a step"),
    ],
)
def test_a_wrong_step_is_named(steps, argument, message):
    with pytest.raises(ArgumentError) as caught:
        Graph(["words", "numbers"], steps)
    assert (caught.value.argument, message in caught.value.message) == (argument, True)


def test_a_tuple_and_an_error_of_a_layer_name_the_step():
    with pytest.raises(ArgumentError, match=r"the step 'gru' returns a tuple; write \{take: 0\} at its end"):
        Graph(["x"], [["x", nn.GRU(4, 6), "gru"]])(torch.zeros(2, 3, 4))
    with pytest.raises(RuntimeError) as caught:
        Graph(["x"], [["x", nn.Linear(4, 6), "head"]])(torch.zeros(2, 3))
    assert "step 'head' got x: torch.Size([2, 3])" in "".join(caught.value.__notes__)


CONFIG = {
    "seed": 0,
    "dataset": {"class": "Digits"},
    "model": {
        "module": {
            "class": "Graph",
            "inputs": ["image"],
            "steps": [
                ["image", {"class": "Flatten"}, "flat"],
                ["flat", {"class": "Linear", "in_features": 64, "out_features": "${data:classes}"}, "head"],
            ],
        },
        "outputs": ["logits"],
        "loss": {"class": "CrossEntropyLoss", "inputs": ["logits", "label"]},
        "metrics": {"accuracy": ["logits", "label"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "hooks": [{"StopAfter": {"epochs": 1}}],
}


def test_a_config_has_a_graph_whose_inputs_are_the_sources_and_check_shows_the_shapes(tmp_path):
    report = try_out(load_config(CONFIG))
    assert [report["outputs"][f"step {name}"]["shape"] for name in ("flat", "head")] == ["(B, 64)", "(B, 10)"]
    training = create_training(CONFIG, output_dir=tmp_path / "run")
    training.main_loop.run_training()
    assert isinstance(training.model, TorchModel)


def test_an_error_of_a_step_has_its_place(tmp_path):
    text = """\
dataset: {class: Digits}
model:
  module:
    class: Graph
    inputs: [image]
    steps:
      - [image, {class: Flatten}, flat]
      - [flatt, {class: Linear, in_features: 64, out_features: 10}]
"""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml:8:9: model\.module\.steps\[1\]: nothing before is 'flatt'"):
        create_training(tmp_path / "c.yaml", output_dir=tmp_path / "run")
