"""Tables and lines fit into the terminal, and are whole elsewhere."""

import fcntl
import io
import logging
import os
import pty
import shlex
import struct
import termios

import click
import pytest
from wcwidth import wcswidth

from emrun.base.tables import Table, folded_command, folded_line, width
from emrun.base.wording import few
from emrun.cli.console import _TerminalHandler

LONG = Table(
    [["loaded", "148", "11,169,152", "bn1.weight, bn1.bias, conv1.weight, +145"], ["not loaded: shape", "2", "", "fc"]],
    ["weights from a/very/long/name/of_a_run_directory-20261126-021500", "tensors", "values", ""],
    ["left", "right", "right", "left"],
)


class Terminal(io.StringIO):
    def __init__(self, columns):
        super().__init__()
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def fileno(self):
        return self.theirs

    def isatty(self):
        return True

    def close(self):
        for each in (self.ours, self.theirs):
            os.close(each)
        super().close()


@pytest.fixture
def terminal():
    made = []

    def make(columns):
        made.append(Terminal(columns))
        return made[-1]

    yield make
    for each in made:
        each.close()


def letters(text):
    return sorted("".join(text.replace("-", "").split()))


def test_a_terminal_has_a_width_and_a_file_has_none(terminal, tmp_path):
    assert width(terminal(100)) == 100
    assert width(terminal(0)) == 80
    assert width(None) is None
    assert width(io.StringIO()) is None
    with (tmp_path / "a").open("w") as file:
        assert width(file) is None


@pytest.mark.parametrize("space", [60, 80, 100])
def test_a_table_is_folded_and_loses_nothing(space):
    lines = LONG.folded(space).splitlines()
    assert max(map(len, lines)) <= space < max(map(len, str(LONG).splitlines()))
    assert any("148  11,169,152  bn1.weight" in line for line in lines)
    assert letters(LONG.folded(space)) == letters(str(LONG))


@pytest.mark.parametrize("space", [60, 80, 200])
def test_wide_letters_take_two_columns(space):
    table = Table(
        [["数据集" * 10, "1", "a" * 30], ["b", "2", "模型" * 15]], ["名前", "n", "what"], ["left", "right", "left"]
    )
    lines = table.folded(space).splitlines()
    assert max(map(wcswidth, lines)) <= space
    assert letters(table.folded(space)) == letters(str(table))
    begins = {wcswidth(line[: line.index(each)]) for line in lines for each in ("1  a", "2  模") if each in line}
    assert len(begins) == 1


def test_a_table_that_fits_is_whole():
    assert LONG.folded(None) == str(LONG) == LONG.folded(200)
    assert Table([["a", "bc"], ["d", "e"]]).folded(80) == "a  bc\nd  e"
    assert len(Table([], ["stream", "dtype"]).folded(8).splitlines()) == 2


def test_more_columns_than_fit_are_in_a_second_table_with_the_first_column_again():
    table = Table([["run-1", *(f"{n}.12345678" for n in range(9))]], ["run", *"abcdefghi"], ["left", *["right"] * 9])
    tables = [part.splitlines() for part in table.folded(80).split("\n\n")]
    assert [part[0].split() for part in tables] == [["run", *"abcdef"], ["run", *"ghi"]]
    assert [part[2].split()[0] for part in tables] == ["run-1", "run-1"]
    assert max(len(line) for part in tables for line in part) <= 80


def test_a_line_of_columns_is_folded_between_them():
    line = "epoch 3  train  loss 0.0791  accuracy 0.9824  gradient_norm 1.1766  lr 0.003  0.0205 s"
    assert folded_line(line, 80).splitlines() == [line[:77].rstrip(), "    0.0205 s"]
    assert folded_line(line, None) == folded_line(line, 100) == line


def test_prose_is_folded_between_words_and_a_command_in_it_is_not():
    prose = "the tracker did not take all rows; `emrun resume log/tumours_20261126-021500 -v` sends the others"
    assert folded_line(prose, 60).splitlines() == [
        "the tracker did not take all rows;",
        "    `emrun resume log/tumours_20261126-021500 -v` sends the",
        "    others",
    ]
    told = "saved the batch and the weights in log/first/failures/3; repeat the step with: emrun replay log/failures/3"
    assert folded_line(told, 60).splitlines() == [
        "saved the batch and the weights in log/first/failures/3;",
        "    repeat the step with:",
        "    emrun replay log/failures/3",
    ]
    assert folded_line(told, None) == told


def test_a_command_to_paste_is_folded_between_its_words():
    words = ["emrun", "train", "my config.yaml", "hooks.StopAfter.epochs=3", "--output-dir", "log/a_long_name_of_a_run"]
    assert folded_command("next", words, None) == f"next: {shlex.join(words)}"
    lines = folded_command("next", words, 50).splitlines()
    assert lines == [
        "next: emrun train 'my config.yaml' \\",
        "    hooks.StopAfter.epochs=3 --output-dir \\",
        "    log/a_long_name_of_a_run",
    ]
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["next:", *words]


def test_lists_of_names_are_shortened():
    assert few(f"layers.{n}.weight" for n in range(38)).endswith("layers.3.weight, +34")
    assert few((f"layers.{n}.weight" for n in range(38)), 20) == "layers.0.weight, +37"
    assert few(["a" * 50, "b"], 20) == f"{'a' * 50}, +1"
    assert few([]) == "nothing"


def test_the_log_on_a_terminal_is_folded_and_that_in_a_file_is_whole(terminal):
    record = logging.LogRecord("emrun", logging.INFO, "", 0, "weights from %s:\n%s", ("a", LONG), None)
    shown = _TerminalHandler(terminal(80)).format(record).splitlines()
    assert shown[0] == "weights from a:"
    assert max(map(len, shown)) <= 80
    assert _TerminalHandler(io.StringIO()).format(record) == record.getMessage() == f"weights from a:\n{LONG}"
    warning = logging.LogRecord("emrun", logging.WARNING, "", 0, "the %s", ("same " * 12 + "again",), None)
    shown = _TerminalHandler(terminal(60)).format(warning).splitlines()
    assert [len(line) <= 60 for line in map(click.unstyle, shown)] == [True, True]
    assert click.unstyle(" ".join(line.strip() for line in shown)) == f"warning: the {'same ' * 12}again"
