"""docs/start/coming_from*.md: what the tables say to write is valid."""

import re
from pathlib import Path

import pytest
from test_ancestors import MINIMAL

from emrun.cli import emrun as commands
from emrun.config.config import load_config
from emrun.config.names import dotted_path
from emrun.config.plan import check_statically

START = Path(__file__).parent.parent / "docs" / "start"
PAGES = sorted(START.glob("coming_from*.md"))
CELLS = [row for page in PAGES for row in re.findall(r"^\|.* \| ([^|]*) \|$", page.read_text(encoding="utf-8"), re.M)]
CODE = [code for cell in CELLS for code in re.findall(r"`([^`]+)`", cell)]
HOOKS = sorted({code for code in CODE if re.match(r"[A-Z]\w+(: \{|$)", code)} - {"TorchDataset"})
KEYS = sorted({code for code in CODE if re.match(r"(model|main_loop)\.\w+: ", code)})
COMMANDS = sorted({code.split()[1] for code in CODE if re.match(r"emrun [a-z]", code)})


def test_there_is_a_page_for_each_origin():
    assert [page.stem.partition("from_")[2] for page in PAGES] == ["", "loop", "ludwig", "mmengine", "ultralytics"]
    assert min(len(HOOKS), len(KEYS), len(COMMANDS)) > 4


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_a_page_names_is_a_valid_entry(hook, tmp_path):
    assert dotted_path(hook.partition(":")[0], "hook") is not None
    if ": {" in hook:
        check(f"hooks:\n  - {hook}\n", tmp_path)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_a_page_names_is_valid(key, tmp_path):
    section, _, entry = key.partition(".")
    check(f"{section}: {{{entry}}}\n".replace("PATH", "begin.pt").replace("REGEX", "head"), tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_a_page_names_is_there(name):
    assert name in commands.commands


def check(text, folder):
    (folder / "base.yaml").write_text(MINIMAL)
    (folder / "config.yaml").write_text(f"extends: base.yaml\n{text}")
    check_statically(load_config(str(folder / "config.yaml")))
