"""Tar archives in the layout of WebDataset, read in place."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypedDict

import numpy as np

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, reason_of
from emrun.base.sources import ID, NEW
from emrun.base.types import Batch, Json, Named, Policy, Strings
from emrun.base.wording import counted, listed, meant_of
from emrun.datasets._division import Readable, SplitForm, Texts
from emrun.datasets._examples import ExampleReader, with_names
from emrun.datasets._images import FORMATS, CropForm, Dtype, Images, Interpolation, Masks, Mode, check_pillow
from emrun.datasets._paths import Files, check_unchanged, files_of, first_of, identity
from emrun.datasets._picture_batches import Encoded, Example, PictureBatch, ReadsPictures
from emrun.datasets._splits import Part
from emrun.datasets._transforms import TransformForm, transforms_of
from emrun.stream_context import Array, Rows, StreamContext

_LOG = logging.getLogger(__name__)
_LOOKED_AT = 20  # train examples, by which the size of all is known
_ABSENT = -1
_MAX_EXTENDED = 2**14  # bytes of a long name or of extended attributes; tarfile takes the square of them in time
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)  # what `tarfile` raises for damage


FieldForm = TypedDict("FieldForm", {"field": str, "as": Literal["mask"]})
"""A field of masks in the argument `sources` of a config."""


class TarShards(ReadsPictures):
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
    - `png` of masks, whose pixels are the numbers of classes: `mask: {field: seg.png, as: mask}` is int64 of shape
      (B, H, W), resized to the nearest pixel. Pixels that have no class have the number of `ignore`, which the loss
      needs too: `{class: torch.nn.CrossEntropyLoss, ignore_index: 255, inputs: [logits, mask]}`;
    - `cls`: a whole number as text, which becomes int64 of shape (B,);
    - `npy`: one array of shape (B, ...) if all arrays of the batch have the same shape and dtype, otherwise a list;
    - `json`: a list of the decoded values; `txt`: a list of strings, from UTF-8.

    Two more sources are `id`, a list of the names of the examples, such as `cats/007`, and `position`, int64 of shape
    (B,), their numbers in the order of the shards; a source of your own may have such a name.

    A training pass reads the shards in random order, and the examples of each shard in random order.

    Needs Pillow for images (`pip install 'emrun[data]'`). See https://github.com/webdataset/webdataset for the layout.

    Args:
        train: a path, a pattern such as `data/*.tar` (its files are sorted by name), or a list of these.
        sources: source -> field, such as `{image: jpg, mask: {field: seg.png, as: mask}, label: cls}`.
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
        ignore: the number of the pixels of masks that have no class.
        values: the values of the classes 0, 1, ... in the masks, such as `[0, 255]`; by default 0, 1, ...
        on_bad_example: what `main_loop.on_bad_example` says, which emrun supplies: a bad example lacks a field or
            cannot be decoded. With `warn` and `ignore`, those that are missing at the end of a truncated shard are left
            out too.
        split: divides the examples of `train`, see `Table`. Columns are `id` and the sources with an ending `cls` or
            `txt`; `files` are patterns for the shards. Each part keeps the order of the shards.
        balance: the column of the classes of which training passes draw the same number of rows, see `Table`.
        transform: transforms of torchvision by name, or callables, for all streams, see `ImageFolder`. All images and
            masks of an example are turned together, in a mapping if there are several; pixels of a mask that a
            transform makes up have the number of `ignore`.
        augment: more transforms, for training passes only.
        preparation: what the run keeps of the division, which emrun supplies.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a shard is missing, compressed, truncated or not a
            tar archive; or an example lacks a field.
        StreamError: an example cannot be decoded, the images of a batch differ in size, or a shard has changed.
    """

    train_only = ("train", "batch_size", "balance", "augment")

    def __init__(
        self,
        train: Files,
        sources: dict[str, str | FieldForm],
        valid: Files | None = None,
        test: Files | None = None,
        size: int | list[int] | None = None,
        mode: Mode = "RGB",
        batch_size: int = 32,
        max_bytes: int = 256_000_000,
        dtype: Dtype = "float32",
        crop: CropForm | None = None,
        interpolation: Interpolation = "bilinear",
        orient: bool = False,
        ignore: int = 255,
        values: list[int] | None = None,
        on_bad_example: Policy = "error",
        split: SplitForm | None = None,
        balance: str | None = None,
        transform: TransformForm = None,
        augment: TransformForm = None,
        preparation: Json | None = None,
    ) -> None:
        check_count("max_bytes", max_bytes, minimum=1)
        images = Images(mode, dtype, size, crop, interpolation, orient)
        masks = Masks(size, crop, orient, ignore, values=values)
        self._fields = _fields(sources)
        pictures = {each.source: masks if each.is_mask else images for each in self._fields if each.kind in FORMATS}
        if pictures:
            check_pillow("TarShards")
        elif transform or augment:
            raise ArgumentError("transform" if transform else "augment", "has no effect: `sources` has no images")
        fill = ignore if masks in pictures.values() else None
        self._example = Example(pictures, transforms_of(transform, augment, ignore=fill))
        self._max_bytes = max_bytes
        self._reader = ExampleReader(on_bad_example)
        self._size: tuple[int, ...] | None = None  # of the first train pictures, if they have one
        super().__init__({"train": train, "valid": valid, "test": test}, batch_size, split, preparation, balance)

    def _files_at(self, path: Path) -> Files:
        return str(path / "*.tar" if path.is_dir() else path)

    def classes_instead(self, source: str) -> str | None:
        """Return how a picture becomes a mask, whose pixels are classes; None for other sources."""
        for field in self._fields:
            if field.source == source and field.kind in FORMATS and not field.is_mask:
                name = re.sub("jpg$", "png", field.name)
                change = "" if name == field.name else "store the masks as PNG, as JPEG changes numbers, and "
                return f"{change}write sources: {{{source}: {{field: {name}, as: mask}}}}"
        return None

    def _read(self, name: str, files: Files) -> dict[str, _Shards]:
        rows = _Shards(name, files, self._fields, self._example, self._max_bytes, self._reader)
        if name == "train":
            self._size = rows.first_size()
        rows.size = self._size if name == NEW else None
        return {name: rows}

    def _learnt(self) -> Json:
        return {"size": self._size}

    def _use(self, learnt: Json) -> None:
        self._size = tuple(learnt["size"]) if learnt.get("size") else None


@dataclass(frozen=True)
class _Field:
    """A source, and the field of the examples that it is decoded from."""

    source: str
    name: str
    kind: str
    is_mask: bool

    def decode(self, content: bytes) -> Any:
        """Return the value of a field that is not a picture."""
        try:
            return _DECODERS[self.kind](content)
        except (ValueError, OSError, OverflowError, RecursionError) as error:
            raise ValueError(f"field {self.name!r}: {str(error) or type(error).__name__}") from error

    def together(self, values: list[Any]) -> Any:
        """Return the values of a batch as its source."""
        if self.kind == "cls":
            return np.array(values, dtype=np.int64)
        if self.kind in ("json", "txt"):
            return values
        same = len({(value.shape, value.dtype) for value in values}) == 1
        return np.stack(values) if same else values


def _fields(sources: object) -> list[_Field]:
    if not isinstance(sources, Mapping) or not sources:
        raise ArgumentError("sources", f"{sources!r} is not a mapping of sources to fields such as {{image: png}}")
    fields = []
    for source, form in sources.items():
        is_mask = isinstance(form, Mapping)
        name = form.get("field") if is_mask else form
        kind = name.lower().rpartition(".")[2] if isinstance(name, str) else ""
        if is_mask and (form != {"field": name, "as": "mask"} or kind != "png"):
            raise ArgumentError(f"sources.{source}", f"{form!r} is not a mask such as {{field: seg.png, as: mask}}")
        if kind not in (*FORMATS, *_DECODERS):
            kinds = listed([*FORMATS, *_DECODERS])
            raise ArgumentError("sources", f"the field {name!r} of {source!r} does not end in one of {kinds}")
        fields.append(_Field(source, _same_field(name), kind, is_mask))
    return fields


def _same_field(field: str) -> str:
    """Return a field in lower case, with one ending for the two of JPEG."""
    return re.sub("jpeg$", "jpg", field.lower())


def _array(content: bytes) -> Array:
    try:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except MemoryError as error:  # of a header that is damaged or malicious
        raise ValueError(f"its header claims more than there is: {error}") from error


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "cls": lambda content: np.int64(int(content)),
    "json": json.loads,
    "npy": _array,
    "txt": bytes.decode,
}
"""Ending of the name of a field -> the function that decodes its content; images are decoded by `Images`."""


class _Found(NamedTuple):
    """An example of a shard: where its archive begins and its name, its offset, field -> offset and length."""

    place: tuple[int, str]
    offset: int
    members: dict[str, tuple[int, int]]


def _indexed(
    argument: str, path: Path, fields: Strings, others: list[str], *, skips: bool, may_lack: bool
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return name and places of each example of a shard, from its headers: offset and length of each field.

    Args:
        argument: the argument that names the shard.
        path: the shard.
        fields: the fields.
        others: gets the names of examples that have none of the fields, and of files whose content is elsewhere.
        skips: whether examples that lack a field, or are behind a damage, are left out.
        may_lack: whether examples may lack a field.

    Raises:
        ArgumentError: the shard is damaged or an example lacks a field, and such examples are not left out.
    """
    where = f"shard {str(path)!r}"
    examples: list[_Found] = []
    damage = None
    try:
        with path.open("rb") as file:
            _read_headers(file, fields, others, examples)
    except OSError as error:
        raise ArgumentError(argument, f"{where} cannot be read: {reason_of(error)}") from error
    except _DAMAGE as error:
        damage = error
        examples = [each for each in examples if each is not examples[-1] or each.members.keys() >= set(fields)]
    found = []
    for (_, name), offset, members in examples:
        absent = [field for field in fields if field not in members]
        dotted = [
            {each[: -len(field)] for each in members.keys() - fields if each.endswith(f".{field}")} for field in fields
        ]
        is_other = len(absent) == len(fields)
        if is_other and not any(dotted):
            others.append(f"{name} ({listed([*members])})")  # for instance a note about the shard
            continue
        if absent and not (skips or may_lack):
            advice = "; the name of an example ends at its first dot, so rename the files" if any(dotted) else ""
            what = f"has no field {listed(absent)} (it has {listed([*members])}){advice}"
            raise ArgumentError(argument, f"{where}: example {name!r} at offset {offset} {what}")
        others += [f"{name}.{each}*" for each in sorted((set.union if is_other else set.intersection)(*dotted))]
        if not is_other:
            found.append((name, [members.get(field, (_ABSENT, 0)) for field in fields]))
    if damage is not None and (not skips or not found):
        raise ArgumentError(argument, f"{where}: {damage}") from damage
    if damage is not None:
        _LOG.warning("%s: %s; its %d complete examples are used", where, damage, len(found))
    return found


def _read_headers(file: IO[bytes], fields: Strings, others: list[str], examples: list[_Found]) -> None:
    """Add the examples of a shard to a list, and to `others` the names of links and hidden files with such fields.

    Raises:
        ValueError: the shard is damaged; of the last example in the list, a part may be missing.
    """
    for start, member in _members(file):
        folder, _, last = member.name.rpartition("/")
        stem, _, field = last.partition(".")
        field = _same_field(field)
        if not stem or not member.isreg() or member.issparse():  # hidden, a link, a device, or with holes
            if not member.isdir() and field.endswith(tuple(fields)):
                others.append(member.name)
            continue
        place = start, f"{folder}/{stem}" if folder else stem
        if not examples or examples[-1].place != place:
            examples.append(_Found(place, member.offset, {}))
        if field in examples[-1].members:
            raise ValueError(f"two files {member.name!r}, the second at offset {member.offset}")
        examples[-1].members[field] = (member.offset_data, member.size)


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
            with tarfile.TarFile(fileobj=file, tarinfo=_Member) as archive:
                for member in _members_of(archive):
                    if member.offset_data + member.size > length:
                        raise ValueError(f"{member.name!r} is truncated")
                    yield start, member
                    offset = archive.offset
            file.seek(start := archive.offset)
            while (block := file.read(tarfile.BLOCKSIZE)) and not any(block):
                start += len(block)
    except _DAMAGE as error:
        raise ValueError(f"damaged or truncated at offset {offset} of {length}: {error}") from error


class _Shards(Readable, Part):
    """The examples of one stream."""

    def __init__(
        self,
        argument: str,
        files: Files,
        fields: list[_Field],
        example: Example,
        max_bytes: int,
        reader: ExampleReader,
    ) -> None:
        self._fields = fields
        self._example = example
        self._max_bytes = max_bytes
        self._reader = reader
        self._paths = files_of(argument, files)
        self._identities = list(map(identity, self._paths))
        others: list[str] = []
        names = [field.name for field in fields]
        is_new = argument == NEW  # and may lack labels
        shards = [_indexed(argument, path, names, others, skips=reader.skips, may_lack=is_new) for path in self._paths]
        self.ids = [name for shard in shards for name, _ in shard]
        if others:
            count = counted(len(others), "name")
            _LOG.warning(
                "%s: left out %s of the shards: %s", argument, count, first_of(others), extra={"names": others}
            )
        self.count = len(self.ids)
        if not self.count:
            message = f"contains no examples: the shards have {first_of(others)}; sources: {listed(names)}"
            raise ArgumentError(argument, message)
        self._places = np.array([places for shard in shards for _, places in shard], dtype=np.int64)
        if is_new:
            there = np.flatnonzero((self._places[:, :, 0] != _ABSENT).any(axis=0))
            self._fields = [fields[index] for index in there.tolist()]
            self._places = self._places[:, there]
        self.blocks: Sequence[int] | None = list(map(len, shards))
        self._ends = np.cumsum(self.blocks, dtype=np.int64)

        self.place = first_of([str(path) for path in self._paths])

    ids: list[str]
    """The names of the examples."""
    size: Any = None
    """Height and width that all pictures must have; None if it is not known."""

    def first_size(self) -> tuple[int, ...] | None:
        """Return height and width of the first pictures; None if they differ, or if all are resized."""
        found = set()
        keep = [each.size is None for each in self._example.images.values()]
        for row in range(min(_LOOKED_AT, len(self)) if any(keep) else 0):
            with suppress(ValueError, OSError):
                found |= {each.shape[:2] for each in self._example.pixels(self.pictures(row), None).values()}
        return found.pop() if len(found) == 1 else None

    def restrict(self, rows: Rows) -> None:
        """Keep only these examples."""
        super().restrict(rows)
        self._places = self._places[rows]
        self.blocks = np.bincount(self._shards_of(rows), minlength=len(self._paths)).tolist()
        self._ends = np.cumsum(self.blocks, dtype=np.int64)

    def files(self) -> list[str]:
        """Return the shard of each example."""
        return [str(self._paths[shard]) for shard in self._shards_of(np.arange(len(self))).tolist()]

    def texts(self, argument: str, name: str) -> Texts:
        """Return the names of the examples, or a field with a number or a text."""
        if name == ID:
            return self.ids
        kinds = {field.source: index for index, field in enumerate(self._fields) if field.kind in ("cls", "txt")}
        if name not in kinds:
            what = f"there is no source {name!r} of numbers or texts{meant_of(name, [ID, *kinds])}"
            raise ArgumentError(argument, f"{what} (there is {listed([ID, *kinds])})")
        found = []
        shards = self._shards_of(np.arange(len(self))).tolist()
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb", buffering=0)) for path in self._paths]
            for row, shard in enumerate(shards):
                offset, length = self._places[row, kinds[name]].tolist()
                content = os.pread(files[shard].fileno(), length, offset) if offset != _ABSENT else b""
                found.append(content.decode(errors="replace").strip())
        return found

    def where(self, row: int) -> str:
        """Return the name and the shard of an example."""
        return self._named(row)[1]

    def _shards_of(self, rows: Any) -> Rows:
        return np.asarray(np.searchsorted(self._ends, rows, side="right"))

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows."""
        trains = self.trains and ctx.epoch > 0
        size = next((each.size for each in self._example.images.values()), None) or self.size
        pictures = PictureBatch(self._example, self._example.images, len(rows), size, ctx, trains=trains)
        shards = self._shards_of(rows).tolist()
        with ExitStack() as stack:
            files = {shard: stack.enter_context(self._open(shard, ctx)).fileno() for shard in {*shards}}

            def read_one(row: int, place: int) -> tuple[int, Named]:
                encoded, values = self._decoded(row, files[shards[place]])
                return place, values | (pictures.read(encoded, row, place) if encoded else {})

            with pictures.reading():
                found = self._reader.read(rows, ctx, read_one, self._named, alone=pictures.alone)
        rows = rows[[place for place, _ in found]]
        batch = {}
        for field in self._fields:
            source = field.source
            if field.kind in FORMATS:
                batch[source] = pictures.together(source, found, self.where, rows)
            else:
                batch[source] = field.together([values[source] for _, values in found])
        return with_names(batch, rows.tolist(), self.ids)

    def _decoded(self, row: int, file: int) -> tuple[dict[str, Encoded], Named]:
        """Return source -> encoded picture of an example in an open shard, and source -> value of the others."""
        encoded = {}
        values = {}
        for field, (offset, length) in zip(self._fields, self._places[row].tolist(), strict=True):
            if offset == _ABSENT:
                raise ValueError(f"it has no field {field.name!r}")
            if length > self._max_bytes:
                raise ValueError(f"field {field.name!r} has {length} bytes, but max_bytes is {self._max_bytes}")
            content = os.pread(file, length, offset)  # by several threads
            if field.kind in FORMATS:
                encoded[field.source] = Encoded(io.BytesIO(content), [FORMATS[field.kind]], f"field {field.name!r}")
            else:
                values[field.source] = field.decode(content)
        return encoded, values

    def pictures(self, row: int) -> dict[str, Encoded]:
        """Return source -> encoded picture of an example."""
        with self._paths[self._shards_of(row)].open("rb", buffering=0) as file:
            return self._decoded(row, file.fileno())[0]

    def _named(self, row: int) -> tuple[str, str]:
        return self.ids[row], f"example {self.ids[row]!r} of shard {str(self._paths[self._shards_of(row)])!r}"

    def _open(self, shard: int, ctx: StreamContext) -> IO[bytes]:
        path = self._paths[shard]
        check_unchanged(path, self._identities[shard], f"stream {ctx.stream_name!r}: shard {str(path)!r}")
        return path.open("rb", buffering=0)


class _Member(tarfile.TarInfo):
    """A member that refuses headers for which `tarfile` would read without limit, or take damage for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Return the member of a header.

        Raises:
            ValueError: the header is damaged, or has an impossible size.
            HeaderError: the block is not a header, but marks the end of the archive.
        """
        if bytes(buf) == bytes(tarfile.BLOCKSIZE):
            return super().frombuf(buf, encoding, errors)
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise ValueError(f"neither a file nor the end of the archive ({error})") from error
        if found.size < 0 or (found.type in _EXTENDED and found.size > _MAX_EXTENDED):
            raise ValueError(f"a header of type {found.type!r} has an impossible size of {found.size} bytes")
        return found


def _members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive one after the other; they do not stay in memory.

    Raises:
        ValueError: a size is negative, or the headers form a cycle.
    """
    offset = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]
        if member.size < 0:
            raise ValueError(f"{member.name!r} has a size of {member.size}")
        if archive.offset <= offset:
            raise ValueError("its headers form a cycle")
        yield member
        offset = archive.offset
