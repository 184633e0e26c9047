"""Sweeps that are killed, interrupted and shared; tests/cli/test_sweep.py has the options of the command."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from campaign import thinned
from sweeps import content, statuses, trace, trials, write_project

from emrun.storage.lock import RunLock, writer_of

EMRUN = Path(sys.executable).with_name("emrun")
MAJORITY = Path(__file__).parents[2] / "sample_configs" / "majority.yaml"


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path)


def do(project, what):
    """Let the first trial that has made seven steps do this."""
    (project / "do").write_text(what)


def alone(project, emrun_here, count, *sweep):
    """Train some trials of a sweep one by one with the commands that it prints; return name -> run directory."""
    commands = emrun_here("sweep", "config.yaml", *sweep, "--dry-run", "--output-dir", "alone").stdout.splitlines()
    for line in commands[:count]:
        words = shlex.split(line)
        assert emrun_here(*words[words.index("emrun") + 1 :]).returncode == 0, line
    return {run.name: run for run in (project / "alone").glob("trial-*")}


KILLS = [("parent", -9)], [("trial", 1), ("parent", -9)]


@pytest.mark.parametrize("kills", thinned(KILLS, KILLS[:1]), ids=["the sweep", "a trial, then the sweep"])
def test_trials_of_a_sweep_that_is_killed_equal_those_that_were_trained_alone(project, emrun, emrun_here, kills):
    for what, status in kills:
        do(project, what)
        assert emrun("sweep", "-q", "config.yaml", "--jobs", "2").returncode == status
        assert not (project / "do").exists()
    wait_until_free(project)
    done = emrun("sweep", "-q", "config.yaml", "--jobs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert statuses(project) == ["finished"] * 2
    other = alone(project, emrun_here, len(kills), "--jobs", "2")
    found = {run.name: content(run) for run in trials(project)}
    assert [found[name] == content(run) for name, run in other.items()] == [True] * len(kills)
    assert {trace(run)["threads"] for run in (*trials(project), *other.values())} == {1}


def wait_until_free(project):
    """Wait until the trials of a sweep that was killed have ended, so that the next sweep need not wait for them."""
    while any(writer_of(run) is not None for run in trials(project)):
        time.sleep(0.01)


@pytest.mark.campaign
def test_a_trial_that_is_finished_is_not_trained_again(project, emrun):
    assert emrun("sweep", "-q", "config.yaml", "-p", "model.lr=[0.1]").returncode == 0
    before = {run: (run / "trace.yaml").stat().st_mtime_ns for run in trials(project)}
    done = emrun("sweep", "config.yaml", "-p", "model.lr=[0.1, 0.5]")
    assert done.stderr.count("finished") == 1
    assert len(trials(project)) == 2
    assert before == {run: (run / "trace.yaml").stat().st_mtime_ns for run in before}


def test_an_interrupted_sweep_saves_checkpoints_and_says_how_to_continue(project, emrun):
    do(project, "SIGINT")
    done = emrun("sweep", "config.yaml", "--jobs", "2")
    assert done.returncode == -signal.SIGINT
    assert "interrupted by SIGINT" in done.stderr
    assert done.stderr.endswith("trials done\ncontinue with: emrun sweep config.yaml --jobs 2\n")
    assert "interrupted" in statuses(project)
    saved = [run for run in trials(project) if (run / "checkpoints" / "latest").exists()]
    assert saved  # of the trial that had begun to train; the other one may not have come so far
    assert emrun("sweep", "-q", "config.yaml").returncode == 0
    assert statuses(project) == ["finished"] * 2


@pytest.mark.campaign
def test_a_second_signal_kills_a_trial_that_hangs(project, emrun):
    do(project, "hangs")
    done = emrun("sweep", "config.yaml")
    assert done.returncode == -signal.SIGINT
    assert "SIGINT: running trials save checkpoints; a second signal" in done.stderr
    assert ": killed\n" in done.stderr
    assert len(trials(project)) == 1
    assert emrun("sweep", "-q", "config.yaml").returncode == 0
    assert statuses(project) == ["finished"] * 2


@pytest.mark.campaign
def test_a_trial_that_another_process_trains_is_left_to_it_and_waited_for(project, emrun):
    do(project, "trial")
    assert emrun("sweep", "-q", "config.yaml", "-p", "model.lr=[0.1]").returncode == 1
    (killed,) = trials(project)
    lock = RunLock(killed)

    def release():
        while not any("finished" in path.read_text() for path in project.glob("log/*/*/trace.yaml")):
            time.sleep(0.01)
        lock.release()

    other = threading.Thread(target=release)
    other.start()
    done = emrun("sweep", "config.yaml")
    other.join()
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "finished" in line]
    assert [killed.name in line for line in lines] == [False, True]
    assert statuses(project) == ["finished"] * 2


@pytest.mark.campaign
def test_two_sweeps_in_one_directory_divide_the_trials(project):
    command = [EMRUN, "sweep", "-q", "config.yaml", "-p", "model.lr=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]"]
    both = [subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    assert statuses(project) == ["finished"] * 6
    assert all("resumes" not in trace(run) for run in trials(project))
    assert both[0].stdout.read() == both[1].stdout.read()
    for each in both:
        each.stdout.close()


@pytest.mark.parametrize(("on_error", "started"), thinned([("continue", 2), ("stop", 1)], [("stop", 1)]))
def test_a_failed_trial_is_skipped_or_ends_the_sweep(project, emrun, on_error, started):
    arguments = ("-p", "model.fails=[true, false]", "model.lr=0.1", f"sweep.on_error={on_error}")
    done = emrun("sweep", "config.yaml", *arguments, "-p", "model.lr=[0.1]")
    assert done.returncode == 1
    assert "RuntimeError: this width does not work" in done.stderr
    assert len(trials(project)) == started
    assert "this width does not work" in (trials(project)[statuses(project).index("failed")] / "train.log").read_text()
    assert emrun("sweep", "-q", "config.yaml", *arguments, "-p", "model.lr=[0.1]").returncode in (0, 1)
    assert statuses(project) == ["failed", "finished"] or statuses(project) == ["finished", "failed"]


REFUSES = """
        if width == 2:
            from emrun.base.errors import ArgumentError

            raise ArgumentError("width", "2 is refused")
"""


@pytest.mark.campaign
def test_a_trial_whose_config_is_refused_has_failed_until_it_is_deleted(project, emrun):
    code = (project / "my_code.py").read_text()
    begin = "width=1, fails=False):\n"
    (project / "my_code.py").write_text(code.replace(begin, begin + REFUSES))
    arguments = ("sweep", "config.yaml", "-p", "model.width=[1, 2]", "-p", "model.lr=[0.1]")
    done = emrun(*arguments)
    assert (done.returncode, sorted(statuses(project))) == (1, ["failed", "finished"])
    (failed,) = (run for run in trials(project) if trace(run)["status"] == "failed")
    assert trace(failed)["reason"] == "override 'model.width=2': model.width: 2 is refused"
    assert "failed" in done.stdout
    assert "2 is refused" not in emrun(*arguments).stderr
    (project / "my_code.py").write_text(code)
    shutil.rmtree(failed)
    assert emrun(*arguments).returncode == 0
    assert statuses(project) == ["finished", "finished"]


@pytest.mark.campaign
@pytest.mark.parametrize("status", thinned([74, 75, 78], [75]))
def test_a_trial_that_ends_with_a_status_of_emrun_fails_alone_and_is_not_started_for_ever(project, emrun, status):
    code = (project / "my_code.py").read_text()
    exits = f"(print('begun', file=open('begun', 'a')), os._exit({status}))"
    (project / "my_code.py").write_text(code.replace('raise RuntimeError("this width does not work")', exits))
    done = emrun("sweep", "config.yaml", "-p", "model.fails=[true, false]", "-p", "model.lr=[0.1]")
    assert done.returncode == 1
    assert done.stderr.count(f"(exit status {status})") == 1
    assert (project / "begun").read_text().count("begun") == (2 if status == 75 else 1)
    assert "finished" in statuses(project)


@pytest.mark.campaign
def test_a_full_disk_ends_the_sweep(project, emrun):
    code = (project / "my_code.py").read_text()
    (project / "my_code.py").write_text(code.replace("write_text(repr(self.w))", "write_text(full())") + FULL)
    done = emrun("sweep", "config.yaml")
    assert done.returncode == 74
    assert "the disk is full" in done.stderr
    assert len(trials(project)) == 1
    (project / "my_code.py").write_text(code)
    assert emrun("sweep", "-q", "config.yaml").returncode == 0
    assert statuses(project) == ["finished"] * 2


FULL = """

def full():
    import errno
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""


@pytest.mark.campaign
def test_a_trial_that_was_changed_afterwards_does_not_count(project, emrun):
    emrun("sweep", "-q", "config.yaml")
    assert emrun("resume", "-q", trials(project)[0], "hooks.StopAfter.epochs=4").returncode == 0
    done = emrun("sweep", "--json", "config.yaml")
    assert "was resumed with another config" in done.stderr
    found = [run["status"] for each in json.loads(done.stdout)["experiments"] for run in each["runs"]]
    assert sorted(found) == ["changed", "finished"]


def test_a_config_that_changes_while_the_sweep_runs_ends_it(project, emrun):
    code = (project / "my_code.py").read_text()
    change = "Path('config.yaml').write_text(Path('config.yaml').read_text().replace('seed: 3', 'seed: 4'))"
    (project / "my_code.py").write_text(
        code.replace("    def save(self, directory):", f"    def save(self, directory):\n        {change}")
    )
    done = emrun("sweep", "config.yaml")
    assert done.returncode == 2
    assert "the config was changed after the sweep began" in done.stderr
    assert len(trials(project)) == 1


@pytest.mark.campaign
def test_trials_of_other_code_are_named(project, emrun):
    code = project / "my_code.py"
    text = code.read_text()
    edit = "Path('my_code.py').write_text(Path('my_code.py').read_text().replace('w - 0.3', 'w - 0.4'))"
    begun = text.replace("    def save(self, directory):", f"    def save(self, directory):\n        {edit}")
    code.write_text(begun)
    done = emrun("sweep", "config.yaml", "--json")  # with the code of its start
    assert "2 trials of other code than there is now (changed: my_code); delete their directories to" in done.stderr
    runs = [run for each in json.loads(done.stdout)["experiments"] for run in each["runs"]]
    assert [run["changed_modules"] for run in runs] == [["my_code"]] * 2
    assert "w - 0.3" in (trials(project)[0] / "code/modules/my_code.py").read_text()
    code.write_text(text.replace("w - 0.3", "w - 0.4"))
    assert emrun("sweep", "config.yaml", "--status").stdout.splitlines()[-1].split()[-2] == "my_code"
    code.write_text(f"# a comment\n{begun}")
    assert "my_code" not in emrun("sweep", "config.yaml", "--status").stdout


class Campaign:
    """A sweep of 20 trials with two jobs, in processes of its own, that is killed at random times."""

    def __init__(self, directory):
        self.directory = directory
        values = ", ".join(f"{0.05 * number:g}" for number in range(1, 11))
        self.arguments = [str(MAJORITY), "hooks.StopAfter.epochs=3", "dataset.n=4000"]
        self.sweep = ["-p", f"model.optimizer.lr=[{values}]", "--repeats", "2", "--jobs", "2"]
        self.random = random.Random(4)

    def start(self):
        command = [EMRUN, "sweep", "-q", *self.arguments, *self.sweep]
        return subprocess.Popen(
            command, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def runs(self):
        return sorted((self.directory / "log" / "majority_sweep").glob("trial-*"))

    def kill(self, process, what):
        """Kill the sweep, a trial or both, a moment after a trial has begun."""
        before = len(self.runs())
        while len(self.runs()) == before:
            assert process.poll() is None
            time.sleep(0.01)
        if what != "trial":  # one that has just begun cannot end before it is killed
            time.sleep(self.random.uniform(0.0, 0.8))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if what != "parent" and children:
            os.kill(int(children[-1]), signal.SIGKILL)
        if what != "trial":
            process.kill()


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_twenty_trials_survive_five_kills_and_equal_those_trained_alone(tmp_path):
    sweep = Campaign(tmp_path)
    finished = {}
    for what in ("parent", "both", "parent", "both", "trial"):
        process = sweep.start()
        sweep.kill(process, what)
        output, _ = process.communicate()
        assert process.returncode == (1 if what == "trial" else -9), output
        texts = {path: path.read_text() for path in tmp_path.glob("log/*/*/trace.yaml")}
        finished |= {path: text for path, text in texts.items() if "status: finished" in text}
    process = sweep.start()
    assert (process.communicate()[0] and process.returncode) == 0
    runs = sweep.runs()
    assert [trace(run)["status"] for run in runs] == ["finished"] * 20
    assert all(path.read_text() == text for path, text in finished.items())
    assert sum("resumes" in trace(run) for run in runs) > 1
    command = [EMRUN, "sweep", *sweep.arguments, *sweep.sweep, "--dry-run", "--output-dir", "alone"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for line in lines.splitlines():
        subprocess.run(["bash", "-c", line.replace("emrun", str(EMRUN), 1)], cwd=tmp_path, check=True)
    for run in runs:
        assert content(run) == content(tmp_path / "alone" / run.name)
        assert [line["epoch"] for line in content(run)[0]] == [0, 1, 2, 3]
