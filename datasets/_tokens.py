"""The base of datasets of texts, which a tokenizer of transformers makes tokens of."""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.random import Generator

from emrun.base.arguments import check_count, check_flag, check_keys, expanded, similar_folder
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.sources import ID, NEW
from emrun.base.types import Batch, Counts, Json, Named, Strings, Values
from emrun.base.wording import counted, few
from emrun.datasets._division import PARTS
from emrun.datasets._paths import files_of
from emrun.datasets._prepared import Prepared
from emrun.datasets._records import Records
from emrun.datasets._splits import Part
from emrun.stream_context import Array, Rows, StreamContext

AT_ONCE = 1000
"""The number of rows that are encoded together."""
IGNORED = -100
"""A label that losses leave out."""
LABEL = "label"
"""The source with the numbers of classes."""
LONGEST = 10**9
"""The number of tokens of a row that nothing limits."""
_TOKENS = "input_ids"
_LOG = logging.getLogger(__name__)
_USUAL = 32  # examples in a batch
_STEPS = 8  # lengths from one power of two to the next that are told apart
_SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>"}  # of a tokenizer that is learnt
_FEWEST = 256 + len(_SPECIAL) + 1  # tokens, one for each byte
_TEMPLATE = (
    "{% for message in messages %}<begin>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)


class TokenizerForm(TypedDict):
    """The argument `tokenizer` in its long form."""

    name: NotRequired[str]
    learn: NotRequired[int]
    download: NotRequired[bool]
    padding: NotRequired[str]
    template: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of rows.

    Args:
        tokens: the tokens of all rows, one row after the other.
        ends: where each row ends.
        trained: which tokens are trained; None if there are no labels for tokens.
        cut: the number of rows that were longer than allowed.
        is_in_rows: whether these are the rows of the files, not windows of their tokens.
    """

    tokens: Array
    ends: Rows
    trained: Array | None
    cut: int = 0
    is_in_rows: bool = True

    @classmethod
    def of(cls, rows: Sequence[Array], trained: Sequence[Array] | None, cut: int) -> Encoded:
        """Put rows together."""
        empty: Array = np.empty(0, np.int32)
        return cls(
            np.concatenate([empty, *rows]),
            np.cumsum([len(each) for each in rows], dtype=np.int64),
            None if trained is None else np.concatenate([empty.astype(bool), *trained]),
            cut,
        )


class Tokenizer:
    """A tokenizer of transformers, which is loaded when it is used for the first time, or learnt from texts.

    Args:
        form: the argument `tokenizer`.
        who: the dataset, for messages.

    Raises:
        ArgumentError: the argument has another form.
    """

    learnt = ""
    """A tokenizer that was learnt, in the form of the library tokenizers; empty if there is none."""

    def __init__(self, form: str | TokenizerForm, who: str) -> None:
        self.form: Values = {"name": form} if isinstance(form, str) else form
        self._who = who
        given = self.form if isinstance(self.form, Mapping) else {}
        name = given.get("name")
        if isinstance(name, str) == ("learn" in given) or name == "":
            what = "is neither a name or directory nor {name: NAME, ...} nor {learn: 8000}"
            raise ArgumentError("tokenizer", f"{form!r} {what}")
        check_keys("tokenizer", self.form, list(TokenizerForm.__annotations__))
        if name is None:
            check_count("tokenizer.learn", self.form["learn"], minimum=_FEWEST)
        check_flag("tokenizer.download", self.form.get("download", False))
        self.name = name or "the tokenizer that is learnt"
        self._raw: Any = None

    def __getstate__(self) -> Named:
        return {**self.__dict__, "_raw": None}

    @property
    def raw(self) -> Any:
        """The tokenizer of transformers."""
        if self._raw is None:
            self._raw = self._loaded()
        return self._raw

    def learn(self, values: Iterable[Any]) -> None:
        """Learn bytes and frequent parts of words, unless the tokenizer has a name or was learnt before.

        Args:
            values: texts, or lists and mappings that have texts.
        """
        if self.learnt or "learn" not in self.form:
            return
        with needing(self._who, "transformers", "transformers"):
            from tokenizers import Tokenizer as Parts, decoders, models, pre_tokenizers, trainers
        found: Any = Parts(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.form["learn"],
            min_frequency=2,
            special_tokens=[*_SPECIAL.values(), "<begin>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        found.train_from_iterator(_texts_in(values), trainer)
        self.learnt = found.to_str()

    def keep(self, learnt: str) -> None:
        """Take a tokenizer that was learnt before."""
        self.learnt = learnt

    def _loaded(self) -> Any:
        make = self._of_parts if "learn" in self.form else self._of_name
        found = make()
        if "template" in self.form:
            path = expanded(self.form["template"])
            try:
                found.chat_template = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                what = f"{str(path)!r} cannot be read: {reason_of(error)}"
                raise ArgumentError("tokenizer.template", what) from error
        return found

    def _of_parts(self) -> Any:
        """Return the tokenizer that was learnt."""
        with needing(self._who, "transformers", "transformers"):
            from tokenizers import Tokenizer as Parts
            from transformers import PreTrainedTokenizerFast
        if not self.learnt:
            raise ArgumentError("tokenizer", "the run began with another tokenizer; use that one, or train anew")
        found: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Parts.from_str(self.learnt), **_SPECIAL
        )
        found.chat_template = _TEMPLATE
        return found

    def _of_name(self) -> Any:
        with needing(self._who, "transformers", "transformers"):
            from transformers import AutoTokenizer
        name = self.form["name"]
        folder = expanded(name)
        try:
            return AutoTokenizer.from_pretrained(
                str(folder) if folder.is_dir() else name, local_files_only=not self.form.get("download", False)
            )
        except Exception as error:  # the library's own errors, and those of the libraries that it uses
            way = f"a directory that save_pretrained has written, or {{name: {name}, download: true}}"
            is_there = folder.is_dir() or "download" in self.form
            near = similar_folder(folder)
            advice = "" if is_there else f"; neither a directory nor in the cache of transformers{near}: write {way}"
            reason = (reason_of(error).strip() or type(error).__name__).splitlines()[0]
            raise ArgumentError("tokenizer", f"{name!r} cannot be loaded: {reason}{advice}") from error

    @property
    def padding(self) -> int:
        """The token that fills rows of different lengths.

        Raises:
            ArgumentError: there is no such token.
        """
        raw = self.raw
        token = self.form.get("padding", raw.pad_token)
        known = raw.get_vocab()
        if token in known:
            return int(known[token])
        word = raw.eos_token or next(iter(sorted(known, key=known.__getitem__)), "")
        what = "has no padding token" if token is None else f"has no token {token!r} for padding"
        name = self.name
        advice = f"write {{name: {name}, padding: {json.dumps(word)}}}; any token will do, as padding is not seen"
        raise ArgumentError("tokenizer", f"{name!r} {what}; {advice}")

    @property
    def length(self) -> int:
        """The largest number of tokens that the tokenizer says its model takes."""
        return int(min(self.raw.model_max_length, LONGEST))

    @cached_property
    def sha256(self) -> str:
        """A checksum of all that makes tokens of texts."""
        raw = self.raw
        backend = getattr(raw, "backend_tokenizer", None)
        content = json.dumps(raw.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
        template = raw.chat_template
        return hashlib.sha256(f"{content}{json.dumps(template, sort_keys=True)}{self.padding}".encode()).hexdigest()


def _texts_in(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of lists and mappings, and of those in them."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            yield from _texts_in(value.values() if isinstance(value, Mapping) else value)


class TokenRows(Records, Part):
    """The rows of files, of which tokens are made."""

    classes: Sequence[str] = ()
    """The class of each row; empty if rows have no class."""
    _labels: Rows | None = None  # the numbers of the classes

    def classify(self, classes: Sequence[str]) -> None:
        """Take the class of each row."""
        self.classes = classes

    def number(self, names: Strings) -> None:
        """Number the classes.

        Raises:
            ArgumentError: a class is not one of the names.
        """
        numbers = {name: number for number, name in enumerate(names)}
        for row, each in enumerate(self.classes):
            if each not in numbers:
                raise ArgumentError(
                    self.argument, f"{self.where(row)}: the run has no class {each!r} (it has {few(names)})"
                )
        if self.classes:
            self._labels = np.array([numbers[each] for each in self.classes], np.int64)

    def hold(self, encoded: Encoded, padding: int, pack: int | None) -> None:
        """Take the tokens of the rows.

        Args:
            encoded: the tokens.
            padding: the token that fills rows of different lengths.
            pack: the number of tokens of a pack; None if each row is alone.
        """
        self.padding = padding
        self._tokens = encoded.tokens
        self._trained = encoded.trained
        self._is_in_rows = encoded.is_in_rows
        self.lengths = np.diff(encoded.ends, prepend=0)
        self._begins = encoded.ends - self.lengths
        self.trained = self.lengths
        """The number of trained tokens of each row; of its tokens if it has a class."""
        if encoded.trained is not None:
            until = np.concatenate([[0], np.cumsum(encoded.trained)])
            after = np.minimum(self._begins + 1, encoded.ends)  # nothing tells the first token
            self.trained = until[encoded.ends] - until[after]
        self.packs = None if pack is None else Packs(self.lengths[self.trained > 0], pack)
        """Which rows lie together; None if each is alone."""
        self.forget()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.lengths) if hasattr(self, "lengths") else super().__len__()

    def largest(self) -> tuple[int, str]:
        """Return the largest token, and where it is."""
        if self.padding >= self._tokens.max(initial=0):
            return self.padding, "padding"
        place = int(np.argmax(self._tokens))
        row = int(np.searchsorted(self._begins, place, side="right")) - 1
        return int(self._tokens[place]), self.where(row) if self._is_in_rows else self.place

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows, each alone."""
        return self.batch(rows, np.ones(len(rows), np.int64), ctx)

    def batch(self, rows: Rows, counts: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows.

        Args:
            rows: the rows.
            counts: how many of them follow each other in each example.
            ctx: the context of the pass.
        """
        # where each token is, and where it goes
        sizes = self.lengths[rows]
        begins = np.cumsum(sizes) - sizes
        inside = np.arange(sizes.sum()) - np.repeat(begins, sizes)
        source = np.repeat(self._begins[rows], sizes) + inside
        lines = np.repeat(np.arange(len(counts)), counts)
        offsets = begins - begins[np.cumsum(counts) - counts][lines]
        widths = np.bincount(lines, sizes, len(counts)).astype(np.int64)
        shape = (len(counts), int(widths.max(initial=1)))
        place = (np.repeat(lines, sizes), np.repeat(offsets, sizes) + inside)
        # the sources
        tokens = ctx.empty(shape, np.int64)
        tokens[:] = self.padding
        tokens[place] = self._tokens[source]
        batch: Named = {_TOKENS: tokens}
        after = np.arange(shape[1]) - widths[:, None]  # padding is a text of its own
        if self.packs is None:
            batch["attention_mask"] = (after < 0).astype(np.int64)
        else:
            after[place] = inside
            batch["position_ids"] = after
        if self._trained is not None:
            labels = ctx.empty(shape, np.int64)
            labels[:] = IGNORED
            labels[place] = np.where(self._trained[source] & (inside > 0), self._tokens[source], IGNORED)
            batch["labels"] = labels
        if self._labels is not None:
            batch[LABEL] = self._labels[rows]
        if self.ids is not None and len(rows) == len(counts):
            batch[ID] = [self.ids[row] for row in rows.tolist()]
        return batch


class Packs:
    """Which rows lie together: as many as fit, the longest first; rows of one length may change places.

    Args:
        lengths: the number of tokens of each row.
        most: the number of tokens of a pack.
    """

    def __init__(self, lengths: Rows, most: int) -> None:
        packs: list[list[int]] = []
        rooms: list[list[int]] = [[] for _ in range(most + 1)]  # tokens left -> packs
        lefts: list[int] = []  # those of which there are packs, in order
        for place, length in enumerate(np.sort(lengths)[::-1].tolist()):
            index = bisect_left(lefts, length)
            left = lefts[index] if index < len(lefts) else most
            if index == len(lefts):
                packs.append([])
            pack = rooms[left].pop() if index < len(lefts) else len(packs) - 1
            if index < len(lefts) and not rooms[left]:
                lefts.pop(index)
            packs[pack].append(place)
            if not rooms[left - length]:
                insort(lefts, left - length)
            rooms[left - length].append(pack)
        self._places = np.array([place for pack in packs for place in pack], np.int64)
        self._counts = np.array([len(pack) for pack in packs], np.int64)

    def of(self, rows: Rows, lengths: Rows) -> tuple[Rows, Rows]:
        """Return the rows of all packs, and the number of rows of each; rows of one length stay in their order."""
        return rows[np.argsort(-lengths, kind="stable")][self._places], self._counts


class Tokenized(Prepared):
    """Streams of rows of texts.

    A derived class sets what `_encoded` needs, then calls this constructor.

    Args:
        files: `train`, and perhaps `valid` and `test` -> its files; None for no such stream.
        tokenizer: the tokenizer.
        length: the largest number of tokens of a row; None for that of the tokenizer.
        batch_size: the number of examples in a batch; None for 32, or for `batch_tokens`.
        buckets: whether the rows of a train batch have similar lengths.
        batch_tokens: the largest number of tokens in a batch, padding included; None for `batch_size`.
        pack: the number of tokens of a pack of rows; None for no packs.
        id: the column with the names of the rows; None if they only have numbers.
        split: how the rows of `train` are divided; None for not at all.
        preparation: what the run keeps of the data; None for a new run.
        balance: the column of the classes that training passes draw evenly; None to read each row once.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or the files cannot be read, divided or encoded.
    """

    def __init__(
        self,
        files: Values,
        tokenizer: str | TokenizerForm,
        length: int | None,
        batch_size: int | None,
        *,
        buckets: bool,
        batch_tokens: int | None,
        pack: int | None = None,
        id: str | None,
        split: Any,
        preparation: Json | None,
        balance: str | None = None,
    ) -> None:
        self.tokenizer = Tokenizer(tokenizer, type(self).__name__)
        for name, value in {"length": length, "batch_tokens": batch_tokens, "pack": pack}.items():
            if value is not None:
                check_count(name, value, minimum=1)
        check_flag("buckets", buckets)
        if batch_tokens is not None and batch_size is not None:
            raise ArgumentError("batch_tokens", "the batches have either this size or `batch_size`; remove one of them")
        if pack is not None and (buckets or batch_tokens is not None):
            raise ArgumentError("pack", "packs have little padding; remove `buckets` and `batch_tokens`, or `pack`")
        if pack is not None and length is not None and length > pack:
            raise ArgumentError("length", f"{length} tokens do not fit into a pack of {pack}")
        self._given_length = length if length is not None else pack
        self._buckets = buckets or batch_tokens is not None
        self._batch_tokens = batch_tokens
        self._pack = pack
        self._id = id
        size = _USUAL if batch_size is None else batch_size
        super().__init__(files, size, split, preparation, balance)

    fresh_batches = True
    _source: tuple[str, str]
    """The argument that names the column of the texts, and the column."""
    _names: Strings = ()  # of the classes, in the order of their numbers

    @property
    def is_packed(self) -> bool:
        """Whether examples are packs, whose parts must not see each other."""
        return self._pack is not None

    @property
    def num_batches(self) -> Counts:
        """Stream -> number of its batches, if each training pass has as many."""
        found = {**super().num_batches} if self._pack is None and self._batch_tokens is None else {}
        for name, part in self._rows.items():
            found[name] = len(self._planned(part, np.arange(len(part)), None, trains=name == "train")[2])
        if self._balance is not None and self._batch_tokens is not None:
            found.pop("train", None)
        return found

    def lengths(self) -> Counts:
        """Return stream -> number of its rows with a trained token, if its files are those of the run."""
        trained = {name: int(np.count_nonzero(part.trained)) for name, part in self._rows.items()}
        return {**super().lengths(), **trained}

    @property
    def longest(self) -> int:
        """The largest number of tokens of a row."""
        return min(self._given_length or LONGEST, self.tokenizer.length)

    @property
    def _rows(self) -> Mapping[str, TokenRows]:
        """The streams that are open."""
        return cast("Mapping[str, TokenRows]", self._opened)

    @property
    def _learns(self) -> bool:
        return True

    def _learnt(self) -> Json:
        tokenizer = self.tokenizer
        return {"tokenizer": tokenizer.sha256, "tokens": tokenizer.learnt, "classes": list(self._names)}

    def _use(self, learnt: Json) -> None:
        self._names = learnt["classes"]
        self.tokenizer.keep(learnt.get("tokens", ""))

    @property
    def data_numbers(self) -> Counts:
        """How many rows a table of embeddings of the tokens needs."""
        return {f"embeddings.{_TOKENS}": len(self.tokenizer.raw)}

    def _read(self, name: str, files: Any) -> dict[str, TokenRows]:
        rows = TokenRows(name, files_of(name, files))
        if self._id is not None and (name in PARTS or rows.has(self._id)):  # new data may lack it
            rows.name_by(self._id)
        return {name: rows}

    def _complete(self, name: str, part: Any) -> Any:
        tokenizer = self.tokenizer
        if not self._kept:
            tokenizer.learn(part.column(*self._source))
        checksum = tokenizer.sha256  # before texts are cut: the library keeps the length in the tokenizer
        if self._kept and self._kept["learnt"]["tokenizer"] != checksum:
            what = f"{tokenizer.name!r} is not the tokenizer that the run began with"
            raise ArgumentError("tokenizer", f"{what}; use that one, or train anew")
        padding = tokenizer.padding
        length = self.longest
        self._classify(name, part)
        if self._kept:
            part.number(self._names)
        encoded = self._encoded(part, length)
        part.hold(encoded, padding, self._pack)
        unseen = int(np.count_nonzero(part.trained == 0))
        _LOG.info(
            "%s: %s, %s%s%s", name, counted(len(part), "row"), counted(len(encoded.tokens), "token"),
            f"; {encoded.cut} had more than {length} tokens and are cut" if encoded.cut else "",
            f"; {unseen} have no trained token and are left out" if unseen and name != NEW else "",
        )  # fmt: skip
        if unseen == len(part) and name != NEW:
            raise ArgumentError(name, f"{part.place}: no row has a trained token{self._why_untrained(part)}")
        longest = int(np.argmax(part.lengths))
        if self._batch_tokens is not None and part.lengths[longest] > self._batch_tokens:
            what = f"{part.where(longest)} has {part.lengths[longest]} tokens; set as many, or cut rows by `length`"
            raise ArgumentError("batch_tokens", what)
        return part

    def _classify(self, name: str, part: TokenRows) -> None:
        """Give rows their classes, if they have any."""

    def _encoded(self, part: TokenRows, length: int) -> Encoded:
        """Return the tokens of rows, at most `length` each."""
        raise NotImplementedError

    def _why_untrained(self, part: TokenRows) -> str:
        """Return what may be the reason that no row has a trained token, for a message."""
        return ""

    def check_vocabulary(self, size: int) -> None:
        """Check that a table of embeddings has a row for each token of the data.

        Args:
            size: the number of its rows.

        Raises:
            ArgumentError: it has too few.
        """
        for part in self._rows.values():
            token, place = part.largest()
            if token >= size:
                raw = self.tokenizer.raw
                raise ArgumentError(
                    "tokenizer",
                    f"{place}: the token {raw.convert_ids_to_tokens(token)!r} has the number {token}, but the model "
                    f"has {size} tokens; set its vocab_size to {len(raw)}, or use the tokenizer of the model",
                )

    def _batches(self, part: Any, ctx: StreamContext, *, shuffle: bool) -> Iterator[Batch]:
        return self._in_batches(part, np.arange(len(part)), ctx, shuffle=shuffle)

    def _drawn(self, part: Any, order: Rows, ctx: StreamContext) -> Iterator[Batch]:
        return self._in_batches(part, order, ctx, shuffle=True)

    def _in_batches(self, part: Any, order: Rows, ctx: StreamContext, *, shuffle: bool) -> Iterator[Batch]:
        if ctx.in_order:  # a prediction has each row, alone
            counts = np.ones(len(order), np.int64)
            sizes = self._cut(part, order)
        else:
            order, counts, sizes = self._planned(part, order, ctx.rng if shuffle else None, trains=shuffle)
        ends = np.cumsum(counts)
        for places in ctx.batches(len(counts), sizes):  # which follow each other
            begin = ends[places[0]] - counts[places[0]]
            yield part.batch(order[begin : ends[places[-1]]], counts[places], ctx)

    def _planned(
        self, part: Any, order: Rows, random: Generator | None, *, trains: bool
    ) -> tuple[Rows, Rows, list[int]]:
        """Return the rows of a pass in their order, the number of rows of each example, and of examples of each batch.

        Args:
            part: the rows of the stream.
            order: the rows of the pass; those without a trained token are left out.
            random: shuffles; None for the numbers alone.
            trains: whether it is a training pass.
        """
        order = order[part.trained[order] > 0]
        if random is not None:
            order = random.permutation(order)
        counts = np.ones(len(order), np.int64)
        if part.packs is not None:
            order, counts = part.packs.of(order, part.lengths[order])
            sizes = _even(len(counts), self._batch_size)
            return (order, counts, sizes) if random is None else (*_shuffled(order, counts, random), sizes)
        if not (trains and self._buckets):
            return order, counts, self._cut(part, order)
        limits = _limits(part.lengths[order])
        places = np.argsort(limits, kind="stable")
        sizes = self._cut(part, order[places], limits[places])
        order = order[places]
        if random is not None:
            order, turned = _shuffled(order, np.array(sizes), random)
            sizes = turned.tolist()
        return order, counts, sizes

    def _cut(self, part: Any, order: Rows, lengths: Rows | None = None) -> list[int]:
        """Return the number of rows of each batch."""
        most = self._batch_tokens
        if most is None:
            return _even(len(order), self._batch_size)
        sizes = [0]
        longest = 0
        for length in (part.lengths[order] if lengths is None else lengths).tolist():
            longest = max(longest, length)
            if sizes[-1] and (sizes[-1] + 1) * longest > most:
                sizes.append(0)
                longest = length
            sizes[-1] += 1
        return sizes


def _even(count: int, size: int) -> list[int]:
    return [min(size, count - begin) for begin in range(0, count, size)]


def _shuffled(rows: Rows, counts: Rows, random: Generator) -> tuple[Rows, Rows]:
    """Return groups of rows that follow each other in random order, and the number of rows of each."""
    groups = np.split(rows, np.cumsum(counts)[:-1])
    turns = random.permutation(len(counts))
    return np.concatenate([groups[turn] for turn in turns.tolist()]), counts[turns]


def _limits(lengths: Rows) -> Rows:
    """Return the lengths of rows, rounded up to one of a few."""
    steps = np.maximum(2 ** np.floor(np.log2(lengths)).astype(np.int64) // _STEPS, 1)
    limits: Rows = np.minimum(-(-lengths // steps) * steps, lengths.max())
    return limits
