#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rollouts as verifiers and prime-rl write them (traces.jsonl) to a trained checkpoint that Transformers runs.

    espalier import    the traces become rows, with the token ids that were sampled
    espalier inspect   how much the rows share, and what that gains
    espalier train     GRPO on trees, and once more without trees, to compare
    Transformers       loads the checkpoint and answers a prompt

    python examples/traces_to_checkpoint.py                                  a minute or two on a laptop
    python examples/traces_to_checkpoint.py --model DIR --traces FILE        your model and rollouts

Without --traces a small random model first samples some: several answers to each of a few questions.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
CONVERSATIONS = HERE / "tau_airline_part.jsonl"
AGREEMENT = 1e-4  # relative; both ways of training round in float32, in another order


def espalier(*arguments, shown=True):
    """Runs the command, that of this clone where it is built; returns its output."""
    built = HERE.parent / "bin/espalier"
    arguments = [str(argument) for argument in arguments]
    if shown:
        print("\n$ espalier", shlex.join(arguments), flush=True)
    command = [str(built) if built.exists() else "espalier", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"espalier {arguments[0]} failed with exit status {done.returncode}")
    if shown:
        print(done.stdout, end="", flush=True)
    return done.stdout


def reward(text):
    """The share of letters that are vowels, which stands for a real one."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def message_nodes(tokenizer, instructions, question):
    """The nodes of a trace before the answer: one for each message, whose tokens the model did not sample."""
    ends = "\n\nassistant:"
    for number, text in enumerate((f"system: {instructions}\n\n", f"user: {question}{ends}")):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield {"parent": None if number == 0 else number - 1, "sampled": False, "token_ids": ids,
               "mask": [False] * len(ids), "message": {"content": text}}  # fmt: skip


@torch.no_grad()
def sample(arguments, folder, path):
    """Writes traces.jsonl: --answers answers of the model in `folder` to each of --questions questions."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with open(CONVERSATIONS, encoding="utf-8") as lines, open(path, "w", encoding="utf-8") as traces:
        for number, line in enumerate(itertools.islice(lines, arguments.questions)):
            system, user = json.loads(line)["messages"][:2]
            nodes = list(message_nodes(tokenizer, system["content"][:arguments.instructions], user["content"]))
            prompt = torch.tensor([[token for node in nodes for token in node["token_ids"]]])
            answers = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, pad_token_id=0,
                num_return_sequences=arguments.answers, max_new_tokens=arguments.answer_tokens,
                min_new_tokens=arguments.answer_tokens, output_logits=True, return_dict_in_generate=True)  # fmt: skip
            chosen = answers.sequences[:, prompt.shape[1]:]
            logprobs = torch.log_softmax(torch.stack(answers.logits, 1).float(), -1).gather(2, chosen[..., None])
            for answer, ids in enumerate(chosen.tolist()):
                text = tokenizer.decode(ids)
                sampled = {"parent": 1, "sampled": True, "token_ids": ids, "mask": [True] * len(ids),
                           "logprobs": [round(value, 6) for value in logprobs[answer, :, 0].tolist()],
                           "message": {"role": "assistant", "content": text}}  # fmt: skip
                trace = {"version": 1, "id": f"q{number}-{answer}", "ok": True, "nodes": [*nodes, sampled],
                         "agent": {"config": {}, "name": "agent", "trainable": True},
                         "rewards": {"vowels": {"score": reward(text)}}}  # fmt: skip
                episode = {"id": trace["id"], "group": {"id": f"q{number}"}, "ok": True, "traces": [trace],
                           "task": {"type": "question", "data": {}, "hash": f"q{number}"}}  # fmt: skip
                traces.write(json.dumps(episode) + "\n")


def train(arguments, model, rows, out, strategy):
    """Trains and returns the metrics of each step."""
    espalier("train", "--model", model, "--data", rows, "--out", out, "--objective", "grpo", "--strategy", strategy,
             "--steps", arguments.steps, "--batch-size", 2 * arguments.answers, "--learning-rate", 1e-3,
             "--no-calibration")  # fmt: skip
    with open(out / "metrics.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def compare(trees, flat):
    """Prints two trainings side by side. Ends the program where their first steps do not agree."""
    print(f"\n{'':26}{'without trees':>14}{'trees':>12}")
    seconds = [statistics.median([step["seconds"] for step in steps][1:] or [steps[0]["seconds"]])
               for steps in (flat, trees)]  # fmt: skip
    print(f"{'seconds per step':26}{seconds[0]:14.3f}{seconds[1]:12.3f}{seconds[0] / seconds[1]:9.2f}x")
    encoded = [sum(step["encoded_tokens"] for step in steps) for steps in (flat, trees)]
    print(f"{'tokens encoded':26}{encoded[0]:14,}{encoded[1]:12,}{encoded[0] / encoded[1]:9.2f}x")
    for number, pair in enumerate(zip(flat, trees, strict=True)):
        for name in ("loss", "grad_norm"):
            print(f"{f'step {number + 1}: {name}':26}{pair[0][name]:14.6f}{pair[1][name]:12.6f}")
    for name in ("loss", "grad_norm"):
        ours, theirs = trees[0][name], flat[0][name]
        if not abs(ours - theirs) <= AGREEMENT * max(abs(theirs), 0.1):
            raise SystemExit(f"\nthe first step: expected equal {name}, received {ours} and {theirs} without trees")
    print("\nLosses and gradient norms of the first step agree.")


def answer(checkpoint):
    """What the trained model says, by Transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer("user: Hello!\n\nassistant:", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=16, pad_token_id=0)[0, prompt["input_ids"].shape[1]:]
    print(f"\nTransformers, from {checkpoint.name}: {tokenizer.decode(ids)!r}")


def parse_arguments(given):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face folder (default: a small random llama)")
    add("--traces", type=Path, metavar="FILE", help="rollouts of this model (default: some that it samples)")
    add("--out", type=Path, metavar="DIR", help="where everything is written; it is kept (default: a scratch folder)")
    add("--steps", type=int, default=4, metavar="N", help="optimiser steps (default: %(default)s)")
    add("--questions", type=int, default=8, metavar="N", help="to sample for; up to 8 (default: %(default)s)")
    add("--answers", type=int, default=8, metavar="N", help="to each question, a group (default: %(default)s)")
    add("--answer-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add("--instructions", type=int, default=1500, metavar="N",
        help="characters of instructions before each question (default: %(default)s)")  # fmt: skip
    return parser.parse_args(given)


def run(arguments, folder):
    model, traces = arguments.model or folder / "model", arguments.traces or folder / "traces.jsonl"
    rows, run_folder = folder / "rows.jsonl", folder / "run"
    if arguments.model is None:
        espalier("init", "--config", HERE / "tiny_llama.json", "--out", model, "--tokenizer", "bytes")
    if arguments.traces is None:
        sample(arguments, model, traces)
    espalier("import", traces, "-o", rows)
    espalier("inspect", "--model", model, "--data", rows)
    trees = train(arguments, model, rows, run_folder, "auto")
    flat = train(arguments, model, rows, folder / "run_without_trees", "sequence-packing")
    compare(trees, flat)
    answer(run_folder / "checkpoints" / f"step_{arguments.steps}")


def main(given=None):
    arguments = parse_arguments(given)
    if arguments.out:
        os.makedirs(arguments.out, exist_ok=True)
        run(arguments, arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder))


if __name__ == "__main__":
    main()
