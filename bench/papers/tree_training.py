#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of "Tree Training" (Kuaishou, 2025, arXiv 2511.00413): speed-up by the overlap ratio, and memory.

    python bench/papers/tree_training.py

The overlap ratio is 1 - tree / flat tokens. Leaves and flat tokens stay the same over the sweep. Four sides run in turns through
`espalier bench --strategies`: the whole tree in one micro-batch, and with micro-batches of a quarter of it partition, which repeats
nothing, tree packing, which repeats cut prefixes as theirs does, and sequence packing, the base. No trajectory of these trees
extends another, so append-only merging is sequence packing there; on the turns of real conversations it is measured beside them.
Memory is tensor memory at the peak beyond weights and gradients: a small step stays below what its gradients take later. Beside it
stand the longest trajectory by itself, and partition in pieces of as many tokens as that has.

How near tree packing is to the exact optimum: bench/plan_quality.cpp, bench/results/tree_packing_quality_2026-11-21.md.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import espalier as package
from compare_transformers import espalier
from papers import figure, measure, workloads
from papers.drawing import Chart, Series

SCRIPT = "tree_training.py"
OVERLAPS, QUICK_OVERLAPS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.88), (0.5, 0.8)
SIDES = {
    "whole tree": "whole tree, ideal",
    "partition": "partition, a quarter of the tree at a time",
    "tree packing": "tree packing, the same budget",
}
# Qwen3-8B and 32B; the text gives the largest speed-ups, and an overlap of 0.92 as the largest.
PUBLISHED = {"published, whole tree (at most 5.7)": [(0.92, 5.7)], "published, tree packing (4.5 to 5.3)": [(0.92, 4.9, 4.5, 5.3)]}
MIB = 1 << 20


def bench(args, model, data, *more):
    out = espalier("bench", "--model", model, "--data", data, "--threads", args.threads, "--repeats", args.rounds, "--json",
                   *["--cpu-seconds"] * args.cpu_seconds, *more)  # fmt: skip
    return json.loads(out)["rows"]


def path_memory(args, model, rows, data, scratch):
    """Bytes of the longest trajectory by itself, and of the tree in pieces of as many tokens."""
    longest = max(rows, key=lambda row: len(row["input_ids"]))
    path = scratch / "longest.jsonl"
    path.write_text(json.dumps(longest) + "\n")
    pieces = ["--strategy", "partition", "--token-budget", len(longest["input_ids"])]
    return [bench(args, model, each, "--tree-only", *more)[0]["working_bytes"] for each, more in ((path, []), (data, pieces))]


def sweep(args, model, overlap, scratch):
    """A row for each side."""
    path = scratch / f"overlap_{overlap}.jsonl"
    rows = workloads.tree_of_overlap(overlap, args.flat_tokens, workloads.SMALL["qwen3"]["vocab_size"], path)
    append_only_tokens = package.build(rows).statistics()["append_only_tokens"]
    one_path, pieces = path_memory(args, model, rows, path, scratch)
    for side in bench(args, model, path, "--strategies"):
        yield {"data": "random tree", "overlap": side["por"], "side": side["side"], "token_budget": side["token_budget"],
               "flat_tokens": side["flat_tokens"], "append_only_tokens": append_only_tokens,
               "tree_tokens": side["tree_tokens"], "encoded_tokens": side["encoded_tokens"], "seconds": side["seconds"],
               "speed_up": side["speedup"], "low": side["speedup_low"], "high": side["speedup_high"], "bound": side["bound"],
               "memory_mib": side["working_bytes"] / MIB, "one_path_mib": one_path / MIB, "pieces_mib": pieces / MIB}  # fmt: skip


def conversations(args, model):
    """A row for each side: trees, append-only merging and packing of the turns of real conversations."""
    vocab_size = workloads.SMALL["qwen3"]["vocab_size"]
    rows = workloads.conversation_turns(args.conversations, vocab_size, args.most_tokens)
    flat = sum(len(row["input_ids"]) for row in rows)
    sides, append_only_tokens = measure.sides_of(rows, 4096)
    measure.run(sides, measure.Setting(model, "sft", args.rounds, args.threads, cpu_seconds=args.cpu_seconds))
    tree = sides[0].metrics["tree_tokens"]
    for side in sides:
        yield {"data": "turns of airline conversations", "overlap": 1 - tree / flat, "side": side.name,
               "token_budget": side.token_budget, "flat_tokens": flat,
               "append_only_tokens": append_only_tokens, "tree_tokens": tree,
               "encoded_tokens": side.metrics["encoded_tokens"], "seconds": statistics.median(side.seconds),
               **measure.compared(side, sides[-1]), "memory_mib": "", "one_path_mib": "", "pieces_mib": ""}  # fmt: skip


def draw(args, scratch):
    args.flat_tokens = args.flat_tokens or (1600 if args.quick else 12800)
    args.most_tokens = args.most_tokens or (1600 if args.quick else 2600)
    model = workloads.model_folder(workloads.SMALL["qwen3"], "qwen3", scratch)
    overlaps = QUICK_OVERLAPS if args.quick else OVERLAPS
    random = [row for overlap in overlaps for row in sweep(args, model, overlap, scratch)]
    turns = list(conversations(args, model)) if args.conversations else []
    rows_of = lambda side: [row for row in random if row["side"] == side]
    bars = lambda rows: [(row["overlap"], row["speed_up"], row["low"], row["high"]) for row in rows]
    speed = [Series(name, bars(rows_of(side))) for side, name in SIDES.items()]
    speed.append(
        Series("bound by FLOPs of the whole tree", [(row["overlap"], row["bound"]) for row in rows_of("whole tree")], dashed=True)
    )
    speed += [Series(f"airline conversations: {row['side']}", bars([row]), joined=False) for row in turns[:-1]]
    speed += [Series(name, points, joined=False) for name, points in PUBLISHED.items()]
    memory = [Series(side, [(row["overlap"], row["memory_mib"]) for row in rows_of(side)]) for side in SIDES]
    memory += [Series(name, [(row["overlap"], row[column]) for row in rows_of("partition")])
               for name, column in (("partition in pieces as long as the longest trajectory", "pieces_mib"),
                                    ("the longest trajectory by itself", "one_path_mib"))]  # fmt: skip
    x, note = "overlap: 1 - tree tokens / flat tokens", figure.note(args)
    return figure.Figure("tree_training", [*random, *turns], {
        "": Chart("Tree Training: speed-up of a step over sequence packing", x, "times as fast", speed, note),
        "_memory": Chart("Tree Training: memory of activations and context", x, "MiB beyond weights and gradients", memory,
                         note)})  # fmt: skip


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    add = parser.add_argument
    add("--flat-tokens", type=int, help="of every tree, about (default: 12,800)")
    add(
        "--conversations",
        type=int,
        default=2,
        help="so many of examples/tau_airline_part.jsonl, turn by turn (default: %(default)s; 0: none)",
    )
    add("--most-tokens", type=int, help="leave out longer turns (default: 2,600)")
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
