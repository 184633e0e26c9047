"""Prints how large emrun is, and how many names it has that users write; holds a ceiling for each.

    python tests/house_figures.py [ROOT]

ROOT is a checkout of emrun, by default this one. A line is a logical line of code, as Python's tokens have it: joining
or wrapping lines changes nothing; blank lines, comments and docstrings do not count. `tests/test_house_figures.py`
fails where a room is larger than its ceiling. A change that needs more pays in the same change, or raises the ceiling
in a commit of its own, which says why.
"""

import ast
import inspect
import io
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = {
    "root": 1_062,
    "base": 1_147,
    "cli": 2_699,
    "config": 2_783,
    "diagnosis": 2_829,
    "launch": 1_193,
    "loop": 2_978,
    "models": 5_117,
    "ranks": 562,
    "record": 1_296,
    "runs": 2_076,
    "storage": 2_476,
    "streams": 1_170,
    "training": 1_155,
    "hooks": 4_723,
    "datasets": 2_205,
}
"""Room -> the most logical lines of code."""
NAMES = {
    "commands": 21,
    "options": 130,
    "keys of main_loop": 21,
    "keys of model": 17,
    "hooks": 41,
    "datasets": 11,
}
"""Kind of public names -> the most of them."""
FILES = {"emrun": 16}
"""Folder -> the most files; in other folders 20, but in those of `MANY`."""
MANY = ("emrun/cli", "emrun/models", "emrun/loop", "hooks", "datasets")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_text(statement):
    """Tell whether a statement is a text that stands alone, as a docstring does."""
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)


def texts_of(tree):
    """Return the texts that document a module, a class, a function or an attribute."""
    owners = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return [statement for owner in owners for statement in owner.body if is_text(statement)]


def code_lines(path):
    """Return how many logical lines of code a file has."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NEWLINE for token in tokens) - len(texts_of(ast.parse(text)))


def sources(root):
    """Return room -> its files: the packages of the engine, its root, `hooks` and `datasets`."""

    def all_in(folder, pattern="**/"):
        return sorted([*folder.glob(f"{pattern}*.py"), *folder.glob(f"{pattern}*.pyi")])

    rooms = {"root": all_in(root / "emrun", "")}
    for folder in sorted((root / "emrun").iterdir()):
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__":
            rooms[folder.name] = all_in(folder)
    return rooms | {name: all_in(root / name) for name in ("hooks", "datasets")}


def lines(root):
    """Return room -> its logical lines of code."""
    return {room: sum(map(code_lines, files)) for room, files in sources(root).items()}


def files(root):
    """Return folder -> how many files of Python it has, without `__init__.py`."""
    counts = {}
    for path in (path for room in sources(root).values() for path in room if path.stem != "__init__"):
        folder = path.parent.relative_to(root).as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    return counts


def names():
    """Return kind -> how many names users write: on the command line and in a config."""
    import emrun.datasets
    import emrun.hooks
    from emrun import MainLoop, TorchModel
    from emrun.cli import emrun as group

    options = [
        each for command in group.commands.values() for each in command.params if each.param_type_name == "option"
    ]
    supplied = {"model", "dataset", "hooks", "run", "rank_log", "seed", "unknown"}  # by the engine
    return {
        "commands": len(group.commands),
        "options": len(options),
        "keys of main_loop": len(inspect.signature(MainLoop).parameters.keys() - supplied),
        "keys of model": len(inspect.signature(TorchModel).parameters),
        "hooks": sum(name[0].isupper() for name in dir(emrun.hooks)),
        "datasets": sum(name[0].isupper() for name in dir(emrun.datasets)),
    }


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    found, counts = lines(root), files(root)
    for room, size in found.items():
        print(f"{room:12} {len(sources(root)[room]):3} files {size:6,} lines of code")
    print(f"{'all':12} {sum(map(len, sources(root).values())):3} files {sum(found.values()):6,} lines of code")
    paths = [path for room in sources(root).values() for path in room]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    print(f"median file: {statistics.median(lengths.values()):g} lines of text")
    for folder, count in counts.items():
        if count > FILES.get(folder, 20):
            print(f"over {FILES.get(folder, 20)} files: {count} {folder}")
    for path, length in sorted(lengths.items(), key=lambda each: -each[1]):
        if length > 400:
            print(f"over 400 lines of text: {length} {path.relative_to(root)}")
    if root == ROOT:
        print(*(f"{kind}: {count}" for kind, count in names().items()), sep="\n")


if __name__ == "__main__":
    main()
