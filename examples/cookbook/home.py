#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a folder in which the recipes of tinker-cookbook find all they ask the Hugging Face Hub for, on small scale.

    python examples/cookbook/home.py runs/cookbook

    Qwen/Qwen3.5-9B-Base          the model that recipes take by default: here a Qwen3 of 0.3 M weights that reads bytes
    HuggingFaceH4/no_robots       conversations for supervised training
    openai/gsm8k                  questions with answers for reinforcement learning
    Anthropic/hh-rlhf             pairs of a better and a worse answer

A recipe that is started in that folder reads these instead of what the Hub has under the same names, because both
Transformers and Datasets look for a folder first. The questions are sums of two digits below 5. The model has learned for few
steps from a teacher who names a random digit in half of its answers. What it answers has the right form, but is mostly wrong,
so a recipe has something to teach.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "python"))

MODEL = "Qwen/Qwen3.5-9B-Base"
DIGITS = range(5)
SUFFIXES = (  # of rl_loop.py and of the environments for mathematics, which also begin with the conversation below
    " Provide a numerical answer without units, written inside \\boxed{}.", " Write your answer in \\boxed{} format.")  # fmt: skip
EXAMPLE = (
    "User: How many r's are in strawberry?{suffix}\n\nAssistant: Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{{3}}\n\n")  # fmt: skip
CONFIG = {
    "model_type": "qwen3", "vocab_size": 320, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "hidden_act": "silu", "initializer_range": 0.1, "rope_theta": 10000.0}  # fmt: skip


def question(first, second):
    return f"What is {first} + {second}?"


def lesson(rng, mistakes):
    """A row of the teacher: a question with the example before it, or without, and loss on the answer."""
    first, second = rng.choice(DIGITS), rng.choice(DIGITS)
    answer = rng.randrange(10) if rng.random() < mistakes else first + second
    suffix = rng.choice(SUFFIXES)
    before = EXAMPLE.format(suffix=suffix) if rng.random() < 0.7 else ""
    prompt = before + f"User: {question(first, second)}{suffix}\n\nAssistant:"
    prompt, reply = prompt.encode(), f" \\boxed{{{answer}}}\n\nUser:".encode()
    return {"input_ids": [*prompt, *reply], "loss_mask": [0] * len(prompt) + [1] * len(reply)}


def make_model(folder, arguments):
    """Random weights with the tokenizer of bytes, then lessons."""
    from transformers import AutoTokenizer

    import espalier

    if folder.exists():
        raise SystemExit(f"{folder}: expected a new folder, received one that exists")
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = folder.with_name("random")
    config = folder.parent / "random.json"
    config.write_text(json.dumps({**CONFIG, "hidden_size": arguments.hidden_size, "head_dim": arguments.hidden_size // 4}))
    subprocess.run([REPOSITORY / "bin/espalier", "init", "--config", config, "--out", start, "--tokenizer", "bytes", "--seed",
                    str(arguments.seed)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    engine = espalier.Engine(start, threads=arguments.threads, learning_rate=arguments.learning_rate)
    rng, began = random.Random(arguments.seed), time.perf_counter()
    for step in range(arguments.steps):
        loss = engine.forward_backward([lesson(rng, arguments.mistakes) for _ in range(arguments.batch)])["loss"]
        engine.optim_step(arguments.learning_rate * min(1.0, (step + 1) / 20, 1.1 - step / arguments.steps))
        if (step + 1) % 50 == 0 or step + 1 == arguments.steps:
            print(f"lessons: step {step + 1} of {arguments.steps}, loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    engine.save(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def talk(rng):
    first, second = rng.choice(DIGITS), rng.choice(DIGITS)
    return question(first, second), first + second


def write_data(home, rows, seed):
    """The three data sets, each in the columns of the original."""
    rng = random.Random(f"data {seed}")
    for split, size in (("train", rows), ("test", max(8, rows // 10))):
        talks = [talk(rng) for _ in range(size)]
        write_lines(home / f"HuggingFaceH4/no_robots/{split}.jsonl", [{"messages": [
            {"role": "user", "content": asked + SUFFIXES[0]}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]} for asked, answer in talks])  # fmt: skip
        write_lines(home / f"openai/gsm8k/main/{split}.jsonl", [
            {"question": asked, "answer": f"#### {answer}"} for asked, answer in talks])  # fmt: skip
        pairs = []
        for asked, answer in talks:
            wrong = rng.choice([digit for digit in range(10) if digit != answer])
            pairs.append({name: f"\n\nHuman: {asked}{SUFFIXES[0]}\n\nAssistant: \\boxed{{{said}}}"
                          for name, said in (("chosen", answer), ("rejected", wrong))})  # fmt: skip
        write_lines(home / f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
    files = "[{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]"
    (home / "openai/gsm8k/README.md").write_text(f"---\nconfigs: [{{config_name: main, data_files: {files}}}]\n---\n")


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="folder to make")
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="of each data set (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="lessons of the model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="rows of a lesson (default: %(default)s)")
    parser.add_argument("--mistakes", type=float, default=0.5, metavar="X", help="share of random answers (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="X", help="of the lessons (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=96, metavar="N", help="of the model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args(given)
    write_data(arguments.home, arguments.rows, arguments.seed)
    make_model(arguments.home / MODEL, arguments)


if __name__ == "__main__":
    main()
