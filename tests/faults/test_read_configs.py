"""What a config extends is read in no time, whatever it is, and a project may lie in any folder.

Taken out once by hand, each made this fail: what is read is remembered (diamonds), the limit of a chain, that only
regular files are read (pipes, devices), the limit of the size, that the directory of the code is not interpolated.
"""

import json
import os
import resource
import signal
from pathlib import Path

import pytest

MEMORY = 200_000_000  # more than the process has, in bytes


def diamond(project, number):
    for index in range(number):
        (project / f"{index}.yaml").write_text(f"extends: [{index + 1}a.yaml, {index + 1}b.yaml]")
        for side in "ab":
            (project / f"{index + 1}{side}.yaml").write_text(f"extends: {index + 1}.yaml")
    (project / "base.yaml").rename(project / f"{number}.yaml")
    return {"extends": "0.yaml"}


def chain(project, number):
    for index in range(1, number):
        (project / f"{index}.yaml").write_text(f"extends: {index + 1}.yaml")
    (project / "base.yaml").rename(project / f"{number}.yaml")
    return {"extends": "1.yaml"}


def fifo(project, name):
    os.mkfifo(project / "fifo.yaml")
    return {"extends": ["base.yaml", name]}


def link(project, target):
    (project / "linked.yaml").symlink_to(target)
    return {"extends": ["base.yaml", "linked.yaml"]}


def large(project, name):
    with (project / "large.yaml").open("wb") as file:
        file.truncate(2_000_000_000)  # a hole: no disk is needed
    return {"extends": ["base.yaml", name]}


def itself(project, name):
    (project / name).write_text(f"extends: ['{name}']")
    return {"extends": name}


REFUSED = "is not a regular file"
CASES = [
    *((diamond, number, None) for number in (2, 12, 17, 45)),
    *((diamond, number, "more than 100 files extend each other in a chain") for number in (51, 80)),
    *((chain, number, None) for number in (1, 50, 100)),
    *((chain, number, "more than 100 files extend each other in a chain") for number in (101, 330, 2000)),
    (fifo, "fifo.yaml", REFUSED),
    *((link, target, REFUSED) for target in ("/dev/zero", "/dev/null", "/dev/random", "fifo")),
    (large, "large.yaml", "is larger than"),
    (itself, "me.yaml", "extends itself"),
]


def limited():
    """Let the process end soon, rather than hang or take all memory."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)


@pytest.mark.timeout(7200)
@pytest.mark.fault("a config extends itself, many files, a long chain, pipes, devices, what never ends")
def test_what_a_config_extends_is_read_or_refused(tmp_path, small, trials):
    for number, trial in enumerate(trials(CASES, small=8)):
        make, what, refusal = trial.case
        project = tmp_path / str(number)
        project.mkdir()
        os.mkfifo(project / "fifo")
        (project / "base.yaml").write_text(json.dumps(small.config))
        (project / "config.yaml").write_text(json.dumps(make(project, what)))
        with trial:
            done = small.command("check", "--static", "config.yaml", cwd=project, prepare=limited)
            assert done.returncode == (0 if refusal is None else 2), done
            if refusal is not None:
                with trial.telling():
                    assert refusal in done.stderr
                    assert "Traceback" not in done.stderr


TOP = [("a fifo", 2), ("a device", 2), ("a pipe", 0), ("standard input", 0), ("standard input without an end", 2)]


@pytest.mark.timeout(7200)
@pytest.mark.fault("the config that a command names is a pipe, a device, what never ends")
def test_a_config_is_read_from_a_file_or_an_open_pipe(project, small, trials):
    config = (project / "config.yaml").read_text()
    os.mkfifo(project / "fifo.yaml")
    names = {"a fifo": "fifo.yaml", "a device": "/dev/zero", "a pipe": "/dev/fd/50"}
    for number, trial in enumerate(trials([*TOP, *TOP], small=5)):
        what, status = trial.case
        reader, writer = os.pipe()
        os.write(writer, config.encode())  # it is small
        os.close(writer)

        def begin(what=what, reader=reader):
            limited()
            os.dup2(os.open("/dev/zero", os.O_RDONLY) if what.endswith("end") else reader, 0 if "input" in what else 50)

        with trial:
            name = names.get(what, "/dev/stdin")
            command = ("check", "--static", name) if status else ("train", "-q", name, "--output-dir", f"run{number}")
            done = small.command(*command, cwd=project, prepare=begin)
            assert done.returncode == status, done
            with trial.telling():
                assert "Traceback" not in done.stderr
        os.close(reader)


FOLDERS = ("${x}", "a${", "$${x}", "$$${", "${env:HOME}", "${seed}", "{name}", "%s", "}${", "${a.b}${c}", "a b", "'")


@pytest.mark.timeout(7200)
@pytest.mark.fault("a project lies in a folder whose name has ${ in it, or other signs")
def test_a_project_in_any_folder_is_trained_evaluated_and_resumed(tmp_path, small, trials):
    for trial in trials(FOLDERS, small=2):
        project = tmp_path / trial.case
        project.mkdir()
        (project / "config.yaml").write_text(json.dumps({**small.config, "dataset": {"class": "mine.Data", "n": 60}}))
        (project / "mine.py").write_text("from emrun.datasets.majority import Majority as Data")
        with trial:
            done = small.command("train", "-q", "config.yaml", "--output-dir", "run", cwd=project)
            assert done.returncode == 0, done.stderr
            for command in (("eval", "-q", project / "run", "valid"), ("resume", "-q", project / "run", "seed=6")):
                done = small.command(*command, cwd=tmp_path)  # the code is found where the run was started
                assert done.returncode == 0, done.stderr
