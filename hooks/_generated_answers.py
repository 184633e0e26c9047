"""Write answers that a model generates beside those of the data, for `emrun predict --generate 5`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError
from emrun.hooks._shared.columns import Column
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.rows import WritesRows

_LONGEST = 128  # tokens of an answer


class GeneratedAnswers(WritesRows):
    """Writes the last answer of each chat, as it is in the data and as the model generates it.

    Each token is the one with the largest logit. An answer ends with the tokenizer's token for the end of a text, after
    128 tokens, or where the chat is as long as those of the training may be.

    Args:
        stream: the stream.
        file: the file.
        count: the number of chats, those that come first in the stream.

    Attributes:
        rows: the number of rows.
        columns: the names of the columns.
        has_numbers: see `SavePredictions`.
    """

    has_numbers = False

    def __init__(self, stream: str, file: Path, count: int) -> None:
        check_count("generate", count, minimum=1)
        super().__init__(stream, file, "file", None, None, None)
        self._most = count

    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return the beginnings of chats, and their answers.

        Raises:
            StreamError: the examples are not chats.
        """
        if not hasattr(self.dataset, "prompt_of"):
            raise examples.error(f"generate: {type(self.dataset).__name__} has no chats; use the dataset `Chats`")
        rows = range(min(self._most - self._written, examples.count))
        name, ids = examples.named(None, rows)
        raw = self.dataset.tokenizer.raw
        columns: dict[str, Any] = {name: ids, "prompt": [], "answer": [], "generated": []}
        for row in rows:
            try:
                prompt, answer = self.dataset.prompt_of(examples.batch, row)
            except ArgumentError as error:
                raise examples.error(f"generate: {error.message}") from error
            columns["prompt"].append(raw.decode(prompt))
            columns["answer"].append(raw.decode(answer, skip_special_tokens=True).strip())
            generated = self._generated(examples, list(prompt), raw.eos_token_id)
            columns["generated"].append(raw.decode(generated, skip_special_tokens=True).strip())
        return columns

    def _generated(self, examples: Examples, tokens: list[int], end: int | None) -> list[int]:
        """Return the tokens that follow other ones."""
        first = len(tokens)
        for length in range(first, min(first + _LONGEST, self.dataset.longest)):
            shape = (1, length)
            batch = {
                "input_ids": np.array(tokens, np.int64).reshape(shape),
                "attention_mask": np.ones(shape, np.int64),
                "position_ids": np.arange(length).reshape(shape),
            }
            outputs = self.main_loop.model.run(batch, False, self._stream)
            logits = [each for each in outputs.values() if getattr(each, "ndim", 0) == 3]
            if len(logits) != 1:
                raise examples.error("generate: no output, or more than one, has the shape (B, T, tokens)")
            tokens.append(int(logits[0][0, -1].argmax()))
            if tokens[-1] == end:
                break
        return tokens[first:]
