"""`init_from`: the weights that the module of a new run begins with."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Required, TypedDict

from torch import Tensor
from torch.nn import Module

from emrun.base.arguments import check_choice, check_keys, check_names, expanded
from emrun.base.errors import ArgumentError, ReadTimeout, StateError, StorageError, UsageError, reason_of
from emrun.base.patterns import Match, check_matches, compiled, patterns
from emrun.base.tables import Table
from emrun.base.types import Json, Strings
from emrun.base.wording import IN_TABLE, few, in_one_line, listed
from emrun.models.modes import Tensors
from emrun.models.weights.matching import MISMATCHES, Matches, dtype_in_words, matches_of
from emrun.models.weights.saving import as_held, extra_state, own_memory, own_tensors
from emrun.storage.checkpoints.saved_weights import read_saved

_LOG = logging.getLogger(__name__)

_KEY = "init_from"


Mismatch = Literal["error", "skip"]
Renames = tuple[tuple[re.Pattern[str], Strings], ...]


class InitFromForm(TypedDict, total=False):
    """The long form of `init_from` in a config; `path` is required."""

    path: Required[str]
    match: Match
    rename: Mapping[str, Match]
    on_mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class InitFrom:
    """An entry of the argument `init_from` of a model: `PATH`, or `{path: PATH, match, rename, on_mismatch}`.

    Args:
        path: where the weights are; see `emrun.storage.checkpoints.saved_weights.read_saved`.
        match: patterns that select the parameters and buffers to load (`re.search`); without patterns, all are loaded.
        rename: pairs of a pattern and its replacements, applied in this order to the names in the file (`re.sub`). With
            several replacements, a tensor gets several names.
        skips: whether to load what fits, instead of an error, if something does not.
        key: the argument with the path, for messages.
        where: the argument, such as `init_from[1]`, for messages.
    """

    path: Path
    match: tuple[re.Pattern[str], ...] = ()
    rename: Renames = ()
    skips: bool = False
    key: str = _KEY
    where: str = _KEY

    @classmethod
    def read(cls, value: object, where: str = _KEY) -> InitFrom:
        """Read an entry; no file is read.

        Raises:
            ArgumentError: it has another form, or a pattern is not a regular expression.
        """
        if isinstance(value, str | os.PathLike) and str(value):
            return cls(expanded(value), key=where, where=where)
        if not isinstance(value, Mapping):
            raise ArgumentError(
                where, f"{value!r} is neither a path nor a mapping such as {{path: FILE, match: REGEX}}"
            )
        check_keys(where, value, list(InitFromForm.__annotations__))
        path = value.get("path")
        key = f"{where}.path"
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ArgumentError(
                key, f"{path!r} is not the path of a run directory, a checkpoint, or a file with weights"
            )
        policy = value.get("on_mismatch", "error")
        check_choice(f"{where}.on_mismatch", policy, Mismatch)
        match = patterns(f"{where}.match", value.get("match"))
        return cls(
            expanded(path), match, _renames(f"{where}.rename", value.get("rename")), policy == "skip", key, where
        )

    @classmethod
    def read_all(cls, value: object) -> list[InitFrom]:
        """Read the argument: an entry, or a list of entries.

        Raises:
            ArgumentError: see `read`.
        """
        if not isinstance(value, list | tuple):
            return [cls.read(value)]
        if not value:
            raise ArgumentError(_KEY, "the list is empty")
        return [cls.read(entry, f"{_KEY}[{index}]") for index, entry in enumerate(value)]

    def load(self, module: Module, before: dict[str, str]) -> Json:
        """Load the weights into a module, and log a table of what was loaded and what was not.

        Args:
            module: the module.
            before: name -> where it is from, of what other entries have loaded; gets what this entry loads.

        Returns:
            `source`, where the weights are from, and the `rows` of the table: {what, tensors, values, which}.

        Raises:
            ArgumentError: the file cannot be read, nothing fits, or something does not fit and is not to be skipped.
                The module is only changed if it is the module that refuses.
            ReadTimeout: the file system does not return a file in time.
        """
        # what the file has
        try:
            saved = read_saved(self.path)
        except ReadTimeout:
            raise
        except (UsageError, StateError, StorageError) as error:
            raise self._refused(reason_of(error)) from error
        in_file = self._renamed(saved.tensors)
        # what of it can be loaded
        own_memory(module)
        in_module = own_tensors(module)
        check_matches(f"{self.where}.match", self.match, {**in_module, **in_file}, "the names")
        matches = matches_of(module, in_file, self._selects)
        kind = type(module).__name__
        wrong = [f"{why}: {few(texts.values(), 200)}" for why, texts in matches.not_loaded.items() if why in MISMATCHES]
        if wrong and not self.skips:
            raise self._refused(
                f"{saved.source} does not fit {kind}: {'; '.join(wrong)}; to load only what fits, set on_mismatch: skip"
            )
        if not matches.sources:
            raise self._refused(
                f"nothing of {saved.source} is loaded: the file has {few(in_file)}, {kind} has {few(in_module)}"
            )
        # whether another entry has loaded it
        loaded = [*matches.sources, *matches.tied]
        if twice := [name for name in loaded if name in before]:
            others = listed(list(dict.fromkeys(before[name] for name in twice)))
            raise self._refused(f"{few(twice)} of {saved.source} would replace what is loaded from {others}; set match")
        before |= dict.fromkeys(loaded, saved.source)
        # the load, and a table of it
        self._copy(module, matches)
        rows = _rows(matches, in_module, list(dict.fromkeys((*saved.others, *extra_state(module)))))
        cells = [[row["what"], f"{row['tensors']:,}", f"{row['values']:,}", row["which"]] for row in rows]
        _LOG.info(
            "weights from %s:\n%s",
            saved.source,
            Table(cells, ["", "tensors", "values", ""], ("left", "right", "right", "left")),
        )
        return {"source": saved.source, "rows": rows}

    def _selects(self, name: str) -> bool:
        """Return whether a parameter or buffer of this name is to be loaded."""
        return not self.match or any(pattern.search(name) for pattern in self.match)

    def _refused(self, message: str) -> ArgumentError:
        return ArgumentError(self.key, message)

    def _renamed(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a file under the names that the module would have for them."""
        unused = dict.fromkeys(pattern.pattern for pattern, _ in self.rename)
        renamed: dict[str, Tensor] = {}
        names_in_file: dict[str, str] = {}
        for name, tensor in tensors.items():
            # the new names of a tensor
            names = [name]
            for pattern, replacements in self.rename:
                if not any(map(pattern.search, names)):
                    continue
                unused.pop(pattern.pattern, None)
                try:
                    names = list(dict.fromkeys(pattern.sub(each, old) for old in names for each in replacements))
                except (re.error, IndexError) as error:
                    raise ArgumentError(
                        f"{self.where}.rename", f"{listed(replacements)!r} cannot replace {pattern.pattern!r}: {error}"
                    ) from error
            # which no other tensor may have
            for new in names:
                if new in renamed:
                    raise ArgumentError(
                        f"{self.where}.rename",
                        f"{in_one_line(names_in_file[new])} and {in_one_line(name)} both become {in_one_line(new)}",
                    )
                renamed[new] = tensor
                names_in_file[new] = name
        if unused:
            raise ArgumentError(
                f"{self.where}.rename", f"{next(iter(unused))!r} matches no name in the file, which has {few(tensors)}"
            )
        return renamed

    def _copy(self, module: Module, matches: Matches) -> None:
        """Copy the tensors into a module; each is read from its file at this moment."""
        kind = type(module).__name__
        try:
            unknown = module.load_state_dict(
                {**module.state_dict(), **as_held(module, matches.sources)}, strict=False
            ).unexpected_keys
        except RuntimeError as error:
            raise self._refused(f"{kind} does not load these weights: {error}") from error
        if unknown:
            raise self._refused(f"{kind} does not load what its state dict has: {few(unknown)}")


def _renames(key: str, value: object) -> Renames:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentError(key, f"{value!r} is not a mapping from regular expressions to replacements")
    renames = []
    for pattern, replacement in (value or {}).items():
        replacements = [replacement] if isinstance(replacement, str) else replacement
        check_names(f"{key}.{pattern}", replacements)
        if not replacements:
            raise ArgumentError(f"{key}.{pattern}", "the list is empty")
        renames.append((compiled(key, pattern), replacements))
    return tuple(renames)


def _rows(matches: Matches, in_module: Tensors, others: list[str]) -> list[Json]:
    """Return the rows of the table: {what, tensors, values, which}."""
    # what is loaded: the name of a tensor -> what the table shows for it
    lists = {"loaded": {name: name for name in in_module if name in matches.sources or name in matches.tied}}
    for name, tensor in matches.sources.items():
        old = dtype_in_words(tensor)
        new = dtype_in_words(in_module[name])
        if old != new:
            lists.setdefault(f"of these, converted from {old} to {new}", {})[name] = name
    lists["of these, tied to others"] = {name: name for name in matches.tied}
    # what is not
    lists |= {f"not loaded: {why}": texts for why, texts in matches.not_loaded.items()}
    lists["not loaded: not a tensor"] = {name: name for name in others}
    return [
        {
            "what": what,
            "tensors": len(texts),
            "values": sum(matches.sizes.get(name, 0) for name in texts),
            "which": few(texts.values(), IN_TABLE),
        }
        for what, texts in lists.items()
        if texts or what == "loaded"
    ]
