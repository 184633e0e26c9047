"""`emrun check CONFIG --data` of text datasets: tokens are counted, and an example is decoded with its masks."""

import numpy as np
import pytest
import torch

from emrun.cli.check import _data
from emrun.config.config import load_config
from emrun.datasets.token_windows import TokenWindows
from emrun.diagnosis.data_check import look_at_data
from emrun.diagnosis.token_check import TokenCheck
from tests.diagnosis.test_data_check import no_bar


class Words:
    """Decodes numbers as letters."""

    pad_token_id, bos_token_id, eos_token_id, unk_token_id = 0, 1, 2, 3

    def decode(self, tokens):
        return "".join("_<>?abcdefgh"[token] for token in tokens)


TOKENS = np.array([[1, 4, 5, 3, 2, 0], [1, 4, 5, 6, 7, 8], [1, 4, 5, 6, 7, 2]])
COUNTS = {"tokens": 18, "bos": 3, "eos": 2, "unknown": 1, "padding": 1, "truncated": 1}


def test_special_tokens_are_counted_and_an_example_is_cut_where_its_masks_change():
    targets = np.where(np.arange(6) < 2, -100, TOKENS)
    check = TokenCheck(Words())
    check.add(
        {"attention_mask": TOKENS != 0, "tokens": TOKENS, "other": TOKENS[:, :2], "targets": targets},
        ["attention_mask", "tokens"],
        ["a", "b", "c"],
    )
    mask = (TOKENS != 0).astype(float)
    check.add(
        {"attention_mask": mask, "tokens": TOKENS, "targets": abs(targets), "z": mask - 1}, ["tokens"], ["d", "e", "f"]
    )
    assert check.result() == {
        "source": "tokens",
        "counts": {name: 2 * count for name, count in COUNTS.items()},
        "masked": {"attention_mask": 2, "targets": 6},
        "example": {
            "id": "a",
            "parts": [
                {"masked_by": ["targets"], "tokens": 2, "text": "<a"},
                {"masked_by": [], "tokens": 3, "text": "b?>"},
                {"masked_by": ["attention_mask"], "tokens": 1, "text": "_"},
            ],
        },
    }


@pytest.mark.parametrize("form", [torch.from_numpy, list, lambda tokens: [torch.from_numpy(row) for row in tokens]])
def test_tokens_may_be_tensors_and_lists(form):
    check = TokenCheck(Words())
    check.add({"x": np.ones((3, 2)), "label": np.ones(3, int), "tokens": form(TOKENS)}, ["x", "label", "tokens"], "abc")
    assert check.result()["counts"] == COUNTS


def test_ids_that_the_tokenizer_does_not_tell_are_not_counted():
    class Plain:
        decode = Words.decode
        eos_token_id = None

    check = TokenCheck(Plain())
    assert check.result() is None
    check.add({"tokens": [row[: 6 - n] for n, row in enumerate(TOKENS)]}, ["tokens"], "abc")
    assert check.result()["counts"] == {"tokens": 15}


def test_token_windows_without_a_tokenizer_are_decoded_as_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße " * 20, encoding="utf-8")
    config = load_config(
        {
            "dataset": {"class": "TokenWindows", "train": str(tmp_path / "a.txt"), "window": 40, "separator": 256},
            "model": {"inputs": ["tokens"], "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["y", "targets"]}},
        }
    )
    found = look_at_data(config, no_bar)
    tokens = found["streams"]["train"]["tokens"]
    assert tokens["counts"] == {"tokens": 160}
    assert tokens["example"]["parts"] == [
        {"masked_by": [], "tokens": 40, "text": ("Grüße " * 20).encode()[:40].decode()}
    ]
    printed = "\n".join(_data(found))
    assert "train, example 0" in printed
    assert "Grüße Grüße" in printed
    assert TokenWindows(str(tmp_path / "a.txt"), window=8, tokenizer=Encode()).tokenizer.decode([1]) == "[1]"


class Encode:
    """A tokenizer of one's own."""

    def encode(self, text):
        return [*text.encode()]

    def decode(self, tokens):
        return str(tokens)
