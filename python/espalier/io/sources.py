# SPDX-License-Identifier: Apache-2.0
"""Reads records of files: JSON lines (plain, gzip, zstd), one JSON document, Parquet, and packed rows. Refuses files
that could run code when they are read, such as pickles.

A file is read in chunks, which can be pickled: another process can decode what this one has read.

    for chunk in chunks_of(path, most_bytes, tick):
        for where, record in chunk.records():
"""

import codecs
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..commands.console import clipped
from ..commands.progress import Progress
from ..errors import BadRow, InputError
from ..rows.json_lines import object_without_duplicates, parse_line
from ..rows.lines import lines_of
from ..rows.fields import ROW_NUMBERS
from .arrow import CHUNK_BYTES, ROWS, chunks_of_parquet
from .documents import TOKEN_LISTS
from .plain_rows import KNOWN_NAMES

PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin")
CONVERTERS = (
    "reading it could run code, so it is never read; in the program that created it, or that can load it, pass the data "
    "to a converter of espalier.io (from_verl, from_skyrl, from_areal, from_slime, from_tinker, from_trl) and the rows "
    "to espalier.io.write_rows")
TEXTS = ("trajectory_id", "group_id", "pair_id")


@dataclass
class LineChunk:
    """Consecutive lines of JSON that are not parsed yet; None is a line of more than most_bytes."""

    lines: list[tuple[str, bytes | None]]
    most_bytes: int

    def records(self) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        """Yields (where, record or BadRow)."""
        for where, line in self.lines:
            try:
                if line is None:
                    raise BadRow("<line>", f"at most {self.most_bytes} bytes (--max-row-bytes)", "more")
                yield where, parse_line(line, where)
            except BadRow as error:
                yield where, error


@dataclass
class RecordChunk:
    """Records of a file that is parsed as a whole."""

    items: list[tuple[str, dict[str, Any]]]

    def records(self) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        """Yields (where, record)."""
        yield from self.items


def chunks_of(path, most_bytes, tick):
    """Yields the records of a file in chunks. Calls tick(fraction of the file read so far)."""
    with open(path, "rb") as file:
        head = file.read(16)
    refuse_pickle(path, head)
    if head.startswith(b"PAR1"):
        yield from chunks_of_parquet(path, tick)
    elif path.suffix == ".safetensors":
        yield from _record_chunks(_packed(path, tick))
    elif (document := _document(path, most_bytes)) is not None:
        yield from _record_chunks(document)
    else:
        yield from _line_chunks(path, most_bytes, tick)


def records_of(path, most_bytes, tick):
    """Yields (where, record or BadRow) for each record of a file. Calls tick(fraction of the file read so far)."""
    for chunk in chunks_of(path, most_bytes, tick):
        yield from chunk.records()


def records_of_files(files, most_bytes, name, told):
    """Yields (file, where, record or BadRow) for each record of files, and shows progress of the command `name`: told() says what
    has been done."""
    with Progress(name) as progress:
        for number, path in enumerate(files):
            def tick(fraction, number=number):
                progress.update((number + fraction) / len(files), told())

            for where, record in records_of(path, most_bytes, tick):
                yield path, where, record


def is_parquet(path):
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def refuse_pickle(path, head):
    """Raises InputError for Python pickles and for files of PyTorch and msgpack writers."""
    if path.suffix in PICKLES and path.name.startswith("rank_"):
        raise InputError(
            f"{path}: expected JSON lines, received a binary batch of prime-rl; its token_exports/step_N/rank_R.jsonl "
            "(enable_token_export) or traces.jsonl have the same samples")
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if is_pickle or (path.suffix in PICKLES and head.startswith((b"PK\x03\x04", b"\x80"))):
        raise InputError(f"{path}: expected JSON lines or Parquet, received a Python pickle: {CONVERTERS}")


def _record_chunks(items):
    items = iter(items)
    while chunk := list(itertools.islice(items, ROWS)):
        yield RecordChunk(chunk)


def _line_chunks(path, most_bytes, tick):
    lines: list[tuple[str, bytes | None]] = []
    size = 0
    try:
        for number, line in enumerate(lines_of(path, most_bytes, tick), start=1):
            if line is not None and not line.strip():
                continue
            lines.append((f"{path}:{number}", line))
            size += len(line or b"")
            if size >= CHUNK_BYTES or len(lines) == ROWS:
                yield LineChunk(lines, most_bytes)
                lines, size = [], 0
    except InputError:  # what stands before the damage comes first
        if lines:
            yield LineChunk(lines, most_bytes)
        raise
    if lines:
        yield LineChunk(lines, most_bytes)


def _document(path, most_bytes):
    """[(where, record)] of a file that is one JSON object or a list of them; None for JSON lines."""
    lines = lines_of(path, most_bytes, lambda fraction: None)
    kept: list[bytes] = []
    size = 0
    for line in lines:
        size += most_bytes + 1 if line is None else len(line) + 1
        if size > most_bytes:
            return None
        if not kept:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not kept and not line.strip():
            continue
        if not kept and line.lstrip()[:1] != b"[" and _parses(line):
            return None
        kept.append(line)
    if not kept:
        return None
    try:
        value = json.loads(b"\n".join(kept).decode("utf-8-sig"), object_pairs_hook=object_without_duplicates)
    except (ValueError, RecursionError, BadRow) as error:
        if kept[0].strip() not in (b"[", b"{", b"[{") or len(kept) == 1 or _parses(kept[1]):
            return None  # JSON lines with a bad first line
        fault = error if isinstance(error, BadRow) else BadRow("<document>", "one JSON object, or a list of them",
                                                               clipped(str(error), 200))
        raise InputError(f"{path}: {fault}") from None
    if isinstance(value, dict):
        return [(str(path), value)]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [(f"{path}: item {number}", item) for number, item in enumerate(value, start=1)]
    return None


def _parses(line):
    try:
        json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _packed(path, tick):
    """The rows of a packed file (docs/data-format.md)."""
    try:
        from safetensors.numpy import load_file

        columns = load_file(path)
        offsets = columns.pop("offsets").tolist()
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: expected packed rows, received {type(error).__name__}: {clipped(str(error), 200)}") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise InputError(f"{path}: expected packed rows, received {clipped(str(error), 200)}") from None
    rows, tokens = len(offsets) - 1, offsets[-1] if offsets else 0
    _check_offsets(path, "offsets", offsets)
    names = KNOWN_NAMES | {name for name in TOKEN_LISTS if name in columns and len(columns[name]) == tokens}
    known = {name: _Column(path, name, columns, rows, tokens) for name in columns if name in names}
    others = {name: True for name in columns if name.partition(".")[0] not in names}  # to be named as ignored
    for row in range(rows):
        yield f"{path}: row {row + 1}", others | {name: column.row(row, offsets) for name, column in known.items()}
        tick((row + 1) / rows)


def _check_offsets(path, name, offsets):
    if not offsets or offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        raise InputError(f"{path}: tensor `{name}`: expected numbers that rise from 0, received others")


class _Column:
    """One column of a packed file: per token, per row, per turn, or text."""

    def __init__(self, path, name, columns, rows, tokens):
        self._name = f"{path}: tensor `{name}`"
        self._values, self._present = columns[name], columns.get(f"{name}.present")
        ends = columns.get(f"{name}.offsets")
        self._ends = None if ends is None else ends.tolist()
        if self._ends is not None:
            _check_offsets(path, f"{name}.offsets", self._ends)
        self._is_flag, self._is_text, self._are_routes = name == "chosen", name in TEXTS, name == "routed_experts"
        ids = columns.get("ref_topk_ids") if name in ("ref_topk_ids", "ref_topk_logprobs") else None
        self._has_entries = None if ids is None or ids.ndim != 2 else (ids >= 0).all(axis=1)  # of each token
        self._per_row = name in (*ROW_NUMBERS, "chosen", "advantage")
        length = self._ends[-1] if self._ends else rows if self._per_row else tokens
        sizes = [len(self._values), rows if self._present is None else len(self._present),
                 rows + 1 if self._ends is None else len(self._ends)]
        if sizes != [length, rows, rows + 1]:
            raise InputError(f"{self._name}: expected {length} entries for {rows} rows, received {sizes[0]}")

    def row(self, row, offsets):
        if self._present is not None and not self._present[row]:
            return None
        if self._ends is not None and not self._is_text:
            return self._values[self._ends[row]:self._ends[row + 1]].tolist() or None
        if self._ends is not None:
            text = bytes(self._values[self._ends[row]:self._ends[row + 1]])
            try:
                return text.decode("utf-8") or None
            except UnicodeDecodeError:
                fault = f"expected text in UTF-8, received other bytes in row {row + 1}"
                raise InputError(f"{self._name}: {fault}") from None
        if self._per_row:
            value = self._values[row].item()
            return bool(value) if self._is_flag else value
        tokens = slice(offsets[row], offsets[row + 1])
        values = self._values[tokens].tolist()
        if self._are_routes and (self._values[tokens] == -1).all():  # of a row that has none
            return None
        if self._has_entries is None:
            return values
        given = self._has_entries[tokens]
        return [each if has else [] for each, has in zip(values, given)] if given.any() else None
