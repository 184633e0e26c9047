"""Gathers what a run is made from: the user's modules, the installed packages, the git repositories."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

import emrun
from emrun.base.arguments import expanded
from emrun.base.errors import StorageError, UsageError, reason_of
from emrun.base.user_modules import user_directories
from emrun.base.wording import few, listed
from emrun.config.plan import Plan, code_directories
from emrun.ranks.group import Exchange, ranks
from emrun.storage.code.files import FORMAT, Code, changes, module_path, patch_path, sha256_of
from emrun.storage.code.git import GitError, diff_of, head_of, is_in_repository, top_of
from emrun.storage.code.snapshot import CodeSnapshot, changed_since
from emrun.storage.files import read_regular
from emrun.storage.run import Run

_LOG = logging.getLogger(__name__)

_MOST = 5_000_000  # bytes of all sources
_INSTALLED = ("site-packages", "dist-packages")
_NAME = re.compile(r"[\w-]{1,200}(\.[\w-]{1,200})*")
_MUST_BE_SAME = ("module ", "torch ", "emrun ")

_KEPT: dict[str, bytes] = {}  # files of modules -> what they were when they were imported


def keep_sources() -> None:
    """Keep the sources of the imported modules, for the records of this process and of its forked children."""
    _, installed = _installed()
    for _, file in _user_modules(installed):
        with suppress(StorageError):
            _KEPT[file] = read_regular(Path(file).resolve(), _MOST)


def record_code(plan: Plan, run: Run) -> None:
    """Let a run record its code when the training begins."""
    directories = [Path(each).absolute() for each in code_directories(plan.config)]  # the user's code may go elsewhere
    run.code = CodeSnapshot(run.directory, lambda: gather(directories, run.directory))


def log_code_directory(plan: Plan) -> None:
    """Log which modules were imported from the config's `code_directory`, if this is not the current directory.

    A module of the same name in the current directory, which is not used, is a warning.
    """
    current = Path.cwd()
    for directory in map(Path, code_directories(plan.config)):
        names = set() if directory.resolve() == current.resolve() else _modules_in(directory.absolute())
        if not names:
            continue
        hidden = [name for name in names if (current / f"{name}.py").is_file() or any((current / name).glob("*.py"))]
        _LOG.info("imported from code_directory %s: %s", directory, listed(sorted(names)), extra={"once": True})
        if hidden:
            _LOG.warning(
                "not used: %s in the current directory, because the config has another code_directory, %s; to use the "
                "modules here, add %s",
                listed(sorted(hidden)),
                directory,
                shlex.quote(f"code_directory={current}"),
                extra={"once": True},
            )


def _modules_in(directory: Path) -> set[str]:
    """Return the top-level names of the user's modules that were imported from files in a directory."""
    tops = {(name.partition(".")[0], Path(file)) for name, file in _user_modules()}
    return {top for top, file in tops if file == directory / f"{top}.py" or directory / top in file.parents}


def check_same_code(plan: Plan, exchange: Exchange) -> None:
    """Check that this rank has imported the same modules of the user as rank 0; other packages are a warning.

    Args:
        plan: the plan, whose objects have been built.
        exchange: see `Ranks.in_step`.

    Raises:
        UsageError: a module has another source, or PyTorch or emrun another version.
    """
    if not ranks().several:
        return
    own_code = gather(code_directories(plan.config)).record
    different, _ = changes(exchange("versions of the code", own_code), own_code)
    severe = [difference for difference in different if difference.startswith(_MUST_BE_SAME)]
    if severe:
        raise UsageError(
            f"this rank has other code than rank 0: {listed(severe)} (rank 0 -> this rank); start all ranks with the "
            "same files and versions"
        )
    if different:
        _LOG.warning("this rank has other versions than rank 0: %s (rank 0 -> this rank)", listed(different))


def warn_of_changed_code(plan: Plan, run_directory: Path) -> None:
    """Log a warning if modules, or versions of packages, are not those that a run has recorded; git is not asked.

    Args:
        plan: the plan, whose classes have been imported.
        run_directory: the directory of the run.
    """
    try:
        changed, place = changed_since(run_directory, gather(code_directories(plan.config)))
    except OSError as error:
        _LOG.warning("the code is not compared with that of the run: %s", reason_of(error))
        return
    if changed:
        _LOG.warning(
            "the code is not that of the run: %s; %s has the code of the run",
            few(changed, 300),
            place,
            extra={"once": True},
        )


def gather(directories: Sequence[str | Path], run: Path | None = None) -> Code:
    """Return what the run of this process is made from.

    Args:
        directories: directories of the user's modules, whose repositories count also if nothing is imported from them.
        run: the run directory, in which changes do not count; None to leave out repositories.
    """
    packages, installed = _installed()
    user_places = {str(Path(each).absolute()) for each in (*directories, *user_directories())}
    files = {"packages.txt": "".join(f"{name}=={version}\n" for name, version in packages.items()).encode()}
    modules: dict[str, Any] = {}
    problems: list[str] = []
    left = _MOST
    for name, file in _user_modules(installed - user_places):
        modules[name] = {"file": file, "sha256": None}
        try:
            content = _KEPT[file] if file in _KEPT else read_regular(Path(file).resolve(), left)
        except StorageError as error:
            problems.append(f"module {name} is left out: {reason_of(error)}")
            continue
        left -= len(content)
        modules[name]["sha256"] = sha256_of(content)
        if file.endswith(tuple(SOURCE_SUFFIXES)):
            files[module_path(name, file)] = content
    repositories = []
    if run is not None:
        places = [*map(Path, directories), *sorted({Path(module["file"]).parent for module in modules.values()})]
        for repository, diff in _repositories(places, run, problems):
            repositories.append(repository)
            if diff:
                files[patch_path(len(repositories))] = diff
    record = {
        "format": FORMAT,
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "repositories": repositories,
        "modules": modules,
        "packages": packages,
        "problems": problems,
    }
    return Code(record, files)


def _user_modules(installed: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each imported module that belongs neither to Python nor to a package or emrun."""
    paths = sysconfig.get_paths()
    places = (paths["stdlib"], paths["platstdlib"], str(Path(emrun.__file__).parent), *installed)
    prefixes = tuple(f"{place}{os.sep}" for place in places)
    inner = tuple(f"{os.sep}{each}{os.sep}" for each in _INSTALLED)

    def is_installed(file: str) -> bool:
        return file.startswith(prefixes) or any(part in file for part in inner)

    packages: dict[str, bool] = {}  # top-level name -> whether it is installed, with all below, wherever its files are
    for name in list(sys.modules):
        top = name.partition(".")[0]
        if top not in packages:
            packages[top] = top not in sys.modules or is_installed(_file_of(sys.modules.get(top)))
        if packages[top]:
            continue
        file = _file_of(sys.modules.get(name))
        is_command = name in ("__main__", "__mp_main__") and not file.endswith(tuple(SOURCE_SUFFIXES))
        if file and not is_installed(file) and not is_command and _NAME.fullmatch(name):
            yield name, str(Path(file).absolute())


def _file_of(module: Any) -> str:
    """Return the file of a module, or ""; a lazy module stays as it is, and `sys.modules` may hold any object."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return file if isinstance(file, str) else ""


def _installed() -> tuple[dict[str, str], set[str]]:
    """Return name -> version of the installed packages, and the directories that they are in.

    The names of their metadata have both; to read the metadata takes ten times as long.
    """
    packages: dict[str, str] = {}
    places = set()
    for place in dict.fromkeys(Path(entry).absolute() for entry in sys.path):
        for path in sorted(place.glob("*.dist-info")):
            name, _, version = path.stem.partition("-")
            packages.setdefault(name, version)
            places.add(str(place))
    return packages, places


def _repositories(
    directories: Sequence[Path], run: Path, problems: list[str]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the repositories that directories are in: what the record has of them, and the changes as a patch."""
    known: set[Path] = set()
    places = dict.fromkeys(path.resolve() for path in directories)
    for directory in places:
        try:
            if any(directory.is_relative_to(place) for place in known) or not is_in_repository(directory):
                continue
            top = top_of(directory)
        except (GitError, OSError) as error:
            problems.append(f"the git repository of {directory} is left out: {error}")
            known.add(directory)
            continue
        known.add(top)
        commit = head_of(top)
        diff = b""
        if commit is not None:
            try:
                diff = diff_of(top, commit, _paths_that_count(top, places, run))
            except GitError as error:
                problems.append(f"the uncommitted changes in {top} are left out: {error}")
        yield {"directory": str(top), "commit": commit, "sha256": sha256_of(diff) if diff else None}, diff


def _paths_that_count(top: Path, places: Iterable[Path], run: Path) -> list[str]:
    """Return patterns for git: all but the run directory; in the home directory, which has settings, only the code."""
    patterns = []
    if top == expanded("~").resolve():
        patterns += [f":(literal){each.relative_to(top)}" for each in places if each.is_relative_to(top)]
    if run.resolve().is_relative_to(top):
        patterns.append(f":(exclude,literal){run.resolve().relative_to(top)}")
    return patterns
