# SPDX-License-Identifier: Apache-2.0
"""Paths of tokens for measurements of recurrences, as the operators take them (`prev`)."""

import torch


def flat_prev(tokens, length):
    """The token before each, -1 at the beginning of a sequence of `length`."""
    prev = torch.arange(-1, tokens - 1, dtype=torch.int32)
    prev[::length] = -1
    return prev


def tree_prev(tokens, node):
    """Nodes of `node` tokens in preorder, a binary tree as balanced as can be."""
    count = tokens // node
    prev = torch.arange(-1, tokens - 1, dtype=torch.int32)

    def place(begin, size, parent):
        """The subtree of `size` nodes whose first is `begin`; `parent`: the node above."""
        prev[begin * node] = -1 if parent < 0 else parent * node + node - 1
        left = size // 2
        if left > 0:
            place(begin + 1, left, begin)
        if size - 1 - left > 0:
            place(begin + 1 + left, size - 1 - left, begin)

    place(0, count, -1)
    return prev
