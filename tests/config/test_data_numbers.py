"""`${data:NAME}`: a whole number of unknown value until the dataset is built; tests/wrong_configs has the mistakes."""

import pytest
from config.problems import problem_of

from emrun import create_hooks, create_model
from emrun.base.errors import ConfigError, Position
from emrun.base.preparations import PREPARATION, Preparations, data_numbers
from emrun.config.config import load_config
from emrun.config.data_numbers import DataNumber
from emrun.config.type_hints import mismatch
from emrun.config.yaml_tree import Node

NODE = Node("${data:classes}", Position("c.yaml", 3, 4))
NUMBER = Node(DataNumber.read(NODE), NODE.position)


class Own:
    num_classes = 7
    data_numbers = {"width.x": 3}  # noqa: RUF012 - a stand-in


class Named:
    def classes_names(self):
        return {"city": ["a", "b"], "job": []}


@pytest.mark.parametrize(
    ("dataset", "numbers"),
    [
        (Own(), {"classes": 7, "width.x": 3}),
        (Named(), {"classes.city": 2, "embeddings.city": 3, "classes.job": 0, "embeddings.job": 1}),
        (object(), {}),
    ],
)
def test_the_numbers_of_a_dataset(dataset, numbers):
    assert data_numbers(dataset) == numbers


@pytest.mark.parametrize("hint", [int, float, int | None, "any", bool | int, None])
def test_it_is_a_whole_number_for_the_check_of_types(hint):
    assert mismatch(NUMBER, hint if hint != "any" else None) is None
    assert mismatch(Node([NUMBER], NODE.position), list[int]) is None


@pytest.mark.parametrize("hint", [str, bool, list[int]])
def test_it_is_nothing_else(hint):
    assert mismatch(NUMBER, hint).startswith("${data:classes} is a whole number, not ")


def test_the_run_has_the_first_word():
    prepared = Preparations(numbers={"classes": 5})
    assert NUMBER.value.of({PREPARATION: prepared, "dataset": Own()}) == 5
    assert NUMBER.value.of({PREPARATION: Preparations(), "dataset": Own()}) == 7


@pytest.mark.parametrize("name", ["classes.", "width", "embeddings", "vocabulary", "", "Classes"])
def test_other_names_are_refused_at_once(name):
    problem = problem_of(load_config, {"model": {"n": f"${{data:{name}}}"}})
    assert problem.code == "config.interpolation"
    assert "is not a number of the data" in problem.message


PLACES = [
    {"dataset": {"n": "${data:classes}"}},
    {"vars": {"n": "${data:classes}"}},
    {"main_loop": {"buffer": "${data:classes}"}},
    {"seed": "${data:classes}"},
    {"sweep": {"parameters": {"model.n": ["${data:classes}"]}}},
    {"eval": {"test": {"dataset": {"n": "${data:classes}"}}}},
    {"model": {"n": "${data:classes}"}, "dataset": {"n": "${model.n}"}},
]


@pytest.mark.parametrize("config", PLACES)
def test_other_sections_cannot_have_it(config):
    with pytest.raises(
        ConfigError, match=r"\$\{data:classes\} is known once the dataset is built; only model and hooks"
    ):
        load_config(config)


@pytest.mark.parametrize("text", ["n=${data:classes}", "${data:classes} ", "${model.n}!"])
def test_a_part_of_a_text_cannot_be_it(text):
    with pytest.raises(ConfigError, match="cannot be part of a string"):
        load_config({"model": {"n": "${data:classes}", "m": text}})


def test_a_reference_to_it_is_it_and_an_escape_is_a_text():
    config = load_config(
        {"model": {"n": "${data:classes}"}, "hooks": [{"A": {"n": "${model.n}", "t": "$${data:classes}"}}]}
    )
    assert isinstance(config["hooks"][0]["A"]["n"], DataNumber)
    assert config["model"]["n"] == config["hooks"][0]["A"]["t"] == "${data:classes}"


LINEAR = {"class": "Linear", "in_features": 64, "out_features": "${data:classes}"}
MODEL = {"dataset": {"class": "Digits"}, "model": {"module": LINEAR, "inputs": ["image"], "outputs": ["logits"]}}


def test_a_model_alone_gets_it_from_its_dataset_and_hooks_from_the_given_one():
    assert create_model(MODEL).module.out_features == 10
    assert create_model(MODEL, dataset=Own()).module.out_features == 7
    hooks = {"hooks": [{"StopAfter": {"epochs": "${data:classes}"}}]}
    assert (
        create_hooks(hooks, dataset=Own())[0].limits
        == create_hooks({"hooks": [{"StopAfter": {"epochs": 7}}]})[0].limits
    )
    with pytest.raises(ConfigError, match="is a number of the dataset, which is not given; pass dataset="):
        create_hooks(hooks)
