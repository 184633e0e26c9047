"""The sections of a config, and the keys of `main_loop`, are checked."""

import pytest

from emrun.config.interpolation import interpolate
from emrun.config.sections import check_main_loop, check_sections
from emrun.config.signatures import parameters_of
from emrun.config.yaml_tree import parse
from emrun.loop.main_loop import MainLoop

MINIMAL = "dataset: {class: D}\nmodel: {class: M}\n"


def problems_of(text):
    return [str(problem) for problem in check_sections(interpolate(parse(text, "c.yaml")))]


@pytest.mark.parametrize(
    "more",
    [
        "",
        "hooks:",
        "main_loop:",
        "eval: {test: }",
        "seed: null",
        "name: ''",
        "hooks: [A, {B: }, {C: {x: 1}}]",
        "eval: {test: {hooks: [A], model: {x: 1}, seed: 3}}",
        "seed: 3\ndeterministic: true\nname: x\nmain_loop: {}\nhooks: []",
    ],
)
def test_a_config_of_known_sections_has_no_problems(more):
    assert problems_of(MINIMAL + more) == []


@pytest.mark.parametrize(
    "more, problem",
    [
        ("modl: 3", "c.yaml:3:1: unknown key 'modl'; did you mean 'model'?"),
        ("zzz: 3", "c.yaml:3:1: unknown key 'zzz'; allowed: seed, "),
        ("3: 4", "c.yaml:3:1: unknown key 3; allowed: "),
        ("null: 4", "c.yaml:3:1: unknown key None; allowed: "),
        ("hooks: 3", "c.yaml:3:8: hooks: 3 is not a list"),
        ("hooks: {A: 1}", "c.yaml:3:8: hooks: this mapping is not a list of hooks: write `- Name` or `- Name: {"),
        ("hooks:\n- A:\n  b: 1", "c.yaml:4:3: hooks[0]: {'A': None, 'b': 1} is not a hook; write `- Name` or"),
        ("hooks: [3]", "c.yaml:3:9: hooks[0]: 3 is not a hook; write `- Name` or `- Name: {argument: value}`"),
        ("hooks: [A, {B: 1, C: 2}]", "c.yaml:3:12: hooks[1]: {'B': 1, 'C': 2} is not a hook"),
        ("hooks: [{1: {x: 1}}]", "c.yaml:3:9: hooks[0]: {1: {'x': 1}} is not a hook"),
        ("hooks: [{class: A}]", "c.yaml:3:9: hooks[0]: {'class': 'A'} is not a hook; write `- Name` or"),
        ("hooks: [{'A {b': '1}'}]", "c.yaml:3:9: hooks[0]: {'A {b': '1}'} is not a hook; write `- Name` or"),
        ("hooks: [null]", "hooks[0]: None is not a hook"),
        ("hooks: [{A: 3}]", "c.yaml:3:9: hooks[0]: {'A': 3} is not a hook; write `- Name` or"),
        ("main_loop: [3]", "c.yaml:3:12: main_loop: this list is not a mapping"),
        ("seed: x", "c.yaml:3:7: seed: 'x' is not a whole number"),
        ("seed: true", "c.yaml:3:7: seed: True is not a whole number"),
        ("seed: 1.0", "c.yaml:3:7: seed: 1.0 is not a whole number"),
        ("seed: -1", "c.yaml:3:7: seed: must be 0 or greater, not -1"),
        ("deterministic: 1", "c.yaml:3:16: deterministic: 1 is not true or false"),
        ("deterministic: yes", "deterministic: 'yes' is a text, not true or false; write true"),
        ("deterministic: 'false'", "deterministic: 'false' is a text, not true or false; write false"),
        ("seed: '1'", "seed: '1' is not a whole number; write the number without quotes"),
        ("name: 3", "c.yaml:3:7: name: 3 is not a string"),
        ("name: ..", "c.yaml:3:7: name: '..' cannot name a file or a directory"),
        ("name: " + "x" * 200, "cannot name a file or a directory"),
        ("code_directory: [a]", "c.yaml:3:17: code_directory: this list is not a string"),
        ("eval: 3", "c.yaml:3:7: eval: 3 is not a mapping"),
        ("eval: {test: 3}", "c.yaml:3:14: eval.test: 3 is not a mapping of sections"),
        ("eval: {test: {hoks: []}}", "c.yaml:3:15: eval.test: unknown key 'hoks'; did you mean 'hooks'?"),
        ("eval: {test: {name: x}}", "eval.test: unknown key 'name'"),
        ("eval: {test: {hooks: 3}}", "c.yaml:3:22: eval.test.hooks: 3 is not a list"),
        ("eval: {test: {hooks: [3]}}", "c.yaml:3:23: eval.test.hooks[0]: 3 is not a hook"),
    ],
)
def test_a_wrong_section_is_reported_at_its_position(more, problem):
    (found,) = problems_of(MINIMAL + more)
    assert problem in found


@pytest.mark.parametrize(
    "text, problems",
    [
        ("{}", ["c.yaml:1:1: missing section 'dataset'", "c.yaml:1:1: missing section 'model'"]),
        ("dataset: {}", ["c.yaml:1:1: missing section 'model'"]),
        (
            "dataset:\nmodel: 3",
            ["c.yaml:1:1: dataset: it is empty, and is not a mapping", "c.yaml:2:8: model: 3 is not a mapping"],
        ),
    ],
)
def test_dataset_and_model_are_needed(text, problems):
    assert problems_of(text) == problems


def test_all_problems_of_the_structure_are_reported():
    assert len(problems_of("dataset: 1\nmodel: 2\nseed: x\nhooks: [3]\nzzz: 1\neval: {a: 1}")) == 6


@pytest.mark.parametrize(
    "text",
    ["seed: X", "hooks: [[X]]", "eval: {test: X}", "hooks: [{A: X}]"],
)
def test_what_came_from_the_environment_is_shown_as_the_config_says_it(monkeypatch, text):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    (problem,) = problems_of(MINIMAL + text.replace("X", "'${env:EMRUN_TEST_PW}'"))
    assert "hunter2" not in problem
    assert "${env:EMRUN_TEST_PW}" in problem


# The main loop


def main_loop_problems(text):
    return [str(problem) for problem in check_main_loop(parse(text, "c.yaml"), parameters_of(MainLoop))]


def test_arguments_of_the_main_loop_are_its_keys():
    assert main_loop_problems("{buffer: 3, extra_streams: [valid], skip_zeroth_epoch: true}") == []


def test_an_unknown_key_of_the_main_loop_gets_the_nearest_one():
    assert main_loop_problems("bufer: 3") == ["c.yaml:1:1: main_loop: unknown argument 'bufer'; did you mean 'buffer'?"]


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_unknown_keys_are_left_to_the_main_loop_where_the_policy_says_so(policy):
    assert main_loop_problems(f"{{bufer: 3, on_incorrect_config: {policy}}}") == []


@pytest.mark.parametrize("policy", ["error", "warn", "ignore", "[x]"])
@pytest.mark.parametrize("key", ["model", "dataset", "hooks", "run", "seed", "self", "3", "null"])
def test_keys_that_emrun_supplies_or_that_are_not_names_are_always_refused(policy, key):
    problems = main_loop_problems(f"{{{key}: 3, on_incorrect_config: {policy}}}")
    assert sum("unknown argument" in problem for problem in problems) == 1


@pytest.mark.parametrize("section", [None, parse("~", "c.yaml")])
def test_the_section_main_loop_is_optional(section):
    assert list(check_main_loop(section, parameters_of(MainLoop))) == []
