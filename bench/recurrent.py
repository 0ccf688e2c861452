#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule, ssm_scan and causal_conv1d on trees, on flat sequences, and the PyTorch path of Transformers.

Four sides run in turns, forward and backward, in one process:

- tree: nodes of --nodes tokens, each with two children until there are --tokens of them;
- one sequence: the same operator on a single sequence of as many tokens;
- flat: the same operator on unrelated sequences of 512 tokens, as many tokens in all;
- Transformers: its chunked PyTorch function on those sequences as a batch.

Speed per token of the tree over that of one sequence and of the flat sequences (goal: 0.95 at nodes of 64 tokens and
more, 0.8 at 16), and of our flat sequences over Transformers (goal: 2). Ratios are medians of the rounds. An eighth of
the chunks of flat sequences begin from nothing, and an eighth end with a state that nobody reads: both take less.

    python bench/recurrent.py -o table.md
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from compare_transformers import REPOSITORY, publish
from gpu_measure import relative_distance

FLAT_TOKENS = 512
LIBRARY = REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so"


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


class GatedDelta:
    """Heads as of Qwen3.5: twice as many of values as of keys."""

    name = "gated_delta_rule"

    def __init__(self, tokens, dtype):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        q, k, v = (random(tokens, heads, 128).to(dtype) for heads in (4, 4, 8))
        g, beta = -torch.nn.functional.softplus(random(tokens, 8)), random(tokens, 8).sigmoid()
        self.inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
        self.grad = random(tokens, 8, 128).to(dtype)

    def ours(self, prev):
        ends = torch.empty(0, dtype=torch.int64)
        return torch.ops.espalier.gated_delta_rule(*self.inputs, prev, None, ends)[0]

    def theirs(self):
        batch = [x.unflatten(0, (-1, FLAT_TOKENS)) for x in self.inputs]
        batch[:2] = [x.repeat_interleave(2, dim=2) for x in batch[:2]]
        return torch_chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True)[0].flatten(0, 1)


class SsmScan:
    """Heads and state as of Granite 4: one group."""

    name = "ssm_scan"

    def __init__(self, tokens, dtype):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        x = random(tokens, 16, 64).to(dtype)
        dt, a = torch.nn.functional.softplus(random(tokens, 16)), -random(16).exp()
        b, c = (random(tokens, 1, 128).to(dtype) for _ in range(2))
        self.inputs = [each.requires_grad_() for each in (x, dt, a, b, c, random(16))]
        self.grad = random(tokens, 16, 64).to(dtype)

    def ours(self, prev):
        ends = torch.empty(0, dtype=torch.int64)
        return torch.ops.espalier.ssm_scan(*self.inputs, prev, None, ends)[0]

    def theirs(self):
        x, dt, a, b, c, d = self.inputs
        x, dt, b, c = (each.unflatten(0, (-1, FLAT_TOKENS)) for each in (x, dt, b, c))
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=64, D=d).flatten(0, 1)


class CausalConv1d:
    """Channels and taps as of Qwen3.5, with SiLU."""

    name = "causal_conv1d"

    def __init__(self, tokens, dtype):
        generator = torch.Generator().manual_seed(0)
        x, weight, self.grad = (
            torch.randn(shape, generator=generator).to(dtype) for shape in ((tokens, 2048), (2048, 4), (tokens, 2048))
        )
        self.inputs = [each.requires_grad_() for each in (x, weight)]

    def ours(self, prev):
        x, weight = self.inputs
        return torch.ops.espalier.causal_conv1d(x, weight, None, prev, None, True)

    def theirs(self):
        x, weight = self.inputs
        batch = x.unflatten(0, (-1, FLAT_TOKENS)).transpose(1, 2)
        out = torch.nn.functional.conv1d(batch, weight.unsqueeze(1), padding=3, groups=len(weight))
        return torch.nn.functional.silu(out[..., :FLAT_TOKENS]).transpose(1, 2).flatten(0, 1)


KINDS = (GatedDelta, SsmScan, CausalConv1d)


def seconds_of(case, function, *arguments):
    for x in case.inputs:
        x.grad = None
    begin = time.perf_counter()
    function(*arguments).backward(case.grad)
    return time.perf_counter() - begin


def measure(case, sides, rounds):
    """Seconds of each side by round, after one round that does not count."""
    seconds = {name: [] for name in sides}
    for index in range(rounds + 1):
        for name, (function, *arguments) in sides.items():
            taken = seconds_of(case, function, *arguments)
            if index > 0:
                seconds[name].append(taken)
    return seconds


def ratio(seconds, slow, fast):
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast]))


def rows_of(kind, dtype, args):
    case = kind(args.tokens, getattr(torch, dtype))
    flat = flat_prev(args.tokens, FLAT_TOKENS)
    theirs, ours = case.theirs(), case.ours(flat)
    difference = relative_distance(ours, theirs)
    assert difference < (1e-4 if dtype == "float32" else 3e-2), f"{kind.name}: the sides differ by {difference:.1e}"
    one = flat_prev(args.tokens, args.tokens)
    sides = {"Transformers": (case.theirs,), "flat": (case.ours, flat), "one": (case.ours, one)}
    sides |= {node: (case.ours, tree_prev(args.tokens, node)) for node in args.nodes}
    seconds = measure(case, sides, args.rounds)
    for node in args.nodes:
        yield {
            "operator ": kind.name,
            "dtype ": dtype,
            "node tokens": str(node),
            "Transformers ms": f"{1e3 * statistics.median(seconds['Transformers']):.1f}",
            "one sequence ms": f"{1e3 * statistics.median(seconds['one']):.1f}",
            "flat ms": f"{1e3 * statistics.median(seconds['flat']):.1f}",
            "tree ms": f"{1e3 * statistics.median(seconds[node]):.1f}",
            "tree speed / one sequence": f"{ratio(seconds, 'one', node):.2f}",
            "tree speed / flat": f"{ratio(seconds, 'flat', node):.2f}",
            "flat speed / Transformers": f"{ratio(seconds, 'Transformers', 'flat'):.2f}",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 512 (default: %(default)s)")
    parser.add_argument("--nodes", default="256,64,16", help="tokens of a node (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    args.nodes = [int(node) for node in args.nodes.split(",")]
    if args.tokens % FLAT_TOKENS != 0 or any(args.tokens % node != 0 for node in args.nodes):
        parser.error(f"--tokens, --nodes: expected tokens that are a multiple of {FLAT_TOKENS} and of every node")
    if args.threads:
        torch.set_num_threads(args.threads)
    if not LIBRARY.is_file():
        parser.error(f"{LIBRARY.relative_to(REPOSITORY)} is not there: `make build` makes it")
    torch.ops.load_library(str(LIBRARY))
    rows = [row for kind in KINDS for dtype in args.dtypes.split(",") for row in rows_of(kind, dtype, args)]
    columns = {name: (lambda row, name=name: row[name]) for name in rows[0]}
    publish(f"{torch.get_num_threads()} threads, {args.tokens} tokens, forward and backward, {args.rounds} rounds in turns", columns, rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
