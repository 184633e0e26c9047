"""Fixtures for fault injection: each test causes a fault, in one trial in `make test`, in many in `make campaign`.

    @pytest.mark.fault("power loss", share=4)
    def test_power_loss(trials):
        for trial in trials(states, small=40):
            with trial:
                ...

`make campaign` continues after a failed trial, and prints how many trials of each fault were survived. `share` is the
weight with which a test shares the time of the campaign.
"""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaign import TIMES
from warm import compile_templates

from emrun import AbstractHook, create_model, create_training, resume_training
from emrun.cli import main
from emrun.config import plan
from emrun.config.config import load_config
from emrun.config.source_finder import Unimported
from emrun.training.create import train

SOURCES = Unimported()
OUTCOMES = ("survived", "lost", "unreadable", "silent")


class Trial:
    """A trial: a block whose failure is counted; the failure ends the test only outside of a campaign."""

    def __init__(self, case, tally, is_campaign):
        self.case = case
        self.random = random.Random(str(case))
        self._tally = tally
        self._goes_on = is_campaign
        self._fails_as = "lost"

    @contextmanager
    def _as(self, kind):
        before, self._fails_as = self._fails_as, kind
        yield
        self._fails_as = before

    def reading(self):
        """Return a block whose failure counts as a file that cannot be read."""
        return self._as("unreadable")

    def telling(self):
        """Return a block whose failure counts as a fault without a correct message."""
        return self._as("silent")

    def __enter__(self):
        self._fails_as = "lost"
        return self

    def __exit__(self, error_type, error, trace):
        if error is not None and not isinstance(error, Exception | pytest.fail.Exception):
            return False
        self._tally["survived" if error is None else self._fails_as] += 1
        if error is None:
            return True
        self._tally.setdefault("first", f"{self.case!r}: {error_type.__name__}: {error}")
        error.add_note(f"in trial {self.case!r}")
        return self._goes_on


@pytest.fixture
def trials(request):
    """Return a function that yields the trials of a test.

    `make test` has one, the middle one of `small` of the cases, evenly spaced, or of the list `small`; all of those
    where the trials are judged `together`. A campaign chooses cases at random: as many as there is time for, but at
    least `small`.
    """
    minutes = request.config.getoption("--campaign")
    (mark,) = request.node.iter_markers("fault")
    tally = dict.fromkeys((*OUTCOMES, "planned"), 0)

    def over(cases, small, together=False):
        cases = list(cases)
        ends_at = None
        few = small if isinstance(small, list) else cases[:: -(-len(cases) // small)]
        if minutes is None:
            cases = few if together else [few[len(few) // 2]]
        else:
            random.Random(1).shuffle(cases)
            times = request.config.stash[TIMES]
            ends_at = min(times.ends_at, time.monotonic() + times.seconds[request.node.nodeid])
        tally["planned"] += len(cases)
        for number, case in enumerate(cases):
            if ends_at is not None and number >= len(few) and time.monotonic() > ends_at:
                return
            yield Trial(case, tally, minutes is not None)

    yield over
    request.node.user_properties.append(("fault", (mark.args[0], tally)))
    if tally.get("first") and minutes is not None:
        pytest.fail(f"first trial that was not survived: {tally['first']}")


CONFIG = {
    "seed": 5,
    "dataset": {"class": "Majority", "n": 60, "batch_size": 4},
    "model": {
        "module": {
            "class": "torch.nn.Sequential",
            "args": [
                {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
                {"class": "torch.nn.Dropout", "p": 0.2},
                {"class": "torch.nn.Flatten", "start_dim": 0},
            ],
        },
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.BCEWithLogitsLoss", "inputs": ["logit", "y"]},
        "optimizer": {"class": "Adam", "lr": 0.05},
    },
    "main_loop": {"extra_streams": ["valid"], "buffer": 2, "fixed_epoch_size": 5, "report": False},
    "hooks": [
        {"ComputeStats": {"variables": ["loss"]}},
        "SaveBest",
        "WriteCSV",
        {"StopAfter": {"epochs": 3}},
    ],
}

"""A run without a page, the dearest file of a short run; `PAGE` is for tests whose fault may meet its writing."""

PAGE = "main_loop.report=true"


class SaveOften(AbstractHook):
    """Requests checkpoints in the middle of an epoch, so that there are commits of all kinds."""

    def after_batch(self):
        if self.main_loop.training and self.main_loop.iterations_done % 3 == 0:
            self.main_loop.request_checkpoint("often")


def start_or_resume(directory, epochs=3):
    """Do what `train --auto-resume` does, with checkpoints in the middle of an epoch, and an evaluation at the end."""
    if (directory / "config.yaml").exists():
        training = resume_training(directory)
    else:
        longer = [f"hooks.StopAfter.epochs={epochs}", "main_loop.extra_streams=[{valid: 2 epochs}]", PAGE]
        training = create_training(CONFIG, output_dir=directory, overrides=longer)
    if training is None:
        return
    training.main_loop.change_hooks([*training.main_loop.hooks, SaveOften()])
    train(training)


def forked(function, *arguments):
    """Run a function in a forked child, in which torch is already imported; return its exit status, as `Popen` does."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def began(arguments, cwd, prepare=None):
    """Start the command in a forked child, in which torch is already imported; return an argument for `finished`.

    Args:
        arguments: the command line, without `emrun`.
        cwd: the working directory.
        prepare: called in the child before the command.
    """
    place = Path(tempfile.mkdtemp(prefix="emrun-output-"))
    child = os.fork()
    if child == 0:
        status = 70
        try:
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), descriptor)
            sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1, closefd=False) for each in (1, 2))
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(number, handler)
            logging.getLogger().handlers.clear()
            plan.Unimported = lambda: SOURCES  # read the sources of torch only once
            os.chdir(cwd)
            sys.path.insert(0, str(cwd))
            sys.argv = ["emrun", *map(str, arguments)]
            if prepare is not None:
                prepare()
            status = main()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    return child, place, ["emrun", *map(str, arguments)]


def finished(command):
    """Wait for a started command; return the process as `subprocess.run` does."""
    child, place, arguments = command
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
    shutil.rmtree(place)
    return subprocess.CompletedProcess(arguments, status, out, err)


def command(*arguments, cwd, prepare=None):
    """Run the command in a forked child until it ends."""
    return finished(began(arguments, cwd, prepare))


def result(directory, names=("latest", "best", "often")):
    """Return those results of a run that must not depend on interruptions."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{**line, "seconds": None} for line in lines],
        "csv": (directory / "training.csv").read_text(),
        "steps": (directory / "steps.jsonl").read_bytes(),
        **{name: (directory / "checkpoints" / name / "model.safetensors").read_bytes() for name in names},
        "left": sorted(path.name for path in directory.rglob("*") if "tmp" in path.name),
    }


def result_of_ranks(directory):
    """Return the metrics and the last weights of a run; if they are sharded, each rank has written its rows of them."""
    metrics = [{**json.loads(line), "seconds": None} for line in (directory / "metrics.jsonl").read_text().splitlines()]
    files = sorted((directory / "checkpoints" / "latest").glob("model*.safetensors"))
    assert files
    return metrics, {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def warm():
    """Do once what costs each child a second: torch imports many modules for its first optimizer; the page of a run."""
    create_model(CONFIG)
    compile_templates()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "Unimported", lambda: SOURCES)
        plan.check_statically(load_config(CONFIG), evaluations=True)


@pytest.fixture(scope="session")
def small(warm):
    """Return a small config and functions that train with it."""
    return SimpleNamespace(
        config=CONFIG,
        forked=forked,
        start_or_resume=start_or_resume,
        result=result,
        result_of_ranks=result_of_ranks,
        began=began,
        finished=finished,
        command=command,
    )


def trained_by_command(place, *overrides):
    """Train the small config by the command in a directory, and return the run."""
    (place / "config.yaml").write_text(json.dumps(CONFIG, indent=2))
    assert command("train", "-q", "config.yaml", "--output-dir", "run", *overrides, cwd=place).returncode == 0
    return place / "run"


@pytest.fixture(scope="session")
def finished_run(small, tmp_path_factory):
    """Return a run of the small config, trained by the command without any fault, to be copied."""
    return trained_by_command(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="session")
def longer_run(small, tmp_path_factory):
    """Return a run as `finished_run`, with an epoch more."""
    return trained_by_command(tmp_path_factory.mktemp("longer"), "hooks.StopAfter.epochs=4")


@pytest.fixture(scope="session")
def expected(finished_run):
    """Return the result of the small config, trained by the command without any fault."""
    return result(finished_run, ("latest", "best"))


@pytest.fixture
def project(tmp_path):
    """Return a directory with the small config."""
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG, indent=2))
    return tmp_path
