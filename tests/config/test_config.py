"""Configs read from files, `extends` and overrides."""

import os
from pathlib import Path

import numpy as np
import pytest
from config.problems import problem_of
from ruamel.yaml import YAML

from emrun.base.errors import ConfigError
from emrun.config.config import load_config, read_config


@pytest.fixture
def write(tmp_path):
    """Write files below tmp_path, text by name; return the path of the first."""

    def put(**texts):
        paths = [tmp_path / f"{name}.yaml" for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        return paths[0]

    return put


def test_a_directory_stands_for_its_config_file(write):
    path = write(config="a: 1")
    assert dict(read_config(path.parent)) == {"a": 1}


def test_a_mapping_is_a_config_too():
    assert load_config({"a": {"b": (1, 2)}}, ["a.c=3"]) == {"a": {"b": [1, 2], "c": 3}}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(np.float64(0.1), "float64"), (Path("a"), "PosixPath"), ({1}, "set"), (b"x", "bytes"), (int, "type")],
)
def test_a_value_of_a_mapping_that_no_file_can_hold_is_an_error_with_its_key(value, kind):
    problem = problem_of(load_config, {"a": {"b": [1, value]}})
    assert problem.key == "a.b[1]"
    assert f" is a {kind}, not a text, a whole number" in problem.message


def test_a_mapping_that_ruamel_has_read_is_a_config():
    read = YAML().load("a: 1.0e-3 # one\nb: 'x'\nc: 0x10\n")
    assert load_config(read) == {"a": 0.001, "b": "x", "c": 16}


def test_a_byte_order_mark_is_not_part_of_the_config(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfa: 1")
    config = read_config(tmp_path / "c.yaml")
    assert dict(config) == {"a": 1}
    assert (config.root.get("a").key.column, config.root.get("a").key.text) == (1, "a: 1")


@pytest.mark.parametrize(
    "content, line, column",
    [(b"\xff", 1, 1), ("a: é".encode() + b"\xff", 1, 5), ("é: 1\né: é".encode() + b"\xc3(", 2, 5)],
)
def test_bytes_that_are_not_utf_8_are_an_error_at_their_line_and_character(tmp_path, content, line, column):
    (tmp_path / "c.yaml").write_bytes(content)
    problem = problem_of(read_config, tmp_path / "c.yaml")
    assert str(problem) == f"{tmp_path}/c.yaml:{line}:{column}: is not encoded in UTF-8; save the file as UTF-8"


@pytest.mark.parametrize("text", ["", "# only a comment", "[]", "word"])
def test_a_config_that_is_not_a_mapping_is_an_error(write, text):
    problem = problem_of(read_config, write(c=text))
    assert "a config must be a mapping" in problem.message
    assert problem.position.line == 1


@pytest.mark.parametrize("name", ["missing.yaml", "x" * 5000, "c.yaml/below"])
def test_a_file_that_cannot_be_read_is_a_config_error(write, name):
    problem = problem_of(read_config, write(c="a: 1").parent / name)
    assert "cannot be read" in problem.message
    assert name in problem.position.source


def test_a_config_wins_over_what_it_extends(write):
    path = write(c="extends: base.yaml\nm: {lr: 2}\nhooks: [B]", base="m: {lr: 1, k: 1}\nhooks: [A, C]\nseed: 3")
    assert dict(read_config(path)) == {"m": {"lr": 2, "k": 1}, "hooks": ["B"], "seed": 3}


def test_of_several_files_the_later_wins(write):
    path = write(c="extends: [x.yaml, y.yaml]\nc: 3", x="a: 1\nb: 1\nc: 1", y="b: 2\nc: 2")
    assert dict(read_config(path)) == {"a": 1, "b": 2, "c": 3}


def test_extending_an_empty_list_changes_nothing(write):
    assert dict(read_config(write(c="extends: []\na: 1"))) == {"a": 1}


def test_a_file_may_be_extended_along_two_ways(write):
    path = write(c="extends: [x.yaml, y.yaml]", x="extends: z.yaml", y="extends: z.yaml", z="a: 1")
    assert dict(read_config(path)) == {"a": 1}


def test_extended_files_are_looked_for_beside_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text("extends: deep/middle.yaml")
    (tmp_path / "deep" / "middle.yaml").write_text("extends: er/base.yaml\nb: 2")
    (tmp_path / "deep" / "er" / "base.yaml").write_text("a: 1")
    monkeypatch.chdir("/")
    assert dict(read_config(tmp_path / "c.yaml")) == {"a": 1, "b": 2}


def test_here_is_the_directory_of_the_file_that_says_it(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    (tmp_path / "base.yaml").write_text('vars: {x: "${here}/../x", z: "$${here}"}')
    (tmp_path / "a b/c.yaml").write_text("extends: ../base.yaml\nvars: {y: '${here}/y', w: '${vars.y}'}")
    for place, file in ((tmp_path, "a b/c.yaml"), (tmp_path / "a b", "c.yaml"), (Path("/"), tmp_path / "a b/c.yaml")):
        monkeypatch.chdir(place)
        found = load_config(file)["vars"]
        assert {name: os.path.normpath(path) for name, path in found.items()} == {
            "x": str(tmp_path.parent / "x"), "y": str(tmp_path / "a b/y"), "w": str(tmp_path / "a b/y"), "z": "${here}"
        }  # fmt: skip
    (tmp_path / "a b/whole.yaml").write_text("name: ${here}")
    assert "${" not in read_config(tmp_path / "a b/whole.yaml").text  # what a run keeps


@pytest.mark.parametrize(
    "files",
    [
        {"c": "extends: c.yaml"},
        {"c": "extends: x.yaml", "x": "extends: y.yaml", "y": "extends: c.yaml"},
        {"config": "extends: ."},
        {"config": "extends: ''"},
    ],
)
def test_a_cycle_of_extends_is_an_error(write, files):
    problem = problem_of(read_config, write(**files))
    assert problem.key == "extends"
    assert "extends itself" in problem.message
    assert problem.position.line == 1


@pytest.mark.parametrize("name", ["nope.yaml", '"a\\0b"', "x" * 5000, "loop", "c.yaml/below"])
def test_a_missing_extended_file_is_an_error_at_its_name(write, name):
    path = write(c=f"a: 1\nextends: {name}")
    (path.parent / "loop").symlink_to("loop")
    problem = problem_of(read_config, path)
    assert "there is no file" in problem.message
    assert (problem.position.line, problem.position.column) == (2, 10)


@pytest.mark.parametrize("value, shown", [("3", "3"), ("[[a]]", "['a']"), ("{a: 1}", "{'a': 1}"), ("true", "True")])
def test_extends_takes_names_of_files(write, value, shown):
    assert f"{shown} is not a file name" in problem_of(read_config, write(c=f"extends: {value}")).message


def test_an_error_in_an_extended_file_is_reported_there(write):
    path = write(c="extends: base.yaml", base="a: 1\nb: [")
    position = problem_of(read_config, path).position
    assert position.source == str(path.with_name("base.yaml"))
    assert position.line == 2


def test_values_know_which_file_they_come_from(write):
    path = write(c="extends: base.yaml\nm: {k: 1}", base="m: {lr: 1}")
    config = read_config(path, ["m.x=1"])
    sources = [config.root.get("m", key).position.source for key in ("k", "lr", "x")]
    assert sources == [str(path), str(path.with_name("base.yaml")), "override 'm.x=1'"]


def test_a_file_that_many_extend_is_read_once(tmp_path, monkeypatch):
    for index in range(20):
        (tmp_path / f"{index}.yaml").write_text(f"extends: [{index + 1}.yaml, {index + 1}.yaml]")
    (tmp_path / "20.yaml").write_text("seed: 3")
    assert dict(read_config(tmp_path / "0.yaml")) == {"seed": 3}


def test_a_chain_of_files_has_an_end(tmp_path):
    for index in range(101):
        (tmp_path / f"{index}.yaml").write_text(f"extends: {index + 1}.yaml")
    (tmp_path / "101.yaml").write_text("seed: 3")
    assert dict(read_config(tmp_path / "1.yaml")) == {"seed": 3}
    with pytest.raises(ConfigError, match=r"100\.yaml:1:10: extends: more than 100 files extend each other.*101\.yaml"):
        read_config(tmp_path / "0.yaml")


def test_only_regular_files_are_extended(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "c.yaml").write_text("extends: fifo.yaml")
    with pytest.raises(ConfigError, match=r"fifo\.yaml: is not a regular file"):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("own", ["", "  class: TorchModel\n"])
def test_a_file_that_only_changes_the_class_of_the_model_keeps_its_keys(write, own):
    base = (
        f"model:\n{own}  module: {{class: Net}}\n  loss: {{one: {{class: A}}}}\n  optimizer: {{class: Adam, eps: 1}}\n"
    )

    def model(text):
        return read_config(write(c=f"extends: base.yaml\n{text}", base=base)).root.plain()["model"]

    module, optimizer, loss = {"class": "Net"}, {"class": "Adam", "eps": 1}, {"one": {"class": "A"}}
    kept = {"class": "my.Mine", "module": module, "optimizer": optimizer, "loss": loss}
    assert model("model: {class: my.Mine}") == kept
    assert model("model: {class: my.Mine, runs: [a]}") == {"class": "my.Mine", "runs": ["a"]}
    assert model("model: {optimizer: {class: SGD}}")["optimizer"] == {"class": "SGD"}
    assert model("model: {loss: {class: B}}")["loss"] == {"class": "B"}


# Overlays and defaults


def test_an_overlay_is_merged_but_its_hooks_replace():
    config = load_config({"a": {"x": 1, "y": 1}, "hooks": ["A", "B"], "eval": {"t": {"a": {"y": 2}, "hooks": ["C"]}}})
    found = config.overlaid("t")
    assert found["a"] == {"x": 1, "y": 2}
    assert found["hooks"] == ["C"]


def test_an_overlay_without_hooks_keeps_them():
    assert load_config({"hooks": ["A"], "eval": {"test": {"seed": 1}}}).overlaid("test")["hooks"] == ["A"]


@pytest.mark.parametrize("overlays", [{}, {"eval": None}, {"eval": {"valid": {"a": 2}}}, {"eval": {"test": 3}}])
def test_a_stream_without_an_overlay_has_the_config_as_it_is(overlays):
    config = load_config({"a": 1, **overlays})
    assert config.overlaid("test") is config


def test_defaults_are_added_where_the_config_has_nothing():
    config = load_config({"a": 1, "b": None, "d": "${a}"}).with_defaults({"a": 5, "b": 6, "c": 7})
    assert dict(config) == {"a": 1, "b": 6, "c": 7, "d": 1}
    assert config.with_defaults({"a": 5}) is config


def test_a_config_with_a_missing_reference_can_be_read_but_not_loaded():
    assert read_config({"a": "${b}"}).root.plain() == {"a": "${b}"}
    with pytest.raises(ConfigError, match="there is no key 'b'"):
        load_config({"a": "${b}"})


@pytest.mark.parametrize(("value", "how"), [("[1, 2]", "[]"), ("{a: 1}", "{}")])
def test_an_empty_section_does_not_drop_that_of_the_extended_file_in_silence(write, value, how):
    files = {"base": f"hooks: {value}"}
    problem = problem_of(read_config, write(c="extends: base.yaml\nhooks:\n", **files))
    assert f"is empty, which drops {value.count('1') + value.count('2')} entries" in problem.message
    assert f"to drop them, write {how}, or else remove the key" in problem.message
    assert (problem.position.line, problem.position.column) == (2, 1)
    assert not read_config(write(c=f"extends: base.yaml\nhooks: {how}", **files)).root.get("hooks").value or how == "{}"


HOOKS = "hooks: [A, {Stop: {n: 3, u: {a: 1, b: 2}}}, my.Mine: {x: [1]}]"
STOP = {"Stop": {"n": 3, "u": {"a": 1, "b": 2}}}
MINE = {"my.Mine": {"x": [1]}}


@pytest.mark.parametrize(
    ("over", "hooks"),
    [
        ("{}", ["A", STOP, MINE]),
        ("{stop: {u: {b: 4}}}", ["A", {"Stop": {"n": 3, "u": {"a": 1, "b": 4}}}, MINE]),
        ("{A: {y: 1}, Mine: {x: []}}", [{"A": {"y": 1}}, STOP, {"my.Mine": {"x": []}}]),
        ("{B: {y: 1}, my.C: , A: {}}", [{"A": {}}, STOP, MINE, {"B": {"y": 1}}, {"my.C": {}}]),
    ],
)
def test_a_mapping_of_hooks_changes_those_of_the_extended_file_and_adds_others(write, over, hooks):
    assert read_config(write(c=f"extends: base.yaml\nhooks: {over}", base=HOOKS)).root.get("hooks").plain() == hooks
    both = write(c="extends: [base.yaml, over.yaml]", base=HOOKS, over=f"hooks: {over}")
    assert read_config(both).root.get("hooks").plain() == hooks
    chain = write(c="extends: over.yaml", over=f"extends: base.yaml\nhooks: {over}", base=HOOKS)
    assert read_config(chain).root.get("hooks").plain() == hooks


def test_a_mapping_of_hooks_over_no_hooks_is_a_list(write):
    path = write(c="extends: base.yaml\nhooks: {A: {x: 1}, B: }", base="seed: 1")
    assert read_config(path).root.get("hooks").plain() == [{"A": {"x": 1}}, {"B": {}}]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ("{A: 3}", "2:12: hooks.A: must be a mapping of the hook's arguments, not 3; write {ARGUMENT: VALUE}"),
        ("{B: {x: 1}}", "2:12: hooks: B is listed 2 times; use one of the indices [1, 2] instead"),
    ],
)
def test_hooks_that_a_mapping_cannot_change_are_named_at_their_key(write, hooks, message):
    path = write(c=f"extends: base.yaml\nhooks:    {hooks}", base="hooks: [A, B, {B: {y: 1}}]")
    problem = problem_of(read_config, path)
    assert str(problem).split("c.yaml:")[1].startswith(message)
    assert problem.code == "config.extends"
