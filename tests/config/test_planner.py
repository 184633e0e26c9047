"""Plans of values, sections and hooks: what is built how, and every mistake at its place."""

import pytest

from emrun.base.censor import hidden
from emrun.base.errors import ConfigError
from emrun.config.import_finder import Imported, locate
from emrun.config.planner import Planner
from emrun.config.yaml_tree import parse
from emrun.hook import AbstractHook
from emrun.training.create import create_training

# Problems


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{class: mine.Point, xx: 1, x: 1}", "c.yaml:1:25: it: unknown argument 'xx'; did you mean 'x'?"),
        ("{class: mine.Point, x: 1, q: 1}", "c.yaml:1:31: it: unknown argument 'q'; allowed: x, y, z"),
        ("{class: mine.Point, y: 1}", "c.yaml:1:1: it: missing argument 'x'"),
        (
            "{class: mine.Point, args: [1, 2, 3]}",
            "c.yaml:1:1: it: too many positional arguments: 3, at most 2 are allowed",
        ),
        (
            "{class: mine.Point, args: [1], x: 1}",
            "c.yaml:1:36: it: argument 'x' is already given by position; remove it",
        ),
        ("{class: mine.Point, args: 3}", "c.yaml:1:25: it.args: 3 is not a list of positional arguments"),
        ("{class: mine.Thing, 3: 4}", "c.yaml:1:25: it: the name of an argument must be a string, not 3"),
        ("{class: mine.Point, x: 1, 3: 4}", "c.yaml:1:31: it: the name of an argument must be a string, not 3"),
        ("{class: mine.Thing, import: mine.double}", "c.yaml:1:1: it: has both 'class' and 'import'"),
        ("{import: mine.double, x: 1}", "c.yaml:1:27: it: unknown argument 'x'; 'import' names an object"),
        ("{import: mine.double, args: []}", "c.yaml:1:27: it: unknown argument 'args'; 'import' names"),
        (
            "{class: mine.NUMBER}",
            "c.yaml:1:6: it: 'class' must name a class or a function; use 'import' for any other object",
        ),
        ("{class: 3}", "c.yaml:1:6: it: 3 is not the name of a class"),
        ("{class: }", "c.yaml:1:6: it: None is not the name of a class"),
        ("{class: [mine.Point]}", "c.yaml:1:6: it: ['mine.Point'] is not the name of a class"),
        ("{class: ''}", "c.yaml:1:6: it: '' is not the name of a class"),
        ("{class: .Point}", "c.yaml:1:6: it: '.Point' is not a dotted path such as my_module.MyClass"),
        ("{class: 'mine..Point'}", "is not a dotted path such as my_module.MyClass"),
        ("{class: 'a b.C'}", "c.yaml:1:6: it: 'a b.C' is not a dotted path"),
        ('{class: "a\\0.B"}', "is not a dotted path"),
        (
            "{class: Point}",
            "it: unknown class 'Point'; write its dotted path, such as torch.nn.Point or my_module.Point",
        ),
        ("{class: mine.Pointt}", "has no 'Pointt'; did you mean 'Point'?"),
        ("{class: mine.Outer.Iner}", "c.yaml:1:6: it: mine.Outer.Iner: Outer has no 'Iner'; did you mean 'Inner'?"),
        (
            "{class: not_there.Point}",
            "c.yaml:1:6: it: no module 'not_there' (looked for in the current directory",
        ),
        ("{class: os.pth.join}", "has no 'pth'; did you mean 'path'?"),
        ("[1, {class: mine.Point, x: 1, a: {class: mine.Point}}]", "it[1]: unknown argument 'a'"),
        ("{class: mine.Thing, a: [{class: mine.Point}]}", "c.yaml:1:29: it.a[0]: missing argument 'x'"),
    ],
)
def test_a_problem_has_its_position_its_key_and_what_to_do(prepare, text, problem):
    _, problems = prepare(f"it: {text}")
    assert any(problem in found for found in problems), problems


def test_all_problems_are_found_at_once(prepare):
    text = (
        "it: {class: mine.Point, xx: 1, a: {class: mine.double}, "
        "b: [{class: no.Where}, {class: mine.Point, args: [1, 2, 3]}]}"
    )
    _, problems = prepare(text)
    for part in (
        "argument 'xx'",
        "missing argument 'x'",
        "it.a: missing",
        "it.b[0]: no module",
        "it.b[1]: too many positional arguments",
    ):
        assert any(part in problem for problem in problems), part


def test_a_module_found_elsewhere_is_named_with_its_file(prepare, user):
    _, (problem,) = prepare("it: {class: mine.Nothing}")
    assert f"(found at {user}) has no 'Nothing'" in problem


def test_values_from_the_environment_are_in_no_problem(prepare, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter22")
    for text in (
        "class: '${env:EMRUN_TEST_PW}'",
        "class: 'mine.${env:EMRUN_TEST_PW}'",
        "class: mine.Thing, args: '${env:EMRUN_TEST_PW}'",
    ):
        _, (problem,) = prepare(f"it: {{{text}}}")
        assert "hunter22" not in hidden(problem)


@pytest.mark.parametrize(
    "code, kind",
    [
        ("from os import not_there_at_all", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("def (", SyntaxError),
    ],
)
def test_an_error_within_a_users_module_is_not_swallowed(write_module, code, kind):
    write_module(code)
    with pytest.raises(kind) as caught:
        Planner(Imported()).value(parse("it: {class: mine.Thing}", "c.yaml").get("it"), "it", ())
    assert caught.value.__notes__ == ["while importing mine.Thing for it (c.yaml:1:13)"]


def test_a_missing_library_of_a_users_module_says_what_to_install_or_what_was_meant(write_module):
    for library, advice in (
        ("nobody_has", ": pip install nobody_has; or, if it is"),
        ("minee", "; did you mean 'mine'?"),
    ):
        write_module(f"import os\nimport {library}\n")
        planner = Planner(Imported())
        planner.value(parse("it: {class: mine.Thing}", "c.yaml").get("it"), "it", ())
        (problem,) = map(str, planner.problems)
        assert problem.startswith(f"c.yaml:1:6: it: mine.Thing imports '{library}' in ")
        assert f"mine.py:2, which is not installed{advice}" in problem


# Sections


@pytest.fixture
def section(user):
    def run(text, kind):
        found = Planner(Imported())
        recipe = found.section(parse(text, "c.yaml"), kind)
        return recipe, [str(problem) for problem in found.problems]

    return run


def test_a_section_without_a_class_lists_the_built_in_ones(section):
    recipe, problems = section("batch_size: 3", "dataset")
    assert recipe is None
    assert problems == [
        "c.yaml:1:1: dataset: missing key 'class'; built-in: Chats, Digits, DownloadableDataset, HuggingFace, "
        "ImageFolder, Majority, Mixed, Parquet, Pictures, Table, TarShards, Text, TokenWindows, TorchDataset"
    ]


def test_an_unknown_short_name_gets_the_nearest_built_in(section):
    _, problems = section("class: Digitz", "dataset")
    assert problems[0].startswith("c.yaml:1:1: dataset: unknown dataset 'Digitz'; did you mean 'Digits'? ")


@pytest.mark.parametrize("name", ["dataset", "output_dir"])
def test_what_emrun_supplies_cannot_be_given(section, name):
    _, problems = section(f"class: mine.Model\npart: 1\n{name}: 3", "model")
    assert problems == [f"c.yaml:3:1: model: {name!r} is supplied by emrun; remove it"]


def test_a_section_is_built_with_what_it_takes(section):
    recipe, problems = section("class: mine.Model\npart: 1", "model")
    assert problems == []
    model = recipe.build({"dataset": "D", "output_dir": "O"})
    assert (model.part, model.dataset) == (1, "D")


def test_the_section_of_the_model_has_a_default_class(section):
    recipe, _ = section("module: {class: mine.Thing}", "model")
    assert recipe.target.__name__ == "TorchModel"


def test_a_module_of_torch_as_the_model_gets_its_hint_and_nothing_else(section):
    _, problems = section("class: torch.nn.Linear\ninputs: [x]", "model")
    name = "torch.nn.modules.linear.Linear"
    hint = f"{name} is a torch.nn.Module; write it under model.module: {{class: {name}, ...}}"
    assert problems == [f"c.yaml:1:1: model: {hint}"]


def test_a_class_that_is_not_a_model_is_refused(section, user):
    _, problems = section("class: mine.Thing", "model")
    assert problems == ["c.yaml:1:1: model: mine.Thing is not a subclass of emrun.AbstractModel"]


EMLOOPS = "class Data:\n    def _configure_dataset(self, output_dir, x=1):\n        self.x = x\n"


def test_a_dataset_that_only_emloop_would_configure_is_refused(section, write_module):
    write_module(EMLOOPS)
    _, (problem, *_) = section("class: mine.Data", "dataset")
    assert problem.endswith("mine.Data has _configure_dataset, which emrun does not call; rename it to __init__, "
                            "with the same parameters")  # fmt: skip


@pytest.mark.parametrize("caller", ["__init__(self, x=1)", "__new__(cls, x=1)", "train_stream(self)"])
def test_a_dataset_that_configures_itself_is_not_refused(section, write_module, caller):
    body = "return object.__new__(cls)" if "cls" in caller else "self._configure_dataset(None)"
    write_module(f"{EMLOOPS}    def {caller}:\n        {body}\n")
    assert section("class: mine.Data", "dataset")[1] == []


def test_a_function_may_make_the_model(section):
    recipe, problems = section("class: mine.double\nx: 1", "model")
    assert problems == []
    assert recipe.build({}) == 2


# Hooks


@pytest.fixture
def hook(user):
    """Prepare an entry of the hooks."""

    def run(name, arguments=None):
        found = Planner(Imported())
        text = f"- {name}: {arguments}" if arguments else f"- {name}"
        entry = parse(text, "c.yaml").value[0]
        recipe = found.hook(name, entry.get(name), entry, "hooks[0]")
        return recipe, [str(problem) for problem in found.problems]

    return run


SUPPLIED = {"model": "the model", "dataset": "the dataset", "output_dir": "the directory"}


def test_a_hook_gets_what_its_chain_of_constructors_takes(hook):
    recipe, problems = hook("mine.Further", "{limit: 1, more: 2}")
    assert problems == []
    found = recipe.build(SUPPLIED)
    assert (found.limit, found.more, found.model, found.output_dir) == (1, 2, "the model", "the directory")


def test_an_unknown_argument_of_a_hook_is_refused_though_it_takes_keyword_arguments(hook):
    _, problems = hook("mine.Hook", "{limit: 1, limitt: 2}")
    (problem,) = problems
    assert problem.endswith("hooks[0]: unknown argument 'limitt'; did you mean 'limit'?")
    _, (problem,) = hook("mine.Further", "{limit: 1, lim: 2}")
    assert "unknown argument 'lim'" in problem


def test_a_missing_argument_of_a_hook_is_reported(hook):
    assert hook("mine.Hook")[1] == ["c.yaml:1:3: hooks[0]: missing argument 'limit'"]


def test_a_hook_may_hand_arguments_to_its_base_itself(hook):
    recipe, problems = hook("mine.Supplies")
    assert problems == []
    assert recipe.build(SUPPLIED).limit == 5


def test_positional_arguments_of_a_hook_are_those_of_its_own_constructor(hook):
    recipe, problems = hook("mine.Hook", "{args: [5]}")
    assert problems == []
    assert recipe.build(SUPPLIED).limit == 5


@pytest.mark.parametrize("name", ["model", "dataset", "output_dir"])
def test_what_emrun_supplies_to_hooks_cannot_be_given(hook, name):
    _, problems = hook("mine.Hook", f"{{limit: 1, {name}: 3}}")
    assert f"{name!r} is supplied by emrun; remove it" in problems[0]


@pytest.mark.parametrize("name", ["class", "import"])
def test_the_key_of_an_entry_is_the_class_and_no_argument_changes_it(hook, name):
    _, problems = hook("StopAfter", f"{{{name}: mine.Hook, limit: 1}}")
    assert f"hooks[0]: unknown argument {name!r}" in problems[0]


def test_a_misspelt_event_is_refused(hook):
    _, problems = hook("mine.Misspelt")
    assert problems == [
        "c.yaml:1:3: hooks[0]: Misspelt.after_bach is not an event of the main loop; did you mean 'after_batch'?"
    ]


def test_an_event_with_a_parameter_that_nothing_supplies_is_refused(hook):
    _, (problem,) = hook("mine.WrongParameter")
    assert "WrongParameter.after_epoch requires 'epoch', which is not an argument of this event" in problem


@pytest.mark.parametrize("name", ["mine.Thing", "mine.double"])
def test_a_class_that_is_not_a_hook_is_refused(hook, name):
    _, problems = hook(name, "{a: 1}")
    assert problems == [f"c.yaml:1:3: hooks[0]: {name} is not a subclass of emrun.AbstractHook"]


@pytest.mark.parametrize("name", ["TrainingTrace", "training_trace", "InitLR", "DecayLR", "DecayLROnPlateau"])
def test_a_former_hook_is_recognised_with_what_to_do_instead(hook, name):
    recipe, (problem,) = hook(name)
    assert recipe is None
    assert problem.startswith(f"c.yaml:1:3: hooks[0]: emrun has no hook {name!r}: ")


def test_an_unknown_hook_gets_the_nearest_name(hook):
    _, (problem,) = hook("StopAftr", "{epochs: 1}")
    assert "unknown hook 'StopAftr'; did you mean 'StopAfter'?" in problem


def test_a_hook_that_cannot_work_says_so_at_its_line(hook):
    recipe, _ = hook("mine.Hook", "{limit: wrong}")
    with pytest.raises(ConfigError) as caught:
        recipe.build(SUPPLIED)
    assert str(caught.value.problems[0]) == "c.yaml:1:3: hooks[0]: cannot work here"


def test_a_hook_without_a_constructor_of_its_own_takes_no_arguments(hook, user):
    assert issubclass(locate("mine.Misspelt"), AbstractHook)
    _, problems = hook("mine.Misspelt", "{limit: 1}")
    assert any("unknown argument 'limit'; allowed: nothing" in problem for problem in problems)


# A whole config


def test_all_problems_of_a_config_are_reported_at_once_and_nothing_is_left_behind(tmp_path, user):
    path = tmp_path / "c.yaml"
    path.write_text("""\
dataset: {class: Digits, batchsize: 3}
model:
  module: {class: mine.Nothing}
  optimizer: {class: SDG, lr: 1}
main_loop: {bufer: 3, extra_streams: [vald]}
hooks:
  - StopAfter: {epoch: 3}
  - TrainingTrace
""")
    with pytest.raises(ConfigError) as caught:
        create_training(path, output_root=tmp_path / "log")
    lines = sorted(problem.position.line for problem in caught.value.problems)
    assert lines == [1, 3, 4, 5, 5, 7, 8]
    assert not (tmp_path / "log").exists()
