"""Chats as tokens, of which the answers are trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError
from emrun.base.sources import NEW
from emrun.base.types import Batch, Json, Named
from emrun.base.wording import listed
from emrun.datasets._division import SplitForm
from emrun.datasets._paths import Files
from emrun.datasets._records import Records
from emrun.datasets._tokens import AT_ONCE, IGNORED, Encoded, Tokenized, TokenizerForm, TokenRows
from emrun.stream_context import Array

_ANSWERS = "assistant"
"""The role whose messages are trained."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What marks answers in a template."""
_SHOWN = 60  # characters of a text in a message
Spans = Sequence[tuple[int, int]]
"""Where answers begin and end in a text."""


class Chats(Tokenized):
    """Chats of JSON lines and Parquet files as tokens, for a language model that learns the answers.

        dataset:
          class: Chats
          train: chats.jsonl
          tokenizer: tokenizer
          pack: 512
          split: {valid: 0.1}
          batch_size: 8

    Each row has a list of messages with `role` and `content`, such as `{"messages": [{"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."}]}`. The chat template of the tokenizer makes one text of them.

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources, int64 of shape
    (B, T): `input_ids`; `attention_mask`; `labels`, the tokens of the answers of role `assistant`, and -100 for all
    others, for `emrun.losses.next_token`. A chat without a trained token is left out, and counted in the log. An answer
    is what the template has between `{% generation %}` and `{% endgeneration %}`. If the template does not mark
    answers, an answer is what the template adds to the chat before it, after the beginning that it prompts for.

    With `pack`, an example is several chats, and `position_ids`, which begin anew with each of them, take the place of
    `attention_mask`. The module must see from them which tokens belong together. Before the training, two chats are run
    together and alone to check this: models of transformers need `use_cache: false` in their config. A prediction has
    each chat alone.

    Needs transformers (`pip install 'emrun[transformers]'`), and pyarrow for Parquet files. The network is not used,
    unless `download` is set. A run keeps a checksum of the tokenizer; another tokenizer is an error then.

    Args:
        train: a path, a pattern such as `data/*.jsonl`, or a list of these, of files that end in jsonl, json, parquet
            or csv, with messages as JSON.
        valid: the files for the stream `valid`, to evaluate on during the training.
        test: the files for the stream `test`, to evaluate on at the end.
        tokenizer: a directory that `save_pretrained` wrote, or a name in the cache of transformers. `{name: NAME,
            download: true}` downloads the tokenizer if it is not there. `padding: TOKEN` is the token for padding of a
            tokenizer that has none. `{learn: 8000}` learns so many tokens, bytes and frequent parts of words, from the
            train rows, and the run keeps the tokenizer. `template: FILE` replaces the tokenizer's chat template.
        messages: the column with the messages.
        train_on: `assistant` trains the answers, `all` all tokens.
        length: the largest number of tokens of a chat; the rest is cut, and the log has the number of such chats. By
            default `pack`, or what the tokenizer says of its model.
        pack: the number of tokens of an example that has several chats; null for one chat each. Packs are filled with
            the longest chats first; chats of one length change places in each pass.
        batch_size: the number of examples in a batch, 32 by default.
        buckets: true to train on batches of chats of similar length, which need less padding; their order is drawn.
        batch_tokens: the largest number of tokens of a batch, padding included, in place of `batch_size`. Train batches
            are made as by `buckets`; there are as many of them in each pass.
        id: the column with names of the rows. Each batch has it as the source `id`, except with packs.
        split: divides the rows of `train`, see `Table`; any column of the files may be named.
        preparation: what the run keeps of the data, which emrun supplies.

    Raises:
        ArgumentError: a file cannot be read, a line is cut, a message has no role or content, the template refuses a
            chat or does not show its answers, or the tokenizer cannot be used; the message has file and line.
        StreamError: a file that a run reads later cannot be used.
    """

    train_only = ("train", "batch_size", "buckets", "batch_tokens")

    def __init__(
        self,
        train: Files,
        valid: Files | None = None,
        test: Files | None = None,
        *,
        tokenizer: str | TokenizerForm,
        messages: str = "messages",
        train_on: Literal["assistant", "all"] = "assistant",
        length: int | None = None,
        pack: int | None = None,
        batch_size: int | None = None,
        buckets: bool = False,
        batch_tokens: int | None = None,
        id: str | None = None,
        split: SplitForm | None = None,
        preparation: Json | None = None,
    ) -> None:
        check_choice("train_on", train_on, Literal["assistant", "all"])
        self._source = ("messages", messages)
        self._trains_all = train_on == "all"
        self._roles: dict[str, None] = {}  # of all chats
        super().__init__(
            {"train": train, "valid": valid, "test": test},
            tokenizer,
            length,
            batch_size,
            buckets=buckets,
            batch_tokens=batch_tokens,
            pack=pack,
            id=id,
            split=split,
            preparation=preparation,
        )

    def _encoded(self, part: TokenRows, length: int) -> Encoded:
        raw = self.tokenizer.raw
        if not raw.chat_template:
            what = "has no chat template; write {name: NAME, template: FILE} with a file that has one, in Jinja"
            raise ArgumentError("tokenizer", f"{self.tokenizer.name!r} {what}")
        if not raw.is_fast:
            raise ArgumentError("tokenizer", "it does not tell where tokens are in the text; use a fast tokenizer")
        values = part.column(*self._source)
        rows: list[Array] = []
        trained: list[Array] = []
        cut = 0
        for begin in range(0, len(values), AT_ONCE):
            chats = [self._rendered(part, row, values[row]) for row in range(begin, min(begin + AT_ONCE, len(values)))]
            found = raw(
                [text for text, _ in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            for tokens, offsets, (_, spans) in zip(found["input_ids"], found["offset_mapping"], chats, strict=True):
                first, last = np.array(offsets, np.int64).reshape(-1, 2).T
                is_trained = np.full(len(tokens), self._trains_all)
                for start, end in spans:
                    is_trained |= (first < end) & (last > start) & (last > first)
                rows.append(np.array(tokens[:length], np.int32))
                trained.append(is_trained[:length])
                cut += len(tokens) > length
        return Encoded.of(rows, trained, cut)

    def _rendered(self, part: TokenRows, row: int, value: Any) -> tuple[str, Spans]:
        """Return a chat as a text, and where its answers are.

        Raises:
            ArgumentError: it has another form, or the template refuses it.
        """
        try:
            messages = _messages_of(value)
            self._roles.update(dict.fromkeys(each["role"] for each in messages))
            return self._with_spans(messages, is_new=part.argument == NEW)
        except ArgumentError:
            raise
        except _Refused as error:
            raise part.refusal("messages", row, self._source[1], f": {error}") from error
        except Exception as error:  # of the template, which is code of others
            what = f": the chat template refuses the chat: {error}"
            raise part.refusal("messages", row, self._source[1], what) from error

    def _with_spans(self, messages: Sequence[Named], *, is_new: bool) -> tuple[str, Spans]:
        raw = self.tokenizer.raw
        if self._trains_all:
            return raw.apply_chat_template(messages, tokenize=False), ()
        if is_new and messages[-1]["role"] != _ANSWERS:
            return raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), ()
        template = raw.get_chat_template()
        if _MARKED.search(template):
            from transformers.utils.chat_template_utils import render_jinja_template

            rendered: Any = render_jinja_template(
                conversations=[[*messages]],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **raw.special_tokens_map,
            )
            return rendered[0][0], rendered[1][0]
        answers = [index for index, each in enumerate(messages) if each["role"] == _ANSWERS]
        if answers[:1] == [0]:
            raise _Refused("it begins with an answer, whose beginning only {% generation %} in the template can tell")
        chats = [messages, *(messages[: index + 1] for index in answers)]
        whole, *ends = raw.apply_chat_template(chats, tokenize=False)
        begins = [
            raw.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True) for index in answers
        ]
        for shorter, longer in [*zip(begins, ends, strict=True), *((end, whole) for end in ends)]:
            if not longer.startswith(shorter):
                raise _Refused(_apart(shorter, longer))
        return whole, [(len(begin), len(end)) for begin, end in zip(begins, ends, strict=True)]

    def prompt_of(self, batch: Batch, row: int) -> tuple[Array, Array]:
        """Return the tokens of a chat before its last answer, and those of the answer.

        Args:
            batch: a batch of chats that are alone, as in a prediction.
            row: the number of the chat in the batch.

        Raises:
            ArgumentError: the labels do not tell where answers begin.
        """
        if self._trains_all:
            raise ArgumentError("train_on", "`all` does not tell which tokens are answers; set `train_on: assistant`")
        tokens = np.asarray(batch["input_ids"][row])
        is_trained = np.asarray(batch["labels"][row]) != IGNORED
        is_own = (
            batch["attention_mask"][row] if self._pack is None else batch["position_ids"][row] == range(len(tokens))
        )
        size = np.count_nonzero(is_own)
        turns = np.flatnonzero(np.diff(is_trained, prepend=False, append=False))  # where answers begin and end
        begin, end = [size, size, *turns][-2:]  # a chat may wait for its answer
        return tokens[:begin], tokens[begin:end]

    def _why_untrained(self, part: TokenRows) -> str:
        has = f"the messages have the roles {listed(list(self._roles))}"
        return f"; only those of role {_ANSWERS!r} are trained, as far as `length` leaves them, and {has}"


class _Refused(Exception):
    """A chat that cannot be used."""


def chats_in(rows: Records, column: str) -> list[list[Named]]:
    """Return the messages of all rows of files.

    Raises:
        ArgumentError: a row has another form.
    """
    found = []
    for row, value in enumerate(rows.column("messages", column)):
        try:
            found.append(_messages_of(value))
        except _Refused as error:
            raise rows.refusal("messages", row, column, f": {error}") from error
    return found


def _messages_of(value: Any) -> list[Named]:
    """Return the messages of a chat, without keys that have no value.

    Raises:
        _Refused: they have another form.
    """
    if isinstance(value, str):  # of a CSV file
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _Refused(f"{error}; write a list of messages as JSON") from error
    if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
        what = "is missing" if value is None else f"{str(value)[:_SHOWN]!r} is not a list of messages"
        raise _Refused(f"{what} such as [{{role: user, content: Hi}}]")
    found = [{key: each for key, each in message.items() if each is not None} for message in value]
    for number, message in enumerate(found, start=1):
        for key in ("role", "content"):
            if key not in message and not (key == "content" and "tool_calls" in message):
                raise _Refused(f"message {number} has no {key!r}, but {listed(list(message))}")
        for key in ("role", "content"):
            if not isinstance(message.get(key, ""), str):
                what = f"{key!r} of message {number} is a {type(message[key]).__name__}, not a text"
                raise _Refused(what)
    return found


def _apart(shorter: str, longer: str) -> str:
    """Return what tells that a text does not begin with another one, for a message."""
    place = next((index for index, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    begin = max(0, place - _SHOWN // 2)
    here = shorter[begin : begin + _SHOWN]
    there = longer[begin : begin + _SHOWN]
    return (
        f"the template changes what comes before an answer: {here!r} becomes {there!r} at character {begin}; mark the "
        "answers in the template by {% generation %} and {% endgeneration %}, or set `train_on: all`"
    )
