#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sampling from several adapters of one model: side by side in one `Engine.sampling()`, or each in a separate one, in turn.

Each adapter (rank 16, all linear maps) continues one prompt. Seconds are those of decoding alone. Both ways run in turns, round by
round; the speed-up is the median of each round's ratio.

With `make build` done, and the Python that has torch (.venv/bin/python):

    python bench/sampling_adapters.py                  SmolLM2-135M's shape with random weights
    python bench/sampling_adapters.py --model DIR
"""

import argparse
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


def seconds(engine, adapters, samplings, arguments):
    """`samplings`: one for each adapter, or one for all."""
    params = [espalier.SamplingParams(max_new_tokens=arguments.new_tokens, stop_ids=[], seed=1)]
    for number, adapter in enumerate(adapters):
        engine.use(adapter)
        samplings[number % len(samplings)].add([list(range(100, 100 + arguments.prompt_tokens))], params)
    for sampling in samplings:
        sampling.step()  # encodes the prompts
    began = time.perf_counter()
    while going_on := [sampling for sampling in samplings if not sampling.is_idle]:
        for sampling in going_on:
            sampling.step()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", metavar="NAME",
                        help=f"a model folder, or a shape with random weights: {', '.join(common.SHAPES)} (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=common.at_least(1), default=64, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=common.at_least(2), default=24, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=common.at_least(1), default=3, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args()
    print(f"{common.cpu_name()}. Commit {commit()}\n\n| dtype | adapters | side by side, tokens/s | speed-up |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        model = common.model_folder(arguments.model, Path(scratch))
        for dtype in ("float32", "bfloat16"):
            engine = espalier.Engine(model, adapters=True, dtype=dtype)
            for count in (4, 8):
                adapters = [engine.new_adapter(lora_rank=16, lora_targets=["all-linear"], seed=seed) for seed in range(count)]
                rounds = [(seconds(engine, adapters, [engine.sampling() for _ in adapters], arguments),
                           seconds(engine, adapters, [engine.sampling()], arguments)) for _ in range(arguments.rounds)]  # fmt: skip
                tokens = count * (arguments.new_tokens - 1)
                print(f"| {dtype} | {count} | {tokens / statistics.median(ours for _, ours in rounds):.1f} | "
                      f"{statistics.median(apart / ours for apart, ours in rounds):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
