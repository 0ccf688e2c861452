# SPDX-License-Identifier: Apache-2.0
"""Lines of plain, gzip and zstd files. Memory is bounded by one line, whatever the compression ratio."""

import gzip
import io
import shlex
import zlib

from ..errors import InputError
from .foreign_files import START_BYTES, refuse_foreign_file, refuse_foreign_text

# Consecutive blank lines: a few megabytes that decompress to billions of them would take hours.
MOST_BLANK_LINES = 1_000_000
PIECE_BYTES = 1 << 20  # of a line, between two progress reports
# Compressed bytes read at a time: zstd can expand them 32,768 times.
ZSTD_INPUT_BYTES = 1 << 11
ZSTD_WINDOW = 1 << 30  # of `zstd --long=30`: memory that a frame may ask for


class _ZstdStream(io.RawIOBase):
    """Decompresses consecutive zstd frames. The package's own reader accepts a file that ends inside a frame."""

    def __init__(self, raw):
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
        self._frame = None  # the decompressor of the current frame
        self._input = b""
        self._output = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self._output:
            data = self._input or self._raw.read(ZSTD_INPUT_BYTES)
            self._input = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("one that ends inside a zstd frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def _is_zstd(magic):
    # The second form is a skippable frame, with which parallel compressors begin (RFC 8878, section 3.1.2).
    return magic == b"\x28\xb5\x2f\xfd" or (len(magic) == 4 and magic[0] & 0xF0 == 0x50 and magic[1:] == b"\x2a\x4d\x18")


def open_lines(path):
    """Opens a plain, gzip or zstd file (by its first bytes) for reading bytes.

    Returns (stream of bytes, the file itself, function that returns the fraction of it read so far).
    """
    raw = open(path, "rb")  # noqa: SIM115  whoever calls closes it
    size = max(1, raw.seek(0, io.SEEK_END))
    raw.seek(0)
    magic = raw.peek(4)[:4]
    refuse_foreign_file(path, raw.peek(16)[:16])
    stream: io.BufferedReader | gzip.GzipFile = raw
    packing = None
    if magic[:2] == b"\x1f\x8b":
        stream, packing = gzip.GzipFile(fileobj=raw), "gzip"
    elif _is_zstd(magic):
        stream, packing = io.BufferedReader(_ZstdStream(raw), 1 << 18), "zstd"
    refuse_foreign_text(path, _read(stream.peek, START_BYTES, stream, path)[:START_BYTES], packing)
    return stream, raw, lambda: raw.tell() / size


def lines_of(path, most_bytes, tick):
    """Yields the lines of a file as bytes, and None for a line of more than `most_bytes`.

    Calls tick(fraction of the file read so far) from time to time, also inside long lines. Raises InputError for a
    compressed file that is damaged or truncated, and for more than MOST_BLANK_LINES consecutive blank lines.
    """
    stream, raw, fraction = open_lines(path)
    number = blank = 0
    with raw, stream:
        while True:
            pieces, size = [], 0
            while True:
                piece = _read(stream.readline, PIECE_BYTES, stream, path)
                tick(fraction())
                size += len(piece)
                if size <= most_bytes + 2:  # with its end, which may be CR and LF
                    pieces.append(piece)
                else:
                    pieces.clear()
                if len(piece) < PIECE_BYTES or piece.endswith(b"\n"):
                    break
            if size == 0:
                return
            line = b"".join(pieces).rstrip(b"\r\n")
            number += 1
            blank = 0 if line.strip() or size > most_bytes + 2 else blank + 1
            if blank > MOST_BLANK_LINES:
                raise InputError(f"{path}:{number}: expected at most {MOST_BLANK_LINES:,} blank lines in a row, received "
                                 "more")
            yield line if size <= most_bytes + 2 and len(line) <= most_bytes else None


def _read(read, size, stream, path):
    """read(size), a method of the stream."""
    try:
        return read(size)
    except EOFError as error:  # of gzip, and of the class above
        text = str(error) if isinstance(stream, io.BufferedReader) else "one that ends inside a gzip member"
        raise InputError(f"{path}: expected a complete compressed file, received {text}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected a complete compressed file, received damaged gzip data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        if "requires too much memory" in str(error):
            raise InputError(f"{path}: expected zstd data with a window of at most 1 GiB (--long=30), received a larger one; "
                             f"try `zstd -d --long=31 {shlex.quote(str(path))}`") from None
        raise InputError(f"{path}: expected a complete compressed file, received damaged zstd data: {error}") from None
