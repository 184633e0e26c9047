"""Waiting for signals and for the ends of children."""

import os
import signal

from emrun.launch.signals import Signals


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
