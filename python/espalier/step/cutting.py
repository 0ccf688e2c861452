# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a micro-batch are cut into parts of equal cost, and which rank has each of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..pricing import Costs, costs
from ..trees import build, plan

Integers = NDArray[np.int64]
SLACK = 0.05  # of the cost of a part, by which a cut may move to where a branch begins
A_LONG_CHAIN = 4096  # tokens, by which the cost of a pair is found
OF_A_DECODER = 4e-5  # of common proportions: what a visible pair costs, in tokens


def cost_of_pair(config: object) -> float:
    """What a visible pair of tokens costs in a model of Transformers, by its config, where a token costs 1."""
    try:
        found = costs(config)
    except InputError:  # a family that only Transformers has
        return OF_A_DECODER
    one, chain = _flops(found, 1), _flops(found, A_LONG_CHAIN)
    pairs = A_LONG_CHAIN * (A_LONG_CHAIN - 1) / 2
    of_pair = max(chain - A_LONG_CHAIN * one, 0.0) / pairs
    return of_pair / one


def _flops(found: Costs, tokens: int) -> float:
    chain = plan(build([[0] * tokens]), token_budget=tokens, strategy="sequence-packing", model=found)
    return chain.flops or 1.0


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
    """The Cutting of tokens by their positions [T], for so many parts of each rank. branches: int64, where branches begin, at
    which a cut is preferred; pair: the cost of a visible pair in tokens."""
    weights = 1 + pair * (positions + 1.0)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    size = before[-1] / (ranks * parts_of_rank)
    places = [_place(before, positions, branches, number * size, SLACK * size) for number in range(1, ranks * parts_of_rank)]
    begin = np.unique(np.array([0, *places, len(positions)], np.int64))
    owners = _owners(np.diff(begin), ranks, parts_of_rank)
    return Cutting(begin, owners, np.bincount(owners, np.diff(before[begin]), ranks))


def _place(before: NDArray[np.float64], positions: Integers, branches: Integers, cost: float, slack: float) -> int:
    """Where to cut so that about `cost` stands before: where the branch nearest to a root begins, if there is one close by."""
    low, high = np.searchsorted(before, [cost - slack, cost + slack], side="right") - 1
    near = branches[np.searchsorted(branches, low + 1) : np.searchsorted(branches, high + 1)]
    if len(near):
        return int(near[np.argmin(positions[near])])
    after = int(np.searchsorted(before, cost))
    return after if before[after] - cost <= cost - before[after - 1] else after - 1


def _owners(tokens: Integers, ranks: int, parts_of_rank: int) -> Integers:
    """The rank of each part, by the tokens of parts: parts cost the same, so that ranks with equally many have equal costs;
    longest first, in turn forwards and backwards, they have about equally many tokens."""
    order = np.argsort(-tokens, kind="stable") if parts_of_rank > 1 else np.arange(len(tokens))
    turn, place = np.divmod(np.arange(len(tokens)), ranks)
    owners = np.empty(len(tokens), np.int64)
    owners[order] = np.where(turn % 2, ranks - 1 - place, place)
    return owners
