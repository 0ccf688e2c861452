#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figure of "Speeding up LLM RL training by 7.5x on long-prompt, short-response tasks" (castform, 2026): nine answers to a long
prompt, a hybrid of Gated DeltaNet and attention, GRPO.

    python bench/papers/long_prompts.py                                     1/16 of the lengths, a small model
    python bench/papers/long_prompts.py --full --device cuda --dtype bfloat16

Published are step times end to end; here a step is forward and backward of all nine rows by `espalier.Engine`, with trees and with
sequence packing in turns. Losses and gradient norms of both sides have to agree. No answer extends another, so append-only merging
drops nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import figure, groups

SCRIPT = "long_prompts.py"


def draw(args, scratch):
    return groups.draw(
        args, scratch, ["qwen3_5"], "Long prompts, hybrid of Gated DeltaNet and attention: speed-up of a step", "long_prompts"
    )


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    figure.full_size_flags(parser)
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
