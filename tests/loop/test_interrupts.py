"""Signals that end a training or request a checkpoint."""

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from emrun.base.errors import exit_status
from emrun.hook import TrainingTerminated
from emrun.loop.interrupts import Interrupted, Interrupts

SIGNALS = [signal.SIGINT, signal.SIGTERM]
ENDING = [*SIGNALS, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers():
    """Restore the handlers from before the test; return them."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def woken():
    return []


@pytest.fixture
def interrupts(woken):
    interrupts = Interrupts(lambda: woken.append(True))
    yield interrupts
    interrupts.restore()


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_sets_the_flag_and_wakes_and_does_nothing_else(interrupts, woken, number):
    interrupts.install()
    assert interrupts.ending is None
    os.kill(os.getpid(), number)
    assert interrupts.ending == (number, True)
    assert woken == [True]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_restores_the_default_action_of_both(interrupts, number):
    interrupts.install()
    os.kill(os.getpid(), number)
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize("interrupted", [False, True])
def test_restoring_puts_the_handlers_back_that_were_there_before(interrupts, interrupted):
    def mine(number, frame):
        raise AssertionError

    signal.signal(signal.SIGINT, mine)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.install()
    if interrupted:
        os.kill(os.getpid(), signal.SIGINT)
    interrupts.restore()
    assert [signal.getsignal(number) for number in SIGNALS] == [mine, signal.SIG_IGN]


def test_restoring_twice_or_without_installing_does_nothing(interrupts, handlers):
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
    interrupts.install()
    interrupts.restore()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_installing_again_forgets_the_signal_of_the_training_before(interrupts):
    interrupts.install()
    os.kill(os.getpid(), signal.SIGTERM)
    interrupts.restore()
    assert interrupts.ending == (signal.SIGTERM, True)  # still known after the end
    interrupts.install()
    assert interrupts.ending is None


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_a_termination_with_its_name(number):
    ending = Interrupted(number)
    assert isinstance(ending, TrainingTerminated)
    assert ending.signal == number
    assert ending.reason == f"interrupted by {number.name}"
    assert exit_status(ending) != 0


@pytest.mark.parametrize("ending", [None, signal.SIGTERM])
def test_each_sigusr1_requests_a_checkpoint(interrupts, woken, ending):
    before = signal.getsignal(signal.SIGUSR1)
    interrupts.install()
    if ending is not None:
        os.kill(os.getpid(), ending)
    assert not interrupts.wants_checkpoint
    for _ in range(2):
        woken.clear()
        interrupts.wants_checkpoint = False
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (interrupts.wants_checkpoint, woken) == (True, [True])
    assert interrupts.ending == (ending and (ending, True))
    interrupts.restore()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("policy", "sent", "endings", "is_next_the_last"),
    [
        ("batch", ["SIGINT"], [True], True),
        ("batch", ["SIGHUP", "SIGHUP"], [True, True], True),  # a terminal that closes sends several
        ("batch", ["SIGTERM", "SIGHUP"], [True, True], True),
        ("epoch", ["SIGINT"], [False], False),
        ("epoch", ["SIGTERM"], [True], False),
        ("epoch", ["SIGHUP"], [True], False),
        ("epoch", ["SIGINT", "SIGHUP"], [False, False], False),
        ("epoch", ["SIGINT", "SIGINT"], [False, True], True),
        ("epoch", ["SIGINT", "SIGTERM"], [False, True], True),
        ("epoch", ["SIGTERM", "SIGINT"], [True, True], True),
    ],
)
def test_each_signal_ends_the_training_earlier(woken, policy, sent, endings, is_next_the_last):
    interrupts = Interrupts(lambda: woken.append(True), policy)
    interrupts.install()
    found = []
    for name in sent:
        os.kill(os.getpid(), signal.Signals[name])
        found.append(interrupts.ending.after_batch)
    assert found == endings
    assert [signal.getsignal(each) is signal.SIG_DFL for each in SIGNALS] == [is_next_the_last] * 2
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    interrupts.restore()


def test_the_same_signal_twice_at_once_counts_once_where_it_may_come_twice(woken):
    interrupts = Interrupts(lambda: woken.append(True), "epoch", patience=1000)
    interrupts.install()
    for number, ending in ((signal.SIGINT, False), (signal.SIGINT, False), (signal.SIGTERM, True)):
        os.kill(os.getpid(), number)
        assert interrupts.ending.after_batch == ending
    assert len(woken) == 2
    interrupts.restore()


def test_a_hangup_that_is_ignored_stays_so(interrupts):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert interrupts.ending is None


def test_outside_the_main_thread_nothing_is_installed_and_the_log_says_so(interrupts, handlers, caplog):
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=lambda: (interrupts.install(), interrupts.restore()))
        thread.start()
        thread.join()
    assert {number: signal.getsignal(number) for number in ENDING} == handlers
    assert caplog.messages == [
        "not in the main thread: this training does not handle SIGINT, SIGTERM, SIGHUP and SIGUSR1"
    ]


CHILD = """
import os
from emrun.loop.interrupts import Interrupts
interrupts = Interrupts(lambda: os.write(1, b'noticed\\n'))  # the signal may come within a `print`
interrupts.install()
print('ready', flush=True)
try:
    while interrupts.ending is None:
        pass  # a call that waits could miss a signal that comes just before it
    print('still here', flush=True)
    while True:
        pass
except KeyboardInterrupt:
    print('KeyboardInterrupt', flush=True)
"""


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_second_signal_ends_the_process_at_once(first, second):
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    with child:
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(first)
            assert child.stdout.readline() == "noticed\n"
            assert child.stdout.readline() == "still here\n"
            child.send_signal(second)
            assert child.wait(timeout=30) == -second  # by the signal itself, not by an exception
            assert child.stdout.read() == ""
        finally:
            child.kill()
