# SPDX-License-Identifier: Apache-2.0
"""What is checked on several ranks that have parts of the same micro-batches: losses and gradients against those of one
process, each row alone."""

import functools
import random

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import espalier
from conftest import seed_of
from espalier.distributed import Ranks
from espalier.hf import patch
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_models import alone, make_model, worst_error
from rank_checks import clear, gradients_of, refused

EXACT = 1e-12


@functools.cache
def expected(kind, shape):
    return alone(make_model(kind), SHAPES[shape]())


def tokens_of(seed):
    rng = random.Random(seed_of(seed))
    return lambda n: [rng.randrange(61) for _ in range(n)]


def chain():
    return [tokens_of(11)(41)]


def single():
    return [tokens_of(12)(2)]


SHAPES = {"chain": chain, "single": single}


def mesh_of(rank, context):
    return dist.init_device_mesh("cpu", (rank.size // context, context), mesh_dim_names=("dp", "cp"))


def sharded(kind, mesh, prepare=patch):
    model = prepare(make_model(kind))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in backbone_of(model).layers:
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    return model


def by_step(ranks, model, rows, budget=10**6, recompute=False, **options):
    """A step on rows; returns its sum of losses over the ranks, gradients by name, and the report."""
    share = ranks.share(rows)
    strategy = "partition" if budget < 10**6 else "tree-packing"
    plan = espalier.plan(share.forest, token_budget=budget, strategy=strategy)
    run = espalier.Step(model, plan, recompute=recompute, **options)
    total = 0.0
    with InFloat64(), ranks.step(share, run) as step:
        for batch in step:
            loss = -run.logprobs(batch).sum()
            run.backward(loss)
            total += loss.item()
    return ranks.sum(total), gradients_of(model), step.report


def matrix(rank):
    for kind in ["qwen3", "gpt_oss", "qwen3_5"]:
        mesh = mesh_of(rank, rank.size)
        model = sharded(kind, mesh)
        ranks = Ranks(model, mesh)
        for shape in SHAPES:
            for budget in 10**6, 7:
                clear(model)
                loss, gradients, report = by_step(ranks, model, SHAPES[shape](), budget)
                error = worst_error((loss, gradients), expected(kind, shape))
                if rank.rank == 0:
                    print(kind, shape, budget, error, flush=True)
                assert error <= EXACT


CHECKS = {2: [matrix], 4: [matrix]}
