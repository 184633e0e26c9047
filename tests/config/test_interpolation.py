"""References to other values and to the environment, and free values that are never used."""

import os
import shlex

import pytest
from config.problems import problem_of

from emrun.base.errors import ConfigError, Position
from emrun.config.config import Config, read_config
from emrun.config.interpolation import escaped, interpolate, unread_vars
from emrun.config.overrides import override
from emrun.config.plan import Plan
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import MAX_DEPTH, node_of, parse


def interpolated(text, *overrides):
    return interpolate(override(parse(text, "c.yaml"), overrides)).plain()


def interpolation_problem(text):
    return problem_of(interpolate, parse(text, "c.yaml"))


@pytest.mark.parametrize("value", [3, 0.001, True, None, "x", [1, {"b": 2}], {"c": [1.5]}])
def test_a_single_interpolation_gets_the_type_of_its_value(value):
    found = interpolate(node_of({"a": "${b}", "b": value}, Position("x"))).plain()["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("x${n}", "x3"),
        ("${n}${s}", "3t"),
        ("${n} ", "3 "),
        ("$${n}", "${n}"),
        ("x$${n}${n}", "x${n}3"),
        ("$${", "${"),
        ("$${${n}}", "${3}"),
        ("$n {n} $", "$n {n} $"),
        ("${l.1.k}", 7),
        ("${r.k}", 7),
        ("${m}", {"k": 7}),
        ("${10}", "ten"),
    ],
)
def test_interpolation(text, value):
    config = {"a": text, "n": 3, "s": "t", "l": [0, {"k": 7}], "m": {"k": 7}, "r": "${m}", 10: "ten"}
    assert interpolate(node_of(config, Position("x"))).plain()["a"] == value


def test_interpolations_are_followed():
    assert interpolated("a: ${b}\nb: x${c}\nc: ${d.e}\nd: {e: 1}")["a"] == "x1"


def test_an_override_is_seen_by_every_interpolation():
    assert interpolated("a: ${m.k}\nb: [ 'x${m.k}' ]\nm: {k: 1}", "m.k=5") == {"a": 5, "b": ["x5"], "m": {"k": 5}}


def test_an_override_may_be_an_interpolation():
    assert interpolated("a: 1\nb: 2", "a=${b}") == {"a": 2, "b": 2}


def test_interpolation_leaves_the_merged_config_as_it_was(monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    text = "a: ${b}\nb: {c: 1}\nd: x${b.c}\npw: ${env:EMRUN_TEST_PW}\n"
    config = parse(text, "c.yaml")
    assert interpolate(config).plain()["pw"] == "hunter2"
    assert dump(config, text) == text


def test_an_interpolated_value_has_the_position_of_the_interpolation():
    position = interpolate(parse("a: 1\nb:\n  c: ${a}", "c.yaml")).get("b", "c").position
    assert (position.line, position.column) == (3, 6)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: ${modl.lr}\nmodel: {lr: 1}", "${modl.lr} does not exist: there is no key 'modl'; did you mean 'model'?"),
        ("a: ${model.l_r}\nmodel: {lr: 1}", "there is no key 'l_r'; did you mean 'lr'?"),
        ("a: ${l.5}\nl: [1]", "there is no key '5'"),
        ("a: ${n.x}\nn: 1", "there is no key 'x'"),
        ("a: ${}", "there is no key ''"),
        ("a: ${a}", "${a} refers to itself: a -> a"),
        ("a: x${b}\nb: ${c}\nc: ${b}", "refers to itself: b -> c -> b"),
        ("a: {b: '${a}'}", "refers to itself: a -> a"),
        ("a: x${b}\nb: [1]", "${b} is a mapping or a list, which cannot be part of a string"),
        ("a: x${b", "'${' has no closing '}'; write '$${' for a literal '${'"),
        ("a: '${b${c}}'\nc: 1", "'${' has no closing '}'"),
        ("a: ${env:EMRUN_TEST_NOT_SET}", "the environment variable 'EMRUN_TEST_NOT_SET' is not set; set it"),
    ],
)
def test_an_interpolation_that_cannot_be_followed_is_an_error_where_it_stands(text, message):
    problem = interpolation_problem(text)
    assert message in problem.message
    assert problem.position.line > 0


def test_interpolations_cannot_multiply_without_end(monkeypatch):
    monkeypatch.setattr("emrun.config.interpolation.MAX_NODES", 2000)
    doubled = "".join(f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']\n" for i in range(1, 40))
    assert "more than 2000 values" in interpolation_problem("a0: [x, x]\n" + doubled).message
    doubled = "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 40))
    assert "more than 2000 values" in interpolation_problem("a0: x\n" + doubled).message


def test_interpolations_cannot_go_deeper_without_end():
    chain = "".join(f"a{i}: '${{a{i + 1}}}'\n" for i in range(1100))
    assert "levels" in interpolation_problem(chain + "a1100: x").message
    nested = "".join(f"a{i}: {'[' * 80}'${{a{i + 1}}}'{']' * 80}\n" for i in range(30))
    assert "levels" in interpolation_problem(nested + "a30: x").message


def test_an_override_cannot_make_a_config_too_deep():
    config = override(parse("a: 1", "c.yaml"), [".".join("b" * 99) + "=" + "[" * 99 + "]" * 99])
    assert f"more than {MAX_DEPTH} levels" in problem_of(interpolate, config).message


VARS = """\
vars: {width: 32, deep: {a: 1, b: [2]}, opt: {class: SGD}, n: &n 5}
model: {module: {hidden: "${vars.width}", all: "${vars.deep}"}, optimizer: "${vars.opt}"}
dataset: {n: *n, text: "x${vars.deep.a}"}
"""


def test_a_free_value_is_read_by_interpolations_and_overridden():
    found = interpolated(VARS, "vars.width=64", "vars.deep.b.0=3", "vars.deep.new=4")
    assert found["model"]["module"] == {"hidden": 64, "all": {"a": 1, "b": [3], "new": 4}}
    assert found["model"]["optimizer"] == {"class": "SGD"}


def test_free_values_that_are_never_used_are_noted():
    text = VARS + "eval: {test: {vars: {width: 1, nothing: 2}}}"
    assert unread_vars(parse(text, "c.yaml")) == ["${vars.nothing} is never used (c.yaml:4:32)"]
    assert unread_vars(parse("vars: {a: {b: 1, c: 2}, d: [1]}\nx: ${vars.a.b}", "c.yaml")) == [
        "${vars.a.c} is never used (c.yaml:1:18)",
        "${vars.d} is never used (c.yaml:1:25)",
    ]


def test_an_overlay_has_free_values_of_its_own():
    config = parse(VARS + "eval: {test: {vars: {width: 1}}}", "c.yaml")
    assert Config(config, "c").overlaid("test")["model"]["module"]["hidden"] == 1


@pytest.mark.parametrize(
    "value, whole, in_text",
    [
        ("5", 5, "x5"),
        ("1e-3", 0.001, "x1e-3"),
        ("007", 7, "x007"),
        ("true", True, "xtrue"),
        ("no", "no", "xno"),
        ("word", "word", "xword"),
        ("", None, "x"),
        ("'5'", "5", "x'5'"),
        ("p#ss #1", "p#ss #1", "xp#ss #1"),
        ("&pw", "&pw", "x&pw"),
        ("[1]", "[1]", "x[1]"),
        ("a: b", "a: b", "xa: b"),
        ("${b}", "${b}", "x${b}"),
    ],
)
def test_a_value_of_the_environment_is_a_scalar_of_yaml_and_a_part_of_a_text_as_it_is(
    monkeypatch, value, whole, in_text
):
    monkeypatch.setenv("EMRUN_TEST_VALUE", value)
    found = interpolated("a: ${env:EMRUN_TEST_VALUE}\nb: x${env:EMRUN_TEST_VALUE}")
    assert found == {"a": whole, "b": in_text}
    assert type(found["a"]) is type(whole)


@pytest.mark.parametrize("text, value", [("3", 3), ("", None), ("a,b", "a,b"), ("/data/x", "/data/x"), ("'3'", "3")])
def test_a_default_is_used_when_the_environment_variable_is_not_set(monkeypatch, text, value):
    monkeypatch.delenv("EMRUN_TEST_VALUE", raising=False)
    assert interpolated(f"a: ${{env:EMRUN_TEST_VALUE,{text}}}") == {"a": value}
    monkeypatch.setenv("EMRUN_TEST_VALUE", "set")
    assert interpolated(f"a: ${{env:EMRUN_TEST_VALUE,{text}}}") == {"a": "set"}


def test_the_environment_is_read_at_each_interpolation(monkeypatch):
    config = parse("a: ${env:EMRUN_TEST_VALUE}", "c.yaml")
    for value in ("one", "two"):
        monkeypatch.setitem(os.environ, "EMRUN_TEST_VALUE", value)
        assert interpolate(config).plain() == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "a: ${env:EMRUN_TEST_PW}\nb: ${a.x}",
        "a: ${env:EMRUN_TEST_PW}\nb: x${a}${c}",
        "a: ${env:EMRUN_TEST_PW}\nb: x${l}\nl: ['${a}']",
        "a: x${env:EMRUN_TEST_PW}${env:EMRUN_TEST_NOT_SET}",
    ],
)
def test_what_came_from_the_environment_is_in_no_message(monkeypatch, text):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    with pytest.raises(ConfigError) as caught:
        interpolate(parse(text, "c.yaml"))
    assert "hunter2" not in str(caught.value)


def test_what_came_from_the_environment_is_shown_as_the_config_says_it(monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    text = "a: ${env:EMRUN_TEST_PW}\nb: x${env:EMRUN_TEST_PW}\nc: ${b}\nd: y${a}\ne: ${env:EMRUN_TEST_NO,7}"
    config = interpolate(parse(text, "c.yaml"))
    assert config.plain() == {"a": "hunter2", "b": "xhunter2", "c": "xhunter2", "d": "yhunter2", "e": 7}
    shown = {"a": "${env:EMRUN_TEST_PW}", "b": "x${env:EMRUN_TEST_PW}", "c": "x${env:EMRUN_TEST_PW}", "d": "y${a}"}
    assert config.shown() == {**shown, "e": 7}


def test_an_escaped_text_is_not_interpolated():
    for text in ("/a/${x}", "${", "$${x}", "$$$${", "a $ {", "}${a.b}${c}"):
        config = node_of({"path": escaped(text)}, Position("c.yaml"))
        assert interpolate(config).plain() == {"path": text}


def test_a_free_value_of_an_extended_file_need_not_be_used(tmp_path):
    (tmp_path / "base.yaml").write_text("vars: {shared: 1}")
    (tmp_path / "own.yaml").write_text("extends: base.yaml\nvars: {own: 1}")
    (note,) = unread_vars(read_config(tmp_path / "own.yaml").root)
    assert note.startswith("${vars.own} is never used")


def test_the_environment_can_be_left_alone(monkeypatch):
    monkeypatch.setenv("EMRUN_TEST", "secret")
    text = "a: ${env:EMRUN_TEST}\nb: x ${env:EMRUN_TEST,y} ${c}\nc: 3\nd: ${c}\ne: ${env:EMRUN_TEST_NOT_SET}\nf: ${a}\n"
    assert interpolate(parse(text, "c.yaml"), reads_environment=False).plain() == {
        "a": "${env:EMRUN_TEST}", "b": "x ${env:EMRUN_TEST,y} 3", "c": 3, "d": 3, "e": "${env:EMRUN_TEST_NOT_SET}",
        "f": "${env:EMRUN_TEST}",
    }  # fmt: skip


TEXTS = """
from pathlib import Path
from typing import Optional, Union


class Takes:
    def __init__(
        self, text: str = "a", maybe: Optional[str] = None, texts: list[str] = (), by_name: dict[str, str] = {},
        either: Union[str, list[str]] = "a", path: Path = Path("a"), number: int = 1, real: float = 1.0,
        any_number: Union[int, str] = 1, switch: bool = True, anything=None,
    ):
        pass

    def train_stream(self):
        yield {}
"""
VALUES = ["007", "0x10", "1e3", "1_000", "1.10", "true", "null", "~", "yes", "2020-01-01", "#tag", "a #b", "a: b", " x"]


def built_with(tmp_path, monkeypatch, text, **variables):
    (tmp_path / "taking.py").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "c.yaml").write_text(
        f"dataset: {{class: taking.Takes, {text}}}\nmodel: {{module: {{class: torch.nn.Identity}}, inputs: [x]}}\n"
    )
    return Plan.of(read_config(tmp_path / "c.yaml")).dataset.kwargs


@pytest.mark.parametrize("value", VALUES)
def test_a_text_of_the_environment_stays_a_text_where_a_text_is_wanted(tmp_path, monkeypatch, value):
    text = "text: '${env:V}', maybe: '${env:V}', texts: ['${env:V}', b], by_name: {k: '${env:V}'}, either: '${env:V}'"
    found = built_with(tmp_path, monkeypatch, f"{text}, path: 'a${{env:V}}'", V=value)
    maybe = None if value in ("null", "~") else value
    assert found == {
        "text": value, "maybe": maybe, "texts": [value, "b"], "by_name": {"k": value}, "either": value,
        "path": f"a{value}",
    }  # fmt: skip


def test_a_default_and_a_reference_to_the_environment_stay_texts_too(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    found = built_with(tmp_path, monkeypatch, "text: '${env:NOT_SET,007}', maybe: '${dataset.text}'")
    assert found == {"text": "007", "maybe": "007"}


@pytest.mark.parametrize(
    ("parameter", "value", "found"),
    [
        ("number", "007", 7), ("real", "1e3", 1000.0), ("real", "5", 5), ("any_number", "7", 7),
        ("switch", "true", True),
        ("anything", "1e3", 1000.0), ("anything", "null", None), ("text", "'007'", "'007'"),
    ],
)  # fmt: skip
def test_a_value_of_the_environment_is_yaml_where_more_than_a_text_is_wanted(
    tmp_path, monkeypatch, parameter, value, found
):
    kwargs = built_with(tmp_path, monkeypatch, f"{parameter}: '${{env:V}}'", V=value)
    assert kwargs == {parameter: found if value != "'007'" else "007"}


def test_a_plain_value_of_a_file_keeps_the_meaning_that_it_has_in_yaml(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"dataset\.text: 7 is not a string; write it in quotes"):
        built_with(tmp_path, monkeypatch, "text: 007")


@pytest.mark.parametrize("value", ["007", "1e3", "true"])
def test_a_number_of_an_override_for_a_text_is_refused_with_what_to_write(tmp_path, monkeypatch, value):
    built_with(tmp_path, monkeypatch, "text: b")
    with pytest.raises(ConfigError) as raised:
        Plan.of(read_config(tmp_path / "c.yaml", [f"dataset.text={value}"]))
    (problem,) = raised.value.problems
    (argument,) = shlex.split(problem.message.rpartition("; write ")[2])
    assert Plan.of(read_config(tmp_path / "c.yaml", [argument])).dataset.kwargs == {"text": value}
    assert problem.fix == f"override {argument}"


def test_the_name_of_a_run_may_be_a_number_of_the_environment(monkeypatch):
    monkeypatch.setenv("JOB", "0012")
    assert Config(parse("name: '${env:JOB}'", "c.yaml"), "").tree.get("name").value == "0012"
