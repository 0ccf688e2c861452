# SPDX-License-Identifier: Apache-2.0
"""Writing rows of tokens: JSONL (plain, .gz, .zst) or packed safetensors, by file name.

The packed form has one tensor per column (docs/data-format.md): offsets I64 [R + 1], input_ids I32 [N], loss_mask
U8 [N] or loss_weights F64 [N], and where rows have them logprobs, ref_logprobs, advantages F64 [N], reward F64 [R],
chosen U8 [R] (each with `NAME.present` U8 [R] when some lack it), trajectory_id, group_id and pair_id as UTF-8 bytes
U8 with `NAME.offsets` I64 [R + 1], turn_rewards F64 with the same, ref_topk_ids I32 and ref_topk_logprobs F64 [N, K], and
routed_experts I32 [N, W].
"""

import contextlib
import fcntl
import glob
import gzip
import io
import json
import os
import secrets
import time
from array import array
from pathlib import Path
from typing import Any

from ..errors import InputError

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
        writer = _PackedWriter()
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


class _Reals:
    """A column of real numbers that rows may lack. It uses no memory before the first row that has it."""

    def __init__(self):
        self._values, self._present = array("d"), bytearray()
        self._entries = 0  # of all rows

    def add(self, values, count):
        """Adds the `count` entries of one row; None for a row without the column. None entries are stored as 0."""
        self._present.append(values is not None)
        if values is not None:
            self._values.frombytes(bytes(8 * (self._entries - len(self._values))))
            self._values.extend(0.0 if value is None else value for value in values)
        self._entries += count

    def columns(self, name):
        import numpy as np

        if not any(self._present):
            return {}
        self._values.frombytes(bytes(8 * (self._entries - len(self._values))))
        columns = {name: np.frombuffer(self._values, np.float64)}
        if not all(self._present):
            columns[f"{name}.present"] = np.frombuffer(self._present, np.uint8)
        return columns


class _PackedWriter:
    """Holds all rows until they are saved. A row has the fields of docs/data-format.md under their own names."""

    def __init__(self):
        self._offsets = array("q", [0])
        self._input_ids = array("i")
        self._loss_mask = bytearray()
        self._loss_weights = None  # replaces the mask from the first row on that has weights
        self._reals = {name: _Reals() for name in ("logprobs", "ref_logprobs", "advantages", "reward")}
        self._chosen, self._chosen_present = bytearray(), bytearray()
        self._strings = {name: (bytearray(), array("q", [0])) for name in ("trajectory_id", "group_id", "pair_id")}
        self._turn_rewards = (array("d"), array("q", [0]))
        self._topk_ids, self._topk_logprobs, self._topk = array("i"), array("d"), 0
        self._routes = array("i")
        self._routed_rows = 0

    def add(self, row):
        tokens = len(row["input_ids"])
        self._input_ids.extend(row["input_ids"])
        self._offsets.append(len(self._input_ids))
        self._add_loss(row, tokens)
        for name in ("logprobs", "ref_logprobs"):
            self._reals[name].add(row.get(name), tokens)
        advantage = row.get("advantage")
        self._reals["advantages"].add(row.get("advantages") if advantage is None else [advantage] * tokens, tokens)
        reward = row.get("reward")
        self._reals["reward"].add(None if reward is None else [reward], 1)
        self._chosen.append(bool(row.get("chosen")))
        self._chosen_present.append(row.get("chosen") is not None)
        for name, (text, offsets) in self._strings.items():
            value = row.get(name)
            text.extend(b"" if value is None else str(value).encode("utf-8"))
            offsets.append(len(text))
        rewards, offsets = self._turn_rewards
        rewards.extend(row.get("turn_rewards") or [])
        offsets.append(len(rewards))
        self._add_topk(row, tokens)
        if row.get("routed_experts") is not None:
            self._routed_rows += 1
            for ids in row["routed_experts"]:
                self._routes.extend(ids)

    def _add_loss(self, row, tokens):
        weights = row.get("loss_weights")
        if weights is not None and self._loss_weights is None:
            self._loss_weights = array("d", self._loss_mask)
        mask = row.get("loss_mask")
        loss = weights if weights is not None else mask if mask is not None else [1] * tokens
        (self._loss_mask if self._loss_weights is None else self._loss_weights).extend(loss)

    def _add_topk(self, row, tokens):
        ids, logprobs = row.get("ref_topk_ids") or [[]] * tokens, row.get("ref_topk_logprobs") or [[]] * tokens
        width = max(len(each or []) for each in ids)
        if width and not self._topk:
            self._topk = width
            before = (len(self._input_ids) - tokens) * width
            self._topk_ids.extend([-1] * before)
            self._topk_logprobs.extend([0.0] * before)
        if width not in (0, self._topk):
            raise InputError(f"packed output: expected {self._topk} `ref_topk_ids` for each token, as in earlier rows, "
                             f"received {width}")
        for some, values in zip(ids, logprobs):
            self._topk_ids.extend(some or [-1] * self._topk)
            self._topk_logprobs.extend(values or [0.0] * self._topk)

    def save(self, path):
        import numpy as np
        from safetensors.numpy import save_file

        columns: dict[str, Any] = {"offsets": np.frombuffer(self._offsets, np.int64),
                                   "input_ids": np.frombuffer(self._input_ids, np.int32)}  # fmt: skip
        if self._loss_weights is None:
            columns["loss_mask"] = np.frombuffer(self._loss_mask, np.uint8)
        else:
            columns["loss_weights"] = np.frombuffer(self._loss_weights, np.float64)
        for name, column in self._reals.items():
            columns.update(column.columns(name))
        if any(self._chosen_present):
            columns["chosen"] = np.frombuffer(self._chosen, np.uint8)
            if not all(self._chosen_present):
                columns["chosen.present"] = np.frombuffer(self._chosen_present, np.uint8)
        for name, (text, offsets) in self._strings.items():
            if text:
                columns[name] = np.frombuffer(text, np.uint8)
                columns[f"{name}.offsets"] = np.frombuffer(offsets, np.int64)
        rewards, offsets = self._turn_rewards
        if rewards:
            columns["turn_rewards"] = np.frombuffer(rewards, np.float64)
            columns["turn_rewards.offsets"] = np.frombuffer(offsets, np.int64)
        if self._topk:
            columns["ref_topk_ids"] = np.frombuffer(self._topk_ids, np.int32).reshape(-1, self._topk)
            columns["ref_topk_logprobs"] = np.frombuffer(self._topk_logprobs, np.float64).reshape(-1, self._topk)
        if self._routed_rows:
            columns["routed_experts"] = self._routes_column(np)
        try:
            save_file(columns, path)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise OSError(str(error)) from None  # usually the disk is full

    def _routes_column(self, np):
        rows, tokens = len(self._offsets) - 1, len(self._input_ids)
        if self._routed_rows < rows or len(self._routes) % tokens:
            raise InputError("packed output: expected `routed_experts` in every row, equally many per token, received "
                             f"{self._routed_rows:,} of {rows:,} rows with them; write .jsonl instead")
        return np.frombuffer(self._routes, np.int32).reshape(tokens, -1)
