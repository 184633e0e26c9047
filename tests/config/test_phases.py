"""Phase one of the check, which reads files, refuses nothing that phase two accepts, which imports."""

import inspect
import itertools
import random
import sys
from pathlib import Path

import pytest
from campaign import thinned
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from emrun.base.errors import ConfigError, Position
from emrun.config.config import Config, load_config
from emrun.config.import_finder import Imported, locate
from emrun.config.plan import Plan
from emrun.config.planner import Planner
from emrun.config.source_finder import Unimported
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import Node, node_of, parse

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "sample_configs"
POSITION = parse("x", "c.yaml").position
MANY = pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])
NUMBERS = itertools.count()
PHASES = (Phase.explicit, Phase.generate)  # an example is small already
ANNOTATIONS = (
    "int", "float", "str", "bool", "None", "'int'", "int | None", "Optional[int]", "Union[int, str]", "list[int]",
    "Literal['x', 3]", "Sequence[str]", "Mapping[str, int]", "dict", "tuple[int, str]", "tuple[int, ...]", "set[int]",
    "Any", "Alias", "'Alias'", "Alias | None", "Quoted", "Hidden", "Hidden | None", "'Hidden'", "Factory", "A",
    "'A | None'",
    "Factory | None", "Annotated[int, 3]", "Annotated[Factory, Form(keys=('k',))]", "Mapping[str, Factory]", "Path",
    "Callable[[int], int]", "typing.Optional[str]", "Final[int]", "f", "type", "object", "'not a type'", "A.Inner",
    "Never", "Changed", "t.List[int]", "list['Alias']", "int | 'str'", "os.PathLike", "complex", "Literal[Alias]",
)  # fmt: skip
DEFAULTS = ("0", "1.5", "'x'", "None", "[]", "()", "True", "-1", "VALUE", "int('3')", "{'a': 1}")
VALUES = (3, 1.5, "x", True, None, [1], ["x"], {"a": 1}, [1, "x"], {"class": "builtins.dict"}, -1, {"k": 1})
DECORATORS = (*[""] * 12, "@decorated", "@functools.cache", "@replaced", "@dataclass", "@staticmethod")
TRICKS = (
    "A = B", "B = A", "f = A", "A = decorated(A)", "A = replaced(A)", "A, B = B, A", "(A := f)", "A: type = B",
    "for A in (B, f): pass", "with contextlib.suppress(KeyError) as A: pass", "del B", "B = type('B', (), {})",
    "if VALUE:\n    class A:\n        pass", "if not VALUE:\n    A = None",
    "try:\n    A = nothing\nexcept NameError:\n    pass",
    "while True:\n    f = A\n    break", "match A:\n    case B: pass", "A.__init__ = helper",
    "f.__defaults__ = (1, 2, 3)",
    "setattr(A, '__init__', helper)", "type.__setattr__(A, '__init__', helper)", "globals()['A'] = helper",
    "vars()['B'] = A", "locals().update(f=helper)", "exec('A = helper')", "functools.update_wrapper(f, helper)",
    "f.__wrapped__ = helper", "f.__signature__ = inspect.signature(helper)",
    "A.__signature__ = inspect.signature(helper)",
    "f.__kwdefaults__ = {'y': 1}", "f.__code__ = helper.__code__", "A.__init__.__defaults__ = (1, 2, 3)",
    "def __getattr__(name):\n    return helper", "sys.modules[__name__].A = helper",
    "def change():\n    global A\n    A = helper\nchange()", "f = functools.partial(f, 1)", "f = lambda **k: 1",
    "[A for A in (1, 2)]", "A.Inner = helper", "B.x_stream = helper", "alias = A\nalias.__init__ = helper",
    "import functools as A", "from functools import partial as f", "async def f(x): pass",
    "def int(x): return x", "int = str", "list = Alias", "from builtins import str as float",
    "A.__new__ = lambda cls, *a, **k: object.__new__(cls)", "A.__bases__ += ()", "B.__annotations__ = {}",
    "f.__annotations__ = {'x': str}", "A.__init__.__annotations__['x'] = str", "Alias = str", "Quoted = 3",
    "def replace_all():\n    for each in (A, B):\n        each.__init__ = helper\nreplace_all()",
    "inspect.getmodule(f).__dict__.update(B=helper)", "A.__init__.__annotations__.update(x=str)",
)  # fmt: skip
BODIES = (
    "pass", "x = 3", "train_stream = helper", "def train_stream(self): pass", "__init__ = helper", "__slots__ = ()",
    "def __new__(cls, *a, **k): return object.__new__(cls)", "class Inner:\n        pass", "def after_bach(self): pass",
    "if VALUE:\n        def __init__(self, *a, **k): pass", "for __init__ in (helper,): pass", "int = str",
    "def __init_subclass__(cls, **k): cls.__init__ = helper", "def __getattr__(self, name): raise AttributeError(name)",
    "def __class_getitem__(cls, item): return cls", "locals()['__init__'] = helper", "__call__ = helper",
    "__signature__ = inspect.signature(helper)", "x: int = 3", "def add(self): self.valid_stream = 1",
    "def after_epoch(self, epoch_id): pass", "def after_batch(self, **k): pass", "Inner = helper",
    "def add(self): setattr(self, 'valid_stream', 1)", "valid_stream = property(helper)",
    "__init__, y = helper, 1", "import functools as __init__", "@decorated\n    def valid_stream(self): pass",
    *["def _configure_dataset(self, x): pass"] * 2, "def run(self): self._configure_dataset(1)",
    "def after_bach(): pass\n    del after_bach", "after_bach = 3\n    def after_bach(self): pass\n    after_bach = 1",
)  # fmt: skip
CONSTRUCTOR_BODIES = (
    *["self.it = 1"] * 3, *["super().__init__(**kwargs)"] * 3, "self.it = kwargs", "super().__init__()",
    "if VALUE: return\n        super().__init__(**kwargs)", "kwargs.clear(); super().__init__(**kwargs)",
    "super().__init__(x=1, **kwargs)", "AbstractHook.__init__(self, **kwargs)",
)  # fmt: skip
BASES = (
    *[""] * 12, *["A"] * 4, "B", "object", "abc.ABC", "Generic[T]", "AbstractHook", "dict", "Exception",
    "typing.NamedTuple",
    "A, abc.ABC", "metaclass=abc.ABCMeta", "metaclass=Meta", "Generic[T], A", "made()", "enum.Enum", "A[int]", "Other",
    "AbstractHook, A", "A, AbstractHook", "AbstractDataset", "torch.nn.Module", "Protocol",
)  # fmt: skip
HEADER = """
import abc, contextlib, enum, functools, inspect, operator, os, sys, typing
import typing as t
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, Optional, Protocol, TypeVar, Union

import torch
from emrun import AbstractDataset, AbstractHook
from emrun.base.types import Factory, Form

if TYPE_CHECKING:
    from nowhere import Hidden

T = TypeVar("T")
VALUE = len("abc")
Alias = int | float
Quoted = "int"
Changed = int
Changed = str

class Meta(type):
    def __call__(cls, *args, **kwargs):
        return 1

class Other:
    def __init__(self, *args, **kwargs):
        pass

def made():
    return Other

def helper(*args, **kwargs):
    return None

def decorated(target):
    @functools.wraps(target)
    def wrapper(*args, **kwargs):
        return target(*args, **kwargs)
    return wrapper

def replaced(target):
    return helper
"""


@st.composite
def parameters(draw, first=""):
    """The parameters of a function, in brackets."""
    names = draw(st.lists(st.sampled_from(("x", "y", "z", "model", "dataset")), unique=True, max_size=3))
    written = []
    for name in names:
        annotation = draw(st.one_of(st.none(), st.sampled_from(ANNOTATIONS)))
        default = draw(st.one_of(st.none(), st.sampled_from(DEFAULTS)))
        text = f"{name}: {annotation}" if annotation else name
        written.append(f"{text} = {default}" if default else text)
    count = draw(st.integers(0, len(written)))
    positional = sorted(written[:count], key=lambda each: " = " in each)
    keywords = written[count:]
    if positional and draw(st.integers(0, 5)) == 0:
        positional.append("/")
    if first:
        positional.insert(0, first)
    star = draw(st.sampled_from(("*", "*args")))
    middle = [star] if keywords or (draw(st.integers(0, 5)) == 0 and star == "*args") else []
    last = ["**kwargs"] if draw(st.integers(0, 3)) == 0 else []
    return ", ".join([*positional, *middle, *keywords, *last])


@st.composite
def functions(draw, name):
    decorator = draw(st.sampled_from(DECORATORS[:-2]))
    result = draw(st.sampled_from(("", "", " -> int", " -> A")))
    return f"{decorator}\ndef {name}({draw(parameters())}){result}:\n    return 1\n"


@st.composite
def classes(draw, name, bases=BASES):
    lines = [draw(st.sampled_from(DECORATORS[:-1])), f"class {name}({draw(st.sampled_from(bases))}):"]
    if draw(st.integers(0, 3)):
        lines.append(f"    {draw(st.sampled_from(DECORATORS[:-2]))}")
        lines.append(f"    def __init__({draw(parameters('self'))}):")
        lines.append(f"        {draw(st.sampled_from(CONSTRUCTOR_BODIES))}")
    lines += [f"    {each}" for each in draw(st.lists(st.sampled_from(BODIES), max_size=2))]
    return "\n".join([*lines, "    def method(self):", "        return 1", ""])


@st.composite
def texts(draw, imported=None):
    """A module with the classes A and B and the function f, some of them perhaps from another module."""
    parts = [draw(st.sampled_from((*["from __future__ import annotations\n"] * 8, "")))]
    parts.append(HEADER)
    where = imported and draw(
        st.sampled_from(
            (
                f"from {imported} import *\n",
                f"from {imported} import A, B as Base, f\n",
                f"import {imported}\nA = {imported}.A\n",
                f"import {imported} as other\n",
                f"from {imported} import f as g\n",
            )
        )
    )
    bases = BASES
    if where:
        parts.append(where)
        bases = (
            *BASES,
            *("Base" for _ in range(3) if "Base" in where),
            *("other.A" for _ in range(3) if "other" in where),
        )
    if not where or "A" not in where or draw(st.booleans()):
        parts.append(draw(classes("A", [base for base in bases if base[:1] not in "AB" or base.startswith("Abs")])))
    parts.append(draw(classes("B", [base for base in bases if not base.startswith("B") or base == "Base"])))
    if not where or "f" not in where or draw(st.booleans()):
        parts.append(draw(functions("f")))
    one = st.one_of(st.sampled_from(TRICKS), classes("C"), classes("A"), functions("g"), functions("f"))
    parts += draw(st.lists(one, max_size=2))
    if draw(st.integers(0, 2)) == 0:
        parts.append("__all__ = ['A', 'B', 'f']")
    return "\n".join(parts)


def refused(finder, path, arguments, form="value"):
    """Return the problems that a finder has with a form that calls what a path names."""
    found = Planner(finder)
    if form == "hook":
        entry = Node({path: node_of(arguments, POSITION)}, POSITION)
        found.hook(path, entry.value[path], entry, "it")
    elif form == "dataset":
        found.section(node_of({"class": path, **arguments}, POSITION), "dataset")
    elif form == "model":
        found.section(node_of({"class": path, **arguments}, POSITION), "model")
    else:
        found.value(node_of({"it": {"class": path, **arguments}}, POSITION), "it", ("dataset", "model"))
    return [str(problem) for problem in found.problems]


def calls(target):
    """Yield arguments to try a target with: few that fit, and each of them with other values."""
    try:
        named = [each for each in inspect.signature(target).parameters.values() if each.kind not in (2, 4)]
    except (TypeError, ValueError):
        named = []
    yield {}
    yield {"args": [1, 2]}
    yield {"other": 1}
    yield {"x": 3, "y": "x", "z": 1.5}
    needed = {each.name: {"class": "builtins.dict"} for each in named if each.default is each.empty}
    yield needed
    for each in named:
        yield from ({**needed, each.name: value} for value in VALUES)
        yield {name: value for name, value in needed.items() if name != each.name}
    if named:
        yield from ({"args": [value], **dict(list(needed.items())[1:])} for value in VALUES)


def assert_nothing_is_refused_that_the_import_accepts(names):
    """Try everything that modules have; phase one first, since it must not profit from the import."""
    static = Unimported()
    known = {}
    for module in names:
        for member in ("A", "B", "C", "f", "g", "A.Inner", "helper", "absent", "int"):
            path = f"{module}.{member}"
            try:
                known[path] = static.find(path), None
            except LookupError as error:
                known[path] = None, str(error)
    for path, (source, missing) in known.items():
        try:
            target = locate(path)
        except LookupError as error:
            assert missing in (None, str(error))
            continue
        except Exception:  # it cannot be imported
            continue
        assert missing is None, f"{path} is there, but: {missing}"
        if source is None or not callable(target):
            continue
        for form, arguments in itertools.product(("value", "hook", "dataset", "model"), calls(target)):
            if form != "value" and "args" in arguments:
                continue
            if not refused(Imported(), path, arguments, form):
                assert refused(static, path, arguments, form) == [], (path, form, arguments)
        streams = static.streams(source)
        if streams is not None and inspect.isclass(target):
            there = Imported().streams(target)
            assert there is not None, f"{path} may have more streams than {streams}"
            assert set(there) <= set(streams), path


@pytest.mark.parametrize("count", [3, MANY])
def test_phase_one_refuses_nothing_that_phase_two_accepts(modules, count):
    """Classes and functions with random parameters, bases and tricks in two modules, called in many ways.

    A way in which a module changes what it defines and which the reading does not notice makes this fail; tried by
    reading functions in spite of their decorators.
    """
    suppressed = list(HealthCheck)

    @settings(max_examples=count, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=suppressed)
    @given(st.data())
    def check(data):
        number = next(NUMBERS)
        first, second = f"first{number}", f"second{number}"
        with modules(**{first: data.draw(texts()), second: data.draw(texts(first))}):
            assert_nothing_is_refused_that_the_import_accepts([second, first])

    check()


@pytest.mark.parametrize("hint", ["tuple[()]", "Tuple[()] | int", "Literal | None", "Final | None", "List[int, str]"])
@pytest.mark.parametrize("value", [1, "x", [1], {"a": 1}])
def test_a_type_that_cannot_be_evaluated_accepts_every_value(modules, hint, value):
    head = "from __future__ import annotations\nfrom typing import *\n"
    text = f"{head}class Data:\n    def __init__(self, a: {hint}): pass\n"
    number = next(NUMBERS)
    with modules(**{f"first{number}": text}):
        section = node_of({"class": f"first{number}.Data", "a": value}, Position("config"))
        imported, read = Planner(Imported()), Planner(Unimported())
        imported.section(section, "dataset")
        read.section(section, "dataset")
        assert imported.problems or not read.problems


FEW = (
    "A = B", "(A := f)", "del B", "if VALUE:\n    class A:\n        pass", "setattr(A, '__init__', helper)",
    "globals()['A'] = helper", "f.__wrapped__ = helper", "def __getattr__(name):\n    return helper",
    "A.Inner = helper", "from functools import partial as f", "int = str",
)  # fmt: skip
"""One of each kind: a name that is bound again, in another way, or taken away, and an attribute that changes."""


@pytest.mark.parametrize("trick", thinned(TRICKS, FEW[::4]))
def test_phase_one_leaves_tricks_to_the_import(modules, trick):
    number = next(NUMBERS)
    body = (
        f"{HEADER}\nclass A:\n    def __init__(self, x: int): pass\n    class Inner: pass\n"
        f"class B(A):\n    pass\ndef f(x: int, *, y): pass\n{trick}\n"
        "def g(x: int, z: list = ()): pass\nclass C(B if 'B' in dir() else A): pass\n"
    )
    with modules(**{f"first{number}": body, f"second{number}": f"from first{number} import *\n"}):
        assert_nothing_is_refused_that_the_import_accepts([f"first{number}"])


def mutations(node, path=()):
    """Yield a tree's copies with one key or value changed: left out, misspelt, or of another kind."""
    if isinstance(node, dict):
        for key, child in node.items():
            rest = {name: value for name, value in node.items() if name != key}
            yield rest
            yield {**rest, f"{key}s": child}
            yield from ({**node, key: other} for other in (None, 3, "x", [child], {"x": child}))
            yield from ({**node, key: changed} for changed in mutations(child))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield [*node[:index], *node[index + 1 :]]
            yield from ([*node[:index], changed, *node[index + 1 :]] for changed in mutations(child))


@pytest.mark.parametrize("count", [8, MANY])
@pytest.mark.parametrize("name", ["digits_convnet.yaml", "my_project/config.yaml"])
def test_phase_one_refuses_no_change_of_a_sample_config_that_phase_two_accepts(name, count, monkeypatch):
    path = SAMPLES / name
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_data", "my_hooks", "my_model"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    root = load_config(path).root.plain()
    all_changes = list(mutations(root))
    changes = random.Random(name).sample(all_changes, min(len(all_changes), count))
    static, accepted = Unimported(), 0
    for changed in [root, *changes]:
        config = Config(parse(dump(node_of(changed, POSITION)), "c.yaml"), "c")
        try:
            Plan.of(config, Imported())
        except (ConfigError, TypeError):
            continue
        accepted += 1
        Plan.of(config, static)
    assert accepted > count // 5


@pytest.mark.parametrize(
    "annotation",
    [
        "int", "'int'", "Optional[int]", "int | None", "Union[int, str]", "Literal['a', 1]", "list[int]",
        "Sequence[str]",
        "Alias", "'Alias | None'", "Mapping[str, float]", "tuple[int, ...]", "Any", "dict", "t.List[int]", "Factory",
        "Annotated[Factory, Form(keys=('a',), package='torch.optim', supplied=1)]", "Path", "None",
    ],
)  # fmt: skip
def test_an_annotation_means_what_it_means_when_it_is_imported(modules, annotation):
    module = f"hints{next(NUMBERS)}"
    with modules(**{module: f"from __future__ import annotations\n{HEADER}\ndef Thing(x: {annotation}): pass\n"}):
        read = Unimported().parameters(Unimported().find(f"{module}.Thing")).named["x"].annotation
        imported = Imported().parameters(locate(f"{module}.Thing")).named["x"].annotation
        assert read in (imported, None if imported is type(None) else imported)


@pytest.mark.parametrize("annotation", ["Hidden", "made()", "Changed", "A.b", "int | 'str'", "Literal[Alias]"])
def test_a_type_that_cannot_be_read_is_not_checked(modules, annotation):
    module = f"hints{next(NUMBERS)}"
    with modules(**{module: f"from __future__ import annotations\n{HEADER}\ndef Thing(x: {annotation}): pass\n"}):
        for value in VALUES:
            assert refused(Unimported(), f"{module}.Thing", {"x": value}) == []
