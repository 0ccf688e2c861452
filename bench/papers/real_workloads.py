#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What trees bring over packing and over append-only merging, for the kinds of rows that agents and their trainers make.

    python bench/papers/real_workloads.py

All rows are made of the conversations of examples/tau_airline_part.jsonl, with words as tokens. Some kinds recombine real messages where no
recording has them: answers of a group, branches of a tree search, rejected answers and sub-agents say what the assistant said elsewhere,
and what is thought before an answer is the message that it answers. A small model runs the three sides in turns; steps are forward and
backward. Bounds are ratios of FLOPs.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import figure, measure, workloads
from papers.workloads import row_of, turns_of

SCRIPT = "real_workloads.py"
MOST_TOKENS = 2600


def answers_in(chats):
    return [ids for chat in chats for role, ids in chat if role == "assistant"]


def whole(messages):
    return row_of(*((ids, role == "assistant") for role, ids in messages))


def turns(chats):
    return [row for chat in chats for row in turns_of(chat, MOST_TOKENS)]


def group(chats, count):
    """Answers to a system prompt and a question."""
    prompt = [*chats[0][0][1], *chats[0][1][1]]
    return [row_of((prompt, False), (ids, True)) for ids in answers_in(chats)[:count]]


def dropped_thinking(chats):
    """Turns under a template that shows the thoughts of the newest turn alone."""
    rows = []
    for chat in chats:
        history = chat[0][1]
        for (_, before), (role, ids) in itertools.pairwise(chat):
            if role == "assistant":
                rows.append(row_of((history, False), (before + ids, True)))
            history = history + ids
    return rows


def compacted(chats, every=2):
    """Turns of an agent that replaces its history by a summary, the first words of each message, after every second turn."""
    rows = []
    for chat in chats:
        system = chat[0][1]
        history, summary, answered = system, [], 0
        for role, ids in chat[1:]:
            if role == "assistant":
                rows.append(row_of((history, False), (ids, True)))
                answered += 1
            history, summary = history + ids, summary + ids[:12]
            if role == "assistant" and answered % every == 0:
                history = system + summary
    return rows


def tree_search(chats, depth=3, width=3):
    """Rollouts that try `width` answers at each of `depth` turns."""
    answers = answers_in(chats)
    asked = [ids for role, ids in chats[0] if role == "user"]
    paths = [[(chats[0][0][1], False)]]
    for level in range(depth):
        tried = answers[level * width : (level + 1) * width]
        paths = [[*path, (asked[level], False), (answer, True)] for path in paths for answer in tried]
    return [row_of(*path) for path in paths]


def pairs(chats):
    """The answer that was given, and one of another conversation, at every turn."""
    others, rows = itertools.cycle(reversed(answers_in(chats))), []
    for chat in chats:
        history = []
        for role, ids in chat:
            if role == "assistant":
                rows += [row_of((history, False), (answer, True)) for answer in (ids, next(others))]
            history = history + ids
    return rows


def sub_agents(chats):
    """Whole conversations, and at each turn an agent that starts from what has been said and works on by itself for two messages."""
    rows = [whole(chat) for chat in chats]
    for chat, other in zip(chats, chats[1:] + chats[:1], strict=True):
        for place, (role, _) in enumerate(chat):
            if role == "assistant":
                said = [ids for _, ids in chat[:place]]
                rows.append(row_of((list(itertools.chain(*said)), False), *((ids, role == "assistant") for role, ids in other[-3:-1])))
    return rows


# Kind -> conversations, rows.
KINDS = {
    "turns of conversations": (2, turns),
    "whole conversations": (8, lambda chats: [whole(chat) for chat in chats]),
    "groups of 8 answers": (8, lambda chats: group(chats, 8)),
    "groups of 16 answers": (8, lambda chats: group(chats, 16)),
    "turns without earlier thoughts": (2, dropped_thinking),
    "turns of a compacted context": (2, compacted),
    "rollouts of a tree search": (2, tree_search),
    "preference pairs": (2, pairs),
    "conversations with sub-agents": (3, sub_agents),
}


def measured(args, model, kind):
    count, make = KINDS[kind]
    rows = make(workloads.conversations(count, workloads.SMALL["qwen3"]["vocab_size"]))
    if args.quick:
        rows = rows[:4]
    flat = sum(len(row["input_ids"]) for row in rows)
    sides, append_only_tokens = measure.sides_of(rows, 4096)
    measure.run(sides, measure.Setting(model, "sft", args.rounds, args.threads, cpu_seconds=args.cpu_seconds))
    over_packing, over_merging = (measure.compared(sides[0], sides[place]) for place in (-1, 1))  # the same where nothing merges
    return {"kind": kind, "rows": len(rows), "flat_tokens": flat, "append_only_tokens": append_only_tokens,
            "tree_tokens": sides[0].metrics["tree_tokens"], **over_packing,
            **{f"{name}_over_merging": value for name, value in over_merging.items()}}  # fmt: skip


def draw(args, scratch):
    model = workloads.model_folder(workloads.SMALL["qwen3"], "qwen3", scratch)
    return figure.Figure("real_workloads", [measured(args, model, kind) for kind in args.kinds], {})


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"some of {', '.join(KINDS)}")
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
