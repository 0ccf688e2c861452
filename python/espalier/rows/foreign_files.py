# SPDX-License-Identifier: Apache-2.0
"""Recognises files that are not JSON lines, and names commands that convert them."""

import shlex

from ..errors import InputError

_PANDAS = ("python3 -c 'import sys, pandas; pandas.{}(sys.argv[1]).to_json(\"chats.jsonl\", orient=\"records\", "
           "lines=True)' {}")
_FORMATS = (
    (b"PAR1", "a Parquet file", lambda file: f"espalier import --model DIR {file} -o rows.jsonl"),
    (b"ARROW1", "an Arrow file", lambda file: _PANDAS.format("read_feather", file)),
    (b"\xff\xff\xff\xff", "an Arrow stream", lambda file:
     "python3 -c 'import sys, datasets; datasets.Dataset.from_file(sys.argv[1]).to_json(\"chats.jsonl\")' " + file),
    (b"PK\x03\x04", "a zip archive", lambda file: f"unzip {file}"),
    (b"BZh", "a bzip2 file", lambda file: f"bzip2 -dc {file} > chats.jsonl"),
    (b"\xfd7zXZ", "an xz file", lambda file: f"xz -dc {file} > chats.jsonl"),
    (b"SQLite format 3", "an SQLite database", None),
    (b"\x89HDF", "an HDF5 file", None),
    *((b"\x80" + bytes([version]), "a Python pickle", None) for version in (2, 3, 4, 5)),
)  # fmt: skip


def refuse_foreign_file(path, head):
    """Raises InputError if `head`, the first bytes of the file, are those of another format."""
    for magic, name, command in _FORMATS:
        if head.startswith(magic):
            advice = f"; try `{command(shlex.quote(str(path)))}`" if command else "; write its rows as JSON, one per line"
            raise InputError(f"{path}: expected JSON lines, received {name}{advice}")


def describe_foreign_line(line, path):
    """Describes a line that is not a JSON object, with a command to convert the file; None if it is not recognised."""
    text = line.strip()
    reading = {".gz": "zcat {} | jq -c '{}'", ".zst": "zstdcat {} | jq -c '{}'"}.get(path.suffix, "jq -c '{1}' {0}")
    if text.startswith(b"[") and text[1:].lstrip()[:1] in (b"", b"{"):
        command = reading.format(shlex.quote(str(path)), ".[]")
        return f"the start of a JSON list: write one chat per line with `{command} > chats.jsonl`"
    if text == b"{":
        command = reading.format(shlex.quote(str(path)), ".")
        return f"the start of an object of several lines: write one chat per line with `{command} > chats.jsonl`"
    return None
