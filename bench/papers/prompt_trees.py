#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figure of "Prompt Trees: Training-time Prefix Caching" (Scaled Cognition, 2025): speed-up over the ratio of cached tokens.

    python bench/papers/prompt_trees.py

The horizontal axis is flat / tree tokens: tokens of all trajectories over tokens that differ. The published curve is from H200 GPUs
and another model: 0.97 at a ratio of 1 and about 70 at 100. Here prompts with many answers and a small model run through
`espalier bench`, trees and sequence packing in turns; the bound is FLOPs without trees over FLOPs with them. No trajectory extends
another, so append-only merging would be the same as packing.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare_transformers import espalier
from gpu_measure import say
from papers import figure, workloads
from papers.drawing import Chart, Series

SCRIPT = "prompt_trees.py"
RATIOS, QUICK_RATIOS = (1, 2, 4, 8, 16, 32, 64, 100, 128), (1, 8)
PUBLISHED = [(1, 0.97), (100, 70)]


def measured(args, model, ratio, tokens, scratch):
    path = scratch / f"ratio_{ratio}.jsonl"
    workloads.tree_of_ratio(ratio, tokens, workloads.SMALL["qwen3"]["vocab_size"], path)
    out = espalier("bench", "--model", model, "--data", path, "--repeats", args.rounds, "--threads", args.threads, "--json",
                   *["--cpu-seconds"] * args.cpu_seconds)  # fmt: skip
    [row] = json.loads(out)["rows"]
    say(f"ratio {ratio}: tree {row['tree_seconds']:.3f} s, sequence packing {row['packing_seconds']:.3f} s")
    return {"ratio": row["cached_token_ratio"], "flat_tokens": row["flat_tokens"], "tree_tokens": row["tree_tokens"],
            "tree_seconds": row["tree_seconds"], "packing_seconds": row["packing_seconds"], "speed_up": row["speedup"],
            "low": row["speedup_low"], "high": row["speedup_high"], "bound": row["bound"]}  # fmt: skip


def draw(args, scratch):
    model = workloads.model_folder(workloads.SMALL["qwen3"], "qwen3", scratch)
    ratios = QUICK_RATIOS if args.quick else RATIOS
    tokens = args.tree_tokens or (192 if args.quick else 512)
    rows = [measured(args, model, ratio, tokens, scratch) for ratio in ratios]
    points = [(row["ratio"], row["speed_up"], row["low"], row["high"]) for row in rows]
    series = [Series("measured here: trees over sequence packing", points),
              Series("bound by FLOPs", [(row["ratio"], row["bound"]) for row in rows], dashed=True),
              Series("published, on H200 (0.97 at 1, about 70 at 100)", PUBLISHED, joined=False)]  # fmt: skip
    chart = Chart(
        "Prompt Trees: speed-up of a step", "flat tokens / tree tokens", "times as fast", series, figure.note(args), log=True
    )
    return figure.Figure("prompt_trees", rows, {"": chart})


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    parser.add_argument("--tree-tokens", type=int, help="of every tree, about (default: 512; at a ratio of 128, fewer cannot be)")
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
