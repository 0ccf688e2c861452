#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A plain training loop on several ranks, with FSDP2 and trees.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py                 two processes on a CPU, in a minute
    torchrun --nproc-per-node 8 examples/train_fsdp2.py --model NAME    your model, on GPUs where there are some

Every rank reads all rows and trains on its share: whole trees, balanced by predicted time. Rows are the turns of real
conversations, as bytes, or as tokens of --model. Prints the loss of every step, how many tokens were encoded, and how
evenly work was spread, as predicted and as measured.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import espalier
from espalier.distributed import Ranks

CONVERSATIONS = Path(__file__).with_name("tau_airline_part.jsonl")


def parse_arguments(given):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a model of Transformers, by folder or name (default: a small random one)")
    add("--mode", choices=("gathered", "zero3"), default="gathered", help="see espalier.distributed.Ranks")
    add("--strategy", default="tree-packing", metavar="NAME",
        help="of espalier.plan; partition needs --mode gathered (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=4, metavar="N", help="optimiser steps (default: %(default)s)")
    add("--characters", type=int, default=1200, metavar="N", help="of each conversation (default: %(default)s)")
    add("--token-budget", type=int, default=2048, metavar="N", help="of a micro-batch (default: %(default)s)")
    return parser.parse_args(given)


def turns(characters):
    """(prompt, answer) of everything that the agent says, without the instructions before the conversation."""
    for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines():
        history = ""
        for message in json.loads(line)["messages"][1:]:
            text = f"{message['role']}: {message['content'] or message.get('tool_calls')}\n"
            if len(history + text) > characters:
                break
            if message["role"] == "assistant":
                yield history, text
            history += text


def rows_of(arguments):
    """(rows of tokens, for each how many of its first tokens are the prompt)."""
    encode = lambda text: list(text.encode())
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    rows, prompts = [], []
    for prompt, answer in turns(arguments.characters):
        prompt = encode(prompt) or [0]
        rows.append(prompt + encode(answer))
        prompts.append(len(prompt))
    return rows, prompts


def sharded_model(arguments, device):
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
    else:
        config = AutoConfig.for_model(
            "qwen3", vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, head_dim=24,
            num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
        torch.manual_seed(0)  # the same weights on every rank
        model = AutoModelForCausalLM.from_config(config)
    model = espalier.hf.patch(model.to(device).train())
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(given=None):
    arguments = parse_arguments(given)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = sharded_model(arguments, device)
    ranks = Ranks(model, mode=arguments.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rows, prompts = rows_of(arguments)  # on every rank the same
    count = sum(map(len, rows)) - sum(prompts)  # of all ranks: the losses of a step are divided by it
    for number in range(arguments.steps):
        share = ranks.share(rows)
        plan = espalier.plan(share.forest, token_budget=arguments.token_budget, strategy=arguments.strategy)
        masks = [[0] * prompts[r] + [1] * (len(rows[r]) - prompts[r]) for r in share.trajectories]
        run = espalier.Step(model, plan, loss_mask=masks)
        total = 0.0
        with ranks.step(share, run) as step:
            for micro_batch in step:
                loss = -run.logprobs(micro_batch).sum() / count
                run.backward(loss)
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        loss = ranks.sum(total)
        if ranks.rank == 0:
            print(f"step {number + 1}: loss {loss:.4f}, gradient norm {norm:.4f}\n{step.report}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
