#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step of Espalier against one of Hugging Face Transformers: same machine, weights and trajectories.

A step is forward and backward over all trajectories of a data set, without optimiser. Both sides run in turns, round by
round; figures are medians, and speed-ups medians of each round's ratio. Transformers trains every trajectory by itself,
eager, in the fastest way found (bench/transformers_step.py says how); Espalier runs `bin/espalier bench --tree-only`,
one process per round, one step before the one that counts. Losses must agree, and in float32 gradient norms too,
or the command fails.

With `make build` and `scripts/fetch_smollm2.py` done, and the Python that has torch (.venv/bin/python):

    python bench/compare_transformers.py --quick               a minute or two: does it work here?
    python bench/compare_transformers.py -o table.md           the whole table (hours on two cores)
    python bench/compare_transformers.py --models smollm2 --dtypes float32 --ratios 1,4 --conversations 0 --rounds 2
    python bench/compare_transformers.py --models DIR --ratios none --data rows.jsonl --token-budget 4096

Data sets: random trees at cached-token ratios (flat / tree tokens; 1: unrelated chains of 512 to 1,024 tokens), with
loss on the last part of every trajectory; then conversations of examples/tau_airline_part.jsonl, one trajectory per
assistant turn, where the model has a tokenizer, or the files of --data.

The goal is a speed-up of 1.6 in float32 and 2.5 in bfloat16 where nothing is shared; where trajectories share, that
times the bound FLOPs(flat) / FLOPs(tree), so that it is met where speed-up / bound is at least 1.6 and 2.5.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "bench")]

from commit import commit  # noqa: E402
from model_shapes import SHAPES  # noqa: E402

ESPALIER = REPOSITORY / "bin/espalier"
CHATS = REPOSITORY / "examples/tau_airline_part.jsonl"
SMOLLM2 = REPOSITORY / "data/models/SmolLM2-135M-Instruct"

GOALS = {"float32": 1.6, "bfloat16": 2.5}
# Largest relative difference. float32: rounding alone. bfloat16 rounds every activation, and Transformers also sums the
# gradients of its batches in bfloat16: of losses the check finds wrong data and wrong wiring, norms are only shown.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
GRAD_NORM_TOLERANCE = {"float32": 1e-4}

QUICK = dict(models=["smollm2"], dtypes=["float32"], ratios=[1.0, 4.0], tree_tokens=256, flat_tokens=1024, rounds=1,
             conversations=1, probe_tokens=256, batch_sizes=[1, 2])  # fmt: skip


def stay_on_two_cores():
    """This process and those that it starts. Raises Failure where there is one core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise Failure("expected two cores, received one")
    os.sched_setaffinity(0, cores)


class Failure(Exception):
    """What the user has to know, in one line."""


class DataSet(NamedTuple):
    name: str
    path: Path
    token_budget: int  # of Espalier's micro-batches; 0: the whole forest in one


class Row(NamedTuple):
    """What is known of one model, dtype and data set after all rounds."""

    model: str
    dtype: str
    data: str
    counts: dict  # of espalier bench: flat_tokens, tree_tokens, bound, micro_batches, ...
    batch_size: int
    theirs: list  # seconds per round
    ours: list
    their_loss: float
    our_loss: float
    their_grad_norm: float
    our_grad_norm: float

    @property
    def speedups(self):
        return [theirs / ours for theirs, ours in zip(self.theirs, self.ours)]

    @property
    def share(self):
        return statistics.median(self.speedups) / self.counts["bound"]

    @property
    def is_met(self):
        return self.share >= GOALS[self.dtype]


def say(text):
    print(f"compare: {text}", file=sys.stderr, flush=True)


# ---- Espalier ----------------------------------------------------------------------------------------------


def espalier(*arguments):
    """Standard output of bin/espalier."""
    command = [str(ESPALIER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        message = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Failure(f"{shlex.join(['bin/espalier', *command[1:]])}: {message[-1]}")
    return done.stdout


def espalier_step(model, data_set, dtype, threads):
    """The row of espalier bench for one measured step."""
    out = espalier("bench", "--model", model, "--data", data_set.path, "--dtype", dtype, "--tree-only", "--strategy",
                   "partition" if data_set.token_budget else "tree-packing", "--token-budget", data_set.token_budget,
                   "--repeats", 1, "--warmup", 1, "--threads", threads, "--json")  # fmt: skip
    return json.loads(out)["rows"][0]


# ---- Models and data ---------------------------------------------------------------------------------------


def model_folder(name, scratch):
    if name in SHAPES:
        folder = scratch / name
        if not folder.exists():
            (scratch / f"{name}.json").write_text(json.dumps(SHAPES[name]))
            espalier("init", "--config", scratch / f"{name}.json", "--out", folder, "--seed", 0)
        return folder
    folder = SMOLLM2 if name == "smollm2" else Path(name)
    if not (folder / "config.json").is_file():
        how = "; scripts/fetch_smollm2.py fetches it" if name == "smollm2" else ""
        raise Failure(f"--models {name}: {folder} is not a Hugging Face model folder{how}")
    return folder


def chains(tree_tokens, vocab_size, seed):
    """Unrelated trajectories of 2/3 to 4/3 of the mean length, which is about 768 tokens where there are so many."""
    rng = random.Random(seed)
    count = max(2, round(tree_tokens / 768))
    mean = tree_tokens // count
    lengths = [rng.randint(mean * 2 // 3, mean * 4 // 3) for _ in range(count)]
    # Their first tokens differ, so nothing is shared.
    return [[first] + [rng.randrange(vocab_size) for _ in range(length - 1)]
            for first, length in zip(rng.sample(range(vocab_size), count), lengths)]  # fmt: skip


# Mean; with shorter nodes lengths are too coarse to reach a given ratio.
MIN_NODE_TOKENS = 8


def tree(ratio, tree_tokens, vocab_size, seed, path):
    """Trajectories of one random tree of three levels, as of agent rollouts, while its nodes have 16 tokens on average;
    beyond that one prompt with many responses."""
    from transformers_step import read_trajectories

    # Three levels with b children each reach 2 b^2 / (1 + b), two reach b; a quarter more leaves room for the leaves.
    depth, branching = 3, int(0.75 * ratio) + 2
    nodes = 1 + branching + branching**2
    if nodes * 16 > tree_tokens:
        depth, branching = 2, int(2 * ratio) + 1
        nodes = 1 + branching
    espalier("synth", "-o", path, "--depth", depth, "--branching", branching, "--vocab-size", vocab_size,
             "--node-length", max(MIN_NODE_TOKENS, tree_tokens // nodes), "--target-cached-token-ratio", ratio, "--seed", seed)  # fmt: skip
    return [trajectory.ids for trajectory in read_trajectories(path)]


def random_data_set(ratio, args, vocab_size, folder):
    path = folder / f"ratio_{ratio:g}.jsonl"
    tree_tokens = min(args.tree_tokens, int(args.flat_tokens / ratio))
    if ratio <= 1:
        sequences = chains(tree_tokens, vocab_size, args.seed)
    else:
        sequences = tree(ratio, tree_tokens, vocab_size, args.seed, path)
    with open(path, "w") as file:
        for ids in sequences:
            trained = max(1, int(args.loss_rate * len(ids)))
            row = {"input_ids": ids, "loss_mask": [0] * (len(ids) - trained) + [1] * trained}
            file.write(json.dumps(row) + "\n")
    return DataSet(f"ratio {ratio:g}", path, 0)


def data_sets(args, name, model, scratch):
    folder = Path(tempfile.mkdtemp(dir=scratch))
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    sets = [random_data_set(ratio, args, vocab_size, folder) for ratio in args.ratios]
    sets += [DataSet(path.name, path, args.token_budget) for path in args.data]
    if args.data or args.conversations == 0:
        return sets
    if not (model / "tokenizer.json").is_file():
        say(f"{name} has no tokenizer, so no conversations are measured on it")
        return sets
    path = folder / "conversations.jsonl"
    espalier("prepare", "--model", model, "--per-turn", "--max-tokens", args.max_tokens, "--limit", args.conversations,
             CHATS, "-o", path)  # fmt: skip
    return [*sets, DataSet(f"turns of {args.conversations} conversation{'s' * (args.conversations != 1)}", path, args.token_budget)]


# ---- Measuring ---------------------------------------------------------------------------------------------


def check_agreement(where, what, theirs, ours, tolerance):
    difference = abs(theirs - ours) / max(abs(theirs), abs(ours), sys.float_info.min)
    if not difference <= tolerance:
        raise Failure(f"{where}: the {what} of the two sides differ: Transformers {theirs:.8g}, Espalier {ours:.8g}, "
                      f"relative difference {difference:.2g}, expected at most {tolerance:g}")  # fmt: skip


def trajectories_of(path):
    from transformers_step import read_trajectories

    try:
        trajectories = read_trajectories(path)
    except (KeyError, TypeError, ValueError) as error:
        raise Failure(f"{path}: expected rows as in docs/data-format.md, received {error!r}; `bin/espalier inspect --data` "
                      "says where") from error  # fmt: skip
    if not any(weight > 0 for trajectory in trajectories for weight in trajectory.weights[1:]):
        raise Failure(f"{path}: no token carries loss")
    return trajectories


def measure(args, name, folder, dtype, side, data_set):
    """All rounds of one data set."""
    from transformers_step import make_batches

    where = f"{name}, {dtype}, {data_set.name}"
    trajectories = trajectories_of(data_set.path)
    batch_size = side.choose_batch_size(trajectories, args.batch_sizes, args.probe_tokens, args.max_batch_tokens,
                                        lambda text: say(f"{where}: {text}"))  # fmt: skip
    batches = make_batches(trajectories, batch_size)
    theirs, ours = [], []
    for round_index in range(args.rounds):
        # Who goes first alternates, so that what drifts over the run favours neither side.
        for is_ours in ((True, False) if round_index % 2 == 0 else (False, True)):
            if is_ours:
                counts = espalier_step(folder, data_set, dtype, args.threads)
                ours.append(counts["tree_seconds"])
            else:
                step = side.step(batches)
                theirs.append(step.seconds)
        row = Row(name, dtype, data_set.name, counts, batch_size, theirs, ours, step.loss, counts["loss"],
                  side.grad_norm(), counts["grad_norm"])  # fmt: skip
        check_agreement(where, "losses", row.their_loss, row.our_loss, LOSS_TOLERANCE[dtype])
        if dtype in GRAD_NORM_TOLERANCE:
            check_agreement(where, "gradient norms", row.their_grad_norm, row.our_grad_norm, GRAD_NORM_TOLERANCE[dtype])
        say(f"{where}: round {round_index + 1}: Transformers {theirs[-1]:.3f} s, Espalier {ours[-1]:.3f} s "
            f"({row.speedups[-1]:.2f}x, bound {counts['bound']:.2f}); loss {step.loss:.6f}, {counts['loss']:.6f}")  # fmt: skip
    return row


def measure_all(args, scratch):
    import torch

    from transformers_step import TransformersSide, reuse_freed_memory

    torch.set_num_threads(args.threads)
    if not args.default_allocator:
        reuse_freed_memory()
    rows = []
    for name in args.models:
        folder = model_folder(name, scratch)
        sets = data_sets(args, name, folder, scratch)
        has_experts = any("experts" in key for key in json.loads((folder / "config.json").read_text()))
        for dtype in args.dtypes:
            for experts in args.experts if has_experts else [None]:
                side = TransformersSide(folder, dtype, experts)
                title = Path(name).name + (f", {experts} experts" if experts else "")
                rows += [measure(args, title, folder, dtype, side, data_set) for data_set in sets]
    return rows


# ---- The report --------------------------------------------------------------------------------------------


def markdown(columns, rows):
    """columns: header -> text of a row; text is left-aligned where the header ends in a space."""
    lines = ["| " + " | ".join(header.strip() for header in columns) + " |",
             "|" + "|".join("---" if header.endswith(" ") else "---:" for header in columns) + "|"]  # fmt: skip
    lines += ["| " + " | ".join(text(row) for text in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def publish(conditions, columns, rows, out):
    """Prints a table under the machine, the commit, the conditions and the command; writes it to the file `out` too, unless None."""
    command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = f"{cpu_name()}. Commit {commit()}. {conditions}:\n\n    {command}\n\n{markdown(columns, rows)}"
    if out:
        out.write_text(text)
    print(text, end="")


def relative_difference(a, b):
    return f"{abs(a - b) / max(abs(a), abs(b)):.1e}"


WHICH = {"model ": lambda row: row.model, "dtype ": lambda row: row.dtype, "data ": lambda row: row.data}
TIMES = WHICH | {
    "flat tokens": lambda row: f"{row.counts['flat_tokens']:,}",
    "tree tokens": lambda row: f"{row.counts['tree_tokens']:,}",
    "flat / tree": lambda row: f"{row.counts['cached_token_ratio']:.2f}",
    "Transformers s": lambda row: f"{statistics.median(row.theirs):.3f}",
    "Espalier s": lambda row: f"{statistics.median(row.ours):.3f}",
    "Transformers tokens/s": lambda row: f"{row.counts['flat_tokens'] / statistics.median(row.theirs):,.0f}",
    "Espalier tokens/s": lambda row: f"{row.counts['flat_tokens'] / statistics.median(row.ours):,.0f}",
    "speed-up": lambda row: f"{statistics.median(row.speedups):.2f}",
    "low .. high": lambda row: f"{min(row.speedups):.2f} .. {max(row.speedups):.2f}",
    "bound": lambda row: f"{row.counts['bound']:.2f}",
    "speed-up / bound": lambda row: f"{row.share:.2f}",
    "goal": lambda row: f"{GOALS[row.dtype]:.1f}",
    "met ": lambda row: "yes" if row.is_met else "no",
}
AGREEMENT = WHICH | {
    "batch size": lambda row: str(row.batch_size),
    "micro-batches": lambda row: str(row.counts["micro_batches"]),
    "loss, Transformers": lambda row: f"{row.their_loss:.6f}",
    "loss, Espalier": lambda row: f"{row.our_loss:.6f}",
    "relative difference": lambda row: relative_difference(row.their_loss, row.our_loss),
    "gradient norm, Transformers": lambda row: f"{row.their_grad_norm:.5g}",
    "gradient norm, Espalier": lambda row: f"{row.our_grad_norm:.5g}",
    "relative difference of norms": lambda row: relative_difference(row.their_grad_norm, row.our_grad_norm),
}


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def report(args, rows, command):
    import torch
    import transformers

    allocator = "with the allocator's defaults" if args.default_allocator else "freed memory kept, as on the other side"
    versions = f"torch {torch.__version__}, Transformers {transformers.__version__}"
    goals = " and ".join(f"{goal} in {dtype}" for dtype, goal in GOALS.items())
    met = sum(row.is_met for row in rows)
    return f"""\
{cpu_name()}, {args.threads} threads. Commit {commit()}, {versions}. One run:

    {command}

A step is forward and backward over all trajectories, without optimiser; {args.rounds} rounds in turns, medians.
Transformers: eager, sdpa, every trajectory by itself in batches of the fastest size found, logits only where loss is,
{allocator}. Random trees have loss on the last part of every trajectory, {args.loss_rate:.0%} of it.
Tokens/s are flat tokens on both sides. Bound: FLOPs(flat) / FLOPs(tree).

{markdown(TIMES, rows)}
The goal (speed-up / bound of {goals}) is met in {met} of {len(rows)} rows.

{markdown(AGREEMENT, rows)}"""


# ---- Command line ------------------------------------------------------------------------------------------


def list_of(kind):
    return lambda text: [kind(item) for item in text.split(",") if item and item != "none"]


def choice_of(*choices):
    def parse(text):
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(choices)}, received {text}")
        return text

    return parse


def at_least(low, kind=int):
    def parse(text):
        value = kind(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"expected at least {low}, received {text}")
        return value

    return parse


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="compare_transformers.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--models", type=list_of(str), default="smollm2,qwen3", metavar="LIST",
        help=f"smollm2, {', '.join(SHAPES)} (random weights) and Hugging Face folders (default: %(default)s)")
    add("--dtypes", type=list_of(choice_of(*GOALS)), default="float32,bfloat16", metavar="LIST",
        help="of weights and activations (default: %(default)s)")
    add("--experts", type=list_of(choice_of("eager", "grouped_mm")), default="eager,grouped_mm", metavar="LIST",
        help="how Transformers computes a mixture of experts (default: %(default)s)")
    add("--ratios", type=list_of(at_least(1, float)), default="1,4,16,64", metavar="LIST",
        help="cached-token ratios of the random trees, or none (default: %(default)s)")
    add("--tree-tokens", type=at_least(16), default=3072, metavar="N", help="tokens of a random tree (default: %(default)s)")
    add("--flat-tokens", type=at_least(16), default=32768, metavar="N",
        help="flat tokens to stay near: at large ratios trees are made smaller, down to nodes of 8 tokens (default: %(default)s)")
    add("--loss-rate", type=float, default=0.25, metavar="X",
        help="last part of every random trajectory that carries loss, as in espalier bench; 1: all (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the random trees (default: %(default)s)")
    add("--conversations", type=at_least(0), default=4, metavar="N",
        help="so many of examples/tau_airline_part.jsonl, per assistant turn; 0: none (default: %(default)s)")
    add("--max-tokens", type=at_least(1), default=1520, metavar="N", help="leave out longer turns (default: %(default)s)")
    add("--data", type=Path, action="append", default=[], metavar="FILE",
        help="rows of `espalier prepare`, instead of the conversations; may be given again")
    add("--token-budget", type=at_least(0), default=4096, metavar="N",
        help="conversations and --data: most tokens in a micro-batch of Espalier, by strategy partition; 0: everything "
        "in one micro-batch, as random trees always are (default: %(default)s)")
    add("--rounds", type=at_least(1), default=3, metavar="N", help="measured rounds (default: %(default)s)")
    add("--threads", type=at_least(0), default=0, metavar="N", help="CPU threads of both sides (0: all cores)")
    add("--batch-sizes", type=list_of(at_least(1)), default="1,2,4,8,16,32", metavar="LIST",
        help="of Transformers: the fastest is taken (default: %(default)s)")
    add("--probe-tokens", type=at_least(1), default=2048, metavar="N",
        help="tokens to measure each batch size on, at least one batch (default: %(default)s)")
    add("--max-batch-tokens", type=at_least(1), default=8192, metavar="N",
        help="memory: larger batches are not tried (default: %(default)s)")
    add("--default-allocator", action="store_true",
        help="leave the allocator on the side of Transformers as it is; else freed memory stays in the process, as in Espalier")
    add("--quick", action="store_true", help="a small run, to see that it works; other flags still count")
    add("-o", "--out", type=Path, metavar="FILE", help="write the table (Markdown) to this file too")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if not 0 < args.loss_rate <= 1:
        parser.error(f"--loss-rate: expected a part in (0, 1], received {args.loss_rate}")
    for flag in ("models", "dtypes", "experts", "batch_sizes"):
        if not getattr(args, flag):
            parser.error(f"--{flag.replace('_', '-')}: expected a list, received nothing")
    if not args.threads:
        args.threads = os.cpu_count() if not hasattr(os, "sched_getaffinity") else len(os.sched_getaffinity(0))
    return args


def check_installation():
    if not ESPALIER.exists():
        raise Failure("bin/espalier is not there: `make build` makes it")
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise Failure(f"{error.name} cannot be imported by {sys.executable}: `make setup` makes .venv, whose Python "
                      "has it") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main(argv=None):
    args = parse_arguments(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        check_installation()
        for path in args.data:
            if not path.is_file():
                raise Failure(f"--data {path}: expected a file of rows")
        with tempfile.TemporaryDirectory(prefix="espalier-compare-") as scratch:
            rows = measure_all(args, Path(scratch))
    except Failure as failure:
        say(str(failure))
        return 1
    command = shlex.join(["python", "bench/compare_transformers.py", *(sys.argv[1:] if argv is None else map(str, argv))])
    text = report(args, rows, command)
    if args.out:
        args.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
