#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning by TRL's GRPOTrainer, unpatched and patched.

The one line is espalier.trl.patch(trainer), before trainer.train(). A step samples --batch-size answers to one prompt
and trains on them; the prompt is encoded once. Sampling stays with Transformers, so its seconds are the same on both
sides, and are printed apart.

    python examples/trl_grpo.py                             a minute or two on a laptop
    python examples/trl_grpo.py --model Qwen/Qwen3-0.6B     your model

Needs trl and datasets.
"""

import tempfile
import time

import datasets
import trl
from side_by_side import compare, make_model, make_tokenizer, parse_arguments, run_trainer, trl_settings, turns

ANSWER_TOKENS = 32


def reward(completions, **_):
    """The share of letters that are vowels, which stands for a real one."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def make_trainer(arguments, folder):
    tokenizer = make_tokenizer(arguments)
    prompts = [{"prompt": prompt} for prompt, _ in turns()]
    config = trl.GRPOConfig(
        **trl_settings(arguments, folder),
        num_generations=arguments.batch_size,  # or a divisor: espalier.trl.patch keeps answers to one prompt in one batch
        max_completion_length=ANSWER_TOKENS,
    )
    return trl.GRPOTrainer(make_model(arguments, tokenizer), reward, args=config, processing_class=tokenizer,
                           train_dataset=datasets.Dataset.from_list(prompts))  # fmt: skip


def run_apart_from_sampling(trainer, is_patched):
    """A Training whose seconds are those of the steps without sampling."""
    sampling, generate = [], trainer.model.generate

    def timed(*args, **kwargs):
        began = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            sampling.append(time.perf_counter() - began)

    trainer.model.generate = timed
    training = run_trainer(trainer, is_patched)
    training.seconds = [step - sampled for step, sampled in zip(training.seconds, sampling, strict=True)]
    side = "patched" if is_patched else "unpatched"
    print(f"{side}: {sum(sampling) / len(sampling):.3f} seconds of sampling per step")
    return training


def main(given=None):
    arguments = parse_arguments(__doc__, given)
    with tempfile.TemporaryDirectory() as folder:
        compare(f"GRPOTrainer without sampling, {arguments.batch_size} answers of {ANSWER_TOKENS} tokens a step",
                lambda is_patched: run_apart_from_sampling(make_trainer(arguments, folder), is_patched))  # fmt: skip


if __name__ == "__main__":
    main()
