"""Slow steps of the start are logged; a timer that fires at once replaces the two seconds."""

import gc
import logging
import threading
from functools import partial
from pathlib import Path

import pytest

from emrun import MainLoop, create_training
from emrun.base import slow_start
from emrun.hooks import StopAfter

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "majority.yaml"
AT_ONCE = """
import sys
from emrun.base import slow_start

class AtOnce:
    def __init__(self, seconds, function, arguments):
        assert seconds == 2
        self.call = lambda: function(*arguments)
    def start(self):
        self.call()
    def cancel(self):
        pass
    def join(self):
        pass

slow_start.Timer = AtOnce
from emrun.cli import main
sys.exit(main())
"""


class AtOnce:
    """A timer that fires at once, or never."""

    is_over = True
    cancelled = 0

    def __init__(self, seconds, function, arguments):
        self.call = lambda: function(*arguments)

    def start(self):
        if self.is_over:
            self.call()

    def cancel(self):
        type(self).cancelled += 1

    def join(self):
        pass


@pytest.fixture
def at_once(monkeypatch, caplog):
    class Own(AtOnce):
        pass

    caplog.set_level(logging.INFO, "emrun.base.slow_start")
    monkeypatch.setattr(slow_start, "Timer", Own)
    return Own


def named(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "emrun.base.slow_start"]


def test_what_is_slow_is_named_once_in_the_order_of_the_start(at_once, caplog, tmp_path):
    training = create_training(SAMPLE, tmp_path, overrides=["hooks.StopAfter.epochs=1"])
    training.main_loop.run_training()
    assert named(caplog) == [
        "building the dataset...",
        "building the model...",
        "reading and running the first batch...",
    ]
    assert at_once.cancelled >= 3


def test_nothing_is_named_when_nothing_is_slow(at_once, caplog, tmp_path):
    at_once.is_over = False
    create_training(SAMPLE, tmp_path, overrides=["hooks.StopAfter.epochs=1"]).main_loop.run_training()
    assert named(caplog) == []
    assert at_once.cancelled >= 3


def test_a_stream_that_fails_before_its_first_batch_ends_the_wait(at_once, tmp_path):
    class Broken:
        def train_stream(self):
            raise OSError

    training = create_training(SAMPLE, tmp_path, overrides=["hooks.StopAfter.epochs=1"])
    training.main_loop.run.release()
    loop = MainLoop(training.model, Broken(), [StopAfter(epochs=1)])
    before = at_once.cancelled
    with pytest.raises(OSError):
        loop.run_training()
    assert at_once.cancelled == before + 1


@pytest.mark.parametrize("options", [[], ["-q"]], ids=["shown", "quiet"])
def test_the_command_names_the_import_of_pytorch_but_not_when_it_is_quiet(tmp_path, warm, options):
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    command = [str(tmp_path / "at_once.py"), "train", *options, str(SAMPLE), "hooks.StopAfter.epochs=0"]
    done = warm.run(command, tmp_path, timeout=100)
    assert done.returncode == 0
    shown = [
        "importing PyTorch...",
        "building the dataset...",
        "building the model...",
        "reading and running the first batch...",
    ]
    assert [line for line in done.stderr.splitlines() if line.endswith("...")] == ([] if options else shown)


def test_no_thread_is_left_behind():
    before = {*threading.enumerate()}
    with slow_start.NamedWhenSlow("waiting"):
        assert len({*threading.enumerate()} - before) == 1
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_looked_for_in_a_block_and_then_as_before(monkeypatch, was_on):
    monkeypatch.setattr(gc, "isenabled", lambda: was_on)
    calls = []
    for name in ("disable", "enable"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    with pytest.raises(KeyError), slow_start.without_collections():
        assert calls == ["disable"]
        raise KeyError
    assert calls == ["disable", "enable"][: 1 + was_on]
