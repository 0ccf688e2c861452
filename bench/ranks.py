#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`espalier train` on two processes with one thread each, against one process with two threads.

A small random llama and steps of many trees (`espalier synth`), the same on both sides, which run in turns, round by round.
Seconds of a step are the median over the steps of a run, without the first; figures are medians of the rounds, and the
efficiency is the median of each round's ratio. Losses of both sides must agree, or the command fails. Each side is held to
the same cores. Data and model stay the same for equal flags.

    python bench/ranks.py -o table.md
    python bench/ranks.py --context-parallel --trees 1 --node-length 230 --hidden-size 512 --layers 6 --token-budget 8192

With --context-parallel the two processes compute every micro-batch together, each a part of its tokens, and both sides have one
thread for each process: the speed-up is at most 2. The goal is an efficiency of 0.9. Gradients go over Gloo on one machine: a figure of a network or of NCCL it is not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from compare_transformers import Failure, espalier, publish, stay_on_two_cores

GOAL = 0.9
TOLERANCE = 1e-4  # of losses in float32, relative
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "intermediate_size": 1024,
    "num_key_value_heads": 4, "num_attention_heads": 8, "vocab_size": 2048, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def inputs(args, folder):
    """Flags of a run of either side."""
    config = folder / "config.json"
    config.write_text(json.dumps(LLAMA | {"hidden_size": args.hidden_size, "num_hidden_layers": args.layers}))
    espalier("init", "--config", config, "--out", folder / "model")
    espalier("synth", "--out", folder / "rows.jsonl", "--trees", args.trees, "--node-length", args.node_length,
             "--vocab-size", LLAMA["vocab_size"])  # fmt: skip
    with open(folder / "rows.jsonl") as file:
        rows = sum(1 for _ in file)
    return ["--model", folder / "model", "--data", folder / "rows.jsonl", "--steps", args.steps, "--batch-size", rows,
            "--learning-rate", 1e-4, "--objective", "sft", "--no-calibration", "--token-budget", args.token_budget]  # fmt: skip


def run(flags, folder, processes, together):
    """(median seconds of a step, losses, MiB of tensors of the first process)"""
    more = ["--threads", 2 // processes]
    if together:
        more = ["--threads", 1, "--context-parallel", processes]
    espalier("train", *flags, "--out", folder, "--processes", processes, *more)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    peak = max(step["peak_tensor_bytes"] for step in steps) / 2**20
    return statistics.median(step["seconds"] for step in steps[1:]), [step["loss"] for step in steps], peak


def measure(args, folder):
    flags = inputs(args, folder)
    rounds = []
    for index in range(args.rounds):
        sides = (1, 2) if index % 2 == 0 else (2, 1)
        found = {processes: run(flags, folder / f"{index}.{processes}", processes, args.context_parallel) for processes in sides}
        for one, two in zip(found[1][1], found[2][1]):
            if abs(one - two) > TOLERANCE * abs(one):
                raise Failure(f"loss of one process {one}, of two {two}: they differ by more than {TOLERANCE}")
        rounds.append((found[1][0], found[2][0], found[1][2], found[2][2]))
        print(f"ranks: round {index + 1}: one process {rounds[-1][0]:.3f} s, two {rounds[-1][1]:.3f} s", file=sys.stderr)
    return rounds


def columns(together):
    """Functions of the rounds by heading."""
    ratios = lambda rounds: [one / two for one, two, *_ in rounds]
    gain = "speed-up" if together else "efficiency"
    found = {
        f"one process, {'one thread' if together else 'two threads'}, s": lambda rounds: f"{statistics.median(one for one, *_ in rounds):.3f}",
        "two processes, one thread each, s": lambda rounds: f"{statistics.median(two for _, two, *_ in rounds):.3f}",
        gain: lambda rounds: f"{statistics.median(ratios(rounds)):.2f}",
        "low .. high": lambda rounds: f"{min(ratios(rounds)):.2f} .. {max(ratios(rounds)):.2f}",
        "tensors of one, MiB": lambda rounds: f"{rounds[0][2]:.0f}",
        "of each of two": lambda rounds: f"{rounds[0][3]:.0f}",
    }
    met = lambda rounds: "yes" if statistics.median(ratios(rounds)) >= GOAL else "no"
    return found if together else found | {"goal met ": met}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=48, help="of a step, each of nine rows (default: %(default)s)")
    parser.add_argument("--node-length", type=int, default=64, help="mean tokens of a node (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=2048, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of a run, 2 or more (default: %(default)s)")
    parser.add_argument("--context-parallel", action="store_true", help="the two processes compute every micro-batch together")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    try:
        stay_on_two_cores()
        os.environ.setdefault("ESPALIER_PYTHON", sys.executable)
        with tempfile.TemporaryDirectory(prefix="espalier-ranks-") as folder:
            rounds = measure(args, Path(folder))
    except Failure as failure:
        print(f"ranks: {failure}", file=sys.stderr)
        return 1
    publish(f"One run, {args.rounds} rounds", columns(args.context_parallel), [rounds], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
