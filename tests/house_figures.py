"""Prints how large emrun is, and how many names it has that users write; holds a ceiling for each.

    python tests/house_figures.py [ROOT]

ROOT is a checkout of emrun, by default this one. The size of a file is the number of nodes of its syntax tree: neither
the layout of the code nor joining two statements makes it smaller. `tests/test_house_figures.py` fails where a room is
larger than its ceiling. A change that needs more pays in the same change, or raises the ceiling in a commit of its own,
which says why.
"""

import ast
import functools
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = {
    "root": 14_382,
    "base": 16_007,
    "cli": 36_053,
    "config": 39_284,
    "diagnosis": 45_607,
    "exports": 14_506,
    "launch": 16_285,
    "loop": 35_439,
    "models": 68_286,
    "ranks": 6_798,
    "record": 14_995,
    "runs": 27_401,
    "storage": 26_873,
    "streams": 11_874,
    "training": 12_078,
    "hooks": 56_414,
    "datasets": 64_035,
}
"""Room -> the most nodes: those of the day on which the ceilings were set, and 5 %."""
NAMES = {
    "commands": 22,
    "options": 147,
    "keys of main_loop": 23,
    "keys of model": 18,
    "hooks": 41,
    "datasets": 14,
}
"""Kind of public names -> the most of them."""
FILES = {"emrun": 17, "emrun/base": 21, "emrun/config": 21}
"""Folder -> the most files; in other folders 20, but in those of `MANY`."""
MANY = ("emrun/cli", "emrun/models", "emrun/loop", "hooks", "datasets")


@functools.cache
def read(text):
    """Return how many nodes the syntax tree of a file has, and the names of all that it imports, and at its top.

    Each file is parsed once for all tests; their copies of files have mostly the same texts.
    """
    tree = ast.parse(text)
    count, statements = 0, []
    for node in ast.walk(tree):
        count += 1
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append(node)
    return count, frozenset(imported_by(statements)), frozenset(imported_by(tree.body))


def imported_by(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def nodes_in(text):
    return read(text)[0]


def sources(root):
    """Return room -> its files: the packages of the engine, its root, `hooks` and `datasets`."""

    def all_in(folder, pattern="**/"):
        return sorted(folder.glob(f"{pattern}*.py"))

    rooms = {"root": all_in(root / "emrun", "")}
    for folder in sorted((root / "emrun").iterdir()):
        if folder.is_dir() and not folder.is_symlink() and any(folder.glob("*.py")):
            rooms[folder.name] = all_in(folder)
    return rooms | {name: all_in(root / name) for name in ("hooks", "datasets")}


def nodes(root):
    """Return room -> the nodes of its files."""
    return {
        room: sum(nodes_in(path.read_text(encoding="utf-8")) for path in files) for room, files in sources(root).items()
    }


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
    found, counts = nodes(root), files(root)
    for room, size in found.items():
        print(f"{room:12} {len(sources(root)[room]):3} files {size:7,} nodes")
    print(f"{'all':12} {sum(map(len, sources(root).values())):3} files {sum(found.values()):7,} nodes")
    for folder, count in counts.items():
        if count > FILES.get(folder, 20):
            print(f"over {FILES.get(folder, 20)} files: {count} {folder}")
    if root == ROOT:
        print(*(f"{kind}: {count}" for kind, count in names().items()), sep="\n")


if __name__ == "__main__":
    main()
