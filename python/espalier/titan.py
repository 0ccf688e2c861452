# SPDX-License-Identifier: Apache-2.0
"""Micro-batches for torchtitan, whose models take `(tokens, positions, attention_masks)`: trees need no change of a layer.

Names and masks are those of torchtitan 0.3.0 (`torchtitan/models/common/{attention,decoder}.py`, `components/loss.py`).
"""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import cross_entropy as token_losses

from .errors import InputError
from .packed_rows import PackedTensors, Padding, RowTokens, check_plan, is_whole, row_weights
from .titan_masks import mask_kinds, tree_mask
from .trees import Layout, Plan

__all__ = ["PackedTrees", "cross_entropy", "pack"]

IGNORED = -100  # torchtitan's IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class PackedTrees(PackedTensors):
    """One micro-batch as T tokens: its trees one after another in preorder, and padding.

    Each token that carries loss is predicted by the token before it on its path, once for all rows that share it: so a token
    with several continuations predicts several tokens. R rows with N tokens are in the micro-batch. Tensors are int64 where
    nothing else is said.

    Attributes:
        tokens: [1, T], 0 for padding.
        positions: [1, T]: positions on the root path, 0 for padding.
        subtree_end: [T]: token j sees token i if i <= j < subtree_end[i]. Each token of padding is a tree of its own.
        sources: [T]: the token before each on its path; first tokens and padding have themselves.
        labels: [1, T]: the token itself where it carries loss, otherwise -100, torchtitan's IGNORE_INDEX.
        weights: float32 [1, T]: the sum of the loss mask over the rows that share the token, 0 where that is no loss.
        rows: [R]: which rows of the forest are in the micro-batch, ascending.
        row_offsets: [R + 1]: row rows[k] consists of the tokens row_tokens[row_offsets[k]:row_offsets[k + 1]].
        row_tokens: [N]: where each token of the rows is.
        places: [T]: a place in `row_tokens` that has the token, the first one; -1 for padding.

    Examples:
        >>> import espalier
        >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
        >>> (batch,) = espalier.titan.pack(plan)
        >>> batch.tokens.tolist(), batch.positions.tolist(), batch.subtree_end.tolist()
        ([[1, 2, 3, 4, 5]], [[0, 1, 2, 3, 2]], [5, 5, 4, 4, 5])
        >>> batch.sources.tolist(), batch.labels.tolist(), batch.weights.tolist()
        ([0, 0, 1, 2, 1], [[-100, 2, 3, 4, 5]], [[0.0, 2.0, 1.0, 1.0, 1.0]])
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def block_mask(self, *, window: int | None = None, block_size: int | tuple[int, int] = 128,
                   separate_full_blocks: bool = True) -> BlockMask:  # fmt: skip
        """FlexAttention's mask of the trees: each token sees its path.

        Blocks are found by the ends of subtrees, without a matrix of tokens by tokens. With a window, some blocks may be listed
        in which no token sees another.

        Args:
            window: How many tokens of the path each sees, itself among them, counted by position. Default: all.
            block_size: Tokens of a block, or of a block of queries and one of keys.
            separate_full_blocks: Whether blocks in which all tokens see all others are listed by themselves, so that kernels
                skip the mask there. torchtitan turns it off where results must not depend on the batch.

        Returns:
            A BlockMask [1, 1, T, T] on the device of the tensors, for `torch.nn.attention.flex_attention.flex_attention`.

        Raises:
            InputError: The window is no whole number above 0.

        Examples:
            >>> import espalier
            >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
            >>> espalier.titan.pack(plan)[0].block_mask(block_size=2).to_dense().tolist()
            [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
        """
        if window is not None and (not is_whole(window) or window < 1):
            raise InputError(f"window: expected a whole number above 0, received {window!r}")
        sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
        return tree_mask(self.subtree_end, self.positions[0], window, sizes, separate_full_blocks)

    def attention_masks(self, model: torch.nn.Module) -> BlockMask | dict[str, BlockMask]:
        """What a model of torchtitan takes as `attention_masks`, in place of its own `get_attention_masks`.

        Args:
            model: A decoder of torchtitan whose attention is FlexAttention, before or after it is parallelized. Masks are those
                of Decoder, or of gpt_oss and muse_glimmer with their sliding windows.

        Returns:
            A BlockMask, or one for each kind of layer by torchtitan's names. Block sizes are those of the model's config.

        Raises:
            ImportError: torchtitan is not installed, or has no such modules.
            InputError: The model is no such decoder; the message says what of it trees do not fit.

        Examples:
            >>> logits = model(batch.tokens, positions=batch.positions,
            ...                attention_masks=batch.attention_masks(model))   # doctest: +SKIP
        """
        kinds, block_size = mask_kinds(model)
        separate = not importlib.import_module("torchtitan.distributed.utils").is_in_batch_invariant_mode()
        masks = {name: self.block_mask(window=window, block_size=block_size, separate_full_blocks=separate)
                 for name, window in kinds.items()}  # fmt: skip
        return masks.get("", masks)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """For each token what the model has computed at the token before it, which predicts it.

        Args:
            outputs: [1, T, W]: logits of the model, or the hidden states for torchtitan's ChunkedLossWrapper. A DTensor is
                gathered.

        Returns:
            [1, T, W].

        Raises:
            InputError: `outputs` is something else, such as the list of a model with multi-token prediction.

        Examples:
            >>> import espalier, torch
            >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
            >>> (batch,) = espalier.titan.pack(plan)
            >>> batch.predictions(torch.arange(5.0)[None, :, None]).flatten().tolist()
            [0.0, 0.0, 1.0, 2.0, 1.0]
        """
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 3 or outputs.shape[:2] != self.tokens.shape:
            received = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise InputError(f"outputs: expected a tensor [1, {self.tokens.shape[1]}, *], received {received}")
        whole = outputs.full_tensor() if hasattr(outputs, "full_tensor") else outputs  # of a DTensor
        return whole.index_select(1, self.sources)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """The log-probability of each token that carries loss, at temperature 1.

        Args:
            logits: [1, T, vocabulary], as the model gives them. Vocabularies that torchtitan has divided are gathered.

        Returns:
            float32 [1, T], 0 where `labels` are -100. `to_rows` has them by row.

        Raises:
            InputError: `logits` is something else.

        Examples:
            >>> import espalier, torch
            >>> plan = espalier.plan(espalier.build([[1, 2, 3], [1, 4]]), token_budget=8, strategy="tree-packing")
            >>> (batch,) = espalier.titan.pack(plan)
            >>> batch.logprobs(torch.zeros(1, 4, 8)).exp().tolist()
            [[1.0, 0.125, 0.125, 0.125]]
        """
        return _logprobs(self.predictions(logits), self.labels)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The sum over all rows of loss mask times cross-entropy, which torchtitan's loops divide by the tokens of all ranks.

        Args:
            logits: As `logprobs` takes them.

        Returns:
            A scalar in float32.

        Raises:
            InputError: `logits` is something else.

        Examples:
            >>> import espalier, torch
            >>> plan = espalier.plan(espalier.build([[1, 2, 3], [1, 4]]), token_budget=8, strategy="tree-packing")
            >>> (batch,) = espalier.titan.pack(plan, loss_mask=[[0, 0, 1], [0, 0.5]])
            >>> round(batch.loss(torch.zeros(1, 4, 8)).item(), 4)    # 1.5 * log(8)
            3.1192
        """
        return -(self.weights * self.logprobs(logits)).sum()

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values of tokens, such as log-probabilities, where the rows have them: for losses that differ by row.

        Args:
            values: [1, T] of any dtype.

        Returns:
            [R, W], W the tokens of the longest row less one: [k, t - 1] is the value of token t of row `rows[k]`, 0 beyond
            its end.

        Examples:
            >>> import espalier
            >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
            >>> (batch,) = espalier.titan.pack(plan)
            >>> batch.to_rows(batch.tokens).tolist()
            [[2, 3, 4], [2, 5, 0]]
        """
        lengths = self.row_offsets.diff()
        width = max(int(lengths.max()) - 1, 0) if len(lengths) else 0
        at = torch.arange(1, width + 1, device=lengths.device) + self.row_offsets[:-1, None]
        inside = at < self.row_offsets[1:, None]
        picked = values[0][self.row_tokens[torch.where(inside, at, 0)]] if width else values.new_zeros(len(lengths), 0)
        return torch.where(inside, picked, 0)


def pack(plan: Plan, *, loss_mask: Any = None, pad_to_multiple_of: int = 1,
         micro_batches: int | None = None) -> list[PackedTrees]:  # fmt: skip
    """The micro-batches of a plan as models of torchtitan take them.

    The sum of `PackedTrees.loss` over all micro-batches, and its gradients, are those of the rows.

    Args:
        plan: With strategy "tree-packing", "append-only" or "sequence-packing": each micro-batch has whole rows.
        loss_mask: Which tokens carry loss, and their weights, as `espalier.Step` takes it: for all rows of the forest one
            number >= 0 for each token, 0 for no loss. Default: all tokens. A row's first token never carries loss.
        pad_to_multiple_of: Each micro-batch is padded to a multiple of it, on top of the plan's budget: of the ranks of tensor
            parallelism for its sequence parallelism, of `num_chunks` for ChunkedLossWrapper, or the plan's budget, so that all
            have one shape.
        micro_batches: How many are returned: further ones have padding alone, and gradients of zero. Ranks of FSDP have to run
            the same number. Default: those of the plan.

    Returns:
        A list of PackedTrees on the CPU.

    Raises:
        InputError: The plan is one of partition, whose micro-batches read context, or another argument cannot be used.

    Examples:
        >>> import espalier
        >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
        >>> batch, idle = espalier.titan.pack(plan, loss_mask=[[0, 0, 1, 1], [0, 0, 1]], pad_to_multiple_of=8, micro_batches=2)
        >>> batch.labels.tolist(), idle.weights.sum().item()
        ([[-100, -100, 3, 4, 5, -100, -100, -100]], 0.0)
    """
    check_plan(plan)
    if not is_whole(pad_to_multiple_of) or pad_to_multiple_of < 1:
        raise InputError(f"pad_to_multiple_of: expected a whole number above 0, received {pad_to_multiple_of!r}")
    idle = 0 if micro_batches is None else micro_batches - len(plan) if is_whole(micro_batches) else -1
    if idle < 0:
        raise InputError(f"micro_batches: expected a whole number not below {len(plan)}, those of the plan, received "
                         f"{micro_batches!r}")  # fmt: skip
    layouts = [batch.layout() for batch in plan]
    weights = row_weights(loss_mask, layouts)
    return [_pack_layout(layout, weights, pad_to_multiple_of) for layout in layouts] + [_idle(pad_to_multiple_of)] * idle


def cross_entropy(pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | float | None = None, *,
                  weights: torch.Tensor, **others: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """The weighted loss in the form of torchtitan's, to be the `loss_fn` of a ChunkedLossWrapper.

    Args:
        pred: [1, T, vocabulary] logits of `PackedTrees.predictions`, or of a chunk of them.
        labels: int64 [1, T], of which -100 is ignored.
        global_valid_tokens: What the loss is divided by. Default: 1.
        weights: [1, T]: of each label.
        others: Ignored, as torchtitan's losses do.

    Returns:
        The sum of weights times cross-entropy, and no metrics.

    Examples:
        >>> import espalier, torch
        >>> from torchtitan.components.loss import ChunkedLossWrapper        # doctest: +SKIP
        >>> chunked = ChunkedLossWrapper(ChunkedLossWrapper.Config())        # doctest: +SKIP
        >>> chunked.loss_fn = espalier.titan.cross_entropy                   # doctest: +SKIP
        >>> loss, _ = espalier.titan.cross_entropy(torch.zeros(1, 2, 8), torch.tensor([[3, 4]]), 2, weights=torch.ones(1, 2))
        >>> round(loss.item(), 4)
        2.0794
    """
    loss = -(weights * _logprobs(pred, labels)).sum()
    return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


def _logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[1, T] of labels, 0 where they are ignored, by torchtitan where it is installed: it knows how ranks divide vocabularies."""
    try:
        compute = importlib.import_module("torchtitan.components.loss").compute_logprobs
    except (ImportError, AttributeError):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = token_losses(wide.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
        return -losses.view_as(labels)
    logprobs: torch.Tensor = compute(logits, labels)
    return logprobs


def _pack_layout(layout: Layout, weights: list[NDArray[np.float64]], multiple: int) -> PackedTrees:
    padding = Padding.of(np.array([0, layout.num_tokens]), multiple)
    rows = RowTokens.of(layout, padding)
    ids, positions = (padding.spread(values, 0) for values in (layout.input_ids, layout.position_ids))
    before = padding.spread(layout.prev, -1)
    sums = np.bincount(rows.tokens, np.concatenate([weights[row] for row in rows.rows]), len(ids))
    ends = padding.subtree_end(layout)
    return _tensors(ids, positions, ends, before, sums, rows)


def _idle(multiple: int) -> PackedTrees:
    """Padding alone."""
    none = np.zeros(0, np.int64)
    zeros = np.zeros(multiple, np.int64)
    return _tensors(zeros, zeros, zeros, zeros - 1, zeros, RowTokens(none, np.zeros(1, np.int64), none, zeros - 1))


def _tensors(ids: NDArray[np.int64], positions: NDArray[np.int64], ends: NDArray[np.int64], before: NDArray[np.int64],
             sums: NDArray[Any], rows: RowTokens) -> PackedTrees:  # fmt: skip
    tokens = np.arange(len(ids))
    return PackedTrees(
        tokens=torch.tensor(ids)[None], positions=torch.tensor(positions)[None],
        subtree_end=torch.tensor(np.maximum(ends, tokens + 1)), sources=torch.tensor(np.where(before < 0, tokens, before)),
        labels=torch.tensor(np.where(sums > 0, ids, IGNORED))[None], weights=torch.tensor(sums, dtype=torch.float32)[None],
        rows=torch.tensor(rows.rows), row_offsets=torch.tensor(rows.offsets), row_tokens=torch.tensor(rows.tokens),
        places=torch.tensor(rows.places))  # fmt: skip
