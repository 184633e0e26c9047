"""docs/about/ancestors.md: every name of an ancestor leads somewhere, and what the page says to write is valid."""

import re
from pathlib import Path

import pytest

from emrun.config.config import load_config
from emrun.config.names import dotted_path, instead
from emrun.config.plan import check_statically

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "about" / "ancestors.md").read_text(encoding="utf-8")
ROWS = [(*row, index) for index, row in enumerate(re.findall(r"^\| (`.*?) \| (.*) \|$", TEXT, re.MULTILINE))]
OF_HOOKS = [(name, written) for old, written, _ in ROWS for name in re.findall(r"`([A-Z]\w+)`", old)]
ENTRIES = [each for _, written, _ in ROWS for each in re.findall(r"`([A-Z]\w+(?:: \{.*?\})?)`", written)]
MINIMAL = """
dataset: {class: Digits}
model:
  module: {class: torch.nn.Linear, in_features: 64, out_features: 10}
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  optimizer: {class: Adam}
"""


def test_the_page_names_the_hooks_of_all_five():
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert headings == ["emloop", "LibKGE", "Blocks", "AIToolbox", "xlstm-jax", "What is left out"]
    assert len(OF_HOOKS) > 70


def test_the_samples_that_the_page_names_are_there():
    cells = re.findall(r"^\|[^|]*\|[^|]*\| `(\w+)` \|$", TEXT, re.MULTILINE)
    there = {path.stem for path in (ROOT / "sample_configs").iterdir()}
    assert {*cells} <= there
    assert len({*cells}) > 7


@pytest.mark.parametrize("name", sorted({name for name, _ in OF_HOOKS}))
def test_a_config_with_the_old_name_works_or_says_what_to_write(name):
    try:
        is_there = dotted_path(name, "hook") is not None
    except LookupError:
        is_there = False
    assert is_there or instead(name, "hook")


@pytest.mark.parametrize("entry", sorted(set(ENTRIES)))
def test_what_the_page_says_to_write_is_a_valid_entry(entry, tmp_path):
    name, _, arguments = entry.partition(": ")
    assert dotted_path(name, "hook") is not None
    if arguments:
        path = tmp_path / "config.yaml"
        path.write_text(f"{MINIMAL}hooks:\n  - {entry}\n")
        check_statically(load_config(str(path)))
