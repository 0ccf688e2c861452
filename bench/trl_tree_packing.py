# SPDX-License-Identifier: Apache-2.0
"""A training step of a Transformers model on the prefix tree that TRL's AsyncGRPO packs (trl.experimental.async_grpo).

The tree, its packed row and the places of loss terms are TRL's own TreeRow. Its attention calls FlashAttention 3, which
needs a Hopper GPU; on a CPU the same attention is done by ATen: K and V gathered for every root path, then one
scaled_dot_product_attention a segment, as TRL's varlen call does in one. Everything else is the model's own forward.
"""

import itertools
import time

import torch
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

ATTENTION = "trl_tree_by_aten"


def _attention(module, query, key, value, attention_mask, *, tree_kv_index, tree_segments, scaling=None, **kwargs):
    """query, key, value: [1, H, N, D]. A segment's queries are the last ones of its root path."""
    groups = module.num_key_value_groups
    keys, values = (repeat_kv(part.index_select(2, tree_kv_index), groups) for part in (key, value))
    parts = []
    for (q_begin, q_end), (k_begin, k_end), mask in tree_segments:
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, q_begin:q_end],
                keys[:, :, k_begin:k_end],
                values[:, :, k_begin:k_end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def register():
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda **kwargs: None)


class TreePackingSide:
    """The model of a TransformersSide on TRL's packed row, with the step's loss over all trajectories."""

    def __init__(self, side, trajectories):
        from trl.experimental.async_grpo.packing import TreeRow

        register()
        self.side = side
        row = TreeRow()
        weights = []
        for ids, own in trajectories:
            trained = [t for t in range(1, len(ids)) if own[t] > 0]
            if not trained:
                continue
            kept = trained[-1] + 1
            row.add(
                {
                    "input_ids": torch.tensor(ids[:kept]),
                    "completion_mask": torch.tensor([int(weight > 0) for weight in own[:kept]]),
                    "old_log_probs": torch.zeros(kept),
                    "advantage": 0.0,
                    "group_id": 0,
                }
            )
            weights += [(ids[t], own[t]) for t in trained]
        packed = row.pack()
        total = sum(sum(own[1:]) for _, own in trajectories)
        self.input_ids = packed["input_ids"][None]
        self.position_ids = packed["position_ids"][None]
        self.kv_index = packed["tree_kv_index"]
        self.segments = _segments(packed, dtype=side.model.dtype)
        self.rows = packed["token_index"]
        self.targets = torch.tensor([target for target, _ in weights])
        self.weights = torch.tensor([weight / total for _, weight in weights])

    @property
    def tokens(self):
        return self.input_ids.numel()

    def step(self):
        """Seconds and loss of a forward and backward pass."""
        model = self.side.model
        model.zero_grad(set_to_none=True)
        stock = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        begin = time.monotonic()
        hidden = model.base_model(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            use_cache=False,
            tree_kv_index=self.kv_index,
            tree_segments=self.segments,
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden[0].index_select(0, self.rows)).float()
        losses = torch.nn.functional.cross_entropy(logits, self.targets, reduction="none")
        loss = (losses * self.weights).sum()
        loss.backward()
        seconds = time.monotonic() - begin
        loss = loss.item()
        del hidden, logits, losses
        model.set_attn_implementation(stock)
        return seconds, loss


def _segments(packed, dtype):
    """Per segment: its queries, its keys among the gathered ones, and the mask [Q, K] (None: plainly causal)."""
    ranges = []
    for bounds in zip(packed["tree_cu_seqlens_q"].unfold(0, 2, 1).tolist(), packed["tree_cu_seqlens_k"].unfold(0, 2, 1).tolist()):
        (q_begin, q_end), (k_begin, k_end) = bounds
        queries, keys = q_end - q_begin, k_end - k_begin
        mask = None
        if queries != keys:
            mask = torch.full((queries, keys), -torch.inf, dtype=dtype).triu(keys - queries + 1)
        ranges.append(((q_begin, q_end), (k_begin, k_end), mask))
    assert all(first[0][1] == second[0][0] for first, second in itertools.pairwise(ranges))
    return ranges
