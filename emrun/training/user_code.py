"""Gathers what a run is made from: the user's modules, the installed packages, the git repositories."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from time import monotonic
from typing import Any

from emrun.config.plan import Plan, code_directories
from emrun.errors import reason_of
from emrun.storage.code import Code, Module, Repository
from emrun.storage.code_record import CodeRecord
from emrun.storage.git import Git, GitError
from emrun.storage.run import Run
from emrun.user_modules import user_directories
from emrun.wording import size_of

_LONGEST = 5.0  # seconds
_MOST = 5_000_000  # bytes of all sources, of a patch, and of a list of files
_MOST_UNTRACKED = 1000  # names
_INSTALLED = ("site-packages", "dist-packages")


def record_code(plan: Plan, run: Run) -> None:
    """Let a run record its code when the training begins."""
    directories = [Path(each) for each in code_directories(plan.config)]
    run.code = CodeRecord(run.directory, run.censor, partial(gather, directories))


def gather(directories: Sequence[Path], skipped: Container[str] = (), everything: bool = True) -> Code:
    """Return what this process's run is made from; it takes five seconds at most.

    Args:
        directories: directories of the user's modules, whose repositories count also if nothing is imported from them.
        skipped: the names of modules to leave out.
        everything: also look at packages and repositories.
    """
    began = monotonic()
    problems: list[str] = []
    own = {path.absolute() for path in (*directories, *map(Path, user_directories()))}
    modules = _read_modules(dict(_user_modules(own, skipped)), began + _LONGEST, problems)
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if not everything:
        return Code(python, modules, problems=problems)
    packages = dict(_packages(own))
    places = sorted({Path(each.file).parent for name, each in modules.items() if name != "__main__"})
    repositories = list(_repositories([*directories, *places], began + _LONGEST, problems))
    return Code(python, modules, packages, repositories, problems)


def _user_modules(own: set[Path], skipped: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each imported module that belongs neither to Python nor to a package or emrun."""
    paths = sysconfig.get_paths()
    installed = {paths["stdlib"], paths["platstdlib"], *_directories_of_packages(own)}
    prefixes = tuple(f"{each}{os.sep}" for each in installed)
    for name, module in list(sys.modules.items()):
        try:
            space = object.__getattribute__(module, "__dict__")  # a lazy module stays as it is
            file, spec = space.get("__file__"), space.get("__spec__")
        except AttributeError:  # sys.modules may hold any object
            continue
        known = name if spec is None else str(getattr(spec, "name", name))
        if not isinstance(file, str) or name in skipped or known.partition(".")[0] == "emrun":
            continue
        is_installed = file.startswith(prefixes) or any(f"{os.sep}{each}{os.sep}" in file for each in _INSTALLED)
        if not is_installed and (name != "__main__" or file.endswith(tuple(SOURCE_SUFFIXES))):
            yield name, str(Path(file).absolute())


def _read_modules(files: dict[str, str], ends: float, problems: list[str]) -> dict[str, Module]:
    """Read the sources of modules; for a module without a source, the checksum of its file."""
    left, found = _MOST, {}
    for name, file in files.items():
        source, sha256 = None, None
        try:
            status = Path(file).stat()
            is_path = all(part and not {os.sep, "\0"} & {*part} for part in name.split("."))
            if not is_path or not stat.S_ISREG(status.st_mode):
                problems.append(f"module {name} is not a usual module")
            elif monotonic() > ends:
                problems.append(f"module {name} is left out after {_LONGEST:g} seconds")
            elif status.st_size > left:
                problems.append(f"module {name} is left out: sources of more than {size_of(_MOST)}")
            else:
                content = Path(file).read_bytes()
                left -= len(content)
                if file.endswith(tuple(SOURCE_SUFFIXES)):
                    source = content
                else:
                    sha256 = hashlib.sha256(content).hexdigest()
        except OSError as error:
            problems.append(f"module {name} cannot be read: {reason_of(error)}")
        found[name] = Module(file, source, sha256)
    return found


def _directories_of_packages(own: set[Path]) -> Iterator[str]:
    """Yield the directories of `sys.path` in which packages are installed, without the user's own directories."""
    for entry in dict.fromkeys(sys.path):
        path = Path(entry).absolute()
        if path not in own and any(each.suffix == ".dist-info" for each in _entries_of(path)):
            yield str(path)


def _packages(own: set[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of each installed package; to read all their metadata would take much longer."""
    found = set()
    for path in _directories_of_packages(own):
        for entry in _entries_of(Path(path)):
            name, _, version = entry.stem.partition("-")
            if entry.suffix in (".dist-info", ".egg-info") and version and name not in found:
                found.add(name)
                yield name, f"{version.partition('-py')[0]}{_origin(entry)}"


def _origin(metadata: Path) -> str:
    """Return where a package was installed from, as a comment, if this was not an index."""
    with suppress(OSError, ValueError, AttributeError):
        url: dict[str, Any] = json.loads((metadata / "direct_url.json").read_text(encoding="utf-8"))
        commit = url.get("vcs_info", {}).get("commit_id")
        return "  # " + " ".join(str(each).split()[0] for each in (url["url"], commit) if each)
    return ""


def _entries_of(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # not a directory, such as an archive
        return []


def _repositories(directories: Sequence[Path], ends: float, problems: list[str]) -> Iterator[Repository]:
    """Yield the repositories that the directories are in."""
    found: set[Path] = set()
    for directory in dict.fromkeys(path.absolute() for path in directories):
        if any(directory.is_relative_to(each) for each in found) or not directory.is_dir():
            continue
        git = Git(directory, max(0.1, ends - monotonic()), _MOST)
        try:
            lines = os.fsdecode(git.ask("rev-parse", "--show-toplevel", "HEAD", may_fail=True)).splitlines()
            if not lines:
                git.ask("rev-parse", "--show-toplevel")  # gives the reason
                continue
        except GitError as error:
            if any((each / ".git").exists() for each in (directory, *directory.parents)):
                problems.append(f"the git repository of {directory} is left out: {error}")
            continue
        top = git.directory = Path(lines[0])
        commit = lines[1] if len(lines) > 1 and lines[1] != "HEAD" else None
        found |= {top, directory}
        yield Repository(str(top), commit, _diff(git, commit, problems), _untracked(git, problems))


def _diff(git: Git, commit: str | None, problems: list[str]) -> bytes | None:
    if commit is None:
        return None
    settings = ["--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", f"-O{os.devnull}"]
    try:
        git.ignore_filters()
        return git.ask("diff", *settings, "--src-prefix=a/", "--dst-prefix=b/", commit, "--")
    except GitError as error:
        problems.append(f"the uncommitted changes in {git.directory} are left out: {error}")
        return None


def _untracked(git: Git, problems: list[str]) -> list[str]:
    options = ["--others", "--directory", "--no-empty-directory", "--exclude-standard", "-z"]
    try:
        names = os.fsdecode(git.ask("ls-files", *options)).split("\0")[:-1]
    except GitError as error:
        problems.append(f"the untracked files in {git.directory} are left out: {error}")
        return []
    more = [f"... and {len(names) - _MOST_UNTRACKED} more"] if len(names) > _MOST_UNTRACKED else []
    return [*names[:_MOST_UNTRACKED], *more]
