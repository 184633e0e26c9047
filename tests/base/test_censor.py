"""Values of the environment in texts: how they are found, and which are too short to be replaced."""

import io
import json
import sys
from urllib.parse import quote

import pytest

from emrun.base.censor import Censor, censored_standard_error, hide_on_terminal, keep_on_terminal, terminal_censor
from emrun.config.interpolation import interpolate
from emrun.config.yaml_tree import parse

SHOWN = "${env:T}"


def censored(text, value, **arguments):
    return Censor([(value, SHOWN)], **arguments)(text)


FORMS = (
    str,
    repr,
    ascii,
    json.dumps,
    quote,
    lambda value: repr({"k": (value,)}),
    lambda value: repr(f'"{value}'),
    lambda value: repr(value.encode()),
    lambda value: f"https://u:{value}@host/x",
    lambda value: repr(repr(value)),
)


@pytest.mark.parametrize(
    "value", ["s3cr3t-value", 'it\'s "quoted"', "back\\slash", "tab\tbetween", "Größe-ñandú", "a b&c=d"]
)
def test_a_value_is_found_however_it_is_written(value):
    for form in FORMS:
        text = censored(f"before {form(value)} behind", value)
        assert SHOWN in text
        assert value not in text
        assert form(value)[1:-1] not in text


def test_what_is_longer_is_found_within_a_word():
    assert censored("xs3cr3t-valuey", "s3cr3t-value") == f"x{SHOWN}y"


def test_a_short_value_is_found_as_a_word_only():
    assert censored("hush, hushed, my_hush_1, \\nhush", "hush") == f"{SHOWN}, hushed, my_{SHOWN}_1, \\n{SHOWN}"


@pytest.mark.parametrize("value", ["", "1", "abc", "true", "12345", "0.001", "null", "1e-3", " \n "])
def test_what_stands_everywhere_by_chance_stays(value):
    assert censored(f"epoch 1 of abc: true {value} 12345 0.001", value) == f"epoch 1 of abc: true {value} 12345 0.001"


def test_a_long_number_is_found_as_a_whole():
    assert censored("123456, 1234567, 1.123456", "123456") == f"{SHOWN}, 1234567, 1.{SHOWN}"


def test_each_line_of_a_value_is_found_by_itself():
    value = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n"
    assert censored("  | MIIEvQIBADANBg\n", value) == f"  | {SHOWN}\n"
    assert censored(value, value) == f"{SHOWN}\n"
    assert censored(repr(value), value) == f"'{SHOWN}\\n'"


def test_a_short_line_of_a_value_is_not_looked_for():
    assert censored("epoch 1, AAAABBBB", "-----BEGIN\nAAAABBBB\nepoch1\nepoch\n") == f"epoch 1, {SHOWN}"
    assert censored("epoch1", "-----BEGIN\nAAAABBBB\nepoch1\n") == "epoch1"


@pytest.mark.parametrize("value", ["train", "valid", "epoch", "cuda", "Error"])
def test_a_word_that_emrun_writes_stays(value):
    assert censored(f"the {value} stream", value) == f"the {value} stream"


CONFIG = """
dataset: {class: mine.Data, password: "${env:T}"}
model: {module: {class: torch.nn.Sequential}, inputs: [image]}
main_loop: {extra_streams: [holdout]}
hooks: [LogVariables, mine.Hook: {what: "${env:T}"}]
"""


@pytest.mark.parametrize(
    "value", ["password", "Data", "torch.nn.Sequential", "image", "holdout", "LogVariables", "Hook"]
)
def test_a_name_that_the_config_shows_is_not_a_secret(value, monkeypatch):
    monkeypatch.setenv("T", value)
    assert list(interpolate(parse(CONFIG, "c.yaml")).secrets()) == []


def test_another_value_of_the_config_is_a_secret(monkeypatch):
    monkeypatch.setenv("T", "images")
    assert set(interpolate(parse(CONFIG, "c.yaml")).secrets()) == {("images", SHOWN)}


def test_the_longest_of_several_values_is_replaced():
    censor = Censor([("token-1", "${env:A}"), ("token-1-and-more", "${env:B}")])
    assert censor("token-1-and-more token-1") == "${env:B} ${env:A}"


def test_a_kept_path_stays_as_it_is():
    censor = Censor([("/home/alice", "${env:HOME}")], kept=["/home/alice/log/run"])
    assert censor("/home/alice/log/run/x, /home/alice/log/running") == "/home/alice/log/run/x, ${env:HOME}/log/running"


def test_keys_and_numbers_of_a_tree_stay():
    censor = Censor([("s3cr3t-value", SHOWN)])
    assert censor.plain({"s3cr3t-value": ["s3cr3t-value", 1, None]}) == {"s3cr3t-value": [SHOWN, 1, None]}


def test_standard_error_is_censored_in_the_block_only(monkeypatch):
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with censored_standard_error():
        print("s3cr3t-value", file=sys.stderr)
        hide_on_terminal([("s3cr3t-value", SHOWN)])
        keep_on_terminal("/s3cr3t-value/run")
        sys.stderr.writelines(["s3cr3t-value\n", "/s3cr3t-value/run\n"])
    print("s3cr3t-value", file=sys.stderr)
    assert plain.getvalue() == f"s3cr3t-value\n{SHOWN}\n/s3cr3t-value/run\ns3cr3t-value\n"
    assert sys.stderr is plain
    assert terminal_censor() is None
