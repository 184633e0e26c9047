"""Of processes that start in one directory at the same time, one wins and the others say who has it.

Taken out once by hand, the lock of the run directory made this fail, and so did asking the system for the process that
holds the lock while its owner file is not written yet.
"""

import json
import os
import re
import shutil
import signal
import socket
from functools import partial

import pytest

TRAIN = ("train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume", "hooks.StopAfter.epochs=1")


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("processes start in one directory, 20 at a time")
def test_of_processes_that_start_in_one_directory_one_wins_and_the_others_name_it(project, small, trials, request):
    together = 3 if request.config.getoption("--campaign") is None else 20
    assert small.command(*TRAIN, cwd=project).returncode == 0
    expected = small.result(project / "run", ("latest", "best"))
    for trial in trials(range(20), small=1):
        shutil.rmtree(project / "run")
        read, write = os.pipe()

        def wait_for_all(read=read, write=write):
            os.close(write)
            os.read(read, 1)  # the end of the pipe, which the parent closes when all have begun

        commands = [small.began(TRAIN, project, wait_for_all) for _ in range(together)]
        os.close(read)
        os.close(write)
        ends = [small.finished(each) for each in commands]
        pids = {pid for pid, *_ in commands}
        with trial:
            with trial.telling():
                assert {done.returncode for done in ends} <= {0, 75}, [done.stderr for done in ends]
                for done in ends:
                    if done.returncode == 75:
                        named = re.search(r"is in use by process (\d+) on (\S+);", done.stderr)
                        assert named, done.stderr
                        assert int(named[1]) in pids
                        assert named[2] == socket.gethostname()
                    assert "Traceback" not in done.stderr
            assert 0 in [done.returncode for done in ends]
            assert small.result(project / "run", ("latest", "best")) == expected
            assert not (project / "run" / ".owner.json").exists()


@pytest.mark.timeout(7200)
@pytest.mark.fault("a process that holds a directory is killed while others start in it")
def test_a_directory_whose_process_was_killed_names_no_process_that_is_gone(project, small, trials):
    """What the killed one wrote of itself stays there; whoever is refused later must not read it."""
    for trial in trials(range(10), small=1):
        shutil.rmtree(project / "run", ignore_errors=True)
        (project / "run").mkdir()
        (project / "run" / ".owner.json").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
        with trial:
            holder = small.began(TRAIN, project, partial(_stop_when_locked, trial.case % 2))
            os.waitpid(holder[0], os.WUNTRACED)
            done = small.command(*TRAIN, cwd=project)
            os.kill(holder[0], signal.SIGCONT)
            assert small.finished(holder).returncode == 0
            with trial.telling():
                assert done.returncode == 75
                assert f"is in use by process {holder[0]} on {socket.gethostname()};" in done.stderr


def _stop_when_locked(behind_owner):
    """Let the process stop itself just before or behind the writing of its owner file."""
    from emrun.storage import lock

    write = lock.write_atomically

    def stopping(*arguments):
        if behind_owner:
            write(*arguments)
        os.kill(os.getpid(), signal.SIGSTOP)
        if not behind_owner:
            write(*arguments)

    lock.write_atomically = stopping
