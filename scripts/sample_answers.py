#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Samples a group of answers to real prompts with the model itself, as reinforcement learning with groups (GRPO) does.

    scripts/sample_answers.py MODEL_DIR ROWS.jsonl -o GROUP.jsonl [--trajectory ID ...] [--answers 16] [--max-new-tokens 48]

ROWS.jsonl comes from `espalier prepare --per-turn`: in each row the tokens before the first one with loss are a prompt,
and those with loss are what the agent really said there. Without --trajectory the longest prompt is taken. Each row of GROUP.jsonl is one
sampled answer: input_ids, loss_mask, logprobs (of the sampling model), reward and group_id. The reward is the overlap of
its words with the words of the real answer (F1). The prompt is encoded once; its keys and values serve all answers.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path


def prompts_of(path, names):
    """(trajectory_id, prompt, real answer) of the named rows; without names of the row with the longest prompt."""
    found = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line)
            name = row.get("trajectory_id", f"row-{number}")
            if 1 in row["loss_mask"] and (not names or name in names):
                begin = row["loss_mask"].index(1)
                found.append((name, row["input_ids"][:begin], row["input_ids"][begin:]))
    missing = sorted(set(names) - {name for name, _, _ in found})
    if missing or not found:
        sys.exit(f"sample_answers: {path}: expected rows with loss after a prompt, found none"
                 + (f" named {', '.join(missing)}" if missing else ""))
    return found if names else [max(found, key=lambda row: len(row[1]))]


def overlap(words, others):
    """F1 of two lists of words."""
    common = sum((Counter(words) & Counter(others)).values())
    return 2 * common / (len(words) + len(others)) if words or others else 0.0


def sample(model, prompt, answers, most, stop, seed):
    """Token ids and log-probabilities of sampled answers, each up to and with a token of `stop`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(answers)
        logits = out.logits[:, -1].repeat(answers, 1)
        ids, logprobs = [[] for _ in range(answers)], [[] for _ in range(answers)]
        open_answers = set(range(answers))
        for _ in range(most):
            every = logits.float().log_softmax(-1)
            token = torch.multinomial(every.exp(), 1, generator=generator)
            chosen = every.gather(1, token)
            for k in sorted(open_answers):
                ids[k].append(int(token[k]))
                logprobs[k].append(float(chosen[k]))
                if ids[k][-1] in stop:
                    open_answers.remove(k)
            if not open_answers:
                break
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
    return ids, logprobs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="GROUP.jsonl")
    parser.add_argument("--answers", type=int, default=16, metavar="N", help="answers to each prompt (default: %(default)s)")
    parser.add_argument("--trajectory", nargs="+", default=[], metavar="ID", help="whose prompts to answer, each a group")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"expected a model directory, received {arguments.model}")
    prompts = prompts_of(arguments.rows, arguments.trajectory)

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, trust_remote_code=False)
    stop = {tokenizer.eos_token_id} | set(tokenizer.convert_tokens_to_ids(
        [token for token in ("<|im_end|>", "<|endoftext|>", "</s>") if token in tokenizer.get_vocab()]))

    def words(ids):
        return tokenizer.decode(ids, skip_special_tokens=True).lower().split()

    with open(arguments.output, "w", encoding="utf-8") as out:
        for number, (name, prompt, real) in enumerate(prompts):
            ids, logprobs = sample(model, prompt, arguments.answers, arguments.max_new_tokens, stop,
                                   arguments.seed + number)
            rewards = [overlap(words(answer), words(real)) for answer in ids]
            for k in range(arguments.answers):
                out.write(json.dumps({
                    "trajectory_id": f"{name}/answer-{k}", "group_id": name, "reward": round(rewards[k], 4),
                    "input_ids": prompt + ids[k], "loss_mask": [0] * len(prompt) + [1] * len(ids[k]),
                    "logprobs": [0.0] * len(prompt) + logprobs[k]}) + "\n")
            best = max(range(arguments.answers), key=lambda k: rewards[k])
            print(f"{name}: {arguments.answers} answers to a prompt of {len(prompt):,} tokens, "
                  f"{sum(map(len, ids)):,} tokens in all, rewards {min(rewards):.2f} to {max(rewards):.2f}")
            print(f"  the best: {' '.join(words(ids[best])) or '(nothing but white space)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
