"""What a text dataset gives a model: its tokens counted, and an example decoded with its masks; see `TokenCheck`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from emrun.diagnosis.values import array_of

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_MOST_PARTS = 20
_MOST_TOKENS = 200  # of a part


class TokenCheck:
    """Counts the tokens of a stream and decodes its first example.

    The tokens are the first input with a row of whole numbers for each example. Its masks are the sources with a value
    for each token that have `mask` in their names, are truth values, or are negative for some tokens, as targets that
    a loss leaves out. A place is masked where they are 0 or, of targets, negative.

    Args:
        tokenizer: an object with `decode(tokens)`; the ids that it has as `bos_token_id`, `eos_token_id`,
            `unk_token_id` and `pad_token_id` are counted.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        found = {name: getattr(tokenizer, attribute, None) for name, attribute in _SPECIAL.items()}
        self._special = {name: each for name, each in found.items() if isinstance(each, int)}
        self._counts: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._source: str | None = None
        self._example: dict[str, Any] | None = None

    def add(self, values: Mapping[str, Any], inputs: Sequence[str], ids: Sequence[str]) -> None:
        """Count the tokens of a batch: source -> values."""
        found = {source: rows for source, each in values.items() if (rows := _rows(each)) is not None}
        if self._source is None:
            numbers = (each for each in inputs if each in found and found[each][0].dtype.kind in "iu")
            self._source = next((each for each in numbers if not _is_mask(each, found[each])), None)
        rows = found.pop(self._source or "", None)
        if rows is None:
            return
        alike = {source: each for source, each in found.items() if [*map(len, each)] == [*map(len, rows)]}
        masks = {
            source: [row < 0 if row.dtype.kind == "i" and "mask" not in source else row == 0 for row in each]
            for source, each in alike.items()
            if source in self._masked or _is_mask(source, each)
        }
        self._masked.update({source: sum(int(row.sum()) for row in each) for source, each in masks.items()})
        for row in rows:
            self._count(row)
        if self._example is None:
            places = zip(rows[0].tolist(), *(each[0].tolist() for each in masks.values()), strict=True)
            parts = groupby(
                places, key=lambda place: [name for name, is_on in zip(masks, place[1:], strict=True) if is_on]
            )
            shown = [(by, [token for token, *_ in part]) for by, part in parts][:_MOST_PARTS]
            own = [
                {"masked_by": by, "tokens": len(tokens), "text": str(self._decode(tokens[:_MOST_TOKENS]))}
                for by, tokens in shown
            ]
            self._example = {"id": ids[0], "parts": own}

    def _count(self, row: Any) -> None:
        special = {name: int((row == number).sum()) for name, number in self._special.items()}
        end = self._special.get("eos")
        if end is not None:  # an example with padding has not been cut
            special["truncated"] = int(bool(len(row)) and row[-1] != end and not special.get("padding"))
        self._counts.update({"tokens": len(row), **special})

    def result(self) -> dict[str, Any] | None:
        """Return {source, counts: what -> how many, masked: source -> tokens, example}; None without tokens.

        `example` is {id, parts: [{masked_by, tokens, text}]}: the first example in parts, each with the masks that are
        on there. Of `counts`, `truncated` are examples without an EOS at their end, and without padding.
        """
        if self._example is None:
            return None
        return {"source": self._source, "counts": self._counts, "masked": self._masked, "example": self._example}


def _rows(values: Any) -> list[Any] | None:
    """Return an array for each example of a source that has a row of numbers or truth values for each."""
    entries = array_of(values)
    if entries is None and isinstance(values, list | tuple | np.ndarray):
        entries = [array_of(each) for each in values]
    if entries is None or len(entries) == 0:
        return None
    fits = all(each is not None and getattr(each, "ndim", 0) == 1 and each.dtype.kind in "biuf" for each in entries)
    return [*entries] if fits else None


def _is_mask(source: str, rows: Sequence[Any]) -> bool:
    return "mask" in source or any(
        row.dtype.kind == "b" or (row.dtype.kind == "i" and bool((row < 0).any())) for row in rows
    )
