#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT in a plain training loop, unpatched and patched.

The one line is espalier.hf.patch(model), before or after PEFT wraps the model. Rows are the turns of conversations,
padded, with the loss on the agent's answer. Prints seconds per step, tokens encoded and losses of both.

    python examples/peft_lora.py                            a minute or two on a laptop
    python examples/peft_lora.py --model Qwen/Qwen3-0.6B    your model

Needs peft.
"""

import time

import peft
import torch
from side_by_side import Training, compare, make_model, make_tokenizer, parse_arguments, turns

import espalier


def batches(arguments, tokenizer):
    """A padded batch of rows for each step: input_ids, attention_mask and labels [B, S]."""
    rows = turns()
    for step in range(arguments.steps):
        begin = step * arguments.batch_size
        chosen = [rows[number % len(rows)] for number in range(begin, begin + arguments.batch_size)]
        prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in chosen]
        answers = [tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] for _, answer in chosen]
        batch = tokenizer.pad({"input_ids": [p + a for p, a in zip(prompts, answers)]}, padding_side="right",
                              return_tensors="pt")  # fmt: skip
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, prompt in zip(labels, prompts):
            row[:len(prompt)] = -100
        yield dict(batch) | {"labels": labels}


def train(arguments, is_patched):
    tokenizer = make_tokenizer(arguments)
    model = make_model(arguments, tokenizer).train()
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    if is_patched:
        model = espalier.hf.patch(model)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    seen = Training([], [], [])
    for batch in batches(arguments, tokenizer):
        began = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.seconds.append(time.perf_counter() - began)
        seen.losses.append(loss.item())
        seen.gradient_norms.append(norm.item())
    if is_patched:
        seen.sharing = espalier.hf.sharing(model)
    return seen


def main(given=None):
    arguments = parse_arguments(__doc__, given)
    compare(f"LoRA, {arguments.batch_size} rows a step", lambda is_patched: train(arguments, is_patched))


if __name__ == "__main__":
    main()
