#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The grid of bench/papers/long_prompts.py for a mixture of experts and for a hybrid of Mamba-2 and attention.

    python bench/papers/experts_and_mamba.py                                1/16 of the lengths, small models
    python bench/papers/experts_and_mamba.py --full --device cuda --dtype bfloat16

The published points are those of Qwen3.5-4B, a hybrid of Gated DeltaNet: nobody has published any for these two.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import figure, groups

SCRIPT = "experts_and_mamba.py"
MODELS = ["qwen3_moe", "granite_hybrid"]


def draw(args, scratch):
    return groups.draw(
        args, scratch, MODELS, "Long prompts, mixture of experts and Mamba-2 hybrid: speed-up of a step", "experts_and_mamba"
    )


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    figure.full_size_flags(parser)
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
