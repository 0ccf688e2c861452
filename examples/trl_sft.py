#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning by TRL's SFTTrainer on the turns of conversations, unpatched and patched.

The one line is espalier.trl.patch(trainer), before trainer.train(). Every answer of the agent is a row whose prompt is
the whole conversation before it, so rows of a batch repeat most of one another. Prints seconds per step, tokens
encoded and losses of both.

    python examples/trl_sft.py                              a minute or two on a laptop
    python examples/trl_sft.py --model Qwen/Qwen3-0.6B      your model

Needs trl and datasets.
"""

import tempfile

import datasets
import trl
from side_by_side import compare, make_model, make_tokenizer, parse_arguments, run_trainer, trl_settings, turns


def make_trainer(arguments, folder):
    rows = datasets.Dataset.from_list([{"prompt": prompt, "completion": answer} for prompt, answer in turns()])
    tokenizer = make_tokenizer(arguments)
    config = trl.SFTConfig(
        **trl_settings(arguments, folder),
        max_length=None,
        train_sampling_strategy="sequential",  # turns of one conversation meet in a batch, where they share most
    )
    return trl.SFTTrainer(make_model(arguments, tokenizer), config, train_dataset=rows, processing_class=tokenizer)


def main(given=None):
    arguments = parse_arguments(__doc__, given)
    with tempfile.TemporaryDirectory() as folder:
        compare(f"SFTTrainer, {arguments.batch_size} rows a step",
                lambda is_patched: run_trainer(make_trainer(arguments, folder), is_patched))  # fmt: skip


if __name__ == "__main__":
    main()
