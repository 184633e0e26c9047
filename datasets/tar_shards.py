"""Tar archives in the layout of WebDataset, read in place."""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal

import numpy as np

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, StreamError, reason_of
from emrun.base.types import Batch, Policy
from emrun.base.wording import counted, listed
from emrun.datasets._examples import ExampleReader, NamedSplits, with_names
from emrun.datasets._images import FORMATS, Images, check_pillow, write_image
from emrun.datasets._paths import check_unchanged, files_of, first_of, identity
from emrun.datasets._tar import DAMAGE, Member, is_plain_file, members_of
from emrun.stream_context import Rows, StreamContext

_LOG = logging.getLogger(__name__)
_KINDS = (*FORMATS, "cls", "json", "npy", "txt")
_ABSENT = -1
_Array = np.ndarray[Any, Any]


class TarShards(NamedSplits):
    """Examples in tar archives (shards) in the layout of WebDataset; nothing is unpacked to disk.

        dataset:
          class: TarShards
          train: data/train-*.tar
          valid: data/valid.tar
          sources: {image: png, label: cls}
          size: 64
          batch_size: 32

    The files of an example follow each other in a shard. Their names are equal up to the first dot of the last path
    component; the rest of the name is the field. `cats/007.png` and `cats/007.cls` are the fields `png` and `cls` of
    one example. `jpg` and `jpeg` are one field. Names that have none of the fields, links and files whose names begin
    with a dot are left out, and counted in the log. A shard may be several archives, as `cat` joins them. The headers
    of all shards are read once, when the dataset is built.

    Streams: `train`, and `valid` and `test` if they are given. The last extension of a field decides what its source
    is:

    - `jpg`, `jpeg`, `png`: float32 in [0, 1] or uint8 of shape (B, C, H, W);
    - `cls`: a whole number as text, which becomes int64 of shape (B,);
    - `npy`: one array of shape (B, ...) if all arrays of the batch have the same shape and dtype, otherwise a list;
    - `json`: a list of the decoded values; `txt`: a list of strings, from UTF-8.

    Two more sources are `id`, a list of the names of the examples, such as `cats/007`, and `position`, int64 of shape
    (B,), their numbers in the order of the shards; a source of your own may have such a name.

    A training pass reads the shards in random order, and the examples of each shard in random order.

    Needs Pillow for images (`pip install 'emrun[data]'`). See https://github.com/webdataset/webdataset for the layout.

    Args:
        train: a path, a pattern such as `data/*.tar` (its files are sorted by name), or a list of these.
        sources: source -> field, such as `{image: jpg, mask: seg.png, label: cls}`.
        valid: the shards for the stream `valid`, to evaluate on during the training.
        test: the shards for the stream `test`, to evaluate on at the end.
        size: the size that images are resized to: [height, width], or one number for a square.
        mode: the mode that images are converted to: `RGB` (C is 3) or `L`, grey (C is 1).
        batch_size: the number of examples in a batch.
        max_bytes: the largest file in a shard that is decoded, in bytes.
        dtype: of images: `float32`, or `uint8` for bytes from 0 to 255, which take a quarter of the memory until the
            device: then write `inputs: {x: {source: image, scale: 255}}` in the model.
        crop: `random` resizes a random part of each image in training passes, whose area is 0.08 to 1 of that of the
            image and whose ratio of width to height is 3/4 to 4/3, as torchvision's `RandomResizedCrop` does. Images of
            one example that have the same size get the same part.
            Evaluations, and training passes with `centre`, use the centre of the image, whose side is 0.875 of the
            short side. `{area: [0.2, 1], ratio: [0.75, 1.33], side: 0.9}` and `{kind: centre, side: 1}` set other
            values. Needs `size`. A JPEG is decoded at a lower resolution if the part still has 3 times the `size` then.
        interpolation: the filter with which images are resized.
        orient: whether to turn images upright, as the orientation in their EXIF data says.
        on_bad_example: what `main_loop.on_bad_example` says, which emrun supplies: a bad example lacks a field or
            cannot be decoded. With `warn` and `ignore`, those that are missing at the end of a truncated shard are left
            out too.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a shard is missing, compressed, truncated or not a
            tar archive; or an example lacks a field.
        StreamError: an example cannot be decoded, the images of a batch differ in size, or a shard has changed.
    """

    fresh_batches = True
    read_ahead = 4

    def __init__(
        self,
        train: str | list[str],
        sources: dict[str, str],
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        size: int | list[int] | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        batch_size: int = 32,
        max_bytes: int = 256_000_000,
        dtype: Literal["float32", "uint8"] = "float32",
        crop: Literal["random", "centre"] | Mapping[str, Any] | None = None,
        interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bilinear",
        orient: bool = False,
        on_bad_example: Policy = "error",
    ) -> None:
        reader = ExampleReader(on_bad_example)
        check_count("max_bytes", max_bytes, minimum=1)
        images = Images(mode, dtype, size, crop, interpolation, orient)
        decoder = _Decoder(_checked(sources), images, max_bytes)
        files = {"train": train, "valid": valid, "test": test}
        parts = {name: _Shards(name, each, decoder, reader) for name, each in files.items() if each is not None}
        super().__init__(parts, batch_size)


def _checked(sources: object) -> dict[str, str]:
    if not isinstance(sources, Mapping) or not sources:
        raise ArgumentError("sources", f"{sources!r} is not a mapping of sources to fields such as {{image: png}}")
    for source, field in sources.items():
        if not isinstance(field, str) or _kind(field) not in _KINDS:
            kinds = listed(_KINDS)
            raise ArgumentError("sources", f"the field {field!r} of {source!r} does not end in one of {kinds}")
    if any(_kind(field) in FORMATS for field in sources.values()):
        check_pillow("TarShards")
    return {source: _same_field(field) for source, field in sources.items()}


def _kind(field: str) -> str:
    return field.lower().rpartition(".")[2]


def _indexed(
    argument: str, path: Path, fields: Sequence[str], others: list[str], *, skips: bool
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return name and places of each example of a shard, from its headers: offset and length of each field.

    Args:
        argument: the argument that names the shard.
        path: the shard.
        fields: the fields.
        others: gets the names of examples that have none of the fields, and of files whose content is elsewhere.
        skips: whether examples that lack a field, or are behind a damage, are left out.

    Raises:
        ArgumentError: the shard is damaged or an example lacks a field, and such examples are not left out.
    """
    found = []
    try:
        with path.open("rb") as file:
            for offset, name, members in _examples_of(file, fields, others):
                places = _places_of(offset, name, members, fields, others, skips=skips)
                if places is not None:
                    found.append((name, places))
    except DAMAGE as error:
        if not skips or not found:
            raise ArgumentError(argument, f"shard {str(path)!r}: {error}") from error
        _LOG.warning("shard %r: %s; its %d complete examples are used", str(path), error, len(found))
    except OSError as error:
        raise ArgumentError(argument, f"shard {str(path)!r} cannot be read: {reason_of(error)}") from error
    return found


def _places_of(
    offset: int,
    name: str,
    members: Mapping[str, tuple[int, int]],
    fields: Sequence[str],
    others: list[str],
    *,
    skips: bool,
) -> list[tuple[int, int]] | None:
    """Return where the fields of an example are; None if it has none of them, which is added to `others`.

    Raises:
        ValueError: a field is missing, and the example is not left out.
    """
    absent = [field for field in fields if field not in members]
    dotted = [
        {each[: -len(field)] for each in members if each.endswith(f".{field}") and each not in fields}
        for field in fields
    ]
    if len(absent) == len(fields) and not any(dotted):
        others.append(f"{name} ({listed([*members])})")  # for instance a note about the shard
        return None
    if absent and not skips:
        advice = "; the name of an example ends at its first dot, so rename the files" if any(dotted) else ""
        what = f"has no field {listed(absent)} (it has {listed([*members])}){advice}"
        raise ValueError(f"example {name!r} at offset {offset} {what}")
    is_none = len(absent) == len(fields)
    others += [f"{name}.{each}*" for each in sorted((set.union if is_none else set.intersection)(*dotted))]
    return None if is_none else [members.get(field, (_ABSENT, 0)) for field in fields]


def _examples_of(
    file: IO[bytes], fields: Sequence[str], others: list[str]
) -> Iterator[tuple[int, str, dict[str, tuple[int, int]]]]:
    """Yield offset, name and members of each example of a shard: field -> offset and length of its content.

    The names of links and of hidden files with one of the fields are added to `others`.

    Raises:
        ValueError: the shard is damaged; the complete examples before the damage were yielded.
    """
    name, begins, archive = None, 0, 0
    members: dict[str, tuple[int, int]] = {}
    problem: BaseException | None = None
    try:
        for start, member in _members(file):
            folder, _, last = member.name.rpartition("/")
            stem, _, field = last.partition(".")
            field = _same_field(field)
            if not stem or not is_plain_file(member):
                if not member.isdir() and field.endswith(tuple(fields)):
                    others.append(member.name)
                continue
            here = f"{folder}/{stem}" if folder else stem
            if (here, start) != (name, archive):
                if name is not None:
                    yield begins, name, members
                name, begins, archive, members = here, member.offset, start, {}
            if field in members:
                raise ValueError(f"two files {member.name!r}, the second at offset {member.offset}")
            members[field] = (member.offset_data, member.size)
    except DAMAGE as error:
        problem = error
    if name is not None and (problem is None or members.keys() >= set(fields)):
        yield begins, name, members
    if problem is not None:
        raise problem


def _same_field(field: str) -> str:
    """Return a field in lower case, with one ending for the two of JPEG."""
    field = field.lower()
    return f"{field[:-4]}jpg" if field.endswith("jpeg") else field


def _members(file: IO[bytes]) -> Iterator[tuple[int, tarfile.TarInfo]]:
    """Yield where their archive begins and the members with complete content; archives may follow each other.

    Raises:
        ValueError: an archive does not have a correct end, or is followed by something else.
    """
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(2) == b"\x1f\x8b":
        raise ValueError("it is compressed, so its examples cannot be read directly; unpack it with gunzip")
    offset = start = 0
    try:
        while start < length or not start:
            file.seek(start)
            with tarfile.TarFile(fileobj=file, tarinfo=Member) as archive:
                for member in members_of(archive):
                    if member.offset_data + member.size > length:
                        raise ValueError(f"{member.name!r} is truncated")
                    yield start, member
                    offset = archive.offset
            file.seek(start := archive.offset)
            while (block := file.read(tarfile.BLOCKSIZE)) and not any(block):
                start += len(block)
    except DAMAGE as error:
        raise ValueError(f"damaged or truncated at offset {offset} of {length}: {error}") from error


class _Decoder:
    """Decodes the fields of examples into the sources of a batch."""

    def __init__(self, sources: dict[str, str], images: Images, max_bytes: int) -> None:
        self.sources = list(sources)
        self.fields = list(sources.values())
        self.max_bytes = max_bytes
        self._kinds = [_kind(field) for field in self.fields]
        self._images = images

    def room(self, count: int, ctx: StreamContext) -> list[_Array | None]:
        """Return an array for the images of each field in a batch; None where only the values tell the shape."""
        size, channels, dtype = self._images.size, self._images.channels, self._images.dtype
        return [
            ctx.empty((count, channels, *size), dtype) if size and kind in FORMATS else None for kind in self._kinds
        ]

    def decode(self, index: int, content: bytes, rng: np.random.Generator | None, out: _Array | None) -> Any:
        """Return the value of a field, for an image in `out`, if given; `rng` draws a random part of an image."""
        kind = self._kinds[index]
        try:
            if kind in FORMATS:
                pixels = self._images.read(io.BytesIO(content), [FORMATS[kind]], rng)
                shape = pixels.shape[2], *pixels.shape[:2]
                image = np.empty(shape, self._images.dtype) if out is None else out
                write_image(pixels, image)
                return image
            if kind == "npy":
                return _array(content)
            if kind == "cls":
                return np.int64(int(content))
            return json.loads(content) if kind == "json" else content.decode()
        except (ValueError, OSError, OverflowError, RecursionError) as error:
            raise ValueError(f"field {self.fields[index]!r}: {str(error) or type(error).__name__}") from error

    def batch(
        self, examples: Sequence[Sequence[Any]], places: list[int], room: list[_Array | None], ctx: StreamContext
    ) -> Batch:
        """Return the sources of a batch, from the values of the examples and their places in the arrays of `room`."""
        batch: dict[str, Any] = {}
        for index, (source, kind, images) in enumerate(zip(self.sources, self._kinds, room, strict=True)):
            if images is None:
                batch[source] = self._together(source, kind, [example[index] for example in examples], ctx)
            else:
                batch[source] = images if len(places) == len(images) else images[places]
        return batch

    def _together(self, source: str, kind: str, values: list[Any], ctx: StreamContext) -> Any:
        if kind == "cls":
            return np.array(values, dtype=np.int64)
        if kind in ("json", "txt"):
            return values
        same = len({(value.shape, value.dtype) for value in values}) == 1
        if kind in FORMATS and values and not same:
            shapes = listed(sorted({str(value.shape) for value in values}))
            raise StreamError(f"stream {ctx.stream_name!r}: {source!r} has images of shapes {shapes}; set 'size'")
        is_made = kind in FORMATS and same  # in shared memory, if this is a worker
        out = ctx.empty((len(values), *values[0].shape), values[0].dtype) if is_made else None
        return np.stack(values, out=out) if same else values


def _array(content: bytes) -> np.ndarray[Any, Any]:
    file = io.BytesIO(content)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the npy format is not supported")
    shape, fortran_order, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if 0 in shape:
        return np.empty(shape, dtype)
    flat = np.frombuffer(content, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C").copy()


class _Shards:
    """The examples of one stream."""

    def __init__(self, argument: str, files: str | list[str], decoder: _Decoder, reader: ExampleReader) -> None:
        self._trains = argument == "train"
        self._decoder = decoder
        self._reader = reader
        self._paths = files_of(argument, files)
        self._identities = list(map(identity, self._paths))
        others: list[str] = []
        shards = [_indexed(argument, path, decoder.fields, others, skips=reader.skips) for path in self._paths]
        self._names = [name for shard in shards for name, _ in shard]
        if others:
            found = argument, counted(len(others), "name"), first_of(others)
            _LOG.warning("%s: left out %s of the shards: %s", *found, extra={"names": others})
        if not self._names:
            there = first_of(others)
            message = f"contains no examples: the shards have {there}; sources: {listed(decoder.fields)}"
            raise ArgumentError(argument, message)
        self._places = np.array([places for shard in shards for _, places in shard], dtype=np.int64)
        self.blocks: Sequence[int] | None = list(map(len, shards))
        self._ends = np.cumsum(self.blocks, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows."""
        with ExitStack() as stack:
            opened: dict[int, IO[bytes]] = {}
            opening = Lock()

            room = self._decoder.room(len(rows), ctx)

            def read_one(row: int, place: int) -> tuple[int, int, list[Any]]:
                shard = self._shard(row)
                with opening:
                    if shard not in opened:
                        opened[shard] = stack.enter_context(self._open(shard, ctx))
                is_drawn = self._trains and ctx.epoch > 0  # each field gets the same numbers
                values = []
                for index, images in enumerate(room):
                    content = self._content(opened[shard], row, index)
                    rng = ctx.rng_for(row) if is_drawn else None
                    values.append(self._decoder.decode(index, content, rng, None if images is None else images[place]))
                return row, place, values

            found = self._reader.read(rows, ctx, read_one, self._named)
        batch = self._decoder.batch([values for *_, values in found], [place for _, place, _ in found], room, ctx)
        return with_names(batch, [row for row, *_ in found], self._names)

    def _shard(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))

    def _named(self, row: int) -> tuple[str, str]:
        name = self._names[row]
        return name, f"example {name!r} of shard {str(self._paths[self._shard(row)])!r}"

    def _open(self, shard: int, ctx: StreamContext) -> IO[bytes]:
        path = self._paths[shard]
        check_unchanged(path, self._identities[shard], f"stream {ctx.stream_name!r}: shard {str(path)!r}")
        return path.open("rb", buffering=0)

    def _content(self, file: IO[bytes], row: int, index: int) -> bytes:
        offset, length = self._places[row, index].tolist()
        if offset == _ABSENT:
            raise ValueError(f"it has no field {self._decoder.fields[index]!r}")
        if length > self._decoder.max_bytes:
            limit = self._decoder.max_bytes
            raise ValueError(f"field {self._decoder.fields[index]!r} has {length} bytes, but max_bytes is {limit}")
        return os.pread(file.fileno(), length, offset)  # by several threads
