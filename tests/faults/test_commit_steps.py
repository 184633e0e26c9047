"""A commit that fails at any of its steps leaves every file as it was before or as it is to be.

Each call of the operating system that changes a directory or flushes is a step, wherever in emrun it is made. Taken out
once by hand, each of these made this fail: giving a checkpoint the names again that its process did not live to give;
writing the manifest before the rename.
"""

import errno
import os
import shutil
import signal

import pytest
import torch
from campaign import thinned

from emrun.storage.checkpoints import weights
from emrun.storage.checkpoints.commits import commit
from emrun.storage.checkpoints.finding import find, newest
from emrun.storage.checkpoints.manifest import Contents, verify
from emrun.storage.checkpoints.saved_weights import read_saved

STEPS = ("fsync", "link", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")
HOW = ("kill", "kill after", "ENOSPC", "EIO", "EACCES")
EPOCHS = 1


def fail_at(at, how, run, count_file=None):
    """Call `run`; at the step that `at` counts, die by SIGKILL before or after it, or fail with an error number."""
    count = 0

    def wrap(real):
        def step(*arguments, **keywords):
            nonlocal count
            count += 1
            is_due = count == at
            if is_due:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how != "kill after":
                    raise OSError(how, os.strerror(how), str(arguments[0]))
            found = real(*arguments, **keywords)
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return step

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    try:
        run()
    finally:
        if count_file is not None:
            count_file.write_text(str(count))


@pytest.fixture
def ended(small):
    """Run a function in a child; return the exit status that the command would have, negative for a signal."""
    from emrun.base.errors import EmrunError

    def end(function, *arguments):
        def run():
            try:
                function(*arguments)
            except EmrunError as error:
                os._exit(error.exit_status)

        return small.forked(run)

    return end


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    """Train without a fault; return the result and the number of steps."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    count = directory.with_name("count")

    def run():
        fail_at(0, "", lambda: small.start_or_resume(directory, EPOCHS), count)

    assert small.forked(run) == 0
    return small.result(directory), int(count.read_text())


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a step of a commit fails: killed before or after it, ENOSPC, EIO, EACCES")
@pytest.mark.parametrize("how", thinned(HOW, ["kill"]))
def test_a_step_that_fails_leaves_the_old_or_the_new(tmp_path, small, straight, ended, trials, how):
    expected, steps = straight
    assert steps > 50
    directory = tmp_path / "run"

    def run(at):
        fail_at(at, getattr(errno, how, how), lambda: small.start_or_resume(directory, EPOCHS))

    few = range(1 + 4 * HOW.index(how), steps + 1, 4 * len(HOW))  # every fourth step in one of the ways
    for trial in trials(range(1, steps + 1), small=list(few)):
        with trial:
            shutil.rmtree(directory, ignore_errors=True)
            status = ended(run, trial.case)
            with trial.telling():
                assert status in ((0, -signal.SIGKILL) if "kill" in how else (0, 74))
            with trial.reading():  # also if the run has finished: it goes on without a sink, which a resume completes
                assert ended(small.start_or_resume, directory, EPOCHS) == 0
            assert small.result(directory) == expected


def commit_frozen(root, iteration):
    """Commit weights of which one is frozen and shared with the checkpoint before."""
    found = {"frozen": torch.ones(2**18), "trained": torch.full((3,), float(iteration))}
    commit(
        root,
        lambda place: weights.write_apart({weights.FILE: (found, {})}, ["frozen"], place),
        epoch=0,
        iteration=iteration,
        names=["latest"],
    )


@pytest.mark.fault("a step of a commit that shares a file with the checkpoint before fails")
@pytest.mark.parametrize("how", thinned(HOW, ["kill after", "EIO"]))
def test_a_checkpoint_that_shares_a_file_is_whole_after_each_step(tmp_path, small, ended, trials, how):
    first, root = tmp_path / "first", tmp_path / "root"
    commit_frozen(first, 1)

    def run(at, count_file=None):
        fail_at(at, getattr(errno, how, how), lambda: commit_frozen(root, 2), count_file)

    shutil.copytree(first, root, symlinks=True)
    inode = (root / "latest" / "frozen.safetensors").stat().st_ino
    assert ended(run, 0, tmp_path / "count") == 0
    assert Contents.of(root).checkpoints == ["it-00000002"]
    assert (root / "latest" / "frozen.safetensors").stat().st_ino == inode
    steps = int((tmp_path / "count").read_text())
    assert steps > 8
    for trial in trials(range(1, steps + 1), small=1):
        with trial:
            shutil.rmtree(root)
            shutil.copytree(first, root, symlinks=True)
            status = ended(run, trial.case)
            with trial.telling():
                assert status in ((0, -signal.SIGKILL) if "kill" in how else (0, 74))
            with trial.reading():
                there = newest(root)
                tensors = read_saved(there).tensors
                assert tensors["frozen"].equal(torch.ones(2**18))
                assert tensors["trained"].tolist() == [float(there.name.split("-")[1])] * 3
            commit_frozen(root, 3)
            place = find(root, "latest")
            verify(place)
            assert Contents.of(root).checkpoints == ["it-00000003"]
            assert read_saved(place).tensors["trained"].tolist() == [3.0] * 3
