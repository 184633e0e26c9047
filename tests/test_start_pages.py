"""The pages of docs/start about tasks: the lines that are counted for other tools, and how long sentences are."""

import re
from pathlib import Path

import pytest

START = Path(__file__).parent.parent / "docs" / "start"
TASKS = ("images", "masks", "tables", "series", "text", "language_models")
OWN = (*TASKS, "everything_in_yaml", "peers")
COMMANDS = 3  # train, eval, predict
LONGEST = 40


def text_of(name):
    return (START / f"{name}.md").read_text(encoding="utf-8")


def lines(text):
    """Count lines that are neither blank nor comments; a command of another tool in a comment of its config counts."""
    return sum(bool(line.strip()) and not re.match(r"\s*#(?! (ludwig|yolo) )", line) for line in text.splitlines())


@pytest.mark.parametrize("task", TASKS)
def test_the_lines_of_emrun_and_of_other_tools_are_those_that_the_table_says(task):
    row = re.search(rf"^\| \[[\w ]+\]\({task}\.md\) \| (\d+) \|(.*)$", text_of("peers"), re.MULTILINE)
    config = re.search(r"`[\w.]+`:\n\n```yaml\n(.*?)```", text_of(task), re.DOTALL)[1]
    assert lines(config) <= 25
    assert int(row[1]) == lines(config) + COMMANDS
    for count, file in re.findall(r"\[(\d+)\]\(([\w./]+)\)", row[2]):
        assert int(count) == lines((START / file).read_text(encoding="utf-8")), file


def sentences(text):
    prose = re.sub(r"<!--.*?-->|```.*?```|`[^`]*`|^[#|!].*?$|\]\([^)]*\)", " x ", text, flags=re.DOTALL | re.MULTILINE)
    return [each.split() for each in re.split(r"(?<=[.:;?!])\s|\n\s*\n|\n- ", prose) if len(each.split()) > 2]


def test_sentences_are_short():
    found = [words for name in OWN for words in sentences(text_of(name))]
    assert max(map(len, found)) <= LONGEST
    assert sum(map(len, found)) / len(found) <= 18
