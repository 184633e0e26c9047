"""Gathers what a run is made from: the user's modules, the installed packages, the git repositories."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

import emrun
from emrun.base.arguments import expanded
from emrun.base.errors import StorageError, UsageError, reason_of
from emrun.base.user_modules import user_directories
from emrun.base.wording import few, listed
from emrun.config.plan import Plan, code_directories
from emrun.ranks.group import ranks
from emrun.storage.code.files import FORMAT, Code, changes, module_path, patch_path, sha256_of
from emrun.storage.code.git import GitError, diff_of, head_of, is_in_repository, top_of
from emrun.storage.code.record import CodeRecord, changed_since
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
    """Let a run record its code when the training begins.

    Packages and repositories are looked at before, while the objects are built, and not during the first steps.
    """
    directories = [Path(each).absolute() for each in code_directories(plan.config)]  # the user's code may go elsewhere
    gathering = _Gathering(directories)
    run.code = CodeRecord(run.directory, gathering.code)
    run.code.later(lambda: gathering.look(run.directory))


def log_code_directory(plan: Plan) -> None:
    """Log which modules were imported from the config's `code_directory`, if this is not the current directory.

    A module of the same name in the current directory, which is not used, is a warning.
    """
    here = Path.cwd()
    for directory in map(Path, code_directories(plan.config)):
        names = set() if directory.resolve() == here.resolve() else _modules_in(directory.absolute())
        if not names:
            continue
        hidden = [name for name in names if (here / f"{name}.py").is_file() or any((here / name).glob("*.py"))]
        _LOG.info("imported from code_directory %s: %s", directory, listed(sorted(names)), extra={"once": True})
        if hidden:
            _LOG.warning(
                "not used: %s in the current directory, because the config has another code_directory, %s; to use the "
                "modules here, add %s",
                listed(sorted(hidden)),
                directory,
                shlex.quote(f"code_directory={here}"),
                extra={"once": True},
            )


def _modules_in(directory: Path) -> set[str]:
    """Return the top-level names of the user's modules that were imported from files in a directory."""
    tops = {(name.partition(".")[0], Path(file)) for name, file in _user_modules()}
    return {top for top, file in tops if file == directory / f"{top}.py" or directory / top in file.parents}


def check_same_code(plan: Plan, tell: Callable[[Any], Any]) -> None:
    """Check that this rank has imported the same modules of the user as rank 0; other packages are a warning.

    Args:
        plan: the plan, whose objects have been built.
        tell: see `Ranks.in_step`.

    Raises:
        UsageError: a module has another source, or PyTorch or emrun another version.
    """
    if not ranks().several:
        return
    own = _imported_code(plan).record
    different, _ = changes(tell(own), own)
    severe = [each for each in different if each.startswith(_MUST_BE_SAME)]
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
        changed, place = changed_since(run_directory, _imported_code(plan))
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


def _imported_code(plan: Plan) -> Code:
    """Return the imported modules of the user and the installed packages, without repositories."""
    gathering = _Gathering(code_directories(plan.config))
    gathering.look()
    return gathering.code()


class _Gathering:
    """Gathers what the run of this process is made from: first `look`, then `code`.

    Args:
        directories: directories of the user's modules, whose repositories count also if nothing is imported from them.
    """

    def __init__(self, directories: Sequence[str | Path]) -> None:
        self._directories = [Path(each).absolute() for each in directories]
        self._repositories: list[tuple[dict[str, Any], bytes | None]] = []
        self._problems: list[str] = []

    def look(self, run: Path | None = None) -> None:
        """Look at the installed packages.

        Args:
            run: the run directory, to look at repositories, too; changes in it do not count.
        """
        self._packages, installed = _installed()
        self._installed = installed.difference(map(str, self._directories), user_directories())
        if run is not None:
            imported_from = sorted({Path(file).parent for _, file in _user_modules(self._installed)})
            self._repositories += _repositories([*self._directories, *imported_from], run, self._problems)

    def code(self) -> Code:
        """Return what was found, with the modules of the user that are imported now."""
        requirements = "".join(f"{name}=={version}\n" for name, version in self._packages.items())
        files = {"packages.txt": requirements.encode()}
        files.update((patch_path(number), diff) for number, (_, diff) in enumerate(self._repositories, 1) if diff)
        modules: dict[str, Any] = {}
        problems = [*self._problems]
        left = _MOST
        for name, file in _user_modules(self._installed):
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
        record = {
            "format": FORMAT,
            "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
            "repositories": [each for each, _ in self._repositories],
            "modules": modules,
            "packages": self._packages,
            "problems": problems,
        }
        return Code(record, files)


def _user_modules(installed: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each imported module that belongs neither to Python nor to a package or emrun."""
    paths = sysconfig.get_paths()
    places = (paths["stdlib"], paths["platstdlib"], str(Path(emrun.__file__).parent), *installed)
    prefixes = tuple(f"{each}{os.sep}" for each in places)
    inner = tuple(f"{os.sep}{each}{os.sep}" for each in _INSTALLED)
    imported = dict(sys.modules)
    for name, module in imported.items():
        top = name.partition(".")[0]
        file = _file_of(module)
        owner = _file_of(imported.get(top)) or file  # a namespace has no file; torch.compile makes modules elsewhere
        is_of_user = not any(each.startswith(prefixes) or any(part in each for part in inner) for each in (file, owner))
        is_command = name in ("__main__", "__mp_main__") and not file.endswith(tuple(SOURCE_SUFFIXES))
        if file and is_of_user and not is_command and top in imported and _NAME.fullmatch(name):
            yield name, str(Path(file).absolute())


def _file_of(module: Any) -> str:
    """Return the file of a module, or ""; a lazy module stays as it is, and `sys.modules` may hold any object."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return file if isinstance(file, str) else ""


def _installed() -> tuple[dict[str, str], set[str]]:
    """Return name -> version of the installed packages, and the directories that they are in."""
    packages: dict[str, str] = {}
    places = set()
    for each in metadata.distributions():
        with suppress(OSError, ValueError, KeyError):  # broken ones are left out
            text = each.read_text("METADATA")
            if text is not None:  # not a project of the user, which has an egg-info
                places.add(str(each.locate_file("")))
            header = (text or each.read_text("PKG-INFO") or "").partition("\n\n")[
                0
            ]  # `version` parses ten times as long
            fields = dict(line.partition(": ")[::2] for line in header.splitlines())
            packages.setdefault(fields["Name"], fields["Version"])
    return {name: packages[name] for name in sorted(packages, key=str.lower)}, places


def _repositories(
    directories: Sequence[Path], run: Path, problems: list[str]
) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """Yield the repositories that directories are in: what the record has of them, and the changes as a patch."""
    found: set[Path] = set()
    places = dict.fromkeys(path.resolve() for path in directories)
    for directory in places:
        try:
            if any(directory.is_relative_to(each) for each in found) or not is_in_repository(directory):
                continue
            top = top_of(directory)
        except (GitError, OSError) as error:
            problems.append(f"the git repository of {directory} is left out: {error}")
            found.add(directory)
            continue
        found.add(top)
        commit = head_of(top)
        diff = None
        if commit is not None:
            try:
                diff = diff_of(top, commit, _paths_that_count(top, places, run))
            except GitError as error:
                problems.append(f"the uncommitted changes in {top} are left out: {error}")
        sha256 = None if diff is None else sha256_of(diff)
        yield {"directory": str(top), "commit": commit, "sha256": sha256}, diff


def _paths_that_count(top: Path, places: Iterable[Path], run: Path) -> list[str]:
    """Return patterns for git: all but the run directory; in the home directory, which has settings, only the code."""
    found = []
    if top == expanded("~").resolve():
        found += [f":(literal){each.relative_to(top)}" for each in places if each.is_relative_to(top)]
    if run.resolve().is_relative_to(top):
        found.append(f":(exclude,literal){run.resolve().relative_to(top)}")
    return found
