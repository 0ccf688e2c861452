#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on trees: flash-linear-attention in waves of nodes beside the composed form, forward and backward.

The trees are those of gpu_attention.py --libraries. Sides, in turns and in one run:

    waves       torch.ops.espalier.gated_delta_rule with ESPALIER_RECURRENCES=library: a call of the library for each level of nodes
    composed    the same with ESPALIER_RECURRENCES=composed: batched products over chunks
    flat        the library on every root path by itself, without a tree

    python3 bench/gpu_waves.py                              about half a minute
    python3 bench/gpu_waves.py --quick --device cpu         to try the script where there is no GPU

TFLOP/s count what the recurrence is by itself, 6 Dk Dv for each distinct token and head forward and twice that backward.
"error" is that of the output, and of the gradient of q, relative to the composed form in float64. The rates by which the
operator chooses (python -m espalier.kernels) follow from such times.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_trees as trees
from commit import commit
from gpu_attention import PASSES, load_operators, rate, relative_distance
from gpu_measure import (REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, markdown, run_main, say, spread,
                         stop_on_sigterm)  # fmt: skip

MOST_ERROR = 0.05  # of bfloat16; a wrong state is far beyond it


def inputs_of(tokens, args):
    import torch

    generator = torch.Generator(device=args.device).manual_seed(0)

    def normal(*shape):
        return torch.randn(tokens, args.heads, *shape, generator=generator, device=args.device)

    dtype = getattr(torch, args.dtype)
    sums = torch.promote_types(dtype, torch.float32)
    rows = [normal(args.head_dim).to(dtype) for _ in range(3)] + [(0.1 * normal()).abs().neg().to(sums), normal().sigmoid().to(sums)]
    return rows, normal(args.head_dim).to(dtype)


class Side:
    """A form on rows of inputs, with gradients."""

    def __init__(self, call, rows, grad):
        self.call, self.grad = call, grad
        self.leaves = [row.detach().clone().requires_grad_() for row in rows]
        self.out = self.forward()

    def forward(self):
        return self.call(*self.leaves)

    def backward(self):
        import torch

        return torch.autograd.grad(self.out, self.leaves, self.grad, retain_graph=True)

    def results(self):
        return [self.out.detach(), self.backward()[0]]


def named(form, prev):
    """The operator in a form; the environment is read in forward and in backward."""
    from espalier import ops
    from espalier.kernels import recurrences
    from espalier.kernels.cases import named as in_environment

    class Form(Side):
        def forward(self):
            with in_environment(recurrences.VARIABLE, form):
                return ops.gated_delta_rule(*self.leaves, prev)[0]

        def backward(self):
            with in_environment(recurrences.VARIABLE, form):
                return super().backward()

    return lambda rows, grad: Form(None, rows, grad)


def sides_of(tree, args, rows, grad):
    import torch

    from espalier import ops
    from espalier.kernels import recurrences

    prev = torch.tensor(trees.previous(tree), dtype=torch.int32)
    sides = {"composed": named("composed", prev)(rows, grad)}
    if "recurrences" in ops._registered or args.stand_in:
        sides["waves"] = named("library", prev)(rows, grad)
        begins = [0]
        for length in tree.lengths:
            begins.append(begins[-1] + length)
        paths = [[token for node in trees.root_path(tree, leaf) for token in range(begins[node], begins[node + 1])]
                 for leaf in trees.leaves(tree)]  # fmt: skip
        index = torch.tensor([token for path in paths for token in path], device=args.device)
        borders = torch.tensor([0, *map(len, paths)]).cumsum(0)

        def flat(*rows):
            batch = [row.index_select(0, index).unsqueeze(0) for row in rows]
            return recurrences._fla().chunk_gated_delta_rule(
                *batch, use_qk_l2norm_in_kernel=True, cu_seqlens=borders.to(args.device), cu_seqlens_cpu=borders)[0].squeeze(0)  # fmt: skip

        sides["flat"] = Side(flat, rows, grad.index_select(0, index))
    return sides


def measure(name, tree, args, timer):
    import torch

    from espalier.kernels.waves import Waves

    rows, grad = inputs_of(tree.tokens, args)
    sides = sides_of(tree, args, rows, grad)
    prev = torch.tensor(trees.previous(tree), dtype=torch.int32)
    exact = named("composed", prev)([row.double() for row in rows], grad.double()).results()
    errors = {side: dict(zip(PASSES, map(relative_distance, form.results(), exact))) for side, form in sides.items() if side != "flat"}
    del exact
    waves = Waves(prev, torch.empty(0, dtype=torch.int64), torch.device("cpu"))
    flops = 6 * args.head_dim**2 * args.heads * tree.tokens
    for number, which in enumerate(PASSES):
        samples = timer.in_turns({side: getattr(form, which) for side, form in sides.items()}, args.case_seconds / 2)
        milliseconds = {side: spread(values) for side, values in samples.items()}
        yield {"tree": name, "tokens": tree.tokens, "flat_tokens": trees.flat_tokens(tree), "waves": len(waves.waves),
               "levels": waves.num_levels, "pass": which, "flops": (1 + number) * flops, "milliseconds": milliseconds,
               "errors": {side: each[which] for side, each in errors.items()},
               "tflops": {side: (1 + number) * flops / time[0] / 1e9 for side, time in milliseconds.items()}, "marks": {}}  # fmt: skip


def report(records):
    headers = ["tree ", "tokens", "flat", "waves", "levels of chunks", "pass ", "side ", "ms", "TFLOP/s", "composed / this", "error"]
    rows = []
    for record in records:
        composed = record["milliseconds"]["composed"][0]
        for side, milliseconds in record["milliseconds"].items():
            error = record["errors"].get(side)
            rows.append([record["tree"], f"{record['tokens']:,}", f"{record['flat_tokens']:,}", str(record["waves"]), str(record["levels"]),
                         record["pass"], side, "{:.3f} ({:.3f}..{:.3f})".format(*milliseconds), rate(record, side),
                         f"{composed / milliseconds[0]:.2f}", "-" if error is None else f"{error:.1e}"])  # fmt: skip
    return markdown(headers, rows)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=60)
    add("--heads", type=int, default=32, metavar="H", help="(default: %(default)s)")
    add("--head-dim", type=int, default=128, metavar="D", help="of keys and values (default: %(default)s)")
    add("--tokens", type=int, default=32768, metavar="T", help="of the largest tree, which has to fit in float64 (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    add("--case-seconds", type=float, default=4.0, metavar="S", help="for the rounds of one tree (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--quick", action="store_true", help="small sizes")
    args = parser.parse_args(argv)
    args.stand_in = False  # tests register one
    if args.quick:
        args.heads, args.head_dim, args.case_seconds = 2, 16, 0.1
    return args


def chosen_trees(args):
    """Those of attention, the largest with fewer tokens: float64 takes much memory."""
    every = trees.published(args.quick)
    if args.quick:
        return every
    first, *others = every
    return {f"{first.removesuffix(' 128k')}, {args.tokens // 1024}k": trees.binary(args.tokens, 7, 0)} | {name: every[name] for name in others}


def main(argv=None, stand_in=False):
    args = parse(argv)
    args.stand_in = stand_in
    if not args.ops.is_file():
        raise Failure(f"{args.ops} is not there; build target espalier_ops, or name it by --ops")
    load_operators(args.ops)
    import torch

    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    budget, records, failures = Budget(args.seconds), [], []
    stop_on_sigterm()
    try:
        for name, tree in budget.each(chosen_trees(args).items(), args.case_seconds, lambda item: item[0]):
            try:
                records += measure(name, tree, args, Timer(args.device))
            except RuntimeError as error:  # of CUDA; where the device is broken the others fail as well
                failures.append(f"{name}: {str(error).splitlines()[0][:160]}")
            say(f"{name}: " + (failures[-1] if not records else ", ".join(records[-1]["milliseconds"])))
            write(args, records, failures, budget, show=False)
    except Stopped:
        budget.left_out.append("what came after")
    failures += [f"{record['tree']}, {record['pass']}: {side} errs by {error:.2g}" for record in records
                 for side, error in record["errors"].items() if not error <= MOST_ERROR]  # fmt: skip
    write(args, records, failures, budget, show=True)
    return 0 if records and not failures else 1


def write(args, records, failures, budget, show):
    missing = "" if records and "waves" in records[0]["milliseconds"] else " flash-linear-attention is not installed."
    text = (f"{hardware(args.device)}, {args.dtype}, commit {commit()}. {args.heads} heads of {args.head_dim}. Median (low..high)."
            f"{missing}\n\n{report(records)}{budget.note()}")  # fmt: skip
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    finish(args, text, {"hardware": hardware(args.device), "dtype": args.dtype, "commit": commit(), "records": records,
                        "failures": failures, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
