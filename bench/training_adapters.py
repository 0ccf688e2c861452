#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients of one base could gain if a training step of all of them were one pass: a bound.

Each client has a group of answers to a prompt of its own. One `forward_backward` of the rows of all clients, with one adapter, is
measured against one call for each client: a pass over rows of different adapters can be no faster than that, since it has the same
products and those of more adapters. Both ways run in turns, round by round; the gain is the median of each round's ratio.

With `make build` done, and the Python that has torch (.venv/bin/python):

    python bench/training_adapters.py                  SmolLM2-135M's shape with random weights
    python bench/training_adapters.py --model DIR
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "bench")]

import compare_transformers as common  # noqa: E402
from commit import commit  # noqa: E402

import espalier  # noqa: E402


def group(client, prompt_tokens, answers, answer_tokens):
    draw = random.Random(client)
    some = lambda count: [draw.randrange(100, 4000) for _ in range(count)]
    prompt = some(prompt_tokens)
    return [{"input_ids": prompt + some(answer_tokens), "loss_mask": [0] * prompt_tokens + [1] * answer_tokens} for _ in range(answers)]


def seconds(engine, calls):
    began = time.perf_counter()
    for rows in calls:
        engine.forward_backward(rows)
    spent = time.perf_counter() - began
    engine.zero_gradients()
    return spent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", metavar="NAME",
                        help=f"a model folder, or a shape with random weights: {', '.join(common.SHAPES)} (default: %(default)s)")
    parser.add_argument("--clients", type=common.at_least(2), default=4, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=common.at_least(1), default=5, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args()
    print(f"{common.cpu_name()}. Commit {commit()}\n\n| group of a client | encoded tokens of a client | seconds of a call each | gain of one "
          "call, at most |\n|---|---:|---:|---:|")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        engine = espalier.Engine(common.model_folder(arguments.model, Path(scratch)), lora_rank=16)
        for prompt, answers, answer in ((4, 1, 4), (16, 2, 8), (32, 4, 16), (128, 8, 32)):
            groups = [group(client, prompt, answers, answer) for client in range(arguments.clients)]
            together = [[row for rows in groups for row in rows]]
            seconds(engine, together)
            rounds = [(seconds(engine, groups), seconds(engine, together)) for _ in range(arguments.rounds)]
            print(f"| {answers} of {answer} tokens on {prompt} | {prompt + answers * answer} | "
                  f"{statistics.median(apart for apart, _ in rounds):.2f} | "
                  f"{statistics.median(apart / one for apart, one in rounds):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
