#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The LM head on a GPU: time and memory of edge log-probabilities, forward and backward, beside chunked cross-entropy of torch.

Both sides compute the log-probability of one target per row from hidden states and the head's weight, then the gradients of
both; in turns, in one run:

    espalier    torch.ops.espalier.edge_logprobs and edge_logprobs_backward_, which adds to a float32 gradient of the weight
    torch       rows in chunks of --chunk: logits, cross_entropy in float32 and its backward, gradients added as autograd does

    python3 bench/gpu_head.py                                    about a minute
    python3 bench/gpu_head.py --vocabularies 151936 --rows 8192 --hidden 2560
    python3 bench/gpu_head.py --quick --device cpu               to try the script where there is no GPU

TFLOP/s count 6 per weight and row (2 forward, 4 backward); that Espalier computes the logits a second time in backward is not
counted. Extra memory is the most that was allocated during a pass beyond what stood before it (inputs and the gradient of the
weight stand before; for torch the gradient of the weight is made by the pass and counts).
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import commit
from gpu_measure import (REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, list_of, markdown,
                         relative_distance, run_main, say, spread, stop_on_sigterm)  # fmt: skip

LARGEST_DIFFERENCE = 0.02  # of bfloat16 gradients


class Case(NamedTuple):
    vocabulary: int
    rows: int
    hidden: int

    @property
    def flops(self):
        return 6 * self.vocabulary * self.rows * self.hidden


class Problem:
    def __init__(self, case, args, seed=0):
        import torch

        generator = torch.Generator(device=args.device).manual_seed(seed)
        dtype = getattr(torch, args.dtype)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=args.device)

        self.hidden = normal(case.rows, case.hidden).to(dtype)
        self.weight = normal(case.vocabulary, case.hidden).mul_(0.05).to(dtype)
        self.targets = torch.randint(case.vocabulary, (case.rows,), generator=generator, device=args.device)
        self.edge_row = torch.arange(case.rows, device=args.device)
        # What a loss hands back: of the mean over rows, with a weight each.
        self.grad = (0.5 + torch.rand(case.rows, generator=generator, device=args.device)) / case.rows
        self.weight_grad = torch.zeros(case.vocabulary, case.hidden, device=args.device)


def espalier_pass(problem):
    """(log-probs, gradient of hidden, gradient of weight)"""
    import torch

    ops, p = torch.ops.espalier, problem
    with torch.no_grad():
        logprobs, lse = ops.edge_logprobs(p.hidden, p.weight, p.edge_row, p.targets)
        grad = ops.edge_logprobs_backward_(p.grad, p.hidden, p.weight, p.edge_row, p.targets, lse, p.weight_grad)
    return logprobs, grad, p.weight_grad


def torch_pass(problem, chunk):
    import torch

    hidden = problem.hidden.detach().requires_grad_()
    weight = problem.weight.detach().requires_grad_()
    logprobs = []
    for begin in range(0, len(hidden), chunk):
        rows = slice(begin, begin + chunk)
        logits = (hidden[rows] @ weight.T).float()
        losses = torch.nn.functional.cross_entropy(logits, problem.targets[rows], reduction="none")
        (-losses * problem.grad[rows]).sum().backward()
        logprobs.append(-losses.detach())
    return torch.cat(logprobs), hidden.grad, weight.grad


def peak_extra_bytes(call, device):
    """Most bytes allocated during the call beyond those before it; None on the CPU."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(case, args, timer, seconds):
    problem = Problem(case, args)
    calls = {"espalier": lambda: espalier_pass(problem), "torch": lambda: torch_pass(problem, args.chunk)}
    expected = [tensor.clone() for tensor in calls["torch"]()]
    problem.weight_grad.zero_()
    difference = max(relative_distance(mine, theirs) for mine, theirs in zip(calls["espalier"](), expected))
    del expected
    peak = {name: peak_extra_bytes(call, args.device) for name, call in calls.items()}
    samples = timer.in_turns(calls, seconds)
    return {"vocabulary": case.vocabulary, "rows": case.rows, "hidden": case.hidden, "flops": case.flops,
            "difference": difference if difference == difference else float("inf"), "extra_bytes": peak,
            "milliseconds": {name: spread(values) for name, values in samples.items()},
            "speedups": spread([t / e for e, t in zip(samples["espalier"], samples["torch"])])}  # fmt: skip


def report(records):
    def milliseconds(record, side):
        return "{:.2f} ({:.2f}..{:.2f})".format(*record["milliseconds"][side])

    def tflops(record, side):
        return f"{record['flops'] / record['milliseconds'][side][0] / 1e9:.3g}"

    def megabytes(record, side):
        size = record["extra_bytes"][side]
        return "-" if size is None else f"{size / 2**20:,.0f}"

    headers = ["vocabulary", "rows", "hidden", "espalier ms", "torch ms", "speed-up", "espalier TFLOP/s", "torch TFLOP/s",
               "espalier extra MiB", "torch extra MiB", "difference"]  # fmt: skip
    return markdown(headers, [
        [f"{r['vocabulary']:,}", f"{r['rows']:,}", f"{r['hidden']:,}", milliseconds(r, "espalier"), milliseconds(r, "torch"),
         "{:.2f} ({:.2f}..{:.2f})".format(*r["speedups"]), tflops(r, "espalier"), tflops(r, "torch"),
         megabytes(r, "espalier"), megabytes(r, "torch"), f"{r['difference']:.1e}"] for r in records])  # fmt: skip


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=60)
    add("--vocabularies", type=list_of(int), default="151936,248320,49152", metavar="LIST", help="(default: %(default)s)")
    add("--rows", type=list_of(int), default="8192,32768,1024", metavar="LIST", help="edges, one per row (default: %(default)s)")
    add("--hidden", type=list_of(int), default="1024,2560", metavar="LIST", help="hidden sizes (default: %(default)s)")
    add("--chunk", type=int, default=2048, metavar="N", help="rows of a chunk on torch's side (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    add("--case-seconds", type=float, default=2.0, metavar="S", help="for the rounds of one size (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--quick", action="store_true", help="two small sizes")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    import torch

    if not args.ops.is_file():
        raise Failure(f"{args.ops} is not there; build target espalier_ops, or name it by --ops")
    torch.ops.load_library(str(args.ops))
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    cases = [Case(v, r, h) for r in args.rows for v in args.vocabularies for h in args.hidden]
    if args.quick:
        cases = [Case(500, 60, 32), Case(700, 100, 64)]
    budget, timer, records, failures = Budget(args.seconds), Timer(args.device), [], []
    stop_on_sigterm()
    try:
        for case in budget.each(cases, args.case_seconds, lambda c: f"{c.vocabulary} x {c.rows} x {c.hidden}"):
            what = f"{case.vocabulary} x {case.rows} x {case.hidden}"
            try:
                records.append(measure(case, args, timer, args.case_seconds))
            except RuntimeError as error:  # of CUDA; where the device is broken the others fail as well
                failures.append(f"{what}: {str(error).splitlines()[0][:160]}")
                say(failures[-1])
                continue
            milliseconds, speedup = records[-1]["milliseconds"]["espalier"][0], records[-1]["speedups"][0]
            say(f"{what}: {milliseconds:.2f} ms, speed-up {speedup:.2f}")
            write(args, records, failures, budget, show=False)
    except Stopped:
        budget.left_out.append("what came after")
    write(args, records, failures, budget, show=True)
    return 0 if records and not failures and worst_difference(records) <= LARGEST_DIFFERENCE else 1


def worst_difference(records):
    return max((record["difference"] for record in records), default=0)


def write(args, records, failures, budget, show):
    text = f"{hardware(args.device)}, {args.dtype}, commit {commit()}. Median (low..high).\n\n{report(records)}{budget.note()}"
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    if worst_difference(records) > LARGEST_DIFFERENCE:
        text += f"\nFAILED: the two sides differ by {worst_difference(records):.2g}, more than {LARGEST_DIFFERENCE}.\n"
    finish(args, text, {"hardware": hardware(args.device), "dtype": args.dtype, "commit": commit(), "records": records,
                        "failures": failures, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
