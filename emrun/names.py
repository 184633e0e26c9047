"""From the names in a config to modules and classes, without importing anything."""

from __future__ import annotations

import ast
from pathlib import Path

_HOUSE = Path(__file__).parent
_FOLDERS = {"hook": "hooks", "dataset": "datasets"}
_MODELS = {"torchmodel": "emrun.torch_model.TorchModel"}

FORMER = {
    "trainingtrace": "every run writes its trace; remove this hook",
    "initlr": "set `lr` of model.optimizer",
    "decaylr": "set model.scheduler, e.g. {class: ExponentialLR, gamma: 0.98}",
    "decaylronplateau": "set model.scheduler, e.g. {class: ReduceLROnPlateau, metric: valid/loss/mean}",
}
"""Names that ancestors of emrun had and emrun does not need, with what to do instead."""


def normalised(name: str) -> str:
    """Return a name without regard to case and underscores, as short names are compared."""
    return name.lower().replace("_", "")


def built_ins(kind: str) -> dict[str, str]:
    """Return the built-ins of a kind: short name in the form of `normalised` -> dotted path of the class.

    Args:
        kind: `hook`, `dataset` or `model`; other kinds have none.
    """
    if kind == "model":
        return _MODELS
    if kind not in _FOLDERS:
        return {}
    folder = _FOLDERS[kind]
    files = sorted((_HOUSE / folder).glob("[!_]*.py"))
    return {normalised(path.stem): f"emrun.{folder}.{path.stem}" for path in files}


def class_in(path: Path) -> str | None:
    """Return the name of the class that a file is named for, None when there is no such class."""
    found = _class_definition(path)
    return found.name if found else None


def documentation(name: str, kind: str) -> str:
    """Return the docstring of a built-in, read from its file."""
    home = built_ins(kind)[normalised(name)]
    found = _class_definition(_HOUSE / _FOLDERS[kind] / f"{home.rpartition('.')[2]}.py")
    return (found and ast.get_docstring(found)) or ""


def _class_definition(path: Path) -> ast.ClassDef | None:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and normalised(statement.name) == normalised(path.stem):
            return statement
    return None


def dotted_path(name: str, kind: str) -> str | None:
    """Return the dotted path of what a name without a dot means, None when no built-in of this kind has it."""
    home = built_ins(kind).get(normalised(name))
    if home is None or kind not in _FOLDERS:
        return home
    found = class_in(_HOUSE / _FOLDERS[kind] / f"{home.rpartition('.')[2]}.py")
    return f"{home}.{found}" if found else None


def short_names(kind: str) -> list[str]:
    """Return the short names of a kind as they are usually written."""
    paths = [dotted_path(name, kind) for name in built_ins(kind)]
    return [path.rpartition(".")[2] for path in paths if path]
