#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figure of "Speeding up LLM RL training by 7.5x on long-prompt, short-response tasks" (castform, 2026): nine answers to a long
prompt, a hybrid of Gated DeltaNet and attention, GRPO.

    python bench/papers/long_prompts.py                                     1/16 of the lengths, a small model
    python bench/papers/long_prompts.py --models qwen3_moe granite_hybrid   mixture of experts, hybrid of Mamba-2 and attention
    python bench/papers/long_prompts.py --full --device cuda --dtype bfloat16

Published are step times end to end; here a step is forward and backward of all nine rows by `espalier.Engine`, with trees and with
sequence packing in turns. Losses and gradient norms of both sides have to agree. No answer extends another, so append-only merging
drops nothing. The published points are those of Qwen3.5-4B for any model: nobody has published any for the two others.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import figure, groups

SCRIPT = "long_prompts.py"


TITLES = {"qwen3_5": "hybrid of Gated DeltaNet and attention", "qwen3_moe": "mixture of experts", "granite_hybrid": "Mamba-2 hybrid"}


def draw(args, scratch):
    titles = " and ".join(TITLES[name] for name in args.models)
    name = "long_prompts" if args.models == ["qwen3_5"] else "_".join(["long_prompts", *args.models])
    return groups.draw(args, scratch, args.models, f"Long prompts, {titles}: speed-up of a step", name)


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    parser.add_argument("--models", nargs="+", choices=TITLES, default=["qwen3_5"], help="(default: %(default)s)")
    figure.full_size_flags(parser)
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
