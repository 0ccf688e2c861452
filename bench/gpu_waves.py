#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Recurrences on trees: libraries in waves of nodes beside the composed form, forward and backward.

The gated delta rule by flash-linear-attention, and Mamba-2 by mamba_ssm, where these are installed. The trees are those of
gpu_attention.py --libraries, and 8,192 tokens as one sequence and in binary trees of short nodes. Sides, in turns and in one run:

    waves       the operator with ESPALIER_RECURRENCES=library: calls of the library for each level of nodes
    composed    the same with ESPALIER_RECURRENCES=composed: batched products over chunks
    flat        the operator in waves on every root path by itself, without a tree

    python3 bench/gpu_waves.py                              about half a minute
    python3 bench/gpu_waves.py --quick --device cpu         to try the script where there is no GPU

TFLOP/s count what the recurrence is by itself: for each distinct token and head 6 Dk Dv, of Mamba-2 4 Dk Dv, forward and twice that
backward. "error" is that of the output, and of the first gradient, relative to the composed form in float64. The rates by
which the operator chooses (python -m espalier.kernels) follow from such times. Public marks of the sequence on an H200, 32 heads
of 128 in bfloat16, stand under the table.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_trees as trees
from commit import commit
from gpu_attention import load_operators, rate
from gpu_measure import (PASSES, REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, list_of, markdown,
                         relative_distance, run_main, say, spread, stop_on_sigterm)  # fmt: skip

MOST_ERROR = 0.05  # of bfloat16; a wrong state is far beyond it
SEQUENCE = "sequence"
MARKS = {"FLA on H200": {"forward": 0.472, "backward": 1.444}, "FlashQLA on H200": {"forward": 0.280, "backward": 0.789}}
MARKED = ("gated_delta_rule", f"{SEQUENCE} of 8,192", 32, 128, "bfloat16")
FLOPS = {"gated_delta_rule": 6, "ssm_scan": 4}  # of a token and head, by Dk Dv


def inputs_of(operator, tokens, args):
    """(inputs by name, the gradient of the output). Mamba-2 has heads of half the size, and twice as many."""
    import torch

    generator = torch.Generator(device=args.device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=args.device)

    dtype = getattr(torch, args.dtype)
    sums = torch.promote_types(dtype, torch.float32)
    rows, dim = (tokens, args.heads), args.head_dim
    if operator == "gated_delta_rule":
        q, k, v = (normal(*rows, dim).to(dtype) for _ in range(3))
        inputs = {"q": q, "k": k, "v": v, "g": (0.1 * normal(*rows)).abs().neg().to(sums), "beta": normal(*rows).sigmoid().to(sums)}
        return inputs, normal(*rows, dim).to(dtype)
    heads = 2 * args.heads
    x, b, c = (normal(tokens, *shape).to(dtype) for shape in ((heads, dim // 2), (2, dim), (2, dim)))
    inputs = {"x": x, "dt": normal(tokens, heads).sigmoid().to(sums), "A": (0.1 * normal(heads)).abs().neg().to(sums), "B": b, "C": c}
    return inputs, normal(tokens, heads, dim // 2).to(dtype)


class Side:
    """An operator in a form, with gradients; the environment is read in forward and in backward."""

    def __init__(self, operator, form, inputs, prev, grad):
        self.operator, self.form, self.prev, self.grad = operator, form, prev, grad
        self.leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
        self.out = self.forward()

    def named(self):
        from espalier.kernels import recurrences
        from espalier.kernels.cases import named

        return named(recurrences.VARIABLE, self.form)

    def forward(self):
        from espalier import ops

        with self.named():
            return getattr(ops, self.operator)(**self.leaves, prev=self.prev)[0]

    def backward(self):
        import torch

        with self.named():
            return torch.autograd.grad(self.out, list(self.leaves.values()), self.grad, retain_graph=True)

    def results(self):
        return [self.out.detach(), self.backward()[0]]


def sides_of(operator, tree, args, inputs, grad):
    import torch

    from espalier import ops

    prev = torch.tensor(trees.previous(tree), dtype=torch.int32)
    sides = {"composed": Side(operator, "composed", inputs, prev, grad)}
    if operator in ops._registered or operator in args.stand_ins:
        sides["waves"] = Side(operator, "library", inputs, prev, grad)
        index, before = trees.paths(tree)
        index = torch.tensor(index, device=args.device)
        flat = {name: value if len(value) != tree.tokens else value.index_select(0, index) for name, value in inputs.items()}
        sides["flat"] = Side(operator, "library", flat, torch.tensor(before, dtype=torch.int32), grad.index_select(0, index))
    return sides


def measure(operator, name, tree, args, timer):
    import torch

    from espalier.kernels.waves import Waves

    inputs, grad = inputs_of(operator, tree.tokens, args)
    sides = sides_of(operator, tree, args, inputs, grad)
    prev = torch.tensor(trees.previous(tree), dtype=torch.int32)
    doubled = {key: value.double() for key, value in inputs.items()}
    exact = Side(operator, "composed", doubled, prev, grad.double()).results()
    errors = {side: dict(zip(PASSES, map(relative_distance, form.results(), exact))) for side, form in sides.items() if side != "flat"}
    del exact
    waves = Waves(prev, torch.empty(0, dtype=torch.int64), torch.device("cpu"))
    flops = FLOPS[operator] * args.head_dim**2 * args.heads * tree.tokens
    marks = MARKS if (operator, name, args.heads, args.head_dim, args.dtype) == MARKED else {}
    for number, which in enumerate(PASSES):
        samples = timer.in_turns({side: getattr(form, which) for side, form in sides.items()}, args.case_seconds / 2)
        milliseconds = {side: spread(values) for side, values in samples.items()}
        yield {"operator": operator, "tree": name, "tokens": tree.tokens, "flat_tokens": trees.flat_tokens(tree),
               "waves": len(waves.waves), "levels": waves.num_levels, "pass": which, "flops": (1 + number) * flops,
               "milliseconds": milliseconds, "errors": {side: each[which] for side, each in errors.items()},
               "tflops": {side: (1 + number) * flops / time[0] / 1e9 for side, time in milliseconds.items()},
               "marks": {mark: times[which] for mark, times in marks.items()}}  # fmt: skip


def report(records):
    headers = ["operator ", "tree ", "tokens", "flat", "waves", "levels of chunks", "pass ", "side ", "ms", "TFLOP/s", "composed / this", "error"]
    rows = []
    for record in records:
        composed = record["milliseconds"]["composed"][0]
        for side, milliseconds in record["milliseconds"].items():
            error = record["errors"].get(side)
            rows.append([record["operator"], record["tree"], f"{record['tokens']:,}", f"{record['flat_tokens']:,}", str(record["waves"]), str(record["levels"]),
                         record["pass"], side, "{:.3f} ({:.3f}..{:.3f})".format(*milliseconds), rate(record, side),
                         f"{composed / milliseconds[0]:.2f}", "-" if error is None else f"{error:.1e}"])  # fmt: skip
    marks = [f"{record['pass']} {name} {mark:.3f} ms" for record in records for name, mark in record["marks"].items()]
    return markdown(headers, rows) + (f"\nPublic marks of the sequence: {', '.join(marks)}.\n" if marks else "")


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=90)
    add("--operators", type=list_of(str), default="gated_delta_rule,ssm_scan", metavar="LIST", help="(default: %(default)s)")
    add("--heads", type=int, default=32, metavar="H", help="(default: %(default)s)")
    add("--head-dim", type=int, default=128, metavar="D", help="of keys and values (default: %(default)s)")
    add("--tokens", type=int, default=32768, metavar="T", help="of the largest tree, which has to fit in float64 (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    add("--case-seconds", type=float, default=4.0, metavar="S", help="for the rounds of one tree (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--quick", action="store_true", help="small sizes")
    args = parser.parse_args(argv)
    args.stand_ins = ()  # that tests register
    if unknown := set(args.operators) - set(FLOPS):
        parser.error(f"--operators: expected {', '.join(FLOPS)}, received {', '.join(sorted(unknown))}")
    if args.quick:
        args.heads, args.head_dim, args.case_seconds = 2, 16, 0.1
    return args


def chosen_trees(args):
    """Those of attention, the largest with fewer tokens: float64 takes much memory. Then a sequence and nodes of 64 and 16 tokens."""
    every, tokens = trees.published(args.quick), 128 if args.quick else 8192
    short = {f"{SEQUENCE} of {tokens:,}": trees.chain(tokens)}
    short |= {f"nodes of {size}": trees.balanced(tokens, 2, (tokens // size).bit_length() - 1) for size in (64, 16)}
    if args.quick:
        return every | short
    first, *others = every
    return short | {f"{first.removesuffix(' 128k')}, {args.tokens // 1024}k": trees.binary(args.tokens, 7, 0)} | {name: every[name] for name in others}


def main(argv=None, stand_ins=()):
    args = parse(argv)
    args.stand_ins = stand_ins
    if not args.ops.is_file():
        raise Failure(f"{args.ops} is not there; build target espalier_ops, or name it by --ops")
    load_operators(args.ops)
    import torch

    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    budget, records, failures = Budget(args.seconds), [], []
    stop_on_sigterm()
    try:
        cases = [(operator, name, tree) for name, tree in chosen_trees(args).items() for operator in args.operators]
        for operator, name, tree in budget.each(cases, args.case_seconds, lambda case: f"{case[0]}, {case[1]}"):
            try:
                records += measure(operator, name, tree, args, Timer(args.device))
            except RuntimeError as error:  # of CUDA; where the device is broken the others fail as well
                failures.append(f"{operator}, {name}: {str(error).splitlines()[0][:160]}")
            say(f"{operator}, {name}: " + (failures[-1] if not records else ", ".join(records[-1]["milliseconds"])))
            write(args, records, failures, budget, show=False)
    except Stopped:
        budget.left_out.append("what came after")
    failures += [f"{record['operator']}, {record['tree']}, {record['pass']}: {side} errs by {error:.2g}" for record in records
                 for side, error in record["errors"].items() if not error <= MOST_ERROR]  # fmt: skip
    write(args, records, failures, budget, show=True)
    return 0 if records and not failures else 1


def write(args, records, failures, budget, show):
    without = sorted({record["operator"] for record in records if "waves" not in record["milliseconds"]})
    missing = f" No library is installed for {' and '.join(without)}." if without else ""
    text = (f"{hardware(args.device)}, {args.dtype}, commit {commit()}. {args.heads} heads of {args.head_dim}. Median (low..high)."
            f"{missing}\n\n{report(records)}{budget.note()}")  # fmt: skip
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    finish(args, text, {"hardware": hardware(args.device), "dtype": args.dtype, "commit": commit(), "records": records,
                        "failures": failures, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
