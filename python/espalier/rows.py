# SPDX-License-Identifier: Apache-2.0
"""Writing rows of tokens: JSONL (plain, .gz, .zst) or packed safetensors, by file name.

The packed form has one tensor per column: offsets I64 [R + 1], input_ids I32 [N], loss_mask U8 [N], and where
rows have them reward F64 [R] (with reward.present U8 [R] when some lack it) and the strings trajectory_id and
group_id as UTF-8 bytes U8 with `NAME.offsets` I64 [R + 1].
"""

import contextlib
import fcntl
import glob
import gzip
import io
import json
import os
import tempfile
import time
from array import array
from pathlib import Path


SCRATCH_SUFFIX = ".partial"
# A scratch file is locked a moment after it was made; one that is younger may belong to a run that just begins.
YOUNGEST_STALE_SECONDS = 60


def remove_stale_scratch(path):
    """Removes what runs that were killed have left beside `path`: scratch files that no process holds."""
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.*{SCRATCH_SUFFIX}"):
        with contextlib.suppress(OSError):
            with open(scratch, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(file.fileno()).st_mtime > YOUNGEST_STALE_SECONDS:
                    os.unlink(scratch)


@contextlib.contextmanager
def atomic_path(path):
    """Yields a path beside `path`; on success its file is synced and renamed, otherwise removed."""
    path = Path(path)
    remove_stale_scratch(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=SCRATCH_SUFFIX, dir=path.parent)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield scratch
        with open(scratch, "rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o666 & ~mask)
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
    finally:
        os.close(handle)


@contextlib.contextmanager
def row_writer(path):
    """Yields a writer with add(row) for rows of trajectory_id, group_id, reward, input_ids, loss_mask."""
    path = Path(path)
    if path.suffix == ".safetensors":
        writer = _PackedWriter()
        with atomic_path(path) as scratch:
            yield writer
            writer.save(scratch)
    else:
        with atomic_path(path) as scratch, _text_stream(scratch, path.suffix) as stream:
            yield _JsonlWriter(stream)


@contextlib.contextmanager
def _text_stream(scratch, suffix):
    with contextlib.ExitStack() as stack:
        binary = stack.enter_context(open(scratch, "wb"))
        if suffix == ".gz":  # without name and time, so that equal rows make equal files
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


class _PackedWriter:
    def __init__(self):
        self._offsets = array("q", [0])
        self._input_ids = array("i")
        self._loss_mask = bytearray()
        self._reward, self._reward_present = array("d"), bytearray()
        self._strings = {name: (bytearray(), array("q", [0])) for name in ("trajectory_id", "group_id")}

    def add(self, row):
        self._input_ids.extend(row["input_ids"])
        self._loss_mask.extend(row["loss_mask"])
        self._offsets.append(len(self._input_ids))
        reward = row["reward"]
        self._reward.append(0.0 if reward is None else reward)
        self._reward_present.append(reward is not None)
        for name, (text, offsets) in self._strings.items():
            text.extend((row[name] or "").encode("utf-8"))
            offsets.append(len(text))

    def save(self, path):
        import numpy as np
        from safetensors.numpy import save_file

        columns = {"offsets": np.frombuffer(self._offsets, np.int64),
                   "input_ids": np.frombuffer(self._input_ids, np.int32),
                   "loss_mask": np.frombuffer(self._loss_mask, np.uint8)}
        if any(self._reward_present):
            columns["reward"] = np.frombuffer(self._reward, np.float64)
            if not all(self._reward_present):
                columns["reward.present"] = np.frombuffer(self._reward_present, np.uint8)
        for name, (text, offsets) in self._strings.items():
            if text:
                columns[name] = np.frombuffer(text, np.uint8)
                columns[f"{name}.offsets"] = np.frombuffer(offsets, np.int64)
        save_file(columns, path)
