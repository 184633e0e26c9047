"""The keys that overrides of a config can set, found without importing anything."""

from pathlib import Path

import pytest

from emrun.config.config import read_config
from emrun.config.override_keys import keys_below, streams_of
from emrun.config.plan import defaults_of

SAMPLES = Path(__file__).parent.parent.parent / "sample_configs"


@pytest.fixture
def convnet():
    return read_config(SAMPLES / "digits_convnet.yaml")


def test_the_sections_come_first(convnet):
    found = keys_below(convnet, [])
    assert {name for name, is_deeper in found.items() if is_deeper} == {
        "dataset", "eval", "hooks", "main_loop", "model", "vars"
    }  # fmt: skip
    assert "seed" in found


def test_keys_of_the_config_and_of_the_signature_are_found(convnet):
    found = keys_below(convnet, ["model", "optimizer"])
    assert {"class", "lr", "weight_decay", "groups"} <= found.keys()
    assert "params" not in found  # emrun supplies it
    assert keys_below(convnet, ["model", "scheduler"]).get("warmup") is False


def test_an_item_of_a_list_has_its_own_arguments(convnet):
    assert keys_below(convnet, ["model", "module", "args"]).get("0") is True
    assert {"in_channels", "class"} <= keys_below(convnet, ["model", "module", "args", "0"]).keys()


def test_every_default_of_the_config_can_be_set(convnet):
    for key, _, _ in defaults_of(convnet):
        *above, last = key.split(".")
        if above[0] != "hooks" and not above[-1].isdecimal():
            assert last in keys_below(convnet, above), key


def test_a_key_that_is_not_there_has_nothing_below(convnet):
    assert keys_below(convnet, ["model", "nothing"]) == {}
    assert keys_below(convnet, ["hooks", "Nothing"]) == {}
    assert keys_below(convnet, ["seed", "more"]) == {}


def test_streams_are_those_of_the_class_of_the_dataset(convnet):
    assert streams_of(convnet) == ["test", "train", "valid"]
    assert streams_of(read_config({"model": {}})) == []
