# SPDX-License-Identifier: Apache-2.0
"""What the examples have in common: real conversations, a small random model with its own tokenizer, and the same
training twice, unpatched and patched. Nothing is downloaded.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

import espalier

CONVERSATIONS = Path(__file__).with_name("tau_airline_part.jsonl")
AGREEMENT = 1e-4  # relative; both sides round in float32, in another order


def parse_arguments(description, given=None, steps=4, batch_size=8):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=steps, metavar="N", help="optimiser steps of each side (default: %(default)s)")
    add("--batch-size", type=int, default=batch_size, metavar="N",
        help="rows of a step, which are those that can share (default: %(default)s)")  # fmt: skip
    add("--model", metavar="NAME", help="a model of Transformers, by folder or name (default: a small random one)")
    add("--hidden-size", type=int, default=128, metavar="N", help="of the random model (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="of the random model (default: %(default)s)")
    return parser.parse_args(given)


def text_of(message):
    """A message as plain text."""
    return f"{message['role']}: {message['content'] or message.get('tool_calls')}\n"


def turns():
    """(prompt, answer) of what the agent says in each conversation, in order: the prompt is all that was said before.
    Turns of one conversation extend one another, and all conversations begin with the same instructions."""
    found = []
    for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines():
        history = ""
        for message in json.loads(line)["messages"]:
            text = text_of(message)
            if message["role"] == "assistant":
                found.append((history + "assistant:", text.removeprefix("assistant:")))
            history += text
    return found


def make_tokenizer(arguments):
    """That of --model, or one of up to 4,096 tokens that learns from the conversations."""
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(dict.fromkeys(prompt for prompt, _ in turns()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_model(arguments, tokenizer):
    """--model in float32, or a small Qwen3 with random weights, the same ones on every call."""
    if arguments.model:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    size = arguments.hidden_size
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=size, intermediate_size=3 * size, head_dim=size // 4,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@dataclass
class Training:
    """What was seen of one training."""

    seconds: list  # of each step
    losses: list
    gradient_norms: list
    sharing: object = None  # espalier.hf.Sharing, where the model was patched


class Clock(TrainerCallback):
    """The seconds of each step of a trainer."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began)


def trl_settings(arguments, folder):
    """What the trainers of TRL are told alike."""
    return dict(output_dir=folder, max_steps=arguments.steps, per_device_train_batch_size=arguments.batch_size,
                learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
                use_cpu=not torch.cuda.is_available(), bf16=False, activation_checkpointing=False)  # fmt: skip


def run_trainer(trainer, is_patched):
    """Trains with a trainer of TRL."""
    if is_patched:
        espalier.trl.patch(trainer)
    trainer.add_callback(clock := Clock())
    torch.manual_seed(1)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return Training(clock.seconds, [log["loss"] for log in logs], [log["grad_norm"] for log in logs],
                    espalier.hf.sharing(trainer.model) if is_patched else None)  # fmt: skip


def compare(title, train):
    """Runs train(is_patched), which returns a Training, both ways and prints them side by side. Ends the program where
    they do not agree at the first step, for which both have the same weights."""
    unpatched, patched = train(False), train(True)
    seconds = [statistics.median(each.seconds[1:] or each.seconds) for each in (unpatched, patched)]
    sharing = patched.sharing
    print(f"\n{title}, {torch.get_num_threads()} threads\n")
    print(f"{'':26}{'unpatched':>12}{'patched':>12}")
    print(f"{'seconds per step':26}{seconds[0]:12.3f}{seconds[1]:12.3f}{seconds[0] / seconds[1]:9.2f}x")
    print(f"{'tokens encoded':26}{sharing.flat_tokens:12,}{sharing.tree_tokens:12,}{sharing.ratio:9.2f}x")
    for step in range(len(unpatched.losses)):
        for name, values in (("loss", "losses"), ("gradient norm", "gradient_norms")):
            pair = [getattr(each, values)[step] for each in (unpatched, patched)]
            print(f"{f'step {step + 1}: {name}':26}{pair[0]:12.6f}{pair[1]:12.6f}")
    for values in ("losses", "gradient_norms"):
        ours, theirs = getattr(patched, values)[0], getattr(unpatched, values)[0]
        if not abs(ours - theirs) <= AGREEMENT * max(abs(theirs), 0.1):
            raise SystemExit(f"\nthe first step: expected equal {values.replace('_', ' ')}, received {ours} patched "
                             f"and {theirs} unpatched")  # fmt: skip
    print("\nLosses and gradient norms of the first step agree.")
