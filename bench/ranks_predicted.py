#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predictions, not measurements: one step on 8 to 1,024 GPUs, each tree on one of them or on several (context parallelism).

    espalier prepare --model DIR --per-turn conversations.jsonl -o rows.jsonl
    python bench/ranks_predicted.py rows.jsonl -o table.md

`espalier.distribute` divides the rows by the cost model with its built-in rates of a GPU, for a decoder of 8 billion parameters
with the sizes of Llama 3.1. `over the mean` is how much longer the slowest rank takes; `of all ranks` is the time of one rank over
that of the slowest and the number of ranks, without reductions of gradients.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from compare_transformers import publish

import espalier

MODEL = dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, vocab_size=128256)  # fmt: skip
RANKS = [8, 16, 64, 256, 512, 1024]
HEADER = ["ranks", "along cp", "groups", "without work", "over the mean", "repeated tokens", "step, s", "speed", "of all ranks"]


def line(forest, costs, ranks, together, bandwidth, alone, whole):
    """A line of the table, and the seconds of the step."""
    found = espalier.distribute(forest, ranks, model=costs, context_parallel=together, link_bandwidth=bandwidth)
    idle = sum(len(share.trajectories) == 0 for share in found)
    chosen = f"{found.context_parallel}{' (fastest)' if together == 0 else ''}"
    return [f"{ranks:,}", chosen, f"{len(found):,}", f"{idle * found.context_parallel:,}", f"{found.imbalance:.1%}",
            f"{found.repeated_tokens / forest.tree_tokens:.1%}", f"{found.seconds:.3f}", f"{(whole or found.seconds) / found.seconds:.2f}",
            f"{alone / ranks / found.seconds:.0%}"], found.seconds  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="rows of one step, as espalier.build takes them")
    parser.add_argument("--link-bandwidth", type=float, default=50, metavar="GB", help="per second into a rank (default: %(default)s)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    with open(args.rows, encoding="utf-8") as file:
        forest = espalier.build([json.loads(text)["input_ids"] for text in file])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODEL))
        costs = espalier.costs(config, device="cuda")
    alone = espalier.distribute(forest, 1, model=costs).seconds
    lines = []
    for ranks in RANKS:
        whole = None
        for together in (1, 8, 0):
            found, seconds = line(forest, costs, ranks, together, args.link_bandwidth, alone, whole)
            whole = whole or seconds
            lines.append(found)
    columns = {name: lambda row, place=place: row[place] for place, name in enumerate(HEADER)}
    publish(f"{forest.tree_tokens:,} tokens, links of {args.link_bandwidth:g} GB/s", columns, lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
