"""Fixtures for tests of how a config names objects: modules of a user, and values of a config prepared and built."""

import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from emrun.config.import_finder import Imported
from emrun.config.interpolation import interpolate
from emrun.config.planner import Planner
from emrun.config.recipe import build
from emrun.config.yaml_tree import parse

USER_CODE = """
from __future__ import annotations
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from emrun import AbstractHook, AbstractModel
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import Factory, Form

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


@contextlib.contextmanager
def _modules(**files):
    """Make modules that can be imported, each under its name, and forget all of them at the end."""
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            file = Path(folder, *name.split("__")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        sys.path.insert(0, folder)
        try:
            yield Path(folder)
        finally:
            sys.path[:] = path
            tops = {name.partition("__")[0] for name in files}
            for name in [each for each in sys.modules if each.partition(".")[0] in tops]:
                del sys.modules[name]


@pytest.fixture
def modules():
    """Return a context in which modules can be imported: name -> text, with `__` for a dot."""
    return _modules
