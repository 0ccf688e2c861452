# SPDX-License-Identifier: Apache-2.0
"""Whether the weights of a folder are those over which an adapter was trained."""

import hashlib
import os
from pathlib import Path

BLOCKS = 64         # of a file of weights that are read, at equal distances
BLOCK_BYTES = 4096


def fingerprint(folder: Path, dtype: str) -> str:
    """A text that stands for config.json, the files of weights and the precision in which they are used. Of a file of weights it
    reads the length, the beginning and BLOCKS blocks: other weights differ almost everywhere."""
    digest = hashlib.blake2b(dtype.encode(), digest_size=16)
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for number in range(BLOCKS + 1):
                file.seek(max(0, min(size * number // BLOCKS, size - BLOCK_BYTES)), os.SEEK_SET)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
