"""Handlers of signals for a block."""

import signal
import threading

import pytest

from emrun.base.signals import handled, unless_ignored


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
