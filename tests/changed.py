"""Prints which tests a change may break: `python tests/changed.py [COMMIT]` names folders for pytest, `all` in words.

The change is what differs from a commit, by default the last one, with files that git does not track. A changed package
has its folder of tests and those of the packages above it in the import table of `tests/test_house.py`; the tests of
faults are above all that they harm. A change of what the root of emrun is made of may break everything.
"""

import subprocess
import sys

from test_house import MAY_IMPORT, ROOT, ROOT_PACKAGE

FOUND_BY_NAME = {"training": {"models"}, "faults": {"streams", "storage", "loop", "models", "hooks", "training"}}
"""What a package uses without importing it, and what the tests of faults harm."""
EVERYTHING = "tests"


def packages_above(package):
    """Return a package and those that use it, at first hand or through others."""
    found = {package}
    while True:
        users = {
            user
            for table in (MAY_IMPORT, FOUND_BY_NAME)
            for user, used in table.items()
            if not found.isdisjoint(used) and user not in found
        }
        if not users:
            return found
        found |= users


def what_may_break(path):
    """Return the folders and files of the tests that a change of a file, relative to the repository, may break."""
    match path.split("/"):
        case ["emrun", package, _, *_] | [("hooks" | "datasets") as package, _, *_]:
            above = packages_above(package)
            return {EVERYTHING} if ROOT_PACKAGE in above else {f"tests/{each}" for each in above}
        case ["tests", ("contexts" | "doomed" | "plugin"), *_]:
            return {EVERYTHING}
        case ["tests", folder, _, *_]:
            return {f"tests/{folder}"}
        case ["tests", file] if file.startswith("test_"):
            return {path}
        case ["sample_configs", *_]:
            return {"tests/test_sample_configs.py", "tests/test_readme.py", "tests/test_recipes.py"}
        case ["docs", *_] | ["benchmarks", "README.md"] | [("README.md" | "CHANGELOG.md" | "CONTRIBUTING.md")]:
            return {str(each.relative_to(ROOT)) for each in (ROOT / "tests").glob("test_*.py")}
        case ["mkdocs.yml"]:
            return {"tests/test_site.py"}
        case ["benchmarks", *_] | [("LICENSE" | ".gitignore")]:
            return set()
    return {EVERYTHING}


def changed_since(commit):
    """Return the paths of the files that differ from a commit, or that git does not track."""
    commands = ["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"]
    done = [subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True) for each in commands]
    return [line for each in done for line in each.stdout.splitlines()]


def main(commit="HEAD"):
    """Print the tests; say to a person which they are, and why it is everything."""
    changed = changed_since(commit)
    found = {path: what_may_break(path) for path in changed}
    everything = [path for path, tests in found.items() if EVERYTHING in tests]
    tests = {EVERYTHING} if everything else {name for each in found.values() for name in each if (ROOT / name).exists()}
    if everything:
        said = f"all tests: {everything[0]} is used by everything"
    else:
        said = f"tests of {len(changed)} changed files: {' '.join(sorted(tests)) or 'none'}"
    print(said, file=sys.stderr)
    print(*sorted(tests))


if __name__ == "__main__":
    main(*sys.argv[1:])
