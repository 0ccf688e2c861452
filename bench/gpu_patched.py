#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of patched Transformers models on a GPU beside espalier.Step on the same rows, with Liger's kernels and without.

A step is forward and backward over all rows, without optimiser. Sides, in turns and in one run:

    patched             the model gets one padded batch with labels, patched by espalier.hf.patch
    Step                espalier.Step on the forest of those rows as one micro-batch
    patched, Liger      both again on a model with Liger's norms, rotations, MLPs and fused loss
    Step, Liger
    unpatched, Liger    the same batch without Espalier

    python3 bench/gpu_patched.py                                    about half a minute
    python3 bench/gpu_patched.py --models 4b --cases "prompt 16,384 + 9 x 64"
    python3 bench/gpu_patched.py --quick --device cpu --dtype float32     to try the script; Liger's kernels need a GPU

Models have random weights and the shapes of bench/gpu_step.py. The goal is a patched step of at most 1.05 times the time of
espalier.Step. All sides of a case have the same loss, or the command fails. It needs Transformers, and for Liger liger-kernel.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_trees as trees
from commit import commit
from gpu_attention import load_operators
from gpu_measure import (REPOSITORY, Budget, Failure, Stopped, Timer, add_common, finish, hardware, list_of, markdown, run_main,
                         say, spread, stop_on_sigterm)  # fmt: skip
from gpu_step import MODELS

GOAL = 1.05
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
CASES = {"rollouts 8k, flat / tree 4": trees.rollouts(8192, 4), "prompt 16,384 + 9 x 64": trees.star(16384, 9, 64)}
QUICK = {"rollouts 256, flat / tree 4": trees.rollouts(256, 4)}


def make_model(config, with_liger, args):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=getattr(torch, args.dtype))
    if with_liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    return model.train()


def rows_of(tree, vocab_size):
    from transformers_step import read_trajectories

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        trees.write_rows(tree, vocab_size, 0, path)
        return read_trajectories(path)


def steps_of(config, trajectories, args):
    """{name: a call that runs one step and returns its loss, a tensor}"""
    import espalier
    from espalier import hf
    from patched_model import cut_rows, labelled_batch, mean_loss_of_step

    batch = {name: value.to(args.device) for name, value in labelled_batch(trajectories).items()}
    num_items = (batch["labels"][:, 1:] != -100).sum()
    rows, loss_mask = cut_rows(trajectories)
    forest = espalier.build(rows)
    plan = espalier.plan(forest, token_budget=forest.tree_tokens, strategy="tree-packing")

    def labelled(model):
        model.zero_grad(set_to_none=True)
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        return loss.detach()

    def by_step(model):
        model.zero_grad(set_to_none=True)
        return mean_loss_of_step(model, plan, loss_mask)

    steps = {}
    for with_liger in [False, True] if args.liger else [False]:
        suffix = ", Liger" if with_liger else ""
        model = hf.patch(make_model(config, with_liger, args))
        steps["patched" + suffix] = lambda model=model: labelled(model)
        steps["Step" + suffix] = lambda model=model: by_step(model)
    if args.liger:
        unpatched = make_model(config, True, args)
        steps["unpatched, Liger"] = lambda: labelled(unpatched)
    return steps


def measure(name, tree, config, args, timer):
    steps = steps_of(config, rows_of(tree, config["vocab_size"]), args)
    losses = {side: step().item() for side, step in steps.items()}
    expected = losses["Step"]
    for side, loss in losses.items():
        if not abs(loss - expected) <= LOSS_TOLERANCE[args.dtype] * abs(expected):
            raise Failure(f"{name}: expected the loss of espalier.Step, {expected:.7g}, received {loss:.7g} from the side {side}")
    samples = timer.in_turns(steps, args.case_seconds)
    over = {side: spread([ours / step for ours, step in zip(samples[side], samples[side.replace("patched", "Step")])])
            for side in samples if side.startswith("patched")}  # fmt: skip
    return {"case": name, "tree_tokens": tree.tokens, "flat_tokens": trees.flat_tokens(tree), "losses": losses,
            "milliseconds": {side: spread(values) for side, values in samples.items()}, "over_step": over}  # fmt: skip


def report(records):
    rows = []
    for r in records:
        for side, milliseconds in r["milliseconds"].items():
            over = r["over_step"].get(side)
            rows.append([r["model"], r["case"], f"{r['tree_tokens']:,}", f"{r['flat_tokens']:,}", side,
                         "{:.1f} ({:.1f}..{:.1f})".format(*milliseconds),
                         "{:.3f} ({:.3f}..{:.3f})".format(*over) if over else "-",
                         "-" if over is None else "yes" if over[0] <= GOAL else "no"])  # fmt: skip
    return markdown(["model ", "case ", "tree tokens", "flat tokens", "side ", "ms", "over Step", f"at most {GOAL}"], rows)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=60)
    add("--models", type=list_of(str), default="0.6b", metavar="LIST", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    add("--cases", action="append", metavar="NAME", help=f"{'; '.join(CASES)} (default: all)")
    add("--dtype", default="bfloat16", choices=list(LOSS_TOLERANCE))
    add("--no-liger", dest="liger", action="store_false", help="leave out the sides with Liger")
    add("--case-seconds", type=float, default=8.0, metavar="S", help="for the rounds of one case (default: %(default)s)")
    add("--ops", type=Path, default=REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so", metavar="FILE",
        help="the library with the operators (default: that of build/release)")  # fmt: skip
    add("--quick", action="store_true", help="one small case of a tiny model")
    return parser.parse_args(argv)


def cases_of(args):
    """The cases to measure. Takes out the sides with Liger where its kernels cannot run, and says so."""
    import torch

    load_operators(args.ops)
    if importlib.util.find_spec("transformers") is None:
        raise Failure("Transformers is not installed for this Python; pip install transformers")
    is_cuda = torch.device(args.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch sees no CUDA device")
    if args.liger and (not is_cuda or importlib.util.find_spec("liger_kernel") is None):
        say("without the sides of Liger: " + ("liger-kernel is not installed" if is_cuda else "its kernels need a GPU"))
        args.liger = False
    if args.quick:
        args.models = ["tiny"]
        return QUICK
    if unknown := (set(args.models) - set(MODELS)) | (set(args.cases or []) - set(CASES)):
        raise Failure(f"expected names of {', '.join([*MODELS, *CASES])}, received {', '.join(sorted(unknown))}")
    return {name: CASES[name] for name in args.cases or CASES}


def main(argv=None):
    args = parse(argv)
    cases = cases_of(args)
    budget, timer, records, failures = Budget(args.seconds), Timer(args.device), [], []
    stop_on_sigterm()
    try:
        for model, name in budget.each([(m, c) for m in args.models for c in cases], 2 * args.case_seconds, " ".join):
            try:
                records.append({"model": model} | measure(name, cases[name], MODELS[model], args, timer))
            except (RuntimeError, Failure) as error:  # what CUDA says; the other cases may still run
                failures.append(f"{model} {name}: {str(error).splitlines()[0][:160]}")
                say(failures[-1])
            write(args, records, failures, budget, show=False)
    except Stopped:
        budget.left_out.append("what came after")
    write(args, records, failures, budget, show=True)
    return 0 if records and not failures else 1


def write(args, records, failures, budget, show):
    text = f"{hardware(args.device)}, {args.dtype}, commit {commit()}. Median (low..high).\n\n{report(records)}{budget.note()}"
    text += "".join(f"\nFAILED: {failure}\n" for failure in failures)
    finish(args, text, {"hardware": hardware(args.device), "dtype": args.dtype, "commit": commit(), "records": records,
                        "failures": failures, "left_out": budget.left_out}, show)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_main(main))
