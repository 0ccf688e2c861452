# SPDX-License-Identifier: Apache-2.0
"""Files without rows: how to convert them, for messages, and whether `espalier inspect` has to."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from ..errors import BadRow, InputError
from .foreign_files import refuse_foreign_file

_PLACE = re.compile(r"(?P<source>source [^:]*: )?(?P<file>.+?)(?::\d+)?: (?=field |expected )")


def needs_conversion(path: Path, max_row_bytes: int, *, skips: bool = False) -> bool:
    """Whether a file has records that only `espalier prepare` reads: it is Parquet or one JSON document, or its first record has
    no token ids, or has them in batches. False for standard input, and for what nothing reads. skips: whether records that cannot
    be read are passed over."""
    if path.suffix == ".safetensors" or str(path) == "/dev/stdin" or not path.is_file():
        return False
    from ..io.sources import LineChunk, chunks_of, is_parquet

    try:
        if is_parquet(path):
            return True
        for chunk in chunks_of(path, max_row_bytes, lambda fraction: None):
            if not isinstance(chunk, LineChunk):
                return True
            for _, record in chunk.records():
                if not isinstance(record, BadRow):
                    return not _is_row(record)
                if not skips:
                    return False
    except (InputError, OSError):
        pass
    return False


def _is_row(record: dict[str, Any]) -> bool:
    """Whether a record has token ids as a row has them. A batch has lists of them, and one of verl has padding."""
    if "input_ids" not in record:
        return False
    ids = record["input_ids"]
    is_batch = isinstance(ids, list) and len(ids) > 0 and isinstance(ids[0], list)
    return not is_batch and not ("responses" in record and {"attention_mask", "response_mask"} & record.keys())


def with_advice(error: InputError) -> InputError:
    """The error of reading rows, whose message begins with the file, or with "source NAME: " and the file; with the command that
    converts the file where it has other data."""
    place = _PLACE.match(str(error))
    path = Path(place["file"]) if place else None
    if place is None or path is None or not path.is_file():
        return error
    source = place["source"] or ""
    try:
        with path.open("rb") as file:
            refuse_foreign_file(path, file.read(16))
    except InputError as better:
        return InputError(f"{source}{better}")
    except OSError:
        return error
    from ..io.importing import kind_of_file
    from ..native import core

    try:
        kind = kind_of_file(path, argparse.Namespace(format=None, max_row_bytes=core.MAX_ROW_BYTES, skip_bad_rows=False))
    except (InputError, OSError):
        return error
    if kind is None or kind.name == "rows":
        return error
    command = f"espalier {'import' if kind.rows else 'prepare --model DIR'} {shlex.quote(str(path))} -o rows.jsonl"
    return InputError(f"{source}{path}: expected rows with `input_ids`, received {kind.name} ({kind.fields}): run `{command}` "
                      "first")  # fmt: skip
