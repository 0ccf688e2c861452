# SPDX-License-Identifier: Apache-2.0
"""Writes a large packed file (docs/data-format.md) for measuring what reading, building and planning hold.

Rows come in groups. All rows of a group share a prefix, each quarter of a group shares a second one, and the
rest of every row is its own. Lengths vary from group to group, the length of a row does not. With the defaults
the tree has about a quarter of the flat tokens.

    python bench/make_scale_data.py shared.safetensors
    python bench/make_scale_data.py one_tree.safetensors --system-prompt 32
    python bench/make_scale_data.py unshared.safetensors --share none

Equal arguments give equal bytes. The file is written in pieces: memory stays below a few hundred MB.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 1 << 20
GROUP = 16  # rows that share their first tokens
QUARTER = 4  # rows of a group that share more
GROUPS_AT_ONCE = 1024


def shared_group(rng: np.random.Generator, length: int) -> np.ndarray:
    """[GROUP, length]: 50 to 70 % of a row shared by all, 15 to 35 % more by its quarter."""
    first = int(rng.uniform(0.5, 0.7) * length)
    second = first + int(rng.uniform(0.15, min(0.35, 0.98 - first / length)) * length)
    rows = rng.integers(0, VOCABULARY, (GROUP, length), dtype=np.int32)
    rows[:, :first] = rows[0, :first]
    for quarter in range(0, GROUP, QUARTER):
        rows[quarter : quarter + QUARTER, first:second] = rows[quarter, first:second]
    return rows


def blocks(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """The rows of the file in order, some at a time."""
    rng = np.random.default_rng(args.seed)
    system_prompt = rng.integers(0, VOCABULARY, args.system_prompt, dtype=np.int32)
    for begin in range(0, args.rows, GROUP * GROUPS_AT_ONCE):
        count = min(GROUP * GROUPS_AT_ONCE, args.rows - begin)
        if args.share == "none":
            rows = rng.integers(0, VOCABULARY, (count, args.length), dtype=np.int32)
            # Rows that begin differently lie in different trees.
            rows[:, 0] = np.arange(begin, begin + count)
        else:
            groups = [shared_group(rng, args.length) for _ in range(-(-count // GROUP))]
            rows = np.concatenate(groups)[:count]
        rows[:, : args.system_prompt] = system_prompt
        yield rows


def header(rows: int, length: int, loss_mask: bool) -> bytes:
    """Header length and header: little-endian, padded with spaces so that tensors are aligned."""
    tokens = rows * length
    columns = [("offsets", "I64", rows + 1, 8), ("input_ids", "I32", tokens, 4)]
    if loss_mask:
        columns.append(("loss_mask", "U8", tokens, 1))
    tensors, at = {}, 0
    for name, dtype, size, width in columns:
        tensors[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size * width]}
        at += size * width
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=1000, help="tokens of every row")
    parser.add_argument("--share", choices=["groups", "none"], default="groups")
    parser.add_argument("--system-prompt", type=int, default=0, help="tokens that all rows begin with")
    parser.add_argument("--loss-mask", action="store_true", help="add a loss_mask: 1 on the second half of a row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.share == "none" and args.rows > VOCABULARY:
        parser.error(f"--share none: at most {VOCABULARY} rows, each has its own first token")
    if not 0 <= args.system_prompt < args.length:
        parser.error("--system-prompt: expected less than --length")
    with args.path.open("wb") as file:
        file.write(header(args.rows, args.length, args.loss_mask))
        file.write(np.arange(args.rows + 1, dtype=np.int64) * args.length)
        for rows in blocks(args):
            file.write(rows)
        if args.loss_mask:
            mask = (np.arange(args.length) >= args.length // 2).astype(np.uint8)
            for begin in range(0, args.rows, 1000):
                file.write(np.tile(mask, min(1000, args.rows - begin)))


if __name__ == "__main__":
    main()
