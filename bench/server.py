#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GRPO step as tinker-cookbook does it, by `espalier serve`: on trees, without them, and by PEFT and PyTorch.

A step samples a group of answers to a prompt of random tokens and trains on them: `sample` with num_samples, then
`forward_backward` (importance_sampling) and `optim_step`, by the official client. In a conversation each sample goes on for
several turns, as the cookbook's environments do: every turn is a request with all tokens so far, and 32 given tokens follow
each answer. Sides, each a separate process, which work in turns, round by round, on the same data:

    trees     espalier serve
    packing   espalier serve --strategy sequence-packing: each datum encoded by itself. Only training differs, so it samples nothing
    PEFT      PEFT's LoRA on Transformers, sdpa: `generate` with num_return_sequences, then the group as one batch

With --conversations it samples conversations alone, several side by side, by two servers: one keeps prefixes (--prefix-cache), the
other encodes every prompt anew.

Figures are medians over rounds of seconds; ratios are medians of each round's ratio. First the log-probabilities of all sides
are compared, and the command fails where they differ.

    python bench/server.py                  minutes
    python bench/server.py --quick          does it work here?
    python bench/server.py --conversations --turns 16
    python bench/server.py -o bench/results/server_DATE.md
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "bench")]

import compare_transformers as common  # noqa: E402

GIVEN = 32  # tokens between turns
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Case(NamedTuple):
    """What a step does; turns: of each conversation."""

    group: int
    prompt: int
    turns: int

    @property
    def name(self):
        return f"{self.group} of {self.prompt}" + (f", {self.turns} turns" if self.turns > 1 else "")


class Times(NamedTuple):
    """Seconds of a step."""

    sampling: float
    training: float


def say(text):
    print(f"server: {text}", file=sys.stderr, flush=True)


class Group:
    """Rows of a step with what was given and what was sampled, told apart by log-probabilities (None: given)."""

    def __init__(self, rows):
        self.rows = rows  # [(tokens, logprobs)]
        rewards = [sum(tokens[-8:]) % 7 for tokens, _ in rows]
        mean = statistics.mean(rewards)
        self.advantages = [reward - mean for reward in rewards]


def given(case, number):
    """The prompt, and what follows each turn of each sample."""
    rng = random.Random(f"{case} {number}")
    draw = lambda size: [rng.randrange(256) for _ in range(size)]
    return draw(case.prompt), [[draw(GIVEN) for _ in range(case.group)] for _ in range(case.turns - 1)]


def serve(stack, folder, state, *flags, checkout=REPOSITORY):
    """Starts `espalier serve` of a checkout, until the end of the stack. Returns its process and its address."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'python'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "espalier", "serve", "--model", f"model={folder}", "--port", "0", "--state", state, *flags]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if " on http://" in line:
            return process, line.split()[-1]
    raise common.Failure("".join(lines))


class Server:
    """A side that asks `espalier serve`."""

    def __init__(self, stack, folder, state, arguments, *flags):
        import tinker

        _, self.address = serve(stack, folder, state, "--threads", arguments.threads, *flags)
        self.types, self.tokens = tinker.types, arguments.new_tokens
        service = tinker.ServiceClient(base_url=self.address, api_key="tml-local")
        self.client = service.create_lora_training_client(base_model="model", rank=arguments.rank, seed=1, train_unembed=False).result()
        self.adapter = Path(state) / "runs" / self.client.model_id.replace(":", ".") / "weights/start/adapter"
        self.client.save_state("start").result()

    def sample(self, case, number):
        """A Group, by as many requests as the cookbook makes."""
        prompt, later = given(case, number)
        params = self.types.SamplingParams(max_tokens=self.tokens, stop=[])
        sampling = self.client.save_weights_and_get_sampling_client().result()
        ask = lambda tokens, samples: sampling.sample(self.types.ModelInput.from_ints(tokens), samples, params)
        drawn = ask(prompt, case.group).result().sequences
        rows = [(prompt + list(each.tokens), [None] * len(prompt) + list(each.logprobs)) for each in drawn]
        for turn in later:
            rows = [(tokens + more, logprobs + [None] * len(more)) for (tokens, logprobs), more in zip(rows, turn)]
            waiting = [ask(tokens, 1) for tokens, _ in rows]
            drawn = [each.result().sequences[0] for each in waiting]
            rows = [(tokens + list(each.tokens), logprobs + list(each.logprobs)) for (tokens, logprobs), each in zip(rows, drawn)]
        return Group(rows)

    def encoded(self):
        """Tokens of prompts that were encoded so far."""
        import httpx

        counts = dict(line.split() for line in httpx.get(f"{self.address}/metrics").text.splitlines())
        return float(counts.get("espalier_encoded_prompt_tokens", 0))

    def converse(self, case, number):
        """Conversations side by side. Returns their tokens, and what was encoded of them."""
        before = self.encoded()
        rows = self.sample(case, number).rows
        return [tokens for tokens, _ in rows], self.encoded() - before

    def train(self, group):
        """One step; returns log-probabilities of what was sampled, and encoded tokens of each token."""
        data = []
        for (tokens, logprobs), advantage in zip(group.rows, group.advantages):
            sampled = [value is not None for value in logprobs[1:]]
            data.append(self.types.Datum(model_input=self.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={
                "target_tokens": tokens[1:], "logprobs": [value or 0.0 for value in logprobs[1:]],
                "advantages": [advantage * here for here in sampled]}))  # fmt: skip
        done = self.client.forward_backward(data, "importance_sampling")
        step = self.client.optim_step(self.types.AdamParams(learning_rate=1e-4))
        result = done.result()
        step.result()
        found = [float(value) for output, (_, logprobs) in zip(result.loss_fn_outputs, group.rows)
                 for value, old in zip(output["logprobs"].to_numpy(), logprobs[1:]) if old is not None]  # fmt: skip
        return found, result.metrics["espalier/flat_tokens:sum"] / result.metrics["espalier/encoded_tokens:sum"]


class Peft:
    """A side without a server."""

    def __init__(self, folder, adapter, arguments):
        import peft
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(arguments.threads)
        self.torch, self.tokens = torch, arguments.new_tokens
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        self.model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)

    def generate(self, rows, samples):
        ids = self.torch.tensor(rows)
        with self.torch.no_grad():
            return self.model.generate(
                input_ids=ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=self.tokens, min_new_tokens=self.tokens,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=samples, pad_token_id=0).tolist()  # fmt: skip

    def sample(self, case, number):
        """As Server.sample, but that rows of a turn are one batch."""
        prompt, later = given(case, number)
        rows = self.generate([prompt], case.group)
        for turn in later:
            rows = self.generate([tokens + more for tokens, more in zip(rows, turn)], 1)
        return rows

    def train(self, group):
        """As Server.train. Rows of a group have equal lengths here, so they need no padding."""
        torch = self.torch
        ids = torch.tensor([tokens for tokens, _ in group.rows])
        sampled = torch.tensor([[value is not None for value in logprobs[1:]] for _, logprobs in group.rows])
        old = torch.tensor([[value or 0.0 for value in logprobs[1:]] for _, logprobs in group.rows])
        logits = self.model(ids[:, :-1]).logits
        found = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(sampled * (found - old).exp() * torch.tensor(group.advantages)[:, None]).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found[sampled].tolist()


def timed(work, *arguments):
    began = time.perf_counter()
    found = work(*arguments)
    return time.perf_counter() - began, found


def check(case, sides):
    """Runs each side once, which warms it, and compares log-probabilities of all sides. Returns how often a token occurs in the data
    for once that it is encoded."""
    trees, packing, peft = sides
    group = trees.sample(case, -1)
    peft.sample(case, -1)
    ours, ratio = trees.train(group)
    for name, theirs in (("packing", packing.train(group)[0]), ("PEFT", peft.train(group))):
        error = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if error > 2e-2:
            raise common.Failure(f"{case.name}: expected the log-probabilities of {name}, they differ by {error:.2g}")
    return ratio


def measure(case, sides, rounds):
    """A Row."""
    trees, packing, peft = sides
    ratio = check(case, sides)
    found = []
    for number in range(rounds):
        sampling, group = timed(trees.sample, case, number)
        training, _ = timed(trees.train, group)
        packed, _ = timed(packing.train, group)
        peft_sampling, _ = timed(peft.sample, case, number)
        peft_training, _ = timed(peft.train, group)
        found.append((Times(sampling, training), packed, Times(peft_sampling, peft_training)))
        say(f"{case.name}, round {number + 1}: trees {sampling:.2f} + {training:.2f}, packing {packed:.2f}, "
            f"PEFT {peft_sampling:.2f} + {peft_training:.2f} s")  # fmt: skip
    return case, ratio, found


def measure_conversations(case, sides, rounds):
    """A Row, after a warm-up."""
    kept, anew = sides
    found = []
    for number in range(-1, rounds):
        seconds, (tokens, encoded) = timed(kept.converse, case, number)
        other_seconds, (other_tokens, other_encoded) = timed(anew.converse, case, number)
        if [len(each) for each in tokens] != [len(each) for each in other_tokens]:
            raise common.Failure(f"{case.name}: expected answers of equal lengths")
        if number >= 0:
            found.append((seconds, encoded, other_seconds, other_encoded))
            say(f"{case.name}, round {number + 1}: kept {seconds:.2f} s, anew {other_seconds:.2f} s")
    return case, None, found


def median(take):
    return lambda row: f"{statistics.median(take(*each) for each in row[2]):.2f}"


COLUMNS = {
    "step": lambda row: row[0].name,
    "tokens / encoded": lambda row: f"{row[1]:.1f}",
    "training: trees": median(lambda trees, packed, peft: trees.training),
    "packing": median(lambda trees, packed, peft: packed),
    "PEFT": median(lambda trees, packed, peft: peft.training),
    "packing / trees": median(lambda trees, packed, peft: packed / trees.training),
    "PEFT / trees": median(lambda trees, packed, peft: peft.training / trees.training),
    "sampling: server": median(lambda trees, packed, peft: trees.sampling),
    "sampling: PEFT": median(lambda trees, packed, peft: peft.sampling),
    "PEFT / server": median(lambda trees, packed, peft: peft.sampling / trees.sampling),
    "whole step, PEFT / trees": median(lambda trees, packed, peft: sum(peft) / sum(trees)),
}


CONVERSATIONS = {
    "conversations": lambda row: row[0].name,
    "prompt tokens encoded: kept": median(lambda kept, encoded, anew, all_encoded: encoded),
    "anew": median(lambda kept, encoded, anew, all_encoded: all_encoded),
    "anew / kept, tokens": median(lambda kept, encoded, anew, all_encoded: all_encoded / encoded),
    "seconds: kept": median(lambda kept, encoded, anew, all_encoded: kept),
    "anew, seconds": median(lambda kept, encoded, anew, all_encoded: anew),
    "anew / kept": median(lambda kept, encoded, anew, all_encoded: anew / kept),
}


def parse_arguments(given_arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--groups", type=common.list_of(int), default=[8, 16], metavar="N,N", help="samples of a prompt (default: 8,16)")
    add("--prompts", type=common.list_of(int), default=[500, 2000], metavar="N,N", help="tokens of a prompt (default: 500,2000)")
    add("--turns", type=int, default=4, metavar="N", help="of conversations (default: %(default)s)")
    add("--new-tokens", type=int, default=32, metavar="N", help="of an answer (default: %(default)s)")
    add("--hidden-size", type=int, default=192, metavar="N", help="of the model (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="of the model (default: %(default)s)")
    add("--rank", type=int, default=16, metavar="N", help="of the adapter (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    add("--threads", type=int, default=2, metavar="N", help="CPU threads of each side (default: %(default)s)")
    add("--conversations", action="store_true", help="sample conversations, with and without a cache of prefixes")
    add("--quick", action="store_true", help="a tiny model and one round")
    add("-o", "--out", type=Path, metavar="FILE", help="write the table here, too")
    found = parser.parse_args(given_arguments)
    if found.quick:
        found.groups, found.prompts, found.new_tokens, found.hidden_size, found.layers, found.rounds = [4], [60], 8, 32, 1, 1
    return found


def make_model(folder, arguments):
    size = arguments.hidden_size
    config = {"model_type": "qwen3", "hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": arguments.layers,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size // 4, "vocab_size": 2048, "rope_theta": 1e4,
              "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    common.espalier("init", "--config", folder / "config.json", "--out", folder / "model")
    return folder / "model"


def main(given_arguments=None):
    arguments = parse_arguments(given_arguments)
    cases = [Case(group, prompt, 1) for prompt in arguments.prompts for group in arguments.groups]
    cases.append(Case(arguments.groups[0], arguments.prompts[0], arguments.turns))
    if arguments.conversations:
        cases = [Case(group, prompt, arguments.turns) for prompt in arguments.prompts for group in arguments.groups]
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-server-") as scratch, ExitStack() as stack:
            folder = make_model(Path(scratch), arguments)
            if arguments.conversations:
                sides = [Server(stack, folder, Path(scratch) / size, arguments, "--prefix-cache", size) for size in ("4GiB", "0")]
                rows = [measure_conversations(case, sides, arguments.rounds) for case in cases]
            else:
                trees, packing = (Server(stack, folder, Path(scratch) / strategy, arguments, "--strategy", strategy)
                                  for strategy in ("auto", "sequence-packing"))  # fmt: skip
                sides = trees, packing, Peft(folder, trees.adapter, arguments)
                rows = [measure(case, sides, arguments.rounds) for case in cases]
    except common.Failure as failure:
        say(failure)
        return 1
    common.publish(
        f"{arguments.threads} threads. A Qwen3 of {arguments.layers} layers, hidden size {arguments.hidden_size}, float32, LoRA of "
        f"rank {arguments.rank} on all maps; {arguments.new_tokens} tokens of an answer; seconds, medians of {arguments.rounds} rounds "
        "in turns", CONVERSATIONS if arguments.conversations else COLUMNS, rows, arguments.out)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
