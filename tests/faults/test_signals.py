"""SIGINT and SIGTERM, once and twice, to the process and to its group, at any moment: nothing is lost.

Taken out once by hand, each of these made this fail: the saving of `latest` when a signal ends a training; the handler
that restores the default action for the second signal.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from emrun.loop.interrupts import Interrupts
from emrun.models.torch_model import TorchModel

EMRUN = str(Path(sys.executable).with_name("emrun"))
TRAIN = ("train", "-q", "config.yaml", "--output-dir", "run", "--auto-resume", "main_loop.report=true")
WHERE = ("import", "batch", "save", "evaluation", "hook")
NAMES = ("latest", "best")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
FEW = [  # each two of signal, number of signals, and process or group
    (signal.SIGINT, 1, False, 0), (signal.SIGINT, 2, True, 1),
    (signal.SIGTERM, 1, True, 2), (signal.SIGTERM, 2, False, 3),
]  # fmt: skip

DYING = """
import os, signal
from emrun.datasets.majority import Majority as Data

if (number := os.environ.get("DIES_BY")) and os.environ["TO"] == "group":
    os.killpg(os.getpgid(0), int(number))
elif number:
    os.kill(os.getpid(), int(number))
"""


class Sender:
    """Counts the calls of what stands for a moment of the training, and sends signals in one of them."""

    def __init__(self, where, at=-1, numbers=(), group=False):
        self.where, self.at, self.numbers, self.group = where, at, numbers, group
        self.count = self.batches = 0
        self.sent = False

    def install(self):
        os.setpgid(0, 0)
        run, end = TorchModel.run, Interrupts.install

        def counted_run(model, batch, train, stream):
            self.batches += self.sent
            self.look("batch" if train else "evaluation")
            return run(model, batch, train, stream)

        def installed(interrupts):
            end(interrupts)
            self.count = 0  # before this there is no training to save

        TorchModel.run, Interrupts.install = counted_run, installed
        from emrun.hooks.compute_stats import ComputeStats

        for owner, name, where in ((os, "fsync", "save"), (ComputeStats, "after_batch", "hook")):
            setattr(owner, name, self.looking(getattr(owner, name), where))

    def looking(self, real, where):
        def call(*arguments, **keywords):
            self.look(where)
            return real(*arguments, **keywords)

        return call

    def look(self, where):
        if where != self.where or getattr(signal.getsignal(signal.SIGTERM), "__name__", "") != "_end":  # of Interrupts
            return
        self.count += 1
        if self.count == self.at:
            for number in self.numbers:
                self.sent = True
                (os.killpg if self.group else os.kill)(os.getpgid(0) if self.group else os.getpid(), number)
                ends_at = time.monotonic() + 60
                while threading.current_thread() is not threading.main_thread():  # the main one handles signals
                    if signal.getsignal(number) is signal.SIG_DFL or time.monotonic() > ends_at:
                        break
                    os.sched_yield()


def trained(small, directory, *senders, count_file=None):
    def prepare():
        for sender in senders:
            sender.install()
        if count_file is not None:
            counts, end = {sender.where: sender for sender in senders}, os._exit
            os._exit = lambda status: (
                count_file.write_text(json.dumps({where: each.count for where, each in counts.items()})),
                end(status),
            )

    return small.command(*TRAIN, cwd=directory, prepare=prepare)


def write_project(small, place):
    """Write the config of the small training, with data whose import may send a signal."""
    (place / "dying.py").write_text(DYING)
    config = {**small.config, "dataset": {**small.config["dataset"], "class": "dying.Data"}}
    (place / "config.yaml").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    """Train without signals; return the result, and how often each moment was there."""
    place = tmp_path_factory.mktemp("straight")
    write_project(small, place)
    done = trained(small, place, *map(Sender, WHERE), count_file=place / "counts")
    assert done.returncode == 0, done.stderr
    return small.result(place / "run", NAMES), json.loads((place / "counts").read_text())


def checked_end(done, directory, sender):
    """Check how a training ended that got signals."""
    trace = YAML(typ="safe", pure=True).load(directory / "run" / "trace.yaml")
    assert "Traceback" not in done.stderr
    if done.returncode == 0:  # the signal came when all was done
        assert trace["status"] == "finished"
        return
    assert done.returncode == -sender.numbers[-1], done.stderr
    if len(sender.numbers) == 2:
        assert trace["status"] != "interrupted"  # it had no time to write that
    elif trace["status"] != "finished":
        assert trace["status"] == "interrupted"
        manifest = json.loads((directory / "run" / "checkpoints" / "latest" / "manifest.json").read_text())
        assert manifest["iteration"] == trace["iterations_done"]


@pytest.mark.campaign  # tests/cli/test_train.py and tests/training/test_interrupts.py have signals after some batches
@pytest.mark.timeout(7200)
@pytest.mark.fault("SIGINT and SIGTERM, once and twice, to the process and its group", share=2)
@pytest.mark.parametrize("where", WHERE)
def test_a_signal_at_any_moment_ends_the_process_by_it_and_a_resume_ends_the_same(
    project, small, straight, trials, where
):
    write_project(small, project)
    expected, counts = straight
    moments = counts[where]
    assert where == "import" or moments > 10
    cases = product(SIGNALS, (1, 2), (False, True), range(9 if where != "import" else 2))
    few = FEW[:1] if where == "import" else FEW[WHERE.index(where) - 2 :] + FEW[: WHERE.index(where) - 2]
    for trial in trials(cases, small=few):
        number, times, group, _ = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        with trial:
            if where == "import":
                with trial.telling():
                    env = {**os.environ, "DIES_BY": str(int(number)), "TO": "group" if group else "process"}
                    done = subprocess.run(
                        [EMRUN, *TRAIN], cwd=project, env=env, capture_output=True, text=True, timeout=100,
                        start_new_session=True, check=False,
                    )  # fmt: skip
                    assert done.returncode == -number
                    assert "Traceback" not in done.stderr
                assert not (project / "run").exists()
            else:
                sender = Sender(where, trial.random.randint(1, moments), [number] * times, group)
                with trial.telling():
                    checked_end(trained(small, project, sender), project, sender)
            with trial.reading():
                assert small.command(*TRAIN, cwd=project).returncode == 0
            assert small.result(project / "run", NAMES) == expected
