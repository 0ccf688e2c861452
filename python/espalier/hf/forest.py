# SPDX-License-Identifier: Apache-2.0
"""The prefix trees of token rows, as arrays."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tree:
    """A forest of T tokens in preorder; N flat tokens in R rows run along its paths."""

    input_ids: np.ndarray  # [T] int32
    position_ids: np.ndarray  # [T] int32, from 0 on each root path
    subtree_end: np.ndarray  # [T] int32: one past the last token of the subtree
    prev: np.ndarray  # [T] int32: the token before on the path, -1 at a root
    paths: np.ndarray  # [N] int64: the token of the forest at which each token of the rows stands


def build_tree(offsets, tokens):
    """The forest of rows tokens[offsets[r]:offsets[r + 1]]; offsets int64 [R + 1], tokens int32 [N], no row empty.

    Rows in lexicographic order are the paths of the forest in preorder: each shares with the one before what both begin with."""
    order = _lexicographic_order(offsets, tokens)
    ends = np.empty(len(tokens), np.int32)
    paths = np.empty(len(tokens), np.int64)
    kept, depths, prev = [], [], []  # of each row: what it adds to the forest
    row, path, size = np.empty(0, np.int32), np.empty(0, np.int64), 0
    for r in order:
        begin, end = offsets[r], offsets[r + 1]
        before, row = row, tokens[begin:end]
        shared = _common_length(before, row)
        ends[path[shared:]] = size
        added = len(row) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + added)])
        kept.append(row[shared:])
        depths.append(np.arange(shared, len(row), dtype=np.int32))
        prev.append(np.concatenate([[-1], path])[shared:len(row)].astype(np.int32))
        paths[begin:end] = path
        size += added
    ends[path] = size
    joined = lambda parts: np.concatenate(parts) if parts else np.empty(0, np.int32)
    return Tree(joined(kept), joined(depths), ends[:size], joined(prev), paths)


def _lexicographic_order(offsets, tokens):
    """Numbers of the rows; a row stands before those that it begins."""
    keys = tokens.astype(">u4")  # whose bytes compare as the numbers do
    texts = [keys[begin:end].tobytes() for begin, end in zip(offsets, offsets[1:])]
    return sorted(range(len(texts)), key=texts.__getitem__)


def _common_length(a, b):
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
