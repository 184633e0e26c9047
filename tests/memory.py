"""Where the files of the tests lie: in memory, where flushing a file costs nothing, if there is a place for them."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "emrun-tests-"
DISK = os.environ.setdefault("EMRUN_TESTS_DISK", tempfile.gettempdir())
"""The directory for temporary files as it was before; processes of the tests inherit the variable."""
_PLACES = (Path("/dev/shm"),)
_NEEDED = 2 << 30  # bytes
_LARGE, _COLLAPSE = 2 << 20, 25  # bytes of a large page; `MADV_COLLAPSE` of Linux 6.1


def move_temporary_directory():
    """Make a fresh directory in memory the one for temporary files, of this process and of those that it starts."""
    for place in _PLACES:
        _remove_left(place)
        if place.is_dir() and shutil.disk_usage(place).free >= _NEEDED:
            fresh = place / f"{PREFIX}{os.getpid()}"  # short: the paths of sockets below it have a limit
            with suppress(OSError):
                fresh.mkdir(mode=0o700)
                if _runs_programs(fresh):
                    os.environ["TMPDIR"] = tempfile.tempdir = str(fresh)
                    return
                shutil.rmtree(fresh)


def base_directory():
    """Return where pytest is to make the directories of the tests; None where it chooses itself."""
    place = Path(tempfile.gettempdir())
    return place / "of" if place.name.startswith(PREFIX) else None


def remove_temporary_directory():
    """Remove the directory in memory, if there is one."""
    if base_directory() is not None:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
        os.environ["TMPDIR"] = tempfile.tempdir = DISK


def _remove_left(place):
    """Remove the directories of own runs of tests that have ended."""
    for path in place.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX)
        with suppress(OSError):  # another run of tests removes it too
            if not Path(f"/proc/{pid}").exists() and path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def _runs_programs(place):
    program = place / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    with suppress(OSError):
        return subprocess.run([program], check=False, timeout=60).returncode == 0
    return False


def use_large_pages():
    """Move the memory of this process to pages of 2 MiB, where Linux can: each fork copies a table of pages."""
    maps, libc = Path("/proc/self/maps"), ctypes.CDLL(None)
    for line in maps.read_text().splitlines() if maps.exists() else ():
        place, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(each, 16) for each in place.split("-"))
            for address in range(-(-first // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
                libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_LARGE), _COLLAPSE)  # refused where nothing is
