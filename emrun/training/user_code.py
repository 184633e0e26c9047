"""Gathers what a run is made from: the user's modules, the installed packages, the git repositories."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from emrun.base.arguments import expanded
from emrun.base.censor import Censor
from emrun.base.errors import UsageError, reason_of
from emrun.base.user_modules import user_directories
from emrun.base.wording import listed, size_of
from emrun.config.plan import Plan, code_directories
from emrun.ranks.group import ranks
from emrun.storage.code.files import Code, Module, Repository, changes
from emrun.storage.code.git import Git, GitError, is_in_repository
from emrun.storage.code.record import CodeRecord, changed_since
from emrun.storage.run import Run

_LOG = logging.getLogger(__name__)

_LONGEST = 5.0  # seconds
_MOST = 5_000_000  # bytes of all sources, of a patch, and of a list of files
_MOST_UNTRACKED = 1000  # names
_METADATA = (".dist-info", ".egg-info")
_INSTALLED = ("site-packages", "dist-packages")
_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", "--ignore-submodules=dirty",
         f"-O{os.devnull}", "--src-prefix=a/", "--dst-prefix=b/")  # fmt: skip
_MUST_BE_SAME = ("module ", "torch ", "emrun ")
_UNTRACKED = ("--others", "--directory", "--no-empty-directory", "--exclude-standard", "-z")


_KEPT: dict[str, tuple[os.stat_result, bytes]] = {}  # files of modules -> what they were when they were imported


def keep_sources() -> None:
    """Keep the sources of the imported modules, for the records of this process and of its forked children."""
    for _, file in _user_modules(dict(sys.modules), _installed(_own(()))):
        with suppress(OSError):
            status = Path(file).stat()
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST:
                _KEPT[file] = status, Path(file).read_bytes()


def record_code(plan: Plan, run: Run) -> None:
    """Let a run record its code when the training begins; most is gathered while the objects of the training are built.

    Asking git stops all threads for milliseconds, which would be those of the first steps.
    """
    directories = [Path(each).absolute() for each in code_directories(plan.config)]
    early = _Early(directories, run.directory)
    early.start()

    def gathered(modules: Mapping[str, Any], everything: bool) -> Code:
        return early.completed(modules) if everything else early.sources(modules)

    run.code = CodeRecord(run.directory, run.censor, gathered, early.has_ended)


class _Early(Thread):
    """Gathers in a thread what is imported already; see `gather`."""

    def __init__(self, code: Sequence[Path], run: Path) -> None:
        super().__init__(name="emrun-code-early", daemon=True)
        self._places = code, run
        self._imported = dict(sys.modules)
        self._code: Code | None = None

    def run(self) -> None:
        """Gather."""
        with suppress(Exception):  # it happens, and is logged, again in `completed`
            self._code = gather(*self._places, self._imported)

    def has_ended(self, seconds: float) -> bool:
        """Wait for some seconds at most, and tell whether the thread has ended."""
        self.join(seconds)
        return not self.is_alive()

    def sources(self, modules: Mapping[str, Any]) -> Code:
        """Return the user's modules of these only."""
        problems: list[str] = []
        files = dict(_user_modules(modules, ()))  # most often none, and then to look for packages is left out
        files = dict(_user_modules(modules, _installed(_own(self._places[0])))) if files else files
        return Code("", _read_modules(files, monotonic() + _LONGEST, problems), problems=problems)

    def completed(self, modules: Mapping[str, Any]) -> Code:
        """Return what these modules are made from; all is gathered again if modules of the user were imported since."""
        self.join(_LONGEST)
        code, self._code = self._code, None
        late = {name: each for name, each in modules.items() if name not in self._imported}
        return gather(*self._places, modules) if code is None or self.sources(late).modules else code


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
    tops = {(name.partition(".")[0], Path(file)) for name, file in _user_modules(dict(sys.modules), ())}
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
    own = gather(code_directories(plan.config), Path(), with_repositories=False).record()
    different, _ = changes(tell(own), own)
    severe = [each for each in different if each.startswith(_MUST_BE_SAME)]
    if severe:
        raise UsageError(
            f"this rank has other code than rank 0: {listed(severe)} (rank 0 -> this rank); start all ranks with the "
            "same files and versions"
        )
    if different:
        _LOG.warning("this rank has other versions than rank 0: %s (rank 0 -> this rank)", listed(different))


def warn_of_changed_code(plan: Plan, run_directory: Path, censor: Censor) -> None:
    """Log a warning if modules, or versions of packages, are not those that a run has recorded; git is not asked.

    Args:
        plan: the plan, whose classes have been imported.
        run_directory: the directory of the run.
        censor: removes values of the environment, as for the record.
    """
    try:
        now = gather(code_directories(plan.config), run_directory, with_repositories=False).censored(censor)
        changed, place = changed_since(run_directory, now)
    except OSError as error:
        _LOG.warning("the code is not compared with that of the run: %s", reason_of(error))
        return
    if changed:
        _LOG.warning(
            "the code is not that of the run: %s; %s has the code of the run",
            listed(changed),
            place,
            extra={"once": True},
        )


def _own(directories: Sequence[Path]) -> set[str]:
    return {str(Path(each).absolute()) for each in [*directories, *map(Path, user_directories())]}


def gather(
    code: Sequence[str | Path],
    run: Path,
    modules: Mapping[str, Any] | None = None,
    *,
    with_repositories: bool = True,
) -> Code:
    """Return what this process's run is made from; it takes five seconds at most.

    Args:
        code: directories of the user's modules, whose repositories count also if nothing is imported from them.
        run: the run directory; changes in it do not count.
        modules: name -> module; by default all that are imported.
        with_repositories: also look at repositories.
    """
    ends, directories = monotonic() + _LONGEST, list(map(Path, code))
    problems: list[str] = []
    installed = _installed(_own(directories))
    imported = dict(sys.modules) if modules is None else modules
    sources = _read_modules(dict(_user_modules(imported, installed)), ends, problems)
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    places = [*directories, *sorted({Path(each.file).parent for each in sources.values()})]
    packages = _packages(installed)
    with ThreadPoolExecutor(1) as pool:
        repositories = list(_repositories(places, run, ends, problems, pool)) if with_repositories else []
    return Code(python, sources, packages, repositories, problems)


def _user_modules(modules: Mapping[str, Any], installed: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each module that belongs neither to Python nor to a package or emrun."""
    paths = sysconfig.get_paths()
    prefixes = tuple(f"{each}{os.sep}" for each in (paths["stdlib"], paths["platstdlib"], *installed))
    inner = tuple(f"{os.sep}{each}{os.sep}" for each in _INSTALLED)

    def is_of_user(file: Any) -> bool:
        return isinstance(file, str) and not (file.startswith(prefixes) or any(each in file for each in inner))

    for name, module in modules.items():
        file: Any = _attributes(module).get("__file__")
        if not is_of_user(file) or name == "__mp_main__":  # another name of `__main__`
            continue
        spec = _attributes(module).get("__spec__")
        top = (name if spec is None else str(getattr(spec, "name", name))).partition(".")[0]
        owner = file if spec else _attributes(sys.modules.get(top)).get("__file__")  # torch.compile has no spec
        is_command = name == "__main__" and not file.endswith(tuple(SOURCE_SUFFIXES))
        is_made = "." in name and top not in sys.modules  # a kernel that torch.compile has built
        if top != "emrun" and not is_command and not is_made and is_of_user(owner or file):
            yield name, str(Path(file).absolute())


def _attributes(module: Any) -> dict[str, Any]:
    """Return the attributes of a module; a lazy module stays as it is, and `sys.modules` may hold any object."""
    try:
        space: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        space = {}
    return space


def _read_modules(files: dict[str, str], ends: float, problems: list[str]) -> dict[str, Module]:
    """Read the sources of modules; for a module without a source, the checksum of its file."""
    left, found = _MOST, {}
    for name, file in files.items():
        found[name] = Module(file, None)
        try:
            kept = _KEPT.get(file)
            status = Path(file).stat() if kept is None else kept[0]
            is_usual = not set(name) & {os.sep, "\0"} and all(
                0 < len(part) < 252 for part in os.fsencode(name).split(b".")
            )
            if not is_usual or not stat.S_ISREG(status.st_mode):
                problems.append(f"module {name} is not a usual module")
            elif monotonic() > ends:
                problems.append(f"module {name} is left out after {_LONGEST:g} seconds")
            elif status.st_size > left:
                problems.append(f"module {name} is left out: sources of more than {size_of(_MOST)}")
            else:
                content = Path(file).read_bytes() if kept is None else kept[1]
                left -= len(content)
                is_source = file.endswith(tuple(SOURCE_SUFFIXES))
                sha256 = None if is_source else hashlib.sha256(content).hexdigest()
                found[name] = Module(file, content if is_source else None, sha256)
        except OSError as error:
            problems.append(f"module {name} cannot be read: {reason_of(error)}")
    return found


def _installed(own: set[str]) -> dict[str, list[str]]:
    """Return directories of `sys.path` -> the metadata of the packages in them, without the user's own directories."""
    found = {}
    for path in dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path):
        with suppress(OSError):  # not a directory, such as an archive
            entries = [] if path in own else os.listdir(path)  # noqa: PTH208 - thousands, of which names are enough
            names = [each for each in entries if each.endswith(_METADATA)]
            if any(each.endswith(_METADATA[0]) for each in names):
                found[path] = names
    return found


def _packages(installed: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return name -> version of the installed packages; to read all their metadata would take much longer."""
    found: dict[str, str] = {}
    for path, entries in installed.items():
        for entry in entries:
            name, _, version = entry.rpartition(".")[0].partition("-")
            if version and name not in found:
                found[name] = f"{version.partition('-py')[0]}{_origin(f'{path}/{entry}/direct_url.json')}"
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _origin(file: str) -> str:
    """Return where a package was installed from, as a comment, if this was not an index; without a password.

    Args:
        file: the path of its `direct_url.json`, which most packages do not have.
    """
    if not os.path.exists(file):  # noqa: PTH110 - hundreds, for which a path takes ten times as long
        return ""
    with suppress(OSError, ValueError, AttributeError, LookupError):
        url: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
        commit = url.get("vcs_info", {}).get("commit_id")
        place = re.sub(r"(?<=//)[^/]*@", "", str(url["url"]).partition("?")[0])
        return "  # " + " ".join(str(each).split()[0] for each in (place, commit) if each)
    return ""


def _repositories(
    directories: Sequence[Path], run: Path, ends: float, problems: list[str], pool: Executor
) -> Iterator[Repository]:
    """Yield the repositories that the directories are in; git is asked two questions at a time."""
    found: set[Path] = set()
    places = dict.fromkeys(path.resolve() for path in directories)
    for directory in places:
        if any(directory.is_relative_to(each) for each in found):
            continue
        git = Git(directory, max(0.1, ends - monotonic()), _MOST)
        try:
            if not is_in_repository(directory):
                continue
            filters = pool.submit(git.ignore_filters)
            answer = os.fsdecode(git.ask("rev-parse", "--show-toplevel", "--revs-only", "HEAD"))
            found_there = re.fullmatch(r"(/.*?)\n(?:([0-9a-f]{40,})\n)?", answer, re.DOTALL)
            if found_there is None:
                raise GitError(f"git gives {answer[:100]!r} for its directory and commit")
            git.directory, commit = Path(found_there[1]), found_there[2]
        except (GitError, OSError) as error:
            problems.append(f"the git repository of {directory} is left out: {error}")
            found.add(directory)
            continue
        found.add(git.directory)
        inner = [each.relative_to(git.directory) for each in places if each.is_relative_to(git.directory)]
        is_home = git.directory == expanded("~").resolve()  # has settings, which are not part of the run
        wanted = [f":(literal){each}" for each in inner] if is_home else []
        is_inside = run.resolve().is_relative_to(git.directory)
        others = [f":(exclude,literal){run.resolve().relative_to(git.directory)}"] if is_inside else []
        ask = partial(_answer, git, problems, filters)
        names = pool.submit(ask, "ls-files", *_UNTRACKED, "--", *wanted)
        diff = ask("diff", *_DIFF, commit, "--", *wanted, *others) if commit else None
        untracked = os.fsdecode(names.result() or b"").split("\0")[:-1]
        more = [f"... and {len(untracked) - _MOST_UNTRACKED} more"] if len(untracked) > _MOST_UNTRACKED else []
        yield Repository(str(git.directory), commit, diff, [*untracked[:_MOST_UNTRACKED], *more])


def _answer(git: Git, problems: list[str], filters: Future[None], *question: str) -> bytes | None:
    try:
        if question[0] == "diff":
            filters.result()
        return git.ask(*question)
    except GitError as error:
        what = {"diff": "uncommitted changes", "ls-files": "untracked files"}[question[0]]
        problems.append(f"the {what} in {git.directory} are left out: {error}")
        return None
