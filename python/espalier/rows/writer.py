# SPDX-License-Identifier: Apache-2.0
"""Writing rows of tokens: JSONL (plain, .gz, .zst) or packed safetensors, by file name.

The packed form has one tensor per column (docs/data-format.md): offsets I64 [R + 1], input_ids I32 [N], loss_mask
U8 [N] or loss_weights F64 [N], and where rows have them logprobs, ref_logprobs, advantages F64 [N], reward,
temperature, top_k and top_p F64 [R], chosen U8 [R] (each with `NAME.present` U8 [R] when some lack it), trajectory_id,
group_id and pair_id as UTF-8 bytes U8 with `NAME.offsets` I64 [R + 1], turn_rewards F64 with the same, ref_topk_ids I32 and
ref_topk_logprobs F64 [N, K], and routed_experts I32 [N, W].
"""

import contextlib
import fcntl
import glob
import gzip
import io
import json
import os
import secrets
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from ..errors import InputError
from .fields import ROW_NUMBERS

SCRATCH_SUFFIX = ".partial"
# Scratch files are locked shortly after they are created, so a younger file may belong to a process that just started.
YOUNGEST_STALE_SECONDS = 60


def remove_stale_scratch(path):
    """Removes scratch files beside `path` that no process has locked: killed processes left them."""
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.*{SCRATCH_SUFFIX}"):
        with contextlib.suppress(OSError), open(scratch, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > YOUNGEST_STALE_SECONDS:
                os.unlink(scratch)


@contextlib.contextmanager
def atomic_path(path):
    """Yields a path beside `path`; on success its file is synced and renamed, otherwise removed."""
    path = Path(path)
    remove_stale_scratch(path)
    # The name is known before the file exists, so a signal at any moment finds what to remove.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}{SCRATCH_SUFFIX}")
    try:
        with open(scratch, "xb") as lock:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield scratch
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
            os.rename(scratch, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        raise


@contextlib.contextmanager
def row_writer(path):
    """Yields a writer with add(row) for rows of docs/data-format.md."""
    path = Path(path)
    if path.suffix == ".safetensors":
        writer = _PackedWriter(path.parent)
        with atomic_path(path) as scratch:
            yield writer
            writer.save(scratch)
    else:
        with atomic_path(path) as scratch, text_stream(scratch, path.suffix) as stream:
            yield _JsonlWriter(stream)


@contextlib.contextmanager
def text_stream(scratch, suffix):
    """Yields a text stream that compresses according to the suffix (.gz, .zst)."""
    with contextlib.ExitStack() as stack:
        binary: Any = stack.enter_context(open(scratch, "wb"))
        if suffix == ".gz":  # without name and time, so that equal rows give equal files
            binary = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=binary, mtime=0))
        elif suffix == ".zst":
            import zstandard

            binary = stack.enter_context(zstandard.ZstdCompressor().stream_writer(binary))
        yield stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8", write_through=False))


class _JsonlWriter:
    def __init__(self, stream):
        self._stream = stream

    def add(self, row):
        present = {key: value for key, value in row.items() if value is not None}
        self._stream.write(json.dumps(present, ensure_ascii=False, separators=(",", ":")) + "\n")

    def add_encoded(self, names, row):
        """A row whose ids and loss are JSON already (chats.convert.TokenRow), behind its other fields."""
        present = {key: value for key, value in names.items() if value is not None}
        head = json.dumps(present, ensure_ascii=False, separators=(",", ":"))[:-1] + ("," if present else "")
        loss = "loss_weights" if row.weighted else "loss_mask"
        self._stream.write(f'{head}"input_ids":[{row.ids}],"{loss}":[{row.loss}]}}\n')


class _Column:
    """Values of a type of `array`. Beyond a block they are in a file without a name: memory does not grow with the rows."""

    BLOCK = 1 << 18

    def __init__(self, kind, folder):
        self._last, self._folder, self._file, self._stored = array(kind), folder, None, 0

    def __len__(self):
        return self._stored + len(self._last)

    def extend(self, values):
        self._last.extend(values)
        if len(self._last) < self.BLOCK:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  it lives as long as the column
        self._last.tofile(self._file)
        self._stored += len(self._last)
        del self._last[:]

    def fill_up(self, count, value=0):
        """With `value`, until there are `count`."""
        while len(self) < count:
            self.extend([value] * min(self.BLOCK, count - len(self)))

    def blocks(self):
        """All values, as bytes-like objects."""
        if self._file is not None:
            self._file.seek(0)
            while block := self._file.read(self.BLOCK * self._last.itemsize):
                yield block
        yield self._last


_KINDS = {"q": ("I64", 8), "d": ("F64", 8), "i": ("I32", 4), "B": ("U8", 1)}  # in the order of safetensors


def _save_columns(path, columns):
    """{name: (kind, shape, column)} as a safetensors file, whose tensors come one after the other."""
    names = sorted(columns, key=lambda name: (list(_KINDS).index(columns[name][0]), name))
    header, begin = {}, 0
    for name in names:
        kind, shape, column = columns[name]
        dtype, size = _KINDS[kind]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size * len(column)]}
        begin += size * len(column)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for block in columns[name][2].blocks():
                file.write(block)


class _Optional:
    """A column that rows may lack. It uses no memory before the first row that has it."""

    def __init__(self, kind, folder):
        self._kind, self._values, self._present = kind, _Column(kind, folder), _Column("B", folder)
        self._entries, self._rows_with = 0, 0

    def add(self, values, count):
        """Adds the `count` entries of one row; None for a row without the column. None entries are stored as 0."""
        self._present.extend([values is not None])
        if values is not None:
            self._rows_with += 1
            self._values.fill_up(self._entries)
            self._values.extend(0 if value is None else value for value in values)
        self._entries += count

    def columns(self, name):
        if not self._rows_with:
            return {}
        self._values.fill_up(self._entries)
        columns = {name: (self._kind, [self._entries], self._values)}
        if self._rows_with < len(self._present):
            columns[f"{name}.present"] = ("B", [len(self._present)], self._present)
        return columns


class _PackedWriter:
    """Holds all rows until they are saved, most of them in files of `folder`. A row has the fields of docs/data-format.md
    under their own names."""

    def __init__(self, folder):
        def column(kind):
            return _Column(kind, folder)

        def ragged(kind):
            offsets = column("q")
            offsets.extend([0])
            return column(kind), offsets

        self._folder = folder
        self._input_ids, self._offsets = ragged("i")
        self._loss_mask = column("B")
        self._loss_weights = None  # replaces the mask from the first row on that has weights
        self._optional = {name: _Optional("d", folder) for name in ("logprobs", "ref_logprobs", "advantages", *ROW_NUMBERS)}
        self._optional["chosen"] = _Optional("B", folder)
        self._ragged = {name: ragged("B") for name in ("trajectory_id", "group_id", "pair_id")}
        self._ragged["turn_rewards"] = ragged("d")
        self._topk_ids, self._topk_logprobs, self._topk = column("i"), column("d"), 0
        self._routes = column("i")
        self._routed_rows = 0

    def add(self, row):
        tokens = len(row["input_ids"])
        self._input_ids.extend(row["input_ids"])
        self._offsets.extend([len(self._input_ids)])
        self._add_loss(row, tokens)
        for name in ("logprobs", "ref_logprobs"):
            self._optional[name].add(row.get(name), tokens)
        advantage = row.get("advantage")
        self._optional["advantages"].add(row.get("advantages") if advantage is None else [advantage] * tokens, tokens)
        for name in (*ROW_NUMBERS, "chosen"):
            self._optional[name].add(None if row.get(name) is None else [row[name]], 1)
        for name, (values, offsets) in self._ragged.items():
            value = row.get(name)
            if value is not None:
                values.extend(value if name == "turn_rewards" else str(value).encode("utf-8"))
            offsets.extend([len(values)])
        self._add_topk(row, tokens)
        if row.get("routed_experts") is not None:
            self._routed_rows += 1
            for ids in row["routed_experts"]:
                self._routes.extend(ids)

    def add_encoded(self, names, row):
        """A row whose ids and loss are the bytes of columns (chats.convert.TokenRow)."""
        input_ids = array("i")
        input_ids.frombytes(row.ids)
        self.add(names | {"input_ids": input_ids, "loss_weights" if row.weighted else "loss_mask": row.loss.tolist()})

    def _add_loss(self, row, tokens):
        weights = row.get("loss_weights")
        if weights is not None and self._loss_weights is None:
            self._loss_weights = _Column("d", self._folder)
            for block in self._loss_mask.blocks():
                self._loss_weights.extend(bytes(block))
        mask = row.get("loss_mask")
        loss = weights if weights is not None else mask if mask is not None else [1] * tokens
        (self._loss_mask if self._loss_weights is None else self._loss_weights).extend(loss)

    def _add_topk(self, row, tokens):
        ids, logprobs = row.get("ref_topk_ids") or [[]] * tokens, row.get("ref_topk_logprobs") or [[]] * tokens
        width = max(len(each or []) for each in ids)
        if width and not self._topk:
            self._topk = width
            before = (len(self._input_ids) - tokens) * width
            self._topk_ids.fill_up(before, -1)
            self._topk_logprobs.fill_up(before)
        if width not in (0, self._topk):
            raise InputError(f"packed output: expected {self._topk} `ref_topk_ids` for each token, as in earlier rows, "
                             f"received {width}")
        for some, values in zip(ids, logprobs):
            self._topk_ids.extend(some or [-1] * self._topk)
            self._topk_logprobs.extend(values or [0.0] * self._topk)

    def save(self, path):
        rows, tokens = len(self._offsets) - 1, len(self._input_ids)
        columns: dict[str, Any] = {"offsets": ("q", [rows + 1], self._offsets), "input_ids": ("i", [tokens], self._input_ids)}
        if self._loss_weights is None:
            columns["loss_mask"] = ("B", [tokens], self._loss_mask)
        else:
            columns["loss_weights"] = ("d", [tokens], self._loss_weights)
        for name, optional in self._optional.items():
            columns.update(optional.columns(name))
        for name, (values, offsets) in self._ragged.items():
            if len(values):
                columns[name] = ("d" if name == "turn_rewards" else "B", [len(values)], values)
                columns[f"{name}.offsets"] = ("q", [rows + 1], offsets)
        if self._topk:
            columns["ref_topk_ids"] = ("i", [tokens, self._topk], self._topk_ids)
            columns["ref_topk_logprobs"] = ("d", [tokens, self._topk], self._topk_logprobs)
        if self._routed_rows:
            if self._routed_rows < rows or len(self._routes) % tokens:
                raise InputError("packed output: expected `routed_experts` in every row, equally many per token, received "
                                 f"{self._routed_rows:,} of {rows:,} rows with them; write .jsonl instead")
            columns["routed_experts"] = ("i", [tokens, len(self._routes) // tokens], self._routes)
        _save_columns(path, columns)
