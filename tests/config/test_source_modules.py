"""Modules are read from their files: the names that they bind, and which files are skipped."""

import ast

import pytest

from emrun.config.source_modules import SourceModules, bound_in


def read(folder, monkeypatch, text, name="first"):
    """Return what is read of a module with this text."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return SourceModules().read(name)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("import a.b, c.d as e", {"a": "a", "e": "c.d"}),
        ("from a import b, c as d", {"b": "a.b", "d": "a.c"}),
        ("import a.b\nimport a.c", {"a": "a"}),
        ("from a import b\nfrom c import b", {"b": None}),
        ("def f(): x = 1", {"f": ast.FunctionDef}),
        ("class A: x = 1", {"A": ast.ClassDef}),
        ("async def f(): pass", {"f": None}),
        ("x: int = 1\ny: int", {"x": ast.Constant}),
        ("if x:\n    import a", {"a": None}),
        ("if TYPE_CHECKING:\n    import a", {}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    a = 1", {"a": None}),
        ("try:\n    pass\nexcept E as e:\n    pass", {"e": None}),
        ("for a, (b, *c) in d: e.f = 1", {"a": None, "b": None, "c": None}),
        ("match a:\n    case {'x': b, **c}: pass\n    case [d, *e]: pass", dict.fromkeys("bcde")),
        ("with a as b: pass\ndel c", {"b": None, "c": None}),
    ],
)
def test_a_name_that_is_bound_once_is_known_and_any_other_is_not(text, bound):
    def sure(found):
        return found[0] if len(found) == 1 else None

    found = {name: sure(each) for name, each in bound_in(ast.parse(text).body).items()}
    assert found.keys() == bound.keys()
    for name, what in bound.items():
        assert isinstance(found[name], what) if isinstance(what, type) else found[name] == what


@pytest.mark.parametrize(
    "text",
    [
        "globals()['A'] = 1", "setattr(A, 'x', 1)", "A.__init__ = f", "f.__defaults__ = ()", "A.train_stream = f",
        "import sys\nsys.modules[__name__] = 1", "from os import *", "functools.update_wrapper(f, g)",
        "g = functools.wraps(f)(g)", "type.__setattr__(A, 'x', 1)", "__path__ = []", "def f(: pass",
        "AbstractModel.register(A)",
    ],
)  # fmt: skip
def test_a_file_that_may_rewrite_names_is_skipped(text, tmp_path, monkeypatch):
    assert read(tmp_path, monkeypatch, f"class A: pass\n{text}\n") is None


@pytest.mark.parametrize(
    "text",
    [
        "def f(self): setattr(self, 'x', 1)", "def f(self): self.__dict__['x'] = 1", "super().__init__()",
        "@functools.wraps(f)\ndef g(): pass", "model.eval()", "x = type(f).__name__", "def f(self): self.a_stream = 1",
        "x = data.train_stream()", "y = x.a_stream == 1",
    ],
)  # fmt: skip
def test_common_code_is_read(text, tmp_path, monkeypatch):
    assert "A" in read(tmp_path, monkeypatch, f"class A: pass\n{text}\n").bound


@pytest.mark.parametrize(
    ("text", "may_find_more"),
    [
        ("import numpy, json\nfrom torch import nn", False),
        ("def f():\n    import sys", True),
        ("import second", True),
        ("from emrun.base.types import Factory", False),
    ],
)
def test_a_module_of_the_users_may_change_where_others_are_looked_for(text, may_find_more, tmp_path, monkeypatch):
    (tmp_path / "first.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    modules = SourceModules()
    modules.read("json.decoder")
    assert not modules.may_find_more
    modules.read("first")
    assert modules.may_find_more is may_find_more


def test_a_missing_module_is_reported_even_inside_a_module_that_is_not_a_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first.py").write_text("")
    for name in ("nowhere", "nowhere.at_all", "first.inner", "torch.nowhere"):
        with pytest.raises(LookupError):
            SourceModules().read(name)
