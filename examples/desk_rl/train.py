#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An agent that learns: GRPO on its own branching rollouts, from a small model that a poor teacher taught.

    python examples/desk_rl/train.py                                        a minute or two on two cores
    python examples/desk_rl/train.py --seed 2 --out runs/desk/seed-2.jsonl  another question set, model and luck
    python examples/desk_rl/curve.py runs/desk/*.jsonl -o curve.svg         the picture of several runs

The environment is desk.py: conversations of six turns with tools. A small decoder with random weights first imitates a
teacher who makes mistakes (SFT). Then, in each iteration, the model answers --questions questions. It branches at turns: of
every question --branches 4 2 2 makes 4 first turns, 2 second ones after each, and 2 third ones after each of those, so that
rollouts share turns, not only the prompt. The desk rewards them, and one step of GRPO follows. Success is measured on held-out
questions, sampled as in training.

Everything runs once for each --strategy, side by side from the same start: on trees, and with nothing shared (packing).
The curves are the same but for rounding; the seconds of training are not.

Several processes, as `torchrun --nproc-per-node 2 examples/desk_rl/train.py` starts them, divide sampling and training.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import desk
import espalier

HELD_OUT_SEED = 1_000_000


def parse_arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of weights, questions and samples (default: %(default)s)")
    add("--iterations", type=int, default=120, metavar="N", help="of sampling and one step of GRPO (default: %(default)s)")
    add("--strategy", nargs="+", default=["tree-packing", "sequence-packing"], metavar="NAME",
        help="what is trained on: trees, or nothing shared; any of `espalier train` (default: both)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write the curve here, JSON Lines, as far as it is known at each measurement")
    add("--save", type=Path, metavar="DIR", help="save the model of the first strategy here, a Hugging Face folder")
    group = parser.add_argument_group("rollouts")
    group.add_argument("--questions", type=int, default=12, metavar="N", help="of an iteration (default: %(default)s)")
    group.add_argument("--branches", type=int, nargs="+", default=[4, 2, 2], metavar="N",
                       help="continuations at the first turns; one at later ones (default: 4 2 2)")  # fmt: skip
    group.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="of GRPO (default: %(default)s)")
    group = parser.add_argument_group("start: imitation of the teacher")
    group.add_argument("--sft-steps", type=int, default=400, metavar="N", help="(default: %(default)s)")
    group.add_argument("--sft-batch", type=int, default=32, metavar="N", help="talks in a step (default: %(default)s)")
    group.add_argument("--sft-learning-rate", type=float, default=3e-3, metavar="X", help="(default: %(default)s)")
    group.add_argument("--mistakes", type=float, default=0.12, metavar="X",
                       help="share of the teacher's turns with one (default: %(default)s)")  # fmt: skip
    group = parser.add_argument_group("model and measurement")
    group.add_argument("--hidden-size", type=int, default=64, metavar="N", help="(default: %(default)s)")
    group.add_argument("--layers", type=int, default=2, metavar="N", help="(default: %(default)s)")
    group.add_argument("--threads", type=int, default=1, metavar="N",
                       help="CPU threads; more bring nothing to so small a model (default: %(default)s)")  # fmt: skip
    group.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="(default: %(default)s)")
    group.add_argument("--eval-every", type=int, default=10, metavar="N", help="iterations (default: %(default)s)")
    group.add_argument("--eval-questions", type=int, default=200, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args(given)
    for name, least in {"seed": 0, "iterations": 1, "questions": 1, "sft_steps": 1, "sft_batch": 1, "layers": 1, "threads": 1, "eval_every": 1,
                        "eval_questions": 1}.items():  # fmt: skip
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected {least} or more, received {getattr(arguments, name)}")
    if min(arguments.branches) < 1 or not 0 <= arguments.mistakes <= 1 or arguments.hidden_size % 4:
        parser.error("expected --branches from 1 on, --mistakes from 0 to 1 and --hidden-size a multiple of 4")
    return arguments


def process_group():
    """The processes that torchrun has started, of which the first one prints; None: there is one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return dist.group.WORLD


def made_by_first(group, folder, make):
    """The folder that the first process has made: its own."""
    if group is None or group.rank() == 0:
        make(folder)
    if group is None:
        return folder
    import torch.distributed as dist

    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def make_model(folder, arguments):
    """A small Qwen3 with random weights, as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    size = arguments.hidden_size
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(desk.WORDS), hidden_size=size, intermediate_size=3 * size, head_dim=size // 4,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=256, initializer_range=0.15, eos_token_id=desk.IDS[desk.END], bos_token_id=None)  # fmt: skip
    torch.manual_seed(arguments.seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def talk_row(talk):
    """A row of the teacher's talk, with loss on the teacher's words."""
    return {"input_ids": [number for words, _ in talk for number in desk.ids_of(words)],
            "loss_mask": [int(is_teacher) for words, is_teacher in talk for _ in words]}  # fmt: skip


def imitate(random_model, arguments, group):
    """The start: SFT on the teacher's talks. Saves the model beside the random one."""
    engine = espalier.Engine(random_model, dtype=arguments.dtype, threads=arguments.threads,
                             learning_rate=arguments.sft_learning_rate, process_group=group)  # fmt: skip
    rng = random.Random(f"teacher {arguments.seed}")
    began = time.perf_counter()
    for step in range(arguments.sft_steps):
        names = [f"lesson-{step}-{number}" for number in range(arguments.sft_batch)]
        talks = [desk.teach(desk.make_question(name, arguments.seed), arguments.mistakes, rng) for name in names]
        loss = engine.forward_backward([talk_row(talk) for talk in talks])["loss"]
        warm, left = (step + 1) / 20, 1 - step / arguments.sft_steps
        engine.optim_step(arguments.sft_learning_rate * min(1.0, warm, 0.1 + left))
        if (step + 1) % 100 == 0 or step + 1 == arguments.sft_steps:
            print(f"imitation: step {step + 1} of {arguments.sft_steps}, loss {loss:.3f}", flush=True)
    print(f"imitation: {time.perf_counter() - began:.0f} seconds", flush=True)
    start = random_model.with_name("start")
    engine.save(start)
    return start


def roll_out(engine, questions, branches, seed):
    """Rollouts of the questions, which branch at the first turns: rows with rewards, in groups by question. Turn by turn, the
    engine samples a call after every conversation, and the desk's result is appended without loss. A rollout that ends before
    the last branch counts as often as the branches that it would have had, or early mistakes would hardly count; trees encode
    such copies once."""
    by_name = {question.name: question for question in questions}
    going = [{"input_ids": desk.ids_of(question.prompt()), "group_id": question.name} for question in questions]
    done = []
    for turn in range(desk.MAX_TURNS):
        rows = engine.sample(going, samples=branches[turn] if turn < len(branches) else 1, max_new_tokens=desk.CALL_TOKENS,
                             seed=desk.MAX_TURNS * seed + turn, batch_size=256, whole_rows=turn > 0)  # fmt: skip
        going = []
        for row in rows:
            ids, mask = list(row["input_ids"]), list(row["loss_mask"])
            begin = len(ids) - mask[::-1].index(0)  # of the sampled turn
            result, reward = by_name[row["group_id"]].reply(desk.words_of(ids[begin:]))
            if reward is None and turn + 1 < desk.MAX_TURNS:
                said = desk.ids_of(result)
                row["input_ids"] = ids + said
                row["loss_mask"] = mask + [0] * len(said)
                row["logprobs"] = list(row["logprobs"]) + [0.0] * len(said)
                going.append(row)
            else:
                done += [row | {"reward": reward or 0.0}] * math.prod(branches[turn + 1 :])
        if not going:
            break
    return done


def mean_reward(rows):
    return sum(row["reward"] for row in rows) / len(rows)


class Learner:
    """A model that learns by one strategy, and what is known of its course."""

    def __init__(self, start, strategy, arguments, group=None):
        self.strategy = strategy
        self.arguments = arguments
        self.engine = espalier.Engine(start, dtype=arguments.dtype, threads=arguments.threads, strategy=strategy,
                                      learning_rate=arguments.learning_rate, process_group=group)  # fmt: skip
        self.seconds = {"sampling": 0.0, "training": 0.0}
        self.tokens = {"flat": 0, "encoded": 0}
        self.curve = []
        held_out = [f"held-out-{number}" for number in range(arguments.eval_questions)]
        self._held_out = [desk.make_question(name, HELD_OUT_SEED + arguments.seed) for name in held_out]

    def learn(self, iteration):
        arguments = self.arguments
        names = [f"question-{iteration}-{number}" for number in range(arguments.questions)]
        questions = [desk.make_question(name, arguments.seed) for name in names]
        began = time.perf_counter()
        rows = roll_out(self.engine, questions, arguments.branches, seed=1_000_000 * arguments.seed + iteration)
        sampled = time.perf_counter()
        metrics = self.engine.forward_backward(rows, "grpo")
        self.engine.optim_step()
        self.seconds["sampling"] += sampled - began
        self.seconds["training"] += time.perf_counter() - sampled
        self.tokens["flat"] += metrics["flat_tokens"]
        self.tokens["encoded"] += metrics["encoded_tokens"]
        return mean_reward(rows)

    def measure(self, iteration, reward=None):
        """Success on the held-out questions, one rollout each, the same random numbers every time."""
        rows = roll_out(self.engine, self._held_out, [1], seed=1_000_000 * self.arguments.seed + 999_999)
        point = {"strategy": self.strategy, "seed": self.arguments.seed, "iteration": iteration, "success": mean_reward(rows),
                 "reward": reward, "training_seconds": self.seconds["training"], "sampling_seconds": self.seconds["sampling"],
                 "flat_tokens": self.tokens["flat"], "encoded_tokens": self.tokens["encoded"]}  # fmt: skip
        self.curve.append(point)
        rewarded = "" if reward is None else f", reward of the rollouts {reward:.3f}"
        print(f"{self.strategy}: iteration {iteration}, success {point['success']:.3f}{rewarded}", flush=True)


def summary(learners):
    print(f"\n{'':<18} {'success: start':>15} {'end':>6} {'training':>12} {'sampling':>12} {'tokens encoded':>16} {'of':>12}")
    for learner in learners:
        first, last = learner.curve[0], learner.curve[-1]
        print(f"{learner.strategy:<18} {first['success']:>15.3f} {last['success']:>6.3f} {last['training_seconds']:>10.1f} s "
              f"{last['sampling_seconds']:>10.1f} s {last['encoded_tokens']:>16,} {last['flat_tokens']:>12,}")  # fmt: skip
    if len(learners) == 2:
        one, other = (learner.curve[-1] for learner in learners)
        print(f"{learners[0].strategy} trains {other['training_seconds'] / one['training_seconds']:.2f} times as fast as "
              f"{learners[1].strategy}")  # fmt: skip
        same = [a["success"] == b["success"] for a, b in zip(learners[0].curve, learners[1].curve, strict=True)]
        apart = "equal" if all(same) else f"equal up to measurement {same.index(False)} of {len(same) - 1}"
        print(f"the curves are {apart}")


def write_curve(path, learners):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(point) + "\n" for learner in learners for point in learner.curve))
    part.replace(path)


def main(given=None):
    arguments = parse_arguments(given)
    group = process_group()
    writes = arguments.out and (group is None or group.rank() == 0)
    with tempfile.TemporaryDirectory() as scratch:
        model = made_by_first(group, Path(scratch) / "random", lambda folder: make_model(folder, arguments))
        start = imitate(model, arguments, group)
        learners = [Learner(start, strategy, arguments, group) for strategy in arguments.strategy]
        for learner in learners:
            learner.measure(0)
        for iteration in range(1, arguments.iterations + 1):
            rewards = [learner.learn(iteration) for learner in learners]
            if iteration % arguments.eval_every == 0 or iteration == arguments.iterations:
                for learner, reward in zip(learners, rewards, strict=True):
                    learner.measure(iteration, reward)
                if writes:  # what a run that is stopped has found
                    write_curve(arguments.out, learners)
        summary(learners)
        if arguments.out:
            print(f"wrote {arguments.out}")
        if arguments.save:
            learners[0].engine.save(arguments.save)
            print(f"wrote {arguments.save}")
    return [learner.curve for learner in learners]


if __name__ == "__main__":
    main()
