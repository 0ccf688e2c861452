#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of large shapes on a GPU, trees against sequence packing, by `espalier bench`: random weights, random trees.

Two sets of data, each with the bound FLOPs(flat) / FLOPs(tree) beside the measured speed-up:

    ratios    rollouts at cached-token ratios (flat / tree tokens) 1 to 128: a prompt, b turns, b answers to each of them
    prompts   one long prompt with nine short responses, the grid of "speeding up llm rl training by 7.5x on long-prompt,
              short-response tasks" (2026), which reports 7.5x, 7.3x, 5.4x and 1.7x for whole RL steps of Qwen3.5-4B; the
              goal at 16,384 / 64 is 8.2x

    python3 bench/gpu_step.py                                      both sets, Qwen3-0.6B and 4B: about five minutes
    python3 bench/gpu_step.py --sets prompts --models 4b --seconds 200
    python3 bench/gpu_step.py --sets ratios --models tiny --tree-tokens 512 --device cpu --dtype float32     to try the script

Models are made by `espalier init` with the published shapes; --scratch keeps them for the next run. A step is forward and
backward over the tree, without optimiser, in one micro-batch; sequence packing gets the same token budget. Trees with more
tokens than --token-budget are cut by strategy partition. What would not fit in time or memory is not tried, and named.
Figures are medians over --repeats rounds in turns. MFU: 6 FLOPs per weight and tree token (behind the last layer's attention:
per row with loss, nothing else is computed there), 12 head_dim per visible pair and head, 6 per weight of the LM head and row
with loss, over the step's time and 989 TFLOP/s (dense bfloat16 of an H100 or H200); nothing that is computed twice counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_trees as trees
from commit import commit
from gpu_measure import (REPOSITORY, Budget, Failure, Stopped, add_common, finish, list_of, markdown, run_main,
                         say, stop_on_sigterm)  # fmt: skip

PEAK_TFLOPS = 989.0


def qwen3(hidden, intermediate, layers, heads, vocabulary=151936):
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": min(8, heads), "head_dim": 128, "vocab_size": vocabulary, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02,
    }  # fmt: skip


# Shapes as in the config.json of Qwen/Qwen3-0.6B and Qwen/Qwen3-4B; tiny is for trying the script.
MODELS = {"0.6b": qwen3(1024, 3072, 28, 16), "4b": qwen3(2560, 9728, 36, 32), "tiny": qwen3(64, 128, 2, 2, 512)}

RESPONSES = 9
GRID = [(16384, 64), (16384, 1024), (16384, 128), (8192, 4096)]
PUBLISHED = {(16384, 64): 7.5, (16384, 128): 7.3, (16384, 1024): 5.4, (8192, 4096): 1.7}
GOALS = {(16384, 64): 8.2}
# What is not tried: sequence packing would take too long, or activations too much memory (4 MB a token for 4b; with
# --checkpoint-activations layer 0.2 MB, and 0.3 MB of the layer that is computed again).
MOST_FLAT_TOKENS = {"0.6b": 1_100_000, "4b": 600_000, "tiny": 1_000_000}
MOST_TREE_TOKENS = {"none": {"0.6b": 60_000, "4b": 20_000, "tiny": 60_000},
                    "layer": {"0.6b": 200_000, "4b": 100_000, "tiny": 200_000}}  # fmt: skip
FIRST = 3  # ratios that come before the long prompts


class Task(NamedTuple):
    model: str
    set_name: str
    name: str
    tree: trees.Tree
    shape: tuple = ()  # prompt and response tokens
    checkpoint: str = "none"

    @property
    def title(self):
        return f"{self.model} {self.name}"

    def refusal(self):
        """Why it is not tried; empty where it is."""
        if trees.flat_tokens(self.tree) > MOST_FLAT_TOKENS[self.model]:
            return f"{trees.flat_tokens(self.tree):,} flat tokens would take sequence packing too long"
        if self.tree.tokens > MOST_TREE_TOKENS[self.checkpoint][self.model]:
            return f"{self.tree.tokens:,} tree tokens may not fit the memory"
        return ""


def tasks(args):
    """Most important first: the first ratios, the long prompts, the other ratios, or prompts before ratios where --sets says
    so; model by model."""
    found = []
    for model in args.models:
        checkpoint = args.checkpoint_activations
        ratios = [Task(model, "ratios", f"ratio {ratio:g}", trees.rollouts(args.tree_tokens, ratio), (), checkpoint)
                  for ratio in args.ratios]  # fmt: skip
        prompts = [Task(model, "prompts", f"{prompt:,} / {response:,}", trees.star(prompt, RESPONSES, response),
                        (prompt, response), checkpoint) for prompt, response in args.grid]  # fmt: skip
        chosen = {"ratios": ratios, "prompts": prompts}
        ratios, prompts = (chosen[name] if name in args.sets else [] for name in ("ratios", "prompts"))
        first = FIRST if args.sets[0] == "ratios" else 0
        found += ratios[:first] + prompts + ratios[first:]
    return found


# ---- espalier ----------------------------------------------------------------------------------------------


def espalier(args, *arguments, timeout=None):
    command = [str(args.espalier), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failure(f"took longer than the {timeout:.0f} s that were left") from None
    except OSError as error:
        raise Failure(f"{args.espalier}: {error.strerror}; build target espalier, or name it by --espalier") from None
    if done.returncode != 0:
        message = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Failure(f"espalier {arguments[0]}: {message[-1]}")
    return done.stdout


def on_device(args):
    return [] if args.device == "cpu" else ["--device", args.device]


def model_folder(args, name, scratch, timeout=None):
    folder = scratch / name
    if not (folder / "model.safetensors").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        config = scratch / f"{name}.json"
        config.write_text(json.dumps(MODELS[name]))
        espalier(args, "init", "--config", config, "--out", folder, "--dtype", args.dtype, "--seed", 0,
                 timeout=timeout)  # fmt: skip
    return folder


def measure(args, task, scratch, timeout):
    end = time.monotonic() + timeout
    model = model_folder(args, task.model, scratch, timeout)
    data = scratch / f"{task.title.replace(' ', '_').replace('/', 'x')}.jsonl"
    trees.write_rows(task.tree, MODELS[task.model]["vocab_size"], 0, data)
    budget = min(task.tree.tokens, args.token_budget)  # one micro-batch where the tree fits
    longest = max(sum(task.tree.lengths[node] for node in trees.root_path(task.tree, leaf)) for leaf in trees.leaves(task.tree))
    out = espalier(args, "bench", "--model", model, "--data", data, "--dtype", args.dtype, *on_device(args), "--strategy",
                   "partition", "--token-budget", max(budget, longest), "--checkpoint-activations", task.checkpoint, "--repeats", args.repeats, "--warmup", 1, "--json",
                   timeout=max(1, end - time.monotonic()))  # fmt: skip
    data.unlink()
    result = json.loads(out)
    row = result["rows"][0]
    if row["tree_tokens"] != task.tree.tokens or row["flat_tokens"] != trees.flat_tokens(task.tree):
        raise Failure(f"{task.title}: espalier sees {row['tree_tokens']} tree and {row['flat_tokens']} flat tokens, expected "
                      f"{task.tree.tokens} and {trees.flat_tokens(task.tree)}")  # fmt: skip
    flops = trees.model_flops(MODELS[task.model], task.tree.tokens, trees.visible_pairs(task.tree),
                              trees.predicting_rows(task.tree))  # fmt: skip
    return {"model": task.model, "set": task.set_name, "name": task.name, "shape": task.shape, "nodes": len(task.tree.lengths),
            "hardware": result["hardware"], "model_flops": flops,
            "mfu": flops / row["tree_seconds"] / (PEAK_TFLOPS * 1e12), **row}  # fmt: skip


# ---- The report --------------------------------------------------------------------------------------------


def common_cells(record):
    return [f"{record['tree_tokens']:,}", f"{record['flat_tokens']:,}", f"{record['cached_token_ratio']:.2f}",
            f"{record['tree_seconds'] * 1e3:.1f}", f"{record['packing_seconds'] * 1e3:.1f}", f"{record['speedup']:.2f}",
            f"{record['speedup_low']:.2f}..{record['speedup_high']:.2f}", f"{record['bound']:.2f}",
            f"{record['share_of_bound']:.3f}", f"{record['tree_tokens'] / record['tree_seconds']:,.0f}",
            f"{record['flat_tokens'] / record['tree_seconds']:,.0f}", f"{record['mfu'] * 100:.1f} %"]  # fmt: skip


COMMON = ["tree tokens", "flat tokens", "flat / tree", "tree ms", "packing ms", "speed-up", "low..high", "bound",
          "share of bound", "tree tokens/s", "flat tokens/s", "MFU on tree tokens"]  # fmt: skip


def report(records):
    text = ""
    ratios = [record for record in records if record["set"] == "ratios"]
    prompts = [record for record in records if record["set"] == "prompts"]
    if ratios:
        ordered = sorted(ratios, key=lambda record: (record["model"], record["cached_token_ratio"]))
        text += "### Rollouts at cached-token ratios\n\n" + markdown(
            ["model ", "nodes", *COMMON], [[r["model"], str(r["nodes"]), *common_cells(r)] for r in ordered]) + "\n"  # fmt: skip
    if prompts:
        text += f"### Long prompts, {RESPONSES} responses\n\n" + markdown(
            ["model ", "prompt / response ", *COMMON, "published", "goal"],
            [[r["model"], r["name"], *common_cells(r), *(f"{known[tuple(r['shape'])]:.1f}" if tuple(r["shape"]) in known else "-"
                                                         for known in (PUBLISHED, GOALS))] for r in prompts]) + "\n"  # fmt: skip
    return text


def pair(text):
    """argparse type: PROMPT/RESPONSE"""
    prompt, slash, response = text.partition("/")
    if not slash or int(prompt) < 1 or int(response) < 1:
        raise ValueError(text)
    return int(prompt), int(response)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=300)
    add("--sets", type=list_of(str), default="ratios,prompts", metavar="LIST", help="of ratios, prompts (default: %(default)s)")
    add("--models", type=list_of(str), default="0.6b,4b", metavar="LIST",
        help=f"of {', '.join(MODELS)}, most important first (default: %(default)s)")  # fmt: skip
    add("--ratios", type=list_of(float), default="8,1,32,2,64,128,4,16", metavar="LIST",
        help="cached-token ratios, most important first (default: %(default)s)")  # fmt: skip
    add("--tree-tokens", type=int, default=8192, metavar="N", help="of the ratios set (default: %(default)s)")
    add("--grid", type=list_of(pair), default=",".join(f"{p}/{r}" for p, r in GRID), metavar="LIST",
        help="prompt/response tokens of the prompts set (default: %(default)s)")  # fmt: skip
    add("--token-budget", type=int, default=20480, metavar="N",
        help="most tokens of a micro-batch, on both sides; smaller trees make it smaller (default: %(default)s)")  # fmt: skip
    add("--checkpoint-activations", default="none", choices=["none", "layer"],
        help="layer: on both sides activations inside layers are computed again, and need less memory (default: none)")  # fmt: skip
    add("--repeats", type=int, default=3, metavar="N", help="measured rounds (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    add("--espalier", type=Path, default=REPOSITORY / "bin/espalier", metavar="FILE", help="(default: bin/espalier)")
    add("--prepare", action="store_true", help="only make the models, in --scratch")
    add("--scratch", type=Path, metavar="FOLDER", help="for models (9 GB) and data; kept (default: a temporary one)")
    args = parser.parse_args(argv)
    for name in args.models:
        if name not in MODELS:
            parser.error(f"--models: expected names of {', '.join(MODELS)}, received {name}")
    for name in args.sets:
        if name not in ("ratios", "prompts"):
            parser.error(f"--sets: expected names of ratios, prompts, received {name}")
    return args


def main(argv=None):
    args = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        if args.prepare:
            for name in args.models:
                model_folder(args, name, scratch)
            return 0
        budget, records, failures = Budget(args.seconds), [], []
        wanted = tasks(args)
        refused = [f"{task.title}: {task.refusal()}" for task in wanted if task.refusal()]
        wanted = [task for task in wanted if not task.refusal()]
        stop_on_sigterm()
        try:
            for task in budget.each(wanted, 10, lambda task: task.title):
                try:
                    records.append(measure(args, task, scratch, budget.left))
                    record = records[-1]
                    say(f"{task.title}: speed-up {record['speedup']:.2f}, bound {record['bound']:.2f}, MFU {record['mfu']:.1%}")
                except (Failure, ValueError, LookupError) as failure:
                    failures.append(f"{task.title}: {failure}")
                    say(failures[-1])
                write(args, records, failures, refused, budget, show=False)
        except Stopped:
            budget.left_out.append("what came after")
    write(args, records, failures, refused, budget, show=True)
    return 1 if failures or not records else 0


def write(args, records, failures, refused, budget, show):
    machine = records[0]["hardware"] if records else "nothing was measured"
    kind = os.environ.get("ESPALIER_ATTENTION", "")
    again = ", activations of layers computed again" if args.checkpoint_activations == "layer" else ""
    text = f"{machine}, commit {commit()}{f', {kind} attention' if kind else ''}{again}\n\n{report(records)}"
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    text += "".join(f"\nNot measured: {what}\n" for what in refused) + budget.note()
    finish(args, text, {"hardware": machine, "commit": commit(), "attention": kind, "records": records, "failures": failures,
                        "not_measured": refused, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
