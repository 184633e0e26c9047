"""Classes and functions read from their files: what is found, and what is left to the import."""

import gc
import inspect
import itertools
import subprocess
import sys

import parsing
import pytest
from projects import linear_on_majority

from emrun.config.config import load_config
from emrun.config.import_finder import Imported, locate
from emrun.config.names import dotted_path
from emrun.config.plan import check_statically
from emrun.config.signatures import UNREAD
from emrun.config.source_finder import Unimported
from emrun.config.source_modules import SourceModule

NUMBERS = itertools.count()


# What is found


@pytest.fixture
def found(modules):
    """Return the parameters of what a module has under a name, None where only the import would tell."""

    def parameters(text, name="Thing", **more):
        module = f"found{next(NUMBERS)}"
        with modules(**{module: text.replace("HERE", module)}, **more):
            sources = Unimported()
            source = sources.find(f"{module}.{name}")
            return None if source is None else sources.parameters(source)

    return parameters


PLAIN = "class Thing:\n    def __init__(self, x: int, y=2): pass\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "def Thing(x: int, y=2): pass",
        "from base import Base as Thing",
        "import base\nclass Thing(base.Base): pass",
        "import base as other\nclass Thing(other.Base): pass",
        "from base import Base\nThing: int\nclass Thing(Base): pass",
        "from base import Base\nclass Mixed: pass\nclass Thing(Mixed, Base): pass",
        "import abc\nfrom typing import Generic, TypeVar\nfrom base import Base\nT = TypeVar('T')\n"
        "class Thing(Base, Generic[T], abc.ABC):\n    z = 3",
        "class Above:\n    def __init__(self, x: int, y=2): pass\nclass Thing(Above):\n    def other(self): pass",
    ],
)
def test_a_constructor_is_found_through_imports_and_bases(found, text):
    base = "__all__ = ['Base']\nclass Base:\n    def __init__(self, x: int, y=2): pass\n"
    parameters = found(text, base=base)
    assert [(each.name, each.annotation, each.default) for each in parameters.named.values()] == [
        ("x", int, inspect.Parameter.empty),
        ("y", None, 2),
    ]


def test_relative_imports_and_packages_are_followed(modules):
    files = {
        "pack__inner": "from . import other\nclass Thing(other.Base): pass",
        "pack__other": "from .deep import Base",
        "pack__deep": PLAIN.replace("Thing", "Base"),
    }
    with modules(**files) as path:
        (path / "pack" / "__init__.py").write_text("from .inner import Thing")
        sources = Unimported()
        (base,) = sources.find("pack.Thing").__bases__
        assert (base.__module__, base.__qualname__) == ("pack.deep", "Base")
        assert list(sources.parameters(sources.find("pack.Thing")).named) == ["x", "y"]


@pytest.mark.parametrize(
    "text",
    [
        f"import functools\n@functools.cache\n{PLAIN}",
        f"{PLAIN.replace('Thing:', 'Thing(metaclass=type):')}",
        f"if len('x'):\n    class Thing: pass\n{PLAIN}",
        "try:\n    import nothing\nexcept ImportError:\n    class Thing: pass",
        f"{PLAIN}Thing = print",
        f"{PLAIN}del Thing",
        f"{PLAIN}for Thing in (1, 2): pass",
        f"{PLAIN}def __getattr__(name): pass\nglobals()['Thing'] = print",
        f"{PLAIN}setattr(Thing, '__init__', print)",
        f"{PLAIN}Thing.__init__ = print",
        f"{PLAIN}Thing.__init__.__defaults__ = (1, 2)",
        f"{PLAIN}exec('Thing = print')",
        "class Thing:\n    __new__ = print\n    def __init__(self, b): pass",
        "class Thing:\n    if len('x'):\n        def __init__(self, b): pass",
        "class Thing:\n    __init__ = print",
        "class Thing:\n    @staticmethod\n    def __init__(b): pass",
        "class Base:\n    def __init_subclass__(cls): cls.__new__ = print\nclass Thing(Base): pass",
        "class Thing(type('Base', (), {})): pass",
        "from os import *\nclass Thing: pass",
        "from typing import *\nclass Thing: pass",
        "def Thing(x, x): pass",
        "class A: pass\nclass B(A): pass\nclass Thing(A, B): pass",
        "Thing = type('Thing', (), {})",
        "async def Thing(): pass",
        "class Thing(dict): pass",
        "import HERE\nHERE.Thing.__init__ = print\nclass Thing: pass",
        "def Thing(: pass",
    ],
)
def test_what_is_not_literal_is_left_to_the_import(found, text):
    assert found(text) is None


def test_nothing_of_a_definition_is_called(found):
    text = "def stop(*args): raise SystemExit(stop)\n"
    text += "class Thing:\n    x = stop()\n    @stop\n    def f(self): pass\n"
    text += "    def __init__(self, x: stop() = stop(), *, y: stop = stop()): stop()\n"
    parameters = found(text)
    assert [(each.annotation, each.default) for each in parameters.named.values()] == [(UNREAD, UNREAD)] * 2


@pytest.mark.filterwarnings("default")
def test_what_python_warns_of_is_left_to_the_import(found, recwarn):
    assert list(found("class Thing:\n    def __init__(self, x): self.x = x is 3\n").named) == ["x"]
    assert not recwarn.list


def test_a_function_that_is_annotated_with_itself_is_read(found):
    text = "from __future__ import annotations\ndef Thing(x: Thing, y: other): pass\ndef other(z: Thing): pass"
    assert list(found(text).named) == ["x", "y"]


def test_the_module_of_a_type_is_read_only_for_a_value_of_the_type(modules):
    text = "from others import Other\nclass Thing:\n    def __init__(self, x: Other, y=2): pass\n"
    with modules(things=text) as path:
        sources = Unimported()
        parameters = sources.parameters(sources.find("things.Thing"))
        (path / "others.py").write_text("Other = int\n")
        assert (parameters.hint("x"), parameters.named["x"].annotation, parameters.hint("y")) == (int, int, None)


def test_what_was_read_is_gone_without_looking_for_garbage(monkeypatch):
    monkeypatch.setattr(Unimported, "_lookup", parsing.LOOKUP)
    config = load_config(linear_on_majority(hooks=["ComputeStats", {"StopAfter": {"epochs": 1}}]))
    gc.collect()
    gc.disable()
    try:
        before = [each for each in gc.get_objects() if isinstance(each, Unimported | SourceModule)]
        check_statically(config)
        assert [each for each in gc.get_objects() if isinstance(each, Unimported | SourceModule)] == before
    finally:
        gc.enable()


# What is missing


@pytest.mark.parametrize(
    "path",
    ["nowhere.Thing", "pack.Nothing", "pack.things.Thin", "pack.thing.Thing", "a b.Thing", "os.path.", "nowhere.a.b"],
)
def test_what_is_missing_is_reported_in_the_words_of_the_import(modules, path):
    with modules(
        pack__things=f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from os import Thine\n{PLAIN}"
    ):
        with pytest.raises(LookupError) as read:
            Unimported().find(path)
        with pytest.raises(LookupError) as imported:
            locate(path)
    assert str(read.value) == str(imported.value)


def test_a_module_that_may_change_the_path_leaves_missing_ones_to_the_import(modules):
    with modules(first="import second", second="import sys\nsys.path.append('elsewhere')", third=PLAIN):
        sources = Unimported()
        with pytest.raises(LookupError):
            sources.find("nowhere.Thing")
        assert sources.find("third.Thing") is not None
        with pytest.raises(LookupError):
            sources.find("nowhere.Thing")
        with pytest.raises(LookupError):
            sources.find("first.Thing")  # imports the second
        assert sources.find("nowhere.Thing") is None


def test_a_member_that_another_way_of_finding_it_may_have_is_left_to_the_import(found):
    assert found("def __getattr__(name): return 3", "Nothing") is None
    assert found("import sys\nsys.modules[__name__].Nothing = 3", "Nothing") is None


# Streams


@pytest.mark.parametrize(
    "body, streams",
    [
        ("def train_stream(self): pass\n    def valid_stream(self): pass", ["train", "valid"]),
        ("def other(self): pass", None),  # they may come when it is built
        ("def add(self): setattr(self, 'x_stream', 1)", None),
        ("def add(self): self.valid_stream = 1", None),
        ("def __getattr__(self, name): pass", None),
        ("train_stream = print", None),
        ("def train_stream(self): pass\n    @override\n    def add(self): self.valid_stream = 1", None),
        ("def train_stream(self): pass\n    @property\n    def size(self): return 3", ["train"]),
    ],
)
def test_streams_are_read_where_they_are_methods(modules, body, streams):
    with modules(data=f"from emrun import AbstractDataset\nclass Data(AbstractDataset):\n    {body}\n"):
        assert Unimported().streams(Unimported().find("data.Data")) == streams


@pytest.mark.parametrize(
    "name",
    [
        "Digits",
        "Table",
        "TorchDataset",
        "Pictures",
        "ImageFolder",
        "TarShards",
        "Parquet",
        "Text",
        "Chats",
        "HuggingFace",
    ],
)
def test_the_streams_of_built_in_datasets_are_read_in_their_base(name):
    path = dotted_path(name, "dataset")
    assert sorted(Unimported().streams(Unimported().find(path))) == ["test", "train", "valid"]


@pytest.mark.parametrize(
    "code",
    [
        "class Data:\n    def train_stream(self): pass\n    __getattr__ = missing",
        "class Data:\n    def train_stream(self): pass\nData.__getattr__ = missing",
        "class Data:\n    @missing\n    def __getattr__(self, name): pass",
    ],
)
def test_a_class_that_finds_streams_by_other_means_is_left_to_the_import(found, code):
    assert found(f"def missing(self, name): pass\n{code}", "Data") is None


def test_a_class_that_is_registered_as_a_model_is_left_to_the_import(found):
    assert found("from emrun import AbstractModel as M\nclass Mine: pass\nM.register(Mine)", "Mine") is None


# torch, which is never imported


@pytest.mark.parametrize(
    "path, names",
    [
        ("torch.optim.AdamW", {"lr", "weight_decay", "betas"}),
        ("torch.optim.SGD", {"lr", "momentum"}),
        ("torch.optim.Adam", {"lr", "eps"}),
        ("torch.optim.RMSprop", {"alpha"}),
        ("torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max", "eta_min"}),
        ("torch.optim.lr_scheduler.StepLR", {"step_size", "gamma"}),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", {"patience"}),
        ("torch.optim.lr_scheduler.OneCycleLR", {"max_lr"}),
        ("torch.nn.Linear", {"in_features", "out_features", "bias"}),
        ("torch.nn.Conv2d", {"in_channels", "kernel_size"}),
        ("torch.nn.ReLU", {"inplace"}),
        ("torch.nn.Flatten", {"start_dim"}),
        ("torch.nn.Dropout", {"p"}),
        ("torch.nn.BatchNorm2d", {"num_features"}),
        ("torch.nn.LayerNorm", {"normalized_shape"}),
        ("torch.nn.Embedding", {"embedding_dim"}),
        ("torch.nn.CrossEntropyLoss", {"weight", "label_smoothing"}),
        ("torch.nn.BCEWithLogitsLoss", {"pos_weight"}),
        ("emrun.TorchModel", {"module", "optimizer"}),
        ("emrun.metrics.accuracy", {"logits", "label"}),
    ],
)
def test_the_common_classes_of_torch_can_be_read(path, names):
    parameters = Unimported().parameters(Unimported().find(path))
    assert names <= parameters.named.keys()
    assert parameters.named.keys() == Imported().parameters(locate(path)).named.keys()


@pytest.mark.parametrize("package", ["torch.optim", "torch.optim.lr_scheduler"])
def test_a_package_has_the_classes_that_it_has_when_it_is_imported(package):
    imported, read = set(Imported().classes(package)), set(Unimported().classes(package))
    assert imported - {"SWALR"} <= read | {"Optimizer"}
    assert not {"Callable", "Iterable", "Sequence"} & read


def test_nothing_of_torch_or_of_the_user_is_imported(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, n: int): pass\n"
    )
    code = (
        "import sys; from emrun.config.source_finder import Unimported; s = Unimported()\n"
        "for path in ('torch.nn.Linear', 'torch.optim.AdamW', 'emrun.TorchModel', 'mine.Net'):\n"
        "    assert s.find(path), path\n"
        "assert s.classes('torch.optim.lr_scheduler')\n"
        "print(sorted({'torch', 'mine', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"
