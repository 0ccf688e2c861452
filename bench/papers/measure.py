# SPDX-License-Identifier: Apache-2.0
"""Steps of `espalier.Engine` by several strategies, in turns, and what their FLOPs allow."""

import statistics
import time
from dataclasses import dataclass, field

import espalier
from compare_transformers import Failure
from gpu_measure import say

# float32; in bfloat16 sums of rounded terms differ more, and the check finds wrong data and wrong wiring.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Setting:
    """What all sides of a comparison share."""

    model: object  # a folder
    objective: str = "sft"
    rounds: int = 3
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    cpu_seconds: bool = False


@dataclass
class Side:
    name: str
    strategy: str
    token_budget: int
    rows: list
    seconds: list = field(default_factory=list)
    metrics: dict = field(default_factory=dict)
    flops: float = 0


def sides_of(rows, token_budget):
    """The tree in one micro-batch of at most so many tokens, append-only merging unless no row extends another, and all rows;
    and the tokens that are left after merging."""
    longest = max(token_budget, *(len(row["input_ids"]) for row in rows))
    sides = [Side(name, strategy, longest, rows) for name, strategy in
             (("tree", "tree-packing"), ("append-only merging", "append-only"), ("sequence packing", "sequence-packing"))]  # fmt: skip
    statistics = espalier.build(rows).statistics()
    if statistics["append_only_tokens"] == statistics["flat_tokens"]:
        del sides[1]
    return sides, statistics["append_only_tokens"]


def flops_of(side, model):
    masks = [row.get("loss_weights", row.get("loss_mask")) for row in side.rows]
    plan = espalier.plan(espalier.build(side.rows), token_budget=side.token_budget, strategy=side.strategy, model=model,
                         loss_mask=[[int(weight > 0) for weight in mask] for mask in masks])  # fmt: skip
    return plan.flops


def run(sides, setting):
    """Measures all sides, round by round; the order is turned round after each, so that drift favours none."""
    engines, data = {}, {}
    clock = time.process_time if setting.cpu_seconds else time.perf_counter
    for side in sides:
        plan = {"strategy": side.strategy, "token_budget": side.token_budget, "checkpoint_activations": "none"}
        machine = {"dtype": setting.dtype, "device": setting.device, "threads": setting.threads}
        engines[side.name] = espalier.Engine(setting.model, **plan, **machine)
        data[side.name] = espalier.trajectories(side.rows)
        side.flops = flops_of(side, setting.model)
        # The first step of a process waits for memory that later ones have: the tree, the smallest side, takes it beforehand.
        warm = {} if side is sides[0] else {"indices": [0]}
        engines[side.name].forward_backward(data[side.name], setting.objective, **warm)
    for index in range(setting.rounds):
        for side in sides if index % 2 == 0 else reversed(sides):
            engine = engines[side.name]
            engine.zero_gradients()
            begin = clock()
            side.metrics = engine.forward_backward(data[side.name], setting.objective)
            side.seconds.append(clock() - begin)
        say(f"round {index + 1}: " + ", ".join(f"{side.name} {side.seconds[-1]:.3f} s" for side in sides))
    check_agreement(sides, TOLERANCE[setting.dtype])


def check_agreement(sides, tolerance):
    first = sides[0].metrics
    for side in sides[1:]:
        for name in ("loss", "grad_norm"):
            ours, theirs = first[name], side.metrics[name]
            if not abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs), 1e-3):
                raise Failure(f"{name}: {sides[0].name} {ours:.8g}, {side.name} {theirs:.8g}, expected equal to {tolerance:g}")


def compared(side, base):
    """Speed-up of a side over another: the median of the rounds' ratios, the lowest and highest, and what FLOPs allow."""
    ratios = [slow / fast for slow, fast in zip(base.seconds, side.seconds, strict=True)]
    return {"speed_up": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "bound": base.flops / side.flops}
