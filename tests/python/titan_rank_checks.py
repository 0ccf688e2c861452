# SPDX-License-Identifier: Apache-2.0
"""What is checked on two ranks on which torchtitan has applied FSDP2 to its models: loss and gradients of trees against those of one
process that computes each row alone."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import espalier
from test_megatron import EXACT, case_of
from titan_models import config_of, make, on_cpu

FLOAT32_INSIDE = 1e-6  # what torchtitan computes in float32: the scores of experts, sums of chunks
DENSE = ("llama3", "qwen3", "muse_glimmer")


def gradients_of(model):
    """{name: gradient} of all that have one; those of shards are gathered, and they are removed."""
    result = {name: getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for name, each in model.named_parameters()
             if each.grad is not None}  # fmt: skip
    model.zero_grad()
    return result


def on_trees(model, batches, masks=None):
    """(loss, gradients) of micro-batches."""
    whole = 0
    for batch in batches:
        attention_masks = batch.attention_masks(model) if masks is None else masks(batch)
        loss = batch.loss(model(batch.tokens, positions=batch.positions, attention_masks=attention_masks))
        loss.backward()
        whole += float(loss.detach())
    return whole, gradients_of(model)


def on_rows(model, rows, mask):
    """The same of each row alone, with the masks that torchtitan makes."""
    whole = 0
    for row, weights in zip(rows, mask):
        tokens, positions = torch.tensor(row)[None], torch.arange(len(row))[None]
        logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
        loss = (losses * torch.tensor(weights[1:], dtype=torch.float64)).sum()
        loss.backward()
        whole += float(loss.detach())
    return whole, gradients_of(model)


def error_of(result, expected):
    """The largest difference of losses and gradients, relative to the largest number of each."""
    assert result[1].keys() == expected[1].keys(), result[1].keys() ^ expected[1].keys()
    zero = [name for name, each in expected[1].items() if not each.any()]
    assert not zero, zero
    errors = [float((result[1][name] - each).abs().max() / each.abs().max()) for name, each in expected[1].items()]
    return max(abs(result[0] - expected[0]) / abs(expected[0]), *errors)


PARALLELIZE = {"llama3": "parallelize_llama", "gpt_oss": "parallelize_gptoss"}


@functools.cache
def dims_of(backend, **degrees):
    """One for all models of a process: with spmd_types, FSDP2 refuses a model over a second one."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims

    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(ParallelismConfig(spmd_backend=backend, **degrees), dist.get_world_size())
        dims.build_mesh()
    return dims


def parallel(kind, backend, **degrees):
    """(the model of make(kind), divided over the ranks as torchtitan's Trainer does it, torchtitan's context of a step)."""
    from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.tools.utils import set_default_dtype

    home = importlib.import_module(f"torchtitan.models.{kind.removesuffix('_moe')}")
    parallelism = ParallelismConfig(spmd_backend=backend, **degrees)
    utils.set_spmd_backend(backend)
    dims = dims_of(backend, **degrees)
    with mock.patch.dict(TORCH_DTYPE_MAP, float32=torch.float64):
        config = config_of(kind)
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        with torch.device("meta"), set_default_dtype(torch.float64):
            model = config.build()
        model = getattr(home, PARALLELIZE.get(kind, "parallelize_qwen3"))(
            model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
            parallelism=parallelism, compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="")  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        whole = dict(make(config_of(kind)).named_parameters())
        for name, parameter in model.named_parameters():
            value = whole[name].detach()
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    return model, utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)


@functools.cache
def expected(kind):
    """By every rank for itself."""
    rows, mask, _, _ = case_of(0)
    with on_cpu():
        return on_rows(make(config_of(kind)), rows, mask)


def share_of(rank, **options):
    """A rank's micro-batches: as many as the other has, which may have more rows."""
    rows, mask, _, _ = case_of(0)
    shares = espalier.distribute(espalier.build(rows), rank.size)
    plans = [espalier.plan(espalier.build([rows[row] for row in share.trajectories]), token_budget=40, strategy="tree-packing")
             for share in shares]  # fmt: skip
    part = [mask[row] for row in shares[rank.rank].trajectories]
    return espalier.titan.pack(plans[rank.rank], loss_mask=part, micro_batches=max(map(len, plans)) + 1, **options)


def summed(result):
    """The loss of all ranks; FSDP2 has summed gradients."""
    loss = torch.tensor(result[0], dtype=torch.float64)
    dist.all_reduce(loss)
    return float(loss), result[1]


def check_fsdp(rank, kind, backend):
    model, context = parallel(kind, backend, data_parallel_shard_degree=rank.size)
    with on_cpu(backend), context():
        result = summed(on_trees(model, share_of(rank)))
    error = error_of(result, expected(kind))
    assert error <= (EXACT if kind in DENSE else FLOAT32_INSIDE), error


def llama3(rank):
    check_fsdp(rank, "llama3", "partial_dtensor")


def qwen3(rank):
    check_fsdp(rank, "qwen3", "spmd_types")


def qwen3_moe(rank):
    check_fsdp(rank, "qwen3_moe", "spmd_types")


def gpt_oss(rank):
    check_fsdp(rank, "gpt_oss", "spmd_types")


def a_wrong_mask_is_found(rank):
    """A negative control: every token sees all before it."""
    model, context = parallel("llama3", "partial_dtensor", data_parallel_shard_degree=rank.size)
    batches = share_of(rank)
    wrong = [dataclasses.replace(batch, subtree_end=torch.full_like(batch.subtree_end, len(batch.subtree_end))) for batch in batches]
    with on_cpu(), context():
        result = [summed(on_trees(model, each)) for each in (batches, wrong)]
    errors = [error_of(each, expected("llama3")) for each in result]
    assert errors[0] <= EXACT and errors[1] > 1e-3, errors


def check_tensor_parallel(rank, kind, backend):
    model, context = parallel(kind, backend, tensor_parallel_degree=rank.size)
    rows, mask, _, _ = case_of(0)
    batches = espalier.titan.pack(espalier.plan(espalier.build(rows), token_budget=60, strategy="tree-packing"), loss_mask=mask,
                                  pad_to_multiple_of=rank.size)  # fmt: skip
    with on_cpu(backend), context():
        result = on_trees(model, batches)
    error = error_of(result, expected(kind))
    assert error <= FLOAT32_INSIDE, error


def heads_by_dtensor(rank):
    check_tensor_parallel(rank, "llama3", "partial_dtensor")


def heads_by_spmd_types(rank):
    check_tensor_parallel(rank, "llama3", "spmd_types")


CHECKS = {2: [llama3, qwen3, qwen3_moe, gpt_oss, a_wrong_mask_is_found, heads_by_dtensor, heads_by_spmd_types]}
