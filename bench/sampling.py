#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sampling by `espalier sample` against `generate` of Hugging Face Transformers with a static cache: same machine, weights,
prompt and dtype.

One group: B completions of one prompt of P random tokens, N tokens each, sampled at temperature 1. Espalier encodes the prompt
once; Transformers is given it B times, as `num_return_sequences` does. Seconds per token are those of decoding alone: of
Espalier as it reports them, of Transformers a call for N tokens less a call for one. Both sides run in turns, round by round;
figures are medians, and the speed-up is the median of each round's ratio. First both sides decode greedily in float32, and the
command fails where they part before --least-equal of the tokens.

With `make build` done, and the Python that has torch (.venv/bin/python):

    python bench/sampling.py                                 SmolLM2-135M's shape with random weights
    python bench/sampling.py --quick                         a minute: does it work here?
    python bench/sampling.py --model DIR --batch-sizes 1,16 --dtypes bfloat16 -o table.md
"""

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "bench")]

import compare_transformers as common  # noqa: E402
from commit import commit  # noqa: E402


def say(text):
    print(f"sampling: {text}", file=sys.stderr, flush=True)


class Task:
    """A prompt, and how it is continued."""

    def __init__(self, arguments, model, scratch):
        config = json.loads((model / "config.json").read_text())
        vocabulary = config.get("text_config", config)["vocab_size"]
        rng = random.Random(arguments.seed)
        self.prompt = [rng.randrange(vocabulary) for _ in range(arguments.prompt_tokens)]
        self.model, self.tokens, self.threads, self.scratch = model, arguments.new_tokens, arguments.threads, scratch
        (scratch / "prompt.jsonl").write_text(json.dumps({"input_ids": self.prompt}) + "\n")


# ---- Espalier ----------------------------------------------------------------------------------------------


def by_espalier(task, dtype, batch_size, temperature=1, check=0):
    """What the command reports, with the rows."""
    out = task.scratch / "out.jsonl"
    report = json.loads(common.espalier(
        "sample", "--model", task.model, "--data", task.scratch / "prompt.jsonl", "-o", out, "--samples", batch_size,
        "--batch-size", batch_size, "--max-new-tokens", task.tokens, "--ignore-stop-ids", "--dtype", dtype, "--threads",
        task.threads, "--temperature", temperature, "--check", check, "--json"))  # fmt: skip
    return report, [json.loads(line) for line in out.read_text().splitlines()]


def our_seconds_per_token(task, dtype, batch_size):
    report, _ = by_espalier(task, dtype, batch_size)
    # The first token of each is predicted by the prompt.
    return report["decode_seconds"] / (report["sampled_tokens"] - batch_size)


# ---- Transformers ------------------------------------------------------------------------------------------


class Transformers:
    def __init__(self, task, dtype):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(task.threads)
        self.torch, self.task = torch, task
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, batch_size, tokens, sample=True):
        prompt = self.torch.tensor([self.task.prompt]).repeat(batch_size, 1)
        choice = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) if sample else dict(do_sample=False)
        return self.model.generate(prompt, attention_mask=self.torch.ones_like(prompt), max_new_tokens=tokens,
                                   min_new_tokens=tokens, cache_implementation="static", pad_token_id=0, **choice)  # fmt: skip

    def seconds(self, batch_size, tokens):
        begin = time.perf_counter()
        self.generate(batch_size, tokens)
        return time.perf_counter() - begin

    def seconds_per_token(self, batch_size):
        decoding = self.seconds(batch_size, self.task.tokens) - self.seconds(batch_size, 1)
        return decoding / (batch_size * (self.task.tokens - 1))


# ---- Both --------------------------------------------------------------------------------------------------


def check_agreement(task, least_equal):
    """Both decode greedily in float32. Where two tokens are equally likely to the last bits they may part."""
    report, rows = by_espalier(task, "float32", 1, temperature=0, check=1)
    ours = rows[0]["input_ids"][len(task.prompt):]
    theirs = Transformers(task, "float32").generate(1, task.tokens, sample=False)[0].tolist()[len(task.prompt):]
    equal = next((n for n in range(len(ours)) if ours[n] != theirs[n]), len(ours))
    say(f"greedy: the first {equal} of {len(ours)} tokens agree; log-probs of sampler and training differ by "
        f"{report['mismatch']['largest']:.2g} at most")  # fmt: skip
    if equal < least_equal * len(ours):
        raise common.Failure(f"greedy completions: expected {least_equal:.0%} of {len(ours)} tokens to agree, received {equal}")


def measure(arguments, task):
    rows = []
    for dtype in arguments.dtypes:
        theirs = Transformers(task, dtype)
        for batch_size in arguments.batch_sizes:
            theirs.seconds(batch_size, 2)  # warm
            rounds = []
            for index in range(arguments.rounds):
                rounds.append((theirs.seconds_per_token(batch_size), our_seconds_per_token(task, dtype, batch_size)))
                say(f"{dtype}, {batch_size} together, round {index + 1}: {1e3 * rounds[-1][0]:.2f} ms against "
                    f"{1e3 * rounds[-1][1]:.2f} ms per token")  # fmt: skip
            rows.append((dtype, batch_size, rounds))
    return rows


COLUMNS = {
    "dtype": lambda row: row[0],
    "completions together": lambda row: str(row[1]),
    "Transformers, tokens/s": lambda row: f"{1 / statistics.median(theirs for theirs, _ in row[2]):,.1f}",
    "Espalier, tokens/s": lambda row: f"{1 / statistics.median(ours for _, ours in row[2]):,.1f}",
    "speed-up": lambda row: f"{statistics.median(theirs / ours for theirs, ours in row[2]):.2f}",
}


def report(arguments, rows, command):
    import torch
    import transformers

    return f"""\
{common.cpu_name()}, {arguments.threads} threads. Commit {commit()}, torch {torch.__version__},
Transformers {transformers.__version__}.

    {command}

A prompt of {arguments.prompt_tokens} tokens, {arguments.new_tokens} new tokens per completion, temperature 1, decoding alone;
{arguments.rounds} rounds in turns, medians. Transformers: `generate` with a static cache, eager, sdpa.

{common.markdown(COLUMNS, rows)}"""


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="sampling.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default="smollm2_135m", metavar="NAME",
                        help=f"a model folder, or a shape with random weights: {', '.join(common.SHAPES)} (default: %(default)s)")
    parser.add_argument("--dtypes", type=common.list_of(common.choice_of("float32", "bfloat16")),
                        default=["float32", "bfloat16"], metavar="LIST", help="(default: float32,bfloat16)")  # fmt: skip
    parser.add_argument("--batch-sizes", type=common.list_of(common.at_least(1)), default=[1, 8, 64], metavar="LIST",
                        help="completions that are decoded together (default: 1,8,64)")
    parser.add_argument("--prompt-tokens", type=common.at_least(1), default=256, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=common.at_least(2), default=48, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=common.at_least(1), default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--threads", type=common.at_least(1), default=os.cpu_count(), metavar="N", help="(default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt (default: %(default)s)")
    parser.add_argument("--least-equal", type=float, default=0.2, metavar="X",
                        help="of the greedy tokens, from the first on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few tokens, two batch sizes, one round")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.new_tokens, arguments.prompt_tokens, arguments.batch_sizes = 1, 8, 32, [1, 8]
    return arguments


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-sampling-") as scratch:
            task = Task(arguments, common.model_folder(arguments.model, Path(scratch)), Path(scratch))
            check_agreement(task, arguments.least_equal)
            text = report(arguments, measure(arguments, task), shlex.join(["python", "bench/sampling.py", *argv]))
    except common.Failure as failure:
        say(failure)
        return 1
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
