# SPDX-License-Identifier: Apache-2.0
"""What a file is that has no rows, for messages and for `espalier inspect`, which converts it."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from ..errors import BadRow, InputError
from .foreign_files import refuse_foreign_file

_MOST_BYTES = 256 << 20
_PLACE = re.compile(r"(?:source [^:]*: )?(?P<file>.+?)(?::\d+)?: (?=field |expected )")


def kind_of_data(path: Path, max_row_bytes: int = _MOST_BYTES, *, skips: bool = False) -> Any:
    """The format of a file's records (espalier.io.formats); None for packed rows, what is no file, and what nothing reads.

    Args:
        path: The file.
        max_row_bytes: Bytes of a record at most.
        skips: Whether records that cannot be read are passed over.
    """
    if path.suffix == ".safetensors" or not path.is_file():
        return None
    from ..io.importing import kind_of_file

    try:
        return kind_of_file(path, argparse.Namespace(format=None, max_row_bytes=max_row_bytes, skip_bad_rows=skips))
    except (InputError, BadRow, OSError):
        return None


def with_advice(error: InputError) -> InputError:
    """The error of reading rows, with the command that converts the file where it has other data.

    Args:
        error: Its message begins with the file.
    """
    text = str(error)
    place = _PLACE.match(text)
    path = Path(place["file"]) if place else None
    if path is None or not path.is_file():
        return error
    try:
        with path.open("rb") as file:
            refuse_foreign_file(path, file.read(16))
    except InputError as better:
        return better
    except OSError:
        return error
    kind = kind_of_data(path)
    if kind is None or kind.name == "rows":
        return error
    command = f"espalier {'import' if kind.rows else 'prepare --model DIR'} {shlex.quote(str(path))} -o rows.jsonl"
    begin = text[: place.start("file")] if place else ""
    return InputError(f"{begin}{path}: expected rows with `input_ids`, received {kind.name} ({kind.fields}): run `{command}` first")
