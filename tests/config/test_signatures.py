"""Parameters of callables, read from the imported objects."""

import abc
import ast
import enum
import functools
import inspect
import itertools
import typing
from collections import OrderedDict
from dataclasses import InitVar, dataclass, field

import pytest
import torch

from emrun.base.errors import Position
from emrun.config.calls import check_call
from emrun.config.signatures import handed_on, parameters_of
from emrun.config.yaml_tree import node_of
from emrun.hook import AbstractHook


class Base(AbstractHook):
    def __init__(self, needed, limit=1, **kwargs):
        super().__init__(**kwargs)


class Closed(Base):
    def __init__(self, own):
        super().__init__(own)


class Open(Base):
    def __init__(self, own, limit, **kwargs):
        super().__init__(own, **kwargs)


def test_a_hook_that_takes_keyword_arguments_has_the_parameters_of_its_base():
    parameters = parameters_of(Open)
    assert list(parameters.named) == ["own", "limit", "needed", "model", "dataset", "output_dir"]
    assert not parameters.takes_any


def test_what_the_base_needs_the_hook_may_supply_itself():
    parameters = parameters_of(Open)
    needed = [name for name, parameter in parameters.named.items() if parameter.default is inspect.Parameter.empty]
    assert needed == ["own", "limit"]


def test_a_hook_that_takes_none_has_only_its_own_parameters():
    assert list(parameters_of(Closed).named) == ["own"]


def test_any_other_class_with_keyword_arguments_takes_all():
    class Free:
        def __init__(self, a, *rest, **kwargs):
            pass

    parameters = parameters_of(Free)
    assert list(parameters.named) == ["a"]
    assert parameters.takes_any
    assert parameters.takes_more


def test_a_function_written_in_c_may_have_no_signature():
    assert parameters_of(iter) is None


def test_types_are_those_that_the_annotations_mean():
    def made(a: "int", b: "Nowhere" = 1, c=2):  # noqa: F821
        pass

    named = parameters_of(made).named
    assert [named[name].annotation for name in "abc"] == [int, None, None]


# What Python accepts is not refused


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        kwargs.pop("more", None)
        return function(*args, **{"x": 1, **kwargs})

    return wrapper


def closed_wrapper(function):
    @functools.wraps(function)
    def wrapper(self, other):
        return function(self, other)

    return wrapper


class Wrapped:
    """As all configs of transformers 5 are."""

    @wrapped
    def __init__(self, x):
        self.x = x


class Renamed:
    @closed_wrapper
    def __init__(self, x):
        self.x = x


class Keeps(AbstractHook):
    def __init__(self, limit=0, **options):
        super().__init__()
        self.limit, self.options = limit, options


class Takes(AbstractHook):
    def __init__(self, **kwargs):
        self.more = kwargs.pop("more")
        super().__init__(**kwargs)


class Perhaps(AbstractHook):
    def __init__(self, hand=False, **kwargs):
        if not hand:
            return
        super().__init__(**kwargs)


class ByName(AbstractHook):
    def __init__(self, **kwargs):
        kwargs.clear()
        AbstractHook.__init__(self, **kwargs)


class MakesAnything(type):
    def __call__(cls, *args, **kwargs):
        return 3


class MadeByMeta(metaclass=MakesAnything):
    def __init__(self, x):
        pass


class New:
    def __new__(cls, *args, **kwargs):
        return 3

    def __init__(self, x):
        pass


class NewTakesLess:
    def __new__(cls, x):
        return 3

    def __init__(self, y, z):
        pass


class Lies:
    __signature__ = inspect.signature(lambda x: None)

    def __init__(self, y=0):
        pass


class LiesInText:
    __text_signature__ = "(x)"

    def __init__(self, y=0):
        pass


def lies(y=0):
    pass


lies.__signature__ = inspect.signature(lambda x: None)


@dataclass
class Data:
    x: int
    y: InitVar[int] = 0
    z: list[int] = field(default_factory=list)
    hidden: int = field(init=False, default=3)

    def __post_init__(self, y):
        pass


class Pair(typing.NamedTuple):
    x: int
    y: int = 0


class Colour(enum.Enum):
    RED = 1


class Layer(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class Overloaded:
    @typing.overload
    def __init__(self, x: int): ...
    @typing.overload
    def __init__(self, *, y: str): ...
    def __init__(self, x=0, *, y=""):
        pass


class Called:
    def __call__(self, x):
        return x


class CalledByAny:
    @wrapped
    def __call__(self, x):
        return x


class Words(dict):
    pass


class Texts(dict):
    def __init__(self, x, **kwargs):
        super().__init__(**kwargs)


class ByPartial:
    __init__ = functools.partialmethod(lambda self, x, y: None, y=1)


class ByStatic:
    @staticmethod
    def __init__(*args, **kwargs):
        pass


class Abstract(abc.ABC):  # noqa: B024 - a plain class with another metaclass
    def __init__(self, x):
        self.x = x

    @classmethod
    def made(cls, y):
        return cls(y)


class Mixin:
    def __init__(self, x=0, **kwargs):
        super().__init__(**kwargs)


class Mixed(Mixin, Data):
    pass


class Cached:
    @functools.lru_cache  # noqa: B019
    def __init__(self, x):
        pass


def positional(x, /, **kwargs):
    pass


TARGETS = [
    Wrapped, Renamed, Keeps, Takes, Perhaps, ByName, MadeByMeta, New, NewTakesLess, Lies, LiesInText, lies, Data, Pair,
    Colour, Layer, Overloaded, Called(), CalledByAny(), Words, Texts, ByPartial, ByStatic, Abstract, Abstract.made,
    Mixed, Cached, positional, wrapped(positional), functools.lru_cache(Abstract), functools.partial(Data, 1),
    functools.partial(Data, x=1), functools.partial(positional, 1), functools.partial(wrapped(lies), x=1),
    functools.partial(New, 1), Open, Closed, Base, OrderedDict, complex, torch.nn.Linear(1, 1), torch.nn.LSTM,
    torch.nn.Linear, torch.nn.Parameter, torch.optim.SGD, len, wrapped(Data), Exception, typing.Generic, object, int,
]  # fmt: skip
VALUES = dict.fromkeys(("x", "y", "z", "more", "other", "limit", "hand", "value", "model", "own", "needed", "real"), 1)
GIVEN = [dict.fromkeys(names, 1) for names in [(), *((name,) for name in VALUES), ("x", "y"), ("y", "z"), ("x", "z")]]
GIVEN += [{"x": 1, "more": 2}, {"hand": True, "more": 1}, {"hand": True, "x": 1}, {"x": 1, "y": 1, "z": 1}]


def problems(target, arguments, args=()):
    node = node_of({"args": list(args), **arguments}, Position("c.yaml", 1, 1))
    given = {name: child for name, child in node.value.items() if name != "args"}
    return list(check_call(parameters_of(target), given, key="it", node=node, args=node.value["args"].value))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: getattr(target, "__name__", type(target).__name__))
def test_what_python_accepts_is_not_refused(target):
    """Every call is made; those that succeed must have passed the check."""
    for args, arguments in itertools.product([(), (1,), (1, 1)], GIVEN):
        try:
            target(*args, **arguments)
        except Exception:  # refused by Python, for whatever reason
            continue
        assert problems(target, arguments, args) == [], (args, arguments)


@pytest.mark.parametrize("target", [Renamed, NewTakesLess, Lies, LiesInText, lies, Data, Pair, Abstract, Overloaded])
def test_what_python_refuses_at_once_is_refused(target):
    for arguments in ({"unknown": 1}, {"x": 1, "y": 1, "z": 1, "unknown": 1}):
        with pytest.raises(TypeError):
            target(**arguments)
        assert problems(target, arguments)


def test_a_class_that_hands_its_keyword_arguments_on_to_object_takes_no_others():
    class Last:
        def __init__(self, x=0, **kwargs):
            super().__init__(**kwargs)

    assert list(parameters_of(Last).named) == ["x"]
    assert not parameters_of(Last).takes_any


def test_what_a_wrapped_function_names_is_known_but_not_required():
    parameters = parameters_of(Wrapped)
    assert list(parameters.named) == ["x"]
    assert parameters.takes_any
    assert problems(Wrapped, {}) == []


def test_the_types_of_a_wrapped_constructor_are_those_of_its_function():
    class Typed:
        @wrapped
        def __init__(self, x: int, y: "str" = ""):
            pass

    assert [parameters_of(Typed).hint(name) for name in "xy"] == [int, str]


def test_what_a_hook_keeps_for_itself_is_not_supplied():
    assert list(parameters_of(Keeps).named) == ["limit"]


@pytest.mark.parametrize("hook", [Takes, Perhaps, ByName])
def test_what_a_hook_may_hand_on_is_supplied(hook):
    assert {"model", "dataset", "output_dir"} <= parameters_of(hook).named.keys()
    assert parameters_of(hook).takes_any


def test_a_constructor_without_a_source_is_not_taken_to_hand_everything_on():
    names = {"AbstractHook": AbstractHook}
    exec("class Typed(AbstractHook):\n    def __init__(self, **kwargs):\n        super().__init__(**kwargs)\n", names)
    assert parameters_of(names["Typed"]).takes_any
    assert "model" in parameters_of(names["Typed"]).named


@pytest.mark.parametrize(
    ("body", "share"),
    [
        ("super().__init__(**kwargs)", "ALL"),
        ("x = 1; super().__init__(x, y=2, **kwargs)", "ALL"),
        ("pass", "NONE"),
        ("super().__init__()", "NONE"),
        ("helper(**kwargs)", "NONE"),
        ("self.kwargs = kwargs; super().__init__(**kwargs)", "SOME"),
        ("Base.__init__(self, **kwargs)", "SOME"),
        ("super(Base, self).__init__(**kwargs)", "SOME"),
        ("try: super().__init__(**kwargs)\n    except TypeError: pass", "SOME"),
        ("if kwargs: return\n    super().__init__(**kwargs)", "SOME"),
        ("if x: return\n    super().__init__(**kwargs)", "SOME"),
        ("kwargs = {}; super().__init__(**kwargs)", "SOME"),
        ("f = lambda: kwargs.clear(); f(); super().__init__(**kwargs)", "SOME"),
        ("return super().__init__(**kwargs)", "SOME"),
    ],
)
def test_how_much_a_constructor_hands_on_is_read_from_its_source(body, share):
    (function,) = ast.parse(f"def __init__(self, x=0, **kwargs):\n    {body}\n").body
    assert handed_on(function).name == share
