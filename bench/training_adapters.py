#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of several clients of one base in one pass, against a pass for each client, as `espalier serve` makes them.

Each client has its own adapter and a group of answers to its own prompt. One `forward_backward` of the rows of all clients
(`adapters=`, which `espalier serve --join-clients` uses) is measured against one call for each client. The bound is the same call with
one adapter for all rows. All three run in turns, round by round; gains are medians of each round's ratio.

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


def seconds(engine, adapters, calls):
    """Of calls, each of rows and their adapters; without: those of the one in use."""
    began = time.perf_counter()
    for rows, row_adapters in calls:
        if row_adapters is not None and len(set(row_adapters)) == 1:
            engine.use(row_adapters[0])
            row_adapters = None
        engine.forward_backward(rows, adapters=row_adapters)
    spent = time.perf_counter() - began
    for adapter in adapters:
        engine.use(adapter)
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
          "call | gain at most |\n|---|---:|---:|---:|---:|")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        engine = espalier.Engine(common.model_folder(arguments.model, Path(scratch)), adapters=True)
        adapters = [engine.new_adapter(lora_rank=16, seed=client) for client in range(arguments.clients)]
        for prompt, answers, answer in ((4, 1, 4), (16, 2, 8), (32, 4, 16), (128, 8, 32)):
            groups = [group(client, prompt, answers, answer) for client in range(arguments.clients)]
            rows = [row for own in groups for row in own]
            apart = [(own, [adapter] * len(own)) for own, adapter in zip(groups, adapters)]
            joined = [(rows, [adapter for own, adapter in zip(groups, adapters) for _ in own])]
            bound = [(rows, [adapters[0]] * len(rows))]
            seconds(engine, adapters, joined)
            rounds = [[seconds(engine, adapters, calls) for calls in (apart, joined, bound)] for _ in range(arguments.rounds)]
            print(f"| {answers} of {answer} tokens on {prompt} | {prompt + answers * answer} | "
                  f"{statistics.median(each[0] for each in rounds):.2f} | {statistics.median(each[0] / each[1] for each in rounds):.2f} | "
                  f"{statistics.median(each[0] / each[2] for each in rounds):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
