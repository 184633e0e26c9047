"""Values of the environment in texts: which are replaced, and where they stay."""

import io
import sys
from pathlib import Path

import pytest

from emrun.base import censor
from emrun.base.censor import censored_standard_error, hidden, hidden_in, hide, references
from emrun.base.errors import ConfigError, Problem
from emrun.config.interpolation import interpolate
from emrun.config.yaml_tree import parse

SHOWN = "${env:T}"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setattr(censor, "_REVEALED", set())
    hide("s3cr3t-value", SHOWN)


def test_a_value_is_replaced_wherever_it_stands():
    assert hidden("xs3cr3t-valuey, ('s3cr3t-value',)") == f"x{SHOWN}y, ('{SHOWN}',)"


def test_space_around_a_value_does_not_count():
    hide(" another-value\n", "${env:U}")
    assert hidden("another-value") == "${env:U}"


@pytest.mark.parametrize("value", ["", "1", "train", "epoch", "0.00001", " \n "])
def test_a_word_or_a_number_of_fewer_than_8_characters_stays(value):
    hide(value, "${env:U}")
    assert hidden("epoch 1 of train: 0.00001 \n ") == "epoch 1 of train: 0.00001 \n "


def test_a_short_value_with_letters_and_digits_is_replaced_as_a_whole_word():
    hide("hunter2", "${env:U}")
    hide("a1b", "${env:V}")
    assert hidden("me:hunter2@host hunter22 'hunter2' a1b") == "me:${env:U}@host hunter22 '${env:U}' a1b"


def test_the_longest_of_several_values_is_replaced():
    hide("s3cr3t-value-and-more", "${env:B}")
    assert hidden("s3cr3t-value-and-more s3cr3t-value") == f"${{env:B}} {SHOWN}"


def test_a_value_in_the_path_of_the_run_stays():
    hide("/home/alice", "${env:HOME}")
    censor.reveal(Path("/home/alice/log/run"))
    assert hidden("/home/alice/data with s3cr3t-value") == f"/home/alice/data with {SHOWN}"


def test_keys_and_numbers_of_a_tree_stay():
    assert hidden_in({"s3cr3t-value": ["s3cr3t-value", 1, None]}) == {"s3cr3t-value": [SHOWN, 1, None]}


@pytest.mark.parametrize("text", ["${env:T}", "https://me:${env:T}@host", "${env:T,other}"])
@pytest.mark.parametrize(("value", "is_read_as"), [("hush-hush", "hush-hush"), ("'0123456789'", "0123456789")])
def test_what_a_config_takes_from_the_environment_is_replaced(text, value, is_read_as, monkeypatch):
    monkeypatch.setenv("T", value)
    config = interpolate(parse(f"a: '{text}'\nb: ${{a}}", "c.yaml")).plain()
    assert is_read_as in config["a"]
    assert is_read_as not in hidden(f"{config}")


def test_a_default_is_not_replaced():
    interpolate(parse("a: '${env:EMRUN_TEST_NOT_SET,visible-default}'", "c.yaml"))
    assert hidden("visible-default") == "visible-default"


def test_an_error_of_a_config_does_not_show_a_value():
    assert (
        str(ConfigError(Problem(None, "model", "'s3cr3t-value' is not a number")))
        == f"model: '{SHOWN}' is not a number"
    )


def test_another_process_can_hide_the_same_values():
    assert references() == {"s3cr3t-value": SHOWN}


def test_standard_error_is_censored_in_the_block_only(monkeypatch):
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with censored_standard_error():
        print("s3cr3t-value", file=sys.stderr)
        sys.stderr.writelines(["s3cr3t-value\n"])
    print("s3cr3t-value", file=sys.stderr)
    assert plain.getvalue() == f"{SHOWN}\n{SHOWN}\ns3cr3t-value\n"
    assert sys.stderr is plain
