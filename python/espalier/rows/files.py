# SPDX-License-Identifier: Apache-2.0
"""Reading and writing rows: JSON Lines (plain, .gz, .zst) and packed safetensors."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..native import core
from .advice import with_advice
from .fields import ROW_NUMBERS
from .sequences import Row, listed

Trajectories = core.Trajectories

# Fields of a row and the types of their columns, without aliases that other programs use.
_ARRAYS: dict[str, type[np.generic]] = {
    "input_ids": np.int32, "loss_mask": np.uint8, "loss_weights": np.float64, "logprobs": np.float64,
    "ref_logprobs": np.float64, "advantages": np.float64, "turn_rewards": np.float64, "routed_experts": np.int32}  # fmt: skip
# Fields with K entries per token, their types and placeholders.
_TOPK: dict[str, tuple[type[np.generic], float]] = {"ref_topk_ids": (np.int32, -1), "ref_topk_logprobs": (np.float64, 0.0)}
_NUMBERS = ("advantage", *ROW_NUMBERS)
_TEXTS = ("trajectory_id", "group_id", "pair_id")


def read(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, vocab_size: int = 0,
         skip_bad_rows: bool = False, limit: int = 0, max_row_bytes: int = core.MAX_ROW_BYTES) -> Trajectories:  # fmt: skip
    """Reads rows of files as Trajectories: JSON Lines (plain, gzip or zstd, by content) or packed .safetensors.

    A single packed file is mapped into memory, not read, so it has to stay as it is. Warns of ignored fields that have an
    entry for each token.

    Args:
        paths: A file, or a list of files and patterns such as "rows-*.jsonl", read one after another.
        vocab_size: Ids have to be below it; 0: any.
        skip_bad_rows: Warn of bad rows instead of raising at the first.
        limit: Read only so many good rows; 0: all.
        max_row_bytes: JSON Lines: bytes of one row at most.

    Returns:
        The rows of all files in order.

    Raises:
        InputError: "FILE:LINE: field `F`: expected E, received R" for a bad row; or a file cannot be read.

    Examples:
        >>> import espalier, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> espalier.write(path, [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [5, 6]}])
        >>> rows = espalier.read(path)
        >>> rows
        <espalier.Trajectories: 2 rows, 5 tokens>
        >>> rows.input_ids.tolist(), rows.loss_weights.tolist(), rows.logprobs
        ([5, 6, 7, 5, 6], [0, 1, 1, 1, 1], None)
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    for name, value in {"vocab_size": vocab_size, "limit": limit, "max_row_bytes": max_row_bytes - 1}.items():
        if value < 0:
            raise InputError(f"{name}: expected a whole number from {int(name == 'max_row_bytes')}, received {value}")
    files = core.expand_file_patterns([os.fspath(name) for name in names])
    rows: Trajectories
    try:
        rows, skipped, errors, ignored = core.read(files, vocab_size, skip_bad_rows, limit, max_row_bytes)
    except InputError as error:
        raise with_advice(error) from None
    if skipped:
        warnings.warn(f"skipped {skipped} bad rows of {skipped + len(rows)}, the first: {errors[0]}", stacklevel=2)
    if ignored:
        warnings.warn(f"fields with an entry for each token are ignored: {', '.join(ignored)}", stacklevel=2)
    return rows


def write(path: str | os.PathLike[str], rows: Trajectories | Mapping[str, Any] | Iterable[Row]) -> None:
    """Writes rows, for `read` and the commands.

    Packed safetensors where the name ends in .safetensors, else JSON Lines; compressed where it ends in .gz or .zst. The file
    appears under its name when it is whole.

    Args:
        path: The file.
        rows: Dicts with the fields of docs/data-format.md, lists of token ids, a dict of columns, or Trajectories.

    Raises:
        InputError: `read` would refuse a row, or it has a field that the format does not have; the message names row and
            field. Or the file cannot be written.

    Examples:
        >>> import espalier, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.safetensors"
        >>> espalier.write(path, [{"input_ids": [5, 6, 7], "group_id": "a", "reward": 1.0}])
        >>> espalier.read(path).group_id
        ['a']
    """
    core.write(os.fspath(path), trajectories(rows))


def trajectories(rows: Trajectories | Mapping[str, Any] | Iterable[Row]) -> Trajectories:
    """Rows as Trajectories.

    Columns of the types below are used as they are, without a copy (but for offsets), and have to stay as they are; others
    are converted.

    Args:
        rows: Dicts with the fields of docs/data-format.md, or lists of token ids. Or one dict of columns, those of a packed
            file as NumPy arrays (or what NumPy takes for some): offsets int64 [R + 1], input_ids int32 [N], and of the others
            what all rows have: loss_mask uint8 or bool [N] or loss_weights; logprobs, ref_logprobs and advantages [N], float32
            or float64; reward, temperature, top_k and top_p [R]; chosen [R]; trajectory_id, group_id and pair_id, lists of R
            texts; turn_rewards with "turn_rewards.offsets" int64 [R + 1]; ref_topk_ids int32 and ref_topk_logprobs [N, K];
            routed_experts int32 [N, W]. Columns alone may have target_ids int32 [N]: what the term of a token predicts in
            place of that token, while tokens after it still read the token. Rows of equal tokens and unlike targets are
            encoded once.

    Returns:
        The rows in order.

    Raises:
        InputError: A row or a column cannot be used; the message names row and field.

    Examples:
        >>> import espalier, numpy
        >>> tokens = numpy.array([5, 6, 7, 5, 6], numpy.int32)
        >>> rows = espalier.trajectories({"offsets": numpy.array([0, 3, 5]), "input_ids": tokens, "reward": [0.5, 1]})
        >>> rows, numpy.shares_memory(rows.input_ids, tokens)
        (<espalier.Trajectories: 2 rows, 5 tokens>, True)
    """
    if isinstance(rows, Trajectories):
        return rows
    if isinstance(rows, dict):
        return core.trajectories_of_columns(_columns(rows))
    builder = core.TrajectoriesBuilder()
    for number, row in enumerate(listed(rows)):
        fields = row if isinstance(row, dict) else {"input_ids": row}
        try:
            columns = {name: _column(name, value) for name, value in fields.items() if value is not None}
            if "input_ids" not in columns:
                raise InputError(f"field `input_ids`: expected a list of token ids, received none in {sorted(columns)}")
            builder.append(columns)
        except InputError as error:
            raise InputError(f"row {number}: {error}") from None
    return builder.finish()


def file_names(rows: Any) -> list[str | os.PathLike[str]] | None:
    """The names where rows are given as a file, or as a list of files and patterns; else None."""
    names = [rows] if isinstance(rows, str | os.PathLike) else rows
    is_named = isinstance(names, list | tuple) and names and all(isinstance(name, str | os.PathLike) for name in names)
    return list(names) if is_named else None


def _columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns converted to exactly the types of the core."""
    types: dict[str, type[np.generic]] = {**_ARRAYS, "offsets": np.int64, "chosen": np.uint8,
             **dict.fromkeys(ROW_NUMBERS, np.float64), "turn_rewards.offsets": np.int64, "target_ids": np.int32,
             **{name: dtype for name, (dtype, _) in _TOPK.items()}}  # fmt: skip
    found: dict[str, Any] = {}
    for name, value in columns.items():
        if name in _TEXTS:
            found[name] = [str(text) for text in value]
        elif name in types:
            found[name] = _whole_column(name, value, types[name])
        else:
            raise InputError(f"{name}: expected one of {', '.join([*types, *_TEXTS])}, the columns of a packed file")
    if missing := {"offsets", "input_ids"} - found.keys():
        raise InputError(f"{min(missing)}: expected this column, received {', '.join(found) or 'none'}")
    if {"loss_mask", "loss_weights"} <= found.keys():
        raise InputError("loss_mask, loss_weights: expected one of them, received both")
    for name, width in (("routed_experts", "routes_per_token"), ("ref_topk_ids", "ref_topk")):
        if name in found:
            table = np.asarray(columns[name])
            if table.ndim != 2:
                raise InputError(f"{name}: expected shape [N, {'W' if width == 'routes_per_token' else 'K'}], received "
                                 f"{list(table.shape)}")  # fmt: skip
            found[width] = table.shape[1]
    return found


def _whole_column(name: str, value: Any, dtype: type[np.generic]) -> NDArray[Any]:
    if isinstance(value, np.ndarray) and value.dtype == np.bool_ and dtype == np.uint8:
        value = value.view(np.uint8)
    if isinstance(value, np.ndarray) and value.dtype == np.float32 and dtype == np.float64:
        dtype = np.float32
    if name in ("offsets", "turn_rewards.offsets"):
        offsets = np.asarray(value)
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
            raise InputError(f"{name}: expected integers, received {offsets.dtype} of shape {list(offsets.shape)}")
        return np.ascontiguousarray(offsets, np.int64)
    return _array(name, value, dtype)


def _column(name: str, value: Any) -> Any:
    if name in _ARRAYS:
        return _array(name, value)
    if name in _TOPK:
        return _tokens(name, value)
    if name in _NUMBERS and isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        return float(value)
    if name == "chosen" and isinstance(value, bool | np.bool_):
        return bool(value)
    if name in _TEXTS and isinstance(value, str | int | np.integer) and not isinstance(value, bool):
        return str(value)
    kinds = {"chosen": "a boolean", **dict.fromkeys(_NUMBERS, "a number"), **dict.fromkeys(_TEXTS, "text or an id")}
    if name not in kinds:
        raise InputError(f"field `{name}`: expected one of {', '.join([*_ARRAYS, *_TOPK, *kinds])} (docs/data-format.md)")
    raise InputError(f"field `{name}`: expected {kinds[name]}, received {type(value).__name__}")


def _tokens(name: str, value: Any) -> NDArray[Any]:
    """One list per token; empty lists and None are filled with placeholders."""
    dtype, absent = _TOPK[name]
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return _array(name, value, dtype)
    try:
        lists = [[] if entries is None else list(entries) for entries in value]
    except TypeError:
        raise InputError(f"field `{name}`: expected a list for each token, received others") from None
    width = max(map(len, lists), default=0)
    for token, entries in enumerate(lists):
        if len(entries) not in (0, width):
            raise InputError(f"field `{name}`: expected {width} entries for every token that has any, received "
                             f"{len(entries)} for token {token}")  # fmt: skip
    return _array(name, [each for entries in lists for each in entries or [absent] * width], dtype)


def _array(name: str, value: Any, dtype: type[np.generic] | None = None) -> NDArray[Any]:
    dtype = _ARRAYS[name] if dtype is None else dtype
    if name in ("logprobs", "ref_logprobs") and isinstance(value, list | tuple) and value and value[0] is None:
        value = [0.0, *value[1:]]  # nothing predicts the first token
    kinds = {"i": "iu", "u": "iub", "f": "iuf"}[np.dtype(dtype).kind]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        received = f"{type(value).__name__}: {error}"
        raise InputError(f"field `{name}`: expected a list of numbers, received {received}") from None
    if (name == "routed_experts" or name in _TOPK) and array.ndim > 1:
        array = array.reshape(-1)
    if array.ndim != 1 or (array.dtype.kind not in kinds and array.size > 0):
        expected = {"i": "integers", "u": "0 and 1", "f": "numbers"}[np.dtype(dtype).kind]
        received = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"field `{name}`: expected a list of {expected}, received {received}")
    if np.dtype(dtype).kind in "iu" and array.size:
        bounds = np.iinfo(np.dtype(dtype))
        low, high = (0, 1) if dtype == np.uint8 else (bounds.min, bounds.max)
        if array.min() < low or array.max() > high:
            received = f"{array.min()} to {array.max()}"
            raise InputError(f"field `{name}`: expected integers from {low} to {high}, received {received}")
    return np.ascontiguousarray(array, dtype)
