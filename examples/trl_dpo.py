#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation by TRL's DPOTrainer, unpatched and patched.

The one line is espalier.trl.patch(trainer), before trainer.train(): it covers the reference model too. Both answers of
a pair repeat its prompt, and prompts of a conversation repeat one another. Prints seconds per step, tokens encoded and
losses of both.

    python examples/trl_dpo.py                              a minute or two on a laptop
    python examples/trl_dpo.py --model Qwen/Qwen3-0.6B      your model

Needs trl and datasets.
"""

import tempfile

import datasets
import trl
from side_by_side import compare, make_model, make_tokenizer, parse_arguments, run_trainer, trl_settings, turns


def pairs():
    """What the agent said, preferred to what it said in another place: stand-ins for real preferences."""
    found = turns()
    others = [answer for _, answer in found[1:] + found[:1]]
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected}
            for (prompt, chosen), rejected in zip(found, others) if chosen != rejected]  # fmt: skip


def make_trainer(arguments, folder):
    tokenizer = make_tokenizer(arguments)
    config = trl.DPOConfig(
        **trl_settings(arguments, folder),
        max_length=None,
        train_sampling_strategy="sequential",  # turns of one conversation meet in a batch, where they share most
    )
    model, reference = make_model(arguments, tokenizer), make_model(arguments, tokenizer)
    return trl.DPOTrainer(model, reference, args=config, train_dataset=datasets.Dataset.from_list(pairs()),
                          processing_class=tokenizer)  # fmt: skip


def main(given=None):
    arguments = parse_arguments(__doc__, given, batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        compare(f"DPOTrainer, {arguments.batch_size} pairs a step",
                lambda is_patched: run_trainer(make_trainer(arguments, folder), is_patched))  # fmt: skip


if __name__ == "__main__":
    main()
