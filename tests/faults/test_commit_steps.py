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

STEPS = ("fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")
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


@pytest.mark.timeout(7200)
@pytest.mark.fault("a step of a commit fails: killed before or after it, ENOSPC, EIO, EACCES")
@pytest.mark.parametrize("how", HOW)
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
            if status:
                with trial.reading():
                    assert ended(small.start_or_resume, directory, EPOCHS) == 0
            assert small.result(directory) == expected
