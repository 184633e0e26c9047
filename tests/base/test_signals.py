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


def in_child(function):
    """Return what a function returns in a forked child."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, repr(function()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD])
def test_a_forked_child_has_the_handlers_that_were_before(number):
    before = repr(signal.getsignal(number))
    with handled({number: signal.SIG_IGN}), Signals([number]), handled({number: lambda number, frame: None}):
        assert in_child(lambda: signal.getsignal(number)) == before
        with handled({number: lambda number, frame: None}):
            signal.signal(number, print)  # the user's own
            assert in_child(lambda: signal.getsignal(number) is print) == "True"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_the_first_signal_of_a_group_has_no_effect_in_a_forked_child(number):
    seen = []

    def twice():
        signal.raise_signal(number)
        return signal.getsignal(number) == before, seen

    before = signal.signal(number, lambda number, frame: seen.append(number))
    outer = signal.getsignal(number)
    with handled({number: lambda number, frame: seen.append(-1)}):
        before, kept = outer, before
        assert in_child(twice) == "(True, [])"
    signal.signal(number, kept)


def test_what_is_ignored_before_stays_ignored_in_a_forked_child():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handled({signal.SIGHUP: lambda number, frame: None}):
        assert in_child(lambda: signal.getsignal(signal.SIGHUP)) == repr(signal.SIG_IGN)
    signal.signal(signal.SIGHUP, kept)
