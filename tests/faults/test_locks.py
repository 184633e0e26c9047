"""A run stays locked whatever reads, forks or deletes the lock file, and is free as soon as its process is gone.

Taken out once by hand, each of these made a test here fail: the lock of the open file description, instead of a record
lock; closing the lock file in forked children; refusing a run without a lock file whose owner lives; looking whether
another process has taken the run over, before files are written and before a checkpoint is committed; clearing away
the temporary folders of processes that were killed, and leaving those of the living.
"""

import ctypes
import json
import os
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import memory
import psutil
import pytest

PARTS = """
import hashlib
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading

import torch
from emrun import AbstractHook


class Reads(AbstractHook):
    def __init__(self, output_dir, how: str, **other):
        super().__init__(output_dir=output_dir, **other)
        self.how = how

    def after_epoch(self, epoch_id, epoch_data):
        mark = pathlib.Path("started")
        if epoch_id == 1 and not mark.exists():
            mark.touch()
            for thread in threading.enumerate():
                if thread.name == "emrun-code":  # its temporary file would be gone before it is read
                    thread.join()
            with tempfile.TemporaryDirectory() as place:
                self.read(place)
            os.kill(os.getpid(), signal.SIGSTOP)

    def read(self, place):
        if self.how == "copies":
            shutil.copytree(self.output_dir, f"{place}/copy", symlinks=True)
        elif self.how == "packs":
            shutil.make_archive(f"{place}/archive", "tar", self.output_dir)
        else:
            for path in sorted(self.output_dir.rglob("*")):
                if path.is_file():
                    hashlib.sha256(path.read_bytes()).hexdigest()


class Starts(AbstractHook):
    def __init__(self, how: str, at: int, **other):
        super().__init__(**other)
        self.how, self.at, self.started = how, at, []

    def after_batch(self, stream_name, batch_data):
        mark = pathlib.Path("started")
        if self.main_loop.training and self.main_loop.iterations_done == self.at and not mark.exists():
            mark.touch()
            self.start()
            os.kill(os.getpid(), signal.SIGSTOP)

    def start(self):
        if self.how.startswith("DataLoader"):
            items = torch.utils.data.DataLoader(
                range(99), num_workers=2, multiprocessing_context=self.how.split()[1], generator=torch.Generator()
            )
            self.started.append(iter(items))
            next(self.started[0]), next(self.started[0])  # both workers have begun
        elif self.how == "fork":
            fork()
        elif self.how == "fork in a thread":
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        elif self.how == "process":
            read, write = os.pipe()
            multiprocessing.get_context("fork").Process(target=begin_and_wait, args=(write,), daemon=True).start()
            os.read(read, 1)
        elif self.how == "program":
            self.started.append(subprocess.Popen(["sleep", "1000"], close_fds=False))


def fork():
    read, write = os.pipe()
    if os.fork() == 0:
        begin_and_wait(write)
    os.read(read, 1)


def begin_and_wait(write):
    os.write(write, b"!")
    signal.pause()
    os._exit(0)
"""

TRAIN = ("train", "-q", "config.yaml", "--output-dir", "run", "main_loop.report=true")
AGAIN = {"resume": ("resume", "-q", "run"), "auto-resume": (*TRAIN, "--auto-resume")}
NAMES = ("latest", "best")


STOPPED = []


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Kill what is still stopped when a trial was not survived."""
    yield
    for pid in STOPPED:
        with suppress(ProcessLookupError, ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is a child of this process
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    STOPPED.clear()


def add_hook(project, small, name, **arguments):
    """Write the config of the small training with one more hook; its file with the hooks too."""
    (project / "parts.py").write_text(PARTS)
    config = {**small.config, "hooks": [*small.config["hooks"], {f"parts.{name}": arguments}]}
    (project / "config.yaml").write_text(json.dumps(config, indent=2))


def stop_at(number):
    """Let the process stop itself behind the n-th batch, when its code is recorded: the stop would cut a file."""
    from emrun.models.torch_model import TorchModel

    run, count = TorchModel.run, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        found = run(*arguments)
        if count == number:
            for thread in threading.enumerate():
                if thread.name.startswith("emrun-code"):
                    thread.join()
            os.kill(os.getpid(), signal.SIGSTOP)
        return found

    TorchModel.run = counted


def stop_in_commit(number):
    """Let the process stop itself in the n-th commit of a checkpoint, when its files are written."""
    from emrun.storage import sealed

    describe, count = sealed.describe, 0

    def counted(path, **options):
        nonlocal count
        count += path.name == "model.safetensors" and path.parent.name.startswith(".tmp-")
        if count == number:
            count += 1
            os.kill(os.getpid(), signal.SIGSTOP)
        return describe(path, **options)

    sealed.describe = counted


def begun_and_stopped(small, project, prepare=None, arguments=TRAIN):
    """Begin a command that stops itself; return it when it has."""
    command = small.began(arguments, project, prepare)
    STOPPED.append(command[0])
    _, status = os.waitpid(command[0], os.WUNTRACED)
    assert os.WIFSTOPPED(status), (project / "run" / "train.log").read_text()
    return command


def go_on(small, command):
    os.kill(command[0], signal.SIGCONT)
    return small.finished(command)


def files(directory):
    """Return the content of a run, but for the log: all who are in it write there."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "train.log"}


def check_refused(done, pid):
    assert done.returncode == 75, (done.returncode, done.stderr)
    assert f"is in use by process {pid} on " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a hook reads all files of the run, and a second process starts in it")
def test_a_run_whose_hook_reads_its_directory_is_not_entered(project, small, expected, trials):
    for trial in trials(product(("reads", "copies", "packs"), AGAIN, range(2)), small=2):
        how, again, _ = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        (project / "started").unlink(missing_ok=True)
        add_hook(project, small, "Reads", how=how)
        with trial:
            holder = begun_and_stopped(small, project)
            second = small.command(*AGAIN[again], cwd=project)
            assert go_on(small, holder).returncode == 0
            with trial.telling():
                check_refused(second, holder[0])
            assert small.result(project / "run", NAMES) == expected


@pytest.mark.campaign  # tests/storage/test_lock.py has such a lock file
@pytest.mark.timeout(7200)
@pytest.mark.fault("the lock file is deleted, and others start in the run")
def test_a_run_whose_lock_file_is_deleted_is_not_entered_while_its_process_lives(project, small, expected, trials):
    for trial in trials(product((7, 12, 18, 24, 31), AGAIN, ("ends", "is killed")), small=2):
        at, again, ends = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        with trial:
            holder = begun_and_stopped(small, project, partial(stop_at, at))
            (project / "run" / ".lock").unlink()
            for _ in range(2):
                with trial.telling():
                    check_refused(small.command(*AGAIN[again], cwd=project), holder[0])
            if ends == "ends":
                assert go_on(small, holder).returncode == 0
            else:
                os.kill(holder[0], signal.SIGKILL)
                os.waitid(os.P_PID, holder[0], os.WEXITED | os.WNOWAIT)  # it stays as a zombie
                done = small.command(*AGAIN[again], cwd=project)
                small.finished(holder)
                with trial.telling():
                    assert done.returncode == 0, done.stderr
            assert small.result(project / "run", NAMES) == expected


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("another process takes a run over")
def test_a_process_whose_run_was_taken_over_ends_without_writing(project, small, expected, trials):
    """A process of another host sees neither a lock file that was deleted, nor that the owner lives."""
    moments = [*((stop_at, number) for number in (7, 9, 12, 18, 24, 31)), *((stop_in_commit, n) for n in (1, 2, 3))]
    cases = [(*moment, state) for moment in moments for state in ("at work", "ended")]
    for trial in trials(cases, small=4):
        stop, number, state = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        with trial:
            first = begun_and_stopped(small, project, partial(stop, number))
            owner = project / "run" / ".owner.json"
            owner.write_text(json.dumps({**json.loads(owner.read_text()), "host": "elsewhere"}))
            (project / "run" / ".lock").unlink()
            if state == "at work":
                second = begun_and_stopped(small, project, partial(stop_at, 2), AGAIN["resume"])
            else:
                assert small.command(*AGAIN["resume"], cwd=project).returncode == 0
            before = files(project / "run")
            done = go_on(small, first)
            own = f".tmp-{first[0]}"  # what it had begun aside is cleared away
            assert files(project / "run") == {path: each for path, each in before.items() if own not in path.parts}
            with trial.telling():
                assert done.returncode == 75, (done.returncode, done.stderr)
                assert "was taken over" in done.stderr
                assert "Traceback" not in done.stderr
                if state == "at work":
                    assert f"was taken over by process {second[0]} on " in done.stderr
            if state == "at work":
                assert go_on(small, second).returncode == 0
            assert small.result(project / "run", NAMES) == expected


METHODS = ("fork", "forkserver", "spawn")
CHILDREN = [*(f"{who} {method}" for who in ("workers", "DataLoader") for method in METHODS),
            "fork", "fork in a thread", "process", "program"]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("the process of a run is killed while its children live, and the run is resumed at once")
def test_a_run_is_free_as_soon_as_its_process_is_gone_whatever_children_live(project, small, expected, trials):
    for trial in trials(product(CHILDREN, (6, 9)), small=3):
        how, at = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        (project / "started").unlink(missing_ok=True)
        add_hook(project, small, "Starts", how=how, at=at)
        read_by = ["main_loop.workers=2", f"main_loop.start_method={how.split()[1]}"] if "workers" in how else []
        with trial:
            holder = begun_and_stopped(small, project, None, (*TRAIN, *read_by))
            children = psutil.Process(holder[0]).children(recursive=True)
            assert children
            for child in children:
                child.suspend()
            os.kill(holder[0], signal.SIGKILL)
            small.finished(holder)
            assert all(child.is_running() for child in children)
            done = small.command("resume", "-q", "run", "main_loop.workers=0", cwd=project)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=60)
            with trial.telling():
                assert done.returncode == 0, done.stderr
            assert small.result(project / "run", NAMES) == expected


NOBODY = 65534


@pytest.mark.timeout(7200)
@pytest.mark.fault("somebody else's run is evaluated, which cannot be written")
def test_a_run_that_cannot_be_written_is_evaluated_with_results_elsewhere(project, small, finished_run, trials):
    run = shutil.copytree(finished_run, project / "run", symlinks=True)
    for path in (*run.rglob("*"), run):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = files(run)
    with tempfile.TemporaryDirectory(dir=memory.DISK) as place:
        Path(place).chmod(0o777)
        shutil.copytree(run, Path(place) / "theirs", symlinks=True)
        before = files(Path(place))
        for trial in trials(
            product((["valid"], ["train"], ["train", "valid"]), (None, "best", "latest"), range(2)), small=3
        ):
            streams, name, _ = trial.case
            arguments = ("eval", "-q", "theirs", *streams, *(["--checkpoint", name] if name else []))
            with trial:
                refused = small.command(*arguments, cwd=place, prepare=become_nobody)
                done = small.command(*arguments, "--output-dir", "mine", cwd=place, prepare=become_nobody)
                with trial.telling():
                    assert refused.returncode == 74
                    assert "Permission denied" in refused.stderr
                    assert "--output-dir DIR" in refused.stderr
                    assert done.returncode == 0, done.stderr
                    assert "accuracy" not in done.stdout
                    assert all(stream in done.stdout for stream in streams)
                assert sorted(path.name for path in (Path(place) / "mine").iterdir()) == [
                    f"{stream}-1" for stream in sorted(streams)
                ]
                shutil.rmtree(Path(place) / "mine")
                assert files(Path(place)) == before


def become_nobody():
    if os.getuid() == 0:
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: leaves no core behind
        os.setgid(NOBODY)
        os.setuid(NOBODY)
