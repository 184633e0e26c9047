"""Datasets and data loaders that were written for torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
)

from emrun.base.arguments import check_count, check_names
from emrun.base.encoding import GENERATORS
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.randomness import preserved_randomness, seed_everything, seed_generators
from emrun.base.types import Batch, Counts, Json, Named, Policy, Strings, Values
from emrun.base.wording import counted, listed, meant_of
from emrun.datasets._division import Readable, Split, SplitForm, check_form
from emrun.datasets._examples import ExampleReader
from emrun.datasets._splits import ThreeStreams, has_only
from emrun.datasets._transforms import ADVICE, OwnDraws
from emrun.stream_context import Rows, StreamContext
from emrun.streams.stream_pass import is_stateful


class TorchDataset(ThreeStreams):
    """Any dataset or data loader that was written for torch, used without changes.

        dataset:
          class: TorchDataset
          train: {class: my_data.Points, count: 300}
          valid: {class: my_data.Points, count: 60}
          sources: [x, label]
          batch_size: 32

    Streams: `train`, and `valid` and `test` if they are given. Each of them is one of these:

    - A map-style dataset, with `__getitem__` (or also `__getitems__`) and `__len__`. It is shuffled in every training
      pass, or read in the order of `sampler`; evaluations read it in its own order. A resume in the middle of a pass
      skips the examples that were read before.
    - An `IterableDataset`, or any object that can be iterated again for each pass, which is read in its own order. A
      resume in the middle of a pass loads the state of the object if it has `state_dict` and `load_state_dict`.
      Otherwise, the pass is read again up to its position, as it is if the state does not lead there: a streamed
      dataset of Hugging Face that is shuffled keeps rows in a buffer, which its state lacks.
    - A `DataLoader`, which makes the batches itself. Its generator and that of its sampler are seeded for each pass. A
      resume reads the pass again up to its position, or loads the state of a `StatefulDataLoader` of torchdata
      (`pip install 'emrun[data]'`). A loader with its own `num_workers` needs `main_loop.workers: 0`.

    Sources: the keys of the items if these are mappings, otherwise the fields of the items, named by `sources`. They
    are tensors with the dtypes that `collate` gives them. If the dataset, the loader or the sampler has a method
    `set_epoch`, it is called with the number of each pass (0 for evaluations), also inside of torch's `Subset`,
    `ConcatDataset`, `StackDataset` and `ChainDataset`. Workers of a loader that persist have a copy of the dataset and
    do not see this, unless the dataset keeps the number in shared memory.

    Items of a map-style dataset that draw random numbers, as torchvision's transforms do, are seeded one by one, so
    that they are the same with any number of workers and ranks, and after a resume. Item `i` has the seed
    `ctx.seed_for(i)`; with a sampler, `i` counts the items of the pass. Items of `__getitems__` have one seed for a
    batch. The first batch of a pass tells whether items draw. With `main_loop.buffer`, functions of torch may draw, but
    those of NumPy and Python need `main_loop.workers`. A `DataLoader` seeds its workers itself; with
    `persistent_workers`, whose generators continue from pass to pass, a resume is not exact if items draw.

    Args:
        train: the data to learn from, an object of one of these kinds, written as `{class: NAME, ...}`.
        valid: such data to evaluate on during the training.
        test: such data to evaluate on at the end.
        sources: the names of an item's fields, if items are tuples or single values; of mappings, the keys to use.
        batch_size: the number of examples in a batch; a data loader uses its own.
        collate: a function that makes a batch of a list of items; null means torch's `default_collate`. A data loader
            uses its own.
        sampler: an iterable of the indices of the examples of a training pass, such as torch's `WeightedRandomSampler`,
            only for a map-style `train`. It is iterated once per pass. Its `generator` is seeded for the pass; without
            a `generator`, the global generators are seeded while it is iterated.
        on_bad_example: what `main_loop.on_bad_example` says, which emrun supplies: a bad example is one for which
            `__getitem__` of a map-style dataset raises an error. Other data have no examples that can be left out.
        split: divides the items of a map-style `train` by shares, such as `{valid: 0.2}`, see `Table`. All parts have
            the transforms of `train`.
        preparation: what the run keeps of the division, which emrun supplies.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or a dataset is empty.
        StreamError: the number of an item's fields is not that of `sources`, the sampler yields something that is not
            an index, or a data loader with `num_workers` is read in a worker process.
    """

    train_only = ("train", "batch_size", "sampler")

    def __init__(
        self,
        train: Any,
        valid: Any = None,
        test: Any = None,
        sources: Strings | None = None,
        batch_size: int = 32,
        collate: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        on_bad_example: Policy = "error",
        split: SplitForm | None = None,
        preparation: Json | None = None,
    ) -> None:
        self._reader = ExampleReader(on_bad_example)
        check_count("batch_size", batch_size, minimum=1)
        if sources is not None:
            check_names("sources", sources)
        if collate is not None and not callable(collate):
            raise ArgumentError("collate", f"{type(collate).__name__} is not a function; write {{import: NAME}}")
        given = {"train": train, "valid": valid, "test": test}
        self._data = {name: data for name, data in given.items() if data is not None or name == "train"}
        for name, data in self._data.items():
            _check(name, data, sampler if name == "train" else None)
        self.preparation: Json | None = None
        """What the run keeps of the division of `train`."""
        if split is not None or preparation is not None:
            self._divide(split, sampler, preparation)
        has_only(self, self._data)
        if self._reader.skips and not any(map(_has_items, self._data.values())):
            raise ArgumentError("on_bad_example", "has no effect: only examples of a map-style dataset are left out")
        self._batch_size = batch_size
        self._draws: dict[tuple[str, bool, str], bool] = {}  # whether items drew in an earlier pass of this kind
        self._collate = collate or default_collate
        self._sampler = sampler
        self._sources = None if sources is None else list(sources)
        self._classes = getattr(train, "classes", None) or _class_labels(getattr(train, "features", None))

    def _divide(self, form: Any, sampler: Any, preparation: Json | None) -> None:
        """Divide the items of `train`."""
        train = self._data["train"]
        split = None if form is None else Split.read(form, self._data)
        kept = None if preparation is None else preparation["split"]
        if preparation is not None:
            check_form(split, kept)
        if split is None or not _has_items(train) or sampler is not None:
            what = "the indices of a sampler are those of all items" if sampler is not None else "train is not one"
            raise ArgumentError("split", f"only items of a map-style dataset are divided, and {what}")
        division = split.divide(_Items(train))
        self.preparation = {"split": split.keep(division, kept, type(train).__name__)}
        self._data |= {name: Subset(train, rows.tolist()) for name, rows in division.rows.items()}

    @property
    def num_batches(self) -> Counts:
        """Stream -> number of its batches, for streams whose length is known."""
        sized = self._data if self._sampler is None else {**self._data, "train": self._sampler}
        lengths = {name: _length(each) for name, each in sized.items()}
        sizes = {name: 1 if isinstance(each, DataLoader) else self._batch_size for name, each in sized.items()}
        return {name: -(-length // sizes[name]) for name, length in lengths.items() if length is not None}

    def classes_names(self) -> Strings | Mapping[str, Strings]:
        """Return `classes` of `train`, as datasets of torchvision have, or source -> names of its `ClassLabel`."""
        found = self._classes
        if found and isinstance(found, Mapping):
            return {name: names for name, names in found.items() if name in (self._sources or found)}
        return list(found) if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found) else []

    def _open(self, name: str, ctx: StreamContext) -> Iterable[Batch]:
        """Begin a pass: draw its order, here and not in a reader thread."""
        data = self._data[name]
        shuffle = name == "train" and ctx.epoch > 0
        _set_epoch(data, ctx)
        made: Iterable[Any]
        if _has_items(data):
            order = self._sampled(len(data), ctx) if shuffle and self._sampler is not None else None
            made = self._of_items(data, order, ctx, shuffle=shuffle)
        elif isinstance(data, DataLoader):
            _seed_loader(data, ctx)
            made = data
        else:
            made = self._of_iterable(data)
        batches = _named(made, self._sources, ctx.stream_name)
        if _has_items(data) or ctx.epoch == 0 or not is_stateful(data):
            return batches
        return _WithState(data, batches)

    def _of_iterable(self, data: Iterable[Any]) -> Iterator[Any]:
        items = iter(data)
        while some := list(islice(items, self._batch_size)):
            yield self._collate(some)

    def _of_items(self, data: Any, order: Rows | None, ctx: StreamContext, *, shuffle: bool) -> Iterator[Any]:
        count = len(data) if order is None else len(order)
        of_pass = ctx.stream_name, ctx.epoch > 0, ctx.read_by
        drew = self._draws.get(of_pass)
        draws = None if any(True for _ in _with_epoch(data)) else drew  # None is not known before the first batch
        for places in ctx.batches(count, self._batch_size, shuffle=shuffle and order is None):
            rows = (places if order is None else order[places]).tolist()
            if draws is None:
                draws, batch = self._first(data, rows, places, ctx)
            elif draws:
                batch = self._seeded(data, rows, places, ctx)[1]
            elif drew is False or ctx.read_by == "thread":
                batch = self._batch(data, rows, ctx)
            else:
                before = torch.default_generator.get_state()
                batch = self._batch(data, rows, ctx)
                if not torch.equal(before, torch.default_generator.get_state()):  # the first that draws
                    draws = True
                    torch.default_generator.set_state(before)
                    batch = self._seeded(data, rows, places, ctx)[1]
            yield batch
        self._draws[of_pass] = bool(draws)

    def _first(self, data: Any, rows: list[int], places: Rows, ctx: StreamContext) -> tuple[bool, Any]:
        """Return whether the items of a pass draw random numbers, which its first batch tells, and this batch.

        Raises:
            StreamError: they draw from a global generator that this thread shares with that of the training.
        """
        before = _states()
        if ctx.read_by == "thread":
            found = self._seeded(data, rows, places, ctx)
            changed = [name for name, state in _states().items() if state != before[name]]
            if changed:
                what = f"items of {type(data).__name__} change the global random numbers of {listed(changed)}"
                what = f"stream {ctx.stream_name!r}: {what}, which the training uses meanwhile"
                raise StreamError(f"{what}; {ADVICE}, or main_loop.buffer: 0", first_batch=True)
            return found
        with preserved_randomness():
            self._read(data, rows[:1], ctx)
            if _states() == before:
                batch = self._batch(data, rows, ctx)
                if _states() == before:
                    return False, batch
        return True, self._seeded(data, rows, places, ctx)[1]

    def _seeded(self, data: Any, rows: list[int], places: Rows, ctx: StreamContext) -> tuple[bool, Any]:
        """Return a batch whose items draw random numbers of their own, and whether a thread has seen one that does."""
        if ctx.read_by == "thread":
            generator = torch.Generator()
            with OwnDraws(generator) as draws:
                batch = self._batch(data, rows, ctx, lambda seed: generator.manual_seed(seed % 2**63), places)
            return draws.has_drawn, batch
        with preserved_randomness():
            return True, self._batch(data, rows, ctx, seed_generators, places)

    def _batch(self, data: Any, rows: list[int], ctx: StreamContext, *seeded: Any) -> Any:
        items = self._read(data, rows, ctx, *seeded)
        return self._collate(items) if items else {}

    def _read(
        self,
        data: Any,
        rows: list[int],
        ctx: StreamContext,
        seed: Callable[[int], Any] | None = None,
        places: Rows | None = None,
    ) -> list[Any]:
        """Return the items of some rows.

        Args:
            data: the dataset.
            rows: the indices of the items.
            ctx: the context of the pass.
            seed: seeds the random numbers that items draw; None if they draw none.
            places: the number of each item in the pass, for its seed.
        """
        together = getattr(data, "__getitems__", None)
        if seed is not None:
            seed(ctx.batch_seed)
        if together is not None:
            try:
                return list(together(rows))
            except Exception:
                if not self._reader.skips:
                    raise
        items = []
        for place, row in enumerate(rows):
            try:
                if seed is not None and places is not None:
                    seed(ctx.seed_for(places[place]))
                items.append(data[row])
            except Exception as error:
                where = f"item {row} of {type(data).__name__}"
                if not self._reader.skips:
                    error.add_note(f"while reading {where}")
                    raise
                self._reader.leave_out(error, row, str(row), where, ctx)
        return items

    def _sampled(self, count: int, ctx: StreamContext) -> Rows:
        """Return the sampler's order for the pass, which depends only on seed, stream and pass."""
        _set_epoch(self._sampler, ctx)
        if hasattr(self._sampler, "generator"):
            self._sampler.generator = _generator(ctx)
            found = list(self._sampler)
        else:
            with preserved_randomness():
                seed_everything(_seed(ctx), devices=False)
                found = list(self._sampler)
        order = []
        for each in found:
            try:
                order.append(operator.index(each))
            except TypeError:
                order.append(-1)
            if not 0 <= order[-1] < count:
                wrong = f"its sampler gave {each!r}, which is not an index from 0 to {count - 1}"
                raise StreamError(f"stream {ctx.stream_name!r}: {wrong}", first_batch=True)
        return np.array(order, np.int64)


class _Items(Readable):
    """The items of a map-style dataset, which have numbers alone."""

    def __init__(self, data: Any) -> None:
        self.count = len(data)
        self.place = type(data).__name__


def _class_labels(features: Any) -> dict[str, Strings]:
    """Return column -> names of its classes, for the columns of a dataset of Hugging Face that are a `ClassLabel`."""
    columns = features if isinstance(features, Mapping) else {}
    return {name: each.names for name, each in columns.items() if type(each).__name__ == "ClassLabel"}


def _states() -> Values:
    """Return the states of the global generators."""
    return {name: GENERATORS[name]() for name in ("python", "numpy", "torch")}


def _has_items(data: Any) -> bool:
    """Return whether this is a map-style dataset."""
    is_other = isinstance(data, DataLoader | IterableDataset | Mapping | str | bytes) or hasattr(data, "__next__")
    return not is_other and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _check(name: str, data: Any, sampler: Any) -> None:
    if _has_items(data):
        if not len(data):
            raise ArgumentError(name, "contains no examples")
        if sampler is not None and not isinstance(sampler, Iterable):
            raise ArgumentError("sampler", f"{type(sampler).__name__} is not iterable: it has no __iter__")
    elif sampler is not None:
        raise ArgumentError("sampler", "a sampler needs a map-style dataset, and train is not one")
    elif isinstance(data, DataLoader):
        hidden = next(filter(_hides_epoch, _with_epoch(data.dataset)), None)
        if name == "train" and data.persistent_workers and hidden is not None:
            raise ArgumentError(
                name,
                "its DataLoader has persistent_workers=True, but such workers do not see what set_epoch of "
                f"{type(hidden).__name__} sets, so all passes would have one order; set persistent_workers to "
                "False, or keep the epoch in a tensor in shared memory, torch.zeros(1).share_memory_()",
            )
    elif isinstance(data, Mapping | str | bytes) or hasattr(data, "__next__") or not hasattr(data, "__iter__"):
        advice = "; it can be read only once" if hasattr(data, "__next__") else ""
        raise ArgumentError(
            name,
            f"{type(data).__name__} is neither a map-style dataset (__getitem__ and __len__), nor an iterable "
            f"dataset (__iter__), nor a DataLoader{advice}",
        )


def _seed_loader(loader: Any, ctx: StreamContext) -> None:
    """Seed a loader for a pass, and drop a pass that was not read to its end."""
    owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    for each in [*owners[1:], loader.dataset]:
        _set_epoch(each, ctx)
    for owner in owners:
        if hasattr(owner, "generator"):  # one each, as persistent workers draw no seed in later passes
            owner.generator = _generator(ctx)
    if is_stateful(loader):
        loader.load_state_dict({})


class _WithState:
    """Batches of one pass over an object with a state, which begins with the first batch."""

    def __init__(self, owner: Any, batches: Iterator[Batch]) -> None:
        self._owner = owner
        self._batches = batches
        # `state_dict` of a loader would begin the pass
        self._data = cast("Any", owner.dataset if isinstance(owner, DataLoader) else owner)
        first = self._data.state_dict() if is_stateful(self._data) else None
        self._before: Named | None = {"first": first}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._before = None
            yield batch

    def state_dict(self) -> Named:
        """Return the state after the last batch."""
        return {"state": self._owner.state_dict()} if self._before is None else self._before

    def load_state_dict(self, state: Named) -> None:
        """Let the pass begin after the batch of a state."""
        self._before = state
        if "state" in state:
            self._owner.load_state_dict(state["state"])
        elif is_stateful(self._data):
            self._data.load_state_dict(state["first"])


def _named(batches: Iterable[Any], sources: list[str] | None, stream: str) -> Iterator[Batch]:
    """Yield the batches with names for their sources."""
    for batch in batches:
        named = isinstance(batch, Mapping)
        fields = batch if isinstance(batch, tuple | list) else (batch,)
        wrong = ""
        absent = [name for name in sources or () if name not in batch] if named and batch else []
        if absent:
            wrong = f"have no source {absent[0]!r}{meant_of(absent[0], map(str, batch))}"
        elif not named and len(fields) != len(sources or ()):
            what = f"are of type {type(batch).__name__}, with {counted(len(fields), 'field')}"
            wrong = f"{what}; set `sources` to their names"
        if wrong:
            raise StreamError(f"stream {stream!r}: its batches {wrong}", first_batch=True)
        if not named:
            yield dict(zip(sources or (), fields, strict=True))
        else:
            yield batch if sources is None or not batch else {name: batch[name] for name in sources}


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a loader whose dataset has no length
        return None


def _with_epoch(data: Any) -> Iterator[Any]:
    """Yield what has `set_epoch`: the data, or what torch's `Subset`, `ConcatDataset` and their like are made of."""
    if hasattr(data, "set_epoch"):
        yield data
    elif isinstance(data, Subset):
        yield from _with_epoch(data.dataset)
    elif isinstance(data, ConcatDataset | ChainDataset | StackDataset):
        parts: Any = data.datasets
        if isinstance(parts, Mapping):
            parts = parts.values()
        for part in parts:
            yield from _with_epoch(part)


def _set_epoch(data: Any, ctx: StreamContext) -> None:
    for each in _with_epoch(data):
        each.set_epoch(ctx.epoch)


def _hides_epoch(data: Any) -> bool:
    """Return whether the copy of a dataset in a worker that persists does not see what its `set_epoch` sets."""
    values: list[Any] = list(getattr(data, "__dict__", {}).values())
    tensors: list[Any] = [each for each in values if isinstance(each, torch.Tensor) and each.numel() == 1]
    return not any(each.is_shared() for each in tensors) and not any(
        isinstance(each, SynchronizedBase) for each in values
    )


def _seed(ctx: StreamContext) -> int:
    """Return a seed for the pass; called before its batches are made."""
    return int(ctx.rng.integers(2**63))


def _generator(ctx: StreamContext) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(ctx))
