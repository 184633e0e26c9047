"""Texts with classes, or to be told token by token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import numpy as np

from emrun.base.arguments import check_choice, check_count
from emrun.base.errors import ArgumentError
from emrun.base.sources import NEW
from emrun.base.types import Json, Strings
from emrun.base.wording import counted
from emrun.datasets._categories import in_order
from emrun.datasets._division import PARTS, SplitForm, filled
from emrun.datasets._paths import Files
from emrun.datasets._tokens import AT_ONCE, LABEL, LONGEST, Encoded, Tokenized, TokenizerForm, TokenRows
from emrun.stream_context import Array

_LOG = logging.getLogger(__name__)


class Text(Tokenized):
    """Texts of CSV, JSON lines and Parquet files as tokens, with their classes, or for a language model.

        dataset:
          class: Text
          train: reviews.jsonl
          text: review
          label: verdict
          tokenizer: tokenizer
          length: 256
          split: {valid: 0.2, by: verdict}
          batch_size: 32

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources: `input_ids`
    and `attention_mask`, int64 of shape (B, T), padded to the longest text of the batch; `label`, int64 of shape (B,),
    the number of the class. With `train_on: all`, there is `labels`, int64 of shape (B, T), instead: the tokens, with
    -100 for padding and for the first token, for a loss such as `emrun.losses.next_token`.

    The classes of all files have the numbers 0, 1, ... in their order. A run keeps their names: `resume`, `eval` and
    `predict` use the same numbers, and a class that the run does not have is an error. A prediction needs no `label`.

    Needs transformers (`pip install 'emrun[transformers]'`), and pyarrow for Parquet files. The network is not used,
    unless `download` is set. A run keeps a checksum of the tokenizer; another tokenizer is an error then.

    Args:
        train: a path, a pattern such as `data/*.jsonl`, or a list of these, of files that end in csv, jsonl, json or
            parquet.
        valid: the files for the stream `valid`, to evaluate on during the training.
        test: the files for the stream `test`, to evaluate on at the end.
        tokenizer: a directory that `save_pretrained` wrote, or a name in the cache of transformers. `{name: NAME,
            download: true}` downloads it if it is not there; `padding: TOKEN` is the token for padding of a tokenizer
            that has none; `{learn: 8000}` learns so many tokens, bytes and frequent parts of words, from the train
            rows, and the run keeps it.
        text: the column with the texts.
        label: the column with the classes.
        train_on: `all` for a language model, which has no `label`: each row is an example, with the tokenizer's token
            for the end of a text.
        window: with `train_on: all`, the texts follow each other, and each example is a window of so many tokens;
            tokens that do not fill a last window are left out.
        length: the largest number of tokens of a text; the rest is cut, and the log has the number of such texts. By
            default what the tokenizer says of its model.
        batch_size: the number of examples in a batch, 32 by default.
        buckets: true to train on batches of texts of similar length, which need less padding; their order is drawn.
        batch_tokens: the largest number of tokens of a batch, padding included, in place of `batch_size`. Train batches
            are made as by `buckets`; there are as many of them in each pass.
        id: the column with names of the rows. Each batch has it as the source `id`, for hooks and predictions.
        split: divides the rows of `train`, see `Table`; any column of the files may be named.
        balance: the column of the classes of which training passes draw the same number of rows, see `Table`.
        preparation: what the run keeps of the data, which emrun supplies.

    Raises:
        ArgumentError: a file cannot be read, a line is cut, a text or class is missing, or the tokenizer cannot be
            used; the message has file and line.
        StreamError: a file that a run reads later cannot be used.
    """

    train_only = ("train", "batch_size", "buckets", "batch_tokens", "balance")

    def __init__(
        self,
        train: Files,
        valid: Files | None = None,
        test: Files | None = None,
        *,
        tokenizer: str | TokenizerForm,
        text: str = "text",
        label: str | None = None,
        train_on: Literal["all"] | None = None,
        window: int | None = None,
        length: int | None = None,
        batch_size: int | None = None,
        buckets: bool = False,
        batch_tokens: int | None = None,
        id: str | None = None,
        split: SplitForm | None = None,
        balance: str | None = None,
        preparation: Json | None = None,
    ) -> None:
        if train_on is not None:
            check_choice("train_on", train_on, Literal["all"])
        if (label is None) == (train_on is None):
            what = "name the column with the classes, or else set `train_on: all` for a language model"
            raise ArgumentError("label", what)
        if window is not None and train_on is None:
            raise ArgumentError("window", "only `train_on: all` has windows; remove it")
        if window is not None:
            check_count("window", window, minimum=2)
            others = {"label": label, "length": length, "id": id, "balance": balance}
            if wrong := [name for name, value in others.items() if value is not None]:
                raise ArgumentError(wrong[0], f"windows of tokens have no {wrong[0]}; remove it, or `window`")
        self._source = ("text", text)
        self._column = label
        self._window = window
        super().__init__(
            {"train": train, "valid": valid, "test": test},
            tokenizer,
            length,
            batch_size,
            buckets=buckets,
            batch_tokens=batch_tokens,
            id=id,
            split=split,
            preparation=preparation,
            balance=balance,
        )
        self._number()

    def _encoded(self, part: TokenRows, length: int) -> Encoded:
        column = self._source[1]
        texts = part.column("text", column)
        is_new = part.argument == NEW
        is_wrong = [not isinstance(each, str) or (is_new and not each.strip()) for each in texts]
        if True in is_wrong:
            wrong = is_wrong.index(True)
            kind = type(texts[wrong]).__name__
            what = {"NoneType": " is missing", "str": " is empty"}.get(kind, f" is a {kind}, not a text")
            raise part.refusal("text", wrong, column, what)
        raw = self.tokenizer.raw
        end = raw.eos_token_id if self._column is None else None
        limit = None if self._window is not None or length == LONGEST else length
        if limit is not None and limit <= raw.num_special_tokens_to_add():
            raise ArgumentError("length", f"{limit} tokens leave none for the text beside those that mark its ends")
        rows: list[Array] = []
        cut = 0
        for begin in range(0, len(texts), AT_ONCE):
            found = raw(texts[begin : begin + AT_ONCE], truncation=limit is not None, max_length=limit)
            for index, tokens in enumerate(found["input_ids"]):
                is_cut = bool(found.encodings and found.encodings[index].overflowing)
                cut += is_cut
                is_open = end is not None and not is_cut and tokens[-1:] != [end] and len(tokens) != limit
                rows.append(np.array([*tokens, end] if is_open else tokens, np.int32))
        trained = None if self._column is not None else [np.ones(len(each), bool) for each in rows]
        encoded = Encoded.of(rows, trained, cut)
        return encoded if self._window is None else self._in_windows(part, encoded, self._window)

    def _in_windows(self, part: TokenRows, encoded: Encoded, window: int) -> Encoded:
        """Return windows of the tokens of all rows.

        Raises:
            ArgumentError: there are too few tokens for one.
        """
        total = len(encoded.tokens)
        ends = np.arange(window, total + 1, window)
        if not len(ends):
            raise ArgumentError(part.argument, f"{part.place}: {total} tokens are too few for a window of {window}")
        if total > ends[-1]:
            rest = counted(total - int(ends[-1]), "token")
            _LOG.info("%s: left out the last %s, which fill no window", part.argument, rest)
        return Encoded(encoded.tokens[: ends[-1]], ends, np.ones(ends[-1], bool), is_in_rows=False)

    def _classify(self, name: str, part: TokenRows) -> None:
        column = self._column
        may_lack = bool(self._kept) and name != "train"
        if column is not None and name in PARTS and (part.has(column) or not may_lack):
            part.classify(filled("label", column, part))

    def _warn_of(self, rows: TokenRows) -> None:
        column = self._column
        labels = rows.texts("label", column) if column is not None and rows.has(column) else ()
        if unknown := [each for each in labels if each is not None and each not in self._names]:
            what = "%s: classes of column %r that the run does not have are ignored, in %s, such as %r"
            _LOG.warning(what, rows.place, column, counted(len(unknown), "row"), unknown[0])

    def _number(self) -> None:
        """Number the classes of all files of a new run."""
        if not self._kept:
            found = {each for part in self._rows.values() for each in part.classes}
            self._names = sorted(found, key=in_order)
            for part in self._rows.values():
                part.number(self._names)

    def _column_of(self, source: str) -> object:
        return self._column if source == LABEL else source

    def classes_names(self) -> Mapping[str, Strings]:
        """Return the names of the classes, in the order of their numbers."""
        return {LABEL: self._names} if self._names else {}

    def use_classes(self, names: Mapping[str, Strings]) -> None:
        """Number the classes as a run does."""
        self._names = names.get(LABEL, self._names)
