"""What is written to a terminal after the terminal was closed."""

import os
import pty

import pytest

from emrun.base.terminal import leave_closed_terminal


def test_what_is_written_to_a_closed_terminal_is_dropped():
    before = os.dup(2)
    ours, theirs = pty.openpty()
    os.dup2(theirs, 2)
    os.close(theirs)
    try:
        leave_closed_terminal()
        os.write(2, b"seen")
        assert os.read(ours, 100) == b"seen"
        os.close(ours)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(2, b"lost")
        leave_closed_terminal()
        os.write(2, b"dropped")
    finally:
        os.dup2(before, 2)
        os.close(before)
