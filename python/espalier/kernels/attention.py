# SPDX-License-Identifier: Apache-2.0
"""tree_attention by cudnn.flex_attention, of NVIDIA's cudnn-frontend.

It takes the keys that a token sees as intervals, which a forest in preorder has few of (`Layout.visible_intervals`).
Importing espalier.ops registers it where it is installed, as espalier::tree_attention_library, which the operator
tree_attention finds. What it does not serve, the next implementation computes.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import verdicts
from .waves import kept_of

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
OURS = (64, 128, 256)  # sizes of heads that our own kernels serve (kernels/cuda/attention, "ampere")
MOST_BOUNDS = 33  # 16 intervals, as far as NVIDIA measures its kernels
_DTYPES = (torch.float16, torch.bfloat16)


class Visibility(NamedTuple):
    """What says which keys a token sees, as tree_attention takes it."""

    subtree_end: Tensor
    context_blocks: Tensor
    sliding_window: int
    position: Tensor | None
    context_positions: Tensor | None


class _Mask:
    """The bounds [1, F, T] of a forest on its device, and the library's plans made from them, by the form of q, k and v."""

    def __init__(self, seen: Visibility) -> None:
        from ..native import core  # espalier.ops alone does without

        blocks = seen.context_blocks
        found = core.visible_intervals(
            seen.subtree_end.cpu().contiguous().numpy(),
            None if seen.position is None else seen.position.cpu().contiguous().numpy(),
            sliding_window=seen.sliding_window,
            context_blocks=blocks.contiguous().numpy() if len(blocks) else None,
            context_positions=_positions(seen) if len(blocks) else None)  # fmt: skip
        self.bounds = torch.from_numpy(found).unsqueeze(0).to(seen.subtree_end.device)
        self.plans: dict[Any, Any] = {}

    def plan(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        form = query.dtype, query.shape, key.shape, value.shape
        if form not in self.plans:
            self.plans[form] = _cudnn().create_mask_plan(self.bounds, query, key, value, build_backward=True)
        return self.plans[form]


def _positions(seen: Visibility) -> np.ndarray[Any, np.dtype[np.int64]]:
    if seen.context_positions is None:  # needed by windows alone
        return np.zeros(len(seen.context_blocks), np.int64)
    return seen.context_positions.contiguous().numpy()


def _mask_of(seen: Visibility) -> _Mask:
    """Kept by subtree_end, which the layers of a micro-batch share."""
    key = seen.sliding_window, seen.context_blocks.numpy().tobytes(), _positions(seen).tobytes()
    return kept_of(seen.subtree_end, key, lambda: _Mask(seen))


@functools.cache
def _cudnn() -> Any:
    import cudnn.flex_attention as library

    return library


@functools.cache
def is_served(device: int) -> bool:
    """Whether the library runs on the CUDA device of this index."""
    return torch.cuda.get_device_capability(device) in CAPABILITIES


def _served(query: Tensor, softcap: float, seen: Visibility, sinks: Tensor | None = None) -> _Mask | None:
    """The mask, where the library computes this; None where it does not. A forest of too many intervals is told once.

    Keys and values are of one width here. A backward pass does not know of sinks, which it needs none of: it may go elsewhere
    than the forward pass, as gradients depend on `out` and `lse` alone."""
    if softcap or not len(query) or query.shape[2] % 8 or (query.shape[2] > 128 and query.shape[2] != 256):
        return None
    if query.device.type != "cpu" and query.dtype not in _DTYPES:
        return None
    is_ours = not seen.sliding_window and sinks is None and query.shape[2] in OURS  # whether our kernels compute it as well
    if is_ours and _is_left_to_ours(query.device):
        return None
    mask = _mask_of(seen)
    if mask.bounds.shape[1] > MOST_BOUNDS:
        _warn_of_many_intervals(MOST_BOUNDS // 2)
        return None
    return mask


def _is_left_to_ours(device: torch.device) -> bool:
    """Whether our own kernels were faster when both were timed on this GPU, and nothing names the library."""
    if device.type != "cuda" or os.environ.get("ESPALIER_ATTENTION"):
        return False
    return verdicts.is_ours_faster(device.index)


@functools.cache
def _warn_of_many_intervals(most: int) -> None:
    warnings.warn(f"espalier: a forest needs more than {most} intervals of keys, so cudnn.flex_attention does not compute its "
                  "attention; build it with espalier.build(rows, most_leaves_first=True)", stacklevel=2)  # fmt: skip


def _gathered(own: Tensor, context: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """[1, C + T, K, D]: the keys, or values, of the context's blocks one after another, then the tokens'."""
    parts = [context[segment][begin:end] for segment, begin, end, _, _ in blocks.tolist()]
    return torch.cat([*parts, own]).unsqueeze(0)


def _scattered(gradient: Tensor, own: Tensor, context: Sequence[Tensor], blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradients of `own` and of the context's segments, from those of what _gathered has made."""
    gradient, at = gradient.squeeze(0), 0
    segments = [torch.zeros_like(segment) for segment in context]
    for segment, begin, end, _, _ in blocks.tolist():
        segments[segment][begin:end] = gradient[at:at + end - begin]
        at += end - begin
    return gradient[at:].contiguous(), segments


@torch.no_grad()
def tree_attention(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, softmax_scale: float, context_k: Sequence[Tensor],
                   context_v: Sequence[Tensor], context_blocks: Tensor, sliding_window: int = 0,
                   position: Tensor | None = None, context_positions: Tensor | None = None,
                   sinks: Tensor | None = None, softcap: float = 0.0) -> list[Tensor]:  # fmt: skip
    """[out [T, H, D], lse [H, T]] of espalier::tree_attention; empty where the library does not serve."""
    mask = _served(q, softcap, Visibility(subtree_end, context_blocks, sliding_window, position, context_positions), sinks)
    if mask is None:
        return []
    query = q.unsqueeze(0).contiguous()
    key, value = _gathered(k, context_k, context_blocks), _gathered(v, context_v, context_blocks)
    out, lse = _cudnn().flex_attn_func(query, key, value, mask_plan=mask.plan(query, key, value),
                                       softmax_scale=softmax_scale, return_lse=True)  # fmt: skip
    out, lse = out.squeeze(0).contiguous(), lse.squeeze(0)
    if sinks is not None:  # a key without a value takes its share of the weights
        sink = sinks.to(lse.dtype).unsqueeze(1)
        share = torch.sigmoid(lse - sink)
        out, lse = (out * share.t().unsqueeze(-1)).to(q.dtype), torch.logaddexp(lse, sink)
    return [out, lse]


@torch.no_grad()
def tree_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, out: Tensor, lse: Tensor,
                            softmax_scale: float, context_k: Sequence[Tensor], context_v: Sequence[Tensor],
                            context_blocks: Tensor, sliding_window: int = 0, position: Tensor | None = None,
                            context_positions: Tensor | None = None, softcap: float = 0.0) -> list[Tensor]:  # fmt: skip
    """[grad_q, grad_k, grad_v, *grad_context_k, *grad_context_v] of espalier::tree_attention_backward; empty where the
    library does not serve. With sinks, `out` and `lse` have them; the weights exp(S - lse) and the sum of grad_out * out are
    right as they are."""
    mask = _served(q, softcap, Visibility(subtree_end, context_blocks, sliding_window, position, context_positions))
    if mask is None:
        return []
    query = q.unsqueeze(0).contiguous()
    key, value = _gathered(k, context_k, context_blocks), _gathered(v, context_v, context_blocks)
    from cudnn.flex_attention.execution import _flex_attention_backward

    grad_q, grad_k, grad_v = _flex_attention_backward(
        query, key, value, out.unsqueeze(0).contiguous(), grad_out.unsqueeze(0).contiguous(), lse.unsqueeze(0).contiguous(),
        mask_plan=mask.plan(query, key, value), softmax_scale=softmax_scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), dlse_tensor=None)  # fmt: skip
    own_k, segments_k = _scattered(grad_k, k, context_k, context_blocks)
    own_v, segments_v = _scattered(grad_v, v, context_v, context_blocks)
    return [grad_q.squeeze(0).contiguous(), own_k, own_v, *segments_k, *segments_v]


def installed() -> str:
    """"cudnn-frontend VERSION" where a version with the interface used here is installed, else ""."""
    version = verdicts.version_of("nvidia-cudnn-frontend")
    is_known = version.split(".")[:2] == ["1", "32"] and importlib.util.find_spec("cutlass") is not None
    return f"cudnn-frontend {version}" if is_known else ""


def register(name: str, device: str = "CUDA") -> torch.library.Library:
    """Lets the operator tree_attention find the functions above, on CUDA devices that the library serves, or in tests on the
    "CPU", for as long as the result lives."""
    library = torch.library.Library("espalier", "IMPL")
    library.impl("tree_attention_library", tree_attention, device)
    library.impl("tree_attention_library_backward", tree_attention_backward, device)

    def name_on(index: int) -> str:
        is_there = index == -1 if device == "CPU" else index >= 0 and is_served(index)
        return name if is_there else ""

    library.impl("tree_attention_library_name", name_on, "CompositeExplicitAutograd")
    return library
