"""Prints how large the engine is: files, lines of code without blanks, comments and docstrings, files over 400 lines.

    python tests/house_figures.py [ROOT]

ROOT is a checkout of emrun, by default this one; `hooks/` and `datasets/` are not counted.
"""

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path

SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_text(statement):
    """Tell whether a statement is a text that stands alone, as a docstring does."""
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)


def texts_of(tree):
    """Return the texts that document a module, a class, a function or an attribute."""
    owners = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return [statement for owner in owners for statement in owner.body if is_text(statement)]


def code_lines(path):
    """Return how many lines of a file hold code."""
    text = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in texts_of(ast.parse(text)):
        lines.difference_update(range(statement.lineno, statement.end_lineno + 1))
    return len(lines)


def engine(root):
    """Return the files of the engine."""
    links = [root / "emrun" / name for name in ("hooks", "datasets", "sample_configs")]
    return sorted(path for path in (root / "emrun").rglob("*.py") if not any(link in path.parents for link in links))


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in engine(root)}
    code = {path: code_lines(path) for path in lengths}
    packages = {}
    for path, lines in code.items():
        parts = path.relative_to(root / "emrun").parts
        packages.setdefault(parts[0] if len(parts) > 1 else "(root)", []).append(lines)
    for package, found in sorted(packages.items()):
        print(f"{package:12} {len(found):3} files {sum(found):6,} lines of code")
    print(f"{'all':12} {len(code):3} files {sum(code.values()):6,} lines of code")
    print(f"median file: {statistics.median(lengths.values()):g} lines, {statistics.median(code.values()):g} of code")
    for path, length in sorted(lengths.items(), key=lambda each: -each[1]):
        if length > 400:
            print(f"over 400 lines: {length} {path.relative_to(root)}")


if __name__ == "__main__":
    main()
