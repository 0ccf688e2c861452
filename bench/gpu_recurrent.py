#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on a GPU: one sequence and trees of as many tokens, beside flash-linear-attention where it is installed.

Sides, in turns and in one run, forward and backward by themselves:

    espalier    torch.ops.espalier.gated_delta_rule on one sequence of --tokens tokens: batched products of cuBLAS
    tree N      the same on a binary tree of nodes of N tokens, as many tokens in all
    fla         chunk_gated_delta_rule of flash-linear-attention on that sequence

The outputs of espalier have to agree with those of fla, or where that is not installed with its own in float32.

    python3 bench/gpu_recurrent.py                                 about half a minute
    python3 bench/gpu_recurrent.py --quick --device cpu            to try the script where there is no GPU

Public marks on an H200 at 8,192 tokens, 32 heads of 128, bfloat16 (forward, backward): 0.472 and 1.444 ms (FLA), 0.280 and
0.789 ms (FlashQLA). They stand beside the figures of that size.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import commit
from gpu_measure import (REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, list_of, markdown,
                         run_main, say, spread, stop_on_sigterm)  # fmt: skip

MARKS = {"FLA on H200": {"forward": 0.472, "backward": 1.444}, "FlashQLA on H200": {"forward": 0.280, "backward": 0.789}}
MARKED = (8192, 32, 128)
LARGEST_DIFFERENCE = 0.02  # of bfloat16 outputs


def find_fla():
    """The function, or None."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


class Problem:
    """Inputs [T, H, D]; log decays of -0.1 or so and steps between 0 and 1, as of trained models."""

    def __init__(self, args, seed=0):
        import torch

        generator = torch.Generator(device=args.device).manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=args.device)

        dtype, rows = getattr(torch, args.dtype), (args.tokens, args.heads)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v = (normal(*rows, args.head_dim).to(dtype) for _ in range(3))
        g, beta = (0.1 * normal(*rows)).abs().neg().to(sums), normal(*rows).sigmoid().to(sums)
        self.inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
        self.grad = normal(*rows, args.head_dim).to(dtype)

    def espalier(self, prev, inputs=None):
        import torch

        ends = torch.empty(0, dtype=torch.int64)
        return torch.ops.espalier.gated_delta_rule(*(inputs or self.inputs), prev, None, ends)[0]

    def in_float32(self, prev):
        """What it is without rounding to bfloat16."""
        return self.espalier(prev, [x.detach().float() for x in self.inputs])

    def fla(self, function):
        batch = [x.unsqueeze(0) for x in self.inputs]
        return function(*batch, use_qk_l2norm_in_kernel=True)[0].squeeze(0)

    def backward_of(self, out):
        """A call that can be repeated."""
        import torch

        return lambda: torch.autograd.grad(out, self.inputs, self.grad, retain_graph=True)


def sides_of(problem, args):
    from recurrent_paths import flat_prev, tree_prev

    flat = flat_prev(args.tokens, args.tokens)
    sides = {"espalier": lambda: problem.espalier(flat)}
    for node in args.nodes:
        sides[f"tree {node}"] = functools.partial(problem.espalier, tree_prev(args.tokens, node))
    fla = find_fla()
    if fla is not None:
        sides["fla"] = lambda: problem.fla(fla)
    return sides


def relative_distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def measure(args, budget):
    """A record for each pass for which there is time, as it is ready."""
    problem, timer = Problem(args), Timer(args.device)
    sides = sides_of(problem, args)
    outs = {name: call() for name, call in sides.items()}
    from recurrent_paths import flat_prev

    expected = outs["fla"] if "fla" in outs else problem.in_float32(flat_prev(args.tokens, args.tokens))
    difference = relative_distance(outs["espalier"], expected)
    del expected
    calls = {"forward": sides, "backward": {name: problem.backward_of(out) for name, out in outs.items()}}
    for which in budget.each(calls, args.pass_seconds, str):
        samples = timer.in_turns(calls[which], args.pass_seconds)
        yield {"pass": which, "difference": difference,
               "milliseconds": {name: spread(values) for name, values in samples.items()},
               "flat_over": {name: spread([e / o for e, o in zip(samples["espalier"], values)])
                             for name, values in samples.items() if name != "espalier"},
               "marks": {name: mark[which] for name, mark in MARKS.items()} if marked(args) else {}}  # fmt: skip


def marked(args):
    return (args.tokens, args.heads, args.head_dim) == MARKED and args.dtype == "bfloat16"


def report(records):
    rows = []
    for r in records:
        for name, milliseconds in r["milliseconds"].items():
            ratio = r["flat_over"].get(name)
            rows.append([r["pass"], name, "{:.3f} ({:.3f}..{:.3f})".format(*milliseconds),
                         "-" if ratio is None else "{:.2f} ({:.2f}..{:.2f})".format(*ratio)])  # fmt: skip
        rows += [[r["pass"], f"{name} (public mark)", f"{mark:.3f}",
                  f"{r['milliseconds']['espalier'][0] / mark:.2f}"] for name, mark in r["marks"].items()]  # fmt: skip
    return markdown(["pass ", "side ", "ms", "time of espalier's sequence / this"], rows)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=40)
    add("--tokens", type=int, default=8192, metavar="T", help="a multiple of every node (default: %(default)s)")
    add("--heads", type=int, default=32, metavar="H", help="(default: %(default)s)")
    add("--head-dim", type=int, default=128, metavar="D", help="of keys and values (default: %(default)s)")
    add("--nodes", type=list_of(int), default="512,64,16", metavar="LIST", help="tokens of nodes (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    add("--pass-seconds", type=float, default=8.0, metavar="S", help="for the rounds of one pass (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--quick", action="store_true", help="a small size")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.heads, args.head_dim, args.nodes, args.pass_seconds = 128, 2, 16, [32, 8], 0.2
    if any(node < 1 or args.tokens % node != 0 for node in args.nodes):
        parser.error(f"--nodes: expected divisors of --tokens {args.tokens}, received {args.nodes}")
    return args


def main(argv=None):
    args = parse(argv)
    import torch

    if not args.ops.is_file():
        raise Failure(f"{args.ops} is not there; build target espalier_ops, or name it by --ops")
    torch.ops.load_library(str(args.ops))
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    budget, records, failures = Budget(args.seconds), [], []
    stop_on_sigterm()
    try:
        for record in measure(args, budget):
            records.append(record)
            say(f"{record['pass']}: {record['milliseconds']['espalier'][0]:.3f} ms")
            write(args, records, failures, budget, show=False)
    except Stopped:
        budget.left_out.append("what came after")
    except RuntimeError as error:  # of CUDA
        failures.append(str(error).splitlines()[0][:160])
    difference = max((r["difference"] for r in records), default=0)
    if not difference <= LARGEST_DIFFERENCE:
        failures.append(f"espalier and what it is compared with differ by {difference:.2g}, more than {LARGEST_DIFFERENCE}")
    write(args, records, failures, budget, show=True)
    return 0 if records and not failures else 1


def write(args, records, failures, budget, show):
    fla = "" if find_fla() else " flash-linear-attention is not installed."
    text = (f"{hardware(args.device)}, {args.dtype}, commit {commit()}. {args.tokens:,} tokens, {args.heads} heads of "
            f"{args.head_dim}. Median (low..high).{fla}\n\n{report(records)}{budget.note()}")  # fmt: skip
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    finish(args, text, {"hardware": hardware(args.device), "dtype": args.dtype, "commit": commit(), "records": records,
                        "failures": failures, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
