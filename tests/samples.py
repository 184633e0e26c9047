"""What the tests of the sample configs share: where they are, and what makes their runs short."""

from pathlib import Path

SAMPLES = Path(__file__).parent.parent / "sample_configs"

SMALL_GPT = [
    "dataset.window=16",
    "model.module.width=16",
    "model.module.layers=1",
    "hooks.LogText.length=20",
    "main_loop.extra_streams=[{valid: {batches: 2}}]",
]
"""Overrides of `char_gpt/config.yaml`."""


def shorter(config):
    """Return overrides with which a short run of a sample, a path in `SAMPLES`, is fast and ends successfully."""
    if config.parent.name == "char_gpt":
        return SMALL_GPT
    return ["~hooks.Check"] if "Check:" in (SAMPLES / config).read_text() else []
