"""Columns of Arrow tables as the sources of a batch."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from emrun.base.errors import ArgumentError, needing
from emrun.base.types import Named, Values
from emrun.datasets._categories import ColumnForms
from emrun.datasets._division import Texts
from emrun.datasets._statistics import value_of
from emrun.stream_context import Array

with needing("the dataset", "pyarrow", "data"):
    import pyarrow as pa
    from pyarrow import compute, types


def unreadable(kind: Any) -> bool:
    """Return whether columns of an Arrow type cannot become a source."""
    if types.is_dictionary(kind) or _is_list(kind):
        return unreadable(kind.value_type)
    return not (_is_number(kind) or _is_text(kind) or types.is_null(kind))


def unreadable_columns(schema: Any) -> str:
    """Return the columns of a schema that cannot become sources, with their types, for a message."""
    return ", ".join(f"{field.name!r} ({field.type})" for field in schema if unreadable(field.type))


def agree(argument: str, where: str, schema: Any, kinds: Named) -> None:
    """Note the types as which the columns of a file are read, which are the same for all files.

    Args:
        argument: the argument with the file.
        where: the file.
        schema: the columns of the file.
        kinds: column -> the type, of the files before; whole numbers become floats if another file has floats.

    Raises:
        ArgumentError: no type holds what the column has in this file and in those before.
    """
    plain = [
        pa.field(each.name, each.type.value_type if types.is_dictionary(each.type) else each.type) for each in schema
    ]
    try:
        common = pa.unify_schemas([pa.schema(kinds), pa.schema(plain)], promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise ArgumentError(argument, f"{where}: {error}") from error
    kinds.update(zip(common.names, common.types, strict=True))


def alike(table: Any, kinds: Values) -> Any:
    """Return a table whose columns have the types of all files.

    Raises:
        ValueError: a whole number is too large for the type.
    """
    return table.cast(pa.schema([(name, kinds[name]) for name in table.column_names]))


def types_as_text(kinds: Values) -> str:
    """Return the types of columns as a text, for a file of the run."""
    return base64.b64encode(pa.schema(kinds).serialize()).decode()


def types_of(text: str) -> Named:
    """Return column -> its type, from what `types_as_text` has returned."""
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    return dict(zip(schema.names, schema.types, strict=True))


def as_texts(column: Any) -> Texts:
    """Return a column as texts, with None for nulls."""
    column = column.cast(column.type.value_type) if types.is_dictionary(column.type) else column
    is_plain = not _is_list(column.type) and "binary" not in str(column.type)
    values = (column.cast(pa.string()) if is_plain else column).to_pylist()
    return [each if each is None else str(each) for each in values]


def formed(forms: ColumnForms, name: str, column: Any) -> Any:
    """Return a column with its gaps filled, and its categories as texts.

    Raises:
        ArgumentError: the value that fills gaps does not fit the type of the column, or categories have another type.
    """
    try:
        column = _with_gaps(column) if name in forms.fill_by else column
        column = _filled(column, forms.fill[name]) if name in forms.fill else column
        return _texts(column) if name in forms.categories else column
    except (ValueError, TypeError) as error:
        key = f"fill.{name}" if name in forms.fill else "categories"
        raise ArgumentError(key, f"column {name!r} is {column.type}: {error}") from error


def learn_fill(forms: ColumnForms, name: str, column: Any, where: str) -> None:
    """Note the value that fills the gaps of a column, if the train rows tell it and it is not known."""
    by = forms.fill_by.get(name)
    if by is not None and name not in forms.fill:
        column = _with_gaps(column).drop_null()
        values = np.asarray(column.to_numpy() if _is_number(column.type) else column.to_pylist())
        forms.fill[name] = value_of(by, values, f"fill.{name}", f"{where}: column {name!r}")


def gaps_of(forms: ColumnForms, name: str, column: Any) -> int:
    """Return how many gaps of a column `fill` fills."""
    return int((_with_gaps(column) if name in forms.fill_by else column).null_count)


def _with_gaps(column: Any) -> Any:
    """Return a column with nulls in place of NaN."""
    column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    if not types.is_floating(column.type):
        return column
    return compute.if_else(compute.is_nan(column), pa.scalar(None, column.type), column)


def array_of(column: Any) -> Array | None:
    """Return a column without nulls as an array; None for texts, and for lists of different lengths."""
    return _view(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)


def column_of(values: Array) -> Any:
    """Return an array of shape (N,) or (N, k) as a column."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _filled(column: Any, value: Any) -> Any:
    """Return a column whose nulls are replaced by a value; whole numbers become float64 if the value is not one."""
    if _is_list(column.type):
        raise TypeError("its lists cannot be filled")
    if types.is_null(column.type):
        column = column.cast(pa.scalar(value).type)
    if isinstance(value, float) and types.is_integer(column.type):
        column = column.cast(pa.float64())
    return compute.fill_null(column, pa.scalar(value, column.type))


def _texts(column: Any) -> Any:
    """Return a column of categories, which are texts or whole numbers, as texts."""
    if "binary" in str(column.type) or not (_is_text(column.type) or types.is_integer(column.type)):
        raise TypeError("categories are texts or whole numbers")
    return column.cast(pa.string())


def has_nulls(array: Any) -> bool:
    """Return whether a column, or a list in the column, has a null."""
    return bool(array.null_count) or (_is_list(array.type) and has_nulls(compute.list_flatten(array)))


def sources_of(table: Any) -> Named:
    """Return the columns of a table without nulls as sources.

    Numbers become an array of shape (B,). Lists of numbers become an array of shape (B, k) if all of them have k
    entries, otherwise a list of arrays. Strings and lists of strings become a list.
    """
    return {name: _values(table.column(name).combine_chunks()) for name in table.column_names}


def views_of(table: Any) -> dict[str, Array]:
    """Return the columns without nulls that are arrays as a whole: views of Arrow's memory, but for booleans."""
    columns = {name: table.column(name) for name in table.column_names}
    views = {name: _view(column.chunk(0)) for name, column in columns.items() if column.num_chunks == 1}
    return {name: view for name, view in views.items() if view is not None}


def _view(array: Any) -> Array | None:
    if _is_number(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if _is_list(array.type):
        lengths = _lengths(array)
        values = _view(array.flatten()) if (lengths == lengths[:1]).all() else None
        return None if values is None else values.reshape(len(lengths), *lengths[:1], *values.shape[1:])
    return None


def _values(array: Any) -> Array | list[Any]:
    view = _view(array)
    if view is not None:
        return np.array(view)  # a copy, because Arrow's memory cannot be changed
    if not _is_list(array.type):
        texts: list[Any] = array.to_pylist()
        return texts
    values = _values(array.flatten())
    lengths = _lengths(array)
    ends = np.cumsum(lengths)
    return [values[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _lengths(array: Any) -> Array:
    return np.asarray(compute.list_value_length(array).to_numpy(zero_copy_only=False), dtype=np.int64)


def _is_number(kind: Any) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _is_text(kind: Any) -> bool:
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
