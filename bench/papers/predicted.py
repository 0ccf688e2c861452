#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predictions, not measurements: the grid of bench/papers/long_prompts.py at its published lengths, for a GPU.

    python bench/papers/predicted.py

The cost model of `espalier.plan` with its built-in rates of a GPU compares the plans of trees and of sequence packing, for
the larger models of bench/papers/workloads.py. Nothing runs, and no GPU is needed. `bound` is by FLOPs alone.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import figure, groups, workloads

SCRIPT = "predicted.py"


def predicted(name, lengths, published, scratch):
    import espalier

    config = scratch / f"{name}.json"
    config.write_text(json.dumps(workloads.FULL[name]))
    costs, (prompt, answer) = espalier.costs(config, device="cuda"), lengths
    rows = workloads.group(prompt, answer, groups.ANSWERS, workloads.FULL[name]["vocab_size"])
    forest, masks = espalier.build(rows), [row["loss_mask"] for row in rows]
    budget = prompt + groups.ANSWERS * answer
    tree, packing = (espalier.plan(forest, token_budget=budget, strategy=strategy, model=costs, loss_mask=masks)
                     for strategy in ("tree-packing", "sequence-packing"))  # fmt: skip
    return {"model": name, "prompt": prompt, "answer": answer, "answers": groups.ANSWERS, "flat_tokens": forest.flat_tokens,
            "tree_tokens": forest.tree_tokens, "ratio": forest.flat_tokens / forest.tree_tokens,
            "predicted_speed_up": packing.seconds / tree.seconds, "bound": packing.flops / tree.flops,
            "published": published}  # fmt: skip


def draw(args, scratch):
    divisor = args.divisor or (64 if args.quick else 1)
    rows = [predicted(name, (prompt // divisor, answer // divisor), published, scratch)
            for name in ("qwen3_5", "qwen3_moe", "granite_hybrid")
            for (prompt, answer), published in groups.PUBLISHED.items()]  # fmt: skip
    return figure.Figure("predicted", rows, {})


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    parser.add_argument("--divisor", type=int, help="lengths are the published ones over this (default: 1, with --quick 64)")
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
