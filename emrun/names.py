"""From the names in a config to modules and classes, without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

from emrun.errors import did_you_mean

_HOUSE = Path(__file__).parent
_FOLDERS = {"hook": "hooks", "dataset": "datasets"}
KINDS = ("hook", "dataset", "model")
"""What has short names."""
_MODELS = {"torchmodel": "emrun.torch_model.TorchModel"}

FORMER = {
    "trainingtrace": "every run writes its trace; remove this hook",
    "initlr": "set `lr` of model.optimizer",
    "decaylr": "set model.scheduler, e.g. {class: ExponentialLR, gamma: 0.98}",
    "decaylronplateau": "set model.scheduler, e.g. {class: ReduceLROnPlateau, metric: valid/loss/mean}",
}
"""Names that ancestors of emrun had and emrun does not need, with what to do instead."""


class NotThere(LookupError):
    """A name in a config that names nothing, or more than one thing."""


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


def plugins(kind: str) -> dict[str, list[str]]:
    """Return what installed packages add to a kind: short name as they write it -> dotted paths.

    They do so by the entry-point groups `emrun.hooks`, `emrun.datasets` and `emrun.models`; nothing is imported. A
    name that several packages provide has several paths.
    """
    if kind not in KINDS:
        return {}
    from importlib.metadata import entry_points  # takes 65 ms, and most configs have no use for it

    found: dict[str, tuple[str, list[str]]] = {}
    for entry in entry_points(group=f"emrun.{kind}s"):
        path = entry.value.partition("[")[0].strip().replace(":", ".")
        _, paths = found.setdefault(normalised(entry.name), (entry.name, []))
        if path not in paths:
            paths.append(path)
    return dict(found.values())


def dotted_path(name: str, kind: str) -> str | None:
    """Return the dotted path of what a name without a dot means, None when nothing of this kind has it.

    Raises:
        NotThere: several packages provide it.
    """
    home = built_ins(kind).get(normalised(name))
    if home is None:
        paths = next((paths for each, paths in plugins(kind).items() if normalised(each) == normalised(name)), [])
        if len(paths) > 1:
            raise NotThere(f"several packages provide {kind} {name!r}: {', '.join(paths)}; write the dotted path")
        return paths[0] if paths else None
    if kind not in _FOLDERS:
        return home
    found = class_in(_HOUSE / _FOLDERS[kind] / f"{home.rpartition('.')[2]}.py")
    return f"{home}.{found}" if found else None


def same_class(one: str, other: str) -> bool:
    """Tell whether two names name the same class, as far as that is known without importing anything.

    Short names are compared without regard to case and underscores, dotted paths as they are. A dotted path is the same
    as a short name when the name can only mean that path: a class of emrun, of `torch.optim` or of a plugin.
    """
    dotted = [name for name in (one, other) if "." in name]
    if len(dotted) == 2:
        return one == other
    if not dotted:
        return normalised(one) == normalised(other)
    short = normalised(next(name for name in (one, other) if name not in dotted))
    if dotted[0].startswith(("emrun.", "torch.optim.")):
        return normalised(dotted[0].rpartition(".")[2]) == short
    found = (entry for kind in KINDS for entry in plugins(kind).items())
    return any(normalised(name) == short and paths == dotted for name, paths in found)


def short_names(kind: str, *, installed: bool = True) -> list[str]:
    """Return the short names of a kind as they are usually written.

    Args:
        kind: `hook`, `dataset` or `model`.
        installed: with those of installed packages, which come last.
    """
    paths = [dotted_path(name, kind) for name in built_ins(kind)]
    return [*(path.rpartition(".")[2] for path in paths if path), *(plugins(kind) if installed else ())]


def find_user_modules(*directories: str | None) -> None:
    """Let modules be imported from directories, such as that where a run was started, and from the current one."""
    for path in (*directories, str(Path.cwd())):
        if path and path not in sys.path:
            sys.path.append(path)


def no_dotted_path(path: str) -> NotThere:
    """Return the error for a text that cannot be a dotted path."""
    return NotThere(f"{path!r} is no dotted path such as my_module.MyClass")


def no_module(module: str) -> NotThere:
    """Return the error for a module that is nowhere to be found."""
    entries = list(Path.cwd().iterdir()) if "." not in module else []
    near = did_you_mean(module, [each.stem for each in entries if each.suffix == ".py" or each.is_dir()])
    return NotThere(f"no module {module!r}{near} (looked for in the current directory, then among installed packages)")


def no_member(path: str, owner: str, file: str | None, name: str, members: Iterable[str]) -> NotThere:
    """Return the error for a name that a module or class does not have.

    Args:
        path: the dotted path in the config.
        owner: the module or class, as it is called.
        file: where the module was found.
        name: what it does not have.
        members: what it has.
    """
    near = did_you_mean(name, [each for each in members if not each.startswith("_")])
    return NotThere(f"{path}: {owner}{f' (found at {file})' if file else ''} has no {name!r}{near}")
