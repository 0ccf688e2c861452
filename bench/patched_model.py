#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step of a Transformers model patched by espalier.hf.patch, against the same model unpatched.

Both sides are one model in one process, patched and unpatched in turns, round by round; a step is forward and backward
over all trajectories, without optimiser. Unpatched, trajectories run in batches of the fastest size found, sorted by
length and without logits that no loss needs (bench/transformers_step.py). Patched, all of them are one padded batch.
Figures are medians, speed-ups medians of each round's ratio. Each side has run before: unpatched to find its batch size, the others
one step. Losses must agree, or the command fails.

Data sets: random trees at cached-token ratios (1: unrelated chains), loss on the last part of every trajectory, and files. A patched
model is given labels, and shares its layers, head and loss. So the bound is FLOPs(flat) / FLOPs(tree). The goal is a speed-up of 0.9 of
it, and of 0.97 where nothing is shared. With `--head rows` the head and the loss are the caller's and run for every row, with a separate
bound.

In the same rounds espalier.Step runs the same rows as one micro-batch: a step with labels may take at most 1.15 times as long. Then
each of the two runs once more in a separate process, where its memory may grow at most 1.2 times as much in the step.

With `--layers compiled` the model's layers run through torch.compile (dynamic sizes) on both sides. With `--trl` a third side runs
in the same rounds: the tree packing of TRL's AsyncGRPO on the same model (bench/trl_tree_packing.py).

    python bench/patched_model.py -o table.md
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from compare_transformers import (
    DataSet,
    Failure,
    check_agreement,
    espalier,
    model_folder,
    publish,
    random_data_set,
    say,
    trajectories_of,
)
import espalier as package
from espalier import hf
from transformers_step import TransformersSide, make_batches, reuse_freed_memory
from trl_tree_packing import TreePackingSide

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
BATCH_SIZES = [1, 2, 4, 8]


class PatchedSide:
    """The model of a TransformersSide, patched for as long as a step takes. head: "shared" gives it labels, "rows" takes its
    hidden states for a head of every row."""

    def __init__(self, side, trajectories, head="shared"):
        self.side, self.head = side, head
        (batch,) = make_batches(trajectories, len(trajectories))
        lengths = sorted((_length(each) for each in trajectories if any(each.weights[1:])), reverse=True)
        places = torch.arange(batch.input_ids.shape[1])
        self.batch = batch
        self.mask = (places < torch.tensor(lengths)[:, None]).long()
        self.labelled = labelled_batch(trajectories)

    def step(self):
        model = self.side.model
        hf.patch(model)
        model.zero_grad(set_to_none=True)
        begin = time.monotonic()
        loss = self._loss(model) if self.head == "shared" else self._loss_of_rows(model)
        loss.backward()
        seconds = time.monotonic() - begin
        hf.unpatch(model)
        return seconds, loss.item()

    def _loss(self, model):
        return model(**self.labelled, num_items_in_batch=(self.labelled["labels"][:, 1:] != -100).sum()).loss

    def _loss_of_rows(self, model):
        batch = self.batch
        hidden = model.base_model(input_ids=batch.input_ids, attention_mask=self.mask).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.rows)
        logits = model.get_output_embeddings()(hidden).float()
        losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        return (losses * batch.weights).sum()


class StepSide:
    """espalier.Step on the model of a TransformersSide, with the forest as one micro-batch."""

    def __init__(self, side, trajectories):
        self.side = side
        rows, self.loss_mask = cut_rows(trajectories)
        forest = package.build(rows)
        self.plan = package.plan(forest, token_budget=forest.tree_tokens, strategy="tree-packing")

    def step(self):
        model = self.side.model
        model.zero_grad(set_to_none=True)
        begin = time.monotonic()
        loss = mean_loss_of_step(model, self.plan, self.loss_mask)
        seconds = time.monotonic() - begin
        hf.unpatch(model)
        return seconds, loss.item()


def mean_loss_of_step(model, plan, loss_mask):
    """The mean loss of a step of espalier.Step, a tensor; adds its gradients."""
    step, total = package.Step(model, plan, loss_mask=loss_mask), 0.0
    for batch in step:
        loss = -step.logprobs(batch).sum() / step.num_terms
        step.backward(loss)
        total = total + loss.detach()
    return total


def grown_memory(which, folder, dtype, path):
    """By how many MiB a process grows at most in its first step of a side."""
    command = [sys.executable, __file__, "--grow", which, str(folder), dtype, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def grow(which, folder, dtype, path):
    """What such a process does."""

    def status(name):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    side, trajectories = TransformersSide(folder, dtype), trajectories_of(path)
    runner = PatchedSide(side, trajectories) if which == "patched" else StepSide(side, trajectories)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    runner.step()
    print(status("VmHWM") - before)


def cut_rows(trajectories):
    """(token ids, weights) of rows up to their last tokens with loss."""
    kept = [each for each in trajectories if any(each.weights[1:])]
    return [each.ids[: _length(each) + 1] for each in kept], [each.weights[: _length(each) + 1] for each in kept]


def labelled_batch(trajectories):
    """The same rows as a trainer gives them to a model."""
    rows, weights = cut_rows(trajectories)
    if {weight for each in weights for weight in each} - {0.0, 1.0}:
        raise Failure("expected weights of 0 and 1, which labels can say")
    shape = len(rows), max(map(len, rows))
    ids, mask, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    for number, (row, own) in enumerate(zip(rows, weights)):
        ids[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
        labels[number, : len(row)] = torch.where(torch.tensor(own) > 0, torch.tensor(row), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compile_layers(model):
    for layer in model.base_model.layers:
        layer.compile(dynamic=True)


def _length(trajectory):
    """Tokens up to the last that predicts one with loss, as make_batches cuts trajectories."""
    return max(t for t in range(1, len(trajectory.ids)) if trajectory.weights[t] > 0)


class Bounds:
    """What sharing can bring at most, in FLOPs: with the head for every row, and with a shared head."""

    def __init__(self, folder, data_set, trajectories):
        plan = json.loads(espalier("plan", "--model", folder, "--data", data_set.path, "--no-calibration", "--json"))
        self.flat_tokens, self.tree_tokens = plan["flat_tokens"], plan["tree_tokens"]
        config = json.loads((folder / "config.json").read_text())
        predictions = [t.ids[: i + 1] for t in trajectories for i in range(1, len(t.ids)) if t.weights[i] > 0]
        repeated = len(predictions) - len({tuple(each) for each in predictions})
        head = 6 * config["hidden_size"] * config["vocab_size"] * repeated  # forward and backward
        flat, tree = plan["flops"]["sequence_packing"], plan["flops"]["plan"]
        self.head_for_every_row = flat / (tree + head)
        self.head_shared = flat / tree


def measure(name, folder, side, setting, data_set, args):
    dtype, layers = setting
    where = f"{name}, {dtype}, {layers}, {data_set.name}"
    trajectories = trajectories_of(data_set.path)
    bounds = Bounds(folder, data_set, trajectories)
    note = lambda text: say(f"{where}: {text}")
    if layers == "compiled":  # each size compiles once
        side.choose_batch_size(trajectories, BATCH_SIZES, args.probe_tokens, 8192, lambda text: None)
    size = side.choose_batch_size(trajectories, BATCH_SIZES, args.probe_tokens, 8192, note)
    batches = make_batches(trajectories, size)
    steps = {"unpatched": lambda: side.step(batches), "patched": PatchedSide(side, trajectories, args.head).step}
    if args.head == "shared" and layers == "eager":  # espalier.Step takes no compiled models
        steps["Step"] = StepSide(side, trajectories).step
    if args.trl:
        packing = TreePackingSide(side, trajectories)
        steps["TRL"] = packing.step
    for which, step in steps.items():
        if which != "unpatched":  # which has run to find its batch size
            step()
    seconds = {which: [] for which in steps}
    for index in range(args.rounds):
        losses = {}
        for which in steps if index % 2 == 0 else reversed(steps):
            taken, losses[which] = steps[which]()
            seconds[which].append(taken)
        for which in losses:
            check_agreement(where, f"losses (unpatched, {which})", losses["unpatched"], losses[which], LOSS_TOLERANCE[dtype])
        say(f"{where}: round {index + 1}: " + ", ".join(f"{which} {each[-1]:.3f} s" for which, each in seconds.items()))
    ratios = [a / b for a, b in zip(seconds["unpatched"], seconds["patched"])]
    speedup = statistics.median(ratios)
    bound = bounds.head_shared if args.head == "shared" else bounds.head_for_every_row
    share = speedup / bound
    goal = 0.97 if bounds.flat_tokens == bounds.tree_tokens else 0.9
    row = {
        "model ": name,
        "dtype ": dtype,
        "layers ": layers,
        "data ": data_set.name,
        "flat tokens": f"{bounds.flat_tokens:,}",
        "tree tokens": f"{bounds.tree_tokens:,}",
        "batch size": str(size),
        "unpatched s": f"{statistics.median(seconds['unpatched']):.3f}",
        "patched s": f"{statistics.median(seconds['patched']):.3f}",
        "speed-up": f"{speedup:.2f}",
        "low .. high": f"{min(ratios):.2f} .. {max(ratios):.2f}",
        "bound": f"{bound:.2f}",
        "share of bound": f"{share:.3f}",
        "goal": f"{goal:g}",
        "met ": "yes" if share >= goal else "no",
    }
    if "Step" in steps:
        over = [a / b for a, b in zip(seconds["patched"], seconds["Step"])]
        row |= {"over Step": f"{statistics.median(over):.2f}", "low .. high, over Step": f"{min(over):.2f} .. {max(over):.2f}"}
        patched, step = (grown_memory(each, folder, dtype, data_set.path) for each in ("patched", "step"))
        row |= {"memory, MiB": f"{patched:,.0f}", "memory over Step": f"{patched / step:.2f}"}
    if args.trl:
        over = statistics.median(a / b for a, b in zip(seconds["TRL"], seconds["patched"]))
        row |= {"TRL tokens": f"{packing.tokens:,}", "TRL s": f"{statistics.median(seconds['TRL']):.3f}", "over TRL": f"{over:.2f}"}
    return row


def rows_of(args, scratch):
    for name in args.models.split(","):
        folder = model_folder(name, scratch)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        sets = [random_data_set(float(ratio), args, vocab_size, scratch) for ratio in args.ratios.split(",") if ratio]
        sets += [DataSet(path.stem, path, 0) for path in args.data]
        for setting in itertools.product(args.dtypes.split(","), args.layers.split(",")):
            dtype, layers = setting
            side = TransformersSide(folder, dtype)
            if layers == "compiled":
                compile_layers(side.model)
            for data_set in sets:
                yield measure(name, folder, side, setting, data_set, args)


def main():
    if sys.argv[1:2] == ["--grow"]:
        grow(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="smollm2,qwen3", help="smollm2, a shape of bench/model_shapes.py, or a folder (default: %(default)s)")
    add("--dtypes", default="float32", help="float32, bfloat16 (default: %(default)s)")
    add("--layers", default="eager,compiled", help="eager, compiled (default: %(default)s)")
    add("--trl", action="store_true", help="measure TRL's tree packing too (needs trl)")
    add("--ratios", default="1,4,16,64", help="cached-token ratios (default: %(default)s)")
    add("--data", type=Path, nargs="*", default=[], metavar="FILE", help="rows as in docs/data-format.md, whose weights are 0 or 1")
    add("--head", choices=["shared", "rows"], default="shared", help="who computes head and loss (default: %(default)s)")
    add("--tree-tokens", type=int, default=2048, help="tree tokens of a data set (default: %(default)s)")
    add("--flat-tokens", type=int, default=32768, help="most flat tokens of a data set (default: %(default)s)")
    add("--loss-rate", type=float, default=0.25, help="part of a trajectory that carries loss (default: %(default)s)")
    add("--probe-tokens", type=int, default=1024, help="tokens with which a batch size is tried (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--threads", type=int, default=0, help="CPU threads (0: all cores)")
    add("--seed", type=int, default=0, help="of the random trees (default: %(default)s)")
    add("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    reuse_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = list(rows_of(args, Path(scratch)))
        except Failure as failure:
            parser.exit(1, f"patched_model: {failure}\n")
    columns = {name: (lambda row, name=name: row.get(name, "-")) for name in rows[0]}
    publish(f"{torch.get_num_threads()} threads, {args.rounds} rounds in turns", columns, rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
