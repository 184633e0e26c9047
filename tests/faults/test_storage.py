"""A full disk, directories that cannot be written, a permission that is missing: status 74, the message, nothing lost.

The full disk is a real one, of a few hundred kilobytes, where a test may mount one. Otherwise a process has a limit of
the size of its files, at which writing fails likewise. A directory is read-only for a process that is not root.
Taken out once by hand, going on without a log that cannot be written made this fail.
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import memory
import pytest

TRAIN = ("train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume", "main_loop.report=true")
NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path):
    """Return a directory that is a disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "emrun-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def open_project():
    """Return a project whose directory anybody may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir=memory.DISK) as place:
        Path(place).chmod(0o777)
        yield Path(place)


def at_batch(number, action):
    """Call `action` before the n-th batch."""
    from emrun.models.torch_model import TorchModel

    run, count = TorchModel.run, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        if count == number:
            action()
        return run(*arguments)

    TorchModel.run = counted


def check_end(done, *words):
    assert done.returncode == 74, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    (first,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "cannot " in first
    assert any(word in first for word in words), first


@pytest.mark.campaign  # tests/cli/test_train.py has a full disk, the last test here what goes on behind such an end
@pytest.mark.timeout(7200)
@pytest.mark.fault("the disk is full")
def test_a_full_disk_is_told_and_the_checkpoint_before_goes_on(project, small_disk, small, expected, trials):
    config = (project / "config.yaml").read_text()

    def fill(left):
        free = os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
        with suppress(OSError):
            Path("ballast").write_bytes(bytes(max(0, free - left)))

    cases = list(product((9, 12, 17, 20, 25, 30), (0, 4096, 8192, 16384)))
    full = tried = 0
    for trial in trials(cases, small=[(9, 0), (17, 4096), (25, 8192), (30, 0)]):
        number, left = trial.case
        tried += 1
        for path in small_disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (small_disk / "config.yaml").write_text(config)
        with trial:
            done = small.command(*TRAIN, cwd=small_disk, prepare=lambda n=number, k=left: at_batch(n, lambda: fill(k)))
            with trial.telling():
                if done.returncode:  # what little is left may have been enough
                    full += 1
                    check_end(done, "the disk is full")
            (small_disk / "ballast").unlink(missing_ok=True)
            assert not list(small_disk.rglob(".tmp-*"))
            with trial.reading():
                assert small.command(*TRAIN, cwd=small_disk).returncode == 0
            assert small.result(small_disk / "run", ("latest", "best")) == expected
    assert full or tried < 3  # a short campaign


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a file may not grow any more")
def test_a_file_that_may_not_grow_is_told_and_the_checkpoint_before_goes_on(project, small, expected, trials):

    def limit(size):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    for trial in trials(product((9, 17, 25, 32), (1500, 2000, 4000)), small=[(25, 2000)]):
        number, size = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        with trial:
            done = small.command(*TRAIN, cwd=project, prepare=lambda n=number, k=size: at_batch(n, lambda: limit(k)))
            with trial.telling():
                check_end(done, "File too large")
            assert not list((project / "run").rglob(".tmp-*"))
            with trial.reading():
                assert small.command(*TRAIN, cwd=project).returncode == 0
            assert small.result(project / "run", ("latest", "best")) == expected


@pytest.mark.timeout(7200)
@pytest.mark.fault("a directory that cannot be written, by permission or because it is read-only")
def test_a_directory_that_cannot_be_written_is_told_and_the_checkpoint_before_goes_on(
    project, open_project, small, expected, trials
):

    def become_nobody(number, name):
        if os.getuid() == 0:
            ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: leaves no core behind
            os.setgid(NOBODY)
            os.setuid(NOBODY)

        def close():
            Path(name).mkdir(parents=True, exist_ok=True)  # the first checkpoint may not have begun
            Path(name).chmod(0o555)

        if number == 0:
            close()
        else:
            at_batch(number, close)

    cases = [(0, "run"), *product((9, 12, 17, 20, 25, 30), ("run", "run/checkpoints"))]
    for trial in trials(cases, small=[(12, "run/checkpoints")]):
        number, name = trial.case
        shutil.rmtree(open_project / "run", ignore_errors=True)
        shutil.copy(project / "config.yaml", open_project)
        (open_project / "config.yaml").chmod(0o644)
        with trial:
            done = small.command(*TRAIN, cwd=open_project, prepare=partial(become_nobody, number, name))
            with trial.telling():
                check_end(done, "Permission denied")
            (open_project / name).chmod(0o777)
            with trial.reading():
                assert small.command(*TRAIN, cwd=open_project).returncode == 0
            assert small.result(open_project / "run", ("latest", "best")) == expected
