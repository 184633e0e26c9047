"""Translates the names in a config to modules and classes, without importing anything."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from emrun.base.errors import OF_BASE
from emrun.base.lazy import homes
from emrun.base.preparations import PREPARATION
from emrun.base.wording import did_you_mean, normalised

_HOUSE = Path(__file__).parents[1]
_MODELS = {
    "Ensemble": "emrun.models.ensemble.Ensemble",
    "Sequence": "emrun.models.sequence.Sequence",
    "TorchModel": "emrun.models.torch_model.TorchModel",
}
_KINDS = ("hook", "dataset", "model")
_MODULES = {"Graph": "emrun.models.graph.Graph"}
_MODULES |= {
    name: f"emrun.models.networks.{name}" for name in ("MaskNet", "PictureNet", "SeriesNet", "TableNet", "TextNet")
}
LAYERS = "torch.nn.modules"
"""The package of the classes that need no dotted path where any object can be."""

SUPPLIED = {
    "dataset": ("model", "output_dir", "on_bad_example", PREPARATION),
    "model": ("dataset", "output_dir", "load_model"),
    "hook": ("model", "dataset", "output_dir"),
}
"""Kind of a class -> the arguments that emrun supplies where the class has parameters of that name."""

_OTHERS = Path(__file__).with_name("other_names.toml")
"""Names that other tools use, with advice."""


@functools.cache
def advice() -> Mapping[str, Mapping[str, str]]:
    """Return the advice of `other_names.toml`: `hook`, `key`, `schedule` or `precision` -> name -> advice."""
    import tomllib  # only mistakes need it

    by_kind: dict[str, dict[str, str]] = {}
    for entry in tomllib.loads(_OTHERS.read_text(encoding="utf-8"))["advice"]:
        for kind in entry.keys() - {"text"}:
            by_kind.setdefault(kind, {}).update(dict.fromkeys(entry[kind].split(), entry["text"]))
    return by_kind


def is_supplied(name: str, key: str) -> str:
    """Return the message for an argument that a config gives although emrun supplies it.

    Args:
        name: the argument.
        key: the key of the call in the config.
    """
    where = " from main_loop.on_bad_example" if name == "on_bad_example" else ""
    other = "; if your class means something else, such as the name of a tokenizer, rename its parameter"
    return f"{name!r} is supplied by emrun{where}; remove it{other if (key, name) == ('dataset', 'model') else ''}"


def instead(name: str, kind: str) -> str | None:
    """Return advice for a name that emloop or another tool uses and emrun does not, None for an unknown name.

    Args:
        name: the name in the config.
        kind: `hook` for the class of a hook, `key` for a key of a config, `schedule` for the class of a scheduler,
            or an argument, for its value.
    """
    return advice().get(kind, {}).get(normalised(name))


class NotThere(LookupError):
    """A name in a config that does not exist or is ambiguous."""


class NoModule(NotThere):
    """A module that does not exist."""

    def __init__(self, module: str) -> None:
        self.module = module
        entries = list(Path.cwd().iterdir()) if "." not in module else []
        near = did_you_mean(module, [entry.stem for entry in entries if entry.suffix == ".py" or entry.is_dir()])
        where = "looked for in the current directory, then among installed packages"
        more = "" if near else _extra_with(module) or "; to look in another folder, set code_directory"
        super().__init__(f"no module {module!r}{near} ({where}{more})")


def _extra_with(module: str) -> str | None:
    """Return how to install a package that an extra of emrun has, or None for any other name."""
    from importlib.metadata import requires

    for requirement in requires("emrun") or ():
        match = re.match(rf"{re.escape(module)}\b.*extra == .(\w+)", requirement)
        if match is not None:
            return f"; pip install 'emrun[{match[1]}]'"
    return None


def built_ins(kind: str) -> Mapping[str, str]:
    """Return the built-in classes of a kind: name -> dotted path, in the order of their files.

    Args:
        kind: `hook`, `dataset` or `model`; empty for modules.
    """
    if kind not in ("hook", "dataset"):
        return _MODELS if kind == "model" else _MODULES
    modules = sorted((module, name) for name, module in homes(_HOUSE / f"{kind}s" / "__init__.pyi").items())
    return {name: f"{module}.{name}" for module, name in modules if module.startswith(f"emrun.{kind}s.")}


@functools.cache
def bases() -> Mapping[str, Path]:
    """Return the configs of emrun that `extends` can name: name -> file."""
    return {f"{OF_BASE}{path.stem}": path for path in sorted((_HOUSE.resolve() / "bases").glob("*.yaml"))}


def plugins(kind: str) -> dict[str, list[str]]:
    """Return the classes of a kind in installed packages: short name as the package writes it -> dotted paths.

    Packages declare them in the entry-point groups `emrun.hooks`, `emrun.datasets` and `emrun.models`; nothing is
    imported. A name that several packages provide has several paths.
    """
    return _plugins(tuple(sys.path))[kind] if kind in _KINDS else {}


@functools.lru_cache(maxsize=16)  # takes 20 ms, and most configs do not need it
def _plugins(places: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
    """Return the classes of each kind in the packages that are found by `sys.path`."""
    from importlib.metadata import entry_points

    declared = entry_points()
    found = {}
    for kind in _KINDS:
        classes: dict[str, tuple[str, list[str]]] = {}
        for entry in declared.select(group=f"emrun.{kind}s"):
            path = entry.value.partition("[")[0].strip().replace(":", ".")
            _, paths = classes.setdefault(normalised(entry.name), (entry.name, []))
            if path not in paths:
                paths.append(path)
        found[kind] = dict(classes.values())
    return found


def dotted_path(name: str, kind: str) -> str | None:
    """Return the dotted path of a short name of a kind, None when no class has the name.

    Raises:
        NotThere: several packages provide the name.
    """
    for short, path in built_ins(kind).items():
        if normalised(short) == normalised(name):
            return path
    paths = next((paths for short, paths in plugins(kind).items() if normalised(short) == normalised(name)), [])
    if len(paths) > 1:
        raise NotThere(f"several packages provide {kind} {name!r}: {', '.join(paths)}; write one of these dotted paths")
    return paths[0] if paths else None


def same_class(one: Any, other: Any) -> bool:
    """Return whether two values of `class` name the same class, as far as can be known without an import.

    Short names are compared ignoring case and underscores, dotted paths exactly. A dotted path equals a short name when
    the name can only mean that path: a class of emrun, of `torch.optim` or of a plugin.
    """
    if not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    short, dotted = sorted((one, other), key=lambda name: "." in name)
    if "." in short:
        return one == other
    last = dotted.rpartition(".")[2]
    if "." not in dotted or dotted.startswith(("emrun.", "torch.optim.")):
        return normalised(last) == normalised(short)
    installed_classes = (entry for kind in _KINDS for entry in plugins(kind).items())
    return any(normalised(name) == normalised(short) and paths == [dotted] for name, paths in installed_classes)


def short_names(kind: str, *, installed: bool = True) -> list[str]:
    """Return the short names of a kind in their usual spelling.

    Args:
        kind: `hook`, `dataset` or `model`.
        installed: include names from installed packages, which come last.
    """
    return [*built_ins(kind), *(plugins(kind) if installed else ())]


def parts_of(path: str) -> list[str]:
    """Return the names in a dotted path.

    Raises:
        NotThere: the text is not a dotted path.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise NotThere(f"{path!r} is not a dotted path such as my_module.MyClass")
    return parts


def beside_config(error: NotThere, source: str) -> str:
    """Return advice when a module that was not found is in the folder of the config, otherwise an empty string.

    Args:
        error: the error that was raised.
        source: the file of the config, as in `Position.source`.
    """
    folder = Path(source).parent.resolve()
    file = _file_of(error.module, folder) if isinstance(error, NoModule) else None
    if file is None or folder == Path.cwd() or not Path(source).is_file():
        return ""
    return (
        f"; {file.relative_to(folder)} is in the folder of the config: set code_directory: {folder}, or run emrun there"
    )


def _file_of(module: str, folder: Path) -> Path | None:
    """Return the file of a module in a folder, None when the folder does not have the module."""
    files = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((file for file in files if os.path.isfile(file)), None)  # noqa: PTH113 - never raises


def _hidden(module: str) -> tuple[Path, str] | None:
    """Return the user's file of a module that another module hides, and the place of the latter; None if not hidden."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None
    for folder in map(Path, sys.path):
        other = _file_of(module, folder.resolve())
        is_installed = any(folder.is_relative_to(home) for home in INSTALLED)
        if other is not None and not is_installed and other.resolve() != Path(spec.origin).resolve():
            return other, "built into Python" if spec.origin in ("built-in", "frozen") else f"at {spec.origin}"
    return None


INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""The directories of the standard library and of installed packages."""


def no_member(path: str, owner: str, file: str | None, name: str, members: Iterable[str]) -> NotThere:
    """Return the error for a name that is missing in a module or class.

    Args:
        path: the dotted path in the config.
        owner: the name of the module or class.
        file: the file of the module.
        name: the name that is missing.
        members: the names that exist.
    """
    hidden = _hidden(path.partition(".")[0])
    if hidden is not None:
        users_file, where = hidden
        users_file = users_file.relative_to(Path.cwd()) if users_file.is_relative_to(Path.cwd()) else users_file
        return NotThere(
            f"{path}: {users_file} is hidden by the module of the same name {where}, which has no {name!r}; "
            f"rename {users_file}"
        )
    if owner == "__main__":
        return NotThere(
            f"{path}: only the script or notebook that made it has {name!r}; move {name} to a module of yours"
        )
    near = did_you_mean(name, [member for member in members if not member.startswith("_")])
    return NotThere(f"{path}: {owner}{f' (found at {file})' if file else ''} has no {name!r}{near}")
