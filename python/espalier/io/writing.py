# SPDX-License-Identifier: Apache-2.0
"""Writes rows atomically, in the format of the file name's suffix."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import BadRow, InputError
from ..rows.fields import ROW_NUMBERS
from .rules import checked

BATCH = 1024  # rows per Parquet row group


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> int:
    """Writes rows to a file, in the form that its name asks for.

    These are JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst), packed (.safetensors) and Parquet (.parquet).

    Args:
        rows: Dicts as docs/data-format.md has them.
        path: The file.

    Returns:
        The number of rows.

    Raises:
        InputError: A row breaks the rules; what was at `path` before is left. Or the file cannot be written.

    Examples:
        >>> import espalier, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> espalier.io.write_rows([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}], path)
        1
    """
    from ..native import core

    count, path = 0, Path(path)
    with parquet_writer(path, ROW_TYPES) if path.suffix == ".parquet" else core.RowWriter(path) as writer:
        for count, row in enumerate(rows, start=1):
            try:
                writer.add(checked(row))
            except BadRow as error:
                raise InputError(f"row {count}: {error}") from None
    return count


# The types of Parquet columns, as functions of pyarrow.
ROW_TYPES = {
    "trajectory_id": lambda arrow: arrow.string(),
    "group_id": lambda arrow: arrow.string(),
    "pair_id": lambda arrow: arrow.string(),
    "chosen": lambda arrow: arrow.bool_(),
    **dict.fromkeys(ROW_NUMBERS, lambda arrow: arrow.float64()),
    "turn_rewards": lambda arrow: arrow.list_(arrow.float64()),
    "advantage": lambda arrow: arrow.float64(),
    "input_ids": lambda arrow: arrow.list_(arrow.int32()),
    "loss_mask": lambda arrow: arrow.list_(arrow.int8()),
    "loss_weights": lambda arrow: arrow.list_(arrow.float64()),
    "logprobs": lambda arrow: arrow.list_(arrow.float64()),
    "ref_logprobs": lambda arrow: arrow.list_(arrow.float64()),
    "advantages": lambda arrow: arrow.list_(arrow.float64()),
    "ref_topk_ids": lambda arrow: arrow.list_(arrow.list_(arrow.int32())),
    "ref_topk_logprobs": lambda arrow: arrow.list_(arrow.list_(arrow.float64())),
    "routed_experts": lambda arrow: arrow.list_(arrow.list_(arrow.int32())),
}


@contextlib.contextmanager
def parquet_writer(path, types):
    """Yields a writer with add(record) that writes a Parquet file with columns of these types; null for missing
    fields."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: expected the Python package pyarrow for a Parquet file, received none") from None
    from ..native import core

    schema = pyarrow.schema([(name, type_of(pyarrow)) for name, type_of in types.items()])
    with core.AtomicFile(path) as file, parquet.ParquetWriter(file.temporary, schema, compression="zstd") as table:
        rows: list[Any] = []

        def flush():
            table.write_table(pyarrow.Table.from_pylist(rows, schema))
            rows.clear()

        def add(record):
            rows.append(record)
            if len(rows) == BATCH:
                flush()

        yield SimpleNamespace(add=add)
        if rows:
            flush()


@contextlib.contextmanager
def json_writer(path):
    """Yields a writer with add(record) that writes one JSON object per line."""
    from ..native import core

    with core.TextFile(path) as file:
        yield SimpleNamespace(
            add=lambda record: file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"))
