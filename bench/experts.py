#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts against the dense model of the same active width: steps of `bin/espalier bench`.

Both models have the shapes of bench/model_shapes.py (qwen3_moe, qwen3): a token passes as many weights in its MLP on
either side, so that only routing and the size of products differ. Steps (forward and backward, no optimiser) run in
turns, one process each, with one step before the one that counts; ratios are medians of the rounds.

    python bench/experts.py -o table.md

The goal is 0.8 of the dense model's speed where an expert has 64 tokens or more.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from compare_transformers import DataSet, Failure, chains, espalier_step, model_folder, publish, say
from model_shapes import QWEN3, QWEN3_MOE

GOAL, GOAL_TOKENS = 0.8, 64


def data_set(tokens, folder):
    path = folder / f"{tokens}.jsonl"
    with open(path, "w") as file:
        for ids in chains(tokens, QWEN3["vocab_size"], 0):
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return DataSet(f"{tokens} tokens", path, 0)


def measure(tokens, dtype, args, folder):
    data = data_set(tokens, folder)
    names = ["qwen3", "qwen3_moe"]
    seconds = {name: [] for name in names}
    for round_index in range(args.rounds):
        for name in names if round_index % 2 == 0 else reversed(names):
            row = espalier_step(model_folder(name, folder), data, dtype, args.threads)
            seconds[name].append(row["tree_seconds"])
    dense, experts = (seconds[name] for name in names)
    ratios = [a / b for a, b in zip(dense, experts)]
    per_expert = tokens * QWEN3_MOE["num_experts_per_tok"] / QWEN3_MOE["num_experts"]
    say(f"{dtype}, {tokens} tokens: dense {statistics.median(dense):.3f} s, experts {statistics.median(experts):.3f} s")
    return {"dtype": dtype, "tokens": tokens, "per_expert": per_expert, "dense": dense, "experts": experts, "ratios": ratios}


COLUMNS = {
    "dtype ": lambda row: row["dtype"],
    "tokens": lambda row: f"{row['tokens']:,}",
    "tokens of an expert": lambda row: f"{row['per_expert']:.0f}",
    "dense s": lambda row: f"{statistics.median(row['dense']):.3f}",
    "experts s": lambda row: f"{statistics.median(row['experts']):.3f}",
    "speed, experts / dense": lambda row: f"{statistics.median(row['ratios']):.2f}",
    "low .. high": lambda row: f"{min(row['ratios']):.2f} .. {max(row['ratios']):.2f}",
    "goal met ": lambda row: "-" if row["per_expert"] < GOAL_TOKENS else "yes" if statistics.median(row["ratios"]) >= GOAL else "no",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,256,1024,4096", help="of a step, in unrelated chains (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-experts-") as folder:
            rows = [measure(int(tokens), dtype, args, Path(folder))
                    for dtype in args.dtypes.split(",") for tokens in args.tokens.split(",")]  # fmt: skip
    except Failure as failure:
        say(str(failure))
        return 1
    publish(f"One run, {args.rounds} rounds", COLUMNS, rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
