# SPDX-License-Identifier: Apache-2.0
"""FlexAttention by its definition, and small models of torchtitan in float64, for tests on CPUs, where FlexAttention has no backward.

The definition reads the lists of blocks as kernels do: a block that is not listed is not seen, and in full ones `mask_mod` is not asked.
"""

import contextlib
import importlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.attention.flex_attention import create_block_mask


def listed(numbers, indices):
    """Bool [blocks of queries, blocks of keys] of a BlockMask's lists."""
    blocks = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for query, number in enumerate(numbers[0, 0].tolist()):
        blocks[query, indices[0, 0, query, :number].long()] = True
    return blocks


def visible(mask):
    """Bool [T, T]: what kernels compute of a BlockMask."""
    length, (of_queries, of_keys) = mask.seq_lengths[0], mask.BLOCK_SIZE

    def tokens(blocks):
        return blocks.repeat_interleave(of_queries, 0).repeat_interleave(of_keys, 1)[:length, :length]

    number, first = torch.arange(length), torch.tensor(0)
    seen = mask.mask_mod(first, first, number[:, None], number) & tokens(listed(mask.kv_num_blocks, mask.kv_indices))
    return seen if mask.full_kv_num_blocks is None else seen | tokens(listed(mask.full_kv_num_blocks, mask.full_kv_indices))


def by_definition(query, key, value, *, block_mask, scale=None, **others):
    """(output, an object with lse) of [1, heads, T, width] each, as flex_attention gives them with return_aux."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible(block_mask), -torch.inf)
    return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


def grouped(module, *, A, B_t, offs):
    """torch._grouped_mm in any dtype."""
    begins = [0, *offs.tolist()]
    parts = [A[begin:end] @ weights for begin, end, weights in zip(begins, begins[1:], B_t)]
    return torch.cat([*parts, A.new_zeros(len(A) - begins[-1], B_t.shape[-1])])


@contextlib.contextmanager
def on_cpu(backend="partial_dtensor"):
    """torchtitan's layers on a CPU: without compilation, and in float64 where they would round to other dtypes.

    backend  torchtitan's spmd_backend; the other asserts types over a mesh"""
    from torchtitan.distributed import utils
    from torchtitan.models.common import attention, decoder, moe
    from torchtitan.models.muse_glimmer import model as muse_glimmer

    whole = [mock.patch.object(torch.Tensor, name, lambda self: self) for name in ("float", "bfloat16")]
    masks = [mock.patch.object(home, "create_attention_mask", create_block_mask) for home in (decoder, muse_glimmer)]
    with contextlib.ExitStack() as stack:
        for patched in [*whole, *masks, mock.patch.object(utils, "_spmd_backend", backend),
                        mock.patch.object(attention.FlexAttention, "compiled_flex_attn", staticmethod(by_definition)),
                        mock.patch.object(moe.GroupedExperts, "_grouped_mm", grouped),
                        mock.patch.object(torch, "_grouped_mm", lambda A, B_t, offs: grouped(None, A=A, B_t=B_t, offs=offs))]:  # fmt: skip
            stack.enter_context(patched)
        yield


def config_of(kind, attention="flex"):
    """Two layers of a debug model by its name in torchtitan.models, with windows of 3 tokens where there are any."""
    home = importlib.import_module(f"torchtitan.models.{kind.removesuffix('_moe')}")
    configs = getattr(home, {"gpt_oss": "gptoss_configs", "deepseek_v3": "deepseekv3_configs"}.get(kind, f"{kind.removesuffix('_moe')}_configs"))
    communication = {"moe_comm_backend": "standard"} if kind in ("qwen3_moe", "deepseek_v3", "gpt_oss") else {}
    config = configs["debugmodel_moe" if kind == "qwen3_moe" else "debugmodel"](attn_backend=attention, **communication)
    config.layers = config.layers[:2]
    for layer in config.layers:
        for name in ("sliding_window_size", "window_size"):
            if isinstance(getattr(layer.attention, name, None), int) and not isinstance(getattr(type(layer.attention), name, None), property):
                setattr(layer.attention, name, 3)
    return config


def make(config, seed=0):
    """The model in float64, with random numbers in all parameters: some begin with zeros, behind which nothing is seen."""
    torch.manual_seed(seed)
    model = config.build()
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model.double()
