# SPDX-License-Identifier: Apache-2.0
"""Recognises files and folders that are not JSON lines, and names commands that convert them.

    refuse_foreign_file     by the first bytes of a file
    refuse_foreign_text     by the first bytes of what it holds, uncompressed
    refuse_folder           by the files in it
"""

import csv
import json
import re
import shlex

from ..errors import InputError

START_BYTES = 4096  # what refuse_foreign_text needs
_ARROW_FILE = 'import sys, pandas; pandas.read_feather(sys.argv[1]).to_json("chats.jsonl", orient="records", lines=True)'
_ARROW_STREAM = 'import sys, datasets; datasets.Dataset.from_file(sys.argv[1]).to_parquet("rows.parquet")'
_FORMATS = (
    (b"PAR1", "a Parquet file", lambda file: f"espalier import --model DIR {file} -o rows.jsonl"),
    (b"ARROW1", "an Arrow file", lambda file: _python(_ARROW_FILE, file)),
    (b"\xff\xff\xff\xff", "an Arrow stream", lambda file: _python(_ARROW_STREAM, file)),
    (b"PK\x03\x04", "a zip archive", lambda file: f"unzip {file}"),
    (b"BZh", "a bzip2 file", lambda file: f"bzip2 -dc {file} > chats.jsonl"),
    (b"\xfd7zXZ", "an xz file", lambda file: f"xz -dc {file} > chats.jsonl"),
    (b"SQLite format 3", "an SQLite database", None),
    (b"\x89HDF", "an HDF5 file", None),
    *((b"\x80" + bytes([version]), "a Python pickle", None) for version in (2, 3, 4, 5)),
)  # fmt: skip
# Marks of the byte order, and where NULs stand among the first characters, which are ASCII in JSON.
_ENCODINGS = (
    ("UTF-32", re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff")),
    ("UTF-16", re.compile(rb"\xff\xfe|\xfe\xff")),
    ("UTF-32LE", re.compile(rb"[\t-~]\0\0\0")),
    ("UTF-32BE", re.compile(rb"\0\0\0[\t-~]")),
    ("UTF-16LE", re.compile(rb"([\t-~]\0){2}")),
    ("UTF-16BE", re.compile(rb"(\0[\t-~]){2}")),
)
_TABLES = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_ROWS = ("*.parquet", "*.jsonl", "*.jsonl.zst", "*.jsonl.gz", "*/*.parquet", "*/*.jsonl", "*/*.jsonl.zst", "*/*.jsonl.gz")


def _python(program, file):
    return f"python3 -c {shlex.quote(program)} {file}"


def refuse_foreign_file(path, head):
    """Raises InputError if `head`, the first bytes of the file, are those of another format."""
    for magic, name, command in _FORMATS:
        if head.startswith(magic):
            advice = f"; try `{command(shlex.quote(str(path)))}`" if command else "; write its rows as JSON, one per line"
            raise InputError(f"{path}: expected JSON lines, received {name}{advice}")


def refuse_foreign_text(path, start, packing):
    """Raises InputError if `start`, up to START_BYTES of the uncompressed content, is that of a tar archive, of a table, or of
    text in another encoding. packing: "gzip", "zstd" or None."""
    file = shlex.quote(str(path))
    if start.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: expected JSON lines, received a pointer of Git LFS; `git lfs pull` fetches the file")
    if start[257:262] == b"ustar":
        raise InputError(f"{path}: expected JSON lines, received a tar archive; unpack it with `tar -xf {file}`, and pass the "
                         "files in it")
    for encoding, pattern in _ENCODINGS:
        if pattern.match(start):
            command = f"iconv -f {encoding} -t UTF-8"
            command = f"{packing} -dc < {file} | {command}" if packing else f"{command} {file}"
            raise InputError(f"{path}: expected JSON lines in UTF-8, received {encoding}; try `{command} > chats.jsonl`")
    columns, separator = _columns(path, start)
    if columns:
        options = f", sep={json.dumps(separator)}" * (separator != ",") + f", compression={json.dumps(packing)}" * bool(packing)
        command = _python(f"import sys, pandas; pandas.read_csv(sys.argv[1], dtype=str, keep_default_na=False{options})"
                          '.to_json("chats.jsonl", orient="records", lines=True)', file)
        names = ", ".join(f"`{name[:60]}`" for name in columns[:8])
        raise InputError(f"{path}: expected JSON lines, received a table (CSV) with the columns {names}; try `{command}`")


def _columns(path, start):
    """(names, separator) of a table that begins with the names of its columns; ([], "") of other text."""
    lines = start.decode("utf-8-sig", "replace").split("\n")
    if len(lines) < 2 or lines[0].lstrip()[:1] in ("", "{", "[") or "\0" in lines[0]:
        return [], ""
    for separator in (",", "\t", ";"):
        names = next(csv.reader([lines[0].rstrip("\r")], delimiter=separator))
        if len(names) > 1 and separator in lines[1] and all(re.fullmatch(r"[A-Za-z_][\w .-]{0,60}", name) for name in names):
            return names, separator
    separators = [separator for suffix, separator in _TABLES.items() if suffix in path.suffixes]
    return (lines[0].split(separators[0]), separators[0]) if separators else ([], "")


def refuse_folder(path):
    """Raises InputError for a folder, with what to do about the files in it."""
    try:
        files = {file.name for file in path.iterdir()}
        rows = next((pattern for pattern in _ROWS if any(path.glob(pattern))), None)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    folder = shlex.quote(str(path))
    if "dataset_dict.json" in files or "state.json" in files:
        splits = _splits(path / "dataset_dict.json")
        split = f"[{json.dumps(splits[0])}]" if splits else ""
        command = _python(f"import sys, datasets; datasets.load_from_disk(sys.argv[1]){split}"
                          '.to_parquet("rows.parquet")', folder)
        described = f" with the splits {', '.join(splits)}" if splits else ""
        raise InputError(f"{path}: expected a file, received a folder of save_to_disk{described}; try `{command}`, and pass "
                         "rows.parquet to `espalier import`")
    is_model = "config.json" in files or "adapter_config.json" in files
    if rows or (not is_model and any(name.endswith(".json") for name in files)):
        raise InputError(f"{path}: expected a file, received a folder; pass its files, as in "
                         f"`espalier import {folder}/{rows or '*.json'} -o rows.jsonl`")
    if is_model:
        raise InputError(f"{path}: expected a file, received a folder with a model, which belongs to --model; name files of "
                         "rows or chats")
    raise InputError(f"{path}: expected a file, received a folder without files of rows or chats")


def _splits(path):
    """The names of the splits of a saved DatasetDict, `train` first; none for a single Dataset."""
    try:
        return sorted(map(str, json.loads(path.read_text())["splits"]), key=lambda name: name != "train")
    except (OSError, ValueError, KeyError, TypeError):
        return []


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
