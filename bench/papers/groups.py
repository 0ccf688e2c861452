# SPDX-License-Identifier: Apache-2.0
"""Groups of nine answers to a long prompt by GRPO, at the lengths of "Speeding up LLM RL training by 7.5x on long-prompt,
short-response tasks" (castform, 2026), for any model."""

import statistics

from . import figure, measure, workloads
from .drawing import Chart, Series

ANSWERS, DIVISOR, QUICK_DIVISOR = 9, 16, 64
# prompt, answer -> how many times as fast theirs is: steps of Qwen3.5-4B on four A100, end to end
PUBLISHED = {(16384, 64): 7.5, (16384, 128): 7.3, (16384, 1024): 5.4, (8192, 4096): 1.7}


def lengths_of(args):
    """Published lengths -> those of this run."""
    divisor = 1 if args.full else args.divisor or (QUICK_DIVISOR if args.quick else DIVISOR)
    grid = list(PUBLISHED)[:2] if args.quick else PUBLISHED
    return {(prompt, answer): (prompt // divisor, max(1, answer // divisor)) for prompt, answer in grid}


def measured(args, name, scratch):
    """A row for each pair of lengths."""
    shape = (workloads.FULL if args.full else workloads.SMALL)[name]
    setting = measure.Setting(
        workloads.model_folder(shape, name, scratch), "grpo", args.rounds, args.threads, args.device, args.dtype, args.cpu_seconds
    )
    for published, (prompt, answer) in lengths_of(args).items():
        rows = workloads.group(prompt, answer, ANSWERS, shape["vocab_size"])
        sides, append_only_tokens = measure.sides_of(rows, prompt + ANSWERS * answer)
        measure.run(sides, setting)
        tree, packing = sides[0], sides[-1]
        flat = sum(len(row["input_ids"]) for row in rows)
        yield {"model": name, "published_prompt": published[0], "published_answer": published[1], "prompt": prompt,
               "answer": answer,
               "answers": ANSWERS, "flat_tokens": flat, "append_only_tokens": append_only_tokens,
               "tree_tokens": tree.metrics["tree_tokens"], "ratio": flat / tree.metrics["tree_tokens"],
               "tree_seconds": statistics.median(tree.seconds),
               "packing_seconds": statistics.median(packing.seconds), **measure.compared(tree, packing),
               "published": PUBLISHED[published]}  # fmt: skip


def draw(args, scratch, names, title, ours):
    """A figure of the models `names`; `ours`: the name of its files."""
    rows = [row for name in names for row in measured(args, name, scratch)]
    grid = list(lengths_of(args))
    place = {lengths: number for number, lengths in enumerate(grid)}
    at = lambda row: place[row["published_prompt"], row["published_answer"]]
    series = []
    for name in names:
        own = [row for row in rows if row["model"] == name]
        series += [Series(f"measured here: {name}", [(at(row), row["speed_up"], row["low"], row["high"]) for row in own]),
                   Series(f"bound by FLOPs: {name}", [(at(row), row["bound"]) for row in own], dashed=True)]  # fmt: skip
    series.append(Series("published: Qwen3.5-4B on A100", [(place[lengths], PUBLISHED[lengths]) for lengths in grid], joined=False))
    scale = "" if args.full else f"; here 1/{16384 // next(iter(lengths_of(args).values()))[0]} of these"
    chart = Chart(title, f"tokens of the prompt / of each of nine answers{scale}", "times as fast as sequence packing", series,
                  figure.note(args), ticks=[(place[each], f"{each[0]:,} / {each[1]:,}") for each in grid])  # fmt: skip
    return figure.Figure(ours, rows, {"": chart})
