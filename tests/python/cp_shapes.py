# SPDX-License-Identifier: Apache-2.0
"""Rows whose trees are cut over ranks in different ways."""

import json
import random

from conftest import REPOSITORY, seed_of


def tokens_of(seed):
    rng = random.Random(seed_of(seed))
    return lambda n: [rng.randrange(61) for _ in range(n)]


def chain():
    return [tokens_of(11)(41)]


def short_chain():
    """A token or two for each of four ranks."""
    return [tokens_of(18)(6)]


def pair():
    """Fewer tokens than ranks."""
    return [tokens_of(12)(2)]


def star():
    """A prompt and many answers, which are shorter and longer than it."""
    tokens = tokens_of(13)
    prompt = tokens(8)
    return [prompt + tokens(n) for n in (1, 9, 2, 5, 3, 12, 1)]


def deep():
    """Four levels of branches, rows that end inside the tree, duplicates, and a tree beside it."""
    tokens = tokens_of(14)
    path, rows = tokens(6), []
    for level in range(4):
        rows += [path, path + tokens(2 + level), path + tokens(1)]
        path = path + tokens(4)
    return [*rows, path, path, tokens(5)]


def wide():
    """Rows that share one token or nothing."""
    tokens = tokens_of(15)
    first = tokens(1)
    return [*(first + tokens(4) for _ in range(6)), *(tokens(1 + number) for number in range(5))]


def conversations():
    """Two real ones with the same system prompt, by turns: the first letters of each message, each turn as a separate row."""
    file = REPOSITORY / "examples/tau_airline_part.jsonl"
    rows = []
    for line in file.read_text().splitlines()[:2]:
        turns = [[letter % 61 for letter in (message["content"] or "").encode()[:5]] for message in json.loads(line)["messages"][:7]]
        rows += [sum(turns[:count], []) for count in (3, 5, 7)]
    return rows


def random_trees(seed, most=12):
    """Of up to thirteen rows, each of which branches off another one; the first has so many tokens at most."""

    def rows():
        rng = random.Random(seed_of(seed))
        tokens = lambda most: [rng.randrange(61) for _ in range(rng.randint(1, most))]
        found = [tokens(most)]
        for _ in range(rng.randint(3, 12)):
            row = rng.choice(found)
            found.append(row[: rng.randint(0, len(row))] + tokens(most * 3 // 4))
        return found

    return rows


SHAPES = {"chain": chain, "short chain": short_chain, "pair": pair, "star": star, "deep": deep, "wide": wide, "conversations": conversations,
          **{f"random {seed}": random_trees(seed) for seed in range(20, 23)}}  # fmt: skip
