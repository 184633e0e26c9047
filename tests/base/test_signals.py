"""Handlers of signals for a block."""

import os
import signal
import threading

import pytest

from emrun.base.signals import Signals, handled, unless_ignored


def test_signals_are_handled_in_the_block_only():
    before, seen = signal.getsignal(signal.SIGUSR1), []
    with (
        pytest.raises(ZeroDivisionError),
        handled({signal.SIGUSR1: lambda number, frame: seen.append(number), signal.SIGUSR2: signal.SIG_IGN}),
    ):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        1 / 0
    assert seen == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_in_another_thread_nothing_is_changed():
    before = signal.getsignal(signal.SIGUSR1)

    def run():
        with handled({signal.SIGUSR1: signal.SIG_IGN}):
            found.append(signal.getsignal(signal.SIGUSR1))

    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_hangup_that_is_ignored_stays_ignored():
    with handled({signal.SIGHUP: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        assert unless_ignored([signal.SIGTERM, signal.SIGHUP]) == [signal.SIGTERM]
    with handled({signal.SIGHUP: signal.SIG_DFL}):
        assert unless_ignored([signal.SIGTERM, signal.SIGHUP]) == [signal.SIGTERM, signal.SIGHUP]


def test_the_end_of_a_child_ends_a_wait():
    with Signals() as signals:
        child = os.posix_spawn("/bin/true", ["true"], {})
        signals.wait(60)
        assert os.waitpid(child, os.WNOHANG) == (child, 0)
        assert signals.pending == []


def test_a_signal_that_came_before_a_wait_ends_it():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.wait(60)
        assert signals.pending == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
