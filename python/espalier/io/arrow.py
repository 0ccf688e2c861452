# SPDX-License-Identifier: Apache-2.0
"""Parquet files as records: what Arrow adds to values, and what it takes from them, is undone.

    arrow.json          the value is that of the JSON text; `datasets` makes this type of mixed ones
    null in a struct    the field is absent, since a struct has the keys of all rows. Nulls in lists and in JSON texts stay
    floats              if every number of a column in the file is an integer, they are integers; pandas made them floats
    map                 an object
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..commands.console import clipped
from ..errors import BadRow, InputError
from ..rows.json_lines import object_without_duplicates

ROWS = 64  # of a chunk
CHUNK_BYTES = 1 << 20
LARGEST_EXACT = 2**53  # up to here a float64 has every integer


@dataclass
class ArrowChunk:
    """Consecutive rows of a Parquet file as the bytes of an Arrow stream."""

    path: str
    first: int  # number of the first row, from 1
    stream: bytes
    integral: frozenset[int]  # leaves (as Parquet counts columns) that are floats and have integers only

    def records(self) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        """Yields (where, record or BadRow)."""
        import pyarrow

        batch, = pyarrow.ipc.open_stream(self.stream)
        leaves = iter(range(1 << 31))
        decoders = [_decoder(field.type, field.name, leaves, self.integral) for field in batch.schema]
        columns = [_values(column, name) for column, name in zip(batch.columns, batch.schema.names)]
        for number, row in enumerate(zip(*columns), start=self.first):
            try:
                yield f"{self.path}: row {number}", _object(batch.schema.names, decoders, row)
            except BadRow as error:
                yield f"{self.path}: row {number}", error


def chunks_of_parquet(path, tick):
    """Yields the rows of a Parquet file as ArrowChunks. Calls tick(fraction of the rows read so far)."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: expected the Python package pyarrow for a Parquet file, received none") from None
    try:
        # Otherwise pyarrow would hold the compressed columns of a whole row group.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
            integral = frozenset(_integral_leaves(file))
            number, rows = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=ROWS):
                size = max(1, min(ROWS, ROWS * CHUNK_BYTES // max(1, batch.nbytes)))
                for start in range(0, batch.num_rows, size):
                    part = batch.slice(start, size).replace_schema_metadata(None)
                    stream = pyarrow.BufferOutputStream()
                    with pyarrow.ipc.new_stream(stream, part.schema) as writer:
                        writer.write_batch(part)
                    yield ArrowChunk(str(path), number + 1, stream.getvalue().to_pybytes(), integral)
                    number += part.num_rows
                    tick(number / rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: expected a complete Parquet file, received one that cannot be read: {clipped(str(error), 200)}"
        ) from None


def _integral_leaves(file):
    """The numbers of the columns of floats in which every number is an integer. NaN counts as null."""
    for index in range(len(file.schema)):
        column = file.schema.column(index)
        if column.physical_type in ("FLOAT", "DOUBLE") or str(column.logical_type) == "Float16":
            batches = file.iter_batches(batch_size=ROWS, columns=[column.path])
            if all(_has_integers_only(batch) for batch in batches):
                yield index


def _has_integers_only(batch):
    import numpy as np
    import pyarrow

    array, = batch.columns if batch.num_columns == 1 else [None]
    while isinstance(array, pyarrow.ExtensionArray) or (array is not None and pyarrow.types.is_nested(array.type)):
        if isinstance(array, pyarrow.ExtensionArray):
            array = array.storage
        elif pyarrow.types.is_struct(array.type):
            array, = array.flatten() if array.type.num_fields == 1 else [None]
        else:
            array = array.flatten()
    if array is None:  # names with dots: the path of this column is the beginning of another's
        return False
    numbers = array.drop_null().cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    numbers = numbers[~np.isnan(numbers)]
    return bool(((np.abs(numbers) <= LARGEST_EXACT) & (np.trunc(numbers) == numbers)).all())


def _values(column, name):
    """The column as Python objects. A BadRow stands for a value that Python has not: a year beyond 9999, broken UTF-8."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        return [_value(scalar, name) for scalar in column]


def _value(scalar, name):
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return BadRow(name, "a value that Python can represent", clipped(str(error), 100))


def _object(names, decoders, row):
    record = {}
    for name, decode, value in zip(names, decoders, row):
        if isinstance(value, BadRow):
            raise value
        value = value if decode is None else decode(value)
        if value is not None:
            record[name] = value
    return record


def _decoder(kind, place, leaves, integral):
    """A function that turns a value of this type into that of the record; None where they are the same.

    leaves counts the leaves of the schema in their order, which is that of Parquet's columns.
    """
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        if kind.extension_name == "arrow.json":
            next(leaves)
            return lambda value: None if value is None else _json(value, place)
        return _decoder(kind.storage_type, place, leaves, integral)
    if types.is_dictionary(kind):
        return _decoder(kind.value_type, place, leaves, integral)
    if types.is_struct(kind):
        return _struct_decoder(kind, place, leaves, integral)
    if types.is_map(kind):
        return _map_decoder(kind, place, leaves, integral)
    if types.is_nested(kind):  # lists
        item = _decoder(kind.value_type, f"{place}[]", leaves, integral)
        return item and (lambda values: None if values is None else [item(value) for value in values])
    return _integer if next(leaves) in integral else None


def _struct_decoder(kind, place, leaves, integral):
    names = [field.name for field in kind]
    decoders = [_decoder(field.type, f"{place}.{field.name}", leaves, integral) for field in kind]
    return lambda value: None if value is None else _object(names, decoders, value.values())


def _map_decoder(kind, place, leaves, integral):
    from pyarrow import types

    _decoder(kind.key_type, place, leaves, integral)  # counts its leaves
    item = _decoder(kind.item_type, f"{place}[]", leaves, integral) or (lambda value: value)
    if types.is_nested(kind.key_type):  # no object can have such keys
        return None
    return lambda pairs: None if pairs is None else object_without_duplicates([(key, item(value)) for key, value in pairs])


def _integer(value):
    return value if value is None or math.isnan(value) else int(value)


def _json(text, place):
    try:
        return json.loads(text, object_pairs_hook=object_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadRow(place, "JSON, which is the type of the column", clipped(str(error), 100)) from None
