# SPDX-License-Identifier: Apache-2.0
"""Attention of Transformers' layers over a forest: token j attends to token i iff i <= j < subtree_end[i]."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .. import ops
from ..errors import Unsupported
from .run import TreeRun

NAME = "espalier"  # by which configs ask for it
BACKENDS = ("auto", "espalier", "flex", "sdpa")


def tree_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
                   dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
                   s_aux: Tensor | None = None, softcap: float | None = None, espalier_tree: TreeRun | None = None,
                   **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function named "espalier" of Transformers' AttentionInterface.

    query [1, H, T, D], key and value [1, K, T, D]; s_aux: a sink [H] per head; espalier_tree: the TreeRun. Returns
    ([1, T, H, D], None). Raises Unsupported for what changes the result and is not served."""
    run = espalier_tree
    if run is None:
        raise Unsupported('attn_implementation="espalier": expected a model patched by espalier.hf.patch, received a '
                          "forward without a forest; load it with another one and patch it")  # fmt: skip
    if softcap is not None:
        raise Unsupported(f"softcap: expected none, received {softcap}: attention on trees has no softcap")
    if dropout:
        raise Unsupported(f"dropout: expected 0, received {dropout}: tokens that rows share would share "
                          "what is dropped")  # fmt: skip
    if query.shape[0] != 1 or query.shape[2] != run.num_tokens or key.shape[2] != run.num_tokens:
        raise Unsupported(f"attention: expected queries and keys of the {run.num_tokens} tokens of the forest, "
                          f"received {list(query.shape)} and {list(key.shape)}")  # fmt: skip
    query, key, value = as_autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _BY_BACKEND[run.backend](run, query, key, value, scale, sliding_window or 0, s_aux).contiguous(), None


def resolved(backend: str, device: torch.device) -> str:
    """The backend that "auto" stands for on `device`; any other itself."""
    if backend != "auto":
        return backend
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("espalier::tree_attention", device.type.upper())
    return "espalier" if has_kernel and (device.type != "cuda" or _is_proven(device.index)) else "flex"


@functools.cache
def _is_proven(index: int | None) -> bool:
    """Whether our attention on this GPU is proven. With the compiled trainer, kernels prove themselves there first, which
    takes a minute or so when a build first meets a GPU; without it, nothing is proven."""
    try:
        from ..native_engine import native
    except ImportError:
        return False
    return native.prove_kernels(torch.cuda.current_device() if index is None else index)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the arguments of torch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _by_espalier(run: TreeRun, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int,
                 sinks: Tensor | None) -> Tensor:  # fmt: skip
    def tokens_first(tensor: Tensor) -> Tensor:
        return tensor.squeeze(0).transpose(0, 1)

    key, value = tokens_first(key), tokens_first(value)
    run.leave(key=key, value=value)
    device = query.device
    out = ops.tree_attention(
        tokens_first(query), key, value, run.subtree_end.to(device), softmax_scale=scale, sliding_window=window,
        position=run.position.to(device) if window else None, sinks=sinks, **run.attention_context())  # fmt: skip
    return out.unsqueeze(0)


def _visible(run: TreeRun, window: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The mask as a function of query and key numbers, tensors that broadcast."""
    ends, position = run.subtree_end, run.position

    def visible(query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen & (position[query] - position[key] < window) if window else seen

    return visible


def _by_sdpa(run: TreeRun, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int,
             sinks: Tensor | None) -> Tensor:  # fmt: skip
    if sinks is not None:
        raise Unsupported('backend="sdpa": expected a model without sinks, received s_aux; take backend="espalier" or '
                          '"flex"')  # fmt: skip
    mask = run.masks.get(("sdpa", window))
    if mask is None:
        number = torch.arange(run.num_tokens, device=run.subtree_end.device)
        mask = run.masks["sdpa", window] = _visible(run, window)(number[:, None], number[None, :])
    mask = mask.to(query.device)
    is_grouped = key.shape[1] != query.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def _by_flex(run: TreeRun, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int,
             sinks: Tensor | None) -> Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    if query.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise Unsupported('backend="flex": expected a GPU, received gradients on a CPU, for which FlexAttention has '
                          'no backward; take backend="espalier" or "sdpa"')  # fmt: skip
    mask = run.masks.get(("flex", window))
    if mask is None:
        visible, size = _visible(run, window), run.num_tokens
        mask = run.masks["flex", window] = create_block_mask(
            lambda _batch, _head, i, j: visible(i, j), None, None, size, size, device=query.device)  # fmt: skip
    out: Tensor
    out, aux = _flex_attention(query.device.type)(query, key, value, block_mask=mask, scale=scale, enable_gqa=True,
                                                  return_aux=AuxRequest(lse=True))  # fmt: skip
    if sinks is not None:  # a key without a value takes its share of the weights
        out = out * torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None]).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2)


@functools.cache
def _flex_attention(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


_BY_BACKEND = {"espalier": _by_espalier, "flex": _by_flex, "sdpa": _by_sdpa}
AttentionInterface.register(NAME, tree_attention)
