"""Archives: one zip file that holds a run, and the run that is unpacked from it.

All members are stored, not compressed, and `archive.json`, the last one, has the checksum of each. The same run gives
the same bytes. A name that no run has cannot be a member, so that nothing is unpacked elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import emrun
from emrun.base.errors import Position, StorageError, UsageError, reason_of
from emrun.base.fields import SHA256, TEXT, FieldError, Kind, choice, mapping_of, record, sequence_of, whole
from emrun.base.types import Json
from emrun.base.wording import from_here, in_one_line, listed, progress
from emrun.config.config import read_config
from emrun.config.interpolation import escaped
from emrun.config.plan import code_directories
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of, parse
from emrun.exports.formats import Export, Options
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.finding import DEFAULTS, find, newest
from emrun.storage.checkpoints.manifest import FILE, NAME, STATE, Contents, is_directory_name, verify
from emrun.storage.code.files import RECORD, read_code, recorded_files
from emrun.storage.code.snapshot import code_snapshots
from emrun.storage.files import flush_directory, flush_file, make_directory, opened_regular, storing, written_aside
from emrun.storage.lock import EVALUATIONS
from emrun.storage.plain import plain_of, write_with_plain
from emrun.storage.run import CHECKPOINTS, CONFIG, METRICS, check_outside, check_readable_name
from emrun.storage.sealed import json_digest
from emrun.storage.trace import TRACE

ARCHIVE = "archive.json"
FORMAT = 1
_LARGEST = 64_000_000  # bytes of `archive.json`
_CHUNK = 2**20
_TIME = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can have
_OF_RUN = ("metrics.jsonl", "steps.jsonl", "rows.jsonl", "classes.json", "preparation.json")
_NAMES = re.compile(
    r"config(-\d+)?\.yaml|trace\.yaml|(metrics|steps|rows)\.jsonl|(classes|preparation)\.json"
    r"|code(-\d+)?/(record\.json|packages\.txt|batches\.jsonl|diff(-\d+)?\.patch|modules/([\w-]+/)*[\w-]+\.py)"
    r"|checkpoints/it-\d{8,}(-\d+)?/[^./\\:\x00-\x1f][^/\\:\x00-\x1f]*"
    r"|eval/[\w-][\w.-]*-\d+/(config\.yaml|trace\.yaml|metrics\.jsonl)"
)
_MODULES = re.compile(r"code(-\d+)?/modules")
_CHECKPOINT = {
    "directory": Kind("the name of a directory such as 'it-00000120'", is_directory_name),
    "names": sequence_of(NAME),
    "epoch": whole(),
    "iteration": whole(),
}
_CONTENT = record(
    {
        "format": choice(FORMAT),
        "run": TEXT,
        "checkpoint": record(_CHECKPOINT),
        "files": mapping_of(record({"sha256": SHA256, "size": whole()})),
    }
)


def write_archive(options: Options) -> Export:
    """Write a run to a zip file: config, code, preparation, record, and one checkpoint, by default the newest.

    Left out are data, the log, failures, files of hooks, and paths of this machine where emrun has written them.

    Raises:
        UsageError: the run is being trained, has no checkpoint, or cannot be archived for another reason.
        StorageError: a file of the run cannot be read, or the archive cannot be written.
    """
    directory = options.directory
    run = StoredRun(directory)
    if options.overrides:
        raise UsageError(f"{options.overrides[0]}: an archive has the config of the run; leave out overrides")
    if options.place.suffix != ".zip":
        raise UsageError(f"{from_here(options.place)}: the name of an archive ends in .zip")
    _check_complete(run)

    # the checkpoint
    root = directory / CHECKPOINTS
    place = newest(root) if options.checkpoint_name is None else find(root, options.checkpoint_name)
    if place is None:
        raise UsageError(f"{from_here(directory)} has no checkpoint, without which an archive cannot be resumed")
    manifest = verify(place)
    links = Contents.of(root).links
    names = sorted(name for name, target in links.items() if target == place.name)
    checkpoint = {
        "directory": place.name,
        "names": sorted({*names, DEFAULTS[-1]}),  # the newest one that the run in the archive has
        "epoch": manifest.epoch,
        "iteration": manifest.iteration,
    }

    # the files
    members: dict[str, bytes | Path] = {
        f"{CHECKPOINTS}/{place.name}/{name}": place / name for name in (FILE, *manifest.files)
    }
    members.update(_members(run))
    _check_names(members)
    content: Json = {"format": FORMAT, "emrun": emrun.__version__, "run": directory.name, "checkpoint": checkpoint}
    with storing(options.place, "write"), written_aside(options.place) as aside:
        with zipfile.ZipFile(aside, "x") as archive:
            content["files"] = {name: _add(archive, name, source) for name, source in sorted(members.items())}
            _add(archive, ARCHIVE, json.dumps({**content, "sha256": json_digest(content)}, indent=1).encode())
        flush_file(aside)
        _check_complete(StoredRun(directory))

    # what is inside
    lines = [f"checkpoint {place.name} ({listed(names)}): {progress(manifest.epoch, manifest.iteration)}"]
    if "best" in links and "best" not in names:
        lines.append(f"the checkpoint best, {links['best']}, is not inside; to archive it instead: --checkpoint best")
    if STATE not in manifest.files:
        lines.append(f"the checkpoint has no {STATE}, so that the run can be evaluated, but not resumed")
    lines.append(f"unpack it with: emrun init DIR --from {from_here(options.place)}; the data are not inside")
    return Export(options.place, (), {"checkpoint": checkpoint, "members": [*content["files"]]}, lines)


def _check_complete(run: StoredRun) -> None:
    """Check that no process writes a run, and that its parts fit each other."""
    shown = from_here(run.directory)
    if run.status in ("running", "damaged"):
        why = "is being trained; interrupt it, or wait for its end" if run.status == "running" else "has lost its trace"
        raise UsageError(f"{shown} {why}: an archive is made of a run that nobody writes")
    if plain_of(run.directory / CONFIG, None) and plain_of(run.directory / CONFIG, run.config_text) is None:
        raise UsageError(
            f"{shown / CONFIG} was changed by hand since the run wrote it; undo that, or resume the run with the change"
        )


def _members(run: StoredRun) -> Iterator[tuple[str, bytes | Path]]:
    """Yield the names and the content of the members, or their files, besides those of the checkpoint."""
    directory = run.directory
    config = read_config(directory)
    places = {directory, Path.home(), Path(sys.prefix), *map(Path, code_directories(config.root))}
    snapshots = [path.name for _, path in code_snapshots(directory)] or ["code"]

    # the config, with the place of the code in the archive, and the record
    for path in filter(lambda path: _NAMES.fullmatch(path.name), sorted(directory.glob("config*.yaml"))):
        code = snapshots[-1] if path.name == CONFIG else snapshots[0]
        yield path.name, _with_code(path, f"{code}/modules").encode()
    yield TRACE, _trace(run, places)
    for name in _OF_RUN:
        if os.path.lexists(directory / name):
            yield name, directory / name

    # the code
    for snapshot in snapshots:
        content = read_code(directory / snapshot)
        for part in recorded_files(directory / snapshot) if content is not None else ():
            name = f"{snapshot}/{part}"
            if str(part) == RECORD:
                yield name, json.dumps(_without(places, content), indent=1).encode()
            elif os.path.lexists(directory / name):
                yield name, directory / name

    # the evaluations, which tell how often a stream was looked at
    for folder in sorted((directory / EVALUATIONS).glob("*")):
        evaluation = StoredRun(folder)
        if evaluation.is_evaluation:
            name = f"{EVALUATIONS}/{folder.name}"
            yield f"{name}/{CONFIG}", _with_code(folder / CONFIG, f"{snapshots[-1]}/modules").encode()
            yield f"{name}/{TRACE}", _trace(evaluation, places)
            if os.path.lexists(folder / METRICS):
                yield f"{name}/{METRICS}", folder / METRICS


def _with_code(path: Path, code: str) -> str:
    """Return the text of a config with another `code_directory`, and with its comments where that is possible."""
    config = read_config(path).overridden([f"code_directory={json.dumps(escaped(code))}"])
    return dump(config.root, re.sub(r"(?m)^code_directory:.*\n?", "", config.text or ""))


def _trace(run: StoredRun, places: Iterable[Path]) -> bytes:
    kept = {name: value for name, value in run.trace.items() if name not in ("host", "pid")}
    return dump(node_of(_without(places, kept), Position(TRACE))).encode()


def _without(places: Iterable[Path], tree: Any) -> Any:
    """Return a tree in whose texts paths begin in one of these places, and do not name it."""
    if isinstance(tree, Mapping):
        return {key: _without(places, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without(places, value) for value in tree]
    if not isinstance(tree, str):
        return tree
    named = sorted((str(place) for place in places if len(place.parts) > 1), key=len, reverse=True)
    within = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, named))})(/|(?![\w.-]))"
    return re.sub(within, lambda match: "" if match[1] else ".", tree)


def _add(archive: zipfile.ZipFile, name: str, source: bytes | Path) -> Json:
    """Add a member to an archive; return its checksum and size."""
    info = zipfile.ZipInfo(name, _TIME)
    info.create_system = 3  # Unix, also where the archive is made on another system
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    if isinstance(source, bytes):
        info.file_size = len(source)
        with archive.open(info, "w") as member:
            member.write(source)
        return {"sha256": hashlib.sha256(source).hexdigest(), "size": len(source)}
    with opened_regular(source, name.count("/") + 1) as file:
        info.file_size = os.fstat(file.fileno()).st_size  # a large one needs another form of the entry
        with archive.open(info, "w") as member:
            return _copy(file, member)


def _copy(source: Any, target: Any) -> Json:
    """Copy a file; return its checksum and size."""
    digest = hashlib.sha256()
    size = 0
    while chunk := source.read(_CHUNK):
        target.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return {"sha256": digest.hexdigest(), "size": size}


def _check_names(names: Iterable[str]) -> None:
    """Check that names are those of a run, and stay different on systems where case does not count."""
    known: dict[str, str] = {}
    for name in names:
        if not _NAMES.fullmatch(name):
            raise UsageError(f"{in_one_line(repr(name))} is not the name of a file that a run has")
        other = known.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise UsageError(f"the names {other!r} and {name!r} differ only in case")


def unpack(file: Path, target: Path) -> Json:
    """Unpack an archive into a new or empty directory, which then holds the run; return what `archive.json` says.

    Everything is checked first, then written to a directory aside, and renamed at the end.

    Raises:
        UsageError: it is not an archive that this version of emrun has written, it is damaged, or the directory is not
            empty or lies in a run.
        StorageError: the archive cannot be read, or the disk is full or cannot be written.
    """
    check_outside(target)
    check_readable_name(target)
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is not an empty directory; name a new or an empty one")
    try:
        with storing(file, "read"), file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            content = _checked(archive, opened)
            _extract(archive, content, target)
            return content
    except UsageError as error:
        raise UsageError(f"{file} cannot be unpacked: {error}") from error
    except (zipfile.BadZipFile, EOFError, ValueError, RecursionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{file} is not an archive of a run, or is damaged: {reason_of(error)}") from error


def _checked(archive: zipfile.ZipFile, opened: BinaryIO) -> Json:
    """Return the content of `archive.json` of an archive whose members it lists, and which are safe to unpack."""
    # the members
    members = {member.filename: member for member in archive.infolist()}
    for member in archive.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        is_stored = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        if not is_stored or member.flag_bits & 1 or kind not in (0, stat.S_IFREG):
            raise UsageError(f"{in_one_line(repr(member.filename))} is not a file that is stored as it is")
    if len(members) != len(archive.infolist()):
        raise UsageError("a name is there twice")
    if min((member.header_offset for member in members.values()), default=-1) != 0:
        raise UsageError("the file does not begin with a member")
    _check_names(members.keys() - {ARCHIVE})
    if sum(member.file_size for member in members.values()) > os.fstat(opened.fileno()).st_size:
        raise UsageError("its members are larger than the file")

    # what it says of them
    if ARCHIVE not in members or members[ARCHIVE].file_size > _LARGEST:
        raise UsageError(f"it has no {ARCHIVE}, as emrun export --to archive writes it")
    content: Any = json.loads(archive.read(ARCHIVE))
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is int and version > FORMAT:
        raise UsageError(f"format {version} of {ARCHIVE} is newer than this emrun supports ({FORMAT}); update emrun")
    digest = content.pop("sha256", None) if isinstance(content, dict) else None
    if digest != json_digest(content):
        raise UsageError(f"{ARCHIVE} is damaged")
    try:
        _CONTENT.check(content)
    except FieldError as error:
        raise UsageError(f"{ARCHIVE}: {error}") from error
    sizes = {name: member.file_size for name, member in members.items() if name != ARCHIVE}
    needed = {CONFIG, TRACE, f"{CHECKPOINTS}/{content['checkpoint']['directory']}/{FILE}"}
    if sizes != {name: entry["size"] for name, entry in content["files"].items()} or not needed <= sizes.keys():
        raise UsageError(f"its members are not those that {ARCHIVE} lists")
    return dict(content)


def _extract(archive: zipfile.ZipFile, content: Json, target: Path) -> None:
    """Write the members of an archive to a directory, with the links of the checkpoint and the place of the code."""
    home = next(parent for parent in target.parents if parent.is_dir())
    size = sum(entry["size"] for entry in content["files"].values())
    aside = home / f".{target.name}.{secrets.token_hex(8)}.tmp"
    with storing(target, "write"), written_aside(target, aside):
        if size > shutil.disk_usage(home).free:
            raise StorageError(errno.ENOSPC, f"cannot write {target}: the disk is full")
        for name, entry in content["files"].items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as member, (aside / name).open("xb") as file:
                if _copy(member, file) != entry:
                    raise UsageError(f"{name} differs from its checksum")
                file.flush()
                os.fsync(file.fileno())
        for name in content["checkpoint"]["names"]:
            (aside / CHECKPOINTS / name).symlink_to(content["checkpoint"]["directory"])
        for path in aside.glob("config*.yaml"):
            code = str(read_config(path).root.plain().get("code_directory"))
            is_there = _MODULES.fullmatch(code) and (aside / code).is_dir()
            text = _with_code(path, str(target / code if is_there else target))
            write_with_plain(path, text, parse(text, path.name).plain())
        for folder, _, _ in os.walk(aside):
            flush_directory(Path(folder))
        make_directory(target.parent, exist_ok=True)
