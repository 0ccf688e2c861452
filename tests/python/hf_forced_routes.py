# SPDX-License-Identifier: Apache-2.0
"""Random expert routes, and unpatched models whose routers are made to choose them by a torch.topk that returns them."""

import random

import torch
from torch.overrides import TorchFunctionMode

from conftest import seed_of
from espalier.hf import routes
from espalier.hf.families import backbone_of
from hf_models import alone


class Forced(TorchFunctionMode):
    """Inside, routers choose the experts of `chosen`, [T, K] for each call of a router in order."""

    def __init__(self, chosen, num_experts):
        self.chosen, self.num_experts = iter(chosen), num_experts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.topk, torch.Tensor.topk) and args[0].dim() == 2 and args[0].shape[1] == self.num_experts:
            experts = next(self.chosen)
            return args[0].gather(1, experts), experts
        return function(*args, **(kwargs or {}))


def recorded_routes(model, rows, seed=7):
    """Random routes of each row, [n, R, K]; tokens of equal paths have equal ones, but for those of a row that differs
    inside what it shares."""
    rng, known = random.Random(seed_of(seed)), {}
    routers = routes.routers_of(backbone_of(model)).values()
    route = lambda: [rng.sample(range(router.num_experts), router.top_k) for router in routers]
    result = [[known.setdefault(tuple(row[:end]), route()) for end in range(1, len(row) + 1)] for row in rows]
    result[5] = list(result[5])  # a duplicate of row 6 until here
    while sorted(result[5][4][0]) == sorted(result[6][4][0]):
        result[5][4] = route()
    return [torch.tensor(each) for each in result]


def forced_alone(model, rows, recorded):
    chosen = [route for row in recorded for route in row.unbind(1)]
    with Forced(chosen, next(iter(routes.routers_of(backbone_of(model)).values())).num_experts):
        return alone(model, rows)
