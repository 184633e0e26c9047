"""Archives: one zip file that holds a run, and the run that is unpacked from it.

All members are stored, not compressed, and `archive.json`, the last one, has the checksum of each. The same run gives
the same bytes. A name that no run has cannot be a member, so that nothing is unpacked elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import emrun
from emrun.base.errors import StorageError, UsageError, reason_of
from emrun.base.types import Json
from emrun.base.wording import from_here, in_one_line, listed, progress
from emrun.config.config import read_config
from emrun.config.interpolation import escaped
from emrun.config.plan import code_directories
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import parse
from emrun.exports.formats import Export, Options
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.finding import DEFAULTS, find, newest
from emrun.storage.checkpoints.manifest import FILE, NAME, Contents, verify
from emrun.storage.code.snapshot import code_snapshots
from emrun.storage.files import flush_file, make_directory, opened_regular, storing, written_aside
from emrun.storage.plain import plain_of, write_with_plain
from emrun.storage.run import CHECKPOINTS, CONFIG, check_outside, check_readable_name
from emrun.storage.sealed import json_digest
from emrun.storage.trace import TRACE

ARCHIVE = "archive.json"
FORMAT = 1
_TIME = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can have
_NAMES = re.compile(
    r"config(-\d+)?\.yaml|trace\.yaml|(metrics|steps|rows)\.jsonl|(classes|preparation)\.json"
    r"|code(-\d+)?/(record\.json|packages\.txt|batches\.jsonl|diff(-\d+)?\.patch|modules/([\w-]+/)*[\w-]+\.py)"
    r"|checkpoints/it-\d{8,}(-\d+)?/[^./\\:\x00-\x1f][^/\\:\x00-\x1f]*"
    r"|eval/[\w-][\w.-]*-\d+/(config\.yaml|trace\.yaml|metrics\.jsonl)"
)


def write_archive(options: Options) -> Export:
    """Write a run to a zip file: config, code, preparation, record, and a checkpoint: the best and the newest, or one.

    Left out are data, the log, failures, files of hooks, and paths of this machine where emrun has written them.

    Raises:
        UsageError: the run is being trained, has no checkpoint, or cannot be archived for another reason.
        StorageError: a file of the run cannot be read, or the archive cannot be written.
    """
    directory = options.directory
    if options.overrides or options.place.suffix != ".zip":
        raise UsageError("an archive has a name that ends in .zip, and the config of the run: leave out overrides")
    _check_complete(directory)

    # the checkpoint that was asked for; or that of an evaluation and the newest, which is that of a resume
    root = directory / CHECKPOINTS
    last = newest(root) if options.checkpoint_name is None else find(root, options.checkpoint_name)
    if last is None:
        raise UsageError(f"{from_here(directory)} has no checkpoint, without which an archive cannot be resumed")
    places = {last} if options.checkpoint_name else {find(root), last}
    links = Contents.of(root).links
    inside: Json = {}
    files = set()
    for place in sorted(places):
        manifest = verify(place)
        files |= {place / name for name in (FILE, *manifest.files)}
        names = {name for name, target in links.items() if target == place.name and name != DEFAULTS[-1]}
        names |= {DEFAULTS[-1]} if place == last else set()
        inside[place.name] = {"names": sorted(names), "epoch": manifest.epoch, "iteration": manifest.iteration}

    # the file
    members = {
        str(path.relative_to(directory)): content
        for path, content in _members(directory)
        if root not in path.parents or path in files
    }
    _check_names(members)
    content: Json = {"format": FORMAT, "emrun": emrun.__version__, "run": directory.name, "checkpoints": inside}
    with storing(options.place, "write"), written_aside(options.place) as aside:
        with zipfile.ZipFile(aside, "x") as archive:
            content["files"] = {name: _add(archive, name, source) for name, source in sorted(members.items())}
            _add(archive, ARCHIVE, json.dumps({**content, "sha256": json_digest(content)}, indent=1).encode())
        flush_file(aside)
        _check_complete(directory)

    # what is inside
    lines = [
        f"checkpoint {name} ({listed(where['names'])}): {progress(where['epoch'], where['iteration'])}"
        for name, where in inside.items()
    ]
    if "best" in links and links["best"] not in inside:
        lines.append(f"the checkpoint best, {links['best']}, is not inside: emrun eval takes the one that is")
    lines.append(f"unpack it with: emrun init DIR --from {from_here(options.place)}; the data are not inside")
    return Export(options.place, (), {"checkpoints": inside}, lines)


def _check_complete(directory: Path) -> None:
    """Check that no process writes a run, and that its parts fit each other."""
    run = StoredRun(directory)
    if run.status in ("running", "damaged"):
        raise UsageError(f"{from_here(directory)} is {run.status}; an archive is made of a run that has ended")
    if plain_of(directory / CONFIG, None) and plain_of(directory / CONFIG, run.config_text) is None:
        raise UsageError(f"{from_here(directory / CONFIG)} was edited; undo that, or resume the run with the change")


def _members(directory: Path) -> Iterator[tuple[Path, bytes | Path]]:
    """Yield the files of a run, each with what the archive has of it: its content, or the same file."""
    places = {directory, Path.home(), Path(sys.prefix), *map(Path, code_directories(read_config(directory).root))}
    named = sorted((str(place) for place in places if len(place.parts) > 1), key=len, reverse=True)
    within = re.compile(rf'(?<![\w.-])(?:{"|".join(map(re.escape, named))})(/|(?=[": ]))')
    newest_code = [path.name for _, path in code_snapshots(directory)][-1:]
    for path in directory.rglob("*"):
        if not _NAMES.fullmatch(str(path.relative_to(directory))):
            continue
        if path.name.startswith("config") and CHECKPOINTS not in path.parts[:-1]:
            code = newest_code[0] if newest_code and path.name == CONFIG else "code"
            yield path, _with_code(path, f"{code}/modules").encode()
        elif path.name in (TRACE, "record.json"):
            content = StoredRun(path.parent).trace if path.name == TRACE else json.loads(path.read_bytes())
            kept = {key: value for key, value in content.items() if key not in ("host", "pid")}
            text = json.dumps(kept, indent=1, ensure_ascii=False)
            yield path, within.sub(lambda match: "" if match[1] else ".", text).encode()
        else:
            yield path, path


def _with_code(path: Path, code: str) -> str:
    """Return the text of a config with another `code_directory`, and with its comments where that is possible."""
    config = read_config(path).overridden([f"code_directory={json.dumps(escaped(code))}"])
    return dump(config.root, re.sub(r"(?m)^code_directory:.*\n?", "", config.text or ""))


def _add(archive: zipfile.ZipFile, name: str, source: bytes | Path) -> Json:
    """Add a member to an archive; return its checksum and size."""
    info = zipfile.ZipInfo(name, _TIME)
    info.create_system = 3  # Unix, also where the archive is made on another system
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    content = io.BytesIO(source) if isinstance(source, bytes) else opened_regular(source, name.count("/") + 1)
    with content as file:
        info.file_size = file.seek(0, os.SEEK_END)  # a large one needs another form of the entry
        file.seek(0)
        with archive.open(info, "w") as member:
            return _copy(file, member)


def _copy(source: Any, target: Any) -> Json:
    """Copy a file; return its checksum and size."""
    digest = hashlib.sha256()
    size = 0
    while chunk := source.read(2**20):
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
        if (other := known.setdefault(unicodedata.normalize("NFC", name).casefold(), name)) != name:
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
        with storing(file, "read"), zipfile.ZipFile(file) as archive:
            content = _checked(archive, file.stat().st_size)
            _extract(archive, content, target)
            return content
    except StorageError:
        raise
    except Exception as error:  # what is not an archive makes `zipfile` and `json` raise many types
        raise UsageError(f"{file} is not an archive of a run, or is damaged: {reason_of(error)}") from error


def _checked(archive: zipfile.ZipFile, size: int) -> Json:
    """Return the content of `archive.json` of an archive whose members it lists, and which are safe to unpack."""
    # the members
    infos = archive.infolist()
    for info in infos:
        is_stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not is_stored or info.flag_bits & 1 or stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            raise UsageError(f"{in_one_line(repr(info.filename))} is not a file that is stored as it is")
    sizes = {info.filename: info.file_size for info in infos}
    _check_names(sizes.keys() - {ARCHIVE})
    if len(sizes) != len(infos) or sum(sizes.values()) > size or min(info.header_offset for info in infos) != 0:
        raise UsageError("its members do not lie in it one after the other, each once")

    # what it says of them
    content: Json = json.loads(archive.read(ARCHIVE))
    if (version := content["format"]) > FORMAT:
        raise UsageError(f"format {version} of {ARCHIVE} is newer than this emrun supports ({FORMAT}); update emrun")
    listing = {ARCHIVE: sizes[ARCHIVE], **{name: entry["size"] for name, entry in content["files"].items()}}
    inside = content["checkpoints"]
    needed = {CONFIG, TRACE, *(f"{CHECKPOINTS}/{name}/{FILE}" for name in inside)}
    if content.pop("sha256") != json_digest(content) or sizes != listing or not needed <= sizes.keys():
        raise UsageError(f"its members are not those that {ARCHIVE} lists")
    for name in (name for where in inside.values() for name in where["names"]):
        NAME.check(name, "a name of a checkpoint")
    return content


def _extract(archive: zipfile.ZipFile, content: Json, target: Path) -> None:
    """Write the members of an archive to a directory, with the links of the checkpoint and the place of the code."""
    home = next(parent for parent in target.parents if parent.is_dir())
    aside = home / f".{target.name}.{secrets.token_hex(8)}.tmp"
    with storing(target, "write"), written_aside(target, aside):
        if sum(entry["size"] for entry in content["files"].values()) > shutil.disk_usage(home).free:
            raise StorageError(errno.ENOSPC, f"cannot write {target}: the disk is full")
        for name, entry in content["files"].items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as member, (aside / name).open("xb") as file:
                if _copy(member, file) != entry:
                    raise UsageError(f"{name} differs from its checksum")
                file.flush()
                os.fsync(file.fileno())
        for place, where in content["checkpoints"].items():
            for name in where["names"]:
                (aside / CHECKPOINTS / name).symlink_to(place)
        for path in aside.glob("config*.yaml"):
            text = _with_code(path, str(target / read_config(path).root.plain()["code_directory"]))
            write_with_plain(path, text, parse(text, path.name).plain())
        make_directory(target.parent, exist_ok=True)
