# SPDX-License-Identifier: Apache-2.0
"""JSON of one line: strict objects, and values in messages."""

import json
from pathlib import Path

from ..errors import BadRow
from .foreign_files import describe_foreign_line

MOST_DIGITS = 4300  # of an integer: Python's limit, because conversion takes quadratic time


def shown(value, limit=60):
    """The value as JSON, shortened to `limit` characters, for messages."""
    if isinstance(value, int) and abs(value) >= 10**limit:
        return f"an integer of {len(str(abs(value)))} digits"
    try:
        text = value if isinstance(value, str) and value.startswith("<") else json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):
        text = f"a {type(value).__name__} that is nested too deeply to be shown"
    return text if len(text) <= limit else text[:limit] + "..."


def is_text(text):
    """Whether it can be encoded as UTF-8: a JSON string may contain an unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def json_value(text, default=None):
    """The value of a JSON text; `default` of any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default


def _integer(text):
    if len(text) > MOST_DIGITS:
        raise BadRow("<line>", f"integers of at most {MOST_DIGITS} digits", f"one of {len(text)}")
    return int(text)


def object_without_duplicates(pairs):
    """The dict of a JSON object; raises BadRow for duplicate keys."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow(key, "each key once in an object", "it twice")
            seen.add(key)
    return entries


def parse_line(line, where=""):
    """The JSON object on one line of bytes; raises BadRow. `where`: FILE:LINE, for messages. NaN and the infinities, which JSON
    does not have but programs write, are floats; whoever uses a field refuses them."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_int=_integer, object_pairs_hook=object_without_duplicates)
    except UnicodeDecodeError as error:
        raise BadRow("<line>", "UTF-8", f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        foreign = describe_foreign_line(line, Path(where.rpartition(":")[0]))
        raise BadRow("<line>", "one JSON object", foreign or f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("<line>", "JSON of bounded depth", "deeper nesting than can be parsed") from None
    if not isinstance(row, dict):
        foreign = describe_foreign_line(line, Path(where.rpartition(":")[0]))
        raise BadRow("<line>", "one JSON object", foreign or shown(row))
    return row
