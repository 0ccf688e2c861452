# SPDX-License-Identifier: Apache-2.0
"""Converts rows of integers in the forms that users have to two arrays: offsets int64 [R + 1] and values [N]."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Packed: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32]]  # offsets [R + 1] and tokens [N]
Row: TypeAlias = Sequence[int] | NDArray[Any] | Mapping[str, Any]
Rows: TypeAlias = Packed | Iterable[Row]

_INT32_MAX = np.iinfo(np.int32).max
_ROWS = "a list of rows, each a list of token ids, an integer array or a dict with input_ids; or (offsets, tokens)"


def is_packed(rows: object) -> TypeGuard[Packed]:
    """Whether these are (offsets, tokens)."""
    return isinstance(rows, tuple) and len(rows) == 2 and all(isinstance(part, np.ndarray) for part in rows)


def token_sequences(rows: Rows) -> Packed:
    """(offsets int64 [R + 1], tokens int32 [N]) of the rows of espalier.build; packed rows are not copied."""
    if is_packed(rows):
        return _packed(*rows)
    ids = [_tokens_of(row, number) for number, row in enumerate(listed(rows))]
    offsets, tokens = ragged(ids, "input_ids")
    _check_tokens(offsets, tokens)
    return offsets, tokens.astype(np.int32, copy=False)


def listed(rows: Any) -> list[Any]:
    """`rows` as a list. Raises InputError for anything else than a sequence of rows, such as a padded matrix."""
    if isinstance(rows, str | bytes | dict) or not hasattr(rows, "__iter__"):
        hint = "; read files with espalier.read" if isinstance(rows, str | bytes) or hasattr(rows, "__fspath__") else ""
        raise InputError(f"rows: expected {_ROWS}; received {type(rows).__name__}{hint}")
    if getattr(rows, "ndim", 0) > 1:
        raise InputError(f"rows: expected {_ROWS}; received an array of shape {tuple(rows.shape)}: padding would count "
                         "as tokens, so cut it off")  # fmt: skip
    return list(rows)


def ragged(rows: Iterable[Any], field: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(offsets, values) of lists or arrays of integers; values are int64, or int32 if all rows are."""
    arrays = [_integers(row, number, field) for number, row in enumerate(rows)]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return offsets, values


def merge_keys_of(keys: Any, offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 [N] of integers, one for each token: flat, or a list of rows."""
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "iu":
        sizes, values = None, keys
    else:
        ends, values = ragged(listed(keys), "merge_keys")
        sizes = np.diff(ends)
    if sizes is not None and not np.array_equal(sizes, np.diff(offsets)):
        if len(sizes) != len(offsets) - 1:
            raise InputError(f"merge_keys: expected {len(offsets) - 1} rows, received {len(sizes)}")
        row = int(np.flatnonzero(sizes != np.diff(offsets))[0])
        raise InputError(f"row {row}: field `merge_keys`: expected {offsets[row + 1] - offsets[row]} entries (one for "
                         f"each token), received {sizes[row]}")  # fmt: skip
    if len(values) != offsets[-1]:
        raise InputError(f"merge_keys: expected {offsets[-1]} entries (one for each token), received {len(values)}")
    return np.ascontiguousarray(values).astype(np.int64, copy=False).view(np.uint64)


def tree_keys_of(keys: Iterable[Hashable], num_rows: int) -> NDArray[np.int64]:
    """int64 [R]: equal numbers for equal keys, which may be any hashable objects."""
    numbers: dict[Hashable, int] = {}
    try:
        values = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    except TypeError as error:
        raise InputError(f"tree_keys: expected a key for each row, such as a group's name; received: {error}") from None
    if len(values) != num_rows:
        raise InputError(f"tree_keys: expected {num_rows} (one for each row), received {len(values)}")
    return values


def route_keys_of(rows: Sequence[Any]) -> list[NDArray[np.int64]] | None:
    """Rows of numbers, equal for tokens with equal recorded routes; None if no row has `routed_experts`."""
    routes = [row.get("routed_experts") if isinstance(row, dict) else None for row in rows]
    if all(route is None for route in routes):
        return None
    widths: set[int] = set()
    tables = []
    for number, (row, route) in enumerate(zip(rows, routes)):
        tokens = len(_tokens_of(row, number))
        table = np.zeros((tokens, 0), np.int64) if route is None else np.asarray(route)
        if route is not None:
            if table.dtype.kind not in "iu" or table.ndim < 2 or len(table) != tokens:
                raise InputError(f"row {number}: field `routed_experts`: expected {tokens} lists of expert ids (one "
                                 f"for each token), received {_described(table, route)}")  # fmt: skip
            table = table.reshape(tokens, -1).astype(np.int64)
            widths.add(table.shape[1])
        tables.append(table)
    if len(widths) != 1:
        raise InputError(f"field `routed_experts`: expected equally many ids per token in all rows, received "
                         f"{sorted(widths)}")  # fmt: skip
    width = widths.pop()
    absent = [np.full((len(table), width), -1) if table.shape[1] == 0 else table for table in tables]
    _, numbers = np.unique(np.concatenate(absent), axis=0, return_inverse=True)
    return np.split(numbers.reshape(-1), np.cumsum([len(table) for table in tables])[:-1])


def _packed(offsets: NDArray[np.int64], tokens: NDArray[np.int32]) -> Packed:
    for name, array, dtype in (("offsets", offsets, np.int64), ("tokens", tokens, np.int32)):
        if array.dtype != dtype or array.ndim != 1:
            raise InputError(f"rows: expected a pair (offsets int64 [R + 1], tokens int32 [N]); received {name} "
                             f"{array.dtype} of shape {array.shape}. Give two rows as a list")  # fmt: skip
    offsets, tokens = np.ascontiguousarray(offsets), np.ascontiguousarray(tokens)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) <= 0):
        raise InputError(f"rows: expected offsets that ascend from 0 to {len(tokens)}, the number of tokens, without "
                         f"empty rows; received {_clipped(offsets)}")  # fmt: skip
    _check_tokens(offsets, tokens)
    return offsets, tokens


def _tokens_of(row: Any, number: int) -> Any:
    if not isinstance(row, dict) and not hasattr(row, "keys"):
        return row
    if "input_ids" not in row:
        raise InputError(f"row {number}: expected the field `input_ids`, received {_clipped(list(row))}")
    return row["input_ids"]


def _integers(row: Any, number: int, field: str) -> NDArray[Any]:
    if isinstance(row, str | bytes | dict) or not hasattr(row, "__len__"):
        raise InputError(f"row {number}: field `{field}`: expected a list of integers, received {type(row).__name__}")
    try:
        array = np.asarray(row)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"row {number}: field `{field}`: expected a list of integers, received {type(row).__name__}: "
                         f"{error}") from None  # fmt: skip
    if array.ndim == 1 and len(array) == 0:
        raise InputError(f"row {number}: field `{field}`: expected at least one entry, received none")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        received = _described(array, row)
        raise InputError(f"row {number}: field `{field}`: expected a list of integers, received {received}")
    if array.dtype == np.uint64:
        return array.view(np.int64)  # tokens from 2^63 on become negative and are refused
    return array.astype(np.int32 if array.dtype == np.int32 else np.int64, copy=False)


def _check_tokens(offsets: NDArray[np.int64], tokens: NDArray[Any]) -> None:
    if len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() <= _INT32_MAX):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens > _INT32_MAX))[0])
    row = int(np.searchsorted(offsets, at, side="right")) - 1
    raise InputError(f"row {row}: field `input_ids`: expected token ids from 0 to {_INT32_MAX}, received {tokens[at]} "
                     f"at index {at - offsets[row]}")  # fmt: skip


def _described(array: NDArray[Any], given: object) -> str:
    return f"{_clipped(given)} ({array.dtype}, shape {array.shape})"


def _clipped(value: object, most: int = 60) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= most else text[:most] + "..."
