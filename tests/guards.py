"""Which guards of the code the tests protect: takes guards out, one by one, and runs the tests that execute them.

A guard is an `if` or `elif` whose body is one statement that only raises or only returns an error. It is taken out by
making its condition false. Tests that all pass without a guard do not protect it: the guard is LOST.

`make guards` makes the database that says which test executes which line, and runs this script. The database is one of
coverage.py, with branches; its contexts are the node ids of the tests. The tests run in a copy of the checkout, which
comes first on PYTHONPATH: what a test starts with another PYTHONPATH runs the code of the checkout itself.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("emrun/hooks/", "emrun/datasets/", "emrun/sample_configs/")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*)$", re.MULTILINE)
_PLACES = """
import emrun, emrun.hooks, emrun.datasets
print(emrun.__file__, *[next(iter(package.__path__)) for package in (emrun.hooks, emrun.datasets)], sep="\\n")
"""


@dataclass(frozen=True)
class Guard:
    """A guard: its file below the checkout, function, condition, and the lines of the `if` and of its body."""

    path: str
    function: str
    condition: str
    line: int
    body: int

    def __str__(self):
        """Return where it is and its condition in short."""
        short = self.condition if len(self.condition) <= 60 else f"{self.condition[:57]}..."
        return f"{self.path}:{self.line} `{short}`"


def makes_error(value):
    """Return whether it calls something named ...Error, ...Problem, _error or _problem, or is a list of such calls."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return bool(value.elts) and all(map(makes_error, value.elts))
    name = getattr(value.func, "id", getattr(value.func, "attr", "")) if isinstance(value, ast.Call) else ""
    return name.lower().endswith(("error", "problem"))


def ifs_in(node, function=""):
    """Yield the guards below a node of the syntax tree, with the qualified names of their functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from ifs_in(child, f"{function}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.If) and len(child.body) == 1:
            (only,) = child.body
            if isinstance(only, ast.Raise) or (isinstance(only, ast.Return) and makes_error(only.value)):
                yield child, function
        yield from ifs_in(child, function)


def guards_in(source, path):
    """Return the guards of a source in the order of their lines."""
    found = [
        Guard(path, function, ast.unparse(node.test), node.test.lineno, node.body[0].lineno)
        for node, function in ifs_in(ast.parse(source))
    ]
    return sorted(found, key=lambda guard: guard.line)


def all_guards(root=ROOT):
    """Return the guards of emrun, hooks and datasets, sorted by path and line."""
    paths = [path for top in ("emrun", "hooks", "datasets") for path in (root / top).rglob("*.py")]
    names = sorted({path.relative_to(root).as_posix() for path in paths})
    names = [name for name in names if not name.startswith(LINKS)]
    return [guard for name in names for guard in guards_in((root / name).read_text(encoding="utf-8"), name)]


def taken_out(source, guard):
    """Return the source with the guard's condition false; no line moves."""
    (test,) = [node.test for node, _ in ifs_in(ast.parse(source)) if node.body[0].lineno == guard.body]
    lines = source.encode().split(b"\n")  # the columns of a syntax tree count bytes
    ends = (test.end_lineno, test.end_col_offset, b") and False"), (test.lineno, test.col_offset, b"(")
    for line, column, text in ends:
        lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    return b"\n".join(lines).decode()


def node_id(context):
    """Return the node id of the test that a context names, or an empty text."""
    last = re.split(r"\|(?=[^|\[]+\.py::)", context)[-1]  # a parameter may have a | too
    return re.sub(r" \((?:setup|call|teardown)\)$", "", last)


def executing_tests(database, root, guards):
    """Return the node ids of the tests that execute each guard."""
    tests = {guard: set() for guard in guards}
    by_path = defaultdict(dict)
    for guard in guards:
        by_path[str(Path(root) / guard.path)][guard.body] = guard
    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)
    try:
        for file_id, path in connection.execute("SELECT id, path FROM file").fetchall():
            lines = by_path.get(path, {})
            marks = ", ".join(map(str, lines))
            rows = connection.execute(
                "SELECT DISTINCT context, fromno, tono FROM arc JOIN context ON context.id = context_id "
                f"WHERE file_id = ? AND (fromno IN ({marks}) OR tono IN ({marks}))",
                (file_id,),
            )
            for context, *ends in rows if lines else ():
                for end in lines.keys() & set(ends) if node_id(context) else ():
                    tests[lines[end]].add(node_id(context))
    finally:
        connection.close()
    return {guard: sorted(found) for guard, found in tests.items()}


def still_there(tests, collected):
    """Return the tests that are collected; for another, all collected ones of the same function."""
    functions = defaultdict(set)
    for test in collected:
        functions[test.partition("[")[0]].add(test)
    return set().union(*({test} if test in collected else functions[test.partition("[")[0]] for test in tests))


def nearest_first(tests, path):
    """Return tests sorted: first those of the file that mirrors a source, then of its folder, then the others."""
    below = Path(path.removeprefix("emrun/"))
    folder = (Path("tests") / below.parent).as_posix()
    file = f"{folder}/test_{below.stem.lstrip('_')}.py"
    places = {test: test.partition("::")[0] for test in tests}
    return sorted(tests, key=lambda each: (places[each] != file, places[each].rpartition("/")[0] != folder, each))


class Copy:
    """A copy of the checkout, in which pytest imports the copied emrun."""

    def __init__(self, directory):
        self.root = directory / "copy"
        self.listed = directory / "tests.txt"
        names = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            if os.path.lexists(ROOT / name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        site = directory / "site"
        site.mkdir()
        (site / "emrun").symlink_to("../copy/emrun")
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = self._run(sys.executable, "-P", "-c", _PLACES)
        wanted = [self.root / name for name in ("emrun/__init__.py", "hooks", "datasets")]
        if [Path(line).resolve() for line in done.stdout.splitlines()] != [path.resolve() for path in wanted]:
            sys.exit(f"the tests would not import the copy of emrun:\n{done.stdout}")

    def _run(self, *command):
        options = {"cwd": self.root, "env": self.env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, text=True, errors="replace", check=False, **options)

    def pytest(self, *arguments):
        """Run pytest in the copy; return the finished process."""
        program = Path(sys.executable).with_name("pytest")  # `python -m pytest` would import the folder datasets
        return self._run(program, "-n", "0", "-q", "-p", "no:cacheprovider", *arguments)

    def collected(self, marks):
        """Return the node ids of the tests with these marks."""
        done = self.pytest("--collect-only", "-m", marks)
        if done.returncode:
            sys.exit(f"the tests could not be collected:\n{done.stdout[-2000:]}")
        return {line for line in done.stdout.splitlines() if "::" in line}

    def failing(self, tests):
        """Run tests; return one that fails, or None; RuntimeError: pytest has failed."""
        self.listed.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        done = self.pytest("-x", "--timeout", "300", "-m", "", f"@{self.listed}")
        lines = _FAILED.findall(done.stdout) if done.returncode == 1 else []
        found = [test for test in tests if any(line == test or line.startswith(f"{test} - ") for line in lines)]
        if done.returncode and not found:
            raise RuntimeError(f"pytest has exit status {done.returncode}:\n{done.stdout[-2000:]}")
        return max(found, key=len) if found else None

    def verdict(self, guard, tests):
        """Return what the tests say without the guard; a test that fails with the guard too is left out."""
        path = self.root / guard.path
        source = path.read_text(encoding="utf-8")
        left, note = list(tests), ""
        try:
            while left:
                path.write_text(taken_out(source, guard), encoding="utf-8")
                found = self.failing(left)
                path.write_text(source, encoding="utf-8")
                if found is None:
                    return f"LOST{note}"
                if self.failing([found]) is None:
                    return f"found by {found}{note}"
                left.remove(found)
                note = f" ({len(tests) - len(left)} tests fail in the copy anyway)"
        except RuntimeError as error:
            return f"error: {error}"
        finally:
            path.write_text(source, encoding="utf-8")
        return f"LOST (no test is left to run){note}"


def named(file, guards):
    """Return the guards of a file that `--write` has written, found by path, function and condition."""
    found = []
    for entry in json.loads(Path(file).read_text(encoding="utf-8")):
        same = [each for each in guards if all(getattr(each, key) == entry[key] for key in entry if key != "line")]
        if same:
            found.append(min(same, key=lambda each: abs(each.line - entry["line"])))
        else:
            print(f"{entry['path']} {entry['function']} `{entry['condition']}`: is not there any more", flush=True)
    return list(dict.fromkeys(found))


def try_guards(args, guards, executing):
    """Take guards out and print what the tests say."""
    executed = [guard for guard in guards if executing[guard]]
    drawn = random.Random(args.seed).sample(executed, min(args.count, len(executed)))
    drawn = named(args.guards, guards) if args.guards else drawn
    if args.write:
        entries = [{key: value for key, value in asdict(guard).items() if key != "body"} for guard in drawn]
        args.write.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="emrun-guards-") as directory:
        copies = SimpleQueue()
        for job in range(args.jobs):
            (Path(directory) / str(job)).mkdir()
            copies.put(first := Copy(Path(directory) / str(job)))
        collected = first.collected("")
        marked = collected if args.campaign else first.collected("not campaign")

        def attempt(guard):
            tests = nearest_first(still_there(executing[guard], collected) & marked, guard.path)[: args.most]
            copy = copies.get()
            try:
                verdict = copy.verdict(guard, tests)
            finally:
                copies.put(copy)
            print(f"{guard}, {len(tests)} tests: {verdict}", flush=True)
            return verdict.partition(" ")[0].strip(":")

        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = list(pool.map(attempt, drawn))
    print(", ".join(f"{verdicts.count(each)} {each}" for each in ("found", "LOST", "error")))


def main():
    """List the guards, or try some."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "try"):
        command = commands.add_parser(name)
        command.add_argument("database", type=Path)
        command.add_argument("--root", type=Path, default=ROOT, help="the checkout whose paths the database has")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--count", type=int, default=40, help="how many guards are drawn")
    command.add_argument("--campaign", action="store_true", help="run the tests of the campaign too")
    command.add_argument("--jobs", type=int, default=1)
    command.add_argument("--most", type=int, default=200, help="how many tests are run for a guard")
    command.add_argument("--write", type=Path, metavar="FILE", help="write the guards that are drawn")
    command.add_argument("--guards", type=Path, metavar="FILE", help="try the guards of this file")
    args = parser.parse_args()
    guards = all_guards()
    executing = executing_tests(args.database, args.root.resolve(), guards)
    if args.command == "try":
        try_guards(args, guards, executing)
        return
    never = [guard for guard in guards if not executing[guard]]
    print(f"{len(guards)} guards, {len(guards) - len(never)} executed by at least one test, {len(never)} by none")
    print(*never, sep="\n")


if __name__ == "__main__":
    main()
