#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a GPU, forward and backward, beside dense causal attention and FlexAttention: all in one run, in turns.

Rates are per visible (query, key) pair and head: 4 d FLOPs forward, 10 d backward. The sides of each tree:

    library, ampere, ...  torch.ops.espalier.tree_attention as ESPALIER_ATTENTION names it (--kinds); with
                          +deterministic bitwise identical in every run: dQ by a separate kernel, and by no atomic adds
    flash, cudnn          ATen's causal attention on ONE sequence, as long as to have the same number of visible pairs: it
                          computes the same useful FLOPs without any tree, and is what a tree kernel is held against
    flex                  compiled FlexAttention with the tree's own mask (a block mask from subtree_end)
    gather                with --libraries: keys and values gathered for the root path of every node, then FlashAttention of
                          sequences of unequal length, as TRL's AsyncGRPO computes its prefix trees

    python3 bench/gpu_attention.py                          about two minutes; most important trees first
    python3 bench/gpu_attention.py --cases agent --kinds ampere --no-flex
    python3 bench/gpu_attention.py --libraries              three trees: NVIDIA's, a real forest, a prompt with 16 answers. All
                                                            sides, their share of dense FlashAttention, errors against float64
    python3 bench/gpu_attention.py --list                   the trees, without measuring
    python3 bench/gpu_attention.py --quick --device cpu     a few small trees, to try the script where there is no GPU

Times are medians of rounds, by CUDA events, the L2 cache overwritten before each call; inputs are random. "of cuDNN H200"
is the rate over 688 forward and 581 backward TFLOP/s, which cuDNN 9.19 reaches on an H200 for causal attention of 32k tokens with
head dimension 128 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training). "difference" is the largest relative distance
(norms, output and all gradients) between the sides that compute the tree; in bfloat16 about 0.005 is rounding, and above
0.02 the run fails, and says by which side; it is measured against the first of them. Ratios are those of the fastest kind.

On a GPU a separate process measures (gpu_isolated.py). Where it dies or hangs, the side that it was running is left out for
that head dimension, or altogether after the second time, and another process goes on. --out and --json are written anew after
every tree.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_isolated
import gpu_trees as trees
from attention_sides import Flex, Inputs, Side, dense_side, errors_of, espalier_side, gather_side
from commit import commit
from gpu_measure import (PASSES, REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, left_out_note,
                         list_of, markdown, relative_distance, run_main, say, spread, stop_on_sigterm)  # fmt: skip

H200_CUDNN = {"forward": 688.0, "backward": 581.0}
LARGEST_DIFFERENCE = 0.02  # of bfloat16 results of equal formulas; a wrong mask is far beyond it
# That one side, with what it loads and compiles, takes at most the first time, before it counts as hung.
FIRST_SECONDS, FLEX_SECONDS = 30, 75
MOST_LOST = 6  # processes; then the rest is given up


class Case(NamedTuple):
    name: str
    tree: trees.Tree
    heads: int
    key_heads: int
    head_dim: int
    flex: bool = False  # compiling it takes tens of seconds per shape: only where it is worth that

    @property
    def shape(self):
        return f"{self.heads}/{self.key_heads} x {self.head_dim}"


K = 1024


def cases():
    """Most important first. FlexAttention compiles once per number of tokens and head shape, for tens of seconds: trees that
    share it stand together, behind what is worth more."""
    grid = [(16 * K, 64), (16 * K, 512), (16 * K, 4 * K), (8 * K, 4 * K)]

    def agent(dim, key_heads=4, flex=False):
        return Case("agent 16k", trees.agent(16 * K, 50, 2000, 1), 16, key_heads, dim, flex)

    def balanced(dim, flex=False):
        return Case("balanced 2^5 16k", trees.balanced(16 * K, 2, 6), 16, 4, dim, flex)

    def short(flex=False):
        return Case("agent 16k, short nodes", trees.agent(16 * K, 50, 200, 3), 16, 4, 128, flex)

    def star(prompt, response, dim, flex=False):
        return Case(f"star {prompt // K}k + 9 x {response}", trees.star(prompt, 9, response), 16, 4, dim, flex)

    found = [
        Case("chain 16k", trees.chain(16 * K), 16, 4, 128),
        agent(128),
        balanced(128),
        *(star(prompt, response, 128) for prompt, response in grid),
        Case("agent 64k", trees.agent(64 * K, 50, 2000, 2), 16, 4, 128),
        short(),
        agent(64),
        agent(256),
        *(Case(f"chain {n}k", trees.chain(n * K), 16, 16, 128) for n in (32, 64)),
        # Compiled once for these four.
        agent(128, flex=True),
        balanced(128, flex=True),
        short(flex=True),
        Case("chain 16k", trees.chain(16 * K), 16, 4, 128, flex=True),
        *(Case(f"chain {n}k", trees.chain(n * K), 16, 16, 128) for n in (8, 4, 2)),
        Case("chain 16k", trees.chain(16 * K), 16, 4, 64),
        Case("chain 16k", trees.chain(16 * K), 16, 4, 256),
        star(16 * K, 64, 128, flex=True),
        agent(64, flex=True),
        agent(128, key_heads=16),
        *(Case(f"agent {n}k", trees.agent(n * K, 50, min(64 * n, 2000), n), 16, 4, 128) for n in (4, 8, 32)),
        Case("balanced 4^3 32k", trees.balanced(32 * K, 4, 4), 16, 4, 128),
        *(star(16 * K, response, dim) for dim in (64, 256) for response in (64, 512)),
        *(balanced(dim) for dim in (64, 256)),
        *(Case(f"chain {n}k", trees.chain(n * K), 16, 16, dim) for dim in (64, 256) for n in (2, 8, 32, 64)),
        star(8 * K, 4 * K, 128, flex=True),
        agent(256, flex=True),
    ]  # fmt: skip
    return found


def quick_cases():
    return [Case("chain 64", trees.chain(64), 4, 2, 64, flex=True),
            Case("star 40 + 3 x 8", trees.star(40, 3, 8), 4, 2, 64),
            Case("agent 96", trees.agent(96, 2, 12, 1), 4, 2, 64, flex=True)]  # fmt: skip


def library_cases(quick):
    heads, key_heads, dim = (4, 2, 16) if quick else (16, 4, 128)
    return [Case(name, tree, 4 if name.startswith("NVIDIA") else heads, 4 if name.startswith("NVIDIA") else key_heads, dim, flex=True)
            for name, tree in trees.published(quick).items()]  # fmt: skip


# ---- Measuring ---------------------------------------------------------------------------------------------


def synchronize(args):
    import torch

    if torch.device(args.device).type == "cuda":
        torch.cuda.synchronize(args.device)


def attempt(make, name, problems, args):
    """The side, without backward where that fails; None where it cannot run at all. problems gets why: this build, GPU or
    library does not have it. Raises where the device is broken from here on."""
    side = None
    try:
        side = make()
        side.backward()
        synchronize(args)
        return side
    except Exception as error:  # torch.compile raises many kinds
        synchronize(args)
        text = (str(error).strip().splitlines() or [""])[0][:160]
        problems[f"{name}{', backward' if side else ''}: {type(error).__name__}: {text}"] = None
        return Side(side.forward, None, None) if side else None


def sides_of(case, args, tell, flex, problems, tree_inputs, ends):
    import torch

    dtype = getattr(torch, args.dtype)
    makers = {kind: lambda kind=kind: espalier_side(kind, tree_inputs, ends) for kind in args.kinds}
    dense_tokens = trees.causal_length(trees.visible_pairs(case.tree))
    dense_inputs = Inputs(case, dense_tokens, args.device, dtype, 1)
    for backend in args.dense:
        makers[backend] = lambda backend=backend: dense_side(backend, dense_inputs, problems)
    if flex and (case.flex or args.flex_everywhere):
        makers["flex"] = lambda: flex.side(tree_inputs, ends)
    if args.libraries:
        makers["gather"] = lambda: gather_side(tree_inputs, case.tree)
    sides = {}
    for name, make in makers.items():
        if (name, case.head_dim) in args.without:
            continue
        tell.doing(name, FLEX_SECONDS if name == "flex" else FIRST_SECONDS)
        side = attempt(make, f"{name}, d {case.head_dim}", problems, args)
        if side:
            sides[name] = side
    return sides


def differences(sides):
    """By side that computes the tree, but the first: its distance from the first, at worst over the results."""
    comparable = [(name, side) for name, side in sides.items() if side.results]
    if len(comparable) < 2:
        return {}
    expected, found = comparable[0][1].results(), {}
    for name, side in comparable[1:]:
        distances = [relative_distance(mine, theirs) for mine, theirs in zip(side.results(), expected)]
        found[name] = max(distance if distance == distance else float("inf") for distance in distances)
    return found


def measure(case, args, tell, timer, flex, seconds, problems):
    """One record per pass."""
    import torch

    inputs = Inputs(case, case.tree.tokens, args.device, getattr(torch, args.dtype), 0)
    ends = torch.tensor(trees.subtree_end(case.tree), dtype=torch.int32, device=args.device)
    sides = sides_of(case, args, tell, flex, problems, inputs, ends)
    tell.doing("comparison", FIRST_SECONDS)
    by_side, errors = differences(sides), errors_of(sides, inputs, ends) if args.libraries else {}
    pairs = trees.visible_pairs(case.tree)
    flops = dict(zip(PASSES, trees.attention_flops(pairs, case.heads, case.head_dim)))
    records = []
    for name in PASSES:
        calls = {side: getattr(each, name) for side, each in sides.items() if getattr(each, name)}
        samples = timer.in_turns(calls, seconds / 2, waits=lambda side: tell.doing(side, FIRST_SECONDS))
        times = {side: spread(values) for side, values in samples.items()}
        records.append({
            "tree": case.name, "heads": case.heads, "key_heads": case.key_heads, "head_dim": case.head_dim,
            "tokens": case.tree.tokens, "nodes": len(case.tree.lengths), "pairs": pairs, "pass": name,
            "flops": flops[name], "errors": {side: each[name] for side, each in errors.items()}, "difference": max(by_side.values(), default=None), "differences": by_side,
            "milliseconds": times,
            "tflops": {side: flops[name] / time[0] / 1e9 for side, time in times.items()},
        })  # fmt: skip
    return records


def check_operators(library):
    if not library.is_file():
        raise Failure(f"{library} is not there; build target espalier_ops, or name it by --ops")


def load_operators(library):
    """With the library that Python registers."""
    check_operators(library)
    os.environ["ESPALIER_OPS"] = str(library)
    sys.path.insert(0, str(REPOSITORY / "python"))
    import espalier.ops  # noqa: F401


def without_library(kinds):
    """The kinds that can be measured, and what is missing for others."""
    sys.path.insert(0, str(REPOSITORY / "python"))
    from espalier.kernels import attention

    if attention.installed():
        return kinds, {}
    rest = [kind for kind in kinds if not kind.startswith("library")]
    return rest, {"library: expected nvidia-cudnn-frontend 1.32 with nvidia-cutlass-dsl, which is not installed": None} if rest != kinds else {}


# ---- The report --------------------------------------------------------------------------------------------


def rate(record, side):
    if side not in record["tflops"]:
        return "-"
    low, high = (record["flops"] / record["milliseconds"][side][i] / 1e9 for i in (2, 1))
    return f"{record['tflops'][side]:.3g} ({low:.3g}..{high:.3g})"


def ratio(record, side, other):
    if side is None or other not in record["tflops"]:
        return "-"
    return f"{record['tflops'][side] / record['tflops'][other]:.2f}"


def best_kind(record, kinds):
    """The fastest of our kinds; None where none ran."""
    return max((kind for kind in kinds if kind in record["tflops"]), key=record["tflops"].get, default=None)


def report(records, args):
    others = [*args.dense, "flex"]
    headers = ["tree ", "heads x d ", "tokens", "nodes", "pass ", *args.kinds, *others,
               *(f"best / {other}" for other in others), "of cuDNN H200", "difference"]  # fmt: skip
    rows = []
    for record in records:
        best = best_kind(record, args.kinds)
        share = record["tflops"][best] / H200_CUDNN[record["pass"]] if best else None
        difference = record["difference"]
        rows.append([
            record["tree"], f"{record['heads']}/{record['key_heads']} x {record['head_dim']}", f"{record['tokens']:,}",
            str(record["nodes"]), record["pass"], *(rate(record, side) for side in [*args.kinds, *others]),
            *(ratio(record, best, other) for other in others),
            f"{share:.2f}" if share else "-", "-" if difference is None else f"{difference:.1e}"])  # fmt: skip
    return markdown(headers, rows)


def report_by_side(records):
    """A row for each side of each tree and pass."""
    headers = ["tree ", "heads x d ", "pass ", "side ", "ms", "TFLOP/s", "of dense flash", "error"]
    rows = []
    for record in records:
        for side, milliseconds in record["milliseconds"].items():
            error = record["errors"].get(side)
            rows.append([record["tree"], f"{record['heads']}/{record['key_heads']} x {record['head_dim']}", record["pass"], side,
                         "{:.3f} ({:.3f}..{:.3f})".format(*milliseconds), rate(record, side), ratio(record, side, "flash"),
                         "-" if error is None else f"{error:.2e}"])  # fmt: skip
    return markdown(headers, rows)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=120)
    add("--kinds", type=list_of(str), default="library,ampere,ampere+deterministic", metavar="LIST",
        help="values of ESPALIER_ATTENTION, also with +deterministic; results are held against the first (default: %(default)s)")  # fmt: skip
    add("--dense", type=list_of(str), default="flash,cudnn", metavar="LIST", help="of flash and cudnn, or none (default: %(default)s)")
    flex = parser.add_mutually_exclusive_group()
    flex.add_argument("--no-flex", dest="flex", action="store_false",
                      help="leave FlexAttention out: compiling it takes about a minute")  # fmt: skip
    flex.add_argument("--flex-everywhere", action="store_true",
                      help="FlexAttention on every tree, instead of on a few: compiled for each of some thirty shapes")  # fmt: skip
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    add("--cases", default="", metavar="TEXT", help="only trees whose name contains this")
    add("--case-seconds", type=float, default=1.5, metavar="S", help="for the rounds of one tree (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--libraries", action="store_true", help="the three trees on which libraries are compared, with all sides")
    add("--apart", action="store_true", help="in a separate process on the CPU too")
    add("--quick", action="store_true", help="a few small trees")
    add("--list", action="store_true", help="print the trees and stop")
    args = parser.parse_args(argv)
    args.dense = [name for name in args.dense if name != "none"]
    args.without = set()  # (side, head dimension)
    return args


def chosen_cases(args):
    every = library_cases(args.quick) if args.libraries else quick_cases() if args.quick else cases()
    found = [case for case in every if args.cases in case.name]
    if args.flex_everywhere:  # those that are there once more for FlexAttention alone are the same then
        found = list({(case.name, case.shape): case for case in found}.values())
    return found


def work(tell, args, first, seconds):
    """The trees from number `first` on. Hands over (number, records or None, what could not be measured, what was left out)."""
    load_operators(args.ops)
    import torch

    budget, timer = Budget(seconds), Timer(args.device)
    flex = Flex() if args.flex else None
    chosen = list(enumerate(chosen_cases(args)))[first:]
    for number, case in budget.each(chosen, args.case_seconds, lambda item: f"{item[1].name} ({item[1].shape})"):
        problems = {}
        tell.doing("inputs", FIRST_SECONDS)
        with torch.no_grad():
            records = measure(case, args, tell, timer, flex, args.case_seconds, problems)
        tell.result((number, records, list(problems), []))
    tell.result((len(chosen_cases(args)), None, [], budget.left_out))


class Run:
    """What was found, and who finds it: other processes in turn on a GPU, this one on a CPU."""

    def __init__(self, args):
        self.args, self.cases = args, chosen_cases(args)
        self.end = time.monotonic() + args.seconds
        self.next, self.lost = 0, []
        self.records, self.problems, self.left_out = [], {}, []

    def take(self, message):
        number, records, problems, left_out = message
        self.left_out += left_out
        self.problems.update(dict.fromkeys(problems))
        if records is None:
            self.next = len(self.cases)
            return
        self.next = number + 1
        self.records += records
        rates = "; ".join(f"{r['pass']} " + ", ".join(f"{side} {t:.3g}" for side, t in r["tflops"].items()) for r in records)
        say(f"{self.cases[number].name}, {self.cases[number].shape}: {rates}")
        self.write()

    def lose(self, lost):
        """Another process goes on with the same tree, without what this one was doing; behind it, where that has no name."""
        case = self.cases[self.next]
        self.problems[f"{lost.doing}, {case.name}, d {case.head_dim}: {lost.why}"] = None
        say(list(self.problems)[-1])
        self.lost.append(lost.doing)
        if lost.doing not in [*self.args.kinds, *self.args.dense, "flex", "gather"]:
            self.next += 1
        dims = {each.head_dim for each in self.cases} if self.lost.count(lost.doing) > 1 else {case.head_dim}
        self.args.without |= {(lost.doing, dim) for dim in dims}
        if len(self.lost) >= MOST_LOST:
            self.give_up("after so many failures")

    def give_up(self, why):
        self.left_out += [f"{case.name} ({case.shape})" for case in self.cases[self.next :]]
        self.next = len(self.cases)
        say(f"the rest is left out, {why}")

    def measure(self):
        if self.args.device == "cpu" and not self.args.apart:
            work(gpu_isolated.Here(self.take), self.args, 0, self.args.seconds)
        while self.next < len(self.cases):
            left = self.end - time.monotonic()
            if left < self.args.case_seconds:
                self.give_up("no time is left")
            for message in gpu_isolated.results(work, self.args, self.next, left, seconds=left):
                if not isinstance(message, gpu_isolated.Lost):
                    self.take(message)
                elif time.monotonic() >= self.end:
                    self.give_up(f"no time is left; it was at {message.doing}")
                else:
                    self.lose(message)

    def worst(self):
        return max((record["difference"] or 0 for record in self.records), default=0)

    def text(self):
        text = (f"{hardware(self.args.device)}, {self.args.dtype}, commit {commit()}. TFLOP/s: median (low..high).\n\n"
                f"{report_by_side(self.records) if self.args.libraries else report(self.records, self.args)}")  # fmt: skip
        text += "".join(f"\nNot measured: {problem}\n" for problem in self.problems) + left_out_note(self.left_out)
        if self.worst() > LARGEST_DIFFERENCE:
            sides = {side for r in self.records for side, d in r["differences"].items() if d > LARGEST_DIFFERENCE}
            text += (f"\nFAILED: sides that compute the same tree differ by {self.worst():.2g}, more than "
                     f"{LARGEST_DIFFERENCE}: {', '.join(sorted(sides))}.\n")  # fmt: skip
        return text

    def write(self, show=False):
        finish(self.args, self.text(), {
            "hardware": hardware(self.args.device), "dtype": self.args.dtype, "commit": commit(), "records": self.records,
            "not_measured": list(self.problems), "left_out": self.left_out}, show)  # fmt: skip


def main(argv=None):
    args = parse(argv)
    chosen = chosen_cases(args)
    if args.list:
        for case in chosen:
            pairs = trees.visible_pairs(case.tree)
            print(f"{case.name}, {case.shape}: {case.tree.tokens:,} tokens, {len(case.tree.lengths)} nodes, {pairs:,} pairs, "
                  f"as many as {trees.causal_length(pairs):,} dense tokens")  # fmt: skip
        return 0
    if not chosen:
        raise Failure(f"--cases {args.cases}: no tree has that name; --list shows them")
    check_operators(args.ops)
    import torch

    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    args.kinds, missing = without_library(args.kinds)
    run = Run(args)
    run.problems |= missing
    stop_on_sigterm()
    try:
        run.measure()
    except Stopped:
        run.left_out.append("what came after")
    run.write(show=True)
    return 0 if run.records and run.worst() <= LARGEST_DIFFERENCE and not run.lost else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
