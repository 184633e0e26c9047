"""Text files as windows of tokens, for language models."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from emrun.base.arguments import check_count, expanded
from emrun.base.errors import ArgumentError, StorageError, StreamError, reason_of
from emrun.base.sources import NEW
from emrun.base.types import Batch, Json, Named
from emrun.base.wording import counted
from emrun.datasets._division import Readable
from emrun.datasets._paths import Files, files_of, identity
from emrun.datasets._prepared import Prepared
from emrun.datasets._splits import Part
from emrun.storage.files import flush_file, storing, written_aside
from emrun.stream_context import Array, Rows, StreamContext

_LOG = logging.getLogger(__name__)
_BYTES = 256  # size of the vocabulary without a tokenizer
_CHUNK = 2**22
_BEGINNING = 2**16  # bytes of the first file, by whose tokens tokenizers are compared
_FORMAT = 2  # version of the cache; to increase when tokens are made or stored differently
_SIZES = ("vocabulary_size", "vocab_size", "n_vocab", "get_vocab_size")


class TokenWindows(Prepared):
    """Windows of tokens from text files, each with the token that follows each of its tokens.

        dataset:
          class: TokenWindows
          train: data/train-*.txt
          valid: data/valid.txt
          window: 128
          cache_dir: data/tokens
          batch_size: 16

    The tokens of all files of a stream are concatenated and cut into windows without overlap. Tokens that do not fill a
    last window are left out. By default, the tokens are the bytes of the files, from 0 to 255.

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources: `tokens`,
    int64 of shape (B, window); `targets`, int64 of shape (B, window), the token that follows each token.

    Args:
        train: a path, a pattern such as `data/*.txt` (its files are sorted by name), or a list of these.
        valid: the files for the stream `valid`, to evaluate on during the training.
        test: the files for the stream `test`, to evaluate on at the end.
        window: the number of tokens in an example.
        tokenizer: an object whose `encode(text)` returns a list of whole numbers, or an object with such a list as
            `ids`; in a config, a `class` with its arguments. `encode` gets the content of each file as one string,
            decoded as UTF-8.
        separator: a token that is added after each file.
        cache_dir: a folder for the tokens. They are then encoded only once, and read from this folder instead of from
            memory. Tokens in the folder are used again while files, separator and size of the vocabulary are the same,
            and the tokenizer makes the same tokens of the first 64 KiB. After any other change of the tokenizer, use
            another folder.
        batch_size: the number of examples in a batch.
        preparation: what the run keeps, which emrun supplies: the streams and the numbers of their windows.

    Raises:
        ArgumentError: an argument has a value that is not allowed; a file is missing, not text or changes while it is
            read; there are too few tokens for a window; or the tokenizer returns something else than tokens.
        StorageError: the cache cannot be read or written.
        StreamError: the tokens in the cache can no longer be read.
    """

    train_only = ("train", "batch_size")

    def __init__(
        self,
        train: Files,
        valid: Files | None = None,
        test: Files | None = None,
        window: int = 128,
        tokenizer: Any = None,
        separator: int | None = None,
        cache_dir: str | None = None,
        batch_size: int = 16,
        preparation: Json | None = None,
    ) -> None:
        check_count("window", window, minimum=1)
        if separator is not None:
            check_count("separator", separator)
            if separator >= _values(np.int64):
                raise ArgumentError("separator", f"{separator} is not a token: tokens are below 2**63")
        if isinstance(tokenizer, str) or not (tokenizer is None or callable(getattr(tokenizer, "encode", None))):
            raise ArgumentError("tokenizer", f"{tokenizer!r} is not an object with a method 'encode(text)'")
        folder = None if cache_dir is None else expanded(cache_dir)
        self._encoder = _Encoder(tokenizer, separator, folder)
        self._window = window
        self.vocabulary_size = self._encoder.vocabulary_size
        """The number of different tokens, separator included; None if the tokenizer does not report its size."""
        super().__init__({"train": train, "valid": valid, "test": test}, batch_size, None, preparation)

    def _read(self, name: str, files: Files) -> dict[str, _Windows]:
        return {name: _Windows(name, self._encoder.tokens(name, files_of(name, files)), self._window)}

    def _files_at(self, path: Path) -> Files:
        return str(path / "*.txt" if path.is_dir() else path)


class _Windows(Readable, Part):
    """Windows of tokens that are in memory or, if `tokens` is a path, in a NumPy file."""

    def __init__(self, argument: str, tokens: Array | Path, window: int) -> None:
        length = len(_loaded(tokens))
        if length <= window:
            raise ArgumentError(argument, f"{length} tokens are too few; a window and its targets need {window + 1}")
        if rest := (length - 1) % window:
            _LOG.info("%s: left out the last %s, which fill no window", argument, counted(rest, "token"))
        self._tokens = tokens
        self._windows: Array | None = None  # a view: each window with its last target
        self.count = (length - 1) // window
        self._window = window

    def __getstate__(self) -> Named:
        return {**self.__dict__, "_windows": None}

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the windows of these rows."""
        if self._windows is None:
            try:
                self._windows = sliding_window_view(_loaded(self._tokens), self._window + 1)[:: self._window]
            except (OSError, ValueError) as error:
                what = f"the tokens cannot be read: {reason_of(error)}"
                raise StreamError(f"stream {ctx.stream_name!r}: {what}") from error
        found = self._windows[rows]
        tokens = found[:, :-1].astype(np.int64, order="C")
        targets = found[:, 1:].astype(np.int64, order="C")
        return {"tokens": tokens, "targets": targets}


def _loaded(tokens: Array | Path) -> Array:
    return np.load(tokens, mmap_mode="r") if isinstance(tokens, Path) else tokens


class _Encoder:
    """Encodes files as tokens; with a folder, they are read from there."""

    def __init__(self, tokenizer: Any, separator: int | None, folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._folder = folder
        size = _BYTES if tokenizer is None else _size_of(tokenizer)
        self.vocabulary_size = size if size is None else max(size, -1 if separator is None else separator + 1)
        most = max(2**31 if size is None else size, 0 if separator is None else separator + 1)
        kinds = (np.uint8, np.uint16, np.int32, np.int64)
        self._dtype = np.dtype(next(kind for kind in kinds if most <= _values(kind)))

    def tokens(self, argument: str, paths: Sequence[Path]) -> Array | Path:
        """Return the tokens of files as one array in memory or, with a folder, the NumPy file that has them."""
        if self._folder is None or argument == NEW:
            return np.concatenate([np.empty(0, self._dtype), *self._pieces(argument, paths)])
        files = [(str(path.resolve()), *identity(path)) for path in paths]
        content: list[Any] = [_FORMAT, self._dtype.str, self._separator, files]
        if self._tokenizer is not None:
            content += [self.vocabulary_size, *(part.tolist() for part in self._read(argument, paths[0], _BEGINNING))]
        path = self._folder / f"tokens-{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.npy"
        if _is_whole(path):
            _LOG.info("%s: tokens are read from %s", argument, path)
            return path
        with storing(path, "write"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                with aside.open("xb") as file:
                    self._write(file, self._pieces(argument, paths))
                flush_file(aside)
        return path

    def _write(self, file: IO[bytes], pieces: Iterator[Array]) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (0,)}
        np.lib.format.write_array_header_1_0(file, header)  # with room for a longer shape
        begins = file.tell()
        size = sum(file.write(piece.tobytes()) for piece in pieces)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (size // self._dtype.itemsize,)})
        if file.tell() != begins:
            raise RuntimeError("NumPy's header of the array is not as long as that of an empty array")

    def _pieces(self, argument: str, paths: Sequence[Path]) -> Iterator[Array]:
        for path in paths:
            before = identity(path)
            yield from self._read(argument, path)
            if identity(path) != before:
                raise ArgumentError(argument, f"{str(path)!r} has changed while it was read")
            if self._separator is not None:
                yield np.array([self._separator], self._dtype)

    def _read(self, argument: str, path: Path, most: int = -1) -> Iterator[Array]:
        """Yield the tokens of a file, or with a tokenizer of its first bytes."""
        try:
            with path.open("rb") as file:
                if self._tokenizer is not None:
                    yield self._encoded(file.read(most).decode(errors="strict" if most < 0 else "ignore"))
                    return
                while chunk := file.read(_CHUNK):
                    yield np.frombuffer(chunk, np.uint8).astype(self._dtype)
        except OSError as error:
            raise ArgumentError(argument, f"{str(path)!r} cannot be read: {reason_of(error)}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(argument, f"{str(path)!r}: {error}") from error

    def _encoded(self, text: str) -> Array:
        found = self._tokenizer.encode(text)
        tokens = np.asarray(getattr(found, "ids", found))
        if not tokens.size:
            return np.empty(0, self._dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"its tokens must be a list of whole numbers, not {tokens.dtype} of shape {tokens.shape}")
        most = _values(self._dtype) if self.vocabulary_size is None else self.vocabulary_size
        if tokens.min() < 0 or tokens.max() >= most:
            raise ValueError(f"its tokens must be from 0 to {most - 1}, not from {tokens.min()} to {tokens.max()}")
        return tokens.astype(self._dtype)


def _is_whole(path: Path) -> bool:
    """Return whether the tokens are in the cache; log a warning if the file is damaged and must be written again.

    Raises:
        StorageError: this user may not read the file.
    """
    try:
        return bool(np.load(path, mmap_mode="r").ndim == 1)
    except FileNotFoundError:
        return False
    except PermissionError as error:
        advice = "let this user read it, or use another cache_dir"
        raise StorageError(error.errno, f"cannot read {path}: {error.strerror}; {advice}") from error
    except (OSError, ValueError, EOFError) as error:
        _LOG.warning("%s is damaged (%s); the tokens are encoded again", path, error)
        return False


def _values(dtype: Any) -> int:
    return int(np.iinfo(dtype).max) + 1


def _size_of(tokenizer: Any) -> int | None:
    for name in _SIZES:
        found = getattr(tokenizer, name, None)
        found = found() if callable(found) else found
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            # the `vocab_size` of a tokenizer of transformers does not count added tokens, its length does
            return max(found, len(tokenizer)) if hasattr(tokenizer, "__len__") else found
    return None
