"""The rule that builds objects from a config, with its checks."""

import sys
from collections.abc import Mapping
from typing import Annotated

import pytest

from emrun.config.import_finder import Imported, locate
from emrun.config.interpolation import interpolate
from emrun.config.planner import Planner
from emrun.config.recipe import build
from emrun.config.yaml_tree import parse
from emrun.errors import ConfigError
from emrun.hook import AbstractHook
from emrun.training.create import create_training
from emrun.types import Factory, Form

USER_CODE = """
from __future__ import annotations
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from emrun import AbstractHook, AbstractModel
from emrun.errors import ArgumentError, HookError
from emrun.types import Factory, Form

if TYPE_CHECKING:
    from nowhere import Something

NUMBER = 7
Made = Annotated[Factory, Form(keys=("inputs",), supplied=1)]


class Thing:
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


class Point:
    def __init__(self, x, y=0, *, z=0):
        if y == "wrong":
            raise ArgumentError("y", f"{y!r} is no number")
        if y == "broken":
            raise ZeroDivisionError("out of my control")
        self.at = x, y, z


class Outer:
    class Inner:
        pass


def double(x):
    return 2 * x


class Owner:
    def __init__(self, made: Made | None = None, several: Made | Mapping[str, Made] | None = None, other: Any = None):
        self.made, self.several, self.other = made, several, other


class UnknownHint(Owner):
    def __init__(self, something: Something, made: Made | None = None):
        self.something = something
        super().__init__(made)


class Inherits(Owner):
    def __init__(self, own=1, **kwargs):
        super().__init__(**kwargs)


class Redefines(Owner):
    def __init__(self, made: Any, **kwargs):
        super().__init__(made, **kwargs)


class Takes:
    def __init__(self, dataset, output_dir=None):
        self.dataset, self.output_dir = dataset, output_dir


class Model(AbstractModel):
    input_names = output_names = ()
    run = save = load = None

    def __init__(self, part, dataset=None):
        self.part, self.dataset = part, dataset


class Hook(AbstractHook):
    def __init__(self, limit, **kwargs):
        super().__init__(**kwargs)
        self.limit = limit
        if limit == "wrong":
            raise HookError("cannot work here")


class Supplies(Hook):
    def __init__(self, **kwargs):
        super().__init__(limit=5, **kwargs)


class Further(Hook):
    def __init__(self, more=0, **kwargs):
        super().__init__(**kwargs)
        self.more = more


class Misspelt(AbstractHook):
    def after_bach(self, stream_name, batch_data):
        pass


class WrongParameter(AbstractHook):
    def after_epoch(self, epoch):
        pass
"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module `mine` onto the path, which is forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    yield write
    sys.modules.pop("mine", None)


@pytest.fixture
def user(write_module):
    return write_module(USER_CODE)


@pytest.fixture
def prepare(user):
    """Prepare a value written in YAML; return it, not built yet, and the problems."""

    def run(text, supplied=(), hint=None):
        found = Planner(Imported())
        node = interpolate(parse(text, "c.yaml"))
        value = found.value(node.get("it"), "it", supplied, hint)
        return value, [str(problem) for problem in found.problems]

    return run


@pytest.fixture
def make(prepare):
    """Build a value written in YAML."""

    def run(text, hint=None, **supplied):
        value, problems = prepare(text, tuple(supplied), hint)
        assert problems == []
        return build(value, supplied)

    return run


# class, import, args


def test_a_class_is_called_with_the_other_keys(make):
    assert make("it: {class: mine.Point, x: 1, z: 3}").at == (1, 0, 3)


def test_positional_arguments_come_first(make):
    assert make("it: {class: mine.Point, args: [1, 2], z: 3}").at == (1, 2, 3)


def test_a_function_is_called_too(make):
    assert make("it: {class: mine.double, x: 4}") == 8


def test_import_names_an_object_that_is_not_called(make, user):
    assert make("it: {import: mine.double}") is sys.modules["mine"].double
    assert make("it: {import: mine.NUMBER}") == 7


def test_a_name_inside_a_class_is_found(make):
    assert type(make("it: {class: mine.Outer.Inner}")).__qualname__ == "Outer.Inner"


def test_objects_are_built_within_lists_mappings_and_arguments(make):
    thing = make(
        "it: {class: mine.Thing, args: [{class: mine.double, x: 1}], "
        "a: {b: [{class: mine.double, x: 2}, 5]}, c: {import: mine.NUMBER}}"
    )
    assert thing.args == (2,)
    assert thing.kwargs == {"a": {"b": [4, 5]}, "c": 7}


def test_a_list_or_mapping_without_a_class_stays_one(make):
    assert make("it: {a: [1, {b: {class: mine.double, x: 2}}], 3: c}") == {"a": [1, {"b": 4}], 3: "c"}


def test_each_build_makes_new_objects(prepare):
    recipe, _ = prepare("it: {class: mine.Thing, a: [1]}")
    first, second = build(recipe, {}), build(recipe, {})
    assert first is not second
    assert first.kwargs["a"] is not second.kwargs["a"]


def test_preparing_calls_nothing(prepare):
    _, problems = prepare("it: {class: mine.Point, x: 1, y: broken}")
    assert problems == []


def test_values_reach_user_code_in_plain_types(make, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_VALUE", "2.5")
    text = """
base: &base {f: 1.0e-3, i: 0x1F, b: true}
it:
  class: mine.Thing
  <<: *base
  s: 'x'
  t: |
    text
  n: null
  l: [1.5, {k: 1e-3}]
  r: ${base.f}
  e: ${env:EMRUN_TEST_VALUE}
  x: a${base.i}
"""
    found = make(text).kwargs
    types = {name: type(value) for name, value in found.items()}
    expected = {"f": float, "i": int, "b": bool, "s": str, "t": str, "n": type(None), "l": list, "r": float}
    assert types == {**expected, "e": float, "x": str}
    assert [type(value) for value in found["l"]] == [float, dict]
    assert [(type(key), type(value)) for key, value in found["l"][1].items()] == [(str, float)]


def test_arguments_may_have_any_name(make):
    assert make("it: {class: mine.Thing, target: 1, options: 2, supplied: 3, key: 4}").kwargs == {
        "target": 1,
        "options": 2,
        "supplied": 3,
        "key": 4,
    }


def test_a_class_written_in_c_is_built(make):
    assert make("it: {class: builtins.complex, real: 1, imag: 2}") == 1 + 2j
    assert make("it: {class: builtins.dict, a: 1}") == {"a": 1}


# Supplied arguments


def test_supplied_arguments_go_where_there_are_parameters_of_that_name(make):
    thing = make(
        "it: {class: mine.Thing, a: {class: mine.Takes}, b: [{class: mine.Point, x: 1}]}", dataset="D", output_dir="O"
    )
    assert thing.kwargs.keys() == {"a", "b"}
    assert (thing.kwargs["a"].dataset, thing.kwargs["a"].output_dir) == ("D", "O")


@pytest.mark.parametrize("arguments", ["dataset: 5", "args: [5]"])
def test_an_argument_of_the_config_wins_over_a_supplied_one(make, arguments):
    takes = make(f"it: {{class: mine.Takes, {arguments}}}", dataset="D", output_dir="O")
    assert (takes.dataset, takes.output_dir) == (5, "O")


# Factories

MADE = Annotated[Factory, Form(keys=("inputs",), supplied=1)]


def test_a_factory_is_not_built_but_keeps_arguments_and_options(make):
    owner = make("it: {class: mine.Owner, made: {class: mine.Thing, a: {class: mine.double, x: 1}, inputs: [i]}}")
    assert isinstance(owner.made, Factory)
    assert owner.made.options == {"inputs": ["i"]}
    thing = owner.made("supplied")
    assert (thing.args, thing.kwargs) == (("supplied",), {"a": 2})
    assert owner.made("again") is not thing


def test_positional_arguments_of_a_factory_follow_those_of_its_owner(make):
    assert make("it: {class: mine.Thing, args: [2, 3]}", hint=MADE)(1).args == (1, 2, 3)


def test_a_factory_of_an_import_keeps_its_options(make, user):
    factory = make("it: {import: mine.double, inputs: [a]}", hint=MADE)
    assert factory.options == {"inputs": ["a"]}
    assert factory() is sys.modules["mine"].double


def test_arguments_of_a_factory_may_have_any_name(make):
    arguments = {"options": 1, "is_import": 2, "target": 3, "first": 4}
    text = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    assert make(f"it: {{class: mine.Thing, {text}}}", hint=MADE)().kwargs == arguments


def test_factories_by_name_are_a_mapping_where_the_hint_allows_it(make):
    owner = make("it: {class: mine.Owner, several: {a: {class: mine.Thing}, b: {class: mine.double, inputs: [x]}}}")
    assert list(owner.several) == ["a", "b"]
    assert owner.several["b"](4) == 8
    assert isinstance(make("it: {class: mine.Owner, several: {class: mine.Thing}}").several, Factory)


def test_a_factory_that_is_null_is_null(make):
    assert make("it: {class: mine.Owner, made: null}").made is None


def test_parameters_without_a_factory_hint_are_built(make):
    assert make("it: {class: mine.Owner, other: {class: mine.double, x: 1}}").other == 2


def test_a_hint_that_cannot_be_resolved_does_not_hide_the_others(make):
    owner = make("it: {class: mine.UnknownHint, something: 1, made: {class: mine.Thing}}")
    assert isinstance(owner.made, Factory)


def test_hints_of_a_base_count_where_keyword_arguments_are_handed_on(make):
    assert isinstance(make("it: {class: mine.Inherits, made: {class: mine.Thing}}").made, Factory)


def test_a_hint_of_the_class_itself_counts_before_that_of_a_base(make):
    assert make("it: {class: mine.Redefines, made: {class: mine.double, x: 1}}").made == 2


@pytest.mark.parametrize("text", ["3", "SGD", "[{class: mine.Thing}]", "{lr: 1}", "{a: {class: mine.Thing}}"])
def test_a_value_that_is_not_a_form_is_an_error(prepare, text):
    _, problems = prepare(f"it: {{class: mine.Owner, made: {text}}}")
    (problem,) = problems
    assert "it.made: " in problem
    assert "is not a mapping with 'class'; write {class: NAME, inputs: [NAME, ...]}" in problem


def test_short_names_are_looked_up_in_the_package_of_the_form(make):
    hint = Annotated[Factory, Form(package="torch.optim", supplied=1)]
    parameter = pytest.importorskip("torch").nn.Parameter(pytest.importorskip("torch").zeros(1))
    optimizer = make("it: {class: sgd, lr: 0.5}", hint=hint)([parameter])
    assert (type(optimizer).__name__, optimizer.defaults["lr"]) == ("SGD", 0.5)


def test_the_package_of_a_form_has_only_classes_of_its_own(prepare):
    _, (problem,) = prepare("it: {class: Counter}", hint=Annotated[Factory, Form(package="torch.optim.lr_scheduler")])
    assert "torch.optim.lr_scheduler has no class 'Counter'; it has ChainedScheduler, " in problem
    assert "Optimizer" not in problem


@pytest.mark.parametrize("hint", [Factory, Factory | None, Mapping[str, Factory], list[int] | Factory])
def test_a_plain_factory_hint_has_a_form_too(prepare, hint):
    value, problems = prepare("it: {class: mine.Thing, a: 1}", hint=hint)
    assert problems == []
    assert build(value, {})().kwargs == {"a": 1}


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
        ("{class: Point}", "it: unknown class 'Point'. For your own class, write its dotted path: my_module.Point"),
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


def test_values_from_the_environment_are_in_no_problem(prepare, make, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    for text in (
        "class: '${env:EMRUN_TEST_PW}'",
        "class: 'a.${env:EMRUN_TEST_PW}'",
        "class: mine.Thing, args: '${env:EMRUN_TEST_PW}'",
    ):
        _, (problem,) = prepare(f"it: {{{text}}}")
        assert "hunter2" not in problem
    monkeypatch.setenv("EMRUN_TEST_PW", "wrong")
    with pytest.raises(ConfigError) as caught:
        make("it: {class: mine.Point, x: 1, y: '${env:EMRUN_TEST_PW}'}")
    assert caught.value.problems[0].message == "${env:EMRUN_TEST_PW} is no number"


def test_an_argument_error_of_a_constructor_is_reported_at_the_arguments_line(make):
    with pytest.raises(ConfigError) as caught:
        make("it:\n  class: mine.Thing\n  a:\n    class: mine.Point\n    x: 1\n    y: wrong\n")
    assert str(caught.value.problems[0]) == "c.yaml:6:8: it.a.y: 'wrong' is no number"


def test_an_argument_error_in_a_factory_is_reported_there_too(make):
    factory = make("it:\n  class: mine.Point\n  y: wrong\n", hint=Annotated[Factory, Form(supplied=1)])
    with pytest.raises(ConfigError) as caught:
        factory(1)
    assert str(caught.value.problems[0]) == "c.yaml:3:6: it.y: 'wrong' is no number"


def test_any_other_error_of_a_constructor_keeps_its_type_and_tells_the_position(make):
    with pytest.raises(ZeroDivisionError, match="out of my control") as caught:
        make("it: {class: mine.Thing, a: {class: mine.Point, x: 1, y: broken}}")
    assert caught.value.__notes__[0].startswith("while building it.a (c.yaml:1:")


@pytest.mark.parametrize(
    "code, kind",
    [
        ("import not_there_at_all", ModuleNotFoundError),
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
        "c.yaml:1:1: dataset: missing key 'class'; built-in: Digits, DownloadableDataset, HuggingFace, ImageFolder, "
        "Majority, Mixed, Parquet, Table, TarShards, TokenWindows, TorchDataset"
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
