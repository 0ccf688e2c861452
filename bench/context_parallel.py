#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One micro-batch on two and four processes that have parts of it, against one process, each with one thread.

Small random models of Transformers and one tree for each step: a long conversation, or a prompt with many answers. Sides run in
turns, round by round, each in new processes, on the same two cores, which four processes share: more than 2 is not possible.
Seconds are of the second step of a process, by the slowest: elapsed, and of the CPU, which do not count waiting for other ranks.
Figures are medians of the rounds, speeds medians of each round's ratio. Sums of losses must agree, or the command fails. Bytes of keys, values, states and their gradients go over Gloo.

    python bench/context_parallel.py -o table.md

With --link two processes train through a link of so many megabits per second, which both directions share: the loopback of a new
network namespace, limited by `tc` (Linux, where `unshare -rn` is allowed). Sides are keys sent in one transfer, before attention, and
in groups of heads, of which attention computes one while the next are on their way.

    python bench/context_parallel.py --link 400 --tokens 8192 -o link.md

`least` is what ranks have to send at least: keys and values of each token once to every other rank that sees it, and their
gradients; `all to all` is that of every token to every rank.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from compare_transformers import Failure, publish, stay_on_two_cores
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import espalier
from espalier.distributed import Ranks
from espalier.hf import exchange

TOLERANCE = 1e-4  # of losses in float32, relative
SIDES = (1, 2, 4)  # processes
COMMON = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
              vocab_size=1024)  # fmt: skip
MODELS = {
    "qwen3": COMMON,
    "qwen3_5_text": COMMON | dict(linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
                                  layer_types=["linear_attention", "full_attention"] * 2),
}  # fmt: skip
HEADER = ["model", "tree", "tokens", "processes", "elapsed, s", "speed", "of the CPU, s", "speed by it", "low .. high", "imbalance",
          "sent, MB", "over the least", "of all to all"]  # fmt: skip
LINK_HEADER = ["tokens", "link, Mbit/s", "sent, MB", "of the CPU, s", "one transfer, s", "groups of heads, s", "speed-up", "low .. high"]
LINK = "ESPALIER_BENCH_LINK"  # in the environment of the program that runs behind the link


def trees(scale):
    """Rows by name."""
    rng = random.Random(1)
    tokens = lambda count: [rng.randrange(COMMON["vocab_size"]) for _ in range(count)]
    prompt = tokens(scale // 4)
    return {"a conversation": [tokens(scale)], "a prompt, 12 answers": [prompt + tokens(scale // 16) for _ in range(12)]}


def run_rank(rank, size, folder, kind, rows):
    """Writes what one process has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(1)
    model = espalier.hf.patch(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).train())
    ranks = Ranks(DistributedDataParallel(model), dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp")))
    share = ranks.share(rows)
    run = espalier.Step(model, espalier.plan(share.forest, token_budget=10**6, strategy="tree-packing"))
    for _ in range(2):
        model.zero_grad()
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        with ranks.step(share, run) as step:
            for batch in step:
                loss = -run.logprobs(batch).sum() / run.num_terms
                run.backward(loss)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    found = {"seconds": seconds, "cpu": cpu_seconds, "loss": ranks.sum(loss.item()), "imbalance": step.report.parts_imbalance or 0.0,
             "sent": sum(step.report.sent_bytes or [0]), "rows": rows_of(run, ranks)}  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def rows_of(run, ranks):
    """How many keys a layer has to send in all."""
    if ranks.dimensions.context is None:
        return 0
    division = run._divided_over(ranks.dimensions.context).division
    layout, count = division.plan.layout(0), 0
    for rank in range(ranks.size):
        own = division.tokens(0, rank)
        is_seen = np.zeros(layout.num_tokens, bool)
        for token in own:
            while token >= 0 and not is_seen[token]:
                is_seen[token] = True
                token = layout.prev[token]
        count += int(is_seen.sum()) - len(own)
    return count


def run_side(size, kind, rows):
    """What its processes have found; the slowest counts."""
    with tempfile.TemporaryDirectory(prefix="espalier-context-parallel-") as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                run_rank(rank, size, Path(folder), kind, rows)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise Failure(f"one of {size} processes has failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return found[0] | {name: max(each[name] for each in found) for name in ("seconds", "cpu")}


def check_losses(losses):
    if max(losses) - min(losses) > TOLERANCE * max(losses):
        raise Failure(f"losses {losses}: they differ by more than {TOLERANCE}")


def measure(kind, name, rows, rounds):
    """Lines of the table."""
    found = []
    for number in range(rounds):
        found.append({size: run_side(size, kind, rows) for size in (SIDES if number % 2 == 0 else reversed(SIDES))})
        check_losses([side["loss"] for side in found[-1].values()])
        print(f"context_parallel: {kind}, {name}: {[round(found[-1][size]['cpu'], 2) for size in SIDES]} s", file=sys.stderr)
    tokens = espalier.build(rows).tree_tokens
    return [line(kind, name, tokens, size, found) for size in SIDES]


def line(kind, name, tokens, size, found):
    sides = [each[size] for each in found]
    elapsed, ratios = ([each[1][name] / each[size][name] for each in found] for name in ("seconds", "cpu"))
    layers = MODELS[kind].get("layer_types", ["full_attention"] * COMMON["num_hidden_layers"]).count("full_attention")
    row = 2 * 2 * 4 * layers * COMMON["num_key_value_heads"] * COMMON["head_dim"]  # keys, values; forwards, backwards; float32
    least, sent = row * sides[0]["rows"], sides[0]["sent"]
    return [kind, name, f"{tokens:,}", str(size), f"{statistics.median(side['seconds'] for side in sides):.2f}",
            f"{statistics.median(elapsed):.2f}", f"{statistics.median(side['cpu'] for side in sides):.2f}",
            f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} .. {max(ratios):.2f}", f"{sides[0]['imbalance']:.1%}",
            f"{sent / 1e6:.1f}", f"{sent / least - 1:.1%}" if least else "",
            f"{sent / (row * tokens * (size - 1)):.0%}" if size > 1 else ""]  # fmt: skip


def measure_link(rows, rounds, link):
    """Lines of the table of --link."""
    found = {groups: [] for groups in (1, exchange.MOST_GROUPS)}
    for number in range(rounds):
        for groups in found if number % 2 == 0 else reversed(found):
            exchange.MOST_GROUPS = groups  # of the processes, which are forked
            found[groups].append(run_side(2, "qwen3", rows))
        print(f"context_parallel: {[round(sides[-1]['seconds'], 2) for sides in found.values()]} s", file=sys.stderr)
    one, several = found.values()
    check_losses([side["loss"] for side in [*one, *several]])
    ratios = [before["seconds"] / after["seconds"] for before, after in zip(one, several)]
    seconds = [statistics.median(side["seconds"] for side in sides) for sides in found.values()]
    cpu = statistics.median(side["cpu"] for side in several)
    return [[f"{espalier.build(rows).tree_tokens:,}", f"{link or 'not limited'}", f"{one[0]['sent'] / 1e6:.1f}", f"{cpu:.2f}",
             *(f"{each:.2f}" for each in seconds), f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} .. {max(ratios):.2f}"]]


def behind_link(link):
    """Starts this program again where the loopback is so slow."""
    limited = "ip link set lo up && tc qdisc add dev lo root tbf rate $0mbit burst 128kb latency 2s && exec \"$@\""
    os.environ[LINK] = str(link)
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", limited, str(link), sys.executable, *sys.argv])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the conversation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--link", type=int, metavar="MBIT", help="two processes through a link of so many megabits per second; 0: not limited")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args()
    if args.link and os.environ.get(LINK) != str(args.link):
        behind_link(args.link)
    header = HEADER if args.link is None else LINK_HEADER
    try:
        stay_on_two_cores()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        sets = trees(args.tokens)
        lines = measure_link(sets["a conversation"], args.rounds, args.link) if args.link is not None else [
            line for kind in MODELS for name, rows in sets.items() for line in measure(kind, name, rows, args.rounds)]  # fmt: skip
    except Failure as failure:
        print(f"context_parallel: {failure}", file=sys.stderr)
        return 1
    columns = {name: lambda row, place=place: row[place] for place, name in enumerate(header)}
    publish(f"One run, {args.rounds} rounds", columns, lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
