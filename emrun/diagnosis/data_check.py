"""Read every stream of a config once, and find what is wrong with the data: see `look_at_data`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from emrun.base.encoding import digest
from emrun.base.errors import StreamError
from emrun.base.randomness import preserved_randomness
from emrun.base.sources import ID, POSITION, is_nested, length, parts
from emrun.base.temporary import temporary_folder
from emrun.base.types import Batch, Json
from emrun.base.wording import counted, in_one_line, listed
from emrun.config.config import Config
from emrun.dataset import stream_function, stream_lengths, stream_names
from emrun.diagnosis.example_store import ExampleStore, in_words
from emrun.diagnosis.values import array_of, not_finite, scalars
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.training.create import create_dataset

_MOST_LABELS = 1_000  # different values of a source with labels
_SHOWN = 5
_FEWEST = 10  # examples; fewer may be equal or sorted by chance
_SIZE = 16  # bytes of a checksum
Bar = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]
"""Begins to show the progress of a stream with a number of batches, if it is known; the result is called per batch."""


@dataclass(slots=True)
class _Source:
    """What is known of a source in a stream."""

    examples: int = 0
    first: bytes | None = None
    is_constant: bool = True
    not_finite: int = 0
    ids: list[str] = field(default_factory=list)  # of the first examples that are not finite
    labels: Counter[Any] | None = field(default_factory=Counter)  # None if the source has no labels


@dataclass(slots=True)
class _Stream:
    """What is known of a stream."""

    batches: int = 0
    examples: int = 0
    is_whole: bool = True
    sources: dict[str, _Source] = field(default_factory=dict)


def look_at_data(config: Config, bar: Bar) -> Json:
    """Read every stream of the dataset once, as an evaluation does, and find what is wrong with the data.

    Two examples are the same if what the model reads of them is, bit for bit: the sources under `model.inputs`, or all
    sources but `id`, and the `position` beside it, if the config has no such list. They are compared by checksums of
    128 bits. They are in conflict if other sources that the loss reads, by `model.loss`, differ. Labels are sources
    that are not inputs, with a whole number, a truth value or a text for each example, and at most 1,000 different
    values. The memory is limited, whatever the number of examples; see `ExampleStore`.

    The order is that of pass 1 of the train stream, which is read as far as is needed to see that the labels are mixed.

    Args:
        config: the config; of its sections, `dataset`, `main_loop` and `model.inputs` are read.
        bar: shows the progress.

    Returns:
        A tree of plain values. `streams`: stream -> {batches, examples, whole, labels: source -> {value -> count}};
        `findings`: [{kind, streams, source, count, examples, message}]. A kind is `leak`, `duplicate`, `conflict`,
        `constant`, `not_finite`, `label_in_one_stream` or `sorted`; `examples` are the first ids, where these are
        known, each with those that it is like; an id is the value of the source `id`, or the number of the example in
        its stream.

    Raises:
        ConfigError: the config cannot be used.
        StreamError: a stream breaks its contract.
        BaseException: any error that the dataset raises.
    """
    with (
        preserved_randomness(),
        temporary_folder("data") as folder,
        closing(ExampleStore(folder / "examples.sqlite")) as store,
    ):
        return _Look(config, create_dataset(config), store, bar).run()


class _Look:
    """Reads the streams and collects what is found."""

    def __init__(self, config: Config, dataset: Any, store: ExampleStore, bar: Bar) -> None:
        self._config = config
        self._dataset = dataset
        self._bar = bar
        self._lengths = stream_lengths(dataset)
        self._inputs = _names_in(_plain(config, "model", "inputs"))
        self._targets = _names_below(_plain(config, "model", "loss"))
        self._train = _plain(config, "main_loop", "train_stream_name") or "train"
        self._streams: dict[str, _Stream] = {}
        self._findings: list[Json] = []
        self.store = store

    def run(self) -> Json:
        """Read all streams; see `look_at_data`."""
        names = stream_names(self._dataset)
        names.sort(key=lambda name: name != self._train)
        for name in names:
            self._read(name)
        self.store.end()
        self._compare(names)
        for name in names:
            self._judge_sources(name)
        self._judge_labels(names)
        if self._train in names:
            self._judge_order()
        return {"streams": {name: self._shown(name) for name in names}, "findings": self._findings}

    def _read(self, name: str) -> None:
        stream = self._streams[name] = _Stream()
        self.store.begin(name)
        limit = _plain(self._config, "main_loop", "fixed_epoch_size") if name == self._train else None
        stream.is_whole = name in self._lengths or not isinstance(limit, int)
        limit = None if stream.is_whole else limit
        total = limit or self._lengths.get(name)
        with self._wrapped(name, limit, training=False) as batches, self._bar(name, total) as advance:
            for batch in batches:
                self._add(name, stream, batch)
                advance()

    def _wrapped(self, name: str, limit: int | None, *, training: bool) -> StreamWrapper:
        """Return a stream as the main loop would read it."""
        settings = {key: _plain(self._config, "main_loop", key) for key in ("buffer", "workers", "start_method")}
        reading = Reading(**{key: value for key, value in settings.items() if value is not None})
        seed = _plain(self._config, "seed")
        return StreamWrapper(
            stream_function(self._dataset, name),
            epoch_size=limit or -1,
            name=name,
            seed=seed if isinstance(seed, int) else 0,
            training=training,
            reading=reading.of(self._dataset),
        )

    def _add(self, name: str, stream: _Stream, batch: Batch) -> None:
        values = dict(parts(batch))
        lengths = {source: length(entries) for source, entries in values.items()}
        if len(set(lengths.values())) > 1 or -1 in lengths.values():
            shown = listed([f"{source} {count}" for source, count in lengths.items()])
            raise StreamError(f"stream {name!r}, batch {stream.batches}: the sources have different lengths ({shown})")
        stream.batches += 1
        count = next(iter(lengths.values()), 0)
        if not count:
            return
        rows = {source: _rows(entries) for source, entries in values.items()}
        ids = _ids(values.get(ID), stream.examples, count)
        stream.examples += count
        for source, source_values in values.items():
            _look_at(stream.sources.setdefault(source, _Source()), source_values, rows[source], ids)
        who = (ID, POSITION) if ID in rows else ()
        inputs = [source for source in rows if self._is_input(source)]
        if not inputs:
            inputs = [source for source in rows if source not in who]
        labels = [source for source in rows if source not in inputs and source in self._targets]
        self.store.add(
            (example, _checksum(rows, inputs, index), _checksum(rows, labels, index) if labels else b"")
            for index, example in enumerate(ids)
        )

    def _is_input(self, source: str) -> bool:
        return source in self._inputs or source.partition(".")[0] in self._inputs

    def _compare(self, names: Sequence[str]) -> None:
        for index, name in enumerate(names):
            for before in names[:index]:
                similar = self.store.in_both(name, before)
                how_many = f"{similar.count:,} of {counted(self._streams[name].examples, 'example')}"
                are = "is" if similar.count == 1 else "are"
                text = f"stream {name!r}: {how_many} {are} also in stream {before!r}: {in_words(similar, before)}"
                self._note("leak", [before, name], None, similar.count, similar.groups, text)
            similar = self.store.twice(name)
            how_many = counted(similar.count, "example")
            text = f"stream {name!r}: {how_many} occurred before in the stream: {in_words(similar)}"
            self._note("duplicate", [name], None, similar.count, similar.groups, text)
        similar = self.store.with_other_labels()
        text = f"{counted(similar.count, 'example')} with the same inputs have different labels: {in_words(similar)}"
        self._note("conflict", list(names), None, similar.count, similar.groups, text)

    def _judge_sources(self, name: str) -> None:
        for source, info in self._streams[name].sources.items():
            shown = in_one_line(source, 60)
            text = (
                f"stream {name!r}, source {shown!r}: {counted(info.not_finite, 'example')} with values that "
                f"are not finite: {listed(info.ids)}"
            )
            self._note("not_finite", [name], source, info.not_finite, [[example] for example in info.ids], text)
            if info.is_constant and info.examples >= _FEWEST:
                text = f"stream {name!r}, source {shown!r}: the same value in all {info.examples:,} examples"
                self._note("constant", [name], source, info.examples, [], text)

    def _judge_labels(self, names: Sequence[str]) -> None:
        for source in dict.fromkeys(source for name in names for source in self._labels(name)):
            having = [name for name in names if source in self._labels(name)]
            if len(having) == 1:
                continue
            for name in having:
                others = {value for other in having if other != name for value in self._labels(other)[source]}
                only_here = {value: n for value, n in self._labels(name)[source].items() if value not in others}
                shown = [f"{_label(value)} ({counted(n, 'example')})" for value, n in list(only_here.items())[:_SHOWN]]
                more = f" and {len(only_here) - _SHOWN} more" if len(only_here) > _SHOWN else ""
                self._note(
                    "label_in_one_stream",
                    [name],
                    source,
                    len(only_here),
                    [],
                    f"source {in_one_line(source, 60)!r}: {counted(len(only_here), 'value')} only in stream "
                    f"{name!r}: {', '.join(shown)}{more}",
                )

    def _judge_order(self) -> None:
        """Read pass 1 of the train stream until the labels are mixed."""
        counts = {
            source: counter for source, counter in self._labels(self._train).items() if counter.total() >= _FEWEST
        }
        sources = [source for source, counter in counts.items() if 2 <= len(counter) <= counter.total() // 2]
        runs: dict[str, list[Any]] = {source: [] for source in sources}  # labels, each once for equal ones in a row
        done = 0
        limit = None if self._streams[self._train].is_whole else self._streams[self._train].batches
        with self._wrapped(self._train, limit, training=True) as batches:
            wanted = batches if runs else ()
            for batch in wanted:
                values = dict(parts(batch))
                done += length(next(iter(values.values()), ()))
                for source, before in list(runs.items()):
                    new = groupby((*before[-1:], *(scalars(values.get(source)) or ())))
                    runs[source] = [*before[:-1], *(label for label, _ in new)]
                    if len({*runs[source]}) < len(runs[source]):
                        del runs[source]  # a label comes back
                if not runs:
                    break
        for source in runs:
            text = (
                f"stream {self._train!r}, source {in_one_line(source, 60)!r}: the examples come sorted by their labels "
                "in training; shuffle them"
            )
            self._note("sorted", [self._train], source, done, [], text)

    def _labels(self, name: str) -> dict[str, Counter[Any]]:
        stream = self._streams[name]
        others = {source: info.labels for source, info in stream.sources.items() if not self._is_input(source)}
        return {
            source: labels
            for source, labels in others.items()
            if source != ID and labels and 2 * len(labels) <= stream.examples
        }

    def _shown(self, name: str) -> Json:
        stream = self._streams[name]
        labels = {
            source: {_label(value): count for value, count in sorted(counter.items(), key=lambda pair: str(pair[0]))}
            for source, counter in self._labels(name).items()
        }
        counts = {"batches": stream.batches, "examples": stream.examples, "whole": stream.is_whole}
        return {**counts, "labels": labels}

    def _note(self, kind: str, streams: list[str], source: str | None, count: int, ids: list[Any], text: str) -> None:
        """Add a finding, unless it counts nothing."""
        if count:
            where = {"kind": kind, "streams": streams, "source": source}
            self._findings.append({**where, "count": count, "examples": ids, "message": text})


def _look_at(info: _Source, values: Any, rows: Sequence[bytes], ids: Sequence[str]) -> None:
    """Add the values of a batch to what is known of a source."""
    info.examples += len(rows)
    info.first = rows[0] if info.first is None else info.first
    info.is_constant = info.is_constant and all(row == info.first for row in rows)
    gaps = [ids[index] for index in not_finite(values)]
    info.not_finite += len(gaps)
    info.ids = [*info.ids, *gaps][:_SHOWN]
    if info.labels is not None:
        labels = scalars(values)
        info.labels.update(labels or ())
        info.labels = info.labels if labels is not None and len(info.labels) <= _MOST_LABELS else None


def _checksum(rows: Mapping[str, Sequence[bytes]], sources: Sequence[str], index: int) -> bytes:
    checksum = hashlib.blake2b(digest_size=_SIZE)
    for source in sources:
        row = rows[source][index]
        checksum.update(f"{source}:{len(row)}:".encode("utf-8", "surrogatepass"))
        checksum.update(row)
    return checksum.digest()


def _rows(values: Any) -> Sequence[bytes]:
    """Return the bytes of each example of a source: its values with their dtype and shape."""
    array = array_of(values)
    if array is not None and array.dtype.kind in "US":
        values = array.tolist()  # the dtype has the length of the longest text of the batch
        array = None
    if array is None:
        return [digest(value).encode() for value in (values.unbind() if is_nested(values) else values)]
    head = f"{array.dtype}{array.shape[1:]}".encode()
    return [head + row.tobytes() for row in np.ascontiguousarray(array)]


def _ids(values: Any, first: int, count: int) -> list[str]:
    """Return the ids of the examples of a batch; without a source of ids, their numbers in the stream."""
    ids = None if values is None else scalars(values)
    return list(map(str, range(first, first + count) if ids is None else ids))


def _label(value: Any) -> str:
    return in_one_line(str(value), 40)


def _names_in(value: Any) -> set[str]:
    """Return the names in a key `inputs`, which is a list or a mapping."""
    entries = value if isinstance(value, list) else [value]
    if isinstance(value, Mapping):
        entries = [entry.get("source", name) if isinstance(entry, Mapping) else entry for name, entry in value.items()]
    return {entry for entry in entries if isinstance(entry, str)}


def _names_below(value: Any) -> set[str]:
    """Return all texts in lists under a key `inputs`, at any depth: the sources and outputs that a loss reads."""
    if isinstance(value, list):
        return {name for item in value for name in _names_below(item)}
    if not isinstance(value, Mapping):
        return set()
    names = {name for key, item in value.items() if key != "inputs" for name in _names_below(item)}
    return names | _names_in(value.get("inputs", ()))


def _plain(config: Config, *path: str) -> Any:
    node = config.tree.get(*path)
    return None if node is None else node.plain()
