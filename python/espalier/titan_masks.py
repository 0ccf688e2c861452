# SPDX-License-Identifier: Apache-2.0
"""Masks of trees for FlexAttention, and which of them models of torchtitan take."""

import importlib
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from .errors import InputError

_FAR = 2**31  # beyond all positions


def tree_mask(ends: torch.Tensor, positions: torch.Tensor, window: int | None, sizes: tuple[int, int],
              separate_full_blocks: bool) -> BlockMask:  # fmt: skip
    """The mask of PackedTrees.block_mask. ends, positions: int64 [T] each; sizes: of blocks of queries and of keys."""

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        on_path = (key <= query) & (query < ends[key])
        return on_path if window is None else on_path & (positions[query] - positions[key] < window)

    some, full = _blocks(ends, positions, window, *sizes)
    numbers, indices = _listed(some & ~full if separate_full_blocks else some)
    full_numbers, full_indices = _listed(full) if separate_full_blocks else (None, None)
    mask: BlockMask = BlockMask.from_kv_blocks(numbers, indices, full_numbers, full_indices, BLOCK_SIZE=sizes, mask_mod=sees,
                                               seq_lengths=(len(ends), len(ends)))  # fmt: skip
    return mask


def _blocks(ends: torch.Tensor, positions: torch.Tensor, window: int | None, of_queries: int,
            of_keys: int) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Bool [blocks of queries, blocks of keys]: where some queries may see keys, and where all see all."""

    def extremes(values: torch.Tensor, size: int, least: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and largest values of blocks, if what is missing in the last block has `least` and `most`."""
        missing = (0, -len(values) % size)
        return (torch.nn.functional.pad(values, missing, value=least).view(-1, size).amin(1),
                torch.nn.functional.pad(values, missing, value=most).view(-1, size).amax(1))  # fmt: skip

    first_end, last_end = extremes(ends, of_keys, 0, 0)
    query = torch.arange(-(-len(ends) // of_queries), device=ends.device)[:, None] * of_queries
    key = torch.arange(len(first_end), device=ends.device) * of_keys
    some = (key < query + of_queries) & (last_end > query)
    full = (key + of_keys - 1 <= query) & (first_end >= query + of_queries)
    if window is None:
        return some, full
    (first_query, last_query), (first_key, last_key) = (extremes(positions, size, _FAR, -_FAR) for size in (of_queries, of_keys))
    return (some & (first_query[:, None] - last_key < window), full & (last_query[:, None] - first_key < window))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bool [q, k]: int32 [1, 1, q] how many keys' blocks each block of queries has, and [1, 1, q, k] these first."""
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


# How models whose masks are not Decoder's name them, and the windows of their layers.


def _decoder(layers: Any) -> dict[str, int | None]:
    return {"": None}


def _gpt_oss(layers: Any) -> dict[str, int | None]:
    windows = [layer.attention.sliding_window_size for layer in layers if layer.attention.sliding_window_size is not None]
    return {"basic_mask": None, **({"sliding_window_mask": windows[0]} if windows else {})}  # as torchtitan: the first for all


def _muse_glimmer(layers: Any) -> dict[str, int | None]:
    windows = {layer.attention.window_size for layer in layers} - {None}
    return {"global": None, **{f"swa_{window}": window for window in sorted(windows)}}


# By the module that has the model's get_attention_masks.
_KINDS = {"torchtitan.models.common.decoder": _decoder, "torchtitan.models.gpt_oss.model": _gpt_oss,
          "torchtitan.models.muse_glimmer.model": _muse_glimmer}  # fmt: skip


def mask_kinds(model: Any) -> tuple[dict[str, int | None], Any]:
    """The masks that a model of torchtitan takes as {name: window}, "" for a single one, and the size of blocks in its config.

    Raises InputError for a model that trees do not fit."""
    why = _misfit(model)
    if why is not None:
        raise InputError("model: expected a decoder of torchtitan with FlexAttention in all layers and masks of Decoder, "
                         f"gpt_oss or muse_glimmer, received {type(model).__name__}{why}")  # fmt: skip
    layers = model.config.layers
    return _KINDS[type(model).get_attention_masks.__module__](layers), layers[0].attention.inner_attention.block_size


def _misfit(model: Any) -> str | None:
    """What of a model trees do not fit, as a message goes on after its name; None if they do."""
    attention, decoder = (importlib.import_module(f"torchtitan.models.common.{name}") for name in ("attention", "decoder"))
    if not isinstance(model, decoder.Decoder):
        return ""
    if getattr(model, "mtp_layers", None) is not None:
        return " with multi-token prediction, whose next tokens differ by row"
    for layer in model.config.layers:
        kernel = getattr(getattr(layer, "attention", None), "inner_attention", None)
        if not isinstance(kernel, attention.FlexAttention.Config):
            name = "no attention" if kernel is None else type(kernel).__qualname__.split(".")[0]
            return f" with {name} in a layer"
    home = type(model).get_attention_masks.__module__
    return None if home in _KINDS else f" with masks of {home}"
