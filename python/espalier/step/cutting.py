# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a micro-batch are cut into parts, and which rank has each, so that ranks have equal costs and tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..pricing import Costs, costs
from ..trees import build, plan

Integers = NDArray[np.int64]
SLACK = 0.05  # of the size of a part, by which a cut may move to where a branch begins
CHAINS = (256, 4096)  # tokens, by which the cost of a pair is found
OF_A_DECODER = 4e-5  # of common proportions: what a visible pair costs, in tokens


def cost_of_pair(config: object) -> float:
    """What a visible pair of tokens costs in a model of Transformers, by its config, where a token costs 1."""
    try:
        found = costs(config)
    except InputError:  # a family that only Transformers has
        return OF_A_DECODER
    short, long = CHAINS
    few, many = (_flops_of_token(found, tokens) for tokens in CHAINS)
    pair = max(many - few, 0.0) / ((long - short) / 2)
    return pair / (few - pair * (short + 1) / 2)


def _flops_of_token(found: Costs, tokens: int) -> float:
    """The mean of a chain of so many."""
    chain = plan(build([[0] * tokens]), token_budget=tokens, strategy="sequence-packing", model=found)
    assert chain.flops is not None  # with a model
    return chain.flops / tokens


@dataclass(frozen=True)
class Cutting:
    """Of the T tokens of a micro-batch, in preorder.

    begin  [P + 1] int64 ascending: where parts begin; the last one is T
    ranks  [P] int64: which rank has each part
    costs  [R] float64: of each rank
    """

    begin: Integers
    ranks: Integers
    costs: NDArray[np.float64]


def cut(positions: Integers, branches: Integers, ranks: int, parts_of_rank: int, pair: float) -> Cutting:
    """The Cutting of tokens by their positions [T]. branches: int64, where branches begin, at which a cut is preferred; pair:
    the cost of a visible pair in tokens. One part of each rank: parts have equal costs. More of them: they have equally many
    tokens, and ranks have parts of high and of low cost."""
    cost = np.concatenate([[0.0], np.cumsum(1 + pair * (positions + 1.0))])
    before = cost / cost[-1] if parts_of_rank == 1 else np.linspace(0, 1, len(cost))
    size = 1 / (ranks * parts_of_rank)
    places = [_place(before, positions, branches, number * size, SLACK * size) for number in range(1, ranks * parts_of_rank)]
    begin = np.unique(np.array([0, *places, len(positions)], np.int64))
    costs = np.diff(cost[begin])
    owners = np.arange(len(costs)) if parts_of_rank == 1 else _owners(costs, ranks, parts_of_rank)
    return Cutting(begin, owners, np.bincount(owners, costs, ranks).astype(np.float64))


def _place(before: NDArray[np.float64], positions: Integers, branches: Integers, size: float, slack: float) -> int:
    """Where to cut so that about `size` stands before: where the branch nearest to a root begins, if there is one close by."""
    low, high = np.searchsorted(before, [size - slack, size + slack], side="right") - 1
    near = branches[np.searchsorted(branches, low + 1) : np.searchsorted(branches, high + 1)]
    if len(near):
        return int(near[np.argmin(positions[near])])
    after = int(np.searchsorted(before, size))
    return after if before[after] - size <= size - before[after - 1] else after - 1


def _owners(costs: NDArray[np.float64], ranks: int, parts_of_rank: int) -> Integers:
    """The rank of each part: highest cost first, that which has least so far, and fewer parts than it may have."""
    owners, load, count = np.empty(len(costs), np.int64), np.zeros(ranks), np.zeros(ranks, np.int64)
    for part in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin(np.where(count < parts_of_rank, load, np.inf)))
        owners[part] = rank
        load[rank] += costs[part]
        count[rank] += 1
    return owners
