# SPDX-License-Identifier: Apache-2.0
"""Attention on a forest by plain operations, for logits with a softcap, which the operator does not have."""

from collections.abc import Iterator
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
    """What `asked` asks for, [1, T, H, E], in float32 at least. Weights exist for `_QUERIES` tokens and their ancestors at a time,
    in backward as well, where they are computed again."""
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in asked[:3])
    run.leave(key=key, value=value)
    context = run.attention_context()
    keys, values = [key, *context.get("context_k", ())], [value, *context.get("context_v", ())]
    with torch.autocast(query.device.type, enabled=False):
        parts = [checkpoint(_block, asked, block, query, keys, values, use_reentrant=False, preserve_rng_state=False)
                 for block in _blocks(run, asked)]  # fmt: skip
    return torch.cat(parts).unsqueeze(0)


class _Block(NamedTuple):
    """Queries and what they may see."""

    begin: int
    seen: list[tuple[int, Tensor]]  # (segment, numbers of keys): of the forest itself, which is segment 0, and of its context
    mask: Tensor  # [queries, keys]


def _blocks(run: "TreeRun", asked: Attention) -> Iterator[_Block]:
    context, position = run.attention_context(), run.position
    number, visible = torch.arange(run.num_tokens, device=position.device), asked.visible(run)
    for begin in range(0, run.num_tokens, _QUERIES):
        queries = number[begin:begin + _QUERIES, None]
        ancestors = torch.nonzero(run.subtree_end[:begin] > begin).flatten()  # of the first
        keys = torch.cat([ancestors, queries.flatten()])
        seen, masks = [(0, keys)], [visible(queries, keys)]
        rows = zip(context["context_blocks"].tolist(), context["context_positions"].tolist()) if context else ()
        for (segment, key_begin, key_end, query_begin, query_end), first in rows:
            inside = (queries >= query_begin) & (queries < query_end)
            if not inside.any():
                continue
            keys = torch.arange(key_begin, key_end, device=position.device)
            near = asked.near(position[queries], first + keys - key_begin)
            seen.append((segment + 1, keys))
            masks.append(inside.expand(-1, len(keys)) if near is None else inside & near)
        yield _Block(begin, seen, torch.cat(masks, 1))


def _block(asked: Attention, block: _Block, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    def chosen(segments: list[Tensor]) -> Tensor:
        return torch.cat([segments[number].index_select(0, numbers.to(query.device)) for number, numbers in block.seen])

    queries = query[block.begin:block.begin + len(block.mask)]
    return _weighted(asked, queries, chosen(keys), chosen(values), block.mask.to(query.device))


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
