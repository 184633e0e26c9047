"""What the tests of the sample configs share: where they are, and what makes their runs short."""

import sys
from pathlib import Path

SAMPLES = Path(__file__).parent.parent / "sample_configs"

SMALL = [
    "model.module.width=16",
    "model.module.layers=1",
    "main_loop.extra_streams=[{valid: {batches: 2}}]",
]
"""Overrides of language models."""
SMALL_GPT = [*SMALL, "dataset.window=16", "hooks.LogText.length=20"]
"""Overrides of `char_gpt/config.yaml`."""


def shorter(config):
    """Return overrides with which a short run of a sample, a path in `SAMPLES`, is fast and ends successfully."""
    if config.parent.name == "char_gpt":
        return SMALL_GPT
    if config.parent.name in ("detection", "reinforce"):
        return ["main_loop.extra_streams=[{valid: {batches: 2}}]"]
    if config.parent.name == "language_model":
        return [*SMALL, "dataset.valid=my_model.py"]  # a short text
    return ["~hooks.Check"] if "Check:" in (SAMPLES / config).read_text() else []


def own_modules(place, monkeypatch):
    """Let this process import the modules in a folder; at the end of the test, it forgets them."""
    monkeypatch.syspath_prepend(place)
    for module in place.glob("*.py"):
        monkeypatch.setitem(sys.modules, module.stem, None)  # undone at the end, whatever is imported meanwhile
        del sys.modules[module.stem]
