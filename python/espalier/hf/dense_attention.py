# SPDX-License-Identifier: Apache-2.0
"""Attention on a forest by plain operations, for logits with a softcap, which the operator does not have."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .asked_attention import Attention

if TYPE_CHECKING:
    from .run import TreeRun

_QUERIES = 128  # at once


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(run: "TreeRun", asked: Attention) -> Tensor:
    """What `asked` asks for, [1, T, H, E], in float32 at least. Logits and masks exist for `_QUERIES` tokens and their
    ancestors at a time, in backward as well, where they are computed again."""
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in asked[:3])
    run.leave(key=key, value=value)
    context = run.attention_context()
    keys, values = [key, *context.get("context_k", ())], [value, *context.get("context_v", ())]
    blocks = run.masks.get(("dense", asked.window, asked.chunk))
    if blocks is None:
        blocks = run.masks["dense", asked.window, asked.chunk] = _blocks(run, asked)

    def rows(block: _Block) -> Tensor:
        numbers = [part.numbers.to(query.device) for part in block.parts]
        key, value = (torch.cat([of[part.segment].index_select(0, chosen) for part, chosen in zip(block.parts, numbers)])
                      for of in (keys, values))  # fmt: skip
        mask = torch.cat([_mask(run, asked, block, part) for part in block.parts], 1)
        return _weighted(asked, query[block.begin:block.end], key, value, mask.to(query.device))

    with torch.autocast(query.device.type, enabled=False):
        parts = [checkpoint(rows, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
    return torch.cat(parts).unsqueeze(0)


class _Part(NamedTuple):
    """Keys that a block of queries may see."""

    segment: int  # 0: of the forest itself; n: the context's n - 1
    numbers: Tensor
    positions: Tensor
    query_begin: int = 0  # the queries of a part of the context
    query_end: int = 0


class _Block(NamedTuple):
    """The queries from `begin` to `end`, and their keys."""

    begin: int
    end: int
    parts: list[_Part]


def _blocks(run: "TreeRun", asked: Attention) -> list[_Block]:
    context, position = run.attention_context(), run.position
    rows = list(zip(context["context_blocks"].tolist(), context["context_positions"].tolist())) if context else []
    blocks = []
    for begin in range(0, run.num_tokens, _QUERIES):
        end = min(begin + _QUERIES, run.num_tokens)
        ancestors = torch.nonzero(run.subtree_end[:begin] > begin).flatten()  # of the first
        numbers = torch.cat([ancestors, torch.arange(begin, end, device=position.device)])
        if asked.window:
            numbers = numbers[position[numbers] > position[begin:end].min() - asked.window]
        parts = [_Part(0, numbers, position[numbers])]
        for (segment, key_begin, key_end, query_begin, query_end), first in rows:
            if query_begin < end and begin < query_end:
                keys = torch.arange(key_begin, key_end, device=position.device)
                parts.append(_Part(segment + 1, keys, first + keys - key_begin, query_begin, query_end))
        blocks.append(_Block(begin, end, parts))
    return blocks


def _mask(run: "TreeRun", asked: Attention, block: _Block, part: _Part) -> Tensor:
    """[queries, keys]: whom the queries of a block see of a part."""
    queries = torch.arange(block.begin, block.end, device=run.position.device)[:, None]
    if part.segment == 0:
        return asked.visible(run)(queries, part.numbers)
    seen = ((queries >= part.query_begin) & (queries < part.query_end)).expand(-1, len(part.numbers))
    near = asked.near(run.position[queries], part.positions)
    return seen if near is None else seen & near


def _weighted(asked: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Sums [R, H, E] of values [N, K, E] for queries [R, H, D], keys [N, K, D] and mask [R, N]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    size, heads, key_heads = len(query), query.shape[1], key.shape[1]
    grouped = query.to(dtype).view(size, key_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)  # [K, H / K, R, D]
    logits = grouped @ key.to(dtype).permute(1, 2, 0).unsqueeze(1) * asked.scale
    logits = asked.softcap * torch.tanh(logits / asked.softcap)
    logits = logits.masked_fill(~mask, float("-inf"))
    if asked.sinks is not None:
        sinks = asked.sinks.to(dtype).view(key_heads, -1, 1, 1).expand(-1, -1, size, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    out = weights @ value.to(dtype).transpose(0, 1).unsqueeze(1)  # [K, H / K, R, E]
    return out.permute(2, 0, 1, 3).reshape(size, heads, -1).to(query.dtype)
