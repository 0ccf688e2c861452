#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training is the same: loss curves of one model on real conversations, on trees and with sequence packing.

    python bench/papers/same_training.py

Steps of AdamW take the assistant turns of whole conversations, one row for each turn. System prompts are left out, so that a CPU gets
through them in float64. Two conversations are held out, and their loss is measured as training goes on.

- float64: both runs start from the same weights and read the same rows in the same order. Their losses have to agree in every printed
  digit, or the command fails.
- bfloat16: runs with other seeds read conversations in another order. Trees and packing with one seed differ by rounding alone, which
  has to be less than what two seeds differ by, on average over all evaluations.

It needs `make build` and `scripts/fetch_smollm2.py`, and takes an hour on two cores. With --runs, what was
stopped goes on: runs of the same commit, flags and rows are used again.
"""

import hashlib
import itertools
import json
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commit import commit
from compare_transformers import CHATS, SMOLLM2, Failure, espalier
from gpu_measure import say
from papers import figure
from papers.drawing import Chart, Series

SCRIPT = "same_training.py"
SIDES = {"trees": "partition", "sequence packing": "sequence-packing"}
PRINTED = "{:.8f}"  # twice the digits that `espalier train` shows


def conversations(args, scratch):
    """Files with the rows of held-out and of training conversations. Rows of a conversation are a group."""
    chats, rows = scratch / "chats.jsonl", scratch / "rows.jsonl"
    with open(chats, "w") as file:
        for line in args.chats.read_text().splitlines():
            chat = json.loads(line)
            chat["messages"] = [message for message in chat["messages"] if message["role"] != "system"]
            file.write(json.dumps(chat) + "\n")
    espalier("prepare", "--model", args.model, "--per-turn", "--max-tokens", args.max_tokens, chats, "-o", rows)
    groups = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        name = row["trajectory_id"].rpartition("/")[0]
        groups.setdefault(name, []).append(row | {"group_id": name})
    if len(groups) < 3:
        raise Failure(f"{args.chats}: expected at least three conversations with turns of at most {args.max_tokens} tokens, "
                      f"received {len(groups)}")  # fmt: skip
    files = scratch / "held-out.jsonl", scratch / "training.jsonl"
    for file, part in zip(files, (list(groups)[:2], list(groups)[2:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for name in part for row in groups[name]))
    return files


def losses(args, files, dtype, side, seed, scratch):
    """Of every step, and {step: loss of the held-out rows}."""
    held_out, training = files
    out = scratch / f"{dtype}-{side}-{seed}".replace(" ", "-")
    words = ["--model", args.model, "--data", training, "--eval-data", held_out, "--eval-every", args.eval_every, "--steps", args.steps,
             "--batch-size", args.batch_size, "--shuffle", "groups", "--seed", seed, "--dtype", dtype, "--learning-rate", args.learning_rate,
             "--strategy", SIDES[side], "--threads", args.threads, "--no-calibration", "--save-dtype", "bfloat16"]  # fmt: skip
    made_by = "\n".join([commit(), " ".join(map(str, words)), *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)])
    finished = out / "made_by"
    if not finished.exists() or finished.read_text() != made_by:
        shutil.rmtree(out, ignore_errors=True)
        espalier("train", *words, "--out", out)
        shutil.rmtree(out / "checkpoints")
        finished.write_text(made_by)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    say(
        f"{dtype}, {side}, seed {seed}: " + ", ".join(f"{record['eval_loss']:.4f}" for record in records if "eval_loss" in record)
    )
    return ([record["loss"] for record in records if "loss" in record],
            {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record})  # fmt: skip


def check_float64(curves):
    """Every printed digit of every loss."""
    (ours, held_out), (theirs, their_held_out) = (curves["float64", side, 0] for side in SIDES)
    for name, pairs in (
        ("loss", zip(ours, theirs, strict=True)),
        ("evaluation", zip(held_out.values(), their_held_out.values(), strict=True)),
    ):
        for number, pair in enumerate(pairs, 1):
            if len({PRINTED.format(value) for value in pair}) != 1:
                raise Failure(f"float64: {name} {number}: trees {pair[0]!r}, sequence packing {pair[1]!r}, expected equal digits")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def differences(curves, seeds):
    """bfloat16, of held-out losses: {step: (mean difference of trees and packing with one seed, mean difference of two seeds)}."""
    found = {}
    for step in curves["bfloat16", "trees", 0][1]:
        losses = {side: [curves["bfloat16", side, seed][1][step] for seed in range(seeds)] for side in SIDES}
        sides = [abs(ours - theirs) for ours, theirs in zip(*losses.values(), strict=True)]
        found[step] = (
            statistics.mean(sides),
            statistics.mean(abs(one - other) for values in losses.values() for one, other in itertools.combinations(values, 2)),
        )
    return found


def draw(args, scratch):
    scratch = args.runs or scratch
    scratch.mkdir(parents=True, exist_ok=True)
    files = conversations(args, scratch)
    cases = [*itertools.product(["float64"], SIDES, [0]), *itertools.product(["bfloat16"], SIDES, range(args.seeds))]
    curves = {case: losses(args, files, *case, scratch) for case in cases}
    difference = check_float64(curves)
    found = differences(curves, args.seeds)
    side_difference, seed_difference = (statistics.mean(each) for each in zip(*found.values(), strict=True))
    say(f"float64: {args.steps} losses with equal digits, largest relative difference {difference:.1e}; bfloat16: held-out losses of "
        f"trees and packing differ by {side_difference:.1e}, those of two seeds by {seed_difference:.1e}")  # fmt: skip
    if side_difference > seed_difference:
        raise Failure(f"bfloat16: trees and packing differ by {side_difference:.2e}, more than two seeds do: {seed_difference:.2e}")
    rows, series = [], []
    for side in SIDES:
        side_losses = [curves["bfloat16", side, seed][1] for seed in range(args.seeds)]
        points = [(step, statistics.mean(values), min(values), max(values)) for step in found
                  for values in [[one[step] for one in side_losses]]]  # fmt: skip
        series.append(Series(f"float64, {side}", list(curves["float64", side, 0][1].items()), dashed=side != "trees"))
        series.append(Series(f"bfloat16, {side}: mean and range of {args.seeds} seeds", points, joined=False))
    for step, (sides, seeds) in found.items():
        row = {"step": step}
        for dtype, side, seed in cases:
            row[f"{dtype}, {side}, seed {seed}"] = PRINTED.format(curves[dtype, side, seed][1][step])
        rows.append(row | {"bfloat16: difference of trees and packing": sides, "bfloat16: difference of seeds": seeds})
    chart = Chart(f"{Path(args.model).name} on real conversations", "optimiser step", "loss of held-out conversations", series, figure.note(args),
                  from_zero=False)  # fmt: skip
    return figure.Figure("same_training", rows, {"": chart})


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=SMOLLM2,
        metavar="DIR",
        help="model folder with a tokenizer (default: SmolLM2-135M-Instruct)",
    )
    add(
        "--runs", type=Path, metavar="DIR", help="keep the runs there, and use again those that are finished (default: keep none)"
    )
    add(
        "--chats",
        type=Path,
        default=CHATS,
        metavar="FILE",
        help="conversations; the first two are held out (default: %(default)s)",
    )
    add("--max-tokens", type=int, default=512, metavar="N", help="leave out longer turns (default: %(default)s)")
    add("--steps", type=int, metavar="N", help="(default: 50, with --quick 4)")
    add("--eval-every", type=int, metavar="N", help="steps between evaluations (default: 5, with --quick 2)")
    add("--batch-size", type=int, default=6, metavar="N", help="rows of a step, approximately (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-5, metavar="X", help="(default: %(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="of bfloat16, at least 2 (default: %(default)s)")

    def drawn(args, scratch):
        args.steps = args.steps or (4 if args.quick else 50)
        args.eval_every = args.eval_every or (2 if args.quick else 5)
        return draw(args, scratch)

    return figure.main(SCRIPT, parser, drawn, argv)


if __name__ == "__main__":
    sys.exit(main())
