"""A machine that loses its power keeps what was flushed to disk, and any part of what was not.

A training runs once while every call that changes a directory or flushes is recorded, with the files as they are.
Each moment is then turned into directories as a machine could show them when the power came back, in which the
training is started again. This disk is stricter than the usual file systems: of the changes of names and contents
since the last flush, any may be there and any may be missing, and what was not flushed may be empty, cut or zeros.

Taken out once by hand, each of these made this fail: flushing a checkpoint's files; flushing the lines it counts on;
flushing the name of a new directory; writing the manifest before the rename.
"""

import hashlib
import json
import os
import pickle
import shutil
import stat
import threading
from itertools import count
from pathlib import Path

import pytest

CALLS = ("fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")
EPOCHS = 1
PARTS = [0, *(pytest.param(part, marks=pytest.mark.campaign) for part in [1])]
DIRECTORY, FILE, LINK = "directory", "file", "link"


class Disk:
    """Records what happens below a directory: names and contents, and which of them were flushed.

    Every directory, file and link has an identity, whatever its name. `moments` holds for each call what a power loss
    before or after it would find: the flushed names and contents, and the changes since.
    """

    def __init__(self, root):
        self.root = root
        self.moments = []
        self.promise = 0  # iterations of the last checkpoint that the training was told is saved
        self._ids = count()
        self._lock = threading.RLock()
        self._known = {}  # (device, inode) -> identity, of what is there
        self._kind = {}  # identity -> kind, and the target of a link
        self._names = {}  # directory -> name -> identity, as they are
        self._flushed_names = {}
        self._changes = {}  # directory -> changes {name: identity or None} since it was flushed
        self._contents = {}  # file -> what is in it
        self._flushed = {}  # file -> what was in it when it was flushed
        self.top = self._see(root)
        self._scan(root, self.top)
        self._flush_names(self.top)

    def record(self):
        """Replace the calls by ones that note the moments before and after them."""
        for name in CALLS:
            setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name, real):
        def call(*arguments, **keywords):
            with self._lock:
                self._look()
                found = real(*arguments, **keywords)
                if name == "fsync":
                    self._flush(arguments[0])
                self._look()
            return found

        return call

    def keep_promise(self, iteration):
        with self._lock:
            self.promise = iteration
            self._look()

    def _look(self):
        self._scan(self.root, self.top)
        changes = {directory: list(each) for directory, each in self._changes.items() if each}
        self.moments.append(
            {
                "names": {directory: dict(names) for directory, names in self._flushed_names.items()},
                "changes": changes,
                "kind": dict(self._kind),
                "contents": dict(self._contents),
                "flushed": dict(self._flushed),
                "promise": self.promise,
            }
        )

    def _see(self, path):
        found = path.lstat()
        key = (found.st_dev, found.st_ino)
        if key not in self._known:
            identity = self._known[key] = next(self._ids)
            if stat.S_ISLNK(found.st_mode):
                self._kind[identity] = (LINK, str(path.readlink()))
            elif stat.S_ISDIR(found.st_mode):
                self._kind[identity] = (DIRECTORY, None)
                self._names[identity], self._flushed_names[identity], self._changes[identity] = {}, {}, []
            else:
                self._kind[identity] = (FILE, None)
        return self._known[key]

    def _scan(self, path, identity):
        """Note what changed in a directory: all of it is one change, as it came by one call."""
        before = self._names[identity]
        now = {}
        for child in sorted(path.iterdir()):
            now[child.name] = self._see(child)
        change = {name: now.get(name) for name in {*before, *now} if before.get(name) != now.get(name)}
        if change:
            self._changes[identity].append(change)
            self._names[identity] = now
            gone = {each for each in before.values() if each not in now.values()}
            self._known = {key: each for key, each in self._known.items() if each not in gone or self._is_named(each)}
        for name, child in now.items():
            kind, _ = self._kind[child]
            if kind == DIRECTORY:
                self._scan(path / name, child)
            elif kind == FILE:
                self._contents[child] = (path / name).read_bytes()

    def _is_named(self, identity):
        return any(identity in names.values() for names in self._names.values())

    def _flush(self, descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root):
            return
        identity = self._see(path)
        if self._kind[identity][0] == DIRECTORY:
            self._flush_names(identity)
        else:
            self._flushed[identity] = path.read_bytes()

    def _flush_names(self, directory):
        self._flushed_names[directory] = dict(self._names[directory])
        self._changes[directory] = []


def lose_power(moment, place, draw, keep):
    """Make what a machine could find after a power loss, below `place`; `keep` is how likely a change is there."""
    names = {directory: dict(entries) for directory, entries in moment["names"].items()}
    for directory, changes in moment["changes"].items():
        for change in changes:
            if draw.random() < keep:
                names[directory].update(change)
    names = {directory: {k: v for k, v in each.items() if v is not None} for directory, each in names.items()}

    def content_of(identity):
        now, flushed = moment["contents"].get(identity, b""), moment["flushed"].get(identity, b"")
        if now == flushed or draw.random() >= keep:
            return flushed
        differ = (place for place, (one, other) in enumerate(zip(now, flushed, strict=False)) if one != other)
        kept = next(differ, min(len(now), len(flushed)))  # what was flushed and is still to be there does not get lost
        cut = draw.choice([len(now), draw.randrange(kept, len(now) + 1)])
        return now[:cut] + bytes(draw.choice([0, len(now) - cut]))

    def make(directory, path, depth=0):
        path.mkdir(exist_ok=True)
        for name, identity in sorted(names[directory].items()):
            kind, target = moment["kind"][identity]
            if kind == DIRECTORY and depth < 9:
                make(identity, path / name, depth + 1)
            elif kind == LINK:
                (path / name).symlink_to(target)
            elif kind == FILE:
                (path / name).write_bytes(content_of(identity))

    make(0, place)


def recorded_training(root, moments_file, small):
    """Train in a child; return what it left behind and the moments."""

    def run():
        from emrun.loop import checkpointer as checkpointing

        disk = Disk(root)
        commit = checkpointing.commit

        def told(*arguments, **keywords):
            place = commit(*arguments, **keywords)
            disk.keep_promise(keywords["iteration"])
            return place

        checkpointing.commit = told
        disk.record()
        small.start_or_resume(root / "run", EPOCHS)
        moments_file.write_bytes(pickle.dumps(disk.moments))

    assert small.forked(run) == 0
    return small.result(root / "run"), pickle.loads(moments_file.read_bytes())


def has_its_files(code):
    """Return whether a directory `code` that has a record has all sources that the record lists."""
    if not (code / "record.json").exists():
        return True
    modules = json.loads((code / "record.json").read_text())["modules"]
    for name, module in modules.items():
        inner = "/__init__" if module["file"].endswith("__init__.py") else ""
        source = (code / f"modules/{name.replace('.', '/')}{inner}.py").read_bytes()
        if hashlib.sha256(source).hexdigest() != module["sha256"]:
            return False
    return (code / "packages.txt").read_text() != ""


@pytest.mark.timeout(7200)
@pytest.mark.fault("power loss: what was not flushed is lost, in part or whole", share=6)
@pytest.mark.parametrize("part", PARTS)
def test_a_power_loss_at_any_moment_changes_nothing(tmp_path, small, trials, part):
    from emrun.storage.checkpoints.finding import newest

    (tmp_path / "disk").mkdir()
    expected, moments = recorded_training(tmp_path / "disk", tmp_path / "moments", small)
    assert len(moments) > 100
    place = tmp_path / "after"
    states = 2000 // len(moments) + 1
    cases = [(index, state) for index in range(len(moments)) for state in range(states)]
    spread = range(part, len(moments), len(moments) // 24)
    few = [(index, 2 * (number % 2)) for number, index in enumerate(spread)]  # nothing or a part of it is kept
    for trial in trials(cases[part::2], small=few):
        with trial:
            shutil.rmtree(place, ignore_errors=True)
            index, state = trial.case
            lose_power(moments[index], place, trial.random, keep=(0.0, 1.0, 0.5)[state % 3])
            with trial.reading():
                found = newest(place / "run" / "checkpoints")
                assert has_its_files(place / "run" / "code")
            promise = moments[index]["promise"]
            assert promise == 0 or (found is not None and int(found.name.split("-")[1]) >= promise), found
            with trial.reading():
                assert small.forked(small.start_or_resume, place / "run", EPOCHS) == 0
            assert small.result(place / "run") == expected
